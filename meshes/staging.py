"""The way of an array to other devices: partitioned at the source, so that every shard can be copied as it is."""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes.layout import axis_names
from jrlhf.meshes.mesh import Device


@lru_cache(maxsize=4096)
def landing_of(target: NamedSharding, rank: int, sources: int) -> NamedSharding:
    """The partitioning in which an array arrives: `target`, or the finest coarser one that the source has devices for.

    A copy from device to device needs every shard of the destination to exist at the source: otherwise JAX goes
    through the host. Only an array on one device is sliced there by JAX.
    """
    if sources == 1:
        return target
    parts, left = [], sources
    for part in _parts(target, rank):
        parts.append(gcd(part, left))
        left //= parts[-1]
    coarse = _coarsen(target, parts)
    return target if _parts(coarse, rank) == _parts(target, rank) else coarse


def stage_of(source: Sharding, devices: Sequence[Device], landing: NamedSharding, rank: int) -> NamedSharding:
    """The partitioning of `landing` on the source's `devices`, of an array that is there as `source` says. Where
    dropping mesh axes is enough, no axis is moved, and the stage costs at most an all-gather."""
    parts = [1] * rank if len(devices) == 1 else _parts(landing, rank)
    if isinstance(source, NamedSharding):
        coarse = _coarsen(source, parts)
        if _parts(coarse, rank) == parts:
            return coarse
    dims = tuple(f"dim{i}" for i in range(rank))
    return NamedSharding(Mesh(np.asarray(devices).reshape(*parts, -1), (*dims, "rest")), P(*dims))


def _parts(sharding: NamedSharding, rank: int) -> list[int]:
    """The number of parts into which each dimension is divided."""
    parts = [prod(sharding.mesh.shape[axis] for axis in axis_names(entry)) for entry in sharding.spec]
    return parts + [1] * (rank - len(parts))


def _coarsen(sharding: NamedSharding, parts: Sequence[int]) -> NamedSharding:
    """Reduces every mesh axis to its largest major factor with which each dimension's parts divide `parts`."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "an array's mesh has devices"
    sizes = dict.fromkeys(mesh.shape, 1)
    for entry, left in zip(sharding.spec, parts, strict=False):
        for axis in axis_names(entry):
            sizes[axis] = gcd(mesh.shape[axis], left)
            left //= sizes[axis]
            if sizes[axis] < mesh.shape[axis]:  # a more minor axis would move if it stayed
                break
    factors = [factor for axis, size in mesh.shape.items() for factor in (sizes[axis], size // sizes[axis])]
    names = [name for axis in mesh.shape for name in (axis, f"{axis}_dropped")]
    return NamedSharding(Mesh(np.asarray(mesh.devices).reshape(factors), names), sharding.spec)
