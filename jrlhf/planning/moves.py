"""Predicts the seconds of data movement: collectives, weights to another placement, rows to another call."""

from math import prod
from typing import NamedTuple

import numpy as np

from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Slice


class DeviceGroup(NamedTuple):
    """The devices of one collective: their number, and how many of them are on one node."""

    size: int
    local: int


_AXES = ("pipeline", "data", "fsdp", "tensor")  # device numbers are row-major over these axes


def group(placement: Placement, node: int, axis: str) -> DeviceGroup:
    """Returns the group of a collective over a mesh axis, on nodes of `node` devices."""
    size, inner = getattr(placement, axis), _AXES[_AXES.index(axis) + 1 :]
    stride = prod(getattr(placement, axis) for axis in inner)
    start = placement.devices.start % node
    here = node if start + min(placement.devices.count, node) <= node else node - start
    return DeviceGroup(size, max(1, min(size, here // stride)))


def gather_seconds(cluster: Cluster, group: DeviceGroup, size: float) -> float:
    """Predicts an all-gather to `size` bytes on each device, or a reduce-scatter of `size` bytes.

    On a ring every device sends and receives (g - 1) / g of the bytes. Between nodes, as many rings run as the group
    has members on a node, each through its own port (as NCCL does); all of them share the link inside the node.
    """
    if group.size == 1:
        return 0.0
    hardware = cluster.hardware
    inside = hardware.link
    if group.local < group.size:
        inside = min(inside, group.local * hardware.network)
    return (group.size - 1) / group.size * size / (hardware.collective * inside) + hardware.latency


def reduce_seconds(cluster: Cluster, group: DeviceGroup, size: float) -> float:
    """Predicts an all-reduce of `size` bytes: a reduce-scatter and an all-gather, started together."""
    if group.size == 1:
        return 0.0
    return 2 * gather_seconds(cluster, group, size) - cluster.hardware.latency


def reallocation_seconds(stored: float, size: float, home: Placement, placement: Placement, cluster: Cluster) -> float:
    """Predicts moving weights from their home, where they take `stored` bytes, to a call's placement (`size` bytes).

    A device reads and casts its stored shard, and writes its new shard, of which it receives the part that it does not
    have. If one device sends to several, its port is the bottleneck.
    """
    if stored_alike(home, placement):
        return 0.0
    received = size * max(0.0, stored_share(placement) - _kept_share(home, placement))
    fanout = max(1.0, placement.devices.count / home.devices.count)
    hardware = cluster.hardware
    written = (stored * stored_share(home) + size * stored_share(placement)) / (hardware.bandwidth * hardware.stream)
    return written + _move_seconds(received * fanout, home.devices, placement.devices, cluster)


def transfer_seconds(size: float, source: Placement, target: Placement, cluster: Cluster) -> float:
    """Predicts moving `size` bytes of rows from one call's devices to another's; all devices have rows."""
    if source.devices == target.devices:
        return 0.0
    size /= min(source.devices.count, target.devices.count)
    return _move_seconds(size, source.devices, target.devices, cluster)


def stored_share(placement: Placement) -> float:
    """Returns the share of a model's matrices that each device stores in this placement."""
    divided = placement.tensor * placement.pipeline
    return 1 / (divided if placement.layout == "generate" else divided * placement.fsdp)


def stored_alike(home: Placement, placement: Placement) -> bool:
    """Returns whether both placements store the same shards: training and scoring layouts store weights alike.

    Weights of calls in pipeline stages are stored whole, without stages.
    """
    same_storage = (home.layout == "generate") == (placement.layout == "generate")
    return same_storage and (home.devices, home.stored) == (placement.devices, placement.stored)


def _kept_share(home: Placement, placement: Placement) -> float:
    """Returns the minimum, over devices, of the share of the model that a device has already of its new shard.

    Matrices have a dimension that is divided over `fsdp` and one over `tensor`, and layers are divided over stages.
    """
    if not (home.devices.start <= placement.devices.start and placement.devices.stop <= home.devices.stop):
        return 0.0
    devices, shares = np.arange(placement.devices.start, placement.devices.stop), 1.0
    before = _divisions(home, devices, (1, *home.stored))
    after = _divisions(placement, devices, (placement.pipeline, *placement.sizes))
    for (count, index), (parts, part) in zip(before, after, strict=True):
        first, last = np.maximum(index / count, part / parts), np.minimum((index + 1) / count, (part + 1) / parts)
        shares = shares * np.maximum(last - first, 0)
    return float(np.min(shares))


def _divisions(
    placement: Placement, devices: np.ndarray, sizes: tuple[int, int, int, int]
) -> list[tuple[int, np.ndarray]]:
    """Returns the number of parts, and the part of each device, of layers, embed and the other dimension.

    sizes: of the mesh, over pipeline, data, fsdp and tensor.
    """
    stage, _, fsdp, tensor = np.unravel_index(devices - placement.devices.start, sizes)
    embed = (1, np.zeros(len(devices), int)) if placement.layout == "generate" else (sizes[2], fsdp)
    return [(sizes[0], stage), embed, (sizes[3], tensor)]


def _move_seconds(size: float, source: Slice, target: Slice, cluster: Cluster) -> float:
    """Predicts moving `size` bytes per device between two slices: over links inside a node, else over the network."""
    hardware, node = cluster.hardware, cluster.node
    first, last = min(source.start, target.start), max(source.stop, target.stop)
    rate = hardware.link if first // node == (last - 1) // node else min(hardware.link, hardware.network)
    return size / (hardware.collective * rate) + hardware.latency
