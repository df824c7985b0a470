"""What moving bytes costs: collectives inside a call, weights and rows between calls, state to the host and back."""

from math import prod
from typing import NamedTuple

from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Slice


class Group(NamedTuple):
    """Devices that take part in one collective: how many, and how many of them are on one node."""

    size: int
    local: int


_AXES = ("pipeline", "data", "fsdp", "tensor")  # from the slowest to the fastest that a device's number changes with


def group(placement: Placement, node: int, *axes: str) -> Group:
    """The group of a collective over these neighbouring axes of a placement's mesh, on nodes of `node` devices."""
    inner = _AXES[_AXES.index(axes[-1]) + 1 :]
    size = prod(getattr(placement, axis) for axis in axes)
    stride = prod(getattr(placement, axis) for axis in inner)
    start = placement.devices.start % node
    here = node if start + min(placement.devices.count, node) <= node else node - start
    return Group(size, max(1, min(size, here // stride)))


def gather_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Of an all-gather whose result has `size` bytes on each device, or of a reduce-scatter of so many.

    On a ring every device sends and receives (g - 1) / g of them. Between nodes as many rings run as the group has
    members on a node, each through a port of its own (NCCL's way), and what a node's members pass on meets their link.
    """
    if group.size == 1:
        return 0.0
    return (group.size - 1) / group.size * size / bandwidth(cluster, group) + cluster.hardware.latency


def reduce_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Of an all-reduce of `size` bytes: a reduce-scatter and an all-gather, which start together."""
    if group.size == 1:
        return 0.0
    return 2 * gather_seconds(cluster, group, size) - cluster.hardware.latency


def bandwidth(cluster: Cluster, group: Group) -> float:
    """Bytes a second at which each device of a group sends."""
    hardware = cluster.hardware
    inside = hardware.link
    if group.local < group.size:
        inside = min(inside, group.local * hardware.network)
    return hardware.collective * inside


def reallocation_seconds(size: float, home: Placement, placement: Placement, cluster: Cluster) -> float:
    """To bring weights of `size` bytes from where training or scoring stores them to where, and as, a call needs them.

    A device receives its new shard less what of it the old one was; where one device sends to several, its port is the
    bottleneck. Where they lie so already nothing is done.
    """
    if alike(home, placement):
        return 0.0
    received = size * max(0.0, stored(placement) - _kept(home, placement))
    fanout = max(1.0, placement.devices.count / home.devices.count)
    first, last = min(home.devices.start, placement.devices.start), max(home.devices.stop, placement.devices.stop)
    return _spread(received * fanout, Slice(first, last - first), cluster)


def transfer_seconds(size: float, source: Placement, target: Placement, cluster: Cluster) -> float:
    """To bring `size` bytes of rows from one call's devices to another's; rows lie over all devices of a call."""
    if source.devices == target.devices:
        return 0.0
    first, last = min(source.devices.start, target.devices.start), max(source.devices.stop, target.devices.stop)
    return _spread(size / min(source.devices.count, target.devices.count), Slice(first, last - first), cluster)


def offload_seconds(size: float, cluster: Cluster) -> float:
    """To bring `size` bytes of a device to its host's memory, or back."""
    return size / cluster.hardware.host


def stored(placement: Placement) -> float:
    """The share of a model's matrices that each device keeps in this placement's layout."""
    divided = placement.tensor * placement.pipeline
    return 1 / (divided if placement.layout == "generate" else divided * placement.fsdp)


def alike(home: Placement, placement: Placement) -> bool:
    """Whether weights lie in both as the same shards: the layouts of training and scoring store them alike."""
    generating = (home.layout == "generate") == (placement.layout == "generate")
    return generating and (home.devices, home.sizes) == (placement.devices, placement.sizes)


def _kept(home: Placement, placement: Placement) -> float:
    """The share of the model that a device has in both: at the least, of any device."""
    if not (home.devices.start <= placement.devices.start and placement.devices.stop <= home.devices.stop):
        return 0.0
    old, new = stored(home), stored(placement)
    if home.sizes == placement.sizes and home.pipeline == placement.pipeline and home.devices == placement.devices:
        return min(old, new)  # the axes that remain are where they were: shards are nested
    if home.pipeline == placement.pipeline and home.tensor == placement.tensor:
        return old * new * home.tensor * home.pipeline  # the same slices of heads and mlp, others of embed
    return old * new  # slices of different dimensions cross


def _spread(size: float, devices: Slice, cluster: Cluster) -> float:
    """Of `size` bytes a device, to or from others anywhere in these."""
    hardware, node = cluster.hardware, cluster.node
    inside = devices.start // node == (devices.stop - 1) // node
    rate = hardware.link if inside else min(hardware.link, hardware.network)
    return size / (hardware.collective * rate) + hardware.latency
