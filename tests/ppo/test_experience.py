from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import (
    Experience,
    GRPOConfig,
    PPOConfig,
    Rollout,
    experience_metrics,
    gae,
    make_experience,
    make_group_experience,
    make_return_experience,
    response_mask,
)

pytestmark = pytest.mark.usefixtures("strict_dtypes")

ROWS, TIME, EOS, MASKED = 6, 10, 3, PPOConfig(truncation="mask")
compiled = jax.jit(make_experience, static_argnames="config")


def inputs(seed=0):
    """A rollout in which the pad is the end-of-sequence token, and what the models say about it."""
    rng = np.random.default_rng(seed)
    prompt_lengths, response_lengths = np.array([1, 3, 4, 2, 4, 1]), np.array([6, 1, 6, 3, 2, 9])
    clock, ends = np.arange(TIME)[None], (prompt_lengths + response_lengths)[:, None]
    tokens = np.where(clock < ends - 1, rng.integers(0, 9, (ROWS, TIME)), EOS)
    logprobs, old, ref = -rng.exponential(size=(3, ROWS, TIME)).astype(np.float32)
    rollout = Rollout(
        tokens=jnp.asarray(tokens, jnp.int32),
        prompt_lengths=jnp.asarray(prompt_lengths, jnp.int32),
        response_lengths=jnp.asarray(response_lengths, jnp.int32),
        logprobs=jnp.asarray(logprobs),
        finished=jnp.array([True, True, False, True, True, False]),
        version=jnp.int32(5),
    )
    values, after = rng.normal(size=(ROWS, TIME)).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)
    scores = jnp.array([0.4, -1.2, 0.4, 0.0, 2.5, 0.1])
    return rollout, (scores, jnp.asarray(old), jnp.asarray(ref), jnp.asarray(values)), jnp.asarray(after)


def test_scores_of_tokens_are_conserved_and_stand_at_their_tokens_also_in_a_row_that_is_bootstrapped():
    rollout, (_, old, ref, values), after = inputs()
    tokens = np.random.default_rng(3).normal(size=(ROWS, TIME)).astype(np.float32) / 3
    inside = np.asarray(response_mask(rollout.prompt_lengths, rollout.response_lengths, TIME))
    given = jnp.asarray(np.where(inside, tokens, np.nan))  # garbage elsewhere
    build = partial(compiled, config=PPOConfig(truncation="bootstrap", kl_estimator="k2"), bootstrap_values=after)
    experience = build(rollout, given, old, ref, values, kl_coef=jnp.float32(0.3))
    np.testing.assert_allclose(experience.scores, np.where(inside, tokens, 0).sum(1), rtol=1e-5)
    kl = (np.asarray(old, np.float64) - np.asarray(ref)) ** 2 / 2
    np.testing.assert_allclose(experience.rewards, np.where(inside, tokens - 0.3 * kl, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("truncation", ["bootstrap", "mask"])
def test_truncation(truncation):
    rollout, (scores, old, ref, values), after = inputs()
    config = PPOConfig(truncation=truncation, discount=0.9, gae_lambda=0.8, whiten_advantages=False)
    given = after if truncation == "bootstrap" else None
    rollouts = rollout, replace(rollout, finished=jnp.ones(ROWS, bool))
    build = partial(compiled, config=config, kl_coef=0.1, bootstrap_values=given)
    experience, whole = jax.device_get([build(drawn, scores, old, ref, values) for drawn in rollouts])
    one = jax.jit(partial(gae, discount=0.9, lam=0.8))
    for row in range(ROWS):
        if not rollout.finished[row] and truncation == "mask":
            for array in (experience.response_mask, experience.rewards, experience.advantages, experience.returns):
                assert not np.any(array[row])
            continue
        bootstrap, rewards = np.float32(0), np.array(whole.rewards[row])
        if truncation == "bootstrap" and not rollout.finished[row]:
            bootstrap, last = after[row], int(rollout.prompt_lengths[row] + rollout.response_lengths[row]) - 1
            rewards[last] -= scores[row]  # the value replaces it
            assert experience.scores[row] == scores[row] != 0
        expected = one(rewards, whole.values[row], whole.response_mask[row], bootstrap_value=bootstrap)
        np.testing.assert_allclose(experience.advantages[row], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(experience.returns[row], expected[1], rtol=1e-5, atol=1e-6)
        assert experience.response_mask[row].sum() == rollout.response_lengths[row]


def test_a_row_with_a_score_that_is_not_finite_is_left_out_and_the_others_stay():
    """Scores of tokens; `test_algorithms.py` has scores of responses."""
    rollout, (scores, old, ref, values), _ = inputs()
    build = partial(compiled, config=PPOConfig(whiten_rewards=True), kl_coef=0.1)
    at = int(rollout.prompt_lengths[2])
    given = np.eye(TIME, dtype=np.float32)[at] * np.asarray(scores)[:, None]
    others = (np.arange(ROWS) != 2).astype(np.int32)
    alone = build(replace(rollout, response_lengths=rollout.response_lengths * others), given, old, ref, values)
    spoiled_scores = given.copy()
    spoiled_scores[2, at] = np.inf
    spoiled = build(rollout, spoiled_scores, old, ref, values)
    for name in ("response_mask", "rewards", "advantages", "returns", "values"):
        np.testing.assert_array_equal(getattr(spoiled, name), getattr(alone, name), err_msg=name)
    assert not np.isfinite(spoiled.scores[2]) and not spoiled.response_mask[2].any()
    metrics = jax.jit(experience_metrics)(spoiled)
    assert metrics["critic/score/nonfinite"] == 1
    assert all(np.isfinite(value) for value in metrics.values())
    np.testing.assert_allclose(metrics["critic/score/mean"], np.delete(np.asarray(spoiled.scores), 2).mean(), rtol=1e-5)


def test_groups_with_equal_scores_are_dropped_and_the_others_stay():
    """Group 0 has equal scores, group 1 one that counts, and group 2 different ones."""
    rollout, (_, old, ref, _), _ = inputs()
    scores = jnp.array([0.3, 0.3, -1.0, jnp.nan, 2.5, 0.1])
    keep, drop = (
        jax.jit(make_group_experience, static_argnames="config")(
            rollout, scores, old, ref, config=GRPOConfig(samples=2, equal_groups=kind), kl_coef=0.1
        )
        for kind in ("keep", "drop")
    )
    assert keep.response_mask.any(axis=1).tolist() == [True, True, True, False, True, True]
    for name in ("response_mask", "old_logprobs", "ref_logprobs", "rewards", "advantages"):
        assert not getattr(drop, name)[:4].any(), name
        np.testing.assert_array_equal(getattr(drop, name)[4:], getattr(keep, name)[4:], err_msg=name)
    shares = [experience_metrics(experience, 2)["group/zero_std"] for experience in (keep, drop)]
    np.testing.assert_allclose(shares, 2 / 3, rtol=1e-6)


def test_arguments_that_do_not_fit_are_named():
    rollout, (scores, old, ref, values), after = inputs()
    short = replace(rollout, logprobs=rollout.logprobs[:, 1:])
    cut, wide = PPOConfig(truncation="bootstrap"), jnp.pad(values, ((0, 0), (0, 2)))
    late = {"config": cut, "bootstrap_values": after[:, None]}
    column = replace(rollout, prompt_lengths=rollout.prompt_lengths[:, None])
    listed = replace(rollout, tokens=rollout.tokens.tolist())
    own = {"config": PPOConfig(old_logprobs="recompute")}

    def lengths(prompt, response):
        return replace(rollout, prompt_lengths=jnp.full(ROWS, prompt), response_lengths=jnp.full(ROWS, response))

    for arguments, options, message in [
        ((rollout, scores, old, ref, wide), {}, r"values has shape \(6, 12\), .* \(6, 10\)"),
        ((rollout, scores[:5], old, ref, values), {}, r"scores has shape \(5,\)"),
        ((rollout, scores[:, None], old, ref, values), {}, r"scores has shape \(6, 1\), .* \(6,\) or \(6, 10\)$"),
        ((rollout, scores, old[0], ref, values), own, r"old_logprobs .* \(10,\), that of one row: .* return a pair"),
        ((lengths(6, 4.0), scores, old, ref, values), {}, "response_lengths has dtype float32, .* integer$"),
        ((lengths(6.0, 4), scores, old, ref, values), {}, "prompt_lengths has dtype float32, .* integer$"),
        (
            (lengths(6, 5), scores, old, ref, values),
            {},
            r"row 0 .* prompt_lengths 6 .* response_lengths 5: .* at most T=10$",
        ),
        ((lengths(0, 5), scores, old, ref, values), {}, r"row 0 has prompt_lengths 0 and .* at least 1"),
        ((lengths(6, -1), scores, old, ref, values), {}, r"response_lengths -1: .* at least 0"),
        ((replace(rollout, finished=scores), scores, old, ref, values), {}, "finished has dtype float32, .* bool$"),
        ((rollout, jnp.zeros((ROWS, TIME - 1)), old, ref, values), {}, r"scores has shape \(6, 9\), .* \(6, 10\)"),
        ((short, scores, old, ref, values), {}, r"rollout.logprobs has shape \(6, 9\), .* \(6, 10\)"),
        ((rollout, scores, old, ref, values), late, r"bootstrap_values has shape \(6, 1\), .* \(6,\)"),
        ((rollout, scores, old, ref, values), {"config": cut}, "needs bootstrap_values"),
        ((rollout, scores, None, ref, values), {}, "old_logprobs=None"),
        ((rollout, scores, old, None, values), {}, "ref_logprobs=None"),
        ((rollout, scores, old, ref, None), {}, "^values=None: a critic's experience needs them"),
        ((column, scores, old, ref, values), {}, r"rollout.prompt_lengths has shape \(6, 1\), .* \(6,\)"),
        ((replace(rollout, finished=True), scores, old, ref, values), {}, "rollout.finished is of class bool"),
        ((listed, scores, old, ref, values), {}, r"rollout.tokens must be an array \[B, T\] of integers"),
        ((replace(rollout, tokens=values), scores, old, ref, values), {}, r"rollout.tokens must be an array"),
        ((rollout, scores, (old, old), ref, values), {}, r"old_logprobs is of class tuple.* \(6, 10\)"),
        (("rollout", scores, old, ref, values), {}, "rollout is of class str, but must be of class Rollout"),
        ((rollout, scores, old, ref, values), {"config": GRPOConfig()}, "config is of class GRPOConfig, .* PPOConfig"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            given = {"config": PPOConfig(), **options}
            make_experience(*arguments, kl_coef=0.1, **given)
    for make in (make_group_experience, make_return_experience):
        with pytest.raises(TypeError, match="config is of class PPOConfig"):
            make(rollout, scores, old, ref, config=PPOConfig(), kl_coef=0.1)  # pyright: ignore[reportArgumentType]


def test_a_coefficient_that_would_have_no_effect_is_refused_where_it_can_be_read():
    rollout, (scores, old, ref, values), _ = inputs()
    make = partial(make_experience, rollout, scores, old, values=values)
    none, in_loss = PPOConfig(kl_coef=0.0), PPOConfig(kl_coef=0.0, kl_in="loss", kl_estimator="k3")
    for coefficient in (0.5, np.float64(0.5)):
        for config, given in ((none, None), (in_loss, ref)):
            with pytest.raises(ValueError, match=r"^kl_coef=0.5 has no effect with config.kl_coef=0: set both"):
                make(ref_logprobs=given, config=config, kl_coef=coefficient)
            make(ref_logprobs=given, config=config, kl_coef=0.0)
    with pytest.raises(ValueError, match=r"config.kl_coef=0.05 needs them, whatever kl_coef is passed$"):
        make(ref_logprobs=None, config=PPOConfig(kl_coef=0.05), kl_coef=0.0)
    present, absent = (make(ref_logprobs=ref, config=none, kl_coef=coefficient).rewards for coefficient in (0.5, 0.0))
    assert np.any(present != absent)
    compiled(rollout, scores, old, None, values, config=none, kl_coef=0.5)  # traced: not read
    make(ref_logprobs=None, config=none, kl_coef=jnp.array(0.5))  # would be waited for: not read


def test_advantages_are_whitened_over_all_response_tokens_and_returns_are_not():
    rollout, arrays, _ = inputs()
    build = partial(compiled, rollout, *arrays, kl_coef=0.1)
    raw, white = build(config=replace(MASKED, whiten_advantages=False)), build(config=MASKED)
    selection = np.asarray(raw.advantages, np.float64)[np.asarray(raw.response_mask)]
    expected = (selection - selection.mean()) / selection.std(ddof=1)
    np.testing.assert_allclose(white.advantages[white.response_mask], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(white.returns, raw.returns)


def numpy_metrics(experience: Experience):
    """The metrics' definitions, one sequence at a time."""
    e = jax.tree.map(np.asarray, experience)
    rows = [np.flatnonzero(mask) for mask in e.response_mask]
    learned = [row for row in range(len(rows)) if len(rows[row])]
    gaps = np.concatenate([np.abs(e.logprobs - e.old_logprobs)[row, rows[row]] for row in learned])

    def spread(name, x):
        return {f"{name}/mean": np.mean(x), f"{name}/max": np.max(x), f"{name}/min": np.min(x)}

    def over_tokens(x):
        return np.concatenate([x[row, rows[row]] for row in learned])

    return {
        **spread("critic/score", e.scores),
        "critic/score/nonfinite": 0,
        **spread("critic/rewards", [e.rewards[row].sum() for row in learned]),
        **spread("critic/advantages", over_tokens(e.advantages)),
        **spread("critic/returns", over_tokens(e.returns)),
        **spread("critic/values", over_tokens(e.values)),
        **spread("response_length", e.response_lengths),
        "response_length/clip_ratio": np.mean(~e.finished),
        **spread("prompt_length", e.prompt_lengths),
        "objective/kl": np.mean([(e.old_logprobs - e.ref_logprobs)[row, rows[row]].sum() for row in learned]),
        "objective/entropy": np.mean([-e.old_logprobs[row, rows[row]].sum() for row in learned]),
        "actor/reward_kl_penalty": np.mean(
            [(e.old_logprobs - e.ref_logprobs)[row, rows[row]].mean() for row in learned]
        ),
        "rollout/logprob_gap_mean": gaps.mean(),
        "rollout/logprob_gap_max": gaps.max(),
    }


def test_metrics_match_their_definitions():
    rollout, arrays, _ = inputs(1)
    experience = compiled(rollout, *arrays, config=MASKED, kl_coef=0.1)
    metrics, expected = jax.jit(experience_metrics)(experience), numpy_metrics(experience)
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_batch_of_nothing_but_masked_rows_has_finite_metrics_but_no_kl():
    rollout, arrays, _ = inputs()
    cut_off = replace(rollout, finished=jnp.zeros(ROWS, bool))
    experience = compiled(cut_off, *arrays, config=MASKED, kl_coef=0.1)
    assert not experience.response_mask.any()
    metrics = jax.jit(experience_metrics)(experience)
    assert np.isnan(metrics.pop("objective/kl"))
    assert all(np.isfinite(value) for value in metrics.values())
