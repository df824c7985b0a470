"""Moving arrays between the memory of devices and pinned memory of their host, each staying divided as it is."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jrlhf.meshes.reshard import GROUP_BYTES, no_way_through_numpy

MemoryKind = Literal["device", "pinned_host"]
DEVICE: MemoryKind = "device"
HOST: MemoryKind = "pinned_host"


def check_host_memory(mesh: Mesh) -> None:
    """That the devices of this process can reach pinned memory of their host.

    Raises:
        ValueError: one cannot.
    """
    for device in mesh.local_devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise ValueError(f"device {device} has no {HOST} memory, only {', '.join(kinds)}")


def offload(tree: Any, *, group_bytes: int = GROUP_BYTES) -> Any:
    """`tree` in pinned memory of the host. Its arrays on devices are deleted: nothing else may use them any more.

    Arrays that share their memory move once. Waits until all is there, group by group: nothing may be freed before, and
    a donation would free nothing at all.

    group_bytes: of a device, moved at a time (a larger array alone).
    """
    return _move(tree, HOST, free=True, group_bytes=group_bytes)


def onload(tree: Any) -> Any:
    """A copy of `tree` in the memory of its devices, of what lies on the host. Where nothing does, `tree` itself.

    As the result of any program, it may still be on its way when this returns.
    """
    return _move(tree, DEVICE, free=False, group_bytes=GROUP_BYTES) if is_on_host(tree) else tree


def free_host(tree: Any) -> None:
    """Deletes what of the tree lies in pinned memory of the host."""
    for leaf in jax.tree.leaves(tree):
        if _kind(leaf) == HOST:
            leaf.delete()


def is_on_host(tree: Any) -> bool:
    """Whether an array of the tree lies in pinned memory of the host."""
    return any(_kind(leaf) == HOST for leaf in jax.tree.leaves(tree))


def groups(arrays: Sequence[jax.Array], group_bytes: int = GROUP_BYTES) -> Iterator[list[int]]:
    """Indices of neighbours that have at most so many bytes on a device; of a larger array its own alone."""
    group: list[int] = []
    size = 0
    for i, array in enumerate(arrays):
        shard = array.dtype.itemsize * prod(array.sharding.shard_shape(array.shape))
        if group and size + shard > group_bytes:
            yield group
            group, size = [], 0
        group.append(i)
        size += shard
    if group:
        yield group


def _move(tree: Any, kind: MemoryKind, *, free: bool, group_bytes: int) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    places: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and _kind(leaf) != kind:
            places.setdefault(_memory(leaf), []).append(i)
    slots = list(places.values())
    sources = [leaves[each[0]] for each in slots]
    for group in groups(sources, group_bytes):
        with no_way_through_numpy():
            moved = jax.device_put(
                [sources[i] for i in group], [sources[i].sharding.with_memory_kind(kind) for i in group]
            )
        for i, array in zip(group, moved, strict=True):
            for slot in slots[i]:
                leaves[slot] = array
        if free:
            jax.block_until_ready(moved)
            for i in group:
                sources[i].delete()
    return treedef.unflatten(leaves)


def _memory(array: jax.Array) -> tuple[Any, ...]:
    """Equal for arrays that share their memory."""
    shards = ((shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards)
    return (array.shape, array.dtype, array.sharding, *shards)


def _kind(leaf: Any) -> str | None:
    return leaf.sharding.memory_kind if isinstance(leaf, jax.Array) else None
