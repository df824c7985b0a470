"""`Recompute`: checks the log-probabilities of a few rows, to find faults that fingerprints of weights do not show.

A worker with the right weights may draw wrong tokens: if a program rounds too much, if caches are those of older
weights or of another row, or if an adapter is left out. So the trainer recomputes some rows of every logical worker
and version, with the weights of that version and the scoring programs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from jrlhf.errors import RunFailure
from jrlhf.meshes.layout import GENERATE
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.models.collectives import TENSOR
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.generation.continuous import ToHosts, Weights
from jrlhf.models.generation.mixture import CACHES, make_mixture
from jrlhf.models.generation.redraws import ROUNDING, Redraws
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.options import ForwardOptions

ROWS = 2  # rows compared per logical worker and version: if possible one that continues from older weights, and another
# The threshold's term 1 is `ROUNDING` times the distance of the scoring pass from the exact pass on the same tokens.
SPREAD = 6.0  # term 2: standard deviations of the rounding, because two programs do not round alike
LEAST = 2e-4  # term 3: nats per token, in any dtype
FEW = 64  # minimum tokens of a worker for a verdict: with fewer, rounding of one token may reach the threshold
ENOUGH = 256  # tokens of all workers that are needed to estimate the spread of rounding
REDRAWN = 16  # tokens of a row and version that are drawn again
NONE = -1  # marks a place without a tracked row


class Row(NamedTuple):
    """The n tokens that a row has drawn so far."""

    number: int
    worker: int  # the logical worker that drew them
    prompt: Int[np.ndarray, "p"]
    tokens: Int[np.ndarray, "n"]
    logprobs: Float[np.ndarray, "n"]
    versions: Int[np.ndarray, "n"]
    goes_on: bool
    key: np.ndarray  # data of its PRNG key

    @property
    def length(self) -> int:
        """Tokens of the prompt and the response so far."""
        return len(self.prompt) + len(self.tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tracked:
    """The rows of the N places that continue with keys and values of older weights."""

    row: Any  # [N]: number of the row, or NONE
    since: Any  # [N]: number of positions whose keys and values come from older weights
    caches: Any  # keys and values of each layer at these positions


@dataclass(frozen=True)
class Compared:
    """Sums over tokens of the distances of log-probabilities from the exact (float32) pass, in nats."""

    tokens: int = 0
    distance: float = 0.0  # distances of the recorded log-probabilities
    rounding: float = 0.0  # distances of the scoring pass in the compute dtype
    squares: float = 0.0  # squared distances of the same pass, as a float32, as a checkpoint holds it
    versions: tuple[int, ...] = ()  # versions of the weights that drew the tokens

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(
            self.tokens + other.tokens,
            self.distance + other.distance,
            self.rounding + other.rounding,
            float(np.float32(self.squares + other.squares)),
            tuple(sorted({*self.versions, *other.versions})),
        )


class Recompute:
    """Compares the log-probabilities that workers recorded with those that the trainer computes.

    A version is compared in N places: place n has a row of worker n modulo `workers`. The trainer computes in the
    compute dtype and in float32; the distance of these two passes measures rounding. It is measured on the same tokens,
    because rounding grows with the peakedness of a distribution, and its spread over all tokens so far.

    workers: maximum number of workers in one comparison, with consecutive numbers.
    options: of the scoring passes, with the temperature of rollouts. sampling: of rollouts.
    length: maximum of prompt and response together.
    keeps: whether rows continue with the keys and values of older weights.
    compares: False if a run compares nothing. Its states then have no tracked rows.
    warn: called with a sentence at the first alarm of each worker, and the run goes on; None: an alarm ends the run.
    read: copies arrays of `mesh` to the host, in every process.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        options: ForwardOptions,
        *,
        sampling: SamplingConfig,
        workers: int,
        length: int,
        keeps: bool,
        compares: bool = True,
        warn: Callable[[str], None] | None = None,
        read: ToHosts = to_host,
    ):
        self._config, self._mesh, self._workers, self._length, self._keeps = config, mesh, workers, length, keeps
        self.compares = compares
        self._read, self._dtype, groups = read, options.dtype, mesh.size // mesh.shape[TENSOR]
        self.places = math.ceil(ROWS * workers / groups) * groups
        self._stops = sampling.stop_ids
        # Neither cuDNN nor splash computes in float32.
        exact = replace(options, dtype=jnp.float32, attention="xla", implementation=None)
        same = options.dtype == jnp.float32 and mesh.devices.flat[0].platform == "cpu"  # no TF32 there
        self._enough, self._epsilon = 0 if same else ENOUGH, float(jnp.finfo(options.dtype).eps)

        scored = make_mixture(config, mesh, options, sampling=sampling if same else None)
        exactly = make_mixture(config, mesh, exact, by_head=True, sampling=sampling)  # XLA stores [T, T] scores

        @jax.jit
        def both(weights: Weights, tokens: Any, since: Any, caches: Any, redraws: Redraws) -> Any:
            logprobs, now, redrawn = scored(*weights, tokens, since, caches, redraws)
            if same:
                return logprobs, logprobs, redrawn, now
            with jax.default_matmul_precision("highest"):
                exact, _, differs = exactly(*weights, tokens, since, caches, redraws._replace(rounded=redrawn))
            return logprobs, exact, differs, now

        self._both = both
        self._warn = warn
        self.alarms: dict[int, int] | None = None if warn is None else {}  # worker -> number of its alarms
        self._all = Compared()  # all tokens so far
        self._pools = dict[int, Compared]()  # worker -> its tokens since the last verdict on enough of them

    @property
    def calibration(self) -> tuple[np.int32, np.float32]:
        """What is known of rounding: the number of all tokens so far, and the sum of their squared rounding."""
        return np.int32(min(self._all.tokens, np.iinfo(np.int32).max)), np.float32(self._all.squares)

    def calibrate(self, tokens: int, squares: float) -> None:
        """Continues from the `calibration` of a state."""
        self._all = Compared(int(tokens), squares=float(squares))

    def fresh(self) -> Tracked:
        """Returns a `Tracked` without rows."""
        caches = None
        if self._keeps:
            config, heads = self._config, max(self._config.kv_heads, self._mesh.shape[TENSOR])
            shape = self.places, self._length, heads, config.head_dim
            blank = jax.jit(lambda: jnp.zeros(shape, self._dtype), out_shardings=NamedSharding(self._mesh, CACHES))
            caches = [(blank(), blank()) for _ in range(config.layers)]
        return self._going_on({}, caches)

    def compare(
        self, version: int, weights: Weights, rows: Sequence[Row], tracked: Tracked
    ) -> tuple[Compared, Tracked]:
        """Compares the tokens that a version drew in some of these rows.

        Returns the distances, and the rows that continue, for the next version. If a worker's tokens are further from
        the exact pass than rounding explains, it raises RunFailure or warns.
        """
        going, since = self._read((tracked.row, tracked.since))
        chosen = self._chosen(version, rows, going)
        tokens, starts = np.zeros((self.places, self._length), np.int32), np.zeros_like(since)
        for place, row in chosen.items():
            tokens[place, : row.length] = np.concatenate([row.prompt, row.tokens])
            starts[place] = since[place] if row.number == going[place] else 0
        by_row, whole = (NamedSharding(self._mesh, spec) for spec in (GENERATE.batch_spec(), P()))
        host, most = self._redraws(version, chosen), np.float32(self._most(Compared(FEW)))
        *on_mesh, keys, lengths, at = to_devices((tokens, starts, *host), by_row)
        redraws = Redraws(keys, lengths, at, to_devices(most, whole))
        *passes, caches = self._both(weights, *on_mesh, tracked.caches, redraws)
        scored, exact, differs = self._read(passes)
        by_worker = dict[int, Compared]()
        for place, row in chosen.items():
            distances = self._distances(version, row, scored[place], exact[place])
            by_worker[row.worker] = by_worker.get(row.worker, Compared()) + distances
        self._judge(by_worker)
        self._judge_draws(version, chosen, differs & (host[2] > 0))
        return sum(by_worker.values(), Compared()), self._going_on(chosen, caches)

    def _distances(
        self, version: int, row: Row, scored: Float[np.ndarray, "length"], exact: Float[np.ndarray, "length"]
    ) -> Compared:
        """Returns the distances of the tokens that a version drew in a row. scored, exact: by both passes."""
        drawn = np.flatnonzero(row.versions == version)
        at = len(row.prompt) + drawn
        logprobs = np.stack([row.logprobs[drawn], scored[at]]).astype(np.float64)
        recorded, rounding = np.abs(logprobs - exact[at])
        self._finite(version, row.worker, recorded, rounding)
        sums = float(recorded.sum()), float(rounding.sum()), float((rounding**2).sum())
        return Compared(len(drawn), *sums, (version,))

    def _redraws(self, version: int, chosen: Mapping[int, Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the first fields of `Redraws`: up to `REDRAWN` tokens that a version drew in each row; 0 if none."""
        blank: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        keys = np.zeros((self.places, *blank.shape), blank.dtype)
        lengths, at = np.zeros(self.places, np.int32), np.zeros((self.places, REDRAWN), np.int32)
        for place, row in chosen.items():
            keys[place], lengths[place] = row.key, len(row.prompt)
            drawn = len(row.prompt) + np.flatnonzero(row.versions == version)
            some = np.random.default_rng((version, row.number)).permutation(drawn)[:REDRAWN]
            at[place, : len(some)] = some
        return keys, lengths, at

    def _judge_draws(self, version: int, chosen: Mapping[int, Row], others: Bool[np.ndarray, "places K"]) -> None:
        """Raises an alarm for each row whose tokens are not those that its key and the settings of sampling draw.

        others: whether the token drawn again differs, beyond rounding.
        """
        for place, row in chosen.items():
            stopped, wrong = np.isin(row.tokens[:-1], self._stops).any(), others[place].sum()
            if stopped or wrong:
                reason = "goes on after a stop token" if stopped else f"has {wrong} tokens that differ when drawn again"
                self.refuse(
                    f"logical worker {row.worker} does not draw as the weights of version {version} and the settings "
                    f"of sampling do: row {row.number} {reason}",
                    row.worker,
                )

    def _judge(self, by_worker: Mapping[int, Compared]) -> None:
        """Adds new distances to those so far, and raises an alarm for each worker that is too far off."""
        self._all += sum(by_worker.values(), Compared())
        for worker, own in by_worker.items():
            pool = self._pools.get(worker, Compared()) + own
            if far := [tokens for tokens in (own, pool) if tokens.distance > self._most(tokens)]:
                self._alarm(worker, far[0])
            judged = pool.tokens >= FEW and self._all.tokens >= self._enough
            self._pools[worker] = Compared() if judged else pool

    def _going_on(self, chosen: Mapping[int, Row], caches: Any) -> Tracked:
        """Returns the rows that continue, with the keys and values of these weights. chosen: place -> its row."""
        number, since = np.full(self.places, NONE, np.int32), np.zeros(self.places, np.int32)
        for place, row in chosen.items():
            if self._keeps and row.goes_on:  # - 1: the newest token has no key and value yet
                number[place], since[place] = row.number, row.length - 1
        number, since = to_devices((number, since), NamedSharding(self._mesh, P()))
        return Tracked(number, since, caches)

    def _chosen(self, version: int, rows: Sequence[Row], going: Sequence[int]) -> dict[int, Row]:
        """Returns place -> its row. The choice depends only on the version and on the numbers of the rows."""
        drawn = [row for row in rows if version in row.versions]
        ranks = np.random.default_rng(version).permutation(len(drawn))
        order = {row.number: rank for row, rank in zip(drawn, ranks, strict=True)}
        number = {row.number: row for row in rows if row.goes_on or row.number in order}
        tracked = {place: number[own] for place, own in enumerate(going) if own in number}
        # A row that goes on without tokens of this version lost them with its process. It gives its place to a row that
        # has some, because some tokens of each version must be compared.
        chosen = {place: row for place, row in tracked.items() if row.number in order}
        for place in set(range(self.places)) - set(chosen):
            worker, nth = place % self._workers, place // self._workers
            taken = {row.number for row in chosen.values()}
            own = [row for row in drawn if row.worker % self._workers == worker and row.number not in taken]
            if self._keeps:
                own = [row for row in own if row.versions[0] == version]  # older keys of others are not tracked
            # Half of the places prefer rows during which the weights change, because their caches may be wrong.
            crosses = [nth % 2 == 0 and (row.goes_on if self._keeps else row.versions[0] != version) for row in own]
            ranked = sorted(zip(own, crosses, strict=True), key=lambda pair: (not pair[1], order[pair[0].number]))
            if ranked:
                chosen[place] = ranked[0][0]
        return tracked | chosen

    def _finite(
        self, version: int, worker: int, recorded: Float[np.ndarray, "n"], scored: Float[np.ndarray, "n"]
    ) -> None:
        """Raises RunFailure for distances that are not finite. `scored` are the trainer's own, not a worker's fault."""
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
        """The threshold for the distance of these tokens. Until the spread of rounding is known it is a gross one, with
        at least the relative rounding of the dtype in place of the spread."""
        square = self._all.squares / max(1, self._all.tokens)
        if self._all.tokens < self._enough:
            square = max(square, self._epsilon**2)
        spread = math.sqrt(square * max(own.tokens, FEW))
        return ROUNDING * own.rounding + SPREAD * spread + LEAST * own.tokens

    def _alarm(self, worker: int, own: Compared) -> None:
        first, last = own.versions[0], own.versions[-1]
        sentence = (
            f"logical worker {worker} does not draw as the weights of "
            f"{f'version {first}' if first == last else f'versions {first} to {last}'} do: the log-probabilities of "
            f"{own.tokens} tokens are off by {own.distance / own.tokens:.2g} on average, and rounding explains "
            f"{self._most(own) / own.tokens:.2g}"
        )
        self.refuse(sentence, worker)

    def refuse(self, sentence: str, worker: int = NONE) -> None:
        """Raises RunFailure; or warns, once for each worker (NONE: for no one), and counts the alarm."""
        if self._warn is None or self.alarms is None:
            raise RunFailure(f"{sentence}; nothing was learned from the newest of them")
        if worker not in self.alarms:
            self._warn(f"{sentence}; the run learns from them all the same, and async/logprob_alarms counts them")
        self.alarms[worker] = self.alarms.get(worker, 0) + 1
