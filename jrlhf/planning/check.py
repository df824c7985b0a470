"""What a plan must be, so that it runs, whatever its config says: one sentence for what is not."""

from jrlhf.errors import UserError
from jrlhf.meshes.plan import Plan, Slice
from jrlhf.planning.memory import GIB
from jrlhf.planning.prices import Prices
from jrlhf.planning.simulator import simulate
from jrlhf.planning.slices import nested
from jrlhf.planning.workload import Workload


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


def check_fits(workload: Workload, plan: Plan, prices: Prices) -> None:
    """Refuses a plan whose calls do not fit a device's memory together, at any time of an iteration.

    Raises:
        UserError: the fullest devices, what they lack, and the nearest settings of the plan.
    """
    result = simulate(workload.graph, plan, prices, iterations=2)
    if result.peak <= prices.capacity:
        return
    fullest = max(result.memory, key=lambda each: each.peak)
    here = [name for name, placement in plan.placements.items() if placement.devices.overlaps(fullest.devices)]
    largest = max(here, key=lambda name: prices.call(workload.graph[name], plan[name]).active)
    parts = "fewer rollout.slots" if workload.graph[largest].kind == "generate" else "more micro_batches"
    raise UserError(
        f"plan {plan.name} needs {result.peak / GIB:.1f} GiB on each of devices {fullest.devices}, which have "
        f"{prices.capacity / GIB:.1f}, {fullest.resident / GIB:.1f} of it for what stays and the rest for {largest}: "
        f"give {largest} {parts}, or its role more devices or fsdp"
    )
