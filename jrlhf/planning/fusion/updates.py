"""The updates that a plan fuses, the table that trains their models, and its price."""

from dataclasses import replace
from functools import cache
from math import lcm

from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.pipeline import FusedUpdates, Table, makespan, synchronous_makespan
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.planning.fusion.dispatch import search, search_apart
from jrlhf.planning.fusion.problem import FusedModel, fuse
from jrlhf.planning.memory import fused_bytes
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload

# Relative costs determine a table. They are always those of this device, so that a run's table is the same everywhere.
_REFERENCE, _NODE = "h100", 8
_EFFORT = 0.25  # effort of a search: about two core-seconds at most, and four for several processes
_DIGITS = 2  # digits to which relative costs are rounded


def fused_updates(workload: Workload, plan: Plan, per_process: int | None = None) -> FusedUpdates | None:
    """Returns the updates that a plan fuses, with their table; None if it fuses none. A pure function.

    per_process: number of devices of a process; None: there is one process. If the stages are in several processes,
    sender and receiver of a result wait for each other, and a table with short waits is chosen.
    """
    if not (names := plan.fused):
        return None
    seconds, sizes, prices = {}, {}, CostModel(workload, Cluster(HARDWARE[_REFERENCE], _NODE))
    for name in names:
        call, placed = workload.graph[name], plan[name]
        seconds[name] = prices.stage_seconds(call, placed)
        share = 1 / (placed.data * placed.fsdp * placed.tensor * placed.micro_batches)  # share of a minibatch's rows
        sizes[name] = workload.models[call.role][0].config.embed * share
    unit, smallest = min(forward for forward, _ in seconds.values()), min(sizes.values())
    models = [
        _model(plan[name], round(forward / unit, _DIGITS), round(backward / unit, _DIGITS), sizes[name] / smallest)
        for name, (forward, backward) in seconds.items()
    ]
    groups = lcm(*(model.depth for model in models))
    first, second = (groups // model.depth for model in models)
    numbers = range(first), range(first, first + second)
    return FusedUpdates(_table(*models, _apart(plan, per_process)), dict(zip(names, numbers, strict=True)))


def fused_prices(prices: CostModel, plan: Plan, *, least: bool = False) -> CostModel:
    """Returns prices in which each fused update of a plan takes a share of their table's makespan, in proportion to its
    work, and each needs the memory of both.

    least: uses a lower bound of the makespan, without a search for a table.
    """
    workload = prices.workload
    if not plan.fused:
        return prices
    seconds = {name: prices.stage_seconds(workload.graph[name], plan[name]) for name in plan.fused}
    if least:
        whole = fuse(*(_model(plan[name], *both) for name, both in seconds.items())).bound
    else:
        fused = fused_updates(workload, plan, prices.per_process)
        assert fused is not None
        owner = {number: name for name, numbers in fused.pipelines.items() for number in numbers}
        length = synchronous_makespan if _apart(plan, prices.per_process) else makespan
        whole = length(fused.table, lambda step: seconds[owner[step.model]][step.kind == "backward"])
    work = {name: plan[name].micro_batches * sum(both) for name, both in seconds.items()}
    idle = workload.epochs * workload.minibatches * (whole / sum(work.values()) - 1)
    active = sum(fused_bytes(workload, plan, prices.backend).values())
    together = {}
    for name in plan.fused:
        parts = {**prices.parts(workload.graph[name], plan[name]), "bubble": idle * work[name]}
        together[name, plan[name]] = parts, active
    return replace(prices, fused=together)


def _model(placement: Placement, forward: float, backward: float, activations: float = 1.0) -> FusedModel:
    return FusedModel(placement.pipeline, placement.micro_batches, forward, backward, activations)


def _apart(plan: Plan, per_process: int | None) -> bool:
    """Returns whether the fused updates use devices of several processes."""
    devices = plan[plan.fused[0]].devices
    return per_process is not None and devices.start // per_process != (devices.stop - 1) // per_process


@cache
def _table(first: FusedModel, second: FusedModel, apart: bool) -> Table:
    # Limit: the activations in flight if each ran 1F1B; the memory of the calls is predicted with it.
    most = sum(min(model.depth, model.micro_batches) * model.activations for model in (first, second))
    find = search_apart if apart else search
    return find(fuse(first, second), most=most, effort=_EFFORT)
