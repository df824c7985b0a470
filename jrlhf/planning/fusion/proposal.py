"""Makes plans with pipelines from the best plans of a search, whose candidates have none.

Stages: each update, then each call that scores, takes its fastest pipeline on its own devices, or on all devices.
Fused updates: both take the devices of one of them, or all devices. Pairs of placements there are ranked by a lower
bound of their table's time; a table is searched for only if that bound promises a gain.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import nsmallest
from itertools import product
from math import lcm

from jrlhf.meshes.graph import Call
from jrlhf.meshes.pipeline import ScheduleName
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models.config.divisors import indivisible
from jrlhf.planning.candidates import placements
from jrlhf.planning.fusion.problem import FusedModel, fuse
from jrlhf.planning.fusion.updates import fused_prices
from jrlhf.planning.plans import FUSED
from jrlhf.planning.search import Result
from jrlhf.planning.simulate import Simulation, Simulator, simulate
from jrlhf.planning.time import CostModel
from jrlhf.roles.graph import LEARNER

_GAIN = 0.01  # least share of an iteration that stages of a call must save; smaller ones are within the prices' error
_PLANS = 4  # number of a search's plans that are tried with fused updates
_TABLES = 3  # number of tables that are searched for; see `updates` for their seconds
_SIMULATED = 4  # number of simulated pairs of placements on the same devices
_OF_A_DEPTH = 4  # number of placements of a call with the same number of stages
_GROUPS = 64  # maximum number of device groups in a table

Runs = Callable[[Plan], bool]
Options = Callable[[str, int], "list[_Option]"]


def with_pipelines(prices: CostModel, result: Result, runs: Runs, *, lockstep: bool) -> Result:
    """Returns the result with a new best plan, whose updates and scores run in stages, or whose updates of actor and
    critic are fused, if that is predicted to be faster.

    runs: tests whether the config's algorithm can run a plan.
    """
    options = cache(partial(_options, prices))
    result = _with_stages(prices, result, runs, options, lockstep=lockstep)
    return _with_fused(prices, result, runs, options, lockstep=lockstep)


def _with_stages(prices: CostModel, result: Result, runs: Runs, options: Options, *, lockstep: bool) -> Result:
    workload = prices.workload
    simulator = Simulator(workload.graph, prices, workload.models, lockstep=lockstep)
    # Stages of adapters save no time, because their base is not gathered.
    calls = [call for call in workload.calls if call.role != LEARNER and not workload.on_base(call.role)]
    updates = [call.name for call in calls if call.kind == "train"]
    scores = [call.name for call in calls if call.kind == "infer"]

    @cache
    def pipelines(name: str, count: int) -> list[Placement]:
        """Returns a call's fastest pipelines of every depth."""
        if name in updates:
            return [replace(one.placement, schedule="1f1b") for one in options(name, count)]
        call = workload.graph[name]
        seconds = lambda placed: prices.seconds(call, placed)  # noqa: E731
        return [one for same in _by_depth(prices, call, count) for one in nsmallest(_OF_A_DEPTH, same, key=seconds)]

    def faster(plan: Plan, name: str, places: Iterable[Placement], gain: float = 0.0) -> Plan:
        """Returns the fastest plan with one of these placements of a call, or the given plan if none saves `gain`."""
        best, least = plan, (1 - gain) * simulator.evaluate(simulator.choice(plan))[0]
        for other in (Plan("staged", {**plan.placements, name: place}) for place in places):
            if runs(other):
                seconds, peak, _ = simulator.evaluate(simulator.choice(other))
                if seconds < least and peak <= prices.capacity:
                    best, least = other, seconds
        return best

    plans = []
    for base in (result.best, *result.runners_up, *filter(None, [result.rules.get("colocate")])):
        plan = base.plan
        for name in (*updates, *scores):
            for devices in dict.fromkeys((plan[name].devices, Slice(0, prices.cluster.devices))):
                placed = [replace(place, devices=devices) for place in pipelines(name, devices.count)]
                plan = faster(plan, name, placed, _GAIN)
        plans.append(plan)
    best = min(plans, key=lambda plan: simulator.evaluate(simulator.choice(plan))[0])
    schedules: tuple[ScheduleName, ...] = ("zb-h1", "interleaved")  # GPipe is never predicted faster
    for name in updates:
        devices = best[name].devices
        last = sorted(options(name, devices.count), key=lambda one: -one.alone)
        fastest = {one.model.depth: replace(one.placement, devices=devices) for one in last}  # of each depth
        others = product(fastest.values(), schedules)
        best = faster(best, name, [replace(place, schedule=schedule) for place, schedule in others])
    staged = simulate(workload.graph, best, prices, lockstep=lockstep)
    return result.improved(staged, "no stages") if staged.seconds < result.best.seconds else result


def _with_fused(prices: CostModel, result: Result, runs: Runs, options: Options, *, lockstep: bool) -> Result:
    if not all(name in result.best.plan.placements for name in FUSED):
        return result
    graph = prices.workload.graph

    def faster(plan: Plan, best: Simulation, *, least: bool) -> Simulation | None:
        """Simulates a plan, with its updates' table or, if `least`, that table's lower bound. None: not faster."""
        priced = fused_prices(prices, plan, least=least)
        simulation = simulate(graph, plan, priced, lockstep=lockstep)
        better = simulation.seconds < best.seconds and simulation.peak <= prices.capacity
        return simulation if better else None

    bounds, tried = [], list[Plan]()
    for base in (result.best, *result.runners_up)[:_PLANS]:
        for devices in dict.fromkeys([*(base.plan[name].devices for name in FUSED), Slice(0, prices.cluster.devices)]):
            resident = sum(
                prices.call(graph[name], place).resident
                for name, place in base.plan.placements.items()
                if name not in FUSED and place.devices.overlaps(devices)
            )
            first, second = (options(name, devices.count) for name in FUSED)
            for pair in _pairs(first, second, prices.capacity - resident):
                placed = {name: replace(place, devices=devices) for name, place in zip(FUSED, pair, strict=True)}
                plan = Plan("fused", {**base.plan.placements, **placed})
                if plan not in tried and runs(plan) and (bound := faster(plan, result.best, least=True)):
                    bounds.append(bound)
                tried.append(plan)
    best = result.best
    for bound in nsmallest(_TABLES, bounds, key=lambda one: one.seconds):
        if bound.seconds < best.seconds:
            best = faster(bound.plan, best, least=False) or best
    return result if best is result.best else result.improved(best, "not fused")


@dataclass(frozen=True)
class _Option:
    """An update as pipelines. model: one pipeline, with its seconds. updates: number of minibatches per iteration.
    fixed: further seconds per iteration. resident, active: bytes of a device."""

    placement: Placement
    model: FusedModel
    updates: int
    fixed: float
    resident: float
    active: float

    def seconds(self, parts: int) -> float:
        """Returns the seconds of an iteration if a minibatch takes as long as `parts` micro-batches on a stage."""
        return self.fixed + self.updates * parts * (self.model.forward + self.model.backward)

    @property
    def work(self) -> float:
        """Seconds of an iteration without waiting."""
        return self.seconds(self.model.micro_batches)

    @property
    def alone(self) -> float:
        """Seconds of an iteration by 1F1B."""
        return self.seconds(self.model.micro_batches + self.model.depth - 1)


def _options(prices: CostModel, name: str, count: int) -> list[_Option]:
    """Returns an update's fastest pipelines of every depth, by their work and by their time alone."""
    workload, call, fastest = prices.workload, prices.workload.graph[name], list[_Option]()
    updates = workload.epochs * workload.minibatches
    for same in _by_depth(prices, call, count):
        options = []
        for placed in (replace(one, schedule="fused") for one in same):
            depth, parts = placed.pipeline, placed.micro_batches
            price, (forward, backward) = prices.call(call, placed), prices.stage_seconds(call, placed)
            fixed = price.seconds - updates * (parts + depth - 1) * (forward + backward)  # its price is that of 1F1B
            piped = FusedModel(depth, parts, forward, backward)
            options.append(_Option(placed, piped, updates, fixed, price.resident, price.active))
        best = [nsmallest(_OF_A_DEPTH, options, key=key) for key in (lambda one: one.work, lambda one: one.alone)]
        fastest += dict.fromkeys([*best[0], *best[1], min(options, key=lambda one: one.active)])
    return fastest


def _by_depth(prices: CostModel, call: Call, count: int) -> Collection[list[Placement]]:
    """Returns the ways to divide a call into stages, in a list for each number of stages. Its weights are stored on the
    devices of all stages."""
    result = defaultdict[int, list[Placement]](list)
    for placed in placements(prices.workload, call, count, prices.cluster.node, hypothetical=True):
        stored = placed.fsdp * placed.pipeline, placed.tensor
        undivided = any(any(indivisible(model.config, *stored)) for model in prices.workload.models[call.role])
        if 1 < placed.pipeline <= min(placed.micro_batches, _GROUPS) and not undivided:
            result[placed.pipeline].append(placed)
    return result.values()


def _pairs(first: Sequence[_Option], second: Sequence[_Option], room: float) -> list[tuple[Placement, Placement]]:
    """Returns the most promising pairs of pipelines. room: bytes of a device for both."""
    fitting = []
    for one, two in product(first, second):
        groups = lcm(one.model.depth, two.model.depth)
        divided = all(option.placement.data % (groups // option.model.depth) == 0 for option in (one, two))
        if divided and groups <= _GROUPS and one.resident + one.active + two.resident + two.active <= room:
            bound = one.fixed + two.fixed + one.updates * fuse(one.model, two.model).bound
            fitting.append((bound, one.placement, two.placement))
    return [(one, two) for _, one, two in nsmallest(_SIMULATED, fitting, key=lambda pair: pair[0])]
