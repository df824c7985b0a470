"""Log-probabilities of a few rows, computed again: proof of what fingerprints of weights do not show.

The weights of a worker may be right and its tokens wrong: if a program rounds too much, if caches are those of older
weights or of another row, if an adapter is left out. So the trainer computes some rows of every logical worker and
version again, with the weights of that version and the programs of scoring.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
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
ROUNDING = 2.0  # times as far from the exact pass as the program of scoring, on the same tokens
SPREAD = 6.0  # standard deviations of what is rounded, too: two programs need not round alike
LEAST = 2e-4  # nats by which a token's log-probability may differ in any dtype
FEW = 64  # tokens of a worker in a verdict, at least: of fewer, one alone may be this far off by rounding
KNOWN = 256  # tokens of all workers after which the spread of rounding is known, and not before
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
    """Sums over tokens of how far log-probabilities are from those of the exact pass, in nats."""

    tokens: int = 0
    distance: float = 0.0  # of what workers recorded
    rounding: float = 0.0  # of the pass in the compute dtype
    squares: float = 0.0  # of the same pass, squared
    versions: tuple[int, ...] = ()  # of the weights that drew them

    def __add__(self, other: "Compared") -> "Compared":
        both = (getattr(self, own.name) + getattr(other, own.name) for own in fields(self)[:-1])
        return Compared(*both, versions=tuple(sorted({*self.versions, *other.versions})))


class Recompute:
    """Compares the log-probabilities that workers recorded with those that the trainer computes.

    A version is compared in N places: place n has a row of worker n modulo `workers`. The computation is done in the
    compute dtype and in float32. How far the two are from each other is the measure of what rounding does: to the same
    tokens, since it grows with how peaked a distribution is, and by its spread over all tokens so far.

    workers: whose rows are compared at a time, at most; they have consecutive numbers.
    options: of the passes that score, with the temperature of the rollouts. length: of a prompt and a response.
    keeps: whether rows go on with the keys and values of older weights.
    warn: is given a sentence about the first alarm of each worker, and the run goes on; None: an alarm ends the run.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        options: ForwardOptions,
        *,
        workers: int,
        length: int,
        keeps: bool,
        warn: Callable[[str], None] | None = None,
    ):
        self._config, self._mesh, self._workers, self._length, self._keeps = config, mesh, workers, length, keeps
        self._dtype, groups = options.dtype, mesh.size // mesh.shape[TENSOR]
        self.places = math.ceil(ROWS * workers / groups) * groups
        scored = make_mixture(config, mesh, options)
        # Neither cuDNN nor splash computes in float32.
        exact = replace(options, dtype=jnp.float32, attention="xla", implementation=None)
        exactly = make_mixture(config, mesh, exact, by_head=True)  # XLA stores [T, T] scores
        same = options.dtype == jnp.float32 and mesh.devices.flat[0].platform == "cpu"  # no TF32 there
        self._known = 0 if same else KNOWN

        @jax.jit
        def both(weights: Weights, tokens: Any, since: Any, caches: Any) -> Any:
            logprobs, now = scored(*weights, tokens, since, caches)
            if same:
                return logprobs, logprobs, now
            with jax.default_matmul_precision("highest"):
                exact, _ = exactly(*weights, tokens, since, caches)
            return logprobs, exact, now

        self._both = both
        self._warn = warn
        self.alarms: dict[int, int] | None = None if warn is None else {}  # of each worker, so far
        self._all = Compared()  # so far
        self._pools = dict[int, Compared]()  # of a worker: what no verdict about enough tokens was given on

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

        And the rows that go on from here, for the next version. Where a worker's tokens are further from the exact pass
        than rounding explains, raises RunFailure or warns.
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
        owns = dict[int, Compared]()
        row, since = np.full_like(going, NONE), np.zeros_like(since)
        for place, own in chosen.items():
            drawn = np.flatnonzero(own.versions == version)
            at = place, len(own.prompt) + drawn
            recorded, scored = np.abs(np.stack([own.logprobs[drawn], logprobs[at]]).astype(np.float64) - exact[at])
            self._finite(version, own.worker, recorded, scored)
            sums = float(recorded.sum()), float(scored.sum()), float((scored**2).sum())
            owns[own.worker] = owns.get(own.worker, Compared()) + Compared(len(drawn), *sums, (version,))
            if self._keeps and own.goes_on:  # its newest token is not fed yet
                row[place], since[place] = own.number, len(own.prompt) + len(own.tokens) - 1
        total = sum(owns.values(), Compared())
        self._all += total
        for worker, own in owns.items():
            pool = self._pools.get(worker, Compared()) + own
            if far := [tokens for tokens in (own, pool) if tokens.distance > self._most(tokens)]:
                self._alarm(worker, far[0])
            judged = pool.tokens >= FEW and self._most(pool) < math.inf
            self._pools[worker] = Compared() if judged else pool
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
            own = [row for row in drawn if row.worker % self._workers == worker and row.number not in taken]
            if self._keeps:
                own = [row for row in own if row.versions[0] == version]  # of the others older keys are not there
            # Half of the places prefer rows in the middle of which weights change: there a cache may be wrong.
            crosses = [nth % 2 == 0 and (row.goes_on if self._keeps else row.versions[0] != version) for row in own]
            ranked = sorted(zip(own, crosses, strict=True), key=lambda pair: (not pair[1], order[pair[0].number]))
            if ranked:
                chosen[place] = ranked[0][0]
        return chosen

    def _finite(
        self, version: int, worker: int, recorded: Float[np.ndarray, "n"], scored: Float[np.ndarray, "n"]
    ) -> None:
        """Raises RunFailure where distances are not finite: the trainer's own, in `scored`, are no worker's fault."""
        if not np.isfinite(scored).all():
            raise RunFailure(
                f"the trainer's own log-probabilities under the weights of version {version} are not finite: its "
                "weights or its programs are at fault, and no worker; nothing was learned from what they drew"
            )
        if not np.isfinite(recorded).all():
            raise RunFailure(
                f"logical worker {worker} does not draw as the weights of version {version} do: of {len(recorded)} "
                f"log-probabilities {(~np.isfinite(recorded)).sum()} are not finite; nothing was learned from them"
            )

    def _most(self, own: Compared) -> float:
        """How far these tokens may be apart by rounding: any distance until its spread is known."""
        if self._all.tokens < self._known:
            return math.inf
        spread = math.sqrt(self._all.squares / max(1, self._all.tokens) * max(own.tokens, FEW))
        return ROUNDING * own.rounding + SPREAD * spread + LEAST * own.tokens

    def _alarm(self, worker: int, own: Compared) -> None:
        first, last = own.versions[0], own.versions[-1]
        sentence = (
            f"logical worker {worker} does not draw as the weights of "
            f"{f'version {first}' if first == last else f'versions {first} to {last}'} do: the log-probabilities of "
            f"{own.tokens} tokens are off by {own.distance / own.tokens:.2g} on average, and rounding explains "
            f"{self._most(own) / own.tokens:.2g}"
        )
        if self._warn is None or self.alarms is None:
            raise RunFailure(f"{sentence}; nothing was learned from the newest of them")
        if worker not in self.alarms:
            self._warn(f"{sentence}; the run learns from them all the same, and async/logprob_alarms counts them")
        self.alarms[worker] = self.alarms.get(worker, 0) + 1

    def _placed(self, tracked: Tracked) -> Tracked:
        row, since = to_devices((tracked.row, tracked.since), NamedSharding(self._mesh, P()))
        return replace(tracked, row=row, since=since)
