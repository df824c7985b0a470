"""Token budgets: rows of similar length computed together, as wide as they need and as many as a budget allows.

Rows are right-padded to one width T, and where lengths differ much of what is computed is padding. Here rows are taken
longest first, a few at a time. Such a micro-batch is as wide as its longest row needs, rounded up to one of a few
static widths (`bucket_widths`), and has about as many tokens whatever its width.

All of it is one compiled program without a look from the host: each width has a loop of its own, whose number of turns
follows from the lengths. Other lengths compile nothing anew, and a width that no row needs costs nothing but its
compilation. That is the price: the function given is compiled once a width, which for a model with unrolled layers (an
adapter on a shared base) multiplies a large program.

Sorting is global: of the rows in their order, row r goes to device r mod D, so that a micro-batch has equally many rows
of every device, and these are alike. For that every device gets all tokens and floats of a token, once an update; no
row moves inside the loops.
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

from jrlhf.ppo.minibatches import groups, row_axes, row_shards, whole
from jrlhf.ppo.types import PairBatch, PreferenceBatch

PyTree = Any
Carry = TypeVar("Carry")
WIDTHS = 4  # at most: each is another copy of the model in the compiled program


class ByLength(NamedTuple):
    """How a batch is divided into micro-batches of similar length."""

    lengths: Int[Array, "B"]  # up to where a row is to be computed; a row of length 0 never is
    # Of a micro-batch on one device, padding included; one row is computed even where it exceeds them. Rows lie over
    # all devices: where layers are computed in slices over `tensor`, a slice is of so many times as many.
    tokens: int


class _Bucket(NamedTuple):
    """The micro-batches of one width."""

    width: int
    rows: int  # a device


def bucket_widths(length: int) -> tuple[int, ...]:
    """The widths in which rows of `length` tokens are computed, narrowest first; the last is `length`.

    Quarters of the length, rounded up to multiples of 128 (of 16 where it is below 512), which accelerators tile well.
    """
    unit = 128 if length >= 512 else 16
    quarters = (-(-length * part // (WIDTHS * unit)) * unit for part in range(1, WIDTHS + 1))
    return tuple(sorted({min(width, length) for width in quarters}))


def row_ends(mask: Bool[Array, "B T"]) -> Int[Array, "B"]:
    """Up to where each row has to be computed for the tokens in `mask`: one past its last True, 0 without any."""
    return jnp.max(jnp.where(mask, 1 + jnp.arange(mask.shape[1])[None, :], 0), axis=1)


def pair_parts(pairs: PreferenceBatch | PairBatch, micro_batches: int, tokens: int | None) -> int | ByLength:
    """How pairs are divided: into `micro_batches`, or by a budget of `tokens`, which are of both sequences."""
    if tokens is None:
        return micro_batches
    return ByLength(jnp.maximum(pairs.chosen_lengths, pairs.rejected_lengths), max(1, tokens // 2))


def fold_by_length(step: Callable[[Carry, PyTree], Carry], start: Carry, rows: PyTree, by: ByLength) -> Carry:
    """`step(... step(start, micro-batch) ..., micro-batch)` over micro-batches that hold every row of a length above 0.

    rows: a tree of arrays [B, T, ...], cut to the width of their micro-batch, and [B]. All are divided over devices
        alike, and B is a multiple of the devices.
    step: is traced with at most `bucket_widths(T)` shapes. The last micro-batch is filled up with rows of zeros: the
        step must make nothing of them, as sums over a mask do.
    """
    division = _divide(rows, by)
    return _fold(lambda carry, micro, _: step(carry, micro), start, _sorted(rows, division), division)


def map_by_length(function: Callable[[PyTree], PyTree], rows: PyTree, by: ByLength) -> PyTree:
    """`function(rows)`, computed in micro-batches of similar length.

    rows: as in `fold_by_length`.
    function: rows -> a tree of arrays [B, T, ...] and [B], divided over devices as the rows are. What it says of a row
        depends on that row alone, and at [b, t] on nothing after t.

    Results are those of `function` up to each row's length. Beyond it stands what it makes of padding, or 0.
    """
    division = _divide(rows, by)
    ordered = _sorted(rows, division)

    def write(results: PyTree, micro: PyTree, position: Array) -> PyTree:
        return jax.tree.map(lambda x, new: _written(x, new, position), results, function(micro))

    shapes = jax.eval_shape(lambda: function(_micro_batch(ordered, jnp.int32(0), division.buckets[0])))
    results = jax.tree.map(lambda x: _room(x, division), shapes)
    return _restored(_fold(write, results, ordered, division), division)


class _Division(NamedTuple):
    """Which row is computed when, and on which of D devices."""

    by: ByLength
    buckets: tuple[_Bucket, ...]  # the widest first
    order: Int[Array, "D N"]  # the rows of each device, longest first; then numbers past the end, of rows of zeros
    place: Int[Array, "B"]  # of each row in the order: d + D * n


def _divide(rows: PyTree, by: ByLength) -> _Division:
    leaves = jax.tree.leaves(rows)
    count, shards = leaves[0].shape[0], _shards(leaves[0])
    shard_rows = count // shards
    length = next(x.shape[1] for x in leaves if x.ndim > 1)
    widths = reversed(bucket_widths(length))
    buckets = tuple(_Bucket(width, _even(shard_rows, max(1, by.tokens // width))) for width in widths)
    longest_first = jnp.argsort(whole(by.lengths), descending=True)
    # Zeros of which the compiler does not know it: they give the order, which is the same everywhere, the sharding of
    # the rows, and with it what is taken in this order.
    zeros = jnp.minimum(by.lengths, 0)
    order = longest_first.reshape(shard_rows, shards).T + groups(zeros, shard_rows)
    spare = max(bucket.rows for bucket in buckets) - 1
    order = jnp.pad(order, ((0, 0), (0, spare)), constant_values=count)
    return _Division(by, buckets, order, jnp.argsort(longest_first) + zeros)


def _shards(rows: Array) -> int:
    """Over how many devices the rows may be divided: what their type says, or all Auto axes."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    auto = math.prod(size for size, axis_type in sizes if axis_type == AxisType.Auto)
    return row_shards(rows) * math.gcd(rows.shape[0] // row_shards(rows), auto)


def _even(rows: int, most: int) -> int:
    """The size of the fewest equal parts, none above `most`, that `rows` rows need: less is left over in the last."""
    return -(-rows // -(-rows // most))


def _sorted(rows: PyTree, division: _Division) -> PyTree:
    """[B, ...] -> [D, N, ...], in the division's order."""
    return jax.tree.map(lambda x: _taken(whole(x), division.order, axes=row_axes(x)), rows)


def _restored(results: PyTree, division: _Division) -> PyTree:
    """[D, N, ...] -> [B, ...], in the order of the rows as they came."""
    shards = division.order.shape[0]
    position, device = jnp.divmod(division.place, shards)
    return jax.tree.map(lambda x: _taken(whole(x), device, position, axes=row_axes(x)), results)


def _taken(x: Array, *index: Array, axes: Any) -> Array:
    """`x[index]`, zeros where an index is past the end; the first axis of the result divided over `axes`."""
    spec = None if axes is None else jax.P(axes, *[None] * (index[0].ndim + x.ndim - len(index) - 1))
    return x.at[index].get(mode="fill", fill_value=0, out_sharding=spec)


def _fold(step: Callable[[Carry, PyTree, Array], Carry], start: Carry, ordered: PyTree, division: _Division) -> Carry:
    """`step` gets the carry, a micro-batch, and the position of its first rows on their devices."""
    lengths, shards = division.by.lengths, division.order.shape[0]
    state = jnp.zeros((), jnp.int32), start
    # What a wide micro-batch has room for beyond the rows that need it are the next ones, which need less.
    for bucket, narrower in pairwise((*division.buckets, _Bucket(0, 0))):
        end = -(-jnp.sum(lengths > narrower.width, dtype=jnp.int32) // shards)

        def turn(state, bucket=bucket):
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
        axes = row_axes(x)
        spec = None if axes is None else jax.P(axes, *[None] * (x.ndim - 2))
        return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=spec)

    return jax.tree.map(cut, ordered)


def _room(x: jax.ShapeDtypeStruct, division: _Division) -> Array:
    """Zeros [D, N, T, ...] for results like `x`, [B, T, ...], of the widest micro-batch."""
    axes = row_axes(division.order)
    spec = None if axes is None else jax.P(axes, *[None] * x.ndim)
    return jnp.zeros((*division.order.shape, *x.shape[1:]), x.dtype, out_sharding=spec)


def _written(x: Array, new: Array, position: Array) -> Array:
    """`x`, [D, N, T, ...], with the results `new` of a micro-batch, [D * rows, width, ...], from `position` on."""
    new = groups(new, new.shape[0] // x.shape[0])
    if new.ndim > 2:
        new = jnp.pad(new, [(0, 0), (0, 0), (0, x.shape[2] - new.shape[2]), *[(0, 0)] * (new.ndim - 3)])
    return lax.dynamic_update_slice_in_dim(x, new, position, axis=1)
