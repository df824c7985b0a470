"""The simulator for a search: the same numbers as `simulator.simulate`, thousands of times a second.

Calls, placements and slices are small integers; what prices say is asked for once; what follows from slices alone (who
overlaps whom) is remembered. The loop is Algorithm 1, as `simulator` tells it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from jrlhf.meshes import Graph
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.prices import Prices
from jrlhf.planning.simulator import ITERATIONS, place
from jrlhf.planning.slices import nested, segments
from jrlhf.planning.topology import topology

REMEMBERED = 100_000  # of combinations of slices


class Evaluator:
    """Evaluates plans, given as one number a placed call: which of the options that were added for it.

    calls: the placed calls' names. options: of each, its placements by number. seconds, resident, active, moved: their
        prices.
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
        self.graph, self.prices, self.iterations = graph, prices, iterations
        self.order = order = topology(graph, roles, lockstep=lockstep)
        self.calls = tuple(call.name for index, call in enumerate(graph.calls) if order.placed[index])
        numbers = [index for index in range(len(graph.calls)) if order.placed[index]]
        self._numbers = numbers
        self.options: list[list[Placement]] = [[] for _ in numbers]
        self.seconds: list[list[float]] = [[] for _ in numbers]
        self.resident: list[list[float]] = [[] for _ in numbers]
        self.active: list[list[float]] = [[] for _ in numbers]
        self.moved: list[list[float]] = [[] for _ in numbers]
        self.capacity = prices.capacity
        self._known: list[dict[Placement, int]] = [{} for _ in numbers]
        self._slice: list[list[int]] = [[] for _ in numbers]
        self._place: list[list[int]] = [[] for _ in numbers]
        self._slices: dict[Slice, int] = {}
        self._devices: list[Slice] = []
        self._places: dict[Placement, int] = {}
        self._transfers: dict[tuple[int, int], float] = {}
        self._reallocations: list[dict[tuple[int, int], float]] = [{} for _ in numbers]
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        rank = {number: index for index, number in enumerate(numbers)}
        self._home = [rank[order.home[number]] for number in numbers]
        self._where = [rank.get(number, rank[order.anchor]) for number in range(len(graph.calls))]
        count = len(graph.calls)
        self._readers = [[reader for reader in range(count) if maker in order.before[reader]] for maker in range(count)]
        self._next = [
            [count + reader for reader in range(count) if maker in order.updated[reader]] for maker in range(count)
        ]
        first = [len(before) for before in order.before]
        later = [len(before) + len(updated) for before, updated in zip(order.before, order.updated, strict=True)]
        # One iteration more than there are, which never becomes ready, so that the last need not be told apart.
        self._waits = first + later * (iterations - 1) + [count + 2] * count

    def add(self, call: int, placement: Placement) -> int:
        """The number of this option of a call, priced when it is new."""
        known = self._known[call]
        if placement not in known:
            price = self.prices.call(self.graph.calls[self._numbers[call]], placement)
            known[placement] = len(self.options[call])
            self.options[call].append(placement)
            self.seconds[call].append(price.seconds)
            self.resident[call].append(price.resident)
            self.active[call].append(price.active)
            self.moved[call].append(price.moved)
            self._slice[call].append(self._number(placement.devices))
            self._place[call].append(self._places.setdefault(place(placement), len(self._places)))
        return known[placement]

    def _number(self, devices: Slice) -> int:
        if devices not in self._slices:
            self._slices[devices] = len(self._devices)
            self._devices.append(devices)
        return self._slices[devices]

    def choice(self, plan: Plan) -> tuple[int, ...]:
        """A plan as numbers."""
        return tuple(self.add(index, plan[name]) for index, name in enumerate(self.calls))

    def plan(self, choice: Sequence[int], name: str) -> Plan:
        """Numbers as a plan."""
        return Plan(name, {call: self.options[at][choice[at]] for at, call in enumerate(self.calls)})

    def evaluate(self, choice: Sequence[int]) -> tuple[float, float, bool]:
        """Seconds of an iteration, bytes of the fullest device at its worst, and whether slices are nested."""
        slices = tuple([known[option] for known, option in zip(self._slice, choice, strict=True)])
        shape = self._shapes.get(slices) or self._shape(slices)
        group, overlapping = shape.group, shape.overlapping
        places = [known[option] for known, option in zip(self._place, choice, strict=True)]
        count, where, transfers = len(self._readers), self._where, self._transfers
        seconds, device, fetch, work = [0.0] * count, [-1] * count, [(0.0, 0)] * count, []
        active = [known[option] for known, option in zip(self.active, choice, strict=True)]
        for call, number in enumerate(self._numbers):
            seconds[number] = self.seconds[call][choice[call]]
            device[number] = own = group[call]
            work.append((seconds[number], own, own))
            home = self._home[call]
            if places[call] != places[home]:
                key = places[home], places[call]
                fetching = self._reallocations[call].get(key)
                if fetching is None:
                    fetching = self._reallocation(call, home, choice)
                if fetching:
                    fetch[number] = fetching, group[home]
                    active[call] += self.moved[call][choice[call]]
                    work.append((fetching, group[home], own))
        direct, moved = [], []
        for maker, readers in enumerate(self._readers):
            source, here, there = where[maker], list(self._next[maker]), []
            for reader in readers:
                target = where[reader]
                moving = 0.0
                if places[source] != places[target]:
                    moving = transfers.get((places[source], places[target]))
                    if moving is None:
                        moving = self._transfer(source, target, choice)
                if moving:
                    there.append((reader, (moving, group[source], group[target])))
                    work.append((moving, group[source], group[target]))
                else:
                    here.append(reader)
            direct.append(here)
            moved.append(there)
        ends = _run(self._waits[:], seconds, device, fetch, direct, moved, overlapping, self.iterations)
        turns = self.iterations - 1
        slowest = max([(ends[turns * count + number] - ends[number]) / turns for number in self.order.last])
        busiest = max([sum([each for each, a, b in work if a in used or b in used]) for used in shape.used])
        resident = [known[option] for known, option in zip(self.resident, choice, strict=True)]
        peak = max(
            [sum([resident[call] for call in calls]) + max([active[call] for call in calls]) for calls in shape.calls]
        )
        return (slowest if slowest > busiest else busiest), peak, shape.nested

    def _shape(self, slices: tuple[int, ...]) -> "_Shape":
        """What follows from the slices of the calls, whatever else their options say."""
        if len(self._shapes) > REMEMBERED:
            self._shapes.clear()
        distinct = list(dict.fromkeys(slices))
        group = [distinct.index(each) for each in slices]
        known = [self._devices[each] for each in distinct]
        overlapping = [[index for index, other in enumerate(known) if each.overlaps(other)] for each in known]
        used = [{index for index, each in enumerate(known) if each.overlaps(segment)} for segment in segments(known)]
        calls = [[call for call, index in enumerate(group) if index in each] for each in used]
        self._shapes[slices] = shape = _Shape(group, overlapping, used, calls, nested(known))
        return shape

    def _reallocation(self, call: int, home: int, choice: Sequence[int]) -> float:
        source, target = self.options[home][choice[home]], self.options[call][choice[call]]
        key = self._place[home][choice[home]], self._place[call][choice[call]]
        role = self.graph.calls[self._numbers[call]].role
        seconds = self._reallocations[call][key] = self.prices.reallocation(role, place(source), place(target))
        return seconds

    def _transfer(self, source: int, target: int, choice: Sequence[int]) -> float:
        key = self._place[source][choice[source]], self._place[target][choice[target]]
        ends = self.options[source][choice[source]], self.options[target][choice[target]]
        seconds = self._transfers[key] = self.prices.transfer(place(ends[0]), place(ends[1]))
        return seconds


@dataclass(frozen=True)
class _Shape:
    """Of the calls' slices: each call's group of equal slices, which groups overlap, of every segment of the devices
    the groups and the calls that use it, and whether any two are nested."""

    group: list[int]
    overlapping: list[list[int]]
    used: list[set[int]]
    calls: list[list[int]]
    nested: bool


def _run(
    waits: list[int],
    seconds: list[float],
    device: list[int],
    fetch: list[tuple[float, int]],
    direct: list[list[int]],
    moved: list[list[tuple[int, tuple[float, int, int]]]],
    overlapping: list[list[int]],
    iterations: int,
) -> list[float]:
    """Algorithm 1: when each call ends, call `number` of iteration `i` at i * count + number.

    waits: how many things each call waits for. device: its group of slices, -1 for none. fetch: seconds that its
    weights take, and their home's group. direct, moved: who reads what it makes, at once, or after a transfer's
    (seconds, source, target); a reader of the next iteration is numbered `count` higher.
    """
    count = len(seconds)
    everything = count * iterations
    arrived, ends, free = [0.0] * (everything + count), [0.0] * (everything + count), [0.0] * len(overlapping)
    ready: list = []  # (when, what goes first, ...): calls by number, transfers below 0 and with where they lead
    done: list[int] = []  # calls without devices, which end when they become ready
    for at in range(everything):
        if not waits[at]:
            if device[at % count] < 0:
                done.append(at)
            else:
                ready.append((0.0, at))
    while done or ready:
        if done:
            at = done.pop()
            end = arrived[at]
        else:
            item = heappop(ready)
            end, at = item[0], item[1]
            if at < 0:
                reader, (length, source, target) = item[2]
                for other in overlapping[source]:
                    if free[other] > end:
                        end = free[other]
                for other in overlapping[target]:
                    if free[other] > end:
                        end = free[other]
                free[source] = free[target] = end = end + length
                if end > arrived[reader]:
                    arrived[reader] = end
                waits[reader] -= 1
                if not waits[reader]:
                    if device[reader % count] < 0:
                        done.append(reader)
                    else:
                        heappush(ready, (arrived[reader], reader))
                continue
            number = at % count
            own = device[number]
            length, home = fetch[number]
            if length:
                for other in overlapping[home]:
                    if free[other] > end:
                        end = free[other]
                for other in overlapping[own]:
                    if free[other] > end:
                        end = free[other]
                end += length
                free[home] = end
            else:
                for other in overlapping[own]:
                    if free[other] > end:
                        end = free[other]
            free[own] = end = end + seconds[number]
        ends[at] = end
        number = at % count
        base = at - number
        for reader, transfer in moved[number]:
            heappush(ready, (end, (at - everything) * count + reader, (base + reader, transfer)))
        for reader in direct[number]:
            reader += base
            if end > arrived[reader]:
                arrived[reader] = end
            waits[reader] -= 1
            if not waits[reader]:
                if device[reader % count] < 0:
                    done.append(reader)
                else:
                    heappush(ready, (arrived[reader], reader))
    return ends
