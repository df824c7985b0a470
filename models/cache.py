"""The key-value cache: explicit argument and result, one pair of arrays a layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class LayerCache(NamedTuple):
    """One layer's keys and values.

    Head-major, so that a decode step reads it in place; [B, S, K, H] would be transposed at every step.
    """

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S H"]


def prefill(key: Float[Array, "B P K H"], value: Float[Array, "B P K H"], size: int) -> LayerCache:
    """A cache of `size` positions that begins with a prompt's keys and values.

    Padded prompt positions are cached too; a row's own tokens overwrite them before its length reaches them.
    """

    def store(x):
        return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, size - x.shape[1]), (0, 0)))

    return LayerCache(store(key), store(value))


def append(
    cache: LayerCache, key: Float[Array, "B 1 K H"], value: Float[Array, "B 1 K H"], positions: Int[Array, "B"]
) -> LayerCache:
    """Writes each row's one new key and value at that row's position."""

    def write(rows, new):
        # A slice update a row, in place; an indexed scatter on sharded rows would gather the cache.
        update = jax.vmap(lambda row, x, at: lax.dynamic_update_slice_in_dim(row, x, at, axis=1))
        return update(rows, new.swapaxes(1, 2), positions)

    return LayerCache(write(cache.key, key), write(cache.value, value))
