"""Where the calls of an iteration run: the plan that the run was given."""

from jrlhf.meshes.plan import Placement, Plan
from jrlhf.report.charts import COLORS
from jrlhf.report.parts import lane, lead, plain
from jrlhf.report.record import Record


def plan(run: Record) -> str:
    """A bar for each call over the devices that it has; nothing where there is a single one."""
    found = run.plan
    if found is None or found.devices == 1:
        return ""
    told = (
        f"The plan is {found.name}. A bar spans the devices, of {found.devices}, that a call runs on, "
        "in its layout and mesh; one colour is one role."
    )
    if any(placement.micro_batches > 1 for placement in found.placements.values()):
        told += " × n: a device computes its rows in n parts."
    return lead(told) + f"<div class='card gantt'>{''.join(_rows(found))}</div>"


def _rows(found: Plan) -> list[str]:
    roles = list(dict.fromkeys(call.partition(".")[0] for call in found.placements))
    return [
        lane(
            call,
            f"{placed.layout} · {_sizes(placed)}",
            placed.devices.start / found.devices,
            placed.devices.count / found.devices,
            roles.index(call.partition(".")[0]) % COLORS + 1,
            plain(str(placed.devices)),
            f"× {placed.micro_batches}" if placed.micro_batches > 1 else "",
        )
        for call, placed in found.placements.items()
    ]


def _sizes(placed: Placement) -> str:
    sizes = zip(("data", "fsdp", "tensor"), placed.sizes, strict=True)
    return " × ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one device"
