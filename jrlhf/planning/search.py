"""Searches for the fastest plan of a workload on a cluster, by Metropolis-Hastings over all calls' candidates.

As in ReaL (arXiv 2406.14088), a proposal changes one call's placement and is accepted with probability
min(1, exp(-beta * slower / T_best)); a plan that does not fit the memory counts as slower. The temperature is relative,
so one beta works for models of every size. A part of the proposals changes the devices of two calls: if memory is
scarce, often no plan fits in which only one of them has moved. Several chains run in turn: from each call's fastest
candidate, from ReaL's symmetric heuristic, and from HybridFlow's placements of whole models (arXiv 2409.19256).
"""

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from operator import attrgetter
from typing import Any

from jrlhf.meshes.graph import Graph
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.candidates import NoPlan, by_key, candidates, placements, slices
from jrlhf.planning.moves import stored_alike
from jrlhf.planning.simulate import Simulation, Simulator, simulate
from jrlhf.planning.time import CostModel, Price
from jrlhf.roles.graph import LEARNER, home_of
from jrlhf.run.files import in_units

Candidates = Mapping[str, Sequence[Price]]
RULES = ("heuristic", "colocate", "split", "standalone")
BETAS = (20.0, 40.0, 80.0)  # assigned to the chains in turn
PAIRS = 0.2  # share of proposals that move two calls
TURN = 250  # number of proposals of a chain before the next chain's turn
STARTS = 4  # number of chains that start from HybridFlow's placements, in addition to the named ones
RUNNERS_UP = 3
STRANDED = 1.1  # a chain that is slower than the best by this factor at the end of its turn restarts from the best


@dataclass(frozen=True)
class Result:
    """The result of a search.

    best: the fastest plan that fits. runners_up: the next best plans that differ in a call's devices or layout.
    rules: plans by rule that fit, by name. trace: (proposals, seconds of an iteration) of each improvement.
    """

    best: Simulation
    runners_up: tuple[Simulation, ...]
    rules: Mapping[str, Simulation]
    proposals: int
    seconds: float
    trace: tuple[tuple[int, float], ...]

    def improved(self, best: Simulation, name: str) -> "Result":
        """Returns the result with a new best plan; the former one, with a new name, is the first of the runners-up."""
        former = replace(self.best, plan=replace(self.best.plan, name=name))
        return replace(self, best=best, runners_up=(former, *self.runners_up))


def search(
    prices: CostModel,
    *,
    proposals: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    hypothetical: bool = False,
    lockstep: bool = True,
    progress: Callable[[int, float], None] | None = None,
) -> Result:
    """Returns the fastest plan that is found, and plans to compare it with.

    proposals, seconds: the budget. With proposals alone the result depends only on the seed.
    hypothetical: also consider pipelines for every call, of which a run executes some (`fusion.proposal` adds these to
        the result without it). lockstep: iterations do not overlap, as in a run that reads the metrics of one before it
        begins the next.
    progress: called after each chain's turn with the proposals so far and the best plan's seconds.
    """
    if proposals is None and seconds is None:
        raise ValueError("a budget needs proposals or seconds")
    began = time.monotonic()
    workload = prices.workload
    options = candidates(prices, hypothetical=hypothetical)
    simulator = Simulator(workload.graph, prices, workload.models, lockstep=lockstep)
    choices = [
        [simulator.add(call, candidate.placement) for candidate in options[name]]
        for call, name in enumerate(simulator.calls)
    ]
    divided = divisions(prices, options)
    symmetric = heuristic(prices, options)
    rules = {} if symmetric is None else {"heuristic": symmetric}
    rules |= {name: division.plan for name, division in named_divisions(divided).items()}
    fastest = Plan("fastest", {name: ranked[0].placement for name, ranked in options.items()})
    plans = [fastest, *rules.values(), *(division.plan for division in divided[:STARTS])]
    starts = list(dict.fromkeys(simulator.choice(plan) for plan in plans))
    chains = Chains(simulator, choices, starts, seed)
    for count in chains:
        spent = time.monotonic() - began
        if progress is not None:
            progress(count, chains.best_seconds)
        if (proposals is not None and count >= proposals) or (seconds is not None and spent >= seconds):
            break
    spent = time.monotonic() - began
    if chains.best is None:
        raise NoPlan(
            f"no plan was found in which all models fit {in_units(prices.capacity)} a device: the leanest of "
            f"{chains.proposals} plans needs {in_units(chains.least)} of each device"
        )

    simulated = partial(simulate, workload.graph, prices=prices, lockstep=lockstep)
    best = simulated(simulator.plan(chains.best, "searched"))
    others, seen = [], {_look(best.plan)}
    for choice, _ in sorted(chains.elite.items(), key=lambda item: item[1]):
        other = simulator.plan(choice, f"next {len(others) + 1}")
        if _look(other) not in seen and len(others) < RUNNERS_UP:
            seen.add(_look(other))
            others.append(simulated(other))
    by_rule = {name: simulated(rule) for name, rule in rules.items()}
    fitting = {name: one for name, one in by_rule.items() if one.peak <= prices.capacity}
    return Result(best, tuple(others), fitting, chains.proposals, spent, tuple(chains.trace))


def _look(plan: Plan) -> tuple:
    """Returns each call's devices and layout; plans count as different if these differ."""
    return tuple((name, placement.devices, placement.layout) for name, placement in plan.placements.items())


class Chains:
    """Metropolis-Hastings chains in turn. Iterating yields the number of proposals so far, after each turn.

    best, best_seconds: the fastest choice that fits; None and infinity before there is one. least: the smallest peak
    bytes of a plan so far. elite: seconds of the best choices. trace: (proposals, seconds) of each improvement.
    """

    def __init__(
        self, simulator: Simulator, choices: Sequence[Sequence[int]], starts: Sequence[Sequence[int]], seed: int
    ):
        self.simulator, self.random = simulator, random.Random(seed)
        self.by_size: list[list[list[int]]] = []  # for each call, its options grouped by the number of devices
        self.by_slice: list[dict[Slice, list[int]]] = []  # and by slice, the fastest first
        for call, numbers in enumerate(choices):
            options = simulator.options[call]
            devices = [option.placement.devices for option in options]
            fastest = sorted(numbers, key=lambda number: options[number].seconds)
            self.by_size.append(list(by_key((devices[number].count, number) for number in numbers).values()))
            self.by_slice.append(by_key((devices[number], number) for number in fastest))
        self.best: tuple[int, ...] | None = None
        self.best_seconds, self.least, self.proposals = math.inf, math.inf, 0
        self.elite: dict[tuple[int, ...], float] = {}
        self.trace: list[tuple[int, float]] = []
        self.states = [(tuple(start), self._cost(tuple(start))) for start in starts]

    def __iter__(self) -> Iterator[int]:
        for chain in cycle(range(len(self.states))):
            self._turn(chain, BETAS[chain % len(BETAS)])
            yield self.proposals

    def _turn(self, chain: int, beta: float) -> None:
        draw, (state, cost) = self.random.random, self.states[chain]
        for _ in range(TURN):
            proposal = self._propose(state)
            proposed = self._cost(proposal)
            scale = min(self.best_seconds, cost)
            if proposed <= cost or draw() < math.exp(-beta * (proposed - cost) / scale):
                state, cost = proposal, proposed
        if self.best is not None and cost > STRANDED * self.best_seconds and chain:
            state, cost = self.best, self.best_seconds
        self.states[chain] = state, cost

    def _propose(self, state: tuple[int, ...]) -> tuple[int, ...]:
        """Draws another candidate for one call. A number of devices is drawn first, because there are few large slices:
        so these are as likely as small ones."""
        draw = self.random
        if len(state) > 1 and draw.random() < PAIRS and (moved := self._move_two(state)) is not None:
            return moved
        call = draw.randrange(len(state))
        option = draw.choice(draw.choice(self.by_size[call]))
        return state[:call] + (option,) + state[call + 1 :]

    def _move_two(self, state: tuple[int, ...]) -> tuple[int, ...] | None:
        """Draws two calls, and moves them to two halves of their common devices, from two halves to the whole, or to
        each other's devices. Fast candidates are more likely. Returns None if there is no such move."""
        calls = self.random.sample(range(len(state)), 2)
        first, second = (self.simulator.options[call][state[call]].placement.devices for call in calls)
        count, changed = first.count, list(state)
        if first == second:
            targets = Slice(first.start, max(count // 2, 1)), Slice(first.start + count // 2, max(count // 2, 1))
        elif first.stop == second.start and count == second.count:
            targets = (Slice(first.start, 2 * count),) * 2
        else:
            targets = second, first
        for call, devices in zip(calls, targets, strict=True):
            options = self.by_slice[call].get(devices)
            if options is None:
                return None
            changed[call] = options[int(len(options) * self.random.random() ** 3)]
        return tuple(changed)

    def _cost(self, choice: tuple[int, ...]) -> float:
        """Returns the seconds of a plan; at least twice as much if it does not fit or run, more the less it fits."""
        self.proposals += 1
        seconds, peak, runs = self.simulator.evaluate(choice)
        self.least = min(self.least, peak) if runs else self.least
        if peak > self.simulator.capacity or not runs:
            return seconds * 2 * max(peak / self.simulator.capacity, 1.0)
        if seconds < self.best_seconds:
            self.best, self.best_seconds = choice, seconds
            self.trace.append((self.proposals, seconds))
        if seconds < 1.5 * self.best_seconds:
            self.elite[choice] = seconds
            if len(self.elite) > 4000:
                self.elite = dict(sorted(self.elite.items(), key=lambda item: item[1])[:1000])
        return seconds


# ---- plans by rule


@dataclass(frozen=True)
class Division:
    """One of HybridFlow's plans. sets: roles that share devices. counts: devices of each set. seconds: its cost."""

    plan: Plan
    sets: tuple[tuple[str, ...], ...]
    counts: tuple[int, ...]
    seconds: float


def heuristic(prices: CostModel, options: Candidates) -> Plan | None:
    """Returns ReaL's symmetric heuristic: calls on all devices, tensor-parallel in a node, data-parallel beyond.

    Each call has the widest tensor axis that divides its model, and the fewest micro-batches that fit; weights are
    whole in every replica or, if that does not fit, sharded over all. None if nothing fits. Roles on a shared base have
    the mesh of their candidates in `options`.
    """
    workload, choices = prices.workload, {}
    for call in workload.calls:
        ways = placements(workload, call, prices.cluster.devices, prices.cluster.node)
        trials = options[call.name] if workload.on_base(call.role) else [prices.call(call, way) for way in ways]
        widest = max((candidate.placement.tensor for candidate in trials), default=0)
        layouts = ("generate", "train_tp") if widest > 1 else ("generate", "train_tp", "train", "score")
        choices[call.name] = [
            candidate
            for candidate in trials
            if candidate.placement.tensor == widest and candidate.placement.layout in layouts
        ]
    for sign in (1, -1):  # weights are whole in every replica, or sharded over all devices

        def order(candidate: Price, sign: int = sign) -> tuple[int, int]:
            return sign * candidate.placement.fsdp, candidate.placement.micro_batches

        if (fitting := _fit(workload.graph, choices, prices.capacity, first=order, then=order)) is not None:
            return Plan("heuristic", {name: candidate.placement for name, candidate in fitting.items()})
    return None


def divisions(prices: CostModel, options: Candidates) -> list[Division]:
    """Returns all plans of HybridFlow's Algorithm 1 that fit, the cheapest first.

    The algorithm tries every way to divide the models into sets and the devices among the sets. All models of a set use
    all devices of the set, and each call has its fastest layout that fits with the models' states. The cost of a plan
    is the sum, over the levels of the graph, of the slowest set's calls, one after the other. Sets take neighbouring
    devices in the order of their size, so that all are aligned.
    """
    graph, cluster, best = prices.workload.graph, prices.cluster, _fastest(options)
    roles = [role for role in graph.roles if any(call.role == role and call.name in options for call in graph)]
    together = {"actor", "critic", LEARNER} & set(roles) if LEARNER in roles else set()
    counts, levels = sorted({devices.count for devices in slices(cluster)}), graph.levels()

    @cache
    def placed_set(members: tuple[str, ...], count: int) -> tuple[dict[str, Price], list[float]] | None:
        """Returns the calls of these roles on `count` devices, and the seconds of each level of the graph."""
        chosen = placed_together(graph, _of_roles(graph, members, best, count), prices.capacity)
        if chosen is None:
            return None
        return chosen, [sum(chosen[call.name].seconds for call in level if call.name in chosen) for level in levels]

    results = []
    for sets in partitions(roles):
        if any(0 < len(together & set(members)) < len(together) for members in sets):
            continue
        for sizes in allocations(counts, len(sets), cluster.devices):
            parts = [placed_set(tuple(members), count) for members, count in zip(sets, sizes, strict=True)]
            fitting = [part for part in parts if part is not None]
            if len(fitting) < len(parts):
                continue
            placed, start = {}, 0
            for index in sorted(range(len(sets)), key=lambda index: -sizes[index]):
                devices = Slice(start, sizes[index])
                placed |= {name: replace(one.placement, devices=devices) for name, one in fitting[index][0].items()}
                start = devices.stop
            seconds = sum(map(max, zip(*(seconds for _, seconds in fitting), strict=True)))
            plan = Plan("+".join("/".join(members) for members in sets), {name: placed[name] for name in options})
            results.append(Division(plan, tuple(map(tuple, sets)), sizes, seconds))
    return sorted(results, key=lambda division: division.seconds)


def colocates(prices: CostModel, options: Candidates) -> bool:
    """Returns whether all models fit together on all devices, which is one of the starting points of a search."""
    graph = prices.workload.graph
    choices = _of_roles(graph, graph.roles, _fastest(options), prices.cluster.devices)
    return placed_together(graph, choices, prices.capacity) is not None


def named_divisions(all_divisions: Sequence[Division]) -> dict[str, Division]:
    """Returns the best division of each of HybridFlow's kinds.

    colocate: one set. standalone: a set per role. split: actor and reference on one half, all others on the other.
    """
    roles = {role for division in all_divisions for members in division.sets for role in members}
    policy = frozenset(roles & {"actor", "reference"})
    halves = {policy, frozenset(roles - policy)}
    kinds = {
        "colocate": lambda division: len(division.sets) == 1,
        "split": lambda division: set(map(frozenset, division.sets)) == halves and len(set(division.counts)) == 1,
        "standalone": lambda division: all(len(members) == 1 for members in division.sets),
    }
    best = {}
    for name, belongs in kinds.items():
        of_kind = [division for division in all_divisions if belongs(division)]
        if of_kind and (name == "colocate" or len(roles) > 1):
            best[name] = replace(of_kind[0], plan=replace(of_kind[0].plan, name=name))
    return best


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yields every way to divide items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index, members in enumerate(smaller):
            yield [*smaller[:index], [first, *members], *smaller[index + 1 :]]


def allocations(counts: Collection[int], sets: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to give each set one of these counts of devices, and all devices to the sets."""
    if sets == 1:
        yield from [(devices,)] if devices in counts else []
        return
    for count in counts:
        if count < devices:
            yield from ((count, *others) for others in allocations(counts, sets - 1, devices - count))


def _fastest(options: Candidates) -> dict[tuple[str, int], list[Price]]:
    """Returns (call, number of devices) -> its candidates there, on any slice, the fastest first."""
    anywhere: dict[tuple[str, Placement], Price] = {}
    for name, choices in options.items():
        for candidate in choices:
            if candidate.placement.pipeline == 1:
                moved = replace(candidate.placement, devices=Slice(0, candidate.placement.devices.count))
                anywhere.setdefault((name, moved), candidate)
    fastest = sorted(anywhere.items(), key=lambda item: item[1].seconds)
    return by_key(((name, placement.devices.count), candidate) for (name, placement), candidate in fastest)


def _of_roles(
    graph: Graph, members: Collection[str], best: Mapping[tuple[str, int], list[Price]], count: int
) -> Candidates:
    names = [call.name for call in graph if call.role in members and call.kind != "compute"]
    return {name: best.get((name, count), []) for name in names}


def placed_together(graph: Graph, choices: Candidates, capacity: float) -> dict[str, Price] | None:
    """Returns a candidate for each of these calls, all on the same devices; None if they do not fit together."""
    seconds, resident = attrgetter("seconds", "resident"), attrgetter("resident", "seconds")
    orders = (_fit(graph, choices, capacity, first=first, then=seconds) for first in (seconds, resident))
    return next((fitting for fitting in orders if fitting is not None), None)


def _fit(
    graph: Graph, choices: Candidates, capacity: float, *, first: Callable[[Price], Any], then: Callable[[Price], Any]
) -> dict[str, Price] | None:
    """Chooses one candidate for each call, all on the same devices.

    As in HybridFlow, placements of calls that store states are chosen first, by `first`; the other calls get the
    remaining memory, and are chosen by `then`. A call in another layout than its role's also needs a copy of weights.
    """
    if not all(choices.values()):
        return None
    home = {call.name: (home_of(graph, call.role) or call).name for call in graph if call.name in choices}
    state_bytes = {name: min(choices[name], key=first).resident for name in choices if home[name] == name}
    left, result = capacity - sum(state_bytes.values()), {}
    for name in sorted(choices, key=lambda name: home[name] != name):
        stored, fitting = result.get(home[name]), []
        for candidate in choices[name]:
            copied = stored is not None and not stored_alike(stored.placement, candidate.placement)
            needed = candidate.active + candidate.moved * copied
            if candidate.resident <= state_bytes.get(name, 0.0) and needed <= left:
                fitting.append(candidate)
        if not fitting:
            return None
        result[name] = min(fitting, key=then)
    return {name: result[name] for name in choices}
