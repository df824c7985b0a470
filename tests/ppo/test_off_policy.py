"""Tokens that older weights drew: bounds of their age, and weights. Goldens have masks and CISPO."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import (
    GRPOConfig,
    PolicyConfig,
    TrainState,
    age_metrics,
    experience_metrics,
    importance_weights,
    make_actor_step,
    make_group_experience,
)
from jrlhf.ppo.off_policy import weight_shares, without_older

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")
ROWS, TIME, STEP = 8, 9, 6
by_config = partial(jax.jit, static_argnames="config")
weights_of, shares_of = by_config(importance_weights), by_config(weight_shares)


def drawn_by_many(toy, seed=0):
    """Experience whose tokens were drawn by versions 0 to STEP, and their log-probs under the present weights."""
    experience, rng = toy.experience(ROWS, TIME, seed), np.random.default_rng(seed)
    versions = jnp.asarray(rng.integers(0, STEP + 1, (ROWS, TIME)), jnp.int32)
    return replace(experience, versions=versions), toy.logprobs(toy.params(seed)[0], experience.tokens)[0]


@cache
def step_of(config):
    """A step of a policy that is a table of the tokens' log-probs. The optimizer keeps the gradient as its state."""
    zeros: Any = partial(jax.tree.map, jnp.zeros_like)
    keep: Any = lambda updates, *_: (zeros(updates), updates)  # noqa: E731
    recorder = optax.GradientTransformation(zeros, keep)
    return recorder, make_actor_step(lambda params, _: (params, jnp.zeros_like(params)), recorder, config)


def gradient(config, experience, logprobs):
    """The gradient of the loss by the log-prob of each token, and the step's metrics."""
    recorder, step = step_of(config)
    state = replace(TrainState.create(jnp.array(logprobs), recorder), step=jnp.int32(STEP))
    state, metrics = step(state, experience)
    return np.asarray(state.opt_state), metrics


def test_an_old_token_has_no_part_in_the_policy_loss_but_in_its_denominator(toy):
    experience, logprobs = drawn_by_many(toy)
    mask, fresh = np.asarray(experience.response_mask), STEP - np.asarray(experience.versions) <= 2
    plain, _ = gradient(PolicyConfig(kl_coef=0.0), experience, logprobs)
    bounded, metrics = gradient(PolicyConfig(kl_coef=0.0, staleness=2), experience, logprobs)
    np.testing.assert_array_equal(bounded, np.where(fresh, plain, 0))
    masked = (mask & ~fresh).sum() / mask.sum(), (mask & ~fresh).any(1).sum() / mask.any(1).sum()
    for which, share in zip(("masked_fraction", "seq_masked_fraction"), masked, strict=True):
        np.testing.assert_allclose(metrics[f"rollout_corr/rollout_rs_{which}"], share, rtol=1e-6)
    fewer = replace(experience, response_mask=jnp.asarray(mask & fresh))
    removed, _ = gradient(PolicyConfig(kl_coef=0.0), fewer, logprobs)  # as verl does it
    np.testing.assert_allclose(removed * (mask & fresh).sum() / mask.sum(), bounded, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("cap", [None, 1.0])
def test_full_weight_by_quartile_of_length(toy, cap):
    """Against places in the order of lengths, 400 to a row, which belong to the rows of a length alike."""
    rng, rows, time = np.random.default_rng(3), 10, 12
    lengths = rng.integers(0, 6, rows)  # several rows have one length, and some are empty
    mask = np.arange(time) < lengths[:, None]
    rho = np.where(mask, rng.choice([0.5, 1.0, 2.5], (rows, time)), 1).astype(np.float32)
    weights = np.where(mask & (rng.random((rows, time)) < 0.7), np.minimum(rho, cap or np.inf), 0)
    config = PolicyConfig() if cap is None else PolicyConfig(importance="token", importance_cap=cap)
    arrays = {"importance": weights, "response_mask": mask, "old_logprobs": np.log(rho), "logprobs": 0 * rho}
    experience = replace(toy.experience(rows, time), **jax.tree.map(jnp.asarray, arrays))
    metrics = shares_of(experience, 0 * experience.tokens, config)
    full = mask & (weights != 0) & (rho <= (cap or np.inf))
    truncated = (mask & (weights != 0) & ~full).sum() / mask.sum()
    np.testing.assert_allclose(metrics["rollout_corr/rollout_is_ratio_fraction_high"], truncated, rtol=1e-6)
    pairs = np.array(sorted((mask[row].sum(), row) for row in range(rows) if mask[row].any()))
    shares = np.zeros((4, rows))
    for length in set(pairs[:, 0]):  # the places of rows of one length belong to each of them alike
        places, own = np.flatnonzero(pairs[:, 0] == length), pairs[pairs[:, 0] == length, 1]
        for place in np.arange(400 * places[0], 400 * (places[-1] + 1)):
            shares[int(place * 4 // (400 * len(pairs))), own] += 1 / (400 * len(own))
    assert len(pairs) < rows and len(set(pairs[:, 0])) < len(pairs) and full.sum() < mask.sum()
    for part, share in enumerate(shares, start=1):
        expected = (share @ full.sum(1)) / (share @ mask.sum(1))
        np.testing.assert_allclose(metrics[f"rollout_corr/full_weight/quartile_{part}"], expected, rtol=1e-5)


WHOLE: dict[str, Any] = {
    "sequence": {"importance": "sequence", "importance_cap": 3.0},
    "capped": {"importance": "sequence", "importance_cap": 1.0},
    "mask_sequence": {"mask_sequence": (0.5, 2.0)},
    "mask_sequence_mean": {"mask_sequence_mean": (0.9, 1.2)},
    "mask_k3": {"mask_k3": 0.03},
    "both": {"importance": "sequence", "mask_sequence_mean": (0.9, 1.2), "mask_token": (0.6, 1.7)},
}


@pytest.mark.parametrize("name", WHOLE)
def test_weights_of_whole_responses_leave_out_older_tokens(toy, name):
    """The older tokens are no part of the response, as in the ratios of whole responses."""
    rng, config = np.random.default_rng(5), PolicyConfig(kl_coef=0.0, staleness=1, **WHOLE[name])
    experience = toy.experience(ROWS, TIME)
    mask, ages = np.asarray(experience.response_mask), rng.integers(0, 4, (ROWS, TIME))
    gap = rng.normal(0, 0.3, (ROWS, TIME)).astype(np.float32)
    experience = replace(experience, old_logprobs=experience.logprobs + gap)
    product = weights_of(jnp.asarray(gap), experience.response_mask, config)
    bounded = jax.jit(without_older, static_argnames="config")(replace(experience, importance=product), ages, config)
    fresh = mask & (ages <= 1)
    assert (fresh.sum(1) < mask.sum(1)).any()
    truncated = np.zeros_like(mask)
    for row, (own, counted) in enumerate(zip(gap, fresh, strict=True)):
        whole, n = own[counted].sum(), max(counted.sum(), 1)
        weights = np.ones(TIME)
        if config.importance:
            weights *= min(np.exp(whole), config.importance_cap)
        truncated[row] = counted & (config.importance is not None and np.exp(whole) > config.importance_cap)
        for bounds, statistic in ((config.mask_sequence, whole), (config.mask_sequence_mean, whole / n)):
            if bounds and not bounds[0] <= np.exp(statistic) <= bounds[1]:
                weights *= 0
        if config.mask_token:
            weights *= (config.mask_token[0] <= np.exp(own)) & (np.exp(own) <= config.mask_token[1])
        if config.mask_k3 and (np.exp(own) - 1 - own)[counted].sum() / n > config.mask_k3:
            weights *= 0
        np.testing.assert_allclose(bounded.importance[row], np.where(counted, weights, 0), rtol=1e-5, atol=1e-6)
    share = shares_of(bounded, ages, config)["rollout_corr/rollout_is_ratio_fraction_high"]
    truncated &= np.asarray(bounded.importance) > 0
    np.testing.assert_allclose(share, truncated.sum() / mask.sum(), rtol=1e-5)


def test_without_a_gap_every_weight_is_1_and_full(toy):
    experience = toy.experience(ROWS, TIME)
    experience = replace(experience, logprobs=experience.old_logprobs)
    masks: Any = {"mask_sequence": (0, 1), "mask_sequence_mean": (1, 1), "mask_k3": 1e-9}
    for config in (
        PolicyConfig(importance="token", importance_cap=1.0, mask_token=(0.5, 2)),
        PolicyConfig(importance="sequence", importance_cap=1.0, **masks),
    ):
        weights = weights_of(jnp.zeros((ROWS, TIME)), experience.response_mask, config)
        np.testing.assert_array_equal(weights, experience.response_mask)
        for name, share in shares_of(replace(experience, importance=weights), experience.tokens, config).items():
            assert share == float("full_weight" in name), name


def test_a_weight_that_equals_its_cap_is_not_truncated_where_weights_are_interpolated(toy):
    experience, logprobs = drawn_by_many(toy)
    config = PolicyConfig(kl_coef=0.0, old_logprobs="interpolate", importance="token", importance_cap=1.0)
    experience = replace(experience, old_logprobs=logprobs, versions=jnp.full_like(experience.tokens, STEP - 1))
    assert gradient(config, experience, logprobs)[1]["rollout_corr/rollout_is_ratio_fraction_high"] == 0


def test_k3_is_of_the_ratio_and_not_of_its_inverse():
    """A mean of rho - 1 - log rho: e - 2 = 0.72 where all log-ratios are 1, 1 / e = 0.37 where they are -1."""
    gap, mask = jnp.array([[1.0, 1.0, 9.0], [-1.0, -1.0, 9.0]]), jnp.array([[True, True, False]] * 2)
    for bound, rows in ((0.36, (0, 0)), (0.38, (0, 1)), (0.71, (0, 1)), (0.73, (1, 1))):
        weights = weights_of(gap, mask, PolicyConfig(mask_k3=bound))
        np.testing.assert_array_equal(weights, np.outer(rows, [1, 1, 0]))


def test_masks_and_weights_move_no_advantage(toy):
    e = toy.experience(ROWS, TIME)
    old = e.logprobs + jnp.sin(jnp.arange(TIME, dtype=jnp.float32))[None]
    options: Any = {"kl_coef": 0.0, "importance": "token", "mask_token": (0.7, 1.5), "mask_k3": 0.3}
    plain, make = GRPOConfig(kl_coef=0.0, samples=4), by_config(make_group_experience)
    masked = replace(plain, **options)
    one, other = (make(e, e.scores, old, None, config=c, kl_coef=0.0) for c in (plain, masked))
    weights = np.asarray(other.importance)[np.asarray(e.response_mask)]
    assert one.importance is None and 0.1 < (weights == 0).mean() < 0.9
    for name in ("advantages", "rewards", "response_mask"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    metrics = jax.jit(experience_metrics)(other)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_is_std"], weights.std(ddof=1), rtol=1e-5)


def test_ages_are_counted_a_row_at_a_time(toy):
    experience, _ = drawn_by_many(toy)
    mask = experience.response_mask.at[2].set(False)
    experience = replace(experience, response_mask=mask, versions=jnp.where(mask, experience.versions, -1000))
    metrics = jax.jit(age_metrics)(experience, experience.ages(jnp.int32(STEP)))
    rows = [STEP - np.asarray(v)[np.asarray(m)] for v, m in zip(experience.versions, mask, strict=True) if m.any()]
    expected = {
        "trajectory_spans": [row.max() - row.min() + 1 for row in rows],
        "trajectory_staleness": [row.min() for row in rows],
        "trajectory_staleness_worst": [row.max() for row in rows],
        "token_staleness": np.concatenate(rows),
    }
    names = {"mean": np.mean, "max": np.max, "min": np.min}
    for name, numbers in expected.items():
        for which, of in names.items():
            value = metrics.pop(f"training/off_policy/{name}/{which}")
            np.testing.assert_allclose(value, of(numbers), rtol=1e-6, err_msg=f"{name}/{which}")
    assert not metrics
    np.testing.assert_array_equal(replace(experience, versions=None).ages(jnp.int32(5)), np.full((ROWS, TIME), 2))
