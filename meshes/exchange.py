"""Copies arrays to other devices. They are partitioned at the source, so that every shard is copied unchanged.

`jax.device_put` copies shards between devices of one process, and `exchange` between processes: all devices that send
or receive run one program, in which every device of the destination gets its shard from one device that has it. A
process without a device on either side runs nothing, but must make the same calls, as for all multi-process programs.
Every device runs its programs in the order of the calls, so both sides of an exchange wait for each other.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes.layout import axis_names
from jrlhf.meshes.mesh import Device, mesh_of

Permutation = tuple[tuple[int, int], ...]  # (sender, receiver) of each copy, by position among the devices
_AXIS = "device"


# ---- intermediate partitionings


@lru_cache(maxsize=4096)
def landing_of(target: NamedSharding, rank: int, sources: int) -> NamedSharding:
    """The partitioning in which an array arrives: `target`, or the finest coarser one that fits the source's devices.

    A copy from device to device needs every shard of the destination to exist at the source: otherwise JAX goes
    through the host.
    """
    parts, left = [], sources
    for part in _divisions(target, rank):
        parts.append(gcd(part, left))
        left //= parts[-1]
    coarse = _coarsen(target, parts)
    return target if _divisions(coarse, rank) == _divisions(target, rank) else coarse


def stage_of(source: Sharding, devices: Sequence[Device], landing: NamedSharding, rank: int) -> NamedSharding:
    """The partitioning of `landing` on the source's `devices`, for an array with the sharding `source`. If dropping
    mesh axes of it is enough, no axis is moved, and the stage costs at most an all-gather."""
    parts = [1] * rank if len(devices) == 1 else _divisions(landing, rank)
    if isinstance(source, NamedSharding):
        coarse = _coarsen(source, parts)
        if _divisions(coarse, rank) == parts:
            return coarse
    dims = tuple(f"dim{i}" for i in range(rank))
    return NamedSharding(Mesh(np.asarray(devices).reshape(*parts, -1), (*dims, "rest")), P(*dims))


def _divisions(sharding: NamedSharding, rank: int) -> list[int]:
    parts = [prod(sharding.mesh.shape[axis] for axis in axis_names(entry)) for entry in sharding.spec]
    return parts + [1] * (rank - len(parts))


def _coarsen(sharding: NamedSharding, parts: Sequence[int]) -> NamedSharding:
    """Reduces every mesh axis to its largest major factor with which each dimension's parts divide `parts`."""
    mesh = mesh_of(sharding)
    sizes = dict.fromkeys(mesh.shape, 1)
    for entry, left in zip(sharding.spec, parts, strict=False):
        for axis in axis_names(entry):
            sizes[axis] = gcd(mesh.shape[axis], left)
            left //= sizes[axis]
            if sizes[axis] < mesh.shape[axis]:  # drop all more minor axes, which would otherwise move
                break
    factors = [factor for axis, size in mesh.shape.items() for factor in (sizes[axis], size // sizes[axis])]
    names = [name for axis in mesh.shape for name in (axis, f"{axis}_dropped")]
    return NamedSharding(Mesh(np.asarray(mesh.devices).reshape(factors), names), sharding.spec)


# ---- copies


def copied(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Copies the arrays to the devices of `shardings`, bit for bit. The sources are not freed.

    All arrays must be on the same devices, and all shardings too. Every shard of the destination must exist at the
    source; within a process `jax.device_put` also divides arrays that are on one device.
    """
    if not (arrays[0].is_fully_addressable and shardings[0].is_fully_addressable):
        return exchange(arrays, shardings)
    with jax.set_mesh(mesh_of(shardings[0])):
        return jax.device_put(list(arrays), list(shardings))


def exchange(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """`copied` between processes. Temporarily each device of both sides needs memory for its shards once more."""
    sources = [_parts(array.sharding, array.shape) for array in arrays]
    targets = [_parts(target, array.shape) for array, target in zip(arrays, shardings, strict=True)]
    devices = tuple(sorted({*sources[0], *targets[0]}, key=lambda device: device.id))
    union = Mesh(np.asarray(devices), (_AXIS,))
    schedules = []
    for source, target in zip(sources, targets, strict=True):
        sent = [source.get(device) for device in devices]
        rounds = permutations(sent, [target.get(device) for device in devices])
        schedules.append((tuple(shard is None for shard in sent), rounds))
    with jax.set_mesh(union):
        moved = _program(union, tuple(schedules))(*(_joined(array, union) for array in arrays))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape, target, _parted(x, target, array.shape), dtype=array.dtype
        )
        for array, target, x in zip(arrays, shardings, moved, strict=True)
    ]


def permutations(sent: Sequence[Hashable | None], wanted: Sequence[Hashable | None]) -> tuple[Permutation, ...]:
    """Returns rounds of copies, each a partial permutation of the devices, after which each device has its shard.

    sent, wanted: by device, the shard that it has, and the one that it needs; None: no shard. A device that has its
    shard already receives nothing. Devices forward received shards, so the senders of a shard double in each round.
    """
    owners, receivers = defaultdict[Hashable, list[int]](list), defaultdict[Hashable, list[int]](list)
    for device, shard in enumerate(sent):
        owners[shard].append(device)
    for device, shard in enumerate(wanted):
        if shard is not None and shard != sent[device]:
            receivers[shard].append(device)
    rounds = []
    while any(receivers.values()):
        pairs: list[tuple[int, int]] = []
        for shard, left in receivers.items():
            pairs += zip(owners[shard], left, strict=False)
            served, receivers[shard] = left[: len(owners[shard])], left[len(owners[shard]) :]
            owners[shard] += [device for device in served if sent[device] is None]
        rounds.append(tuple(pairs))
    return tuple(rounds)


@lru_cache(maxsize=4096)
def _program(union: Mesh, schedules: tuple[tuple[tuple[bool, ...], tuple[Permutation, ...]], ...]):
    """Returns a cached jitted program: arrays with one shard per device -> the arrays after the copies.

    schedules: for each array, whether each device has none of its shards; and the rounds of copies.
    """

    def move(*shards: jax.Array) -> list[jax.Array]:
        return [_received(x, *schedule) for x, schedule in zip(shards, schedules, strict=True)]

    return jax.jit(jax.shard_map(move, mesh=union, in_specs=P(_AXIS), out_specs=P(_AXIS)))


def _received(x: jax.Array, blank: Sequence[bool], rounds: Sequence[Permutation]) -> jax.Array:
    result, number = x, lax.axis_index(_AXIS)
    relays = jnp.asarray(blank)[number]
    for pairs in rounds:
        receives = np.isin(np.arange(len(blank)), [receiver for _, receiver in pairs])
        copy = lax.ppermute(jnp.where(relays, result, x), _AXIS, pairs)
        result = jnp.where(jnp.asarray(receives)[number], copy, result)
    return result


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, tuple[int, ...]]:
    """Returns device -> the start indices of its shard."""
    indices = sharding.devices_indices_map(shape)
    return {device: tuple(part.start or 0 for part in index) for device, index in indices.items()}


def _joined(array: jax.Array, union: Mesh) -> jax.Array:
    """Returns one array of all shards, with one per device along axis 0; devices without a shard get zeros."""
    shape = array.sharding.shard_shape(array.shape) or (1,)
    shards = {shard.device: _shaped(shard.data, shape, shard.device) for shard in array.addressable_shards}
    for device in union.local_devices:
        if device not in shards:
            shards[device] = _on(device, _zeros, shape, array.dtype)
    whole = (shape[0] * union.size, *shape[1:])
    sharding = NamedSharding(union, P(_AXIS))
    return jax.make_array_from_single_device_arrays(whole, sharding, list(shards.values()), dtype=array.dtype)


def _parted(joined: jax.Array, target: NamedSharding, shape: tuple[int, ...]) -> list[jax.Array]:
    """Returns the shards of an array with this shape on the destination's devices in this process."""
    shards = {shard.device: shard.data for shard in joined.addressable_shards}
    part = target.shard_shape(shape)
    return [_shaped(shards[device], part, device) for device in target.addressable_devices]


def _shaped(x: jax.Array, shape: tuple[int, ...], device: Device) -> jax.Array:
    """Reshapes an array of one device; returns it unchanged if it has the shape."""
    return x if x.shape == shape else _on(device, _reshape, x, shape)


def _on(device: Device, function: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
    with jax.set_mesh(Mesh(np.asarray([device]), (_AXIS,))):
        return function(*arguments)


_zeros = jax.jit(jnp.zeros, static_argnums=(0, 1))
_reshape = jax.jit(jnp.reshape, static_argnums=1)
