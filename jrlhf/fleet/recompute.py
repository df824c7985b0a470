"""Log-probabilities of a few rows, computed again: proof of what fingerprints of weights do not show.

The weights of a worker may be right and its tokens wrong: if a program rounds too much, if caches are those of older
weights or of another row, if an adapter is left out. So the trainer computes some rows of every logical worker and
version again, with the weights of that version and the programs of scoring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jrlhf.errors import RunFailure
from jrlhf.meshes import GENERATE, to_devices, to_host
from jrlhf.models import ForwardOptions, ModelConfig
from jrlhf.models.collectives import TENSOR
from jrlhf.models.generation.continuous import Weights
from jrlhf.models.generation.mixture import CACHES, make_mixture

ROWS = 2  # of each logical worker and version: one that goes on from older weights, where there is one, and one more
ROUNDING = 6.0  # times as far from the exact pass as the program of scoring a token may be on average
LEAST = 2e-4  # nats by which a token's log-probability may differ in any dtype
FEW = 8  # the rounding of fewer tokens is no mean: so many are allowed for
NONE = -1  # a place whose row does not go on


class Row(NamedTuple):
    """The n tokens that a row has drawn so far."""

    number: int
    worker: int  # that drew them
    prompt: Int[np.ndarray, "p"]
    tokens: Int[np.ndarray, "n"]
    logprobs: Float[np.ndarray, "n"]
    versions: Int[np.ndarray, "n"]
    goes_on: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tracked:
    """The rows of the N places that go on from the keys and values of older weights."""

    row: Any  # [N]: its number, or NONE
    since: Any  # [N]: positions that older weights were fed with
    caches: Any  # keys and values of each layer, of these positions


@dataclass(frozen=True)
class Compared:
    """A number of tokens, and the sum of the distances between two log-probabilities of each, in nats."""

    tokens: int = 0
    distance: float = 0.0

    @classmethod
    def of(cls, differences: Float[np.ndarray, "n"]) -> "Compared":
        return cls(len(differences), float(np.abs(differences, dtype=np.float64).sum()))

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(self.tokens + other.tokens, self.distance + other.distance)


class Recompute:
    """Compares the log-probabilities that workers recorded with those that the trainer computes.

    A version is compared in N places: place n has a row of worker n modulo `workers`. The computation is done in the
    compute dtype and in float32. How far the two are from each other on average is the measure of what rounding does.

    options: of the passes that score, with the temperature of the rollouts. length: of a prompt and a response.
    keeps: whether rows go on with the keys and values of older weights.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, options: ForwardOptions, *, workers: int, length: int, keeps: bool
    ):
        self._config, self._mesh, self._workers, self._length, self._keeps = config, mesh, workers, length, keeps
        self._dtype, groups = options.dtype, mesh.size // mesh.shape[TENSOR]
        self.places = math.ceil(ROWS * workers / groups) * groups
        scored = make_mixture(config, mesh, options)
        # Neither cuDNN nor splash computes in float32.
        exactly = make_mixture(config, mesh, replace(options, dtype=jnp.float32, attention="xla", implementation=None))
        same = options.dtype == jnp.float32 and mesh.devices.flat[0].platform == "cpu"  # no TF32 there

        @jax.jit
        def both(weights: Weights, tokens: Any, since: Any, caches: Any) -> Any:
            logprobs, now = scored(*weights, tokens, since, caches)
            if same:
                return logprobs, logprobs, now
            with jax.default_matmul_precision("highest"):
                exact, _ = exactly(*weights, tokens, since, caches)
            return logprobs, exact, now

        self._both = both
        self._rounding = Compared()  # between the two passes, so far

    def fresh(self) -> Tracked:
        """No row that goes on."""
        nothing, caches = np.full(self.places, NONE, np.int32), None
        if self._keeps:
            config, heads = self._config, max(self._config.kv_heads, self._mesh.shape[TENSOR])
            shape = self.places, self._length, heads, config.head_dim
            blank = jax.jit(lambda: jnp.zeros(shape, self._dtype), out_shardings=NamedSharding(self._mesh, CACHES))
            caches = [(blank(), blank()) for _ in range(config.layers)]
        return self._placed(Tracked(nothing, np.zeros_like(nothing), caches))

    def compare(
        self, version: int, weights: Weights, rows: Sequence[Row], tracked: Tracked
    ) -> tuple[Compared, Tracked]:
        """Compares the tokens that a version drew in some of these rows; returns how far they are apart.

        And the rows that go on from here, for the next version. Raises RunFailure where a worker's tokens are further
        from the exact pass than rounding explains.
        """
        going, since = to_host((tracked.row, tracked.since))
        chosen = self._chosen(version, rows, going)
        tokens, starts = np.zeros((self.places, self._length), np.int32), np.zeros_like(since)
        for place, row in chosen.items():
            whole = np.concatenate([row.prompt, row.tokens])
            tokens[place, : len(whole)] = whole
            starts[place] = since[place] if row.number == going[place] else 0
        on_mesh = to_devices((tokens, starts), NamedSharding(self._mesh, GENERATE.batch_spec()))
        logprobs, exact, caches = self._both(weights, *on_mesh, tracked.caches)
        logprobs, exact = to_host((logprobs, exact))
        distances = dict[int, list[Float[np.ndarray, "n"]]]()
        row, since = np.full_like(going, NONE), np.zeros_like(since)
        for place, own in chosen.items():
            drawn = np.flatnonzero(own.versions == version)
            at = place, len(own.prompt) + drawn
            self._rounding += Compared.of(logprobs[at] - exact[at])
            distances.setdefault(own.worker, []).append(own.logprobs[drawn] - exact[at])
            if self._keeps and own.goes_on:  # its newest token is not fed yet
                row[place], since[place] = own.number, len(own.prompt) + len(own.tokens) - 1
        total = Compared()
        for worker, differences in distances.items():
            own = Compared.of(np.concatenate(differences))
            self._judge(version, worker, own)
            total += own
        return total, self._placed(Tracked(row, since, caches))

    def _chosen(self, version: int, rows: Sequence[Row], going: Sequence[int]) -> dict[int, Row]:
        """Place -> its row. The choice depends on the version and on the numbers of the rows alone."""
        drawn = [row for row in rows if version in row.versions]
        ranks = np.random.default_rng(version).permutation(len(drawn))
        order = {row.number: rank for row, rank in zip(drawn, ranks, strict=True)}
        number = {row.number: row for row in rows if row.goes_on or row.number in order}
        chosen = {place: number[own] for place, own in enumerate(going) if own in number}
        for place in set(range(self.places)) - set(chosen):
            worker, nth = place % self._workers, place // self._workers
            taken = {row.number for row in chosen.values()}
            own = [row for row in drawn if row.worker == worker and row.number not in taken]
            if self._keeps:
                own = [row for row in own if row.versions[0] == version]  # of the others older keys are not there
            # Half of the places prefer rows in the middle of which weights change: there a cache may be wrong.
            crosses = [nth % 2 == 0 and (row.goes_on if self._keeps else row.versions[0] != version) for row in own]
            ranked = sorted(zip(own, crosses, strict=True), key=lambda pair: (not pair[1], order[pair[0].number]))
            if ranked:
                chosen[place] = ranked[0][0]
        return chosen

    def _judge(self, version: int, worker: int, own: Compared) -> None:
        rounding = self._rounding.distance / max(1, self._rounding.tokens)
        most = ROUNDING * rounding * max(own.tokens, FEW) + LEAST * own.tokens
        if not own.distance <= most:  # NaN, too
            raise RunFailure(
                f"logical worker {worker} does not draw as the weights of version {version} do: the log-probabilities "
                f"of {own.tokens} tokens are off by {own.distance / own.tokens:.2g} on average, and rounding explains "
                f"{most / own.tokens:.2g}; nothing was learned from them"
            )

    def _placed(self, tracked: Tracked) -> Tracked:
        row, since = to_devices((tracked.row, tracked.since), NamedSharding(self._mesh, P()))
        return replace(tracked, row=row, since=since)
