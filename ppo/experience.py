"""From a rollout and what the models say about it to experience: rewards, advantages, returns. Pure; jit it or not.

All begin alike. Of a response's tokens

    r_t = -kl_coef * kl_t, at every one, where the KL is in the reward        r_last += score

so that a row's rewards sum to score - kl_coef * sum_t kl_t (Ouyang et al. 2022, arXiv:2203.02155, eq. 2). The score
lands on the last response token whether the row is finished or not; what follows a row that was cut off is
`config.truncation`'s matter, and with "bootstrap" takes the score's place: the critic's value after such a row is an
estimate of that very score, which must not count twice, and no return is ever a target of that value itself. A row
without any response token has no rewards. Scores of tokens are added where they stand instead, r_t += score_t, and the
sum is the same with score = sum_t score_t. Then each algorithm has its advantages.

Arguments that they share:
    scores: of the whole sequences; or of their tokens, read at response tokens only.
    old_logprobs: the actor's, now (`[:, t]` of the token at t), read at response tokens only, as are all [B, T]. With
        `config.old_logprobs="rollout"` those of the rollout are taken instead, and None will do.
    ref_logprobs: the reference's; None where `config.needs_reference` is False.
    kl_coef: beta, `state.kl.coef` of a `PPOState`. Where the KL is in the loss it goes there with the experience.

With `config.importance`, weights min(pi_old / pi_rollout, importance_cap) go with it too: truncated importance sampling
for a rollout whose numbers differ from the trainer's (verl's rollout_is). With `config.whiten_rewards` the advantages
of PPO and REINFORCE++ are made of whitened rewards, while `Experience.rewards` are those above.

A row that `truncation="mask"` excludes has no part in any statistic: not in a batch's mean and deviation, not in its
group's. (verl and TRL leave such rows out of the loss, and their scores in the group's statistics.) Nor has a row whose
score, cost or baseline is not finite: it cannot teach, and whitening would carry its NaN to every other row.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrlhf.ppo.advantages import gae, group_advantages, group_spread, returns_to_go
from jrlhf.ppo.config import GRPOConfig, PolicyConfig, PPOConfig, ReinforcePPConfig, ReMaxConfig, SafeRLHFConfig
from jrlhf.ppo.kl import kl_estimate
from jrlhf.ppo.losses import LOG_RATIO_LIMIT
from jrlhf.ppo.masked import (
    last_token_mask,
    masked_extremes,
    masked_mean,
    masked_sum,
    masked_variance,
    masked_whiten,
    response_mask,
)
from jrlhf.ppo.minibatches import row_axes
from jrlhf.ppo.types import Experience, Rollout


def make_experience(
    rollout: Rollout,
    scores: Float[Array, "B"] | Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"] | None,
    ref_logprobs: Float[Array, "B T"] | None,
    values: Float[Array, "B T"],
    *,
    config: PPOConfig,
    kl_coef: float | Float[Array, ""],
    bootstrap_values: Float[Array, "B"] | None = None,
) -> Experience:
    """PPO's: advantages and returns by `advantages.gae` from a critic. Arguments as above, and

    Args:
        values: the critic's (`[:, t]` before the token at t).
        bootstrap_values: V after each row's last token. Needed for `truncation="bootstrap"`, read in rows cut off.

    Raises:
        ValueError: `truncation="bootstrap"` without `bootstrap_values`, arrays whose shapes do not fit, or None for
            log-probabilities that the config needs.
    """
    experience = _rewarded(rollout, scores, old_logprobs, ref_logprobs, config=config, kl_coef=kl_coef)
    experience = _estimated(experience, values, bootstrap_values, config)
    return replace(experience, advantages=_whitened(experience.advantages, experience.response_mask, config))


def make_group_experience(
    rollout: Rollout,
    scores: Float[Array, "B"] | Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"] | None,
    ref_logprobs: Float[Array, "B T"] | None,
    *,
    config: GRPOConfig,
    kl_coef: float | Float[Array, ""],
) -> Experience:
    """GRPO's and its kin's: every token of a response has its `advantages.group_advantages`.

    What is compared is the sum of a response's rewards, so the KL counts where it is in the reward (RLOO). Whitening
    (REINFORCE++-baseline) is over all response tokens of the batch, as in verl: long responses weigh more in it.

    Arguments as above; row = prompt * samples + sample.

    Raises:
        ValueError: the rows are no multiple of `config.samples`, arrays whose shapes do not fit, or None for
            log-probabilities that the config needs.
    """
    experience = _rewarded(rollout, scores, old_logprobs, ref_logprobs, config=config, kl_coef=kl_coef)
    mask = experience.response_mask
    of_rows = group_advantages(
        jnp.sum(experience.rewards, axis=1),
        config.samples,
        baseline=config.baseline,
        divide_by_std=config.divide_by_std,
        mask=jnp.any(mask, axis=1),
    )
    advantages = jnp.where(mask, of_rows[:, None], 0)
    return replace(experience, advantages=_whitened(advantages, mask, config))


def make_return_experience(
    rollout: Rollout,
    scores: Float[Array, "B"] | Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"] | None,
    ref_logprobs: Float[Array, "B T"] | None,
    baselines: Float[Array, "B"] | None = None,
    *,
    config: ReinforcePPConfig | ReMaxConfig,
    kl_coef: float | Float[Array, ""],
) -> Experience:
    """REINFORCE++'s and ReMax's: A_t = `advantages.returns_to_go` - baselines[b]. Arguments as above, and

    Args:
        baselines: one a row, the same for all of its tokens: for ReMax the score of the greedy response to its prompt.
            REINFORCE++ has none.

    Raises:
        ValueError: ReMax without `baselines`, arrays whose shapes do not fit, or None for log-probabilities that the
            config needs.
    """
    if baselines is None and isinstance(config, ReMaxConfig):
        raise ValueError("baselines=None: ReMax needs the greedy responses' scores")
    _check_shapes(rollout.prompt_lengths.shape, baselines=baselines)
    experience = _rewarded(rollout, scores, old_logprobs, ref_logprobs, baselines, config=config, kl_coef=kl_coef)
    mask = experience.response_mask
    batched = jax.vmap(partial(returns_to_go, discount=config.discount))
    advantages = batched(_learned_rewards(experience, config), mask)
    if baselines is not None:
        advantages = jnp.where(mask, advantages - baselines.astype(jnp.float32)[:, None], 0)
    return replace(experience, advantages=_whitened(advantages, mask, config))


def make_custom_experience(
    rollout: Rollout,
    scores: Float[Array, "B"] | Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"] | None,
    ref_logprobs: Float[Array, "B T"] | None,
    *others: Any,
    advantages: Callable[..., Array | Mapping[str, Array]],
    config: PolicyConfig,
    kl_coef: float | Float[Array, ""],
) -> Experience:
    """That of an algorithm that is not here: A = `advantages(experience, config, *others)`. Arguments as above, and

    Args:
        advantages: a function of the experience so far, whose advantages are 0 and which has no values or returns. It
            gives the advantages of rows [B] or of tokens [B, T], or several of an experience's fields by their names,
            such as a critic's `values` and `returns`. Where the mesh's axes are Explicit, they are Auto within.
        others: further arrays for it, with a row each.

    What it gives is read at response tokens only; its advantages are whitened where the config says so.

    Raises:
        ValueError: it gives arrays of another shape, arrays whose shapes do not fit, or None for log-probabilities that
            the config needs.
    """
    experience = _rewarded(rollout, scores, old_logprobs, ref_logprobs, config=config, kl_coef=kl_coef)
    mask, rows = experience.response_mask, row_axes(rollout.tokens)

    def fields(experience: Experience, *others: Any) -> dict[str, Array]:
        made = advantages(experience, config, *others)
        named = dict(made) if isinstance(made, Mapping) else {"advantages": made}
        for name, x in named.items():
            if x.shape not in (mask.shape, mask.shape[:1]):
                raise ValueError(f"{name} has shape {x.shape}: it must be {mask.shape[:1]} or {mask.shape}")
        return {name: _within(experience.response_mask, x.reshape(len(x), -1)) for name, x in named.items()}

    if rows is not None:
        fields = jax.sharding.auto_axes(fields, out_sharding=jax.P(rows))
    made = replace(experience, **fields(experience, *others))
    return replace(made, advantages=_whitened(made.advantages, mask, config))


def make_safe_experience(
    rollout: Rollout,
    scores: Float[Array, "B"] | Float[Array, "B T"],
    costs: Float[Array, "B"] | Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"] | None,
    ref_logprobs: Float[Array, "B T"] | None,
    values: Float[Array, "B T"],
    cost_values: Float[Array, "B T"],
    *,
    config: SafeRLHFConfig,
    kl_coef: float | Float[Array, ""],
    multiplier: float | Float[Array, ""],
    bootstrap_values: Float[Array, "B"] | None = None,
    cost_bootstrap_values: Float[Array, "B"] | None = None,
) -> tuple[Experience, Experience]:
    """Safe RLHF's: one stream of rewards and one of costs, each with its critic and its `advantages.gae`.

        A = (A_reward - multiplier A_cost) / (1 + multiplier)

    The KL's penalty enters the rewards as -kl_coef k1 and the costs as +kl_coef k1: in A it has the weight kl_coef for
    any multiplier. (Dai et al. 2024, arXiv:2310.12773, enter half of theirs in each.) Whitening is of A, after
    the two are combined: of each stream on its own it would change the multiplier's meaning and that weight.

    Arguments as above and as in `make_experience`, and

    Args:
        costs: as `scores`, and to be kept below `config.cost_limit`.
        cost_values, cost_bootstrap_values: the cost critic's.
        multiplier: lambda, the `MultiplierState`'s value.

    Returns:
        The first trains the actor and the critic of rewards: A, and that critic's values and returns. The second
        trains the critic of costs: costs as scores and rewards, its values and returns, its own advantages.

    Raises:
        ValueError: as `make_experience`.
    """
    shared = partial(_rewarded, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, config=config, kl_coef=kl_coef)
    reward = shared(rollout, scores, beside=costs)
    cost = shared(rollout, costs, beside=scores, kl_sign=1)
    reward = _estimated(reward, values, bootstrap_values, config)
    cost = _estimated(cost, cost_values, cost_bootstrap_values, config, prefix="cost_")
    advantages = (reward.advantages - multiplier * cost.advantages) / (1 + multiplier)
    return replace(reward, advantages=_whitened(advantages, reward.response_mask, config)), cost


def sequence_kl(experience: Experience) -> Float[Array, ""]:
    """objective/kl: the mean over sequences of the k1 estimates summed over a sequence's response tokens, in nats.

    The convention of Ziegler et al. 2019 (whose controller's target it is), InstructGPT and TRL. verl feeds its
    controller the mean over sequences of the mean over tokens instead, which `experience_metrics` reports under verl's
    name, actor/reward_kl_penalty.

    NaN of a batch of which no row counts, which the controller ignores.

    Raises:
        ValueError: the experience has no reference.
    """
    if experience.ref_logprobs is None:
        raise ValueError("ref_logprobs=None: the KL to a reference needs the reference's log-probabilities")
    mask = experience.response_mask
    d = experience.old_logprobs - experience.ref_logprobs
    learned = jnp.any(mask, axis=1)
    return jnp.where(jnp.any(learned), masked_mean(masked_sum(d, mask, axis=1), learned), jnp.nan)


def experience_metrics(experience: Experience, samples: int | None = None) -> dict[str, Float[Array, ""]]:
    """What to log about a batch of experience, under verl's names where it has one. Pure and jittable.

    Means over tokens weigh each response token alike; a score, a reward and a length is one number a sequence. Rows
    that are excluded count in the lengths and the scores only; critic/score is of finite ones, and
    critic/score/nonfinite the number of the others. What an experience does not have (None) is left out.

    With `samples`, of groups of so many rows: group/zero_std, the share of those whose scores are all equal (TRL's
    frac_reward_zero_std), and group/score_std, the mean of their deviations, both as in
    `advantages.group_spread` of the rows that count. With importance weights, of those:
    rollout_corr/rollout_is_{mean,std,max,min}, rollout_corr/rollout_is_eff_sample_size (a share), and the estimates of
    KL(rollout, old) a token rollout_corr/kl and rollout_corr/k3_kl. Names are verl's; it takes a biased deviation, of
    sequence weights the extremes before they are truncated, and does not stop k3's exponent, which is at most 20 here.
    """
    mask = experience.response_mask
    learned = jnp.any(mask, axis=1)
    everything = jnp.ones_like(learned)
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
        **_spread("response_length", experience.response_lengths.astype(jnp.float32), everything),
        "response_length/clip_ratio": jnp.mean(~experience.finished, dtype=jnp.float32),
        **_spread("prompt_length", experience.prompt_lengths.astype(jnp.float32), everything),
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


def _rewarded(
    rollout: Rollout,
    scores: Array,
    old_logprobs: Array | None,
    ref_logprobs: Array | None,
    beside: Array | None = None,
    *,
    config: PolicyConfig,
    kl_coef: float | Array,
    kl_sign: int = -1,
) -> Experience:
    """What all algorithms' experience has in common: all but advantages, values and returns.

    beside: further scores, which only say by being finite, as `scores` do, which rows count.
    """
    rows, time = rollout.tokens.shape
    if config.old_logprobs == "rollout":
        old_logprobs = rollout.logprobs
    if old_logprobs is None:
        raise ValueError(f"old_logprobs=None: they are needed with config.old_logprobs={config.old_logprobs!r}")
    if ref_logprobs is None and config.needs_reference:
        raise ValueError(f"ref_logprobs=None: they are needed with config.kl_coef={config.kl_coef:g}")
    given = {"rollout.logprobs": rollout.logprobs, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    _check_shapes((rows, time), **given)

    mask, of_rows = response_mask(rollout.prompt_lengths, rollout.response_lengths, time), scores.ndim < 2
    placed, scores = _placed(scores, mask)
    finite = jnp.isfinite(scores)
    if beside is not None:
        finite &= jnp.isfinite(_placed(beside, mask)[1])
    if config.truncation == "bootstrap" and of_rows:
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
            rewards = jnp.where(mask, placed + kl_sign * kl_coef * kl, 0)
    in_loss = config.kl_in == "loss" and config.needs_reference
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
        values=None,
        rewards=rewards,
        advantages=jnp.zeros_like(rewards),
        returns=None,
        importance=_importance(old_logprobs, rollout.logprobs, mask, config),
        kl_coef=jnp.asarray(kl_coef, jnp.float32) if in_loss else None,
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


def _estimated(
    experience: Experience, values: Array, bootstrap_values: Array | None, config: PPOConfig, *, prefix: str = ""
) -> Experience:
    """With advantages, returns and values of a critic."""
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
    """The rewards that advantages are made of."""
    if not config.whiten_rewards:
        return experience.rewards
    return masked_whiten(experience.rewards, experience.response_mask, shift_mean=False)


def _whitened(advantages: Array, mask: Bool[Array, "B T"], config: PolicyConfig) -> Array:
    return masked_whiten(advantages, mask) if config.whiten_advantages else advantages


def _importance(old_logprobs: Array, rollout_logprobs: Array, mask: Array, config: PolicyConfig) -> Array | None:
    """min(pi_old / pi_rollout, importance_cap) of each token, or of each response for all of its tokens."""
    if config.importance is None:
        return None
    log_weight = jnp.where(mask, old_logprobs - rollout_logprobs.astype(jnp.float32), 0)
    if config.importance == "sequence":
        log_weight = jnp.sum(log_weight, axis=1, keepdims=True)
    weight = jnp.exp(jnp.clip(log_weight, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return jnp.where(mask, jnp.minimum(weight, config.importance_cap), 0)


def _within(mask: Array, x: Array) -> Array:
    return jnp.where(mask, x.astype(jnp.float32), 0)


def _spread(name: str, x: Array, mask: Array) -> dict[str, Array]:
    return {f"{name}/{what}": number for what, number in masked_extremes(x, mask).items()}


def _check_shapes(shape: tuple[int, ...], **arrays: Array | None) -> None:
    for name, x in arrays.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, but the rollout's tokens ask for {shape}")
