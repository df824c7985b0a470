"""Tiles over tokens in plain XLA: each tile is one full-vocabulary matmul, and the backward pass recomputes it.

On Hopper a full-vocabulary matmul per token tile runs at nearly the speed of one with stored logits, while a scan over
vocabulary blocks halves it; hence tokens, not vocabulary, are tiled. Logits live one tile at a time, in float32.

`token_sums` recomputes nothing: where the loss is elementwise in the log-probabilities, a tile's gradient can be
computed with its logits, so the forward pass under differentiation does both, and the backward pass only scales it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jrlhf.kernels.devices import varying
from jrlhf.kernels.logprob.common import (
    MASKED,
    Head,
    Normaliser,
    Statistics,
    Terms,
    cap,
    evaluate,
    finish,
    gradient_of_products,
    in_vocabulary,
    merge,
    once,
)

PyTree = Any
Sums = tuple[Array, dict[str, Array]]  # sum of a loss, and sums of metrics by name


class Residuals(NamedTuple):
    """The results of the forward pass that the backward pass reads."""

    hidden: Float[Array, "N D"]
    unembedding: Float[Array, "V D"]
    targets: Int[Array, "N *K"]
    normaliser: Normaliser
    entropy: Float[Array, "N"]


Forward = Callable[[Array, Array, Array, Head], Statistics]
"""(hidden, unembedding, targets, head) -> the statistics of this vocabulary slice."""
Backward = Callable[[Residuals, Array, Array, Head], tuple[Array, Array]]
"""(residuals, d_logprobs, d_entropy, head) -> this vocabulary slice's *partial* dX and its dW, like the inputs."""


def token_logprobs(
    hidden: Float[Array, "N D"], unembedding: Float[Array, "V D"], targets: Int[Array, "N *K"], head: Head, *, tile: int
) -> tuple[Float[Array, "N *K"], Float[Array, "N"]]:
    """Log-probabilities of `targets` and entropies; at most `tile` tokens' logits exist at a time."""
    forward, backward = partial(tiled_statistics, tile=tile), partial(tiled_gradients, tile=tile)
    return differentiable(forward, backward, head, hidden, unembedding, targets)


def differentiable(
    forward: Forward, backward: Backward, head: Head, hidden: Array, unembedding: Array, targets: Array
) -> tuple[Array, Array]:
    """`forward`'s statistics as log-probabilities and entropies, whose vector-Jacobian product is `backward`."""
    hidden, unembedding, targets = varying(hidden, unembedding, targets)
    return _fused(forward, backward, head, hidden, unembedding, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused(
    forward: Forward, backward: Backward, head: Head, hidden: Array, unembedding: Array, targets: Array
) -> tuple[Array, Array]:
    outputs, _ = _fused_forward(forward, backward, head, hidden, unembedding, targets)
    return outputs


def _fused_forward(
    forward: Forward, backward: Backward, head: Head, hidden: Array, unembedding: Array, targets: Array
) -> tuple[tuple[Array, Array], Residuals]:
    logprobs, entropy, normaliser = _finish(forward(hidden, unembedding, targets, head), targets, head)
    return (logprobs, entropy), Residuals(hidden, unembedding, targets, normaliser, entropy)


def _fused_backward(
    forward: Forward, backward: Backward, head: Head, residuals: Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    d_logprobs, d_entropy = cotangents
    d_logprobs = jnp.where(in_vocabulary(residuals.targets, head), d_logprobs, 0.0)
    return *backward(residuals, d_logprobs, d_entropy, head), None


_fused.defvjp(_fused_forward, _fused_backward)


def token_sums(
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "N *K"],
    data: Any,
    terms: Terms,
    head: Head,
    *,
    tile: int,
    entropy_gradient: bool,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Sums of `terms` over tokens, whose gradient is made tile by tile in the forward pass."""
    leaves, tree = jax.tree.flatten(data)
    hidden, unembedding, targets, *leaves = varying(hidden, unembedding, targets, *map(lax.stop_gradient, leaves))
    data = jax.tree.unflatten(tree, leaves)
    return _sums(_Static(terms, head, tile, entropy_gradient), hidden, unembedding, targets, data)


class _Static(NamedTuple):
    terms: Terms
    head: Head
    tile: int
    entropy_gradient: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(static: _Static, hidden: Array, unembedding: Array, targets: Array, data: PyTree) -> Sums:
    rows = _rows(hidden, targets, data)
    tiles = _split(rows, static.tile)
    if tiles is None:
        sums, _ = _evaluated(static, unembedding, rows)
    else:
        body = partial(_evaluated, static, unembedding)
        _, sums = lax.scan(lambda _, rows: (None, body(rows)[0]), None, tiles)
    return _summed(sums, static.head)


def _sums_forward(
    static: _Static, hidden: Array, unembedding: Array, targets: Array, data: PyTree
) -> tuple[Sums, tuple[Array, Array]]:
    body = partial(_evaluated, static, unembedding)
    sums, d_hidden, d_unembedding = _gradients(body, _rows(hidden, targets, data), unembedding, static.tile)
    return _summed(sums, static.head), (d_hidden, d_unembedding)


def _sums_backward(
    static: _Static, residuals: tuple[Array, Array], cotangents: Sums
) -> tuple[Array, Array, None, None]:
    scale, _ = cotangents
    dtype = residuals[0].dtype  # dW is float32 until it is scaled
    d_hidden, d_unembedding = ((x.astype(jnp.float32) * scale).astype(dtype) for x in residuals)
    return d_hidden, d_unembedding, None, None


_sums.defvjp(_sums_forward, _sums_backward)


class _Rows(NamedTuple):
    """Tokens that are evaluated together."""

    hidden: Float[Array, "n D"]
    targets: Int[Array, "n *K"]
    counts: Bool[Array, "n"]  # False: fills up a tile
    data: Any


def _rows(hidden: Array, targets: Array, data: PyTree) -> _Rows:
    return _Rows(hidden, targets, jnp.ones(hidden.shape[0], jnp.bool_), data)


def _evaluated(static: _Static, unembedding: Array, rows: _Rows) -> tuple[Sums, Float[Array, "n V"]]:
    """One tile's (sum of the loss, sums of the metrics), and dL/d(h·w)."""
    terms, head, _, entropy_gradient = static
    logits = logits_of(rows.hidden, unembedding, head)
    logprobs, entropy, normaliser = _finish(statistics_of(logits, rows.targets, head), rows.targets, head)
    # After merging they are the same on all devices of the axis. They must vary again before `terms` combines them with
    # data that vary: the transpose of an implicit cast would sum one gradient over the axis.
    logprobs, entropy, *normaliser, _ = varying(logprobs, entropy, *normaliser, rows.hidden)

    def loss(logprobs: Array, entropy: Array) -> Sums:
        return evaluate(terms, logprobs, entropy if entropy_gradient else lax.stop_gradient(entropy), rows.data)

    losses, pull, metrics = jax.vjp(loss, logprobs, entropy, has_aux=True)
    d_logprob, d_entropy = pull(jnp.ones_like(losses))
    exists = in_vocabulary(rows.targets, head)
    d_logprob = jnp.where((rows.counts if exists.ndim == 1 else rows.counts[:, None]) & exists, d_logprob, 0.0)
    d_entropy = jnp.where(rows.counts, d_entropy, 0.0) if entropy_gradient else None
    d_products = _d_products(logits, rows.targets, Normaliser(*normaliser), entropy, d_logprob, d_entropy, head)
    sums = jax.tree.map(lambda x: jnp.sum(jnp.where(rows.counts, x, 0.0)), (losses, metrics))
    return sums, d_products.astype(rows.hidden.dtype)


def _summed(sums: Sums, head: Head) -> Sums:
    """The sums of all tiles, the same on all devices of the axis."""
    return jax.tree.map(lambda x: once(jnp.sum(x), head.axis_name), sums)


def tiled_statistics(
    hidden: Float[Array, "N D"], unembedding: Float[Array, "V D"], targets: Int[Array, "N *K"], head: Head, *, tile: int
) -> Statistics:
    """This vocabulary slice's statistics, tile by tile."""

    def statistics(rows: tuple[Array, Array]) -> Statistics:
        hidden, targets = rows
        return statistics_of(logits_of(hidden, unembedding, head), targets, head)

    return by_tile(statistics, (hidden, targets), tile)


def by_tile(function: Callable[[Any], Any], rows: Any, tile: int) -> Any:
    """`function` of arrays [N, ...] and with such results, at most `tile` tokens at a time. rows[0] is an array."""
    tiles = _split(rows, tile)
    if tiles is None:
        return function(rows)
    _, results = lax.scan(lambda _, rows: (None, function(rows)), None, tiles)
    return jax.tree.map(partial(_join, count=rows[0].shape[0]), results)


def tiled_gradients(
    residuals: Residuals, d_logprobs: Float[Array, "N *K"], d_entropy: Float[Array, "N"], head: Head, *, tile: int
) -> tuple[Float[Array, "N D"], Float[Array, "V D"]]:
    """This vocabulary slice's *partial* dX and its dW, tile by tile; dW is accumulated in float32."""
    hidden, unembedding, targets, normaliser, entropy = residuals

    def recomputed(rows: tuple[Any, ...]) -> tuple[None, Array]:
        hidden, targets, normaliser, entropy, d_logprob, d_entropy = rows
        logits = logits_of(hidden, unembedding, head)
        d_products = _d_products(logits, targets, normaliser, entropy, d_logprob, d_entropy, head)
        return None, d_products.astype(hidden.dtype)

    rows = (hidden, targets, normaliser, entropy, d_logprobs, d_entropy)
    _, d_hidden, d_unembedding = _gradients(recomputed, rows, unembedding, tile)
    return d_hidden, d_unembedding.astype(unembedding.dtype)


def _gradients(
    tile_fn: Callable[[Any], tuple[Any, Array]], rows: Any, unembedding: Array, tile: int
) -> tuple[Any, Float[Array, "N D"], Float[Array, "V D"]]:
    """(results of the tiles, stacked if there are several; dX; dW in float32). rows[0] are the hidden states.

    tile_fn: rows -> (anything, dL/d(h·w) in the matmul's dtype).
    """
    hidden = rows[0]

    def gradients(rows: Any) -> tuple[tuple[Any, Array], Array]:
        result, d_products = tile_fn(rows)
        d_hidden = _matmul(d_products, unembedding, ((1,), (0,))).astype(hidden.dtype)
        return (result, d_hidden), _matmul(d_products, rows[0], ((0,), (0,)))

    def body(accumulated: Array, rows: Any) -> tuple[Array, tuple[Any, Array]]:
        results, d_unembedding = gradients(rows)
        return accumulated + d_unembedding, results

    tiles = _split(rows, tile)
    if tiles is None:
        (result, d_hidden), d_unembedding = gradients(rows)
        return result, d_hidden, d_unembedding
    zeros = jnp.zeros_like(unembedding, dtype=jnp.float32)
    d_unembedding, (results, d_hidden) = lax.scan(body, zeros, tiles)
    return results, _join(d_hidden, count=hidden.shape[0]), d_unembedding


def _matmul(a: Array, b: Array, contracting: tuple[tuple[int], tuple[int]]) -> Array:
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32)


class Logits(NamedTuple):
    """One tile's logits over this device's slice of the vocabulary."""

    capped: Float[Array, "n V"]  # before temperature
    token: Int[Array, "1 V"]  # which global token a column is
    exists: Bool[Array, "1 V"] | None  # which columns are not padding; None: all


def logits_of(hidden: Array, unembedding: Array, head: Head) -> Logits:
    token = head.offset(unembedding) + lax.broadcasted_iota(jnp.int32, (1, unembedding.shape[0]), 1)
    exists = token < head.vocab_size if head.padded(unembedding) else None
    return Logits(cap(_matmul(hidden, unembedding, ((1,), (1,))), head), token, exists)


def statistics_of(tile: Logits, targets: Array, head: Head) -> Statistics:
    logits = tile.capped / head.temperature
    if tile.exists is not None:
        logits = jnp.where(tile.exists, logits, MASKED)
    maximum = jnp.max(logits, axis=-1)
    shifted = logits - maximum[:, None]
    weights = jnp.exp(shifted)
    return Statistics(
        maximum=maximum,
        total=jnp.sum(weights, axis=-1),
        weighted=jnp.sum(weights * shifted, axis=-1),
        label=jnp.sum(jnp.where(tile.token == targets[:, None], logits, 0.0), axis=-1)
        if targets.ndim == 1
        else jnp.take_along_axis(logits, _columns(tile, targets), axis=1, mode="fill", fill_value=0.0),
    )


def _finish(statistics: Statistics, targets: Array, head: Head) -> tuple[Array, Array, Normaliser]:
    """A vocabulary slice's statistics -> (log-probabilities, entropies, normalisers) over the whole vocabulary."""
    # Before merging, while everything still varies over the axis: a sum with −inf is −inf.
    label = jnp.where(in_vocabulary(targets, head), statistics.label, -jnp.inf)
    return finish(merge(statistics._replace(label=label), head.axis_name))


def _d_products(
    tile: Logits,
    targets: Array,
    normaliser: Normaliser,
    entropy: Array,
    d_logprob: Array,
    d_entropy: Array | None,
    head: Head,
) -> Float[Array, "n V"]:
    """dL/d(h·w) of one tile [n, V], float32."""
    if targets.ndim == 1:
        d_label = jnp.where(tile.token == targets[:, None], d_logprob[:, None], 0.0)
    else:
        place = jnp.arange(targets.shape[0])[:, None], _columns(tile, targets)
        d_label = jnp.zeros_like(tile.capped).at[place].add(d_logprob, mode="drop")
        d_logprob = jnp.sum(d_logprob, axis=1)
    normaliser, entropy, d_logprob, d_entropy = jax.tree.map(
        lambda x: x[:, None], (normaliser, entropy, d_logprob, d_entropy)
    )
    return gradient_of_products(tile.capped, d_label, tile.exists, normaliser, entropy, d_logprob, d_entropy, head)


def _columns(tile: Logits, targets: Int[Array, "n K"]) -> Int[Array, "n K"]:
    """The columns of the targets in this slice; those of other slices are past its end, where nothing is."""
    size = tile.token.shape[1]
    columns = targets.astype(jnp.int32) - tile.token[:, :1]
    return jnp.where((columns >= 0) & (columns < size), columns, size)


def _split(rows: Any, tile: int) -> Any:
    """Per-token arrays [N, ...] -> [tiles, n, ...] of n <= tile tokens, zero-padded; None where one tile suffices."""
    count = rows[0].shape[0]
    if count <= tile:
        return None
    # Even tiles need the least padding; a multiple of 16 keeps the matmuls' rows aligned.
    even = _ceil_div(count, _ceil_div(count, tile))
    n = min(tile, 16 * _ceil_div(even, 16))
    tiles = _ceil_div(count, n)

    def split(x: Array) -> Array:
        padding = [(0, tiles * n - count)] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(x, padding) if padding[0][1] else x
        return padded.reshape(tiles, n, *x.shape[1:])

    return jax.tree.map(split, rows)


def _join(tiles: Array, *, count: int) -> Array:
    return tiles.reshape(-1, *tiles.shape[2:])[:count]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
