"""Divides arrays of which a process has no part over the devices of all processes, for example to save them."""

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
    """Returns `tree` with its arrays placed as `spread_sharding` says: the same bits. Sources are not freed.

    So every process has a part of each array. All processes must call this, in one order.
    """
    leaves, treedef = jax.tree.flatten(tree)
    away = [index for index, leaf in enumerate(leaves) if spread_sharding(leaf) != leaf.sharding]
    arrays = [leaves[index] for index in away]
    for group in groups(arrays):
        sources = onload([arrays[i] for i in group])
        copies = reshard(sources, [_over_all(x.sharding, ()) for x in sources])  # shards as they are at the source
        moved = reshard(copies, [spread_sharding(x) for x in sources], donate=True)
        for i, array in zip(group, moved, strict=True):
            leaves[away[i]] = array
    return treedef.unflatten(leaves)


def spread_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding:
    """The array's own sharding, if each process has a part of it. Else one over all devices: the array's shards, each
    divided once more along one axis, as far as it divides, and else copied. So no shard needs parts of two."""
    sharding = leaf.sharding
    assert sharding is not None
    if not (isinstance(sharding, NamedSharding) and absent_processes(sharding.mesh)):
        return sharding
    return _over_all(sharding, sharding.shard_shape(leaf.shape))


def _over_all(sharding: NamedSharding, shard: tuple[int, ...]) -> NamedSharding:
    """The sharding with other devices beside each of its own, over which its shards are divided: those of this shape
    along one axis, or else copied. Their number must divide that of all devices."""
    source = sharding.mesh
    assert isinstance(source, Mesh), "an array's mesh has devices"
    own = list(np.asarray(source.devices).flat)
    others = [device for device in jax.devices() if device not in own]
    times, rest = divmod(len(own) + len(others), len(own))
    assert rest == 0, f"{len(own)} devices do not divide all {len(own) + len(others)}"
    parts = [gcd(size, times) for size in shard]
    most = max(parts, default=1)
    devices = np.asarray([*own, *others]).reshape(most, times // most, *source.shape.values())
    mesh = Mesh(np.moveaxis(devices, (0, 1), (-2, -1)), (*source.axis_names, "part", "copy"))
    entries = [*sharding.spec, *[None] * (len(shard) - len(sharding.spec))]
    if most > 1:
        divided = parts.index(most)
        entries[divided] = (*axis_names(entries[divided]), "part")
    return NamedSharding(mesh, P(*entries), memory_kind=DEVICE)
