"""The key-value cache: explicit argument and result, one pair of arrays a layer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Head-major, so that a decode step reads it in place; [B, S, K, H] would be transposed at every step.

    transposed: whether keys are [B, K, H, S]. A sum over the last axis is not vectorised on CPUs, where scores of keys
        [B, K, S, H] take three times as long.
    """

    key: Float[Array, "B K S H"] | Float[Array, "B K H S"]
    value: Float[Array, "B K S H"]
    transposed: bool = field(default=False, metadata={"static": True})

    @property
    def size(self) -> int:
        """For how many positions of a row it has room."""
        return self.value.shape[2]

    def map(self, change: Callable[..., Array], *others: "LayerCache") -> "LayerCache":
        """`change(array, its axis of positions, *the others' arrays)` of keys and values."""
        key = change(self.key, 3 if self.transposed else 2, *(other.key for other in others))
        return replace(self, key=key, value=change(self.value, 2, *(other.value for other in others)))


def transposes_keys(mesh: Mesh | AbstractMesh) -> bool:
    """Whether caches on this mesh are `transposed`."""
    device = mesh.abstract_mesh.abstract_device
    return (jax.default_backend() if device is None else device.platform) == "cpu"


def empty(rows: int, kv_heads: int, size: int, head_dim: int, dtype: Any, *, transposed: bool = False) -> LayerCache:
    """A cache of `size` positions, all zeros."""
    length, dimension = (head_dim, size) if transposed else (size, head_dim)
    key = jnp.zeros((rows, kv_heads, length, dimension), dtype)
    return LayerCache(key, jnp.zeros((rows, kv_heads, size, head_dim), dtype), transposed)


def prefill(
    key: Float[Array, "B P K H"], value: Float[Array, "B P K H"], size: int, *, transposed: bool = False
) -> LayerCache:
    """A cache of `size` positions that begins with a prompt's keys and values.

    Padded prompt positions are cached too; a row's own tokens overwrite them before its length reaches them.
    """
    return grown(_stored(key, value, transposed), size)


def grown(cache: LayerCache, size: int) -> LayerCache:
    """The same cache with room for `size` positions."""

    def padded(x, axis):
        return jnp.pad(x, [(0, size - cache.size if at == axis else 0) for at in range(x.ndim)])

    return cache.map(padded)


def filled(cache: LayerCache, slots: Int[Array, "m"], other: LayerCache, rows: Int[Array, "m"]) -> LayerCache:
    """The same cache with these slots' positions from so many rows of another, then zeros; a slot past the end none.

    Later positions would weigh nothing, but nothing times a NaN that a slot's former row left there is NaN.
    """

    def fill(x, axis, y):
        rest = [(0, x.shape[axis] - y.shape[axis] if at == axis else 0) for at in range(x.ndim)]
        return x.at[slots].set(jnp.pad(y[rows], rest), mode="drop")

    return cache.map(fill, other)


def append(
    cache: LayerCache, key: Float[Array, "B 1 K H"], value: Float[Array, "B 1 K H"], positions: Int[Array, "B"]
) -> LayerCache:
    """Writes each row's one new key and value at that row's position."""

    def write(rows, axis, new):
        # A slice update a row, in place; an indexed scatter on sharded rows would gather the cache.
        update = jax.vmap(lambda row, x, at: lax.dynamic_update_slice_in_dim(row, x, at, axis=axis - 1))
        return update(rows, new, positions)

    return cache.map(write, _stored(key, value, cache.transposed))


def _stored(key: Float[Array, "B P K H"], value: Float[Array, "B P K H"], transposed: bool) -> LayerCache:
    key = key.transpose(0, 2, 3, 1) if transposed else key.swapaxes(1, 2)
    return LayerCache(key, value.swapaxes(1, 2), transposed)
