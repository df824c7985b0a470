"""What a plan does with time and memory: Algorithm 1 of ReaL (arXiv 2406.14088) over a few iterations.

Calls become ready when what they wait for has ended: the calls whose values they read, and the last training of their
weights. In the order in which they become ready they take their devices, each after all work that was given to one of
them before: a device does one thing at a time. A call whose role lives elsewhere, or otherwise, first fetches the
weights, which occupies both places; values that are made in one place and read in another occupy both while they move.
Among things that become ready together, transfers go first, then calls in the order in which the program makes them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jrlhf.meshes import Graph
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.prices import Prices
from jrlhf.planning.slices import segments
from jrlhf.planning.topology import Topology, topology

ITERATIONS = 5  # as in ReaL's code


@dataclass(frozen=True)
class Span:
    """Work of `call` in `iteration` (from 0) that occupies all devices of its slices from `start` to `end`.

    kind: the call itself, the reallocation of its weights before it, or the transfer of values from `source` to it.
    """

    kind: Literal["call", "reallocation", "transfer"]
    call: str
    iteration: int
    start: float
    end: float
    devices: tuple[Slice, ...]
    source: str = ""

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True)
class Memory:
    """Of each of these devices: bytes that stay, and (start, end, bytes) of what each call needs besides.

    A call's copies of weights are among its bytes, so these begin with the reallocation before it.
    """

    devices: Slice
    resident: float
    active: tuple[tuple[float, float, float], ...]

    @property
    def peak(self) -> float:
        """The most at any time: calls of one device never overlap."""
        return self.resident + max((size for _, _, size in self.active), default=0.0)


@dataclass(frozen=True)
class Simulation:
    """A plan's iterations.

    seconds: of one iteration, in the long run.
    total: from the first iteration's begin to the last one's end.
    spans: in the order in which they were given to the devices. Calls without a model have none.
    memory: of groups of neighbouring devices that all do the same.
    """

    seconds: float
    total: float
    spans: tuple[Span, ...]
    memory: tuple[Memory, ...]

    @property
    def peak(self) -> float:
        """Bytes of the fullest device at its worst."""
        return max(each.peak for each in self.memory)


def simulate(
    graph: Graph, plan: Plan, prices: Prices, iterations: int = ITERATIONS, *, lockstep: bool = False
) -> Simulation:
    """The plan's iterations on `graph`. Calls that it does not place take no time.

    lockstep: an iteration begins when the one before has ended, as in a program that reads its metrics in between.

    An iteration's seconds are (end of the last - end of the first) / (iterations - 1), of the slowest of the calls that
    end it; and never less than the work that an iteration has for its busiest device, whatever a few iterations show.

    Raises:
        ValueError: fewer than two iterations, which have no rate.
    """
    if iterations < 2:
        raise ValueError(f"iterations={iterations}: a rate needs at least 2")
    order = topology(graph, {graph[name].role for name in plan.placements}, lockstep=lockstep)
    schedule = _Schedule(order, plan, prices, iterations)
    spans = schedule.run()
    ends = {(span.call, span.iteration): span.end for span in spans if span.kind == "call"}
    names = [graph.calls[index].name for index in order.last]
    steady = max((ends[name, iterations - 1] - ends[name, 0]) / (iterations - 1) for name in names)
    groups = segments([placement.devices for placement in plan.placements.values()])
    busiest = max(_busy(group, spans) for group in groups) / iterations
    memory = tuple(_memory(group, plan, schedule, spans) for group in groups)
    return Simulation(max(steady, busiest), max(ends.values()), tuple(spans), memory)


def place(placement: Placement) -> Placement:
    """What of a placement says where weights and rows lie: micro-batches do not."""
    return replace(placement, micro_batches=1)


class _Schedule:
    """Algorithm 1's state: what waits for how much, what is ready, and how long each device is taken."""

    def __init__(self, order: Topology, plan: Plan, prices: Prices, iterations: int):
        calls = order.graph.calls
        self.order, self.iterations, self.source = order, iterations, prices
        self.places = [plan[calls[each if order.placed[each] else order.anchor].name] for each in range(len(calls))]
        self.prices = {
            call.name: prices.call(call, self.places[index]) for index, call in enumerate(calls) if order.placed[index]
        }
        self.fetching = [self._fetching(index) if order.placed[index] else 0.0 for index in range(len(calls))]
        self.brought = {calls[index].name for index, seconds in enumerate(self.fetching) if seconds}
        self.ready: list[tuple[float, int, int, int, int]] = []  # when, what goes first, iteration, call, read by
        self.waits = {(at, each): self._waits(at, each) for at in range(iterations) for each in range(len(calls))}
        self.arrived = dict.fromkeys(self.waits, 0.0)
        self.taken: dict[Slice, float] = {}  # when each slice's last work ends
        self.spans: list[Span] = []

    def run(self) -> list[Span]:
        for iteration, call in [key for key, count in self.waits.items() if not count]:
            self._push(iteration, call, 0.0)
        while self.ready:
            when, _, iteration, call, reader = heapq.heappop(self.ready)
            if reader >= 0:
                end = self._transfer(iteration, call, reader, when)
                self._arrive(iteration, reader, end)
            else:
                self._finish(iteration, call, self._call(iteration, call, when) if self.order.placed[call] else when)
        return self.spans

    def _waits(self, iteration: int, call: int) -> int:
        return len(self.order.before[call]) + (len(self.order.updated[call]) if iteration else 0)

    def _push(self, iteration: int, call: int, when: float, reader: int = -1) -> None:
        first = 0 if reader < 0 and not self.order.placed[call] else 1 if reader >= 0 else 2
        heapq.heappush(self.ready, (when, first, iteration, call, reader))

    def _occupy(
        self, kind, iteration: int, call: int, ready: float, seconds: float, places: list[Slice], source=""
    ) -> float:
        busy = (end for each, end in self.taken.items() if any(each.overlaps(wanted) for wanted in places))
        start = max(ready, *busy, 0.0)
        end = start + seconds
        self.taken |= dict.fromkeys(places, end)
        name = self.order.graph.calls[call].name
        self.spans.append(Span(kind, name, iteration, start, end, tuple(dict.fromkeys(places)), source))
        return end

    def _fetching(self, call: int) -> float:
        """Seconds that a call's weights take from where its role lives."""
        here, home = place(self.places[call]), place(self.places[self.order.home[call]])
        return 0.0 if here == home else self.source.reallocation(self.order.graph.calls[call].role, home, here)

    def _call(self, iteration: int, call: int, ready: float) -> float:
        here, home = self.places[call], self.places[self.order.home[call]]
        if seconds := self.fetching[call]:
            ready = self._occupy("reallocation", iteration, call, ready, seconds, [home.devices, here.devices])
        seconds = self.prices[self.order.graph.calls[call].name].seconds
        return self._occupy("call", iteration, call, ready, seconds, [here.devices])

    def _transfer(self, iteration: int, maker: int, reader: int, ready: float) -> float:
        source, target = self.places[maker], self.places[reader]
        seconds = self.source.transfer(place(source), place(target))
        name = self.order.graph.calls[maker].name
        return self._occupy("transfer", iteration, reader, ready, seconds, [source.devices, target.devices], name)

    def _finish(self, iteration: int, call: int, end: float) -> None:
        for reader in range(len(self.order.before)):
            if call in self.order.before[reader]:
                source, target = place(self.places[call]), place(self.places[reader])
                if source != target and self.source.transfer(source, target):
                    self._push(iteration, call, end, reader)
                else:
                    self._arrive(iteration, reader, end)
            if iteration + 1 < self.iterations and call in self.order.updated[reader]:
                self._arrive(iteration + 1, reader, end)

    def _arrive(self, iteration: int, call: int, when: float) -> None:
        key = iteration, call
        self.arrived[key] = max(self.arrived[key], when)
        self.waits[key] -= 1
        if not self.waits[key]:
            self._push(iteration, call, self.arrived[key])


def _busy(group: Slice, spans: Sequence[Span]) -> float:
    return sum(span.seconds for span in spans if any(each.overlaps(group) for each in span.devices))


def _memory(group: Slice, plan: Plan, schedule: _Schedule, spans: Sequence[Span]) -> Memory:
    here = [name for name, placement in plan.placements.items() if placement.devices.overlaps(group)]
    starts = {(span.call, span.iteration): span.start for span in reversed(spans) if span.kind != "transfer"}
    prices = schedule.prices
    needs = {name: prices[name].active + prices[name].moved * (name in schedule.brought) for name in here}
    active = [
        (starts[span.call, span.iteration], span.end, needs[span.call])
        for span in spans
        if span.kind == "call" and span.call in here
    ]
    return Memory(group, sum(prices[name].resident for name in here), tuple(active))
