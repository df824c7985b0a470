"""Draws groups by the rules of an asynchronous run, ordered by the virtual clock.

Logical workers have decode slots. Their number, slots and mesh decide what is drawn and when; where they run does not.
Which chunks come before which update follows from counts alone, so a run has the same bits on any hardware, and again
after a kill.
"""

from collections.abc import Callable, Mapping, Sequence
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
from jrlhf.fleet.schedule import Groups, OnNewWeights, Rules, first_batch, may_start, may_swap
from jrlhf.fleet.state import Collected, Drawn, FleetState, Times, collected, pack, unpack
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

    def take(self, weights: Any, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        """Draws with these weights from now on. Returns identities of the weights before and of these.

        again: prompts of the rows that decode, by number, to compute their caches again.
        """
        ...

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[Progress]:
        """Gives slots to these prompts of each worker and decodes a chunk."""
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
    ):
        self._workers, self.mesh, self._rules, self._reward = workers, mesh, rules, reward
        self._on_new_weights: OnNewWeights = on_new_weights
        self._on_complete, self._samples, self._limit = on_complete, samples, limit
        self._groups, self._drawn = Groups[int](), dict[int, Drawn]()
        self._prompts: dict[int, Prompt] = {}
        self._times = Times(0, 0, 0, 0, 0)
        self._taken = False  # whether this version has learned from a batch
        self.started = False
        self._weights: Weights | None = None  # with "finish": those that draw, which may be older than the trainer's
        self._expected: Identity = {}  # of the weights that draw
        self._newest: tuple[Any, Weights, Identity] | None = None  # published, and not taken yet
        self._proofs: list[tuple[int, Identity, Identity]] = []  # version, identity of what draws, what it must be
        self._ready = 0  # time at which the batch in training was complete
        self._waits = {"trainer": 0, "rollouts": 0}
        self._thread = ThreadPoolExecutor(1, "fleet") if workers.own_devices else None
        self._ahead: Callable[[], None] = lambda: None  # waits for what is drawn during the update

    # ---- what a run keeps

    def fresh(self, weights: Weights, expected: Identity) -> FleetState:
        """The state before anything is drawn, with the first weights."""
        self._hold(weights, expected)
        return self._state(self._workers.fresh())

    @property
    def state(self) -> FleetState:
        """The state as arrays on devices, which the next chunk uses up."""
        return self._state(self._workers.states())

    def _state(self, decoding: list[Decoding]) -> FleetState:
        places = int(self._rules.batch * (self._rules.staleness + 1))  # no more groups are ever under way: `may_start`
        started = pack(self._groups, self._drawn, places, Drawn.blank(self._samples, limit=self._limit))
        host = started, jax.tree.map(np.int32, self._times)
        started, times = to_devices(host, NamedSharding(self.mesh, P()))
        lagging = None if self._weights is None else (self._weights, self._expected)
        return FleetState(decoding[0] if len(decoding) == 1 else tuple(decoding), started, times, lagging)

    def start(self, state: FleetState, weights: Weights, expected: Identity) -> None:
        """Goes on from a state, with the trainer's present weights and their identity."""
        started, times = to_host((state.started, state.times))
        self._times = jax.tree.map(int, times)
        self._groups, self._drawn = unpack(started)
        self._workers.start(state.decoding if isinstance(state.decoding, tuple) else [state.decoding])
        if self._times.version < self._times.published:
            self._newest = self._workers.put(weights), weights, expected
            weights, expected = state.weights
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
        numbers = [*self._groups.unfinished, *range(self._groups.started, limit)]
        return [number for number in numbers if number not in self._prompts]

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Gives the prompts of groups, which start when they may."""
        self._prompts |= {prompt.number: prompt for prompt in prompts}

    def collect(self) -> Collected:
        """Draws until the next batch is complete, and takes it out. An update may take several."""
        self._ahead()
        self._times = replace(self._times, spare=self._times.spare + self._taken)
        self._taken = True
        while (batch := first_batch(self._groups.complete, self._rules)) is None:
            self._advance()
        self._ready, numbers = batch
        rows = collected(numbers, self._drawn, self._times.version)
        self._groups.remove(numbers)
        for number in numbers:
            del self._drawn[number]
        self._check()
        start = partial(self._draw_until, self._end)
        self._ahead = cache(start) if self._thread is None else self._thread.submit(start).result
        return rows

    def publish(self, weights: Weights, expected: Identity) -> None:
        """Draws as long as the update takes, and then takes the new weights, as soon as they may be taken.

        expected: the identity of these weights, as the trainer computes it from its own. A batch that other weights may
        have drawn is not given out: the next `collect` raises RunFailure.
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
        """Returns how long each side waited for the other, in decode steps, and counts of rows and groups."""
        waits = {f"async/{side}_wait": float(steps) for side, steps in self._waits.items()}
        running, waiting = float(self._workers.running), float(len(self._groups.complete))
        return waits | {"async/running_rows": running, "async/waiting_groups": waiting}

    # ---- identity

    def _take(
        self,
        version: int,
        handle: Any,
        weights: Weights,
        expected: Identity,
        again: Mapping[int, Prompt] | None = None,
    ) -> None:
        """Draws with these weights from now on. Notes what `_check` compares."""
        for old, new in self._workers.take(handle, again):
            if old is not None:  # the old ones must not have changed meanwhile
                self._proofs.append((self._times.version, old, self._expected))
            self._proofs.append((version, new, expected))
        self._hold(weights, expected)
        self._times = replace(self._times, version=version)

    def _hold(self, weights: Weights, expected: Identity) -> None:
        self._weights, self._expected = weights if self._on_new_weights == "finish" else None, expected

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

    def _advance(self) -> None:
        """Takes new weights, fills the free slots, where it may, and decodes a chunk."""
        self._swap()
        rooms = self._workers.rooms
        entering: list[list[Prompt]] = [[] for _ in rooms]
        while max(rooms) > 0 and self._may_start():
            number, worker = self._groups.start(self._samples), rooms.index(max(rooms))
            self._drawn[number] = Drawn.blank(self._samples, limit=self._limit)
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
        self._prompts.pop(number, None)
        self._on_complete(collected([number], self._drawn, self._times.version))
