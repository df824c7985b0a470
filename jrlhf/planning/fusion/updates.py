"""The updates that a plan fuses, the table that trains their models, and its price."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import lcm

from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.pipeline import Table, makespan
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.planning.fusion.improve import search
from jrlhf.planning.fusion.problem import Model, fuse
from jrlhf.planning.memory import fused_bytes
from jrlhf.planning.time import CallTime, CostModel, stage_seconds
from jrlhf.planning.workload import Workload

# Relative costs decide on a table. They are this device's everywhere, so that a run has the same table on all machines.
_REFERENCE, _NODE = "h100", 8
_EFFORT = 0.25  # of a search: at most about two seconds of a core
_DIGITS = 2  # of relative costs


@dataclass(frozen=True)
class FusedUpdates:
    """The table of a plan's fused updates. pipelines: of each call, the numbers of its pipelines in the table."""

    table: Table
    pipelines: Mapping[str, range]


def fused_updates(workload: Workload, plan: Plan) -> FusedUpdates | None:
    """Returns the updates that a plan fuses and their table; None: it fuses none. A pure function of both."""
    if not (names := plan.fused):
        return None
    placements, cluster = [plan[name] for name in names], Cluster(HARDWARE[_REFERENCE], _NODE)
    calls = [workload.graph[name] for name in names]
    seconds = [stage_seconds(workload, call, plan[call.name], cluster) for call in calls]
    sizes = [
        workload.models[call.role][0].config.embed * _rows(placed)
        for call, placed in zip(calls, placements, strict=True)
    ]
    unit = min(forward for forward, _ in seconds)
    models = [
        Model(
            placed.pipeline,
            placed.micro_batches,
            forward=round(forward / unit, _DIGITS),
            backward=round(backward / unit, _DIGITS),
            activations=size / min(sizes),
        )
        for placed, (forward, backward), size in zip(placements, seconds, sizes, strict=True)
    ]
    counts = [lcm(*(placed.pipeline for placed in placements)) // placed.pipeline for placed in placements]
    numbers = range(counts[0]), range(counts[0], sum(counts))
    return FusedUpdates(_table(*models), dict(zip(names, numbers, strict=True)))


def fused_prices(prices: CostModel, workload: Workload, plan: Plan) -> CostModel:
    """Returns prices by which each of a plan's fused updates takes its share, by its work, of the makespan of their
    table, and both need the memory of both."""
    if (fused := fused_updates(workload, plan)) is None:
        return prices
    seconds = _operations(prices, workload, plan)
    owner = {number: name for name, numbers in fused.pipelines.items() for number in numbers}
    whole = makespan(fused.table, lambda step: seconds[owner[step.model]][step.kind == "backward"])
    return _priced(prices, workload, plan, whole)


def least_prices(prices: CostModel, workload: Workload, plan: Plan) -> CostModel:
    """Returns the same prices for the shortest table that there might be: none is searched for."""
    models = [
        Model(plan[name].pipeline, plan[name].micro_batches, *both)
        for name, both in _operations(prices, workload, plan).items()
    ]
    return _priced(prices, workload, plan, fuse(*models).bound)


def _operations(prices: CostModel, workload: Workload, plan: Plan) -> dict[str, tuple[float, float]]:
    return {name: prices.stage_seconds(workload.graph[name], plan[name]) for name in plan.fused}


def _priced(prices: CostModel, workload: Workload, plan: Plan, whole: float) -> CostModel:
    """whole: seconds of a table."""
    calls, seconds = [workload.graph[name] for name in plan.fused], _operations(prices, workload, plan)
    work = {name: plan[name].micro_batches * sum(both) for name, both in seconds.items()}
    idle = workload.epochs * workload.minibatches * (whole / sum(work.values()) - 1)
    active = sum(fused_bytes(workload, plan, prices.backend).values())
    times = {
        call.name: {**prices.time(call, plan[call.name]).parts, "bubble": idle * work[call.name]} for call in calls
    }
    return prices.with_fused({(name, plan[name]): (CallTime(parts), active) for name, parts in times.items()})


def _rows(placement: Placement) -> float:
    """Returns the rows of a micro-batch on a device, as a share of a minibatch."""
    return 1 / (placement.data * placement.fsdp * placement.tensor * placement.micro_batches)


@cache
def _table(first: Model, second: Model) -> Table:
    # Within what both have in flight if each runs 1F1B, by which the memory of their calls is predicted.
    most = sum(min(model.depth, model.micro_batches) * model.activations for model in (first, second))
    return search(fuse(first, second), memory=False, most=most, effort=_EFFORT).table
