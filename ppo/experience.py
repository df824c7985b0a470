"""Makes experience from a rollout, its scores and log-probs: rewards, advantages, returns. Pure functions, jittable.

All algorithms start with the same rewards of a response's tokens:

    r_t = -kl_coef * kl_t at every token, if the KL is in the reward        r_last += score

so that a row's rewards sum to score - kl_coef * sum_t kl_t (Ouyang et al. 2022, arXiv:2203.02155, eq. 2). The score
belongs to the last response token whether the row is finished or not; scores of tokens are added at their tokens. A row
without any response token has no rewards. `config.truncation` decides what follows a row that was cut off. With
"bootstrap" the critic's value after such a row replaces its score: it estimates this very score, which must not count
twice. No return is a target of that value itself.

Shared arguments:
    scores: of whole sequences, or of their tokens, read at response tokens only.
    old_logprobs: of the actor before its update (`[:, t]` of the token at t), read at response tokens only, like all
        [B, T] arrays. None is allowed unless `config.old_logprobs` is "recompute": those of the rollout are used.
    ref_logprobs: of the reference; None is allowed where `config.needs_reference` is False.
    kl_coef: beta, `state.kl.coef` of a `PPOState`. If the KL is in the loss, the experience carries it there.
All functions raise ValueError for arrays whose shapes do not fit, and for None where the config needs log-probs.

With `config.corrections` the experience has weights of the policy loss, `losses.importance_weights` of pi_old /
pi_rollout, for a rollout whose numbers or weights differ from the trainer's (verl's rollout_correction). A token or row
of weight 0 keeps its place in returns, values, whitening and the statistics of its group; verl removes it from the
response mask first, and with it, from PPO's returns, a score at a masked last token. With `config.whiten_rewards` PPO
and REINFORCE++ compute advantages from whitened rewards, while `Experience.rewards` are those above.

A row that `truncation="mask"` excludes counts in no statistic, neither of the batch nor of its group. (verl and TRL
exclude such rows from the loss, but not their scores from the group's statistics.) The same holds for a row whose
score, cost or baseline is not finite: it cannot teach, and whitening would carry its NaN to every other row.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrlhf.meshes.rows import row_axes
from jrlhf.ppo.advantages import gae, group_advantages, group_spread, returns_to_go
from jrlhf.ppo.algorithms import GRPOConfig, PPOConfig, ReinforcePPConfig, ReMaxConfig
from jrlhf.ppo.config import PolicyConfig
from jrlhf.ppo.losses import LOG_RATIO_LIMIT, importance_weights, kl_estimate
from jrlhf.ppo.masked import (
    last_token_mask,
    masked_extremes,
    masked_mean,
    masked_sum,
    masked_variance,
    masked_whiten,
    response_mask,
)
from jrlhf.ppo.types import Coefficient, Experience, KLState, Logprobs, Rollout, Scored, Scores


def make_experience(
    rollout: Rollout,
    scores: Scores,
    old_logprobs: Logprobs | None,
    ref_logprobs: Logprobs | None,
    values: Float[Array, "B T"],
    *,
    config: PPOConfig,
    kl_coef: Coefficient,
    bootstrap_values: Float[Array, "B"] | None = None,
) -> Experience:
    """PPO's experience: advantages and returns by `advantages.gae` from a critic.

    values: the critic's (`[:, t]` before the token at t).
    bootstrap_values: V after each row's last token. Needed for `truncation="bootstrap"`, read in rows cut off.
    """
    experience = rewarded(Scored(rollout, scores, old_logprobs, ref_logprobs, kl_coef), config)
    experience = with_critic(experience, values, bootstrap_values, config)
    return with_advantages(experience, experience.advantages, config)


def make_group_experience(
    rollout: Rollout,
    scores: Scores,
    old_logprobs: Logprobs | None,
    ref_logprobs: Logprobs | None,
    *,
    config: GRPOConfig,
    kl_coef: Coefficient,
) -> Experience:
    """The experience of GRPO and its variants: every token of a response has the response's `group_advantages`.

    The sums of the responses' rewards are compared, so the KL counts if it is in the reward (RLOO). Whitening
    (REINFORCE++-baseline) is over all response tokens of the batch, as in verl: long responses weigh more in it.
    Row = prompt * samples + sample; the rows must be a multiple of `config.samples`.
    """
    experience = rewarded(Scored(rollout, scores, old_logprobs, ref_logprobs, kl_coef), config)
    mask = experience.response_mask
    advantages = group_advantages(
        jnp.sum(experience.rewards, axis=1),
        config.samples,
        baseline=config.baseline,
        divide_by_std=config.divide_by_std,
        mask=jnp.any(mask, axis=1),
    )
    return with_advantages(experience, jnp.where(mask, advantages[:, None], 0), config)


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
    """The experience of REINFORCE++ and ReMax: A_t = `advantages.returns_to_go` - baselines[b].

    baselines: one for all tokens of a row. ReMax needs it: the score of the greedy response to the row's prompt.
        REINFORCE++ has none.
    """
    if baselines is None and isinstance(config, ReMaxConfig):
        raise ValueError("baselines=None: ReMax needs the greedy responses' scores")
    _check_shapes(rollout.prompt_lengths.shape, baselines=baselines)
    scored = Scored(rollout, scores, old_logprobs, ref_logprobs, kl_coef)
    experience = rewarded(scored, config, other_scores=baselines)
    mask = experience.response_mask
    batched = jax.vmap(partial(returns_to_go, discount=config.discount))
    advantages = batched(_learned_rewards(experience, config), mask)
    if baselines is not None:
        advantages = jnp.where(mask, advantages - baselines.astype(jnp.float32)[:, None], 0)
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
    """The experience of a user's own algorithm: A = `advantages(experience, config, *others)`.

    advantages: a function of the experience so far, whose advantages are 0 and which has no values or returns. It
        returns the advantages of rows [B] or of tokens [B, T], or a mapping with several of an experience's fields,
        such as a critic's `values` and `returns`. Where the mesh's axes are Explicit, they are Auto inside it.
    others: further arrays for it, with one entry for each row.

    The results are read at response tokens only; advantages are whitened with `config.whiten_advantages`.
    """
    experience = rewarded(Scored(rollout, scores, old_logprobs, ref_logprobs, kl_coef), config)
    mask, rows = experience.response_mask, row_axes(rollout.tokens)

    def computed(experience: Experience, *others: Any) -> dict[str, Array]:
        result = advantages(experience, config, *others)
        named = dict(result) if isinstance(result, Mapping) else {"advantages": result}
        for name, x in named.items():
            if x.shape not in (mask.shape, mask.shape[:1]):
                raise ValueError(f"{name} has shape {x.shape}: it must be {mask.shape[:1]} or {mask.shape}")
        return {name: _within(experience.response_mask, x.reshape(len(x), -1)) for name, x in named.items()}

    auto: Any = computed
    if rows is not None:
        auto = jax.sharding.auto_axes(computed, out_sharding=jax.P(rows))
    experience = replace(experience, **auto(experience, *others))
    return with_advantages(experience, experience.advantages, config)


def sequence_kl(experience: Experience) -> Float[Array, ""]:
    """objective/kl: the mean over sequences of the k1 estimates summed over a sequence's response tokens, in nats.

    The convention of Ziegler et al. 2019 (whose controller's target it is), InstructGPT and TRL. verl feeds its
    controller the mean over sequences of the mean over tokens instead, which `experience_metrics` reports under verl's
    name, actor/reward_kl_penalty.

    NaN if no row of the batch counts; the controller ignores it. Raises ValueError without a reference.
    """
    if experience.ref_logprobs is None:
        raise ValueError("ref_logprobs=None: the KL to a reference needs the reference's log-probabilities")
    mask = experience.response_mask
    d = experience.old_logprobs - experience.ref_logprobs
    learned = jnp.any(mask, axis=1)
    return jnp.where(jnp.any(learned), masked_mean(masked_sum(d, mask, axis=1), learned), jnp.nan)


def update_kl(state: KLState, kl: Float[Array, ""], episodes: int, *, config: PolicyConfig) -> KLState:
    """The KL controller after a batch of `episodes` sequences whose mean KL was `kl` (objective/kl, nats a sequence).

    Fixed without `config.kl_target`. Otherwise the proportional controller of Ziegler et al. 2019
    (arXiv:1909.08593, section 2.2), with the step of its published code:

        e = clip(kl / target - 1, -0.2, 0.2)        coef <- coef (1 + e episodes / horizon)

    A KL that is not finite leaves the coefficient as it is.
    """
    if config.kl_target is None:
        return state
    if episodes >= 5 * config.kl_horizon:
        raise ValueError(f"kl_horizon={config.kl_horizon:g} must exceed a fifth of the {episodes} episodes of a batch")
    error = jnp.clip(kl / config.kl_target - 1, -0.2, 0.2)
    coef = state.coef * (1 + error * (episodes / config.kl_horizon))
    return KLState(jnp.where(jnp.isfinite(kl), coef, state.coef))


def experience_metrics(experience: Experience, samples: int | None = None) -> dict[str, Float[Array, ""]]:
    """Metrics of a batch of experience, under verl's names where it has one. Pure and jittable.

    Means over tokens weigh each response token alike; a score, a reward and a length is one number a sequence. Rows
    that are excluded count in the lengths and the scores only; critic/score is of finite ones, and
    critic/score/nonfinite the number of the others. Fields that are None have no metrics.

    With `samples`, the number of rows in a group: group/zero_std, the share of groups whose scores are all equal (TRL's
    frac_reward_zero_std), and group/score_std, the mean of their deviations, both by `advantages.group_spread` of the
    rows that count. With importance weights:
    rollout_corr/rollout_is_{mean,std,max,min}, rollout_corr/rollout_is_eff_sample_size (a share), and the estimates of
    KL(rollout, old) a token rollout_corr/kl and rollout_corr/k3_kl. Names are verl's; it takes a biased deviation, of
    sequence weights the extremes before they are truncated, and does not stop k3's exponent, which is at most 20 here.
    """
    mask = experience.response_mask
    learned = jnp.any(mask, axis=1)
    all_rows = jnp.ones_like(learned)
    gap = jnp.where(mask, jnp.abs(experience.logprobs - experience.old_logprobs), 0)
    metrics = {
        **_spread("critic/score", experience.scores, jnp.isfinite(experience.scores)),
        "critic/score/nonfinite": jnp.sum(~jnp.isfinite(experience.scores), dtype=jnp.float32),
        **_spread("critic/rewards", masked_sum(experience.rewards, mask, axis=1), learned),
        **_spread("critic/advantages", experience.advantages, mask),
    }
    for name, x in (("returns", experience.returns), ("values", experience.values)):
        if x is not None:
            metrics |= _spread(f"critic/{name}", x, mask)
    metrics |= {
        **_spread("response_length", experience.response_lengths.astype(jnp.float32), all_rows),
        "response_length/clip_ratio": jnp.mean(~experience.finished, dtype=jnp.float32),
        **_spread("prompt_length", experience.prompt_lengths.astype(jnp.float32), all_rows),
        "objective/entropy": masked_mean(masked_sum(-experience.old_logprobs, mask, axis=1), learned),
        "rollout/logprob_gap_mean": masked_mean(gap, mask),
        "rollout/logprob_gap_max": jnp.max(gap),
    }
    if experience.ref_logprobs is not None:
        token_kl = masked_mean(experience.old_logprobs - experience.ref_logprobs, mask, axis=1)
        metrics["objective/kl"] = sequence_kl(experience)
        metrics["actor/reward_kl_penalty"] = masked_mean(token_kl, learned)
    if samples is not None:
        std, equal = group_spread(experience.scores, samples, learned)
        metrics["group/zero_std"] = jnp.mean(equal, dtype=jnp.float32)
        metrics["group/score_std"] = jnp.mean(std)
    if experience.importance is not None:
        metrics |= _importance_metrics(experience, experience.importance)
    return metrics


def _importance_metrics(experience: Experience, weights: Array) -> dict[str, Array]:
    mask = experience.response_mask
    spread = _spread("rollout_corr/rollout_is", weights, mask)
    mean = masked_mean(weights, mask)
    d = jnp.where(mask, experience.old_logprobs - experience.logprobs, 0)
    return {
        **{name.replace("is/", "is_"): x for name, x in spread.items()},
        "rollout_corr/rollout_is_std": jnp.sqrt(masked_variance(weights, mask)),
        "rollout_corr/rollout_is_eff_sample_size": mean**2 / jnp.maximum(masked_mean(weights**2, mask), 1e-20),
        "rollout_corr/kl": masked_mean(-d, mask),
        "rollout_corr/k3_kl": masked_mean(jnp.expm1(jnp.minimum(d, LOG_RATIO_LIMIT)) - d, mask),
    }


def age_metrics(experience: Experience, ages: Int[Array, "B T"]) -> dict[str, Float[Array, ""]]:
    """Metrics of tokens drawn by weights `ages` versions before those that learn, under verl's names where it has one.

    Of the rows that count: training/off_policy/trajectory_spans, the versions from a row's oldest to its newest token,
    both included; trajectory_staleness and trajectory_staleness_worst, the ages of its newest and of its oldest token.
    Of response tokens: training/off_policy/token_staleness. Mean, max and min of all.
    """
    mask = experience.response_mask
    ages = ages.astype(jnp.float32)
    newest = jnp.min(jnp.where(mask, ages, jnp.inf), axis=1)
    oldest = jnp.max(jnp.where(mask, ages, -jnp.inf), axis=1)
    rows = jnp.any(mask, axis=1)
    return {
        **_spread("training/off_policy/trajectory_spans", oldest - newest + 1, rows),
        **_spread("training/off_policy/trajectory_staleness", newest, rows),
        **_spread("training/off_policy/trajectory_staleness_worst", oldest, rows),
        **_spread("training/off_policy/token_staleness", ages, mask),
    }


def rewarded(
    scored: Scored, config: PolicyConfig, *, other_scores: Array | None = None, kl_sign: int = -1
) -> Experience:
    """The part of an experience that all algorithms share: everything but advantages, values and returns.

    other_scores: further scores of the same rows. They are only checked: a row with a non-finite score is excluded.
    """
    rollout, old_logprobs, ref_logprobs = scored.rollout, scored.old, scored.ref
    rows, time = rollout.tokens.shape
    if config.old_logprobs != "recompute":
        old_logprobs = rollout.logprobs
    if old_logprobs is None:
        raise ValueError(f"old_logprobs=None: they are needed with config.old_logprobs={config.old_logprobs!r}")
    if ref_logprobs is None and config.needs_reference:
        raise ValueError(f"ref_logprobs=None: they are needed with config.kl_coef={config.kl_coef:g}")
    arrays = {"rollout.logprobs": rollout.logprobs, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    _check_shapes((rows, time), **arrays)

    mask = response_mask(rollout.prompt_lengths, rollout.response_lengths, time)
    placed, scores = _placed(scored.scores, mask)
    finite = jnp.isfinite(scores)
    if other_scores is not None:
        finite &= jnp.isfinite(_placed(other_scores, mask)[1])
    if config.truncation == "bootstrap" and scored.scores.ndim < 2:
        placed = jnp.where(rollout.finished[:, None], placed, 0)
    if config.truncation == "mask":
        finite &= rollout.finished
    mask &= finite[:, None]
    old_logprobs = _within(mask, old_logprobs)
    rewards = jnp.where(mask, placed, 0)
    if ref_logprobs is not None:
        ref_logprobs = _within(mask, ref_logprobs)
        if config.kl_in == "reward":
            kl = kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)
            rewards = jnp.where(mask, placed + kl_sign * scored.kl_coef * kl, 0)
    in_loss = config.kl_in == "loss" and config.needs_reference
    return Experience(
        **{item.name: getattr(rollout, item.name) for item in fields(Rollout)},
        scores=scores,
        response_mask=mask,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=None,
        rewards=rewards,
        advantages=jnp.zeros_like(rewards),
        returns=None,
        importance=(
            importance_weights(old_logprobs - rollout.logprobs.astype(jnp.float32), mask, config)
            if config.corrections and config.old_logprobs == "recompute"
            else None
        ),
        kl_coef=jnp.asarray(scored.kl_coef, jnp.float32) if in_loss else None,
    )


def _placed(scores: Array, mask: Bool[Array, "B T"]) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
    """Scores of whole responses or of tokens: at the tokens where they count, and of the responses."""
    rows, time = mask.shape
    _check_shapes((rows,) if scores.ndim < 2 else (rows, time), scores=scores)
    scores = scores.astype(jnp.float32)
    if scores.ndim < 2:
        return jnp.where(last_token_mask(mask), scores[:, None], 0), scores
    placed = jnp.where(mask, scores, 0)
    return placed, jnp.sum(placed, axis=1)


def with_critic(
    experience: Experience, values: Array, bootstrap_values: Array | None, config: PPOConfig, *, prefix: str = ""
) -> Experience:
    """Adds the values of a critic, and the advantages and returns made from them."""
    if config.truncation == "bootstrap" and bootstrap_values is None:
        name = f"{prefix}bootstrap_values"
        raise ValueError(f"truncation='bootstrap' needs {name}: pass them, or choose 'zero' or 'mask'")
    _check_shapes(experience.tokens.shape, **{f"{prefix}values": values})
    _check_shapes(experience.scores.shape, **{f"{prefix}bootstrap_values": bootstrap_values})
    mask = experience.response_mask
    values = _within(mask, values)
    after = jnp.zeros_like(experience.scores)
    if config.truncation == "bootstrap":
        assert bootstrap_values is not None
        after = jnp.where(experience.finished, 0, bootstrap_values.astype(jnp.float32))
    batched = jax.vmap(partial(gae, discount=config.discount, lam=config.gae_lambda))
    advantages, returns = batched(_learned_rewards(experience, config), values, mask, bootstrap_value=after)
    return replace(experience, values=values, advantages=advantages, returns=returns)


def _learned_rewards(experience: Experience, config: PolicyConfig) -> Float[Array, "B T"]:
    """The rewards that advantages are computed from."""
    if not config.whiten_rewards:
        return experience.rewards
    return masked_whiten(experience.rewards, experience.response_mask, shift_mean=False)


def with_advantages(experience: Experience, advantages: Array, config: PolicyConfig) -> Experience:
    """Sets the advantages, whitened with `config.whiten_advantages`."""
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, experience.response_mask)
    return replace(experience, advantages=advantages)


def _within(mask: Array, x: Array) -> Array:
    return jnp.where(mask, x.astype(jnp.float32), 0)


def _spread(name: str, x: Array, mask: Array) -> dict[str, Array]:
    return {f"{name}/{what}": number for what, number in masked_extremes(x, mask).items()}


def _check_shapes(shape: tuple[int, ...], **arrays: Array | None) -> None:
    for name, x in arrays.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, but the rollout's tokens ask for {shape}")
