"""Searches for the shortest fused schedule.

A dispatcher makes a schedule from priorities: every device computes the most urgent operation that is ready. The next
schedule is made in the other direction of time, with priorities from the last one: operations that ended last start
first (forward-backward improvement: Li and Willis, EJOR 56, 1992; Valls, Ballestin and Quintanilla, EJOR 165, 2005). So
operations on the longest path come first, and periodic patterns of a schedule spread. Noise on the priorities helps to
leave local optima.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import TypeAlias

from jrlhf.meshes.pipeline import Kind, PipelineStep, Table, arrange, synchronous_makespan
from jrlhf.planning.fusion.problem import Problem

KINDS: tuple[Kind, Kind] = ("forward", "backward")
Values: TypeAlias = list[list[list[float]]]  # indexed by device, class of operations and operation
_STEPS = 2_000_000  # maximum operations dispatched in a search; a million takes two seconds
_COMPARED, _WORK = 100, 500_000  # maximum schedules whose waits are simulated; operations x devices, about 3 s
_STALL = 40  # number of schedules without a gain after which new priorities are drawn
_PATIENCE = (0.0, 0.5, 1.0)
_NOISE = (0.0, 0.3, 1.0, 2.0, 4.0)  # times the longest operation
TOLERANCE = 1e-9  # relative tolerance of floating-point sums


@dataclass(frozen=True)
class SlotRules:
    """Rules by which a device chooses its next operation.

    patience: a device waits if a more urgent operation becomes ready within this share of an operation's seconds.
    ranks: rank of each pipeline; a device reserves memory for one micro-batch of every pipeline of a smaller rank, so
        that memory limits cause no deadlock.
    """

    patience: float
    ranks: list[int]


@dataclass(frozen=True)
class Dispatched:
    """starts: seconds at which operations start. backwards: time runs from the end of the step to its beginning."""

    makespan: float
    starts: Values
    backwards: bool


class Dispatcher:
    """Makes schedules of one problem.

    Micro-batches of a pipeline are alike, so they keep their order. The operations of a device have classes: 2 p for
    the forwards of pipeline p, 2 p + 1 for its backwards. A schedule that is read from its end is a schedule of the
    same pipelines with the seconds of forward and backward exchanged, so one method makes both.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.counts = [one.micro_batches for one in problem.pipelines for _ in range(2)]
        self.operations = sum(2 * one.micro_batches * len(one.devices) for one in problem.pipelines)
        self._pipelines = [
            [number for number, pipeline in enumerate(problem.pipelines) if device in pipeline.devices]
            for device in range(problem.devices)
        ]
        self._classes = [[2 * pipeline + half for pipeline in here for half in range(2)] for here in self._pipelines]
        self._next: list[list[tuple[int, int] | None]] = [
            [None] * len(self.counts) for _ in range(problem.devices)
        ]  # device and class of the next operation of a micro-batch
        for number, pipeline in enumerate(problem.pipelines):
            way = [(device, 2 * number) for device in pipeline.devices]
            way += [(device, 2 * number + 1) for device in reversed(pipeline.devices)]
            for (device, kind), after in zip(way, way[1:], strict=False):
                self._next[device][kind] = after

    def values(self, value) -> Values:
        """Returns `value(device, class, number)` of every operation."""
        return [
            [
                [value(device, kind, number) for number in range(count)] if kind // 2 in here else []
                for kind, count in enumerate(self.counts)
            ]
            for device, here in enumerate(self._pipelines)
        ]

    def run(self, keys: Values, memory: float, rules: SlotRules, backwards: bool) -> Dispatched:
        """Returns the schedule in which every device takes the ready operation with the smallest key.

        memory: maximum activations in flight on a device.
        """
        counts, sizes, costs, ranks = self.counts, self.problem.activations, self._costs(backwards), rules.ranks
        arrivals, starts = ([[[] for _ in counts] for _ in self._pipelines] for _ in range(2))
        for number, pipeline in enumerate(self.problem.pipelines):
            arrivals[pipeline.devices[0]][2 * number] = [0.0] * counts[2 * number]
        used, free = [0.0] * len(arrivals), [0.0] * len(arrivals)
        events: list[tuple[float, int, int]] = [(0.0, device, -1) for device in range(len(arrivals))]
        now = 0.0

        def has_room(device: int, pipeline: int) -> bool:
            """Returns whether a forward fits next to the micro-batches that pipelines of smaller ranks reserve."""
            need, begun = used[device] + sizes[pipeline], starts[device]
            for other in self._pipelines[device]:
                smaller = ranks[other] < ranks[pipeline]
                if smaller and len(begun[2 * other]) == len(begun[2 * other + 1]) < counts[2 * other]:
                    need += sizes[other]
            return need <= memory

        def chosen(device: int) -> int | None:
            """Returns the class of the device's next operation; None if nothing is ready, or waiting is better."""
            arrived, begun, key, candidates = arrivals[device], starts[device], keys[device], []
            for kind in self._classes[device]:
                number = len(begun[kind])
                if number < len(arrived[kind]) and (kind % 2 or has_room(device, kind // 2)):
                    candidates.append((key[kind][number], arrived[kind][number], kind))
            candidates.sort()
            horizon = math.inf
            for _, arrival, kind in candidates:
                if arrival > now:
                    horizon = min(horizon, arrival)
                elif now + rules.patience * costs[kind] <= horizon:
                    return kind
            return None

        while events:
            now, awake = events[0][0], set()
            while events and events[0][0] == now:
                _, device, kind = heappop(events)
                awake.add(device)
                if kind >= 0:
                    used[device] -= sizes[kind // 2] if kind % 2 else 0
                    if after := self._next[device][kind]:
                        awake.add(after[0])
            for device in awake:
                if free[device] > now or (kind := chosen(device)) is None:
                    continue
                starts[device][kind].append(now)
                free[device] = end = now + costs[kind]
                used[device] += 0 if kind % 2 else sizes[kind // 2]
                if after := self._next[device][kind]:
                    arrivals[after[0]][after[1]].append(end)
                heappush(events, (end, device, kind))
        return Dispatched(now, starts, backwards)

    def turned(self, schedule: Dispatched) -> Values:
        """Returns the start of every operation when time runs in the other direction."""
        costs = self._costs(schedule.backwards)
        return [
            [
                [schedule.makespan - start - costs[kind ^ 1] for start in reversed(kinds[kind ^ 1])]
                for kind in range(len(kinds))
            ]
            for kinds in schedule.starts
        ]

    def table(self, schedule: Dispatched) -> Table:
        """Returns the schedule as a table, with the order in which each device computes."""
        starts = self.turned(schedule) if schedule.backwards else schedule.starts
        orders, pipelines = [], self.problem.pipelines
        for device, kinds in enumerate(starts):
            order = [
                (start, PipelineStep(kind // 2, pipelines[kind // 2].devices.index(device), number, KINDS[kind % 2]))
                for kind, times in enumerate(kinds)
                for number, start in enumerate(times)
            ]
            orders.append([step for _, step in sorted(order)])
        return arrange(pipelines, orders)

    def _costs(self, backwards: bool) -> list[float]:
        both = [(one.forward, one.backward) for one in self.problem.pipelines]
        return [cost for pair in both for cost in (reversed(pair) if backwards else pair)]


# ---- the search


def search(problem: Problem, seed: int = 0, *, most: float = math.inf, effort: float = 1.0) -> Table:
    """Returns the shortest table that the search finds. The same seed and effort give the same table.

    most: maximum activations in flight on a device, at least `problem.least_memory`. effort: scales the number of
        schedules that are tried.
    """
    dispatcher = Dispatcher(problem)
    return dispatcher.table(shortest(dispatcher, random.Random(seed), problem.bound, most, effort))


def search_apart(problem: Problem, *, most: float = math.inf, effort: float = 1.0) -> Table:
    """Returns the table with the shortest `synchronous_makespan` among the shortest ones that the search draws.

    It is for stages in different processes. The arguments are those of `search`.
    """
    dispatcher = Dispatcher(problem)
    count = max(1, min(_COMPARED, _WORK // (dispatcher.operations * problem.devices)))
    schedules = _schedules(dispatcher, random.Random(0), most, effort)
    few = sorted(schedules, key=lambda schedule: schedule.makespan)[:count]
    tables = dict.fromkeys(map(dispatcher.table, few))
    return min(tables, key=lambda table: synchronous_makespan(table, problem.seconds))


def shortest(dispatcher: Dispatcher, generator: random.Random, goal: float, most: float, effort: float) -> Dispatched:
    """Returns the shortest schedule that is drawn; stops at the first one whose makespan is the goal or less.

    most, effort: as for `search`.
    """
    best = None
    for schedule in _schedules(dispatcher, generator, most, effort):
        if best is None or schedule.makespan < best.makespan:
            best = schedule
        if best.makespan <= goal * (1 + TOLERANCE):
            break
    assert best is not None
    return best


def _schedules(dispatcher: Dispatcher, generator: random.Random, most: float, effort: float) -> Iterator[Dispatched]:
    """Yields the schedules that this effort allows, at least one."""
    schedules = _endless(dispatcher, generator, most * (1 + TOLERANCE))
    return islice(schedules, max(1, round(effort * _STEPS / dispatcher.operations)))


def _endless(dispatcher: Dispatcher, generator: random.Random, memory: float) -> Iterator[Dispatched]:
    """Yields schedules endlessly: each from the one before with noise, or from new priorities after a stall."""
    longest = max(max(one.forward, one.backward) for one in dispatcher.problem.pipelines)
    while True:
        keys, rules = _drawn(dispatcher, generator, longest)
        yield (schedule := dispatcher.run(keys, memory, rules, backwards=False))
        least, stalled = schedule.makespan, 0
        while stalled < _STALL:
            keys = dispatcher.turned(schedule)
            if deviation := longest * generator.choice(_NOISE):
                keys = [[[key + generator.gauss(0, deviation) for key in kind] for kind in device] for device in keys]
            yield (schedule := dispatcher.run(keys, memory, rules, not schedule.backwards))
            stalled = 0 if schedule.makespan < least else stalled + 1
            least = min(least, schedule.makespan)


def _drawn(dispatcher: Dispatcher, generator: random.Random, longest: float) -> tuple[Values, SlotRules]:
    """Draws priorities: an order of the classes of each device, and a preference for earlier micro-batches."""
    first = [[20 * longest * generator.random() for _ in dispatcher.counts] for _ in range(dispatcher.problem.devices)]
    slope = generator.choice((0, 1)) * generator.uniform(0, 2 * longest)
    keys = dispatcher.values(lambda device, kind, number: first[device][kind] + slope * number)
    ranks = list(range(len(dispatcher.problem.pipelines)))
    generator.shuffle(ranks)
    return keys, SlotRules(generator.choice(_PATIENCE), ranks)
