"""Draws groups by the rules of an asynchronous run, ordered by the virtual clock.

Logical workers have decode slots. Their number, slots and mesh decide what is drawn and when; where they run does not.
Which chunks come before which update follows from counts alone, so a run has the same bits on any hardware, and again
after a kill.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.errors import RunFailure
from jrlhf.fleet.identity import Identity, differences
from jrlhf.fleet.recompute import Compared, Recompute, Row, Tracked
from jrlhf.fleet.schedule import Groups, OnNewWeights, Rules, first_batch, may_start, may_swap
from jrlhf.fleet.state import Collected, Drawn, FleetState, Times, collected, drawn_rows, pack, unpack
from jrlhf.meshes import to_devices, to_host
from jrlhf.models.generation.continuous import Decoding, Progress, Prompt, Weights


class Workers(Protocol):
    """The decode slots of all logical workers, wherever they are."""

    own_devices: bool  # True: rows decode in other processes, and this one may wait for them in a thread

    @property
    def rooms(self) -> list[int]:
        """For each worker, the number of prompts for all of whose rows it has free slots."""
        ...

    @property
    def running(self) -> int:
        """The number of rows that decode."""
        ...

    def fresh(self) -> list[Decoding]:
        """Returns the states in which no slot is taken, in the form of `saved`."""
        ...

    def states(self) -> list[Decoding]:
        """Returns the states in the form of `saved`. The next chunk uses them up."""
        ...

    def start(self, states: Sequence[Decoding]) -> None:
        """Goes on from these states. `take` must be called before `decode`."""
        ...

    def put(self, weights: Weights) -> Any:
        """Begins to hand weights over; returns what `take` is given."""
        ...

    def weights(self, handle: Any) -> Weights:
        """Returns what `put` was given, on the devices of the trainer's process: themselves, or a copy."""
        ...

    def take(self, weights: Any, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        """Draws with these weights from now on. Returns identities of the weights before and of these.

        again: prompts of the rows that decode, by number, to compute their caches again.
        """
        ...

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[Progress]:
        """Gives slots to these prompts of each worker and decodes a chunk."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns what it took to hand weights over since the last call."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...


class Fleet:
    """The rollouts of an asynchronous run. Mutable; `state` and `start` save and restore it.

    Between `collect` and the next call it draws on for as long as the update takes: in a thread, if the workers have
    devices of another process; otherwise at the beginning of the next call, when the trainer's programs are enqueued.

    mesh: where `state` is. on_complete: is called with each group as soon as it is complete, from that thread, too.
    samples: rows of a group. limit: tokens of a row. reward: time from a group's last token to its score.
    recompute: what compares log-probabilities, if `compares`; None: nothing does, and no state has rows for it.
    """

    def __init__(
        self,
        workers: Workers,
        mesh: Mesh,
        rules: Rules,
        on_new_weights: OnNewWeights,
        on_complete: Callable[[Collected], None],
        *,
        samples: int,
        limit: int,
        reward: int = 0,
        recompute: Recompute | None = None,
        compares: bool = True,
    ):
        self._workers, self.mesh, self._rules, self._reward = workers, mesh, rules, reward
        self._on_new_weights: OnNewWeights = on_new_weights
        self._on_complete, self._samples, self._limit = on_complete, samples, limit
        self._groups, self._drawn = Groups[int](), dict[int, Drawn]()
        self._prompts: dict[int, Prompt] = {}
        self._worker: dict[int, int] = {}  # that draws a group
        self._times = Times(0, 0, 0, 0, 0)
        self._taken = False  # whether this version has learned from a batch
        self.started = False
        self._weights: Weights | None = None  # with "finish": those that draw, which may be older than the trainer's
        self._expected: Identity = {}  # of the weights that draw
        self._newest: tuple[Any, Weights, Identity] | None = None  # published, and not taken yet
        self._proofs: list[tuple[int, Identity, Identity]] = []  # version, identity of what draws, what it must be
        self._recompute, self._tracked, self._compared = recompute, None, Compared()
        self._compares = recompute is not None and compares
        # The version that draws, as the last one, and those before it whose tokens are not all compared; with handles.
        self._drew: list[tuple[int, Any]] = []
        self._ready = 0  # time at which the batch in training was complete
        self._waits = {"trainer": 0, "rollouts": 0}
        self._thread = ThreadPoolExecutor(1, "fleet") if workers.own_devices else None
        self._ahead: Callable[[], None] = lambda: None  # waits for what is drawn during the update

    # ---- what a run keeps

    def fresh(self, weights: Weights, expected: Identity) -> FleetState:
        """The state before anything is drawn, with the first weights."""
        self._hold(weights, expected)
        self._tracked = None if self._recompute is None else self._recompute.fresh()
        return self._state(self._workers.fresh())

    @property
    def state(self) -> FleetState:
        """The state as arrays on devices, which the next chunk uses up. Raises RunFailure as `collect` does."""
        decoding = self._workers.states()
        self._check()
        self._compare_retired(decoding)
        return self._state(decoding)

    def _state(self, decoding: list[Decoding]) -> FleetState:
        places = int(self._rules.batch * (self._rules.staleness + 1))  # no more groups are ever under way: `may_start`
        blank = Drawn.blank(self._samples, limit=self._limit)
        started = pack(self._groups, self._drawn, self._worker, places, blank)
        host = started, jax.tree.map(np.int32, self._times)
        started, times = to_devices(host, NamedSharding(self.mesh, P()))
        lagging = None if self._weights is None else (self._weights, self._expected)
        slots = decoding[0] if len(decoding) == 1 else tuple(decoding)
        return FleetState(slots, started, times, lagging, self._tracked)

    def start(self, state: FleetState, weights: Weights, expected: Identity) -> None:
        """Goes on from a state, with the trainer's present weights and their identity."""
        started, times = to_host((state.started, state.times))
        self._times = jax.tree.map(int, times)
        self._groups, self._drawn, self._worker = unpack(started)
        # Rows that went on while nothing was compared are not there.
        self._tracked = state.tracked if self._recompute is None or self._compares else self._recompute.fresh()
        self._workers.start(state.decoding if isinstance(state.decoding, tuple) else [state.decoding])
        if self._times.version < self._times.published:
            self._newest = self._workers.put(weights), weights, expected
            lagging, expected = state.weights
            weights = lagging[0] or weights[0], lagging[1]
        self._take(self._times.version, self._workers.put(weights), weights, expected)
        self.started = True
        for _, number in self._groups.complete:
            self._complete(number)

    def close(self) -> None:
        """Ends the workers."""
        self._workers.close()
        if self._thread is not None:
            self._thread.shutdown()

    # ---- what an iteration does

    def wanted(self) -> list[int]:
        """The numbers of the groups whose prompts `collect` may need, and that were not submitted."""
        self._ahead()
        rules, times = self._rules, self._times
        limit = int(rules.batch * (times.published + rules.staleness + 1 + times.spare + self._taken))
        numbers = [*self._drawn, *range(self._groups.started, limit)]
        return [number for number in numbers if number not in self._prompts]

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Gives the prompts of groups, which start when they may."""
        self._prompts |= {prompt.number: prompt for prompt in prompts}

    def collect(self) -> Collected:
        """Draws until the next batch is complete, and takes it out. An update may take several.

        Raises RunFailure if other weights may have drawn it, or the right ones wrongly.
        """
        self._ahead()
        self._compared = self._compared if self._taken else Compared()
        self._times = replace(self._times, spare=self._times.spare + self._taken)
        self._taken = True
        while (batch := first_batch(self._groups.complete, self._rules)) is None:
            self._advance()
        self._ready, numbers = batch
        rows = collected(numbers, self._drawn, self._times.version)
        drew, view = list(self._drew), self._rows(numbers)
        self._groups.remove(numbers)
        for number in numbers:
            del self._drawn[number], self._prompts[number], self._worker[number]
        self._check()
        start = partial(self._draw_until, self._end)
        self._ahead = cache(start) if self._thread is None else self._thread.submit(start).result
        for version, handle in drew:
            self._compared += self._compare(version, handle, view)[0]
        return rows

    def publish(self, weights: Weights, expected: Identity) -> None:
        """Draws as long as the update takes, and then takes the new weights, as soon as they may be taken.

        expected: the identity of these weights, as the trainer computes it from its own. A batch that other weights may
        have drawn is not given out: the next `state` or `collect` raises RunFailure.
        """
        newest = self._workers.put(weights), weights, expected
        self._ahead()
        times, end, self._taken = self._times, self._end, False
        self._waits = {"trainer": max(0, self._ready - times.trainer), "rollouts": max(0, end - times.rollouts)}
        rollouts = max(times.rollouts, end)
        self._times = replace(times, published=times.published + 1, rollouts=rollouts, trainer=end)
        self._newest = newest
        self._swap()

    def metrics(self) -> dict[str, float]:
        """Returns how long each side waited for the other, in decode steps, counts of rows and groups, what it took to
        hand weights over, and how far the log-probabilities of tokens are from those that were computed again."""
        metrics = {f"async/{side}_wait": float(steps) for side, steps in self._waits.items()}
        running, waiting = float(self._workers.running), float(len(self._groups.complete))
        metrics |= {"async/running_rows": running, "async/waiting_groups": waiting} | self._workers.metrics()
        if self._recompute is None or not self._compares:
            return metrics
        compared, alarms = self._compared, self._recompute.alarms
        metrics["async/recomputed_tokens"] = float(compared.tokens)
        metrics |= {} if alarms is None else {"async/logprob_alarms": float(sum(alarms.values()))}
        return metrics | ({"async/logprob_distance": compared.distance / compared.tokens} if compared.tokens else {})

    # ---- identity

    def _take(
        self,
        version: int,
        handle: Any,
        weights: Weights,
        expected: Identity,
        again: Mapping[int, Prompt] | None = None,
    ) -> None:
        """Draws with these weights from now on. Notes what `_check` and `_compare_retired` compare."""
        for old, new in self._workers.take(handle, again):
            if old is not None:  # the old ones must not have changed meanwhile
                self._proofs.append((self._times.version, old, self._expected))
            self._proofs.append((version, new, expected))
        self._drew.append((version, handle))
        self._hold(weights, expected)
        self._times = replace(self._times, version=version)

    def _hold(self, weights: Weights, expected: Identity) -> None:
        base, adapter = weights
        own = ({} if adapter else base), adapter  # a base never changes
        self._weights, self._expected = own if self._on_new_weights == "finish" else None, expected

    def _check(self) -> None:
        """Compares the weights that drew with what they must be."""
        proofs, self._proofs = self._proofs, []
        for version, *identities in proofs:
            drawing, expected = to_host(identities)
            if wrong := differences(drawing, expected):
                raise RunFailure(
                    f"the rollouts' weights of version {version} are not the trainer's: {len(wrong)} of "
                    f"{len(expected)} differ, {wrong[0]} first; nothing was learned from what they drew"
                )

    # ---- log-probabilities

    def _rows(self, numbers: Iterable[int], decoding: Sequence[Decoding] = ()) -> list[Row]:
        """The rows of these groups, as far as they are drawn. decoding: the slots of those that are not done."""
        if not self._compares:
            return []
        rows, running = [], drawn_rows(decoding)
        for number in numbers:
            prompt, drawn = self._prompts[number], self._drawn[number]
            for sample in range(self._samples):
                row, own = number * self._samples + sample, slice(drawn.lengths[sample])
                tokens, logprobs = running.get(row, (drawn.tokens[sample, own], drawn.logprobs[sample, own]))
                versions = drawn.versions[sample, : len(tokens)]
                ids = prompt.tokens[: prompt.length]
                rows.append(Row(row, self._worker[number], ids, tokens, logprobs, versions, row in running))
        return rows

    def _compare(self, version: int, handle: Any, rows: Sequence[Row]) -> tuple[Compared, Tracked | None]:
        """See `Recompute.compare`."""
        if self._recompute is None or self._tracked is None or not any(version in row.versions for row in rows):
            return Compared(), self._tracked
        return self._recompute.compare(version, self._workers.weights(handle), rows, self._tracked)

    def _compare_retired(self, decoding: Sequence[Decoding]) -> None:
        """Compares what the versions before the present one drew, and lets them go: they draw no more."""
        retired, self._drew = self._drew[:-1], self._drew[-1:]
        rows = self._rows(self._drawn, decoding)
        for version, handle in retired:
            _, self._tracked = self._compare(version, handle, rows)

    # ---- between two chunks

    @property
    def _end(self) -> int:
        """The time at which the update with the present batch ends."""
        return max(self._times.trainer, self._ready) + int(self._rules.update)

    def _draw_until(self, end: int) -> None:
        while self._times.rollouts < end and (self._may_swap or self._workers.running or self._may_start()):
            self._advance()

    def _may_start(self) -> bool:
        spare = self._times.spare * self._rules.batch
        return may_start(self._rules, self._groups.started - spare, self._times.version)

    @property
    def _may_swap(self) -> bool:
        return self._newest is not None and may_swap(self._on_new_weights, self._workers.running)

    def _swap(self) -> None:
        """Takes the newest weights, if there are newer ones and they may be taken."""
        if self._newest is None or not self._may_swap:
            return
        newest, self._newest, again = self._newest, None, None
        if self._on_new_weights == "prefill_again" and self._workers.running:
            again = {number: self._prompts[number] for number in self._groups.unfinished}
        self._take(self._times.published, *newest, again)
        if self._on_new_weights == "finish" and self._thread is None:
            self._compare_retired(())  # all rows are done, and the memory of these weights is needed

    def _advance(self) -> None:
        """Takes new weights, fills the free slots, where it may, and decodes a chunk."""
        self._swap()
        rooms = self._workers.rooms
        entering: list[list[Prompt]] = [[] for _ in rooms]
        while max(rooms) > 0 and self._may_start():
            number, worker = self._groups.start(self._samples), rooms.index(max(rooms))
            self._drawn[number], self._worker[number] = Drawn.blank(self._samples, limit=self._limit), worker
            entering[worker].append(self._prompts[number])
            rooms[worker] -= 1
        progress = self._workers.decode(entering)
        steps = max(row.end - row.start for row in progress)
        now = self._times.rollouts + steps
        self._times = replace(self._times, rollouts=now)
        for row in progress:
            number, sample = divmod(row.row, self._samples)
            drawn = self._drawn[number]
            drawn.versions[sample, row.start : row.end] = self._times.version
            if row.response is not None:
                drawn.tokens[sample], drawn.logprobs[sample], drawn.finished[sample] = row.response
                drawn.lengths[sample] = row.end
                if self._groups.end_row(number, now + self._reward):
                    self._complete(number)

    def _complete(self, number: int) -> None:
        self._on_complete(collected([number], self._drawn, self._times.version))
