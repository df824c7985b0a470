"""Reductions and masks over ragged rows. No function reads token ids: a pad may equal the end-of-sequence token."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def response_mask(
    prompt_lengths: Int[Array, "B"], response_lengths: Int[Array, "B"], length: int
) -> Bool[Array, "B {length}"]:
    """True at [b, t] iff prompt_lengths[b] <= t < prompt_lengths[b] + response_lengths[b]. `length` is T."""
    time = jnp.arange(length)[None, :]
    start = prompt_lengths[:, None]
    return (start <= time) & (time < start + response_lengths[:, None])


def last_token_mask(mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at each row's last True of `mask`."""
    later = jnp.flip(jnp.cumsum(jnp.flip(mask, 1), 1), 1)  # Trues at t or after it
    return mask & (later == 1)


def masked_sum(x: Float[Array, "*S"], mask: Bool[Array, "*S"], axis: int | None = None) -> Float[Array, "..."]:
    """Sum of `x` where `mask`. Other elements, NaN included, have no influence."""
    return jnp.sum(jnp.where(mask, x, 0), axis)


def masked_mean(x: Float[Array, "*S"], mask: Bool[Array, "*S"], axis: int | None = None) -> Float[Array, "..."]:
    """Mean of `x` where `mask`; 0 where the mask is empty."""
    return masked_sum(x, mask, axis) / token_count(mask, axis)


def masked_extremes(x: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> dict[str, Float[Array, ""]]:
    """Mean, maximum ("max") and minimum ("min") of `x` where `mask`; 0 where the mask is empty."""
    some = jnp.any(mask)
    return {
        "mean": masked_mean(x, mask),
        "max": jnp.where(some, jnp.max(jnp.where(mask, x, -jnp.inf)), 0),
        "min": jnp.where(some, jnp.min(jnp.where(mask, x, jnp.inf)), 0),
    }


def spread(name: str, x: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> dict[str, Float[Array, ""]]:
    """The `masked_extremes` as metrics `name/...`."""
    return {f"{name}/{what}": number for what, number in masked_extremes(x, mask).items()}


def masked_variance(x: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float[Array, ""]:
    """Unbiased variance of `x` where `mask`, centred before it is squared; 0 for fewer than two elements."""
    count = jnp.sum(mask)
    centred = x - masked_mean(x, mask)
    return masked_sum(jnp.square(centred), mask) / jnp.maximum(count - 1, 1).astype(x.dtype)


def masked_whiten(x: Float[Array, "*S"], mask: Bool[Array, "*S"], *, shift_mean: bool = True) -> Float[Array, "*S"]:
    """(x - mean) / sqrt(variance + 1e-8) over the elements where `mask`, zero elsewhere.

    The variance is unbiased, as in verl and TRL, which both raise or divide by zero for fewer than two elements; here
    a single element becomes 0. `shift_mean=False` adds the mean back (used to whiten rewards).

    A deviation of a few units in the last place of the elements is not divided by: it is rounding, which would be blown
    up to order 1, and (x - mean) counts as 0.
    """
    mean = masked_mean(x, mask)
    whitened = (x - mean) * lax.rsqrt(masked_variance(x, mask) + 1e-8)
    # Differences to the largest element are exact for nearly equal ones. NaN compares False, so it does not become 0.
    largest = jnp.max(jnp.where(mask, x, -jnp.inf))
    deviation = jnp.sqrt(masked_variance(jnp.where(mask, x - largest, 0), mask))
    scale = jnp.max(jnp.where(mask, jnp.abs(x), 0))
    whitened = jnp.where(deviation <= 4 * float(jnp.finfo(x.dtype).eps) * scale, 0, whitened)
    return jnp.where(mask, whitened if shift_mean else whitened + mean, 0)


def token_count(mask: Bool[Array, "*S"], axis: int | None = None) -> Float[Array, "..."]:
    """The number of True elements of `mask`, at least 1: a denominator, in float32.

    Counted in integers, so that the sum is exact; above 2^24 the result is the nearest float32.
    """
    return jnp.maximum(jnp.sum(mask, axis), 1).astype(jnp.float32)
