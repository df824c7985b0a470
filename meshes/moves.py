"""Which array goes to which sharding: what `reshard` carries out and `tree_reshard_cost` prices."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import KeyPath, SequenceKey, keystr
from jax.typing import DTypeLike

from jrlhf.meshes.mesh import Device


@dataclass(frozen=True)
class Move:
    """One array on its way: to one sharding or, unstacked along axis 0, to one sharding for each index of that axis.

    indices: which indices of axis 0 the targets are for; None: the array is not unstacked.
    slots: where the results stand among the leaves of the destination.
    """

    source: jax.Array | jax.ShapeDtypeStruct
    targets: tuple[NamedSharding, ...]
    indices: range | None
    slots: tuple[int, ...]

    @property
    def source_sharding(self) -> Sharding:
        assert self.source.sharding is not None, "pair admits no other"
        return self.source.sharding

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each result."""
        return self.source.shape if self.indices is None else self.source.shape[1:]

    def dtype(self, cast: DTypeLike | None) -> np.dtype:
        """The dtype of each result: `cast` for a floating array of two or more dimensions, its own for any other."""
        castable = jnp.issubdtype(self.source.dtype, jnp.floating) and len(self.shape) > 1
        return jnp.dtype(cast if cast is not None and castable else self.source.dtype)

    def target_bytes(self, cast: DTypeLike | None) -> int:
        """Bytes of all results on one device."""
        return self.dtype(cast).itemsize * sum(prod(target.shard_shape(self.shape)) for target in self.targets)

    def devices(self) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
        """The devices of source and destination, in their own order."""
        source, target = self.source_sharding, self.targets[0]
        return tuple(source.devices_indices_map(self.source.shape)), tuple(target.devices_indices_map(self.shape))


def pair(tree: Any, shardings: Any) -> tuple[list[Move], Any]:
    """One `Move` for each array of `tree`, and the structure of the results, which is that of `shardings`.

    `shardings` mirrors `tree`. Where it has one list (or tuple) more on the way to a leaf, that array is unstacked
    along axis 0: `{"w": x}` may go to `{"w": [s0, s1]}` as well as to `[{"w": s0}, {"w": s1}]`.

    Raises:
        ValueError: an array without a sharding, a sharding without an array, or a list that is not as long as axis 0.
        TypeError: a leaf of `tree` that is on no device.
    """
    sources = dict(jax.tree.leaves_with_path(tree))
    targets, treedef = jax.tree.flatten_with_path(shardings)
    routes: dict[KeyPath, dict[int | None, int]] = {path: {} for path in sources}
    for slot, (path, _) in enumerate(targets):
        origin, index = _origin(path, sources)
        routes[origin][index] = slot
    flat = [target for _, target in targets]
    return [_move(keystr(path), source, routes[path], flat) for path, source in sources.items()], treedef


def _origin(path: KeyPath, sources: dict[KeyPath, Any]) -> tuple[KeyPath, int | None]:
    """Which array a sharding is for; and which index of its axis 0, if one list more leads to the sharding."""
    if path in sources:
        return path, None
    for i, key in enumerate(path):
        shorter = path[:i] + path[i + 1 :]
        if isinstance(key, SequenceKey) and shorter in sources:
            return shorter, key.idx
    raise ValueError(f"the sharding at {keystr(path)} has no array: shardings must mirror the tree")


def _move(name: str, source: Any, route: dict[int | None, int], targets: list[NamedSharding]) -> Move:
    if getattr(source, "sharding", None) is None:
        raise TypeError(f"{name} is a {type(source).__name__} on no device: place it by jax.device_put first")
    if not route:
        raise ValueError(f"the array at {name} has no sharding: shardings must mirror the tree")
    indices = None if None in route or not source.shape else range(source.shape[0])
    order = (None,) if indices is None else indices
    if route.keys() != set(order):
        raise ValueError(f"the array at {name}, shape {source.shape}, is unstacked into {len(route)} shardings")
    slots = tuple(route[index] for index in order)
    return Move(source, tuple(targets[slot] for slot in slots), indices, slots)
