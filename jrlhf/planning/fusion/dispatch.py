"""`Dispatcher`: makes a schedule from priorities. Every device computes the most urgent operation that is ready."""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from jrlhf.meshes.pipeline import Kind, Step, Table, arrange
from jrlhf.planning.fusion.problem import Problem

KINDS: tuple[Kind, Kind] = ("forward", "backward")
Values: TypeAlias = list[list[list[float]]]  # indexed by device, class of operations and operation


@dataclass(frozen=True)
class Rules:
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
        self.counts = [model.micro_batches for model in problem.models for _ in range(2)]
        self.operations = sum(2 * model.micro_batches * model.depth for model in problem.models)
        self._pipelines = [
            [number for number, pipeline in enumerate(problem.pipelines) if device in pipeline.devices]
            for device in range(problem.devices)
        ]
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

    def run(self, keys: Values, memory: float, rules: Rules, backwards: bool) -> Dispatched:
        """Returns the schedule in which every device takes the ready operation with the smallest key.

        memory: maximum activations in flight on a device.
        """
        problem, counts, ranks = self.problem, self.counts, rules.ranks
        sizes, costs = problem.activations, self._costs(backwards)
        arrivals, starts = ([[[] for _ in counts] for _ in self._pipelines] for _ in range(2))
        for number, pipeline in enumerate(problem.pipelines):
            arrivals[pipeline.devices[0]][2 * number] = [0.0] * counts[2 * number]
        used, free = [0.0] * len(arrivals), [0.0] * len(arrivals)
        events: list[tuple[float, int, int]] = [(0.0, device, -1) for device in range(len(arrivals))]
        now = 0.0
        while events:
            now, awake = events[0][0], set()
            while events and events[0][0] == now:
                _, device, kind = heappop(events)
                awake.add(device)
                if kind >= 0:
                    if kind % 2:
                        used[device] -= sizes[kind // 2]
                    if after := self._next[device][kind]:
                        awake.add(after[0])
            for device in awake:
                if free[device] > now:
                    continue
                arrived, begun, key = arrivals[device], starts[device], keys[device]
                candidates = []
                for pipeline in self._pipelines[device]:
                    kind = 2 * pipeline
                    if len(arrived[kind + 1]) > (number := len(begun[kind + 1])):
                        candidates.append((key[kind + 1][number], arrived[kind + 1][number], kind + 1))
                    if len(arrived[kind]) > (number := len(begun[kind])):
                        need = used[device] + sizes[pipeline]
                        for other in self._pipelines[device]:
                            if ranks[other] < ranks[pipeline] and (
                                len(begun[2 * other]) == len(begun[2 * other + 1]) < counts[2 * other]
                            ):
                                need += sizes[other]
                        if need <= memory:
                            candidates.append((key[kind][number], arrived[kind][number], kind))
                candidates.sort()
                horizon = float("inf")
                for _, arrival, kind in candidates:
                    if arrival > now:
                        horizon = min(horizon, arrival)
                    elif now + rules.patience * costs[kind] <= horizon:
                        break
                else:
                    continue  # nothing is ready, or waiting is better
                begun[kind].append(now)
                free[device] = end = now + costs[kind]
                if not kind % 2:
                    used[device] += sizes[kind // 2]
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
                (start, Step(kind // 2, pipelines[kind // 2].devices.index(device), number, KINDS[kind % 2]))
                for kind, times in enumerate(kinds)
                for number, start in enumerate(times)
            ]
            orders.append([step for _, step in sorted(order)])
        return arrange(pipelines, orders)

    def _costs(self, backwards: bool) -> list[float]:
        both = [(model.forward, model.backward) for model in self.problem.models]
        return [cost for pair in both for cost in (reversed(pair) if backwards else pair)]
