"""Computes a batch in micro-batches of rows of similar length, which saves the computation of padding.

Rows are sorted by length, longest first. A micro-batch is as wide as its longest row, rounded up to one of a few static
widths (`bucket_widths`); micro-batches of all widths have about the same number of tokens. It is one compiled program:
each width has its own loop, whose number of iterations follows from the lengths, so other lengths do not recompile. The
price is that the given function is compiled once per width. Row r of the sorted rows goes to device r mod D, so that
devices get equal numbers of similar rows. Every device receives all rows for this, once per update; inside the loops no
row moves.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Int

from jrlhf.meshes.rows import in_groups, reshaped, row_axes, row_shards, whole

PyTree = Any
Carry = TypeVar("Carry")
WIDTHS = 4  # maximum number of widths; each is another copy of the model in the compiled program


class ByLength(NamedTuple):
    """The division of a batch into micro-batches of similar length."""

    lengths: Int[Array, "B"]  # number of tokens to compute in each row; a row of length 0 is never computed
    # Tokens of a micro-batch per device, padding included; at least one row is computed even if it has more. Rows are
    # divided over all devices: where layers are sliced over `tensor`, a slice has `tensor` times as many tokens.
    tokens: int


class _Bucket(NamedTuple):
    """The micro-batches of one width."""

    width: int
    rows: int  # per device


class _Division(NamedTuple):
    """The order in which rows are computed on D devices."""

    by: ByLength
    buckets: tuple[_Bucket, ...]  # the widest first
    order: Int[Array, "D N"]  # the rows of each device, longest first; then numbers past the end, for rows of zeros
    place: Int[Array, "B"]  # the place of each row in the order: d + D * n


def bucket_widths(length: int) -> tuple[int, ...]:
    """The widths in which rows of `length` tokens are computed, narrowest first; the last is `length`.

    Quarters of the length, rounded up to multiples of 128 (of 16 where it is below 512), which accelerators tile well.
    """
    unit = 128 if length >= 512 else 16
    quarters = (-(-length * part // (WIDTHS * unit)) * unit for part in range(1, WIDTHS + 1))
    return tuple(sorted({min(width, length) for width in quarters}))


def row_ends(mask: Bool[Array, "B T"]) -> Int[Array, "B"]:
    """The number of tokens to compute in each row: one past the last True of `mask`, or 0 without any True."""
    return jnp.max(jnp.where(mask, 1 + jnp.arange(mask.shape[1])[None, :], 0), axis=1)


def fold_by_length(step: Callable[[Carry, PyTree], Carry], start: Carry, rows: PyTree, by: ByLength) -> Carry:
    """`step(... step(start, micro-batch) ..., micro-batch)` over micro-batches that contain every row of length > 0.

    rows: a tree of arrays [B, T, ...], cut to the width of their micro-batch, and [B]. All are divided over devices
        alike, and B is a multiple of the devices.
    step: is traced with at most `bucket_widths(T)` as widths. The last micro-batch is padded with rows of zeros, which
        must not change the step's result, as they do not change sums over a mask.
    """
    division = _divide(rows, by)
    return _fold(lambda carry, micro, _: step(carry, micro), start, _sorted(rows, division), division)


def map_by_length(function: Callable[[PyTree], PyTree], rows: PyTree, by: ByLength) -> PyTree:
    """`function(rows)`, computed in micro-batches of similar length.

    rows: as in `fold_by_length`.
    function: rows -> a tree of arrays [B, T, ...] and [B], divided over devices as the rows are. The result for a row
        must depend on that row alone, and at [b, t] on nothing after t.

    Results equal those of `function` up to each row's length. Beyond it they are its results for padding, or 0.
    """
    division = _divide(rows, by)
    ordered = _sorted(rows, division)

    def write(results: PyTree, micro: PyTree, position: Array) -> PyTree:
        return jax.tree.map(lambda x, new: _written(x, new, position), results, function(micro))

    shapes = jax.eval_shape(lambda: function(_micro_batch(ordered, jnp.int32(0), division.buckets[0])))
    results = jax.tree.map(lambda x: _room(x, division), shapes)
    return _restored(_fold(write, results, ordered, division), division)


def _divide(rows: PyTree, by: ByLength) -> _Division:
    leaves = jax.tree.leaves(rows)
    count, shards = leaves[0].shape[0], _shards(leaves[0])
    shard_rows = count // shards
    length = next(x.shape[1] for x in leaves if x.ndim > 1)
    widths = reversed(bucket_widths(length))
    buckets = tuple(_Bucket(width, _even(shard_rows, max(1, by.tokens // width))) for width in widths)
    longest_first = jnp.argsort(whole(by.lengths), descending=True)
    # Zeros that the compiler does not recognise as such. Adding them gives the replicated order the sharding of the
    # rows, and so everything that is taken in this order.
    zeros = jnp.minimum(by.lengths, 0)
    order = longest_first.reshape(shard_rows, shards).T + in_groups(zeros, shard_rows)
    spare = max(bucket.rows for bucket in buckets) - 1
    order = jnp.pad(order, ((0, 0), (0, spare)), constant_values=count)
    return _Division(by, buckets, order, jnp.argsort(longest_first) + zeros)


def _shards(rows: Array) -> int:
    """The number of devices over which the rows may be divided: by their type, or over all Auto axes."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    auto = math.prod(size for size, axis_type in sizes if axis_type == AxisType.Auto)
    return row_shards(rows) * math.gcd(rows.shape[0] // row_shards(rows), auto)


def _even(rows: int, most: int) -> int:
    """The size of the fewest equal parts of at most `most` rows. Equal parts need less padding in the last one."""
    return -(-rows // -(-rows // most))


def _sorted(rows: PyTree, division: _Division) -> PyTree:
    """[B, ...] -> [D, N, ...], in the division's order."""
    return jax.tree.map(lambda x: _taken(whole(x), division.order, axes=row_axes(x)), rows)


def _restored(results: PyTree, division: _Division) -> PyTree:
    """[D, N, ...] -> [B, ...], in the original order."""
    position, device = jnp.divmod(division.place, division.order.shape[0])
    return jax.tree.map(lambda x: _taken(whole(x), device, position, axes=row_axes(x)), results)


def _taken(x: Array, *index: Array, axes: Any) -> Array:
    """`x[index]`, zeros where an index is past the end; the first axis of the result divided over `axes`."""
    spec = None if axes is None else jax.P(axes, *[None] * (index[0].ndim + x.ndim - len(index) - 1))
    return x.at[index].get(mode="fill", fill_value=0, out_sharding=spec)


def _fold(step: Callable[[Carry, PyTree, Array], Carry], start: Carry, ordered: PyTree, division: _Division) -> Carry:
    """`step` gets the carry, a micro-batch, and the position of its first rows on their devices."""
    lengths, shards = division.by.lengths, division.order.shape[0]
    state = jnp.zeros((), jnp.int32), start
    # A wide micro-batch that has room for further rows is filled with the next ones, which are shorter.
    for bucket, narrower in pairwise((*division.buckets, _Bucket(0, 0))):
        end = -(-jnp.sum(lengths > narrower.width, dtype=jnp.int32) // shards)

        def turn(state: tuple[Array, Any], bucket: _Bucket = bucket) -> tuple[Array, Any]:
            position, carry = state
            return position + bucket.rows, step(carry, _micro_batch(ordered, position, bucket), position)

        state = lax.while_loop(lambda state, end=end: state[0] < end, turn, state)
    return state[1]


def _micro_batch(ordered: PyTree, position: Array, bucket: _Bucket) -> PyTree:
    """[D, N, T, ...] -> [D * rows, width, ...], the rows of each device from `position` on."""

    def cut(x: Array) -> Array:
        x = lax.dynamic_slice_in_dim(x, position, bucket.rows, axis=1)
        if x.ndim > 2:
            x = x[:, :, : bucket.width]
        return reshaped(x, (-1, *x.shape[2:]), *[None] * (x.ndim - 2))

    return jax.tree.map(cut, ordered)


def _room(x: jax.ShapeDtypeStruct, division: _Division) -> Array:
    """Zeros [D, N, T, ...] for results like `x`, [B, T, ...], of the widest micro-batch."""
    axes = row_axes(division.order)
    spec = None if axes is None else jax.P(axes, *[None] * x.ndim)
    return jnp.zeros((*division.order.shape, *x.shape[1:]), x.dtype, out_sharding=spec)


def _written(x: Array, new: Array, position: Array) -> Array:
    """`x`, [D, N, T, ...], with the results `new` of a micro-batch, [D * rows, width, ...], from `position` on."""
    new = in_groups(new, new.shape[0] // x.shape[0])
    if new.ndim > 2:
        new = jnp.pad(new, [(0, 0), (0, 0), (0, x.shape[2] - new.shape[2]), *[(0, 0)] * (new.ndim - 3)])
    return lax.dynamic_update_slice_in_dim(x, new, position, axis=1)
