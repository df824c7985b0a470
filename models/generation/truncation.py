"""Restricts sampling to the most likely tokens: top-k, top-p (nucleus sampling), and min-p."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def restrict(
    logits: Float[Array, "B V"], top_k: int | None, top_p: float | None, min_p: float | None = None
) -> Float[Array, "B V"]:
    """Sets the logits of tokens that must not be drawn to -inf.

    Keeps the `top_k` largest; of these, by falling probability, the fewest that together reach `top_p` (Holtzman et al.
    2020, section 3.1); of these, tokens with at least `min_p` times the largest probability (Nguyen et al. 2025,
    arXiv:2407.01082, section 3). The most likely token always stays, and so do tokens that tie with the least likely
    one kept.
    """
    least = least_kept(logits, top_k, top_p, min_p)
    return logits if least is None else jnp.where(logits < least, -jnp.inf, logits)


def least_kept(
    logits: Float[Array, "B V"],
    top_k: int | None,
    top_p: float | None,
    min_p: float | None = None,
    *,
    odds: float | Float[Array, "B 1"] = 1.0,
) -> Float[Array, "B 1"] | None:
    """Returns the logit from which on `restrict` keeps tokens; None if it keeps all.

    odds: factor of the odds top_p / (1 - top_p). Suppose that no logit changes by more than d. Then the odds of all
    that is above a token change at most by the factor exp(2 d). So with odds=exp(2 d) a token that stays is at most
    2 d below the result, and with odds=exp(-2 d) every token stays that is at least 2 d above it.
    """
    size = logits.shape[-1]
    count = size if top_k is None else min(top_k, size)
    share = 1.0 if top_p is None else top_p
    if count == size and share == 1 and min_p is None:
        return None
    best = lax.top_k(logits, count)[0] if count < size else logits
    least = jnp.min(best, axis=-1, keepdims=True)
    if share < 1:
        least = jnp.maximum(least, _nucleus(best, share * odds / (1 - share + share * odds)))
    if min_p is not None:  # moves with the largest logit, so by at most d
        least = jnp.maximum(least, jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p))
    return least


def _nucleus(logits: Float[Array, "B V"], top_p: float | Float[Array, "B 1"]) -> Float[Array, "B 1"]:
    """Returns the smallest logit such that the tokens above it have less than `top_p` together.

    It bisects the range of all floats with 32 sums over the vocabulary; a sort takes more than ten times as long.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean; low + high could overflow
        above = jnp.sum(jnp.where(logits > _float_of(middle), probabilities, 0.0), axis=-1, keepdims=True)
        return jnp.where(above < top_p, low, middle), jnp.where(above < top_p, middle, high)

    high = _order_of(jnp.max(logits, axis=-1, keepdims=True))
    _, high = lax.fori_loop(0, 32, halve, (jnp.full_like(high, _order_of(jnp.float32(-jnp.inf))), high))
    return _float_of(high)


def _order_of(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Maps float32 numbers to integers of the same order. For negative numbers all bits but the sign are inverted."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _float_of(order: Int[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ jnp.int32(2**31 - 1), order), jnp.float32)
