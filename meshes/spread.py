"""Redistributes arrays so that every process has a part of each, for example to save them in a checkpoint."""

from math import gcd
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes.layout import axis_names
from jrlhf.meshes.mesh import absent_processes
from jrlhf.meshes.offload import DEVICE, groups, onload
from jrlhf.meshes.reshard import reshard


def spread(tree: Any) -> Any:
    """Returns `tree` with its arrays moved to their `spread_sharding`, bit for bit. Sources are not freed.

    Afterwards every process has a part of each array. All processes must call this in the same order.
    """
    leaves, treedef = jax.tree.flatten(tree)
    away = [index for index, leaf in enumerate(leaves) if spread_sharding(leaf) != leaf.sharding]
    arrays = [leaves[index] for index in away]
    for group in groups(arrays):
        sources = onload([arrays[i] for i in group])
        copies = reshard(sources, [_over_all(x, divides=False) for x in sources])  # shards as they are at the source
        moved = reshard(copies, [spread_sharding(x) for x in sources], donate=True)
        for i, array in zip(group, moved, strict=True):
            leaves[away[i]] = array
    return treedef.unflatten(leaves)


def spread_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding:
    """Returns the array's own sharding if each process has a part of it. Otherwise one over all devices, in which each
    of the array's shards is divided further along one axis or, if that is impossible, replicated. If the number of the
    array's devices does not divide that of all devices, one axis of the whole array is divided instead."""
    sharding = leaf.sharding
    assert sharding is not None
    if not (isinstance(sharding, NamedSharding) and absent_processes(sharding.mesh)):
        return sharding
    return _over_all(leaf)


def _over_all(leaf: jax.Array | jax.ShapeDtypeStruct, *, divides: bool = True) -> NamedSharding:
    """Returns the array's sharding extended by a group of further devices for each of its own, over which each shard is
    divided along one axis, or else replicated. divides: False: always replicated, if there are such groups."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(source := sharding.mesh, Mesh), "it has devices"
    own = list(np.asarray(source.devices).flat)
    others = [device for device in jax.devices() if device not in own]
    times, rest = divmod(len(own) + len(others), len(own))
    if rest:
        return _evenly(leaf.shape, sharding.shard_shape(leaf.shape))
    shard = sharding.shard_shape(leaf.shape) if divides else ()
    parts = [gcd(size, times) for size in shard]
    most = max(parts, default=1)
    devices = np.asarray([*own, *others]).reshape(most, times // most, *source.shape.values())
    mesh = Mesh(np.moveaxis(devices, (0, 1), (-2, -1)), (*source.axis_names, "part", "copy"))
    entries = [*sharding.spec, *[None] * (len(shard) - len(sharding.spec))]
    if most > 1:
        divided = parts.index(most)
        entries[divided] = (*axis_names(entries[divided]), "part")
    return NamedSharding(mesh, P(*entries), memory_kind=DEVICE)


def _evenly(shape: tuple[int, ...], shard: tuple[int, ...]) -> NamedSharding:
    """Returns a sharding over all devices that divides one axis of an array: the one that gives the most parts, and
    among such axes one that is divided already, so that less is moved. shard: the shape of its shards."""
    devices = np.asarray(jax.devices())
    parts = [gcd(size, len(devices)) for size in shape]
    axes = sorted(range(len(shape)), key=lambda axis: (parts[axis], shape[axis] != shard[axis]))
    entries = ["part" if axis == axes[-1] else None for axis in range(len(shape))]
    mesh = Mesh(devices.reshape(max(parts, default=1), -1), ("part", "copy"))
    return NamedSharding(mesh, P(*entries), memory_kind=DEVICE)
