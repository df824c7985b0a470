"""The optimum of a small search, by branch and bound: what a search's result is measured against."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jrlhf.meshes.plan import Slice, segments
from jrlhf.planning.simulate import Simulator, nested


@dataclass(frozen=True)
class Optimum:
    """choice: the best plan below the bound that was given, None where there is none. nodes: looked at."""

    choice: tuple[int, ...] | None
    seconds: float
    nodes: int


def optimum(simulator: Simulator, choices: Sequence[Sequence[int]], below: float = math.inf) -> Optimum:
    """The fastest plan that fits and takes less than `below`, of all that these options make.

    First every call's slice is decided, then what it does there; the largest calls first. A branch ends where what is
    decided does not fit, or where an iteration cannot take less than the best so far. It takes at least
    - the work of any one device;
    - all work, evenly divided among all devices;
    - from one training of a role to the next, the longest path of calls between them;
    - the first call of such a path, its last, and the work of any device that lies between these two.
    What is undecided counts with the least that it can be.

    choices: the numbers of the options of each placed call.
    """
    search = _Search(simulator, choices, below)
    search.slices(0)
    return Optimum(search.best, search.below if search.best is not None else math.inf, search.nodes)


class _Search:
    def __init__(self, simulator: Simulator, choices: Sequence[Sequence[int]], below: float):
        self.simulator, self.below, self.nodes = simulator, below, 0
        self.best: tuple[int, ...] | None = None
        calls = range(len(choices))
        self.there: list[dict[Slice, list[int]]] = [{} for _ in calls]  # of each call and slice: options, fastest first
        for call in calls:
            prices = simulator.options[call]
            for option in sorted(choices[call], key=lambda option, prices=prices: prices[option].seconds):
                self.there[call].setdefault(prices[option].placement.devices, []).append(option)
        slices = sorted({devices for by_slice in self.there for devices in by_slice})
        groups = segments(slices)
        self.devices = sum(group.count for group in groups)
        self.covers = {
            devices: [index for index, group in enumerate(groups) if group.overlaps(devices)] for devices in slices
        }
        fastest = [
            {devices: simulator.options[call][options[0]].seconds for devices, options in self.there[call].items()}
            for call in calls
        ]
        self.fastest = fastest
        self.area = [min(seconds * devices.count for devices, seconds in fastest[call].items()) for call in calls]
        self.order = sorted(calls, key=lambda call: -self.area[call])
        self.cycles = _cycles(simulator)
        # What is decided so far, or the least.
        self.where: list[Slice] = [slices[0] for _ in calls]
        self.seconds = [min(fastest[call].values()) for call in calls]
        self.work = [[0.0] * len(groups) for _ in calls]  # of each call, on each group of devices
        self.choice = [0 for _ in calls]
        self.stays, self.needs = [0.0] * len(groups), [[0.0] * len(groups)]

    def slices(self, depth: int) -> None:
        """Decides the slices of the calls from the `depth`-th on."""
        if depth == len(self.order):
            self.options(0)
            return
        call = self.order[depth]
        least, area = self.seconds[call], self.area[call]
        for devices, seconds in self.fastest[call].items():
            self.nodes += 1
            self.where[call], self.seconds[call], self.area[call] = devices, seconds, seconds * devices.count
            self._work(call, seconds)
            if self._bound() < self.below and nested([self.where[decided] for decided in self.order[: depth + 1]]):
                self.slices(depth + 1)
        self.seconds[call], self.area[call] = least, area
        self._work(call, 0.0)

    def options(self, depth: int) -> None:
        """Decides the options of the calls from the `depth`-th on, in slices that are decided."""
        simulator = self.simulator
        if depth == len(self.order):
            seconds, peak, runs = simulator.evaluate(self.choice)
            if seconds < self.below and peak <= simulator.capacity and runs:
                self.best, self.below = tuple(self.choice), seconds
            return
        call = self.order[depth]
        covered, least = self.covers[self.where[call]], self.seconds[call]
        for option in self.there[call][self.where[call]]:
            self.nodes += 1
            price = simulator.options[call][option]
            self.choice[call], self.seconds[call] = option, price.seconds
            self._work(call, self.seconds[call])
            if self._bound() >= self.below:
                break  # the further ones are slower
            needs = self.needs[-1][:]
            for group in covered:
                self.stays[group] += price.resident
                needs[group] = max(needs[group], price.active)
            if max(map(sum, zip(self.stays, needs, strict=True))) <= simulator.capacity:
                self.needs.append(needs)
                self.options(depth + 1)
                self.needs.pop()
            for group in covered:
                self.stays[group] -= price.resident
        self.seconds[call] = least
        self._work(call, least)

    def _work(self, call: int, seconds: float) -> None:
        row = self.work[call]
        for group in range(len(row)):
            row[group] = 0.0
        for group in self.covers[self.where[call]] if seconds else ():
            row[group] = seconds

    def _bound(self) -> float:
        """What an iteration takes at least."""
        seconds, bound = self.seconds, max(sum(self.area) / self.devices, max(map(sum, zip(*self.work, strict=True))))
        for path, between in self.cycles:
            bound = max(bound, sum([seconds[call] for call in path]))
            if between:
                meanwhile = max(map(sum, zip(*[self.work[call] for call in between], strict=True)))
                bound = max(bound, seconds[path[0]] + meanwhile + (seconds[path[-1]] if len(path) > 1 else 0.0))
        return bound


def _cycles(simulator: Simulator) -> list[tuple[list[int], list[int]]]:
    """The paths to every training that ends an iteration, from calls that wait for the one before.

    With each path, all calls that lie between its first and its last, on it or not.
    """
    rank = {number: index for index, number in enumerate(simulator.placed)}
    paths: list[list[int]] = []

    def walk(number: int, path: list[int], end: int) -> None:
        path = [number, *path]
        if end in simulator.updated[number]:
            paths.append(path)
        for before in simulator.before[number]:
            walk(before, path, end)

    for end in simulator.last:
        walk(end, [], end)
    cycles = []
    for path in paths:
        between = {call for other in paths if (other[0], other[-1]) == (path[0], path[-1]) for call in other[1:-1]}
        ranks = [[rank[call] for call in calls if call in rank] for calls in (path, sorted(between))]
        cycles.append((ranks[0], ranks[1]))
    return cycles
