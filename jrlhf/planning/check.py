"""What a plan must be, so that it runs: one sentence for what is not."""

from jrlhf.errors import UserError
from jrlhf.meshes import Call
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.options import GIB, divides, impossible, layouts, placed_calls, row_parts
from jrlhf.planning.prices import Prices
from jrlhf.planning.simulator import simulate
from jrlhf.planning.slices import nested
from jrlhf.planning.workload import Workload


def check(
    workload: Workload, plan: Plan, cluster: Cluster, prices: Prices | None = None, *, hypothetical: bool = False
) -> None:
    """Refuses a plan that the workload cannot run with on the cluster.

    Every call with a model has a place, and no other; on devices that there are; in a layout of its kind; with axes
    that divide the model and the rows. The devices of any two calls are the same, apart, or one's within the other's:
    between others neither weights nor values move without a host. With prices, all must fit a device's memory too.

    hypothetical: pipelines pass.

    Raises:
        UserError: the first thing that is wrong, with the nearest remedy.
    """
    calls = {call.name: call for call in placed_calls(workload)}
    for name in calls:
        if name not in plan.placements:
            raise UserError(f"plan {plan.name} has no place for {name}: give it devices and a layout")
    for name in plan.placements:
        if name not in calls:
            raise UserError(f"plan {plan.name} places {name}, which is not among {', '.join(calls)}: leave it out")
    for name, placement in plan.placements.items():
        _check_call(workload, calls[name], placement, cluster, hypothetical)
    check_nested(plan)
    if prices is not None:
        _check_memory(workload, plan, prices)


def _check_call(workload: Workload, call: Call, placement: Placement, cluster: Cluster, hypothetical: bool) -> None:
    if placement.devices.stop > cluster.devices:
        raise UserError(
            f"{call.name} runs on devices {placement.devices}, and there are {cluster.devices}: choose from "
            f"{Slice(0, cluster.devices)}"
        )
    suited = layouts(workload, call)
    if placement.layout not in suited:
        raise UserError(
            f"layout={placement.layout} of {call.name} does not suit a call of kind {call.kind}: choose "
            f"{' or '.join(suited)}"
        )
    if placement.pipeline > 1 and not hypothetical:
        raise UserError(
            f"pipeline={placement.pipeline} of {call.name} is priced and does not run: set it to 1, and fsdp or tensor "
            f"{placement.pipeline} times as high"
        )
    reason = impossible(workload, call.role, placement.fsdp, placement.tensor)
    if reason:
        raise UserError(f"{reason} of {call.name}: choose a smaller power of two, and more data")
    if not divides(workload, call, placement):
        parts = row_parts(workload, call, placement)
        below = workload.rows // parts * parts
        choices = " or ".join(str(rows) for rows in (below, below + parts) if rows)
        raise UserError(
            f"{workload.rows} rows do not divide over the {placement.devices.count} device(s) of {call.name} in all "
            f"its parts: choose a multiple of {parts}, such as {choices}, or fewer devices or micro-batches"
        )


def check_nested(plan: Plan) -> None:
    """Refuses devices that overlap in part: between those neither weights nor values move without a host.

    Raises:
        UserError: which two calls, and the nearest devices that do not.
    """
    placed = list(plan.placements.items())
    for index, (name, placement) in enumerate(placed):
        for other, others in placed[:index]:
            one, two = others.devices, placement.devices
            if not nested([one, two]):
                union = Slice(min(one.start, two.start), max(one.stop, two.stop) - min(one.start, two.start))
                raise UserError(
                    f"devices {one} of {other} and {two} of {name} overlap in part: let them be the same, apart, or "
                    f"one within the other, such as {union} and {two}"
                )


def _check_memory(workload: Workload, plan: Plan, prices: Prices) -> None:
    result = simulate(workload.graph, plan, prices, iterations=2)
    if result.peak <= prices.capacity:
        return
    fullest = max(result.memory, key=lambda each: each.peak)
    here = [name for name, placement in plan.placements.items() if placement.devices.overlaps(fullest.devices)]
    largest = max(here, key=lambda name: prices.call(workload.graph[name], plan[name]).active)
    raise UserError(
        f"plan {plan.name} needs {result.peak / GIB:.1f} GiB on devices {fullest.devices}, which have "
        f"{prices.capacity / GIB:.1f}, {fullest.resident / GIB:.1f} of it for what stays and the rest for {largest}: "
        f"give {largest} more micro-batches, its role more fsdp, or plan=auto"
    )
