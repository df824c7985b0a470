"""KL divergence between the actor and its reference: estimates from samples, and who sets the penalty's weight."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jrlhf.ppo.config import KLEstimator, PolicyConfig
from jrlhf.ppo.types import KLState


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


def update_kl(state: KLState, kl: Float[Array, ""], episodes: int, *, config: PolicyConfig) -> KLState:
    """The KL controller after a batch of `episodes` sequences whose mean KL was `kl` (objective/kl, nats a sequence).

    Fixed without `config.kl_target`. Otherwise the proportional controller of Ziegler et al. 2019
    (arXiv:1909.08593, section 2.2), with the step of its published code:

        e = clip(kl / target - 1, -0.2, 0.2)        coef <- coef (1 + e episodes / horizon)

    A KL that is not finite leaves the coefficient as it is.

    Raises:
        ValueError: so many episodes against so short a horizon that the coefficient could turn negative.
    """
    if config.kl_target is None:
        return state
    if episodes >= 5 * config.kl_horizon:
        raise ValueError(f"kl_horizon={config.kl_horizon:g} must exceed a fifth of the {episodes} episodes of a batch")
    error = jnp.clip(kl / config.kl_target - 1, -0.2, 0.2)
    coef = state.coef * (1 + error * (episodes / config.kl_horizon))
    return KLState(jnp.where(jnp.isfinite(kl), coef, state.coef))
