"""Advantages of tokens from a critic, from returns or from a user's function, and the experience with them.

The shared arguments and the rewards are described in `experience.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jrlhf.meshes.rows import divided_like, row_axes
from jrlhf.ppo.config.algorithms import PPOConfig, ReinforcePPConfig, ReMaxConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.experience import rewarded, whitened, with_advantages, within
from jrlhf.ppo.masked import masked_whiten
from jrlhf.ppo.types import Coefficient, Experience, Logprobs, Rollout, Scores, before_tokens, check_class, check_shapes


@jax.named_scope("advantages")
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
    turn, padding) are skipped: value and accumulator are carried across the gap, neither zeroed nor discounted.
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

    Raises ValueError for more than one sequence: use jax.vmap.
    """
    if rewards.ndim != 1:
        raise ValueError(f"rewards have shape {rewards.shape}, but one sequence [T] is expected: use jax.vmap")
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


@jax.named_scope("advantages")
def returns_to_go(rewards: Float[Array, "T"], mask: Bool[Array, "T"], *, discount: float) -> Float[Array, "T"]:
    """R_t = r_t + discount R_t' of one sequence, t' the next position after t where `mask` is True; zero elsewhere.

    Positions in between are skipped, neither summed nor discounted. This equals the advantages of `gae` with lam 1 and
    no values. (verl's REINFORCE++ restarts after a gap.) For a batch use `jax.vmap`.
    """
    return gae(rewards, jnp.zeros_like(rewards), mask, discount=discount, lam=1.0)[0]


def make_experience(
    rollout: Rollout,
    scores: Scores,
    old_logprobs: Logprobs | None,
    ref_logprobs: Logprobs | None,
    values: Float[Array, "B T"] | Float[Array, "B T+1"],
    *,
    config: PPOConfig,
    kl_coef: Coefficient,
    bootstrap_values: Float[Array, "B"] | None = None,
) -> Experience:
    """PPO's experience: advantages and returns by `gae` from a critic.

    scores: one per row or per token. old_logprobs: under the actor before its update; None: the rollout's.
    ref_logprobs: under the reference; None without a KL penalty. kl_coef: its coefficient now, of the controller;
        `config.kl_coef` only says whether there is a penalty.
    values: the critic's values, [B, T] or [B, T+1], as `make_values` returns them; `[:, t]` is V before the token at t.
    bootstrap_values: V after each row's last token, read in rows cut off. None: they are among [B, T+1] values;
        `truncation="bootstrap"` needs one or the other.

    Raises ValueError for arrays that do not fit or a kl_coef without effect; TypeError for another class or dtype.

    A row whose score is not finite is excluded; critic/score/nonfinite of `experience_metrics` counts them.
    `help(jrlhf.ppo.experience)` has the formulas.
    """
    check_class("config", config, PPOConfig)
    experience = rewarded(rollout, scores, old_logprobs, ref_logprobs, kl_coef, config)
    experience = with_critic(experience, values, bootstrap_values, config)
    return whitened(experience, config)


def make_return_experience(
    rollout: Rollout,
    scores: Scores,
    old_logprobs: Logprobs | None,
    ref_logprobs: Logprobs | None,
    baselines: Float[Array, "B"] | None = None,
    *,
    config: ReinforcePPConfig | ReMaxConfig,
    kl_coef: Coefficient,
) -> Experience:
    """The experience of REINFORCE++ and ReMax: A_t = `returns_to_go` - baselines[b]; other arguments as in PPO's.

    baselines: one per row. ReMax needs them: scores of the greedy responses to the rows' prompts. REINFORCE++ has none.

    Raises ValueError for ReMax without baselines.
    """
    check_class("config", config, ReinforcePPConfig, ReMaxConfig)
    if baselines is None and isinstance(config, ReMaxConfig):
        raise ValueError("baselines=None: ReMax needs the greedy responses' scores")
    check_shapes(rollout.prompt_lengths.shape, baselines=baselines)
    experience = rewarded(rollout, scores, old_logprobs, ref_logprobs, kl_coef, config, other_scores=baselines)
    mask = experience.response_mask
    batched = jax.vmap(partial(returns_to_go, discount=config.discount))
    advantages = batched(learned_rewards(experience, config), mask)
    if baselines is not None:
        advantages = jnp.where(mask, advantages - divided_like(mask, baselines.astype(jnp.float32))[:, None], 0)
    return with_advantages(experience, advantages, config)


def make_custom_experience(
    rollout: Rollout,
    scores: Scores,
    old_logprobs: Logprobs | None,
    ref_logprobs: Logprobs | None,
    *others: Any,
    advantages: Callable[..., Array | Mapping[str, Array]],
    config: PolicyConfig,
    kl_coef: Coefficient,
) -> Experience:
    """The experience of a custom algorithm: A = `advantages(experience, config, *others)`.

    advantages: a function of the experience so far, whose advantages are 0 and which has no values or returns. It
        returns the advantages of rows [B] or of tokens [B, T], or a mapping with several of an experience's fields,
        such as a critic's `values` and `returns`. Where the mesh's axes are Explicit, they are Auto inside it.
    others: further arrays for it, with one entry for each row.

    The results are read at response tokens only; advantages are whitened with `config.whiten_advantages`.

    Raises ValueError for advantages of another shape.
    """
    experience = rewarded(rollout, scores, old_logprobs, ref_logprobs, kl_coef, config)
    mask, rows = experience.response_mask, row_axes(rollout.tokens)

    def computed(experience: Experience, *others: Any) -> dict[str, Array]:
        result = advantages(experience, config, *others)
        named = dict(result) if isinstance(result, Mapping) else {"advantages": result}
        for name, x in named.items():
            if x.shape not in (mask.shape, mask.shape[:1]):
                raise ValueError(f"{name} has shape {x.shape}: it must be {mask.shape[:1]} or {mask.shape}")
        return {name: within(experience.response_mask, x.reshape(len(x), -1)) for name, x in named.items()}

    auto: Any = computed
    if rows is not None:
        auto = jax.sharding.auto_axes(computed, out_sharding=jax.P(rows))
    experience = replace(experience, **auto(experience, *others))
    return whitened(experience, config)


def with_critic(
    experience: Experience, values: Array, bootstrap_values: Array | None, config: PPOConfig, *, prefix: str = ""
) -> Experience:
    """Adds the values of a critic, and advantages and returns computed from them."""
    before = before_tokens(experience.tokens, values)
    if bootstrap_values is None and before is not values:
        rows = (divided_like(experience.response_mask, x) for x in (values, experience.lengths))
        bootstrap_values = jax.vmap(lambda row, length: row[length])(*rows)
    values = before
    if config.truncation == "bootstrap" and bootstrap_values is None:
        name = f"{prefix}bootstrap_values"
        raise ValueError(f"truncation='bootstrap' needs {name}: pass them, or choose 'zero' or 'mask'")
    if values is None:
        raise ValueError(f"{prefix}values=None: a critic's experience needs them")
    check_shapes(experience.tokens.shape, **{f"{prefix}values": values})
    check_shapes(experience.scores.shape, **{f"{prefix}bootstrap_values": bootstrap_values})
    mask = experience.response_mask
    values = within(mask, values)
    after = jnp.zeros_like(experience.scores)
    if config.truncation == "bootstrap":
        assert bootstrap_values is not None
        after = jnp.where(experience.finished, 0, divided_like(mask, bootstrap_values.astype(jnp.float32)))
    batched = jax.vmap(partial(gae, discount=config.discount, lam=config.gae_lambda))
    advantages, returns = batched(learned_rewards(experience, config), values, mask, bootstrap_value=after)
    return replace(experience, values=values, advantages=advantages, returns=returns)


def learned_rewards(experience: Experience, config: PolicyConfig) -> Float[Array, "B T"]:
    """The rewards from which advantages are computed."""
    if not config.whiten_rewards:
        return experience.rewards
    return masked_whiten(experience.rewards, experience.response_mask, shift_mean=False)
