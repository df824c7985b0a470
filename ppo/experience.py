"""Makes experience from a rollout, its scores and log-probs: rewards, advantages, returns. Pure functions, jittable.

All algorithms start with the same rewards of a response's tokens:

    r_t = -kl_coef * kl_t at every token, if the KL is in the reward        r_last += score

so that a row's rewards sum to score - kl_coef * sum_t kl_t (Ouyang et al. 2022, arXiv:2203.02155, eq. 2). The score
belongs to the last response token whether the row is finished or not; scores of tokens are added at their tokens. A row
without any response token has no rewards. `config.truncation` decides what follows a row that was cut off. With
"bootstrap" the critic's value after such a row replaces its score: it estimates this very score, which must not count
twice. Scores that are given for tokens all stay, because what a response adds to them cannot be told apart. No return
is a target of that value itself.

Shared arguments:
    scores: one per sequence, or one per token, read at response tokens only.
    old_logprobs: log-probs under the actor before its update, read at response tokens only, like all [B, T] arrays.
        They may be None unless `config.old_logprobs` is "recompute": then those of the rollout are used.
    ref_logprobs: log-probs under the reference; they may be None where `config.needs_reference` is False.
    kl_coef: beta now, the coefficient of the KL controller. If the KL is in the loss, the experience carries it there.
        `config.kl_coef` only says whether there is a KL, and so a reference.
All functions raise ValueError for arrays that do not fit or are None where the config needs them, and, outside of
`jax.jit`, for lengths that exceed a row and a positive kl_coef without effect; TypeError for arguments of another class
or dtype, such as another algorithm's config. On a mesh with Explicit axes, under `jax.set_mesh`, all arrays get their
rows divided as those of `rollout.tokens`.

With `config.corrections` the experience has weights of the policy loss, `off_policy.importance_weights` of pi_old /
pi_rollout, for a rollout whose numbers or weights differ from the trainer's (verl's rollout_correction). A token or row
of weight 0 keeps its place in returns, values, whitening and the statistics of its group; verl removes it from the
response mask first, and with it, from PPO's returns, a score at a masked last token. With `config.whiten_rewards` PPO
and REINFORCE++ compute advantages from whitened rewards, while `Experience.rewards` are those above.

A row that `truncation="mask"` excludes counts in no statistic, neither of the batch nor of its group. (verl and TRL
exclude such rows from the loss, but not their scores from the group's statistics.) The same holds for the rows that
`equal_groups="drop"` excludes, and for a row whose score, cost or baseline is not finite: it cannot teach, and
whitening would carry its NaN to every other row.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from jrlhf.meshes.rows import divided_like, row_axes
from jrlhf.ppo.advantages import best_of_group, group_advantages, group_spread
from jrlhf.ppo.config.algorithms import GRPOConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.losses import kl_estimate
from jrlhf.ppo.masked import last_token_mask, masked_mean, masked_sum, masked_whiten, response_mask, spread
from jrlhf.ppo.off_policy import importance_metrics, importance_weights
from jrlhf.ppo.types import Coefficient, Experience, KLState, Logprobs, Rollout, Scores, check_class, check_shapes


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

    scores: one per row or per token. old_logprobs: under the actor before its update; None: the rollout's.
    ref_logprobs: under the reference; None without a KL penalty. kl_coef: its coefficient now, as in `make_experience`.

    Raises ValueError for arrays that do not fit or a kl_coef without effect; TypeError for another class or dtype.

    `help(jrlhf.ppo.experience)` has the formulas.
    """
    check_class("config", config, GRPOConfig)
    experience = rewarded(rollout, scores, old_logprobs, ref_logprobs, kl_coef, config)
    mask = experience.response_mask
    advantages = group_advantages(
        jnp.sum(experience.rewards, axis=1),
        config.samples,
        baseline=config.baseline,
        divide_by_std=config.divide_by_std,
        mask=jnp.any(mask, axis=1),
    )
    return with_advantages(experience, jnp.where(mask, advantages[:, None], 0), config)


@partial(jax.jit, static_argnames="config")
def bare_experience(rollout: Rollout, scores: Scores | None = None, *, config: PolicyConfig) -> Experience:
    """The experience of a rollout for losses that need no advantages: it has none. scores: None: they are 0.

    The old log-probs are the rollout's. Raises ValueError if the config has a KL to a reference.
    """
    if config.needs_reference:
        raise ValueError(
            f"kl_coef={config.kl_coef:g} needs log-probs of a reference, which a rollout alone has not: set it to 0, "
            "or make experience"
        )
    scores = 0.0 * rollout.prompt_lengths if scores is None else scores  # divided over devices as the rows are
    experience = rewarded(rollout, scores, rollout.logprobs, None, 0.0, config, compares=False)
    return replace(experience, advantages=None)


def make_best_experience(rollout: Rollout, scores: Scores, *, config: GRPOConfig) -> Experience:
    """The experience of the response with the highest score to each prompt: only its tokens are learned from.

    For losses that need no advantages, such as `token_losses.imitation` (RAFT); otherwise as `bare_experience`.
    """
    check_class("config", config, GRPOConfig)
    experience = bare_experience(rollout, scores, config=config)
    best = best_of_group(experience.scores, config.samples, jnp.any(experience.response_mask, axis=1))
    return replace(experience, response_mask=experience.response_mask & best[:, None])


def where_chosen(experience: Experience, *, chosen: Callable[..., Array], config: PolicyConfig) -> Experience:
    """The experience in which only some rows are learned from: those of the mask [B] `chosen(experience, config)`.

    The others keep their place in what was computed before, such as the statistics of their group. Where the mesh's
    axes are Explicit, they are Auto inside `chosen`. Raises ValueError for a mask of another shape or dtype.
    """
    mask = experience.response_mask

    def rows(experience: Experience) -> Bool[Array, "B"]:
        result = chosen(experience, config)
        if result.shape != mask.shape[:1] or result.dtype != jnp.bool_:
            raise ValueError(f"the mask of rows is {result.dtype}{list(result.shape)}: it must be bool{[len(mask)]}")
        return result

    axes: Any = row_axes(mask)
    auto: Any = rows if axes is None else jax.sharding.auto_axes(rows, out_sharding=jax.P(axes))
    return replace(experience, response_mask=mask & auto(experience)[:, None])


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

    Raises ValueError for a horizon that the number of episodes exceeds.
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
    that `truncation` or `equal_groups` excludes count in the lengths and the scores only, and those that are not
    `valid` nowhere: critic/score/nonfinite is their number. Fields that are None have no metrics.

    With `samples`, the number of rows in a group: group/zero_std, the share of groups whose scores are all equal (TRL's
    frac_reward_zero_std), and group/score_std, the mean of their deviations, both by `advantages.group_spread` of the
    rows that count. With importance weights:
    rollout_corr/rollout_is_{mean,std,max,min}, rollout_corr/rollout_is_eff_sample_size (a share), and the estimates of
    KL(rollout, old) a token rollout_corr/kl and rollout_corr/k3_kl. Names are verl's; it takes a biased deviation, of
    sequence weights the extremes before they are truncated, and does not stop k3's exponent, which is at most 20 here.
    """
    mask = experience.response_mask
    learned = jnp.any(mask, axis=1)
    gap = jnp.where(mask, jnp.abs(experience.logprobs - experience.old_logprobs), 0)
    metrics, scores = {}, experience.scores
    if experience.advantages is not None:  # otherwise nothing was computed from the scores
        metrics |= spread("critic/score", scores, experience.valid)
        metrics["critic/score/nonfinite"] = jnp.sum(~experience.valid, dtype=jnp.float32)
        metrics |= spread("critic/rewards", masked_sum(experience.rewards, mask, axis=1), learned)
    for name in ("advantages", "returns", "values"):
        if (x := getattr(experience, name)) is not None:
            metrics |= spread(f"critic/{name}", x, mask)
    metrics |= {
        **spread("response_length", experience.response_lengths.astype(jnp.float32), experience.valid),
        "response_length/clip_ratio": masked_mean((~experience.finished).astype(jnp.float32), experience.valid),
        **spread("prompt_length", experience.prompt_lengths.astype(jnp.float32), experience.valid),
        "objective/entropy": masked_mean(masked_sum(-experience.old_logprobs, mask, axis=1), learned),
        "rollout/logprob_gap_mean": masked_mean(gap, mask),
        "rollout/logprob_gap_max": jnp.max(gap),
    }
    if experience.ref_logprobs is not None:
        token_kl = masked_mean(experience.old_logprobs - experience.ref_logprobs, mask, axis=1)
        metrics["objective/kl"] = sequence_kl(experience)
        metrics["actor/reward_kl_penalty"] = masked_mean(token_kl, learned)
    if samples is not None and experience.advantages is not None:
        std, equal = group_spread(scores, samples, learned)
        metrics["group/zero_std"] = jnp.mean(equal, dtype=jnp.float32)
        metrics["group/score_std"] = jnp.mean(std)
    if experience.importance is not None:
        metrics |= importance_metrics(experience, experience.importance)
    return metrics


def rewarded(
    rollout: Rollout,
    scores: Scores,
    old_logprobs: Logprobs | None,
    ref_logprobs: Logprobs | None,
    kl_coef: Coefficient,
    config: PolicyConfig,
    *,
    other_scores: Array | None = None,
    kl_sign: int = -1,
    compares: bool = True,
) -> Experience:
    """The part of an experience that all algorithms share: everything but advantages, values and returns.

    other_scores: further scores of the same rows. They are only checked: a row with a non-finite score is excluded.
    compares: whether advantages will compare the rows of a group; then `equal_groups` counts.
    """
    check_class("rollout", rollout, Rollout)
    check_class("config", config, PolicyConfig)
    _check_rows(rollout)
    rows, time = rollout.tokens.shape
    if config.old_logprobs != "recompute":
        old_logprobs = rollout.logprobs
    if old_logprobs is None:
        raise ValueError(f"old_logprobs=None: they are needed with config.old_logprobs={config.old_logprobs!r}")
    if ref_logprobs is None and config.needs_reference:
        raise ValueError(f"ref_logprobs=None: config.kl_coef={config.kl_coef:g} needs them, whatever kl_coef is passed")
    unused = not config.needs_reference and (ref_logprobs is None or config.kl_in == "loss")
    if unused and isinstance(kl_coef, int | float | np.number) and kl_coef > 0:  # an array's number would be waited for
        raise ValueError(f"kl_coef={float(kl_coef):g} has no effect with config.kl_coef=0: set both, or pass 0")
    arrays = {"rollout.logprobs": rollout.logprobs, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    for name, x in arrays.items():
        if (shape := getattr(x, "shape", None)) == (time,):
            raise ValueError(f"{name} has shape {shape}, that of one row: a logprob_fn must return a pair of [B, T]")
    check_shapes((rows, time), **arrays)

    mask = divided_like(rollout.tokens, response_mask(rollout.prompt_lengths, rollout.response_lengths, time))
    placed, sums = _placed(scores, mask)
    finite = jnp.isfinite(sums)
    if other_scores is not None:
        finite &= jnp.isfinite(_placed(other_scores, mask)[1])
        sums = jnp.where(finite, sums, jnp.nan)
    if config.truncation == "bootstrap" and scores.ndim < 2:
        placed = jnp.where(rollout.finished[:, None], placed, 0)
    finite &= config.counts(rollout.finished)
    if compares and isinstance(config, GRPOConfig) and config.equal_groups == "drop":
        _, equal = group_spread(sums, config.samples, finite & jnp.any(mask, axis=1))
        finite &= jnp.zeros_like(finite) | ~jnp.repeat(equal, config.samples)
    mask &= finite[:, None]
    old_logprobs = within(mask, old_logprobs)
    rewards = jnp.where(mask, placed, 0)
    if ref_logprobs is not None:
        ref_logprobs = within(mask, ref_logprobs)
        if config.kl_in == "reward":
            kl = kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)
            rewards = jnp.where(mask, placed + kl_sign * kl_coef * kl, 0)
    return Experience(
        **{item.name: getattr(rollout, item.name) for item in fields(Rollout)},
        scores=sums,
        response_mask=mask,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=None,
        rewards=rewards,
        advantages=jnp.zeros_like(rewards),
        returns=None,
        importance=(
            importance_weights(old_logprobs - rollout.logprobs.astype(jnp.float32), mask, config)
            if config.weighs_in_experience
            else None
        ),
        kl_coef=jnp.asarray(kl_coef, jnp.float32) if config.kl_in_loss else None,
    )


def _check_rows(rollout: Rollout) -> None:
    """Raises TypeError or ValueError for arrays of another shape or dtype, and for lengths that are no row's."""
    if getattr(rollout.tokens, "ndim", 0) != 2 or not jnp.issubdtype(rollout.tokens.dtype, jnp.integer):
        raise TypeError("rollout.tokens must be an array [B, T] of integers")
    rows, time = rollout.tokens.shape
    kinds = {"prompt_lengths": jnp.integer, "response_lengths": jnp.integer, "finished": jnp.bool_}
    for name, kind in kinds.items():
        x = getattr(rollout, name)
        if x is None:  # which `check_shapes` takes for an array that is not needed
            raise TypeError(f"rollout.{name}=None: it must be an array [B]")
        check_shapes((rows,), **{f"rollout.{name}": x})
        if not jnp.issubdtype(x.dtype, kind):
            raise TypeError(f"rollout.{name} has dtype {x.dtype}, but must be {kind.__name__.strip('_')}")
    lengths = rollout.prompt_lengths, rollout.response_lengths
    if all(map(_readable, lengths)):
        prompts, responses = map(np.asarray, lengths)
        for row in np.flatnonzero((prompts < 1) | (responses < 0) | (prompts + responses > time)):
            given = f"row {row} has prompt_lengths {prompts[row]} and response_lengths {responses[row]}: they"
            raise ValueError(f"{given} must be at least 1 and at least 0, together at most T={time}")


def _readable(x: Any) -> bool:
    """Whether the numbers of an array can be read here: it is not traced, nor in other processes."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _placed(scores: Array, mask: Bool[Array, "B T"]) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
    """Returns the scores at the tokens where they count [B, T], and their sum for each response [B]."""
    check_shapes(mask.shape[:1], mask.shape, scores=scores)
    scores = divided_like(mask, scores.astype(jnp.float32))
    if scores.ndim < 2:
        return jnp.where(last_token_mask(mask), scores[:, None], 0), scores
    placed = jnp.where(mask, scores, 0)
    return placed, jnp.sum(placed, axis=1)


def with_advantages(experience: Experience, advantages: Array, config: PolicyConfig) -> Experience:
    """Sets the advantages, whitened with `config.whiten_advantages`."""
    return whitened(replace(experience, advantages=advantages), config)


def whitened(experience: Experience, config: PolicyConfig) -> Experience:
    """Whitens the advantages with `config.whiten_advantages`."""
    if not config.whiten_advantages:
        return experience
    assert experience.advantages is not None
    return replace(experience, advantages=masked_whiten(experience.advantages, experience.response_mask))


def within(mask: Array, x: Array) -> Array:
    return jnp.where(mask, divided_like(mask, x.astype(jnp.float32)), 0)
