"""Losses and KL estimates of one token, or of one pair. Callers reduce them with a mask and a global denominator."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jrlhf.ppo.config import Aggregation, DPOConfig, KLEstimator
from jrlhf.ppo.masked import token_count

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: a larger ratio carries no information, and float32 would soon overflow


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


def kl_estimate(
    logprobs: Float[Array, "*S"], ref_logprobs: Float[Array, "*S"], estimator: KLEstimator = "k1"
) -> Float[Array, "*S"]:
    """KL(pi, pi_ref) estimated from tokens that pi drew, for each token, in nats (http://joschu.net/blog/kl-approx.html).

    With d = log pi - log pi_ref:
        k1 = d                   unbiased, high variance, may be negative
        k2 = d^2 / 2             biased, low variance
        k3 = exp(-d) + d - 1     unbiased, never negative
    k3's exponent is clamped to +-20 and k3 itself to at most 10, as in verl: one token that the actor came to avoid
    must not outweigh the batch. The bound is reached near d = -2.6 and d = 11; beyond it k3 has no gradient and is
    biased. k1 and k2 are exact.

    k1+ and k3+ have the values of k1 and k3 and the gradient of k2, as in verl: of the three it is k2 whose mean
    gradient, over tokens that pi drew, is that of the KL; k1's is 0, and k3's is that of KL(pi_ref, pi).
    """
    if estimator in ("k1+", "k3+"):
        value = kl_estimate(logprobs, ref_logprobs, "k1" if estimator == "k1+" else "k3")
        gradient = kl_estimate(logprobs, ref_logprobs, "k2")
        return lax.stop_gradient(value) + (gradient - lax.stop_gradient(gradient))
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return jnp.square(d) / 2
    if estimator == "k3":
        d = jnp.clip(d, -20, 20)
        return jnp.minimum(jnp.expm1(-d) + d, 10)
    raise ValueError(f"KL estimator {estimator!r}: it must be one of k1, k2, k3, k1+, k3+")


def loss_weights(
    mask: Bool[Array, "B T"], aggregation: Aggregation, *, divisor: int | None = None
) -> Float[Array, "B T"]:
    """The weight of each token's loss in the minibatch's loss, which is the weighted sum; zero outside `mask`.

    With N tokens in the mask, S rows that have any, and n of them in a token's own row:

        token-mean: 1 / N       seq-mean-token-sum: 1 / S       seq-mean-token-mean: 1 / (S n)
        constant: 1 / (S divisor)

    as verl's agg_loss, where the last is "seq-mean-token-sum-norm" with a loss_scale_factor. `mask` is of the whole
    minibatch, so the weights of its parts add up: the result is no mean of means over micro-batches.
    """
    if aggregation == "token-mean":
        return mask.astype(jnp.float32) / token_count(mask)
    rows = token_count(jnp.any(mask, axis=1))
    if aggregation == "seq-mean-token-mean":
        return mask.astype(jnp.float32) / (rows * token_count(mask, axis=1)[:, None])
    if aggregation == "constant":
        if divisor is None:
            raise ValueError("divisor=None: aggregation='constant' needs it, usually the response limit")
        rows = rows * divisor
    return mask.astype(jnp.float32) / rows


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


def dpo_loss(
    policy_chosen: Float[Array, "*S"],
    policy_rejected: Float[Array, "*S"],
    ref_chosen: Float[Array, "*S"],
    ref_rejected: Float[Array, "*S"],
    *,
    config: DPOConfig,
) -> Float[Array, "*S"]:
    """The loss of a policy on a pair, from the log-probabilities of its two responses under policy and reference.

        h = beta [(log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)]
        sigmoid: -(1 - eps) log sigmoid(h) - eps log sigmoid(-h)         eps = label_smoothing
        ipo:     (h / beta - 1 / (2 beta))^2

    Log-probabilities are sums over a response's tokens for "sigmoid" (Rafailov et al. 2023, arXiv:2305.18290, eq. 7),
    means over them for "ipo" (Azar et al. 2023, arXiv:2310.12036, eq. 17, whose tau is beta): the paper does not
    mention length, TRL (1.16) divides on its authors' advice. Label smoothing is conservative DPO's (Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf); TRL 1.16 ignores it in "sigmoid", and its "robust" subtracts the second term and
    divides by 1 - 2 eps instead (arXiv:2403.00409).
    """
    margin = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if config.loss == "ipo":
        return jnp.square(margin - 1 / (2 * config.beta))
    h, smoothing = config.beta * margin, config.label_smoothing
    loss = (1 - smoothing) * jax.nn.softplus(-h)
    return loss + smoothing * jax.nn.softplus(h) if smoothing else loss
