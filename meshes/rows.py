"""Divides the rows of a batch into minibatches and micro-batches without moving a row to another device.

Devices hold the B rows of a batch in contiguous blocks. Consecutive minibatches, or a shuffle of the whole batch, would
move most rows. Instead, each group of consecutive rows gives one row to every part, so every part has rows of every
device, and they stay there. The result depends on the order of the rows, never on the mesh.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

PyTree = Any


def check_divisible(rows: Array, minibatches: int, micro_batches: int) -> None:
    """Raises ValueError if the batch cannot be cut into equal parts of which every device has an equal share.

    The devices over which rows are divided are known where the mesh's axes are Explicit.
    """
    count, parts = rows.shape[0], minibatches * micro_batches
    described = f"minibatches={minibatches} x micro_batches={micro_batches}"
    if count % parts:
        raise ValueError(f"{count} rows do not divide into {described}: the batch must be a multiple of {parts} rows")
    shards = row_shards(rows)
    if count // parts % shards:
        raise ValueError(
            f"{count} rows in {described} make {count // parts} a micro-batch, which the mesh divides over {shards} "
            f"devices: the batch must be a multiple of {parts * shards} rows"
        )


def draw_minibatch(rows: PyTree, key: Key[Array, ""], index: int | Int[Array, ""], minibatches: int) -> PyTree:
    """Minibatch `index` of a stratified shuffle: [B, ...] -> [B / minibatches, ...] in every leaf.

    Within each group of `minibatches` consecutive rows a random permutation assigns one row to each minibatch. Calls
    with one key and index 0 ... minibatches - 1 return every row exactly once.
    """
    if minibatches == 1:
        return rows
    first = jax.tree.leaves(rows)[0]
    count = first.shape[0] // minibatches
    order = jnp.argsort(jax.random.bits(key, (count, minibatches)), axis=1)
    # Adding zeros made from the rows gives the replicated choice the sharding of the rows.
    group_of = in_groups(first, minibatches)
    zeros = jnp.zeros_like(group_of.reshape(count, -1)[:, 0], order.dtype)
    choice = order[:, index] + zeros
    return jax.tree.map(lambda x: jax.vmap(lambda group, i: group[i])(in_groups(x, minibatches), choice), rows)


def split_rows(rows: PyTree, parts: int) -> PyTree:
    """Strided parts: [B, ...] -> [parts, B / parts, ...] in every leaf; part i has the rows i, i + parts, ..."""
    return jax.tree.map(lambda x: jnp.swapaxes(in_groups(x, parts), 0, 1), rows)


def map_parts(function: Callable[[PyTree], PyTree], rows: PyTree, parts: int) -> PyTree:
    """`function(rows)`, computed in `parts` strided parts, one after the other.

    function: rows -> a tree of arrays [B, ...], divided over devices as the rows are. The result for a row must depend
        on that row alone.
    """
    check_divisible(jax.tree.leaves(rows)[0], 1, parts)
    results = lax.map(function, split_rows(rows, parts))
    return jax.tree.map(join_rows, results)


def join_rows(x: Array) -> Array:
    """[parts, B / parts, ...] -> [B, ...]: undoes `split_rows`."""
    x = jnp.swapaxes(x, 0, 1)
    return reshaped(x, (x.shape[0] * x.shape[1], *x.shape[2:]), *jax.typeof(x).sharding.spec[2:])


def interleave(x: Array, y: Array) -> Array:
    """[B, ...] and [B, ...] -> [2 B, ...]: the rows of both in turn, which stay on their devices."""
    return reshaped(jnp.stack([x, y], axis=1), (2 * x.shape[0], *x.shape[1:]), *jax.typeof(x).sharding.spec[1:])


def in_groups(x: Array, size: int) -> Array:
    """[B, ...] -> [B / size, size, ...]: groups of consecutive rows, which stay on their devices."""
    # The spec is explicit: with a single group, reshape alone would leave the mesh's axes with the rows in it.
    return reshaped(x, (x.shape[0] // size, size, *x.shape[1:]), None, *jax.typeof(x).sharding.spec[1:])


def reshaped(x: Array, shape: tuple[int, ...], *spec: Any) -> Array:
    """Reshapes `x`; axis 0 stays divided as it is, and `spec` says how the other axes of the result are divided."""
    axes = row_axes(x)
    return x.reshape(shape) if axes is None else jnp.reshape(x, shape, out_sharding=jax.P(axes, *spec))


def whole(x: Array) -> Array:
    """Replicates `x` on every device, which sums over rows of several devices and reads of single rows need."""
    return x if row_axes(x) is None else jax.reshard(x, jax.P())


def divided_like(rows: Array, x: Any) -> Any:
    """Returns `x` [B, ...] with its rows divided over devices like `rows`, where the mesh's axes are Explicit."""
    axes = row_axes(rows)
    wanted = jax.P(axes, *[None] * (x.ndim - 1))
    return x if axes is None or jax.typeof(x).sharding.spec == wanted else jax.reshard(x, wanted)


def row_axes(x: Any) -> str | tuple[str, ...] | None:
    """The mesh axes over which axis 0 is divided, as far as the type of `x` tells: None where none is Explicit."""
    spec = jax.typeof(x).sharding.spec
    return spec[0] if spec else None


def row_shards(x: Array) -> int:
    """The number of devices over which axis 0 is divided, as far as the type of `x` tells: 1 where none is Explicit."""
    axes = row_axes(x)
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)
