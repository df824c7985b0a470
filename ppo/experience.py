"""From a rollout and what the four models say about it to experience: rewards, advantages, returns."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrlhf.ppo.advantages import gae
from jrlhf.ppo.config import PPOConfig
from jrlhf.ppo.kl import kl_estimate
from jrlhf.ppo.masked import last_token_mask, masked_mean, masked_sum, masked_whiten, response_mask
from jrlhf.ppo.types import Experience, Rollout


def make_experience(
    rollout: Rollout,
    scores: Float[Array, "B"] | Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    values: Float[Array, "B T"],
    *,
    config: PPOConfig,
    kl_coef: float | Float[Array, ""],
    bootstrap_values: Float[Array, "B"] | None = None,
) -> Experience:
    """Rewards, advantages and returns of a rollout. Pure; jit it or not.

        r_t = -kl_coef * kl_t, at every response token        r_last += score

    so that a row's rewards sum to score - kl_coef * sum_t kl_t (Ouyang et al. 2022, arXiv:2203.02155, eq. 2). The score
    lands on the last response token whether the row is finished or not; what follows a row that was cut off is
    `config.truncation`'s matter. A row without any response token has no rewards. Scores of tokens are added where
    they stand instead, r_t += score_t, and the sum is the same with score = sum_t score_t.

    Args:
        scores: of the whole sequences; or of their tokens, read at response tokens only.
        old_logprobs: the actor's, now (`[:, t]` of the token at t). Read at response tokens only, as are the next two.
        ref_logprobs: the reference's.
        values: the critic's (`[:, t]` before the token at t).
        kl_coef: beta, `state.kl.coef` of a `PPOState`.
        bootstrap_values: V after each row's last token. Needed for `truncation="bootstrap"`, read in rows cut off.

    Raises:
        ValueError: `truncation="bootstrap"` without `bootstrap_values`, or arrays whose shapes do not fit.
    """
    if config.truncation == "bootstrap" and bootstrap_values is None:
        raise ValueError("truncation='bootstrap' needs bootstrap_values: pass them, or choose 'zero' or 'mask'")
    rows, time = rollout.tokens.shape
    _check_shapes((rows, time), old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, values=values)
    _check_shapes((rows,) if scores.ndim < 2 else (rows, time), scores=scores)

    mask = response_mask(rollout.prompt_lengths, rollout.response_lengths, time)
    scores = scores.astype(jnp.float32)
    if scores.ndim == 2:
        placed = jnp.where(mask, scores, 0)
        scores = jnp.sum(placed, axis=1)
    else:
        placed = jnp.where(last_token_mask(mask), scores[:, None], 0)
    if config.truncation == "mask":
        mask &= rollout.finished[:, None]
    old_logprobs, ref_logprobs, values = (
        jnp.where(mask, x.astype(jnp.float32), 0) for x in (old_logprobs, ref_logprobs, values)
    )
    kl = kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)
    rewards = jnp.where(mask, placed - kl_coef * kl, 0)

    after = jnp.zeros_like(scores)
    if config.truncation == "bootstrap":
        assert bootstrap_values is not None
        after = jnp.where(rollout.finished, 0, bootstrap_values.astype(jnp.float32))
    batched = jax.vmap(partial(gae, discount=config.discount, lam=config.gae_lambda))
    advantages, returns = batched(rewards, values, mask, bootstrap_value=after)
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    return Experience(
        tokens=rollout.tokens,
        prompt_lengths=rollout.prompt_lengths,
        response_lengths=rollout.response_lengths,
        logprobs=rollout.logprobs,
        finished=rollout.finished,
        version=rollout.version,
        scores=scores,
        response_mask=mask,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
    )


def sequence_kl(experience: Experience) -> Float[Array, ""]:
    """objective/kl: the mean over sequences of the k1 estimates summed over a sequence's response tokens, in nats.

    The convention of Ziegler et al. 2019 (whose controller's target it is), InstructGPT and TRL. verl feeds its
    controller the mean over sequences of the mean over tokens instead, which `experience_metrics` reports under verl's
    name, actor/reward_kl_penalty.
    """
    mask = experience.response_mask
    d = experience.old_logprobs - experience.ref_logprobs
    return masked_mean(masked_sum(d, mask, axis=1), jnp.any(mask, axis=1))


def experience_metrics(experience: Experience) -> dict[str, Float[Array, ""]]:
    """What to log about a batch of experience, under verl's names where it has one. Pure and jittable.

    Means over tokens weigh each response token alike; a score, a reward and a length is one number a sequence. Rows
    that `truncation="mask"` excludes count in the lengths and the scores only.
    """
    mask = experience.response_mask
    learned = jnp.any(mask, axis=1)
    everything = jnp.ones_like(learned)
    gap = jnp.where(mask, jnp.abs(experience.logprobs - experience.old_logprobs), 0)
    token_kl = masked_mean(experience.old_logprobs - experience.ref_logprobs, mask, axis=1)
    return {
        **_spread("critic/score", experience.scores, everything),
        **_spread("critic/rewards", masked_sum(experience.rewards, mask, axis=1), learned),
        **_spread("critic/advantages", experience.advantages, mask),
        **_spread("critic/returns", experience.returns, mask),
        **_spread("critic/values", experience.values, mask),
        **_spread("response_length", experience.response_lengths.astype(jnp.float32), everything),
        "response_length/clip_ratio": jnp.mean(~experience.finished, dtype=jnp.float32),
        **_spread("prompt_length", experience.prompt_lengths.astype(jnp.float32), everything),
        "objective/kl": sequence_kl(experience),
        "objective/entropy": masked_mean(masked_sum(-experience.old_logprobs, mask, axis=1), learned),
        "actor/reward_kl_penalty": masked_mean(token_kl, learned),
        "rollout/logprob_gap_mean": masked_mean(gap, mask),
        "rollout/logprob_gap_max": jnp.max(gap),
    }


def _spread(name: str, x: Array, mask: Array) -> dict[str, Array]:
    """Mean, maximum and minimum where `mask`; 0 where it is empty."""
    some = jnp.any(mask)
    return {
        f"{name}/mean": masked_mean(x, mask),
        f"{name}/max": jnp.where(some, jnp.max(jnp.where(mask, x, -jnp.inf)), 0),
        f"{name}/min": jnp.where(some, jnp.min(jnp.where(mask, x, jnp.inf)), 0),
    }


def _check_shapes(shape: tuple[int, ...], **arrays: Array) -> None:
    for name, x in arrays.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, but the rollout's tokens ask for {shape}")
