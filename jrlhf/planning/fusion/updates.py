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


def price_fused(prices: CostModel, workload: Workload, plan: Plan) -> None:
    """Sets the prices of a plan's fused updates: each has its share, by its work, of the makespan of their table, and
    both have the memory of both."""
    if (fused := fused_updates(workload, plan)) is None:
        return
    calls = [workload.graph[name] for name in fused.pipelines]
    seconds = {call.name: prices.stage_seconds(call, plan[call.name]) for call in calls}
    owner = {number: name for name, numbers in fused.pipelines.items() for number in numbers}
    whole = makespan(fused.table, lambda step: seconds[owner[step.model]][step.kind == "backward"])
    work = {name: plan[name].micro_batches * sum(both) for name, both in seconds.items()}
    idle = workload.epochs * workload.minibatches * (whole / sum(work.values()) - 1)
    active = sum(fused_bytes(workload, plan, prices.backend).values())
    for call in calls:
        parts = {**prices.time(call, plan[call.name]).parts, "bubble": idle * work[call.name]}
        prices.set_fused(call, plan[call.name], CallTime(parts), active)


def _rows(placement: Placement) -> float:
    """Returns the rows of a micro-batch on a device, as a share of a minibatch."""
    return 1 / (placement.data * placement.fsdp * placement.tensor * placement.micro_batches)


@cache
def _table(first: Model, second: Model) -> Table:
    # Within what both have in flight if each runs 1F1B, by which the memory of their calls is predicted.
    most = sum(min(model.depth, model.micro_batches) * model.activations for model in (first, second))
    return search(fuse(first, second), memory=False, most=most, effort=_EFFORT).table
