"""Where a call may run: which slices of a cluster, and how its model and rows may be divided there.

After ReaL (arXiv 2406.14088): slices are powers of two within a node, or neighbouring whole nodes; of what can run
there, the fastest are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from jrlhf.errors import UserError
from jrlhf.meshes import Call
from jrlhf.meshes.graph import LEARNER
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import LayoutName, Placement, Slice
from jrlhf.planning.memory import GIB
from jrlhf.planning.prices import Price, Prices
from jrlhf.planning.topology import has_model
from jrlhf.planning.workload import Workload

LAYOUTS: dict[str, tuple[LayoutName, ...]] = {  # in which a kind of call can see its model
    "generate": ("generate",),
    "infer": ("score", "train_tp"),
    "train": ("train", "train_tp"),
}
TENSOR = 8  # slices of a layer, at most; as in ReaL
ALL_RANGES = 8  # nodes, up to which every range of them is a slice
MOST = 1000  # options of a call, as in ReaL
OF_A_SIZE = 16  # of them on slices of one size, before further memory is saved


@dataclass(frozen=True)
class Option:
    """One of a call's placements, with its price."""

    placement: Placement
    price: Price


def slices(cluster: Cluster) -> list[Slice]:
    """The cluster's slices: aligned powers of two within a node, and ranges of whole nodes.

    Of more than eight nodes not every range is one: those of 1, 3 or 7 times a power of two, aligned to that power, and
    those that end with the cluster.
    """
    node, nodes = cluster.node, -(-cluster.devices // cluster.node)
    found = [
        Slice(first + start, size)
        for first in range(0, cluster.devices, node)
        for size in _powers(node - 1)
        for start in range(0, node - size + 1, size)
        if first + start + size <= cluster.devices
    ]
    for size in range(1, nodes + 1):
        power = size & -size
        if nodes > ALL_RANGES and size // power not in (1, 3, 7) and size != nodes:
            continue
        step = 1 if nodes <= ALL_RANGES else power
        starts = sorted({*range(0, nodes - size + 1, step), nodes - size})
        found += [Slice(start * node, size * node) for start in starts if (start + size) * node <= cluster.devices]
    if not any(each.count == cluster.devices for each in found):
        found.append(Slice(0, cluster.devices))  # of which the last node is only a part
    return found


def shapes(workload: Workload, call: Call, count: int, node: int, *, hypothetical: bool = False) -> Iterator[Placement]:
    """The ways to divide a call over the devices 0 to `count` - 1 that run; with hypothetical, pipelines too.

    Mesh axes must divide what they divide in every model of the role, and rows must divide over the devices that take
    rows of their own, in every minibatch and micro-batch.
    """
    for layout in layouts(workload, call):
        for stages in _divisors(count) if hypothetical else (1,):
            for tensor in _divisors(count // stages):
                if tensor > min(TENSOR, node) or (layout == "train_tp" and tensor == 1):
                    continue
                for fsdp in _divisors(count // (stages * tensor)):
                    data = count // (stages * tensor * fsdp)
                    if impossible(workload, call.role, fsdp, tensor) or not _stages_run(
                        workload, call, stages, count, node
                    ):
                        continue
                    micro_batches = 1
                    while True:
                        placement = Placement(
                            Slice(0, count), layout, data, fsdp, tensor, stages, micro_batches=micro_batches
                        )
                        if not divides(workload, call, placement):
                            break
                        yield placement
                        if call.kind == "generate" or call.role == LEARNER:  # whose shared passes are one
                            break
                        micro_batches *= 2


def impossible(workload: Workload, role: str, fsdp: int, tensor: int) -> str:
    """What of a role's models does not divide over these axes, as a phrase; empty where all does.

    Key-value heads that are fewer than the slices are repeated.
    """
    for each in workload.models[role]:
        model = each.config
        heads = max(model.kv_heads, tensor)
        sizes = (
            ("embed", model.embed, "fsdp", fsdp),
            ("heads", model.heads, "tensor", tensor),
            ("kv_heads", heads, "tensor", tensor),
            ("mlp", model.mlp, "tensor", tensor),
            ("vocabulary", model.padded_vocab, "tensor", tensor),
        )
        for name, size, axis, parts in sizes:
            if size % parts:
                return f"{name} {size} does not divide over {axis}={parts}"
    return ""


def row_parts(workload: Workload, call: Call, placement: Placement) -> int:
    """The number that a call's rows must be a multiple of: every device takes as many rows in every part.

    A group of devices that generates answers prompts, each with all its samples.
    """
    replicas = placement.data * placement.fsdp
    devices = replicas * placement.tensor
    if call.kind == "generate":
        return lcm(devices, replicas * workload.samples)
    return devices * placement.micro_batches * (workload.minibatches if call.kind == "train" else 1)


def divides(workload: Workload, call: Call, placement: Placement) -> bool:
    """Whether the rows of the workload divide as the placement would have them, and those that decode at a time."""
    if call.kind == "generate" and workload.slots is not None:
        prompts = placement.data * placement.fsdp * workload.samples
        if workload.slots % placement.devices.count or workload.slots < prompts:
            return False
    return workload.rows % row_parts(workload, call, placement) == 0


def layouts(workload: Workload, call: Call) -> tuple[LayoutName, ...]:
    """In which a call can see its model: as generation does, where its role is an adapter on a shared base."""
    return ("generate",) if on_base(workload, call.role) else LAYOUTS[call.kind]


def on_base(workload: Workload, role: str) -> bool:
    """Whether a role is an adapter on the base that such roles share, or the base itself."""
    return any(each.shared for each in workload.models[role])


def options(
    workload: Workload,
    call: Call,
    cluster: Cluster,
    prices: Prices,
    *,
    hypothetical: bool = False,
    processes: int = 1,
) -> list[Option]:
    """A call's placements on the cluster that fit alone, the fastest first: at most `MOST`.

    On slices of each size the fastest are kept, and of the slower ones those that need less memory than all that are
    faster.

    processes: of the run. Several can run calls on all devices only (`planning.processes`).

    Raises:
        UserError: rows that no placement can divide, or a model that fits nowhere.
    """
    known = slices(cluster) if processes == 1 else [Slice(0, cluster.devices)]
    sizes = sorted({each.count for each in known})
    kept: list[Option] = []
    smallest, widest = float("inf"), 0
    for count in sizes:
        fitting = []
        for placement in shapes(workload, call, count, cluster.node, hypothetical=hypothetical):
            widest, price = count, prices.call(call, placement)
            smallest = min(smallest, price.resident + price.active)
            if price.resident + price.active <= prices.capacity:
                fitting.append(Option(placement, price))
        kept += _worth_keeping(fitting)
    if not widest:
        raise UserError(_no_rows(workload, call, cluster.devices))
    if not kept:
        raise UserError(_no_room(workload, call, cluster, prices, smallest, widest))
    by_size = {count: [each for each in known if each.count == count] for count in sizes}
    spread: list[Option] = []
    for each in sorted(kept, key=lambda each: each.price.seconds):
        for devices in by_size[each.placement.devices.count]:
            if len(spread) < MOST or devices.count == cluster.devices:
                spread.append(Option(replace(each.placement, devices=devices), each.price))
    return spread


def options_of(
    workload: Workload, cluster: Cluster, prices: Prices, *, hypothetical: bool = False, processes: int = 1
) -> dict[str, list[Option]]:
    """Of every call that has a model. Arguments as of `options`, which says what it raises.

    Roles on a shared base run on all devices, in one mesh: that in which their calls, one after the other, are fastest.
    """
    found = {
        call.name: options(workload, call, cluster, prices, hypothetical=hypothetical, processes=processes)
        for call in placed_calls(workload)
    }
    shared = [call.name for call in placed_calls(workload) if on_base(workload, call.role)]
    if not shared:
        return found
    fastest: dict[tuple[int, ...], dict[str, float]] = {}
    for name in shared:
        for each in reversed(found[name]):
            if each.placement.devices.count == cluster.devices:
                fastest.setdefault(_mesh(each), {})[name] = each.price.seconds
    whole = {mesh: sum(of.values()) for mesh, of in fastest.items() if len(of) == len(shared)}
    if not whole:
        raise UserError(
            f"no mesh of all {cluster.devices} devices suits {', '.join(shared)}, which share the base under their "
            "adapters: take another number of devices, or train whole models"
        )
    best = min(whole, key=lambda mesh: whole[mesh])
    for name in shared:
        found[name] = [
            each for each in found[name] if each.placement.devices.count == cluster.devices and _mesh(each) == best
        ]
    return found


def _mesh(option: Option) -> tuple[int, ...]:
    return *option.placement.sizes, option.placement.pipeline


def placed_calls(workload: Workload) -> list[Call]:
    """The calls that have a model, and therefore devices."""
    return [call for call in workload.graph if has_model(call, workload.models)]


def _stages_run(workload: Workload, call: Call, stages: int, count: int, node: int) -> bool:
    """ReaL's bounds on pipelines: no more stages than nodes or eight, and enough layers and rows to fill them."""
    if stages == 1:
        return True
    rows = workload.rows // (2 * workload.minibatches if call.kind == "train" else 1)
    layers = min(each.config.layers for each in workload.models[call.role])
    return stages <= max(-(-count // node), 8) and stages <= layers and rows >= stages


def _worth_keeping(found: list[Option]) -> list[Option]:
    ordered = sorted(found, key=lambda each: (each.price.seconds, each.price.resident + each.price.active))
    kept, least = [], float("inf")
    for each in ordered:
        size = each.price.resident + each.price.active
        if size < least or len(kept) < OF_A_SIZE:
            kept.append(each)
        least = min(least, size)
    return kept


def _no_rows(workload: Workload, call: Call, devices: int) -> str:
    parts = workload.minibatches if call.kind == "train" else workload.samples
    what = "minibatches" if call.kind == "train" else "samples of a prompt"
    remedy = _rows_for(workload, call, devices)
    return f"{workload.rows} rows of {call.name} do not divide into {parts} {what}: {remedy}"


def _rows_for(workload: Workload, call: Call, devices: int) -> str:
    """The nearest rows that divide over all devices."""
    parts = devices * workload.minibatches if call.kind == "train" else lcm(devices, workload.samples)
    below = workload.rows // parts * parts
    choices = " or ".join(str(size) for size in (below, below + parts) if size)
    return f"choose {workload.rows_key} of {choices}"


def _no_room(workload: Workload, call: Call, cluster: Cluster, prices: Prices, smallest: float, widest: int) -> str:
    """The sentence with the nearest remedy: rows that divide over more devices, or how many devices would do."""
    if widest < cluster.devices:
        remedy = _rows_for(workload, call, cluster.devices)
        return (
            f"{workload.rows} rows of {call.name} divide over at most {widest} of {cluster.devices} devices, where it "
            f"needs {smallest / GIB:.1f} GiB of {prices.capacity / GIB:.0f}: {remedy}"
        )
    told = (
        f"{call.name} fits nowhere on {cluster.devices} devices of {prices.capacity / GIB:.0f} GiB: it needs "
        f"{smallest / GIB:.1f} GiB of each"
    )
    count = cluster.devices
    for _ in range(6):
        count *= 2
        for placement in shapes(workload, call, count, cluster.hardware.node):
            price = prices.call(call, placement)
            if price.resident + price.active <= prices.capacity:
                return f"{told}, take {count} devices, devices with more memory, or shorter responses"
    return f"{told}, take devices with more memory, a smaller model, or shorter responses"


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
