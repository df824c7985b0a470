"""Redistributes arrays so that every process has a part of each, for example to save them in a checkpoint."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes.layout import axis_names
from jrlhf.meshes.mesh import absent_processes, mesh_of
from jrlhf.meshes.offload import DEVICE, groups, onload
from jrlhf.meshes.resharding import GROUP_BYTES, reshard


def spread(tree: Any) -> Any:
    """Returns `tree` with its arrays moved to their `spread_sharding`, bit for bit. Sources are not freed.

    Afterwards every process has a part of each array. All processes must call this in the same order.
    """
    leaves, treedef = jax.tree.flatten(tree)
    away = [index for index, leaf in enumerate(leaves) if spread_sharding(leaf) != leaf.sharding]
    arrays = [leaves[index] for index in away]
    for group in groups(arrays):
        sources = onload([arrays[i] for i in group])
        copied, wanted = [_over_all(x, divides=False) for x in sources], [spread_sharding(x) for x in sources]
        arrived = move(sources, copied, donate=False)  # where possible, copies of the shards as they are at the source
        arrived = arrived if copied == wanted else move(arrived, wanted, donate=True)
        for i, array in zip(group, arrived, strict=True):
            leaves[away[i]] = array
    return treedef.unflatten(leaves)


def spread_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding:
    """Returns the array's own sharding if each process has a part of it. Otherwise one over all devices, in which each
    of the array's shards is divided further along one axis or, if that is impossible, replicated. If the number of the
    array's devices does not divide that of all devices, the array is divided anew over all devices."""
    sharding = leaf.sharding
    assert sharding is not None
    if not (isinstance(sharding, NamedSharding) and absent_processes(sharding.mesh)):
        return sharding
    return _over_all(leaf)


def _over_all(leaf: jax.Array | jax.ShapeDtypeStruct, *, divides: bool = True) -> NamedSharding:
    """Returns the array's sharding extended by a group of further devices for each of its own, over which each shard is
    divided along one axis, or else replicated. divides: False: always replicated, if there are such groups."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding), "only such an array is on some of the processes"
    source = mesh_of(sharding)
    own = dict.fromkeys(np.asarray(source.devices).flat)  # in order, and quick to search
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
    """Returns a sharding over all devices that divides axes of an array, those that are divided already first. The
    first axis of an array of three or more, the layers, stays whole, so that `move` can take one layer after the other.

    shard: the shape of the array's present shards.
    """
    parts, left = [1] * len(shape), len(jax.devices())
    for axis in sorted(range(len(shape) > 2, len(shape)), key=lambda axis: shape[axis] == shard[axis]):
        parts[axis] = gcd(shape[axis], left)
        left //= parts[axis]
    axes = [f"axis{number}" for number in range(len(shape))]
    mesh = Mesh(np.asarray(jax.devices()).reshape(*parts, left), (*axes, "copy"))
    entries = [axis if part > 1 else None for axis, part in zip(axes, parts, strict=True)]
    return NamedSharding(mesh, P(*entries), memory_kind=DEVICE)


def move(arrays: Sequence[jax.Array], shardings: Sequence[Any], *, donate: bool) -> list[jax.Array]:
    """Returns the arrays in these shardings, bit for bit, as `reshard` does. All processes must call this.

    Where the devices of neither side divide those of the other, arrays arrive in coarse parts before they are divided
    further. So there layers are moved one after the other, and few at a time.
    """
    counts = [(x.sharding.num_devices, to.num_devices) for x, to in zip(arrays, shardings, strict=True)]
    if all(max(pair) % min(pair) == 0 for pair in counts):
        return reshard(list(arrays), list(shardings), donate=donate)
    moved = []
    for x, target, (source, number) in zip(arrays, shardings, counts, strict=True):
        first, *others = [*target.spec, *[None] * (x.ndim - len(target.spec))] or [None]
        limit = GROUP_BYTES * gcd(source, number) // max(source, number)
        if x.ndim < 3 or first is not None:
            moved += reshard([x], [target], donate=donate, group_bytes=limit)
            continue
        layer = NamedSharding(target.mesh, P(*others), memory_kind=target.memory_kind)
        pieces = reshard({"x": x}, {"x": [layer] * x.shape[0]}, donate=donate, group_bytes=limit)
        with jax.set_mesh(mesh_of(target)):
            moved.append(_stack(target)(pieces["x"]))
    return moved


@lru_cache(maxsize=1024)
def _stack(sharding: NamedSharding) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(jnp.stack, out_shardings=sharding)
