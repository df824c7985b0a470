"""Simulates a plan's iterations: Algorithm 1 of ReaL (arXiv 2406.14088).

A call becomes ready when the calls whose values it reads have ended, and the last training of its weights. Calls occupy
their devices in the order in which they become ready; a device does one thing at a time. If a call's role is stored on
other devices or in another layout, the weights are moved first, which occupies both slices; so does a transfer of
values. Among work that becomes ready at the same time, transfers go first, then calls in the order of the program.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Literal

from jrlhf.meshes.graph import Graph
from jrlhf.meshes.plan import Placement, Plan, Slice, nested, segments
from jrlhf.planning.time import Price, Prices
from jrlhf.roles.graph import LEARNER, home_of

ITERATIONS = 5  # as in ReaL's code
STEADY = 2  # the iteration that is shown; earlier ones are still filling up
REMEMBERED = 100_000  # number of cached combinations of slices

# A call's group of devices and its seconds; the group of its weights' home, and the seconds to move them from there.
_Job = tuple[int, float, int, float]
Kind = Literal["call", "reallocation", "transfer"]


@dataclass(frozen=True)
class Span:
    """Work of `call` in `iteration` (from 0) that occupies its slices from `start` to `end`.

    kind: the call itself, the move of its weights, or the transfer of values to it.
    """

    kind: Kind
    call: str
    iteration: int
    start: float
    end: float
    devices: tuple[Slice, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def occupies(self, group: Slice) -> bool:
        return any(devices.overlaps(group) for devices in self.devices)


@dataclass(frozen=True)
class Memory:
    """Bytes of each of these devices: `resident` at all times, plus `active` during the call that adds most."""

    devices: Slice
    resident: float
    active: float

    @property
    def peak(self) -> float:
        return self.resident + self.active  # calls never overlap here


@dataclass(frozen=True)
class Simulation:
    """A plan's simulated iterations.

    seconds: of one iteration in the steady state. spans: in the order in which the devices were occupied. memory: of
    groups of neighbouring devices that run the same calls.
    """

    plan: Plan
    seconds: float
    spans: tuple[Span, ...]
    memory: tuple[Memory, ...]

    @property
    def steady(self) -> list[Span]:
        """The work of one iteration in the steady state."""
        return [span for span in self.spans if span.iteration == STEADY]

    @property
    def peak(self) -> float:
        return max(group.peak for group in self.memory)


def simulate(
    graph: Graph, plan: Plan, prices: Prices, iterations: int = ITERATIONS, *, lockstep: bool = False
) -> Simulation:
    """Simulates a plan with a record of all work. Calls that it does not place take no time.

    lockstep: an iteration begins when the one before has ended, as in a program that reads its metrics in between.

    The seconds of an iteration are (last end - first end) / (iterations - 1) of the slowest call among the last calls
    of an iteration, and at least the work of the busiest device.
    """
    if iterations < 2:
        raise ValueError(f"iterations={iterations}: a rate needs at least 2")
    roles = {graph[name].role for name in plan.placements}
    simulator = Simulator(graph, prices, roles, iterations, lockstep=lockstep)
    choice, spans = simulator.choice(plan), []
    seconds, brought = simulator.run(choice, record=spans)
    groups, sizes = segments(place.devices for place in plan.placements.values()), simulator.memory(choice, brought)
    memory = tuple(Memory(group, *size) for group, size in zip(groups, sizes, strict=True))
    return Simulation(plan, seconds, tuple(spans), memory)


class _Slices:
    """Facts that follow from the calls' slices alone.

    devices: the distinct slices, called groups. group: each call's group. overlapping: for each group, the groups that
    share devices with it. used, calls: for each segment of the devices, the groups and the calls that use it.
    """

    def __init__(self, slices: Sequence[Slice]):
        self.devices = ranges = list(dict.fromkeys(slices))
        self.group = group = [ranges.index(devices) for devices in slices]
        self.overlapping = [[index for index, other in enumerate(ranges) if own.overlaps(other)] for own in ranges]
        self.used = [{index for index, own in enumerate(ranges) if own.overlaps(part)} for part in segments(ranges)]
        self.calls = [[call for call, index in enumerate(group) if index in indices] for indices in self.used]
        self.nested = nested(ranges)


class Simulator:
    """Simulates thousands of plans a second: a plan is a vector with the number of each placed call's option.

    A graph's calls are numbered in the order of the program. Calls without a model take no time and have no devices;
    their values are stored where the actor is trained. Prices and facts that follow from slices alone are cached.

    placed: numbers of the calls that have a model; calls: their names. before: the calls whose outputs each call reads.
    updated: the calls of the previous iteration that each call waits for: the training of its weights; in lockstep,
        calls that read no other call's output also wait for all `last` calls.
    last: placed calls whose outputs no placed call of the iteration waits for.
    options: each placed call's prices by number, one for each placement that was added.
    """

    def __init__(
        self,
        graph: Graph,
        prices: Prices,
        roles: Collection[str],
        iterations: int = ITERATIONS,
        *,
        lockstep: bool = False,
    ):
        """roles: roles with a model. lockstep: iterations do not overlap."""
        self.graph, self.prices, self.iterations, self.capacity = graph, prices, iterations, prices.capacity
        calls, numbers = graph.calls, range(len(graph.calls))
        number = {call.name: index for index, call in enumerate(calls)}
        self.placed = placed = [at for at in numbers if calls[at].kind != "compute" and calls[at].role in roles]
        self.calls = tuple(calls[at].name for at in placed)
        self.before = before = [[number[other.name] for other in graph.before(call)] for call in calls]
        self._readers = readers = [[reader for reader in numbers if maker in before[reader]] for maker in numbers]

        def awaited(at: int) -> bool:
            """Returns whether a placed call reads the output of this call, directly or through arithmetic."""
            return any(reader in placed or awaited(reader) for reader in readers[at])

        self.last = last = [at for at in placed if not awaited(at)]
        home = {at: number[(home_of(graph, calls[at].role) or calls[at]).name] for at in placed}
        trained = [at for at in placed if calls[at].kind == "train"]
        anchor = next((at for at in trained if calls[at].role in ("actor", LEARNER)), (trained or placed)[0])
        updated = [[home[at]] if at in home and home[at] in trained else [] for at in numbers]
        if lockstep:
            updated = [waits if before[at] else sorted({*waits, *last}) for at, waits in enumerate(updated)]
        self.updated = updated
        self.options: list[list[Price]] = [[] for _ in placed]
        self._numbers_of: list[dict[Placement, int]] = [{} for _ in placed]
        self._slice: list[list[int]] = [[] for _ in placed]  # for each option, the number of its slice
        self._stored: list[list[int]] = [[] for _ in placed]  # and the number of its placement without micro-batches
        self._devices: dict[Slice, int] = {}
        self._places: dict[Placement, int] = {}
        self._transfers: dict[tuple[int, int], float] = {}
        self._reallocations: list[dict[tuple[int, int], float]] = [{} for _ in placed]
        self._remembered: dict[tuple[int, ...], _Slices] = {}
        rank = {at: index for index, at in enumerate(placed)}
        self._home = [rank[home[at]] for at in placed]
        self._runs_with = [rank.get(at, rank[anchor]) for at in numbers]
        count = len(calls)
        self._next = [[count + reader for reader in numbers if maker in updated[reader]] for maker in numbers]
        first = [len(inputs) for inputs in before]
        later = [len(inputs) + len(waits) for inputs, waits in zip(before, updated, strict=True)]
        # There is an additional iteration that never becomes ready, so that the last one is no special case.
        self._pending_inputs = first + later * (iterations - 1) + [count + 2] * count

    def add(self, call: int, placement: Placement) -> int:
        """Returns the number of this option of a call; a new option is priced."""
        numbers = self._numbers_of[call]
        if placement not in numbers:
            numbers[placement] = len(numbers)
            self.options[call].append(self.prices.call(self.graph[self.calls[call]], placement))
            self._slice[call].append(self._devices.setdefault(placement.devices, len(self._devices)))
            place = replace(placement, micro_batches=1)  # micro-batches do not change where weights and rows are stored
            self._stored[call].append(self._places.setdefault(place, len(self._places)))
        return numbers[placement]

    def choice(self, plan: Plan) -> tuple[int, ...]:
        return tuple(self.add(index, plan[name]) for index, name in enumerate(self.calls))

    def plan(self, choice: Sequence[int], name: str) -> Plan:
        return Plan(name, {call: price.placement for call, price in zip(self.calls, self._chosen(choice), strict=True)})

    def _chosen(self, choice: Sequence[int]) -> list[Price]:
        return [options[number] for options, number in zip(self.options, choice, strict=True)]

    def evaluate(self, choice: Sequence[int]) -> tuple[float, float, bool]:
        """Returns the seconds of an iteration, the peak bytes of the fullest device, and whether slices are nested."""
        seconds, brought = self.run(choice)
        peak = max([resident + active for resident, active in self.memory(choice, brought)])
        return seconds, peak, self._slices(choice).nested

    def memory(self, choice: Sequence[int], brought: Sequence[int]) -> list[tuple[float, float]]:
        """Returns (resident, active) bytes of a device in each segment; brought: as `run` returns them."""
        chosen = self._chosen(choice)
        active = [price.active for price in chosen]
        for call in brought:
            active[call] += chosen[call].moved
        return [
            (sum([chosen[call].resident for call in calls]), max([active[call] for call in calls]))
            for calls in self._slices(choice).calls
        ]

    def run(self, choice: Sequence[int], record: list[Span] | None = None) -> tuple[float, list[int]]:
        """Simulates all iterations.

        Returns the seconds of one, and the numbers of the calls whose weights are moved from elsewhere. record: all
        work is appended to it.
        """
        slices, chosen, jobs = self._slices(choice), self._chosen(choice), dict[int, _Job]()
        group, work, brought = slices.group, [], []
        stored = [values[option] for values, option in zip(self._stored, choice, strict=True)]
        for call, number in enumerate(self.placed):
            home, own, seconds, fetching = self._home[call], group[call], chosen[call].seconds, 0.0
            work.append((seconds, own, own))
            if stored[call] != stored[home]:
                seconds_of, key = self._reallocations[call], (stored[home], stored[call])
                if key not in seconds_of:  # prices of moves do not depend on micro-batches, which the key lacks
                    role = self.graph.calls[number].role
                    seconds_of[key] = self.prices.reallocation(role, chosen[home].placement, chosen[call].placement)
                if fetching := seconds_of[key]:
                    brought.append(call)
                    work.append((fetching, group[home], own))
            jobs[number] = own, seconds, group[home], fetching
        direct, moved = [], []  # readers of a call's output: without and after a transfer
        for maker, readers in enumerate(self._readers):
            source, here, there = self._runs_with[maker], list(self._next[maker]), []
            for reader in readers:
                target = self._runs_with[reader]
                moving = 0.0
                if stored[source] != stored[target]:
                    key = stored[source], stored[target]
                    if key not in self._transfers:
                        ends = chosen[source].placement, chosen[target].placement
                        self._transfers[key] = self.prices.transfer(*ends)
                    moving = self._transfers[key]
                if moving:
                    there.append((reader, (moving, group[source], group[target])))
                    work.append((moving, group[source], group[target]))
                else:
                    here.append(reader)
            direct.append(here)
            moved.append(there)
        ends = self._schedule(jobs, direct, moved, slices, record)
        turns, count = self.iterations - 1, len(self.before)
        rate = max([(ends[turns * count + number] - ends[number]) / turns for number in self.last])
        busiest = max([sum([length for length, a, b in work if a in used or b in used]) for used in slices.used])
        return (rate if rate > busiest else busiest), brought

    def _schedule(
        self,
        jobs: dict[int, _Job],
        direct: list[list[int]],
        moved: list[list[tuple[int, tuple[float, int, int]]]],
        slices: _Slices,
        record: list[Span] | None,
    ) -> list[float]:
        """Algorithm 1. Returns when each call ends: call `number` of iteration `i` at i * count + number.

        jobs: of placed calls, by number. Other calls end when their inputs are ready.
        direct, moved: the readers of its output, without a transfer or after one of (seconds, source, target); a reader
        of the next iteration has a number that is higher by `count`.
        """
        count, overlapping = len(self.before), slices.overlapping
        everything = count * self.iterations
        pending_inputs = self._pending_inputs[:]
        ready_at, ends = [0.0] * (everything + count), [0.0] * (everything + count)
        free = [0.0] * len(overlapping)
        # (when, what goes first, ...): calls by number; transfers by negative numbers, with their reader and lengths.
        begun = [at for at in range(everything) if not pending_inputs[at]]
        ready: list = [(0.0, at) for at in begun if at % count in jobs]
        done = [at for at in begun if at % count not in jobs]

        def occupy(kind: Kind, at: int, first: int, second: int, start: float, length: float) -> float:
            """Returns the end of work that starts when both groups are free."""
            for other in overlapping[first]:
                if free[other] > start:  # an `if`, because max() is slow
                    start = free[other]
            if second != first:
                for other in overlapping[second]:
                    if free[other] > start:
                        start = free[other]
            free[first] = free[second] = end = start + length
            if record is not None:
                devices = tuple(dict.fromkeys((slices.devices[first], slices.devices[second])))
                record.append(Span(kind, self.graph.calls[at % count].name, at // count, start, end, devices))
            return end

        def deliver(reader: int, when: float) -> None:
            if when > ready_at[reader]:
                ready_at[reader] = when
            pending_inputs[reader] -= 1
            if not pending_inputs[reader]:
                if reader % count not in jobs:
                    done.append(reader)
                else:
                    heappush(ready, (ready_at[reader], reader))

        while done or ready:
            if done:
                at = done.pop()
                end, number = ready_at[at], at % count
            else:
                item = heappop(ready)
                end, at = item[0], item[1]
                if at < 0:
                    reader, (length, source, target) = item[2]
                    deliver(reader, occupy("transfer", reader, source, target, end, length))
                    continue
                number = at % count
                own, seconds, home, fetching = jobs[number]
                if fetching:
                    end = occupy("reallocation", at, home, own, end, fetching)
                end = occupy("call", at, own, own, end, seconds)
            ends[at] = end
            base = at - number
            for reader, transfer in moved[number]:
                heappush(ready, (end, (at - everything) * count + reader, (base + reader, transfer)))
            for reader in direct[number]:
                deliver(base + reader, end)
        return ends

    def _slices(self, choice: Sequence[int]) -> _Slices:
        key = tuple([values[option] for values, option in zip(self._slice, choice, strict=True)])
        if key not in self._remembered:
            if len(self._remembered) > REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = _Slices([price.placement.devices for price in self._chosen(choice)])
        return self._remembered[key]
