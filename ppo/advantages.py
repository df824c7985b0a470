"""Advantage estimation."""

import chex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


def gae(
    rewards: Float[Array, "T"],
    values: Float[Array, "T"],
    mask: Bool[Array, "T"],
    *,
    discount: float,
    lam: float,
    bootstrap_value: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """Generalized advantage estimation over one sequence (Schulman et al. 2016, arXiv:1506.02438, eq. 11-16).

        delta_t = r_t + discount * V_t' - V_t        A_t = delta_t + discount * lam * A_t'        R_t = A_t + V_t

    where t' is the next position after t where `mask` is True. Positions in between (tool output, another speaker's
    turn, padding) are stepped over: value and accumulator are carried across the gap, neither zeroed nor discounted.
    After the last position V' is `bootstrap_value` (default 0: the sequence ends there) and A' is 0.

    Args:
        rewards: r_t for the token at t.
        values: V_t *before* the token at t.
        mask: the tokens that are actions.
        discount: gamma in [0, 1].
        lam: lambda in [0, 1]; 1: Monte-Carlo returns, 0: one-step TD errors.
        bootstrap_value: V after the last action, of a sequence that was cut off.

    Returns:
        Advantages and returns, zero where `mask` is False. For a batch use `jax.vmap`.
    """
    chex.assert_rank([rewards, values, mask], 1)
    chex.assert_equal_shape([rewards, values, mask])

    def backward(carry: tuple[Array, Array], step: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = carry
        reward, value, valid = step
        delta = reward + discount * next_value - value
        advantage = delta + discount * lam * next_advantage
        carry = (jnp.where(valid, value, next_value), jnp.where(valid, advantage, next_advantage))
        return carry, jnp.where(valid, advantage, 0)

    # zeros_like of an element, not a constant: under vmap the carry then has the sharding of the rows.
    zero = jnp.zeros_like(rewards[0])
    after = zero if bootstrap_value is None else bootstrap_value
    _, advantages = lax.scan(backward, (after, zero), (rewards, values, mask), reverse=True)
    return advantages, jnp.where(mask, advantages + values, 0)
