"""The memory that arrays hold."""

from collections import Counter
from typing import Any

import jax


def live_bytes(tree: Any = None) -> Counter[tuple[int, str]]:
    """Bytes held by the arrays of `tree` (default: by every array of this process), by (device id, memory kind).

    Deleted arrays hold nothing, and memory that several arrays share counts once. A backend's own statistics would
    also show what programs allocate while they run, but the CPU has none.
    """
    arrays = jax.live_arrays() if tree is None else jax.tree.leaves(tree)
    sizes: dict[tuple[int, str, int], int] = {}
    for array in arrays:
        if not array.is_deleted():
            for shard in array.addressable_shards:
                place = shard.device.id, array.sharding.memory_kind, shard.data.unsafe_buffer_pointer()
                sizes[place] = shard.data.nbytes
    total: Counter[tuple[int, str]] = Counter()
    for (device, kind, _), size in sizes.items():
        total[device, kind] += size
    return total


def bytes_by_kind(tree: Any = None) -> Counter[str]:
    """`live_bytes` of all devices together, by memory kind."""
    total: Counter[str] = Counter()
    for (_, kind), size in live_bytes(tree).items():
        total[kind] += size
    return total
