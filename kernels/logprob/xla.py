"""Tiles over tokens in plain XLA: each tile is one full-vocabulary matmul, and the backward pass recomputes it.

On Hopper a full-vocabulary matmul per token tile runs at nearly the speed of one with stored logits, while a scan over
vocabulary blocks halves it; hence tokens, not vocabulary, are tiled. Logits live one tile at a time, in float32.

With p = softmax(z), cotangents g of the log-probability and e of the entropy H:

    dL/dz_v = g (1[v = y] − p_v) − e p_v (log p_v + H)
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jrlhf.kernels.logprob.common import MASKED, Head, Statistics, cap, finish, in_vocabulary, merge, varying

Forward = Callable[[Array, Array, Array, Head], Statistics]


def token_logprobs(
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "N"],
    head: Head,
    *,
    tile: int,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Log-probabilities of `targets` and entropies; at most `tile` tokens' logits exist at a time."""
    return differentiable(partial(tiled_statistics, tile=tile), head, tile, hidden, unembedding, targets)


def differentiable(
    forward: Forward, head: Head, tile: int, hidden: Array, unembedding: Array, targets: Array
) -> tuple[Array, Array]:
    """`forward`'s statistics as log-probabilities and entropies, whose vector-Jacobian product runs in token tiles."""
    hidden, unembedding, targets = varying(hidden, unembedding, targets)
    return _fused(forward, head, tile, hidden, unembedding, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused(forward, head, tile, hidden, unembedding, targets):
    outputs, _ = _fused_forward(forward, head, tile, hidden, unembedding, targets)
    return outputs


def _fused_forward(forward, head, tile, hidden, unembedding, targets):
    statistics = forward(hidden, unembedding, targets, head)
    # Before merging, while everything still varies over the axis: a sum with −inf is −inf.
    label = jnp.where(in_vocabulary(targets, head), statistics.label, -jnp.inf)
    logprobs, entropy, lse = finish(merge(statistics._replace(label=label), head.axis_name))
    return (logprobs, entropy), (hidden, unembedding, targets, lse, entropy)


def _fused_backward(forward, head, tile, residuals, cotangents):
    d_logprobs, d_entropy = cotangents
    d_logprobs = jnp.where(in_vocabulary(residuals[2], head), d_logprobs, 0.0)
    d_hidden, d_unembedding = tiled_gradients(residuals, (d_logprobs, d_entropy), head, tile)
    return d_hidden, d_unembedding, None


_fused.defvjp(_fused_forward, _fused_backward)


def tiled_statistics(
    hidden: Float[Array, "N D"], unembedding: Float[Array, "V D"], targets: Int[Array, "N"], head: Head, *, tile: int
) -> Statistics:
    """This vocabulary slice's statistics, tile by tile."""
    tiles = _split((hidden, targets), tile)
    if tiles is None:
        return _statistics(hidden, targets, unembedding, head)
    _, statistics = lax.scan(lambda _, rows: (None, _statistics(rows[0], rows[1], unembedding, head)), None, tiles)
    return jax.tree.map(partial(_join, count=hidden.shape[0]), statistics)


def tiled_gradients(residuals, cotangents, head: Head, tile: int) -> tuple[Float[Array, "N D"], Float[Array, "V D"]]:
    """This vocabulary slice's *partial* dX and its dW, tile by tile; dW is accumulated in float32."""
    hidden, unembedding, targets, lse, entropy = residuals
    rows = (hidden, targets, lse, entropy, *cotangents)

    def gradients(rows):
        d_products = _d_products(rows, unembedding, head)
        d_hidden = _matmul(d_products, unembedding, ((1,), (0,))).astype(hidden.dtype)
        return d_hidden, _matmul(d_products, rows[0], ((0,), (0,)))

    def body(accumulated, rows):
        d_hidden, d_unembedding = gradients(rows)
        return accumulated + d_unembedding, d_hidden

    tiles = _split(rows, tile)
    if tiles is None:
        d_hidden, d_unembedding = gradients(rows)
    else:
        d_unembedding, d_hidden = lax.scan(body, jnp.zeros_like(unembedding, dtype=jnp.float32), tiles)
        d_hidden = _join(d_hidden, count=hidden.shape[0])
    return d_hidden, d_unembedding.astype(unembedding.dtype)


def _matmul(a, b, contracting):
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32)


def _logits(hidden, unembedding, head: Head):
    """One tile's capped logits before temperature [n, V], and which global token each column is [1, V]."""
    token = head.offset(unembedding) + lax.broadcasted_iota(jnp.int32, (1, unembedding.shape[0]), 1)
    return cap(_matmul(hidden, unembedding, ((1,), (1,))), head), token


def _statistics(hidden, targets, unembedding, head: Head) -> Statistics:
    capped, token = _logits(hidden, unembedding, head)
    logits = capped / head.temperature
    if head.padded(unembedding):
        logits = jnp.where(token < head.vocab_size, logits, MASKED)
    maximum = jnp.max(logits, axis=-1)
    shifted = logits - maximum[:, None]
    weights = jnp.exp(shifted)
    return Statistics(
        maximum=maximum,
        total=jnp.sum(weights, axis=-1),
        weighted=jnp.sum(weights * shifted, axis=-1),
        label=jnp.sum(jnp.where(token == targets[:, None], logits, 0.0), axis=-1),
    )


def _d_products(rows, unembedding, head: Head):
    """dL/d(h·w) of one tile [n, V], in the matmul's dtype."""
    hidden, targets, lse, entropy, d_logprob, d_entropy = rows
    capped, token = _logits(hidden, unembedding, head)
    log_p = capped / head.temperature - lse[:, None]
    p = jnp.exp(log_p)
    if head.padded(unembedding):
        p = jnp.where(token < head.vocab_size, p, 0.0)
    d_logits = jnp.where(token == targets[:, None], d_logprob[:, None], 0.0) - p * (
        d_logprob[:, None] + d_entropy[:, None] * (log_p + entropy[:, None])
    )
    d_products = d_logits / head.temperature
    if head.softcap is not None:
        d_products = d_products * (1.0 - jnp.square(capped / head.softcap))
    return d_products.astype(hidden.dtype)


def _split(rows, tile: int):
    """Per-token arrays [N, ...] -> [tiles, n, ...] of n <= tile tokens, zero-padded; None where one tile suffices."""
    count = rows[0].shape[0]
    if count <= tile:
        return None
    # Even tiles need the least padding; a multiple of 16 keeps the matmuls' rows aligned.
    even = _ceil_div(count, _ceil_div(count, tile))
    n = min(tile, 16 * _ceil_div(even, 16))
    tiles = _ceil_div(count, n)

    def split(x):
        padding = [(0, tiles * n - count)] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(x, padding) if padding[0][1] else x
        return padded.reshape(tiles, n, *x.shape[1:])

    return jax.tree.map(split, rows)


def _join(tiles, *, count: int):
    return tiles.reshape(-1, *tiles.shape[2:])[:count]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
