"""Losses of one token, or of one pair. Callers reduce them with a mask and a global denominator."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond it a ratio says nothing more, and float32 would soon overflow


class PolicyLoss(NamedTuple):
    """Elementwise parts of the clipped policy loss."""

    loss: Float[Array, "*S"]
    log_ratio: Float[Array, "*S"]  # log pi - log pi_old, clamped
    ratio: Float[Array, "*S"]
    clipped: Bool[Array, "*S"]  # the ratio's clip decides, so the gradient is zero
    clipped_lower: Bool[Array, "*S"]  # the dual clip decides


class ValueLoss(NamedTuple):
    """Elementwise parts of the clipped value loss."""

    loss: Float[Array, "*S"]
    clipped: Bool[Array, "*S"]


def policy_loss(
    logprobs: Float[Array, "*S"],
    old_logprobs: Float[Array, "*S"],
    advantages: Float[Array, "*S"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347, eq. 7), for each token.

        rho = pi / pi_old        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))

    A `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476). With `dual_clip` c, L = min(L, -c A) where
    A < 0 (Ye et al. 2020, arXiv:1912.09729, eq. 3): one very improbable token cannot dominate. log rho is clamped to
    +-20. Where a clip decides, the gradient is exactly 0; exactly on a boundary it is that of -A rho.
    """
    log_ratio = jnp.clip(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    unclipped = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    # A select and not jnp.maximum, which would average the two gradients where they tie.
    clipped = bounded > unclipped
    loss = jnp.where(clipped, bounded, unclipped)
    clipped_lower = jnp.zeros_like(clipped)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = jnp.where(clipped_lower, ceiling, loss)
    return PolicyLoss(loss, log_ratio, ratio, clipped, clipped_lower)


def value_loss(
    values: Float[Array, "*S"],
    old_values: Float[Array, "*S"],
    returns: Float[Array, "*S"],
    *,
    clip: float | None = 0.2,
) -> ValueLoss:
    """Half the squared error of the critic, for each token; with `clip` the pessimistic form of PPO's first code.

        L = 1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)

    (https://github.com/openai/baselines, ppo2; arXiv:1707.06347 has no such clip.)
    """
    error = jnp.square(values - returns)
    if clip is None:
        return ValueLoss(error / 2, jnp.zeros_like(error, jnp.bool_))
    bounded = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    clipped = bounded > error
    return ValueLoss(jnp.where(clipped, bounded, error) / 2, clipped)


def bradley_terry_loss(
    chosen: Float[Array, "*S"], rejected: Float[Array, "*S"], *, centre: float = 0.0
) -> Float[Array, "*S"]:
    """-log sigmoid(r_chosen - r_rejected) + centre (r_chosen + r_rejected)^2, for each pair of scores.

    The likelihood of Bradley & Terry (1952) as in Ouyang et al. 2022 (arXiv:2203.02155, eq. 1). It determines scores up
    to a constant only; a small `centre` pulls their mean to 0 (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).
    """
    loss = jax.nn.softplus(rejected - chosen)
    return loss + centre * jnp.square(chosen + rejected) if centre else loss
