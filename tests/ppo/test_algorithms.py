"""Experience of the algorithms other than PPO, and Safe RLHF's multiplier, against NumPy a row at a time."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import (
    GRPOConfig,
    MultiplierState,
    ReinforcePPConfig,
    ReMaxConfig,
    Rollout,
    SafeRLHFConfig,
    experience_metrics,
    make_group_experience,
    make_return_experience,
    make_safe_experience,
    update_multiplier,
)

pytestmark = pytest.mark.usefixtures("strict_dtypes")
by_config = partial(jax.jit, static_argnames="config")
group_experience, return_experience = by_config(make_group_experience), by_config(make_return_experience)
safe_experience = by_config(make_safe_experience)
ROWS, TIME, KL_COEF = 8, 10, 0.3
STARTS, COUNTS = np.array([1, 3, 4, 2, 4, 1, 2, 5]), np.array([6, 1, 6, 3, 2, 9, 0, 4])
FINISHED = np.array([True, True, False, True, True, False, True, True])
GRPO = GRPOConfig(samples=4, truncation="mask")
SPANS = [slice(start, start + count) for start, count in zip(STARTS, COUNTS, strict=True)]


def inputs(seed=0):
    """Ragged rows, one of them empty, full of garbage outside the responses."""
    rng = np.random.default_rng(seed)
    clock = np.arange(TIME)[None]
    inside = (STARTS[:, None] <= clock) & (clock < (STARTS + COUNTS)[:, None])
    rolled, ref, values, cost_values = (
        np.where(inside, x, np.nan).astype(np.float32) for x in rng.normal(size=(4, ROWS, TIME)) - 1
    )
    old = (rolled + np.where(inside, rng.normal(size=(ROWS, TIME)) / 3, np.nan)).astype(np.float32)
    rollout = Rollout(
        tokens=jnp.zeros((ROWS, TIME), jnp.int32),
        prompt_lengths=jnp.asarray(STARTS, jnp.int32),
        response_lengths=jnp.asarray(COUNTS, jnp.int32),
        logprobs=jnp.asarray(rolled),
        finished=jnp.asarray(FINISHED),
        version=jnp.int32(0),
    )
    scores, costs = rng.normal(size=(2, ROWS)).astype(np.float32)
    return rollout, *(jnp.asarray(x) for x in (scores, costs, old, ref, values, cost_values))


def rewards_of(scores, old, ref, sign=-1.0):
    """Each row's rewards with k1 in them."""
    rows = []
    for row, span in enumerate(SPANS):
        r = sign * KL_COEF * (np.asarray(old, np.float64)[row, span] - np.asarray(ref, np.float64)[row, span])
        if len(r):
            r[-1] += scores[row]
        rows.append(r)
    return rows


def check(experience, rows):
    """Advantages a row; nothing outside."""
    for row, span in enumerate(SPANS):
        got = np.asarray(experience.advantages[row])
        np.testing.assert_allclose(got[span], rows[row], rtol=1e-4, atol=1e-5)
        assert not np.any(np.delete(got, np.r_[span]))


def test_grpo_compares_scores_and_takes_the_kl_to_the_loss():
    rollout, scores, _, old, ref, *_ = inputs()
    experience = group_experience(rollout, scores, old, ref, config=GRPO, kl_coef=KL_COEF)
    counted = (COUNTS > 0) & FINISHED
    expected = []
    for row in range(ROWS):
        group = [i for i in range(row // 4 * 4, row // 4 * 4 + 4) if counted[i]]
        s = np.asarray(scores, np.float64)
        a = (s[row] - s[group].mean()) / (s[group].std(ddof=1) + 1e-6) if counted[row] else 0.0
        expected.append(np.full(COUNTS[row], a))
    check(experience, expected)
    assert experience.values is None and experience.returns is None and experience.importance is None
    np.testing.assert_allclose(experience.kl_coef, KL_COEF)
    sums = np.where(counted, scores, 0)
    np.testing.assert_allclose(experience.rewards.sum(1), sums, rtol=1e-6)  # no KL in them


def test_reinforce_pp_and_remax_take_what_follows():
    rollout, scores, greedy, old, ref, *_ = inputs(3)
    rewards = rewards_of(np.asarray(scores), old, ref)

    def returns(discount):
        return [np.array([sum(discount**k * x for k, x in enumerate(r[i:])) for i in range(len(r))]) for r in rewards]

    plus = ReinforcePPConfig(discount=0.9, whiten_advantages=False)
    check(return_experience(rollout, scores, old, ref, config=plus, kl_coef=KL_COEF), returns(0.9))
    config = ReMaxConfig()
    experience = return_experience(rollout, scores, old, ref, greedy, config=config, kl_coef=KL_COEF)
    check(experience, [r - float(greedy[row]) for row, r in enumerate(returns(1.0))])
    with pytest.raises(ValueError, match="baselines=None: ReMax needs"):
        return_experience(rollout, scores, old, ref, config=config, kl_coef=KL_COEF)


def gae_of(rewards, values, discount, lam, following=0.0):
    """The definition, backwards."""
    advantages, after = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        after = rewards[t] + discount * following - values[t] + discount * lam * after
        advantages[t], following = after, values[t]
    return advantages


def test_safe_rlhf_combines_two_streams_and_the_kl_weighs_the_same_for_any_multiplier():
    multiplier = 0.7
    rollout, scores, costs, old, ref, values, cost_values = inputs(4)
    config = SafeRLHFConfig(truncation="zero", whiten_advantages=False, discount=0.95, gae_lambda=0.9)
    build = partial(safe_experience, config=config, kl_coef=KL_COEF, multiplier=jnp.float32(multiplier))
    reward, cost = build(rollout, scores, costs, old, ref, values, cost_values)
    streams = []
    for given, sign, baseline in ((scores, -1.0, values), (costs, 1.0, cost_values)):
        rewards = rewards_of(np.asarray(given), old, ref, sign)
        streams.append([gae_of(r, np.asarray(baseline)[row, SPANS[row]], 0.95, 0.9) for row, r in enumerate(rewards)])
    check(cost, streams[1])
    check(reward, [(r - multiplier * c) / (1 + multiplier) for r, c in zip(*streams, strict=True)])
    for experience, of, baseline in ((reward, scores, values), (cost, costs, cost_values)):
        np.testing.assert_array_equal(experience.scores, of)
        inside = np.asarray(experience.response_mask)
        np.testing.assert_array_equal(np.asarray(experience.values)[inside], np.asarray(baseline)[inside])
    # Only the KL: its advantage is that of a reward of -kl_coef k1, whatever the multiplier.
    zero, flat = jnp.zeros(ROWS), jnp.zeros((ROWS, TIME))
    alone, _ = build(rollout, zero, zero, old, ref, flat, flat)
    kl_rewards = rewards_of(np.zeros(ROWS), old, ref)
    check(alone, [gae_of(r, np.zeros(len(r)), 0.95, 0.9) for r in kl_rewards])


def test_safe_rlhf_whitens_the_combination_and_bootstraps_both():
    rollout, scores, costs, old, ref, values, cost_values = inputs(4)
    build = partial(safe_experience, rollout, scores, costs, old, ref, values, cost_values)
    config, after = SafeRLHFConfig(truncation="bootstrap", gae_lambda=0.9), np.linspace(-1, 1, ROWS, dtype=np.float32)
    more = {"bootstrap_values": after, "cost_bootstrap_values": -after, "kl_coef": KL_COEF, "multiplier": 0.5}
    streams = []
    for given, sign, baseline, following in ((scores, -1.0, values, after), (costs, 1.0, cost_values, -after)):
        rewards = rewards_of(np.where(FINISHED, given, 0), old, ref, sign)  # a value replaces what was cut off
        values_of = [np.asarray(baseline)[row, SPANS[row]] for row in range(ROWS)]
        ends = np.where(FINISHED, 0, following)
        streams.append([gae_of(r, v, 1.0, 0.9, end) for r, v, end in zip(rewards, values_of, ends, strict=True)])
    combined = [(r - 0.5 * c) / 1.5 for r, c in zip(*streams, strict=True)]
    flat = np.concatenate(combined)
    reward, cost = build(config=config, **more)
    check(reward, [(row - flat.mean()) / flat.std(ddof=1) for row in combined])
    check(cost, streams[1])
    with pytest.raises(ValueError, match="needs cost_bootstrap_values"):
        build(config=config, **{**more, "cost_bootstrap_values": None})


def test_a_row_that_cannot_teach_is_left_out_wherever_its_bad_number_is():
    rollout, scores, costs, old, ref, values, cost_values = inputs(4)
    bad, without = scores.at[4].set(jnp.nan), replace(rollout, response_lengths=rollout.response_lengths.at[4].set(0))

    def same(actual, expected):
        for name in ("response_mask", "rewards", "advantages", "returns"):
            if getattr(expected, name) is not None:
                np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)

    safe = partial(safe_experience, config=SafeRLHFConfig(), kl_coef=KL_COEF, multiplier=0.5)
    arrays = old, ref, values, cost_values
    for actual, expected in zip(
        safe(rollout, scores, costs.at[4].set(jnp.inf), *arrays), safe(without, scores, costs, *arrays), strict=True
    ):
        same(actual, expected)
    for actual, expected in zip(safe(rollout, bad, costs, *arrays), safe(without, scores, costs, *arrays), strict=True):
        same(actual, expected)
    remax = partial(return_experience, config=ReMaxConfig(whiten_advantages=True), kl_coef=KL_COEF)
    same(remax(rollout, scores, old, ref, costs.at[4].set(jnp.nan)), remax(without, scores, old, ref, costs))


def test_the_multiplier_follows_its_formula_over_a_window_up_to_its_maximum():
    config = SafeRLHFConfig(window=5, cost_limit=0.3, multiplier=2.0, multiplier_rate=0.5, multiplier_max=4.0)
    state, seen, log = MultiplierState.create(config), [], np.log(2.0)
    update = jax.jit(partial(update_multiplier, config=config))
    rng = np.random.default_rng(5)
    for size in (3, 3, 8, 1, 3, 3, 3):
        costs = rng.normal(size=size) + (1.0 if len(seen) < 16 else -2.0)
        given = np.insert(costs, 1, np.nan)  # left out
        seen.extend(costs)
        log = min(log + 0.5 * np.exp(log) * (np.mean(seen[-5:]) - 0.3), np.log(4.0))
        state = update(state, jnp.asarray(given, jnp.float32))
        np.testing.assert_allclose(state.value, np.exp(log), rtol=1e-5)
        np.testing.assert_allclose(state.mean_cost, np.mean(seen[-5:]), rtol=1e-5)
    assert state.count == len(seen)
    assert 0 < state.value < 2  # it fell while costs were below the limit
    start = MultiplierState.create(config)
    assert update(start, jnp.full(8, jnp.nan)).value == start.value
    np.testing.assert_allclose(update(state, jnp.full(8, 1e6)).value, 4.0, rtol=1e-6)


def test_groups_of_equal_scores_are_counted():
    rollout, scores, _, old, ref, *_ = inputs()
    equal = scores.at[:4].set(0.1)
    experience = group_experience(rollout, equal, old, ref, config=GRPO, kl_coef=KL_COEF)
    metrics = jax.jit(experience_metrics, static_argnames="samples")(experience, samples=4)
    assert metrics["group/zero_std"] == 0.5
    others = np.asarray(scores)[[4, 7]]  # rows 5 and 6 do not count
    np.testing.assert_allclose(metrics["group/score_std"], others.std(ddof=1) / 2, rtol=1e-5)
    assert not np.any(experience.advantages[:4])


def test_whitened_rewards_make_the_advantages_and_the_rewards_stay():
    """Log-probabilities of the rollout stand in for old ones."""
    rollout, scores, _, _, ref, *_ = inputs()
    config = ReinforcePPConfig(whiten_advantages=False, whiten_rewards=True, old_logprobs="rollout")
    experience = return_experience(rollout, scores, None, ref, config=config, kl_coef=KL_COEF)
    np.testing.assert_array_equal(experience.old_logprobs, np.where(experience.response_mask, rollout.logprobs, 0))
    rewards = rewards_of(np.asarray(scores), rollout.logprobs, ref)
    flat = np.concatenate(rewards)
    white = [(r - flat.mean()) / flat.std(ddof=1) + flat.mean() for r in rewards]
    check(experience, [np.cumsum(r[::-1])[::-1] for r in white])
    np.testing.assert_allclose(experience.rewards.sum(), flat.sum(), rtol=1e-4)
