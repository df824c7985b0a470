"""Shaping of scores, against NumPy loops over what the peers' formulas say, and invariants."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo.config.score import ScoreConfig
from jrlhf.ppo.shaping import RunningMoments, align_scores, shape_scores

ROWS, LIMIT = 7, 12
add = jax.jit(RunningMoments.add)
shape = jax.jit(shape_scores, static_argnames=("config", "max_response"))


def batch(seed=0, scale=1.0, offset=0.0):
    rng = np.random.default_rng(seed)
    scores = (rng.normal(size=ROWS) * scale + offset).astype(np.float32)
    lengths = np.array([1, 5, 8, 9, 10, 11, 12], np.int32)
    finished = np.array([True, True, False, True, True, True, False])
    return jnp.asarray(scores), jnp.asarray(lengths), jnp.asarray(finished)


def run(config, scores, lengths, finished, moments=None):
    moments = RunningMoments.create() if moments is None else moments
    return shape(scores, lengths, finished, moments, config=config, max_response=LIMIT)


def test_the_default_changes_nothing():
    scores, lengths, finished = batch()
    shaped, moments, metrics = run(ScoreConfig(), scores, lengths, finished)
    np.testing.assert_array_equal(shaped, scores)
    jax.tree.map(np.testing.assert_array_equal, moments, RunningMoments.create())
    assert metrics.keys() == {"score/raw/mean"}


def test_penalties_match_the_peers_formulas():
    """TRL: scores[~contain_eos] -= penalty. verl's DAPO manager and OpenRLHF: min(-exceed / buffer * factor, 0)."""
    scores, lengths, finished = batch()
    config = ScoreConfig(missing_eos_penalty=1.5, length_penalty=0.01, overlong_buffer=4, overlong_penalty=0.5)
    shaped, _, metrics = run(config, scores, lengths, finished)
    expected, overlong = [], []
    for score, length, done in zip(np.asarray(scores, np.float64), lengths.tolist(), finished, strict=True):
        overlong.append(min(-(length - (LIMIT - 4)) / 4 * 0.5, 0))
        expected.append(score - (0 if done else 1.5) - 0.01 * length + overlong[-1])
    np.testing.assert_allclose(shaped, expected, rtol=1e-6)
    assert overlong == [0, 0, 0, -0.125, -0.25, -0.375, -0.5]
    np.testing.assert_allclose(metrics["score/missing_eos_penalty"], 1.5 * 2 / 7, rtol=1e-6)
    np.testing.assert_allclose(metrics["score/length_penalty"], 0.01 * np.mean(lengths), rtol=1e-6)
    np.testing.assert_allclose(metrics["score/overlong_penalty"], -np.mean(overlong), rtol=1e-6)


def test_normalisation_is_by_the_moments_of_all_scores_so_far():
    config, moments, seen = ScoreConfig(normalise=True), RunningMoments.create(), []
    for step in range(6):
        scores, lengths, finished = batch(step, scale=1 + step, offset=1000.0)
        shaped, moments, metrics = run(config, scores, lengths, finished, moments)
        seen.extend(np.asarray(scores, np.float64))
        mean, std = np.mean(seen), np.std(seen, ddof=1)
        np.testing.assert_allclose(shaped, (np.asarray(scores) - mean) / std, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(metrics["score/running_mean"], mean, rtol=1e-6)
        np.testing.assert_allclose(metrics["score/running_std"], std, rtol=1e-3)
    assert moments.count == len(seen)


def test_scores_that_are_not_finite_do_not_stay_in_the_moments():
    moments = add(RunningMoments.create(), np.array([1.0, np.nan, 3.0, np.inf, -np.inf], np.float32))
    np.testing.assert_allclose([moments.count, moments.mean, moments.std], [2, 2, np.sqrt(2)], rtol=1e-6)
    empty = add(RunningMoments.create(), np.full(5, np.nan, np.float32))
    jax.tree.map(np.testing.assert_array_equal, empty, RunningMoments.create())


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_any_size_leave_finite_moments_of_those_that_float32_can_square(seed):
    """Against float64, over batches whose scores are of size 1e-3 to 3.4e38; others are counted."""
    draw, moments, own = np.random.default_rng(seed), RunningMoments.create(), []
    for _ in range(4):
        scores = draw.normal(size=ROWS) * 10.0 ** draw.uniform(-3, draw.choice([3, 14, 38.5]), ROWS)
        scores = np.clip(scores, *(np.finfo(np.float32).max * np.array([-1, 1]))).astype(np.float32)
        _, lengths, finished = batch()
        shaped, moments, metrics = run(
            ScoreConfig(normalise=True, clip=5.0), jnp.asarray(scores), lengths, finished, moments
        )
        fit = scores[np.abs(scores) <= 1e15].astype(float)
        own += [*fit]
        assert metrics["score/beyond_moments"] == ROWS - len(fit) and np.isfinite(shaped).all()
        mean, std = float(np.mean(own)), float(np.std(own, ddof=1))
        np.testing.assert_allclose([moments.count, moments.std], [len(own), std], rtol=1e-4)
        np.testing.assert_allclose(moments.mean, mean, rtol=1e-4, atol=1e-6 * std)
        expected = np.clip((scores.astype(float) - mean) / max(std, 1e-4 * max(1, abs(mean))), -5, 5)
        np.testing.assert_allclose(shaped, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_clip_does_not_hide_a_score_that_is_not_finite(normalise):
    scores, lengths, finished = batch()
    bad = scores.at[:3].set(jnp.array([jnp.inf, -jnp.inf, jnp.nan]))
    for given in (bad, jnp.pad(bad[:, None], ((0, 0), (0, LIMIT - 1)))):  # of responses, and of tokens
        shaped, _, metrics = run(ScoreConfig(normalise=normalise, clip=1e-3), given, lengths, finished)
        sums = np.asarray(shaped).reshape(ROWS, -1).sum(1)
        np.testing.assert_array_equal(np.isfinite(sums), np.arange(ROWS) >= 3)
        np.testing.assert_allclose(metrics["score/clip_fraction"], 4 / ROWS, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1234.567, -3e6])
def test_equal_scores_become_0_not_blown_up_rounding(value):
    _, lengths, finished = batch()
    moments = RunningMoments.create()
    for _ in range(3):
        shaped, moments, _ = run(ScoreConfig(normalise=True), jnp.full(ROWS, value), lengths, finished, moments)
        assert np.max(np.abs(shaped)) < 0.01


def test_a_single_score_becomes_0():
    one = [jnp.array([5.0]), jnp.array([3]), jnp.array([True])]
    np.testing.assert_array_equal(run(ScoreConfig(normalise=True), *one)[0], [0])


def test_the_order_is_normalise_clip_penalise():
    scores, lengths, finished = jnp.array([-50.0, 0, 50, 1, 2, 3, 4]), *batch()[1:]
    config = ScoreConfig(normalise=True, clip=1.0, missing_eos_penalty=2.0)
    shaped, _, metrics = run(config, scores, lengths, finished)
    s = np.asarray(scores, np.float64)
    normal = (s - s.mean()) / s.std(ddof=1)
    np.testing.assert_allclose(shaped, np.clip(normal, -1, 1) - 2.0 * ~np.asarray(finished), rtol=1e-5)
    np.testing.assert_allclose(metrics["score/clip_fraction"], np.mean(np.abs(normal) > 1))
    assert np.min(shaped) < -1  # a penalty is not swallowed by the clip


@pytest.mark.parametrize(
    "config",
    [
        ScoreConfig(),
        ScoreConfig(normalise=True, clip=0.9, missing_eos_penalty=1.0, length_penalty=0.1, overlong_buffer=6),
    ],
)
def test_scores_of_tokens_add_up_to_the_shaped_sum_and_scale_alike(config):
    rng = np.random.default_rng(1)
    _, lengths, finished = batch()
    tokens = rng.normal(size=(ROWS, LIMIT + 2)).astype(np.float32)
    inside = np.arange(LIMIT + 2)[None] < np.asarray(lengths)[:, None]
    given = jnp.asarray(np.where(inside, tokens, np.nan))  # what is beyond a response has no influence
    shaped, moments, metrics = run(config, given, lengths, finished)
    sums = jnp.asarray(np.where(inside, tokens, 0).sum(1))
    expected, same, same_metrics = run(config, sums, lengths, finished)
    np.testing.assert_allclose(shaped.sum(1), expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), (moments, metrics), (same, same_metrics))
    assert not np.any(np.asarray(shaped)[~inside])
    before_last = np.arange(LIMIT + 2)[None] < np.asarray(lengths)[:, None] - 1
    factor = 1 / np.asarray(moments.std) if config.normalise else 1
    np.testing.assert_allclose(np.asarray(shaped)[before_last], tokens[before_last] * factor, rtol=1e-5)


def test_aligned_scores_stand_at_their_tokens():
    scores = jnp.arange(1.0, 9.0).reshape(2, 4)
    expected = [[0, 1, 2, 3, 4, 0], [0, 0, 0, 0, 5, 6]]
    np.testing.assert_array_equal(jax.jit(align_scores, static_argnums=2)(scores, jnp.array([1, 4]), 6), expected)


def test_what_does_not_fit_is_named():
    bad: dict[str, list[Any]] = {"clip": [0.0, math.nan], "missing_eos_penalty": [-1.0], "length_penalty": [math.inf]}
    bad |= {"overlong_penalty": [math.nan], "overlong_buffer": [0, 1.5, 0.0, True]}
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name}={value}"):
                setting: dict[str, Any] = {name: value}
                ScoreConfig(**setting)
    scores, lengths, finished = batch()
    with pytest.raises(ValueError, match="overlong_buffer=13.* at most max_response=12"):
        run(ScoreConfig(overlong_buffer=13), scores, lengths, finished)
    with pytest.raises(ValueError, match=r"scores has shape \(6,\)"):
        run(ScoreConfig(), scores[:6], lengths, finished)


@pytest.mark.usefixtures("strict_dtypes")
def test_no_silent_promotion():
    scores, lengths, finished = batch()
    config = ScoreConfig(normalise=True, clip=1.0, missing_eos_penalty=1.0, length_penalty=0.1, overlong_buffer=6)
    for given in (scores, jnp.ones((ROWS, LIMIT))):
        shaped, moments, _ = run(config, given.astype(jnp.bfloat16), lengths, finished)
        assert shaped.dtype == moments.mean.dtype == jnp.float32


def test_a_buffer_may_be_a_share_of_the_limit():
    assert ScoreConfig(overlong_buffer=0.2).overlong_tokens(20480) == 4096  # DAPO's
    assert ScoreConfig(overlong_buffer=0.001).overlong_tokens(LIMIT) == 1
    scores, lengths, finished = batch()
    share, tokens = (run(ScoreConfig(overlong_buffer=x), scores, lengths, finished) for x in (0.25, LIMIT // 4))
    jax.tree.map(np.testing.assert_array_equal, share, tokens)
