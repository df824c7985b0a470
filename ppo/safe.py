"""Safe RLHF: experience from rewards and costs, and the Lagrange multiplier (units of reward per unit of cost)."""

import math
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrlhf.meshes.rows import whole
from jrlhf.ppo.config.algorithms import SafeRLHFConfig
from jrlhf.ppo.experience import rewarded, with_advantages
from jrlhf.ppo.token_advantages import with_critic
from jrlhf.ppo.types import Coefficient, Experience, Logprobs, Rollout, Scores


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiplierState:
    """The multiplier's logarithm and the costs of the last `window` episodes; saved with the run."""

    log_multiplier: Float[Array, ""]
    costs: Float[Array, "window"]  # a ring buffer: the next cost is written at count % window
    count: Int[Array, ""]  # number of all costs so far

    @classmethod
    def create(cls, config: SafeRLHFConfig) -> Self:
        """The initial state: `config.multiplier`, and no episode yet."""
        start = jnp.asarray(math.log(config.multiplier), jnp.float32)
        return cls(start, jnp.zeros((config.window,), jnp.float32), jnp.zeros((), jnp.int32))

    @property
    def value(self) -> Float[Array, ""]:
        """The multiplier, lambda."""
        return jnp.exp(self.log_multiplier)

    @property
    def mean_cost(self) -> Float[Array, ""]:
        """The mean cost of the last `window` episodes; 0 before the first."""
        seen = jnp.minimum(self.count, self.costs.shape[0])
        filled = jnp.arange(self.costs.shape[0]) < seen
        return jnp.sum(jnp.where(filled, self.costs, 0)) / jnp.maximum(seen, 1).astype(jnp.float32)


def update_multiplier(
    state: MultiplierState,
    costs: Float[Array, "B"],
    finished: Bool[Array, "B"] | None = None,
    *,
    config: SafeRLHFConfig,
) -> MultiplierState:
    """Updates the multiplier with the costs of a batch of episodes: one step of gradient ascent on its logarithm.

        ln lambda <- min(ln lambda + multiplier_rate lambda (mean cost - cost_limit), ln multiplier_max)

    (Dai et al. 2024, arXiv:2310.12773, section 3.3.) It runs before the batch's experience is made, as in the paper's
    algorithm. The mean is over the last `window` episodes; of a larger batch the last rows count. Costs that are not
    finite are ignored, and before the first finite cost nothing changes. Pure and jittable.

    finished: the rollout's; costs of rows that `config.truncation` leaves out are ignored, too. None: all rows count.
    """
    costs, window = whole(costs).astype(jnp.float32), state.costs.shape[0]
    finite = jnp.isfinite(costs)
    if finished is not None:
        finite &= whole(config.counts(finished))
    number = jnp.cumsum(finite) - 1  # the index of each finite cost among the finite ones
    total = jnp.sum(finite)
    counted = finite & (number >= total - window)
    place = jnp.where(counted, (state.count + number) % window, window)  # past the end: dropped
    ring = state.costs.at[place].set(costs, mode="drop")
    seen = MultiplierState(state.log_multiplier, ring, state.count + total.astype(jnp.int32))
    step = config.multiplier_rate * state.value * (seen.mean_cost - config.cost_limit)
    moved = jnp.minimum(state.log_multiplier + step, math.log(config.multiplier_max))
    return MultiplierState(jnp.where(seen.count > 0, moved, state.log_multiplier), ring, seen.count)


def make_safe_experience(
    rollout: Rollout,
    scores: Scores,
    costs: Scores,
    old_logprobs: Logprobs | None,
    ref_logprobs: Logprobs | None,
    values: Float[Array, "B T"],
    cost_values: Float[Array, "B T"],
    *,
    config: SafeRLHFConfig,
    kl_coef: Coefficient,
    multiplier: Coefficient,
    bootstrap_values: Float[Array, "B"] | None = None,
    cost_bootstrap_values: Float[Array, "B"] | None = None,
) -> tuple[Experience, Experience]:
    """Safe RLHF's experiences: one stream of rewards and one of costs, each with its critic and its `gae`.

        A = (A_reward - multiplier A_cost) / (1 + multiplier)

    with the KL penalty in both streams, as `SafeRLHFConfig` says. (Dai et al. 2024, arXiv:2310.12773, put half of it in
    each.) A is whitened after the two are combined.

    Arguments as those of `make_experience`, and

    Args:
        costs: like `scores`; their mean is to stay below `config.cost_limit`.
        cost_values: the cost critic's values.
        cost_bootstrap_values: that critic's `bootstrap_values`.
        multiplier: lambda, the `MultiplierState`'s value.

    Returns:
        The first trains the actor and the critic of rewards: A, and that critic's values and returns. The second
        trains the critic of costs: costs as scores and rewards, its values and returns, its own advantages.
    """
    shared = old_logprobs, ref_logprobs, kl_coef, config
    reward = rewarded(rollout, scores, *shared, other_scores=costs)
    cost = rewarded(rollout, costs, *shared, other_scores=scores, kl_sign=1)
    reward = with_critic(reward, values, bootstrap_values, config)
    cost = with_critic(cost, cost_values, cost_bootstrap_values, config, prefix="cost_")
    assert reward.advantages is not None and cost.advantages is not None
    advantages = (reward.advantages - multiplier * cost.advantages) / (1 + multiplier)
    return with_advantages(reward, advantages, config), cost
