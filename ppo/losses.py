"""Policy losses and KL estimates of single tokens. Callers reduce them with a mask and a global denominator."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jrlhf.ppo.config.policy import Aggregation, KLEstimator
from jrlhf.ppo.masked import token_count

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: a larger ratio carries no information, and float32 would soon overflow


class PolicyLoss(NamedTuple):
    """Elementwise parts of the clipped policy loss."""

    loss: Float[Array, "*S"]
    ratio: Float[Array, "*S"]
    clipped: Bool[Array, "*S"]  # the ratio's clip decides, so the gradient is zero
    clipped_lower: Bool[Array, "*S"]  # the dual clip decides


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
    return PolicyLoss(loss, ratio, clipped, clipped_lower)


def cispo_loss(
    logprobs: Float[Array, "*S"],
    log_ratio: Float[Array, "*S"],
    advantages: Float[Array, "*S"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """CISPO's loss (MiniMax-M1, 2025, arXiv:2506.13585, eq. 4-5), for each token.

        L = -sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi        log rho = log_ratio

    sg[] has no gradient: that of L is -clip(rho) A grad log pi, at clipped tokens as well. On policy it is that of
    `policy_loss`. `clipped` marks tokens whose ratio was clipped. As in verl, log rho is clamped to +-20. (TRL's
    epsilon_high is the bound of rho itself, and it has no lower bound; the paper switches the lower one off.)
    """
    log_ratio = lax.stop_gradient(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    ratio = jnp.exp(log_ratio)
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = bounded != ratio
    return PolicyLoss(-bounded * advantages * logprobs, ratio, clipped, jnp.zeros_like(clipped))


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

    Raises ValueError for another estimator.
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
    mask: Bool[Array, "B T"],
    aggregation: Aggregation,
    *,
    divisor: int | None = None,
    group_tokens: Float[Array, "B"] | None = None,
) -> Float[Array, "B T"]:
    """The weight of each token's loss in the minibatch's loss, which is the weighted sum; zero outside `mask`.

    With N tokens in the mask, S rows that have any, and n of them in a token's own row:

        token-mean: 1 / N       seq-mean-token-sum: 1 / S       seq-mean-token-mean: 1 / (S n)
        constant: 1 / (S divisor)       prompt-mean: 1 / (P g), with g = group_tokens and P = sum over tokens of 1 / g

    as verl's agg_loss, which has no prompt-mean, and where constant is "seq-mean-token-sum-norm" with a
    loss_scale_factor. `mask` is of the whole minibatch, so the weights of its parts add up: the result is no mean of
    means over micro-batches.

    group_tokens: number of tokens of all responses to a row's prompt, in the whole batch; P is then a number of prompts
        (ScaleRL, arXiv:2510.13786, averages over prompts).

    Raises ValueError if the aggregation needs a number that is not given.
    """
    if aggregation == "token-mean":
        return mask.astype(jnp.float32) / token_count(mask)
    if aggregation == "prompt-mean":
        if group_tokens is None:
            raise ValueError("group_tokens=None: aggregation='prompt-mean' needs them")
        shares = jnp.where(mask, 1 / jnp.maximum(group_tokens, 1)[:, None], 0)
        return shares / jnp.where(jnp.any(mask), jnp.sum(shares), 1)
    rows = token_count(jnp.any(mask, axis=1))
    if aggregation == "seq-mean-token-mean":
        return mask.astype(jnp.float32) / (rows * token_count(mask, axis=1)[:, None])
    if aggregation == "constant":
        if divisor is None:
            raise ValueError("divisor=None: aggregation='constant' needs it, usually the response limit")
        rows = rows * divisor
    return mask.astype(jnp.float32) / rows
