"""Moves arrays between device memory and pinned host memory. Their partitioning stays as it is."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.meshes.mesh import mesh_of
from jrlhf.meshes.resharding import GROUP_BYTES, host_transfers_refused, packed_by_size
from jrlhf.meshes.transfers import HOST, is_on_host

DEVICE = "device"


def check_host_memory(mesh: Mesh) -> None:
    """Raises ValueError if a device of this process cannot reach pinned memory of its host."""
    for device in mesh.local_devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise ValueError(f"device {device} has no {HOST} memory, only {', '.join(kinds)}")


def offload(tree: Any, *, group_bytes: int = GROUP_BYTES) -> Any:
    """Moves `tree` to pinned host memory and deletes its arrays on devices: nothing else may use them any more.

    Arrays that share their memory move once. It waits until each group has arrived and then frees the sources, because
    donation does not free them here.

    group_bytes: maximum bytes per device that are moved at a time (a larger array moves alone).
    """
    return _move(tree, HOST, free=True, group_bytes=group_bytes)


def onload(tree: Any) -> Any:
    """Copies arrays in host memory to the devices; returns `tree` itself if there are none. Does not wait."""
    return _move(tree, DEVICE, free=False, group_bytes=GROUP_BYTES) if is_on_host(tree) else tree


def free_host(tree: Any) -> None:
    """Deletes the arrays of the tree that are in pinned host memory."""
    for leaf in jax.tree.leaves(tree):
        if _kind(leaf) == HOST:
            leaf.delete()


def groups(arrays: Sequence[jax.Array], group_bytes: int = GROUP_BYTES) -> Iterator[list[int]]:
    """Yields indices of neighbours that together have at most `group_bytes` on a device; a larger array is alone."""
    shards = [array.dtype.itemsize * prod(array.sharding.shard_shape(array.shape)) for array in arrays]
    return packed_by_size(range(len(shards)), shards.__getitem__, group_bytes)


def _move(tree: Any, kind: str, *, free: bool, group_bytes: int) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    places: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and _kind(leaf) != kind:
            places.setdefault(_memory(leaf), []).append(i)
    slots = list(places.values())
    sources = [leaves[shared[0]] for shared in slots]
    for group in groups(sources, group_bytes):
        moved = [_put(sources[i], kind) for i in group]
        for i, array in zip(group, moved, strict=True):
            for slot in slots[i]:
                leaves[slot] = array
        if free:
            jax.block_until_ready(moved)
            for i in group:
                sources[i].delete()
    return treedef.unflatten(leaves)


def _put(array: jax.Array, kind: str) -> jax.Array:
    sharding = array.sharding.with_memory_kind(kind)
    with nullcontext() if sharding.is_fully_addressable else jax.set_mesh(mesh_of(sharding)), host_transfers_refused():
        return jax.device_put(array, sharding)  # with several processes JAX runs a program, which needs a mesh


def _memory(array: jax.Array) -> tuple[Any, ...]:
    """Returns a key that is equal for arrays that share their memory. Shards of other processes do not count."""
    shards = [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards]
    return (array.shape, array.dtype, array.sharding, *(shards or [id(array)]))


def _kind(leaf: Any) -> str | None:
    return leaf.sharding.memory_kind if isinstance(leaf, jax.Array) else None
