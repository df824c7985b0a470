"""Rollouts on a slice of this process's devices, which go on while other devices train. Ordered by the virtual clock.

The program hands each chunk to the rollouts' devices while the trainer's devices still compute the update: JAX does not
wait for either. Which chunks come before which update is decided by counts alone, so a run has the same bits on any
hardware, and again after a kill.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jrlhf.errors import RunFailure
from jrlhf.fleet.identity import Identity, differences, drawing_identity
from jrlhf.fleet.schedule import OnNewWeights, Rules, first_batch, may_start, may_swap
from jrlhf.meshes import to_devices, to_host
from jrlhf.models.generation.chunks import Slots
from jrlhf.models.generation.continuous import ContinuousBatch, Decoding, Prompt, Weights

FREE = -1  # a place in `Started` without a group
NEVER = np.iinfo(np.int32).max  # the time of completion of a group that is not complete


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Started:
    """The groups that have started and were not learned from: Q places for groups of S rows with up to R tokens."""

    number: Any  # [Q]: of the group, or FREE
    time: Any  # [Q]: at which it was complete, or NEVER
    tokens: Any  # [Q, S, R]
    logprobs: Any  # [Q, S, R]
    versions: Any  # [Q, S, R]: of the weights that drew each token
    lengths: Any  # [Q, S]
    finished: Any  # [Q, S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Times:
    """Counts and virtual times, in decode steps."""

    groups: Any  # that have started so far
    spare: Any  # batches that were taken beyond one a version: dynamic sampling does not learn from all
    version: Any  # of the weights that draw
    published: Any  # the newest version
    rollouts: Any  # time of the side that draws
    trainer: Any  # time of the side that learns


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FleetState:
    """All that a resumed run needs: the slots that decode, the groups that started, the clock."""

    decoding: Decoding
    started: Started
    times: Times
    weights: Any = None  # that draw, where they may be older than the trainer's, with their identity


class Collected(NamedTuple):
    """A batch of groups, in the order of their numbers: B = groups * S rows."""

    numbers: Int[np.ndarray, "U"]
    tokens: Int[np.ndarray, "B R"]
    logprobs: Float[np.ndarray, "B R"]
    versions: Int[np.ndarray, "B R"]
    lengths: Int[np.ndarray, "B"]
    finished: Bool[np.ndarray, "B"]


class SliceFleet:
    """Draws groups by the rules of an asynchronous run. Mutable; `state` and `start` save and restore it.

    prompt_of: number of a group -> its prompt. on_complete: is called with each group as soon as it is complete.
    """

    def __init__(
        self,
        batch: ContinuousBatch,
        mesh: Mesh,
        rules: Rules,
        on_new_weights: OnNewWeights,
        prompt_of: Callable[[int], Prompt],
        on_complete: Callable[[Collected], None],
        *,
        samples: int,
        limit: int,
    ):
        self._batch, self.mesh, self._rules, self._prompt_of = batch, mesh, rules, prompt_of
        self._on_new_weights: OnNewWeights = on_new_weights
        self._on_complete, self._samples = on_complete, samples
        places = int(rules.batch * (rules.staleness + 1))  # no more groups than that are ever under way: `may_start`
        rows = (places, samples)
        self._started = Started(
            number=np.full(places, FREE, np.int32),
            time=np.full(places, NEVER, np.int32),
            tokens=np.zeros((*rows, limit), np.int32),
            logprobs=np.zeros((*rows, limit), np.float32),
            versions=np.zeros((*rows, limit), np.int32),
            lengths=np.zeros(rows, np.int32),
            finished=np.zeros(rows, bool),
        )
        self._times = Times(0, 0, 0, 0, 0, 0)
        self._taken = False  # a batch of this version
        self.started = False
        self._weights: Weights | None = None
        self._expected: Identity = {}
        self._newest: tuple[Weights, Identity] | None = None  # published, and not taken yet
        self._proofs: list[tuple[int, Identity, Identity]] = []  # version, identity of what draws, what it must be
        self._ready = 0  # time at which the batch in training was complete
        self._waits = {"trainer": 0, "rollouts": 0}

    # ---- what a run keeps

    def fresh(self, weights: Weights, expected: Identity) -> FleetState:
        """The state before anything is drawn, with the first weights."""
        self._weights, self._expected = weights, expected
        return self.state

    @property
    def state(self) -> FleetState:
        """The state as arrays on the rollouts' devices, which the next chunk uses up."""
        host = self._batch.state.owner, self._batch.state.drawn, self._started, jax.tree.map(np.int32, self._times)
        # A copy: the arrays of a CPU may share the host's memory, which the next chunk changes.
        owner, drawn, started, times = to_devices(jax.tree.map(np.array, host), NamedSharding(self.mesh, P()))
        decoding = _with_keys(replace(self._batch.state, owner=owner, drawn=drawn), jax.random.key_data)
        lagging = self._on_new_weights == "finish"
        return FleetState(decoding, started, times, (self._weights, self._expected) if lagging else None)

    def start(self, state: FleetState, weights: Weights, expected: Identity) -> None:
        """Goes on from a state, with the trainer's present weights and their identity."""
        host = to_host((state.decoding.owner, state.decoding.drawn, state.started, state.times))
        owner, drawn, self._started, times = jax.tree.map(np.array, host)
        decoding = replace(state.decoding, owner=owner, drawn=drawn)
        self._batch.state, self._times = _with_keys(decoding, jax.random.wrap_key_data), jax.tree.map(int, times)
        if self._times.version < self._times.published:
            self._newest = weights, expected
            weights, expected = state.weights
        self._take(weights, expected)
        self.started = True
        for at in np.flatnonzero(self._started.time != NEVER):
            self._on_complete(self._collected(np.array([at])))

    @property
    def version(self) -> int:
        """The version of the weights that draw."""
        return self._times.version

    # ---- what an iteration does

    def collect(self) -> Collected:
        """Draws until the next batch is complete, and takes it out. An update may take several."""
        self._times = replace(self._times, spare=self._times.spare + self._taken)
        self._taken = True
        while (batch := first_batch(self._complete(), self._rules)) is None:
            self._advance()
        self._ready, numbers = batch
        started = self._started
        at = np.array([int(np.flatnonzero(started.number == number)[0]) for number in numbers])
        collected = self._collected(at)
        started.number[at], started.time[at] = FREE, NEVER
        self._check()
        return collected

    def publish(self, weights: Weights, expected: Identity) -> None:
        """Draws as long as the update takes, and then takes the new weights, as soon as they may be taken.

        expected: the identity of these weights, as the trainer computes it from its own. A batch that other weights may
        have drawn is not given out: the next `collect` raises RunFailure.
        """
        times, self._taken = self._times, False
        start = max(times.trainer, self._ready)
        end = start + int(self._rules.update)
        while self._times.rollouts < end and (self._may_swap or len(self._batch.rows) or self._may_start()):
            self._advance()
        drawn = self._times.rollouts
        self._waits = {"trainer": start - times.trainer, "rollouts": max(0, end - drawn)}
        self._times = replace(self._times, published=times.published + 1, rollouts=max(drawn, end), trainer=end)
        self._newest = weights, expected
        self._swap()

    def metrics(self) -> dict[str, float]:
        """How long each side waited for the other in the last iteration, in decode steps, and what is under way."""
        waits = {f"async/{side}_wait": float(steps) for side, steps in self._waits.items()}
        complete = int((self._started.time != NEVER).sum())
        return waits | {"async/running_rows": float(len(self._batch.rows)), "async/waiting_groups": float(complete)}

    # ---- identity

    def _take(self, weights: Weights, expected: Identity) -> None:
        self._weights, self._expected = weights, expected
        self._prove()

    def _prove(self) -> None:
        """Begins to compare the weights that draw with what they must be; `_check` waits for it."""
        assert self._weights is not None
        self._proofs.append((self._times.version, drawing_identity(self._weights[0]), self._expected))

    def _check(self) -> None:
        proofs, self._proofs = self._proofs, []
        for version, *identities in proofs:
            if wrong := differences(*to_host(identities)):
                raise RunFailure(
                    f"the rollouts' weights of version {version} are not the trainer's: {len(wrong)} of "
                    f"{len(self._expected)} differ, {wrong[0]} first; nothing was learned from what they drew"
                )

    # ---- between two chunks

    def _collected(self, at: Int[np.ndarray, "U"]) -> Collected:
        """The groups in these places."""
        started = self._started
        fields = started.tokens, started.logprobs, started.versions, started.lengths, started.finished
        rows = (field[at].reshape(len(at) * self._samples, *field.shape[2:]) for field in fields)
        return Collected(started.number[at], *rows)

    def _complete(self) -> list[tuple[int, int]]:
        started = self._started
        return [(int(started.time[at]), int(started.number[at])) for at in np.flatnonzero(started.time != NEVER)]

    def _may_start(self) -> bool:
        times = self._times
        return may_start(self._rules, times.groups - times.spare * self._rules.batch, times.version)

    @property
    def _may_swap(self) -> bool:
        return self._newest is not None and may_swap(self._on_new_weights, len(self._batch.rows))

    def _swap(self) -> None:
        """Takes the newest weights, if there are newer ones and they may be taken."""
        if self._newest is None or not self._may_swap:
            return
        self._prove()  # that nothing has changed the old ones meanwhile
        self._times = replace(self._times, version=self._times.published)
        self._take(*self._newest)
        self._newest = None
        if self._on_new_weights == "prefill_again" and len(self._batch.rows):
            assert self._weights is not None
            self._batch.prefill_again(self._weights, self._prompt_of)

    def _advance(self) -> None:
        """Takes new weights, fills the free slots, where it may, and decodes a chunk."""
        self._swap()
        assert self._weights is not None
        prompts, started = [], self._started
        while len(prompts) < self._batch.room and self._may_start():
            number = self._times.groups
            at = int(np.flatnonzero(started.number == FREE)[0])
            started.number[at], started.lengths[at] = number, 0
            prompts.append(self._prompt_of(number))
            self._times = replace(self._times, groups=number + 1)
        if prompts:
            self._batch.admit(self._weights, prompts)
        progress = self._batch.decode(self._weights)
        steps = max(row.end - row.start for row in progress)
        self._times = replace(self._times, rollouts=self._times.rollouts + steps)
        place = {int(number): at for at, number in enumerate(started.number) if number != FREE}
        for row in progress:
            number, sample = divmod(row.row, self._samples)
            at = place[number], sample
            started.versions[at][row.start : row.end] = self._times.version
            if row.response is not None:
                started.tokens[at], started.logprobs[at], started.finished[at] = row.response
                started.lengths[at] = row.end
                if started.lengths[place[number]].all():
                    started.time[place[number]] = self._times.rollouts
                    self._on_complete(self._collected(np.array([place[number]])))


def _with_keys(decoding: Decoding, convert: Callable[[Array], Array]) -> Decoding:
    """The same state with its PRNG keys as data, which a checkpoint can hold, or as keys again."""
    slots = decoding.slots
    rows = replace(slots.rows, keys=convert(slots.rows.keys))
    return replace(decoding, slots=Slots(list(slots.caches), rows))
