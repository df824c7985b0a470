"""Safe RLHF's Lagrange multiplier: what a unit of cost is worth in units of reward."""

import math
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrlhf.ppo.config import SafeRLHFConfig
from jrlhf.ppo.minibatches import whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiplierState:
    """The multiplier's logarithm and the costs of the last `window` episodes; saved with the run."""

    log_multiplier: Float[Array, ""]
    costs: Float[Array, "window"]  # a ring: the next one is written at count % window
    count: Int[Array, ""]  # of costs ever seen

    @classmethod
    def create(cls, config: SafeRLHFConfig) -> Self:
        """At the start: `config.multiplier`, and no episode yet."""
        start = jnp.asarray(math.log(config.multiplier), jnp.float32)
        return cls(start, jnp.zeros((config.window,), jnp.float32), jnp.zeros((), jnp.int32))

    @property
    def value(self) -> Float[Array, ""]:
        """lambda."""
        return jnp.exp(self.log_multiplier)

    @property
    def mean_cost(self) -> Float[Array, ""]:
        """Of the last `window` episodes; 0 before there is one."""
        seen = jnp.minimum(self.count, self.costs.shape[0])
        filled = jnp.arange(self.costs.shape[0]) < seen
        return jnp.sum(jnp.where(filled, self.costs, 0)) / jnp.maximum(seen, 1).astype(jnp.float32)


def update_multiplier(state: MultiplierState, costs: Float[Array, "B"], *, config: SafeRLHFConfig) -> MultiplierState:
    """The multiplier after a batch of episodes with these costs: one step of gradient ascent on its logarithm.

        ln lambda <- min(ln lambda + multiplier_rate lambda (mean cost - cost_limit), ln multiplier_max)

    (Dai et al. 2024, arXiv:2310.12773, section 3.3.) It comes before the batch's experience is made, as in the paper's
    algorithm. The mean is of the last `window` episodes; of a larger batch the last rows count. Costs that are not
    finite are left out, and without a single cost so far nothing changes. Pure and jittable.
    """
    costs, window = whole(costs).astype(jnp.float32), state.costs.shape[0]
    finite = jnp.isfinite(costs)
    number = jnp.cumsum(finite) - 1  # of each finite cost among them
    total = jnp.sum(finite)
    kept = finite & (number >= total - window)
    place = jnp.where(kept, (state.count + number) % window, window)  # past the end: dropped
    ring = state.costs.at[place].set(costs, mode="drop")
    seen = MultiplierState(state.log_multiplier, ring, state.count + total.astype(jnp.int32))
    step = config.multiplier_rate * state.value * (seen.mean_cost - config.cost_limit)
    moved = jnp.minimum(state.log_multiplier + step, math.log(config.multiplier_max))
    return MultiplierState(jnp.where(seen.count > 0, moved, state.log_multiplier), ring, seen.count)
