"""The steps against an independent NumPy implementation: every loop, every case and every gradient spelled out."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.meshes.rows import draw_minibatch
from jrlhf.ppo import (
    GRPOConfig,
    PPOConfig,
    PPOState,
    Rollout,
    TrainState,
    make_actor_step,
    make_critic_step,
    make_ppo_step,
)
from jrlhf.ppo.token_advantages import gae

ROWS, TIME, RATE = 16, 9, 0.5
CONFIG = PPOConfig(
    epochs=2, minibatches=2, dual_clip=1.5, clip_high=0.3, entropy_coef=0.05, kl_target=0.5, seed=11, micro_batches=4
)
OPTIMIZER = optax.sgd(RATE)


@pytest.fixture(scope="module")
def step(toy):
    """The jitted step, compiled once for all tests."""
    return make_ppo_step(toy.logprobs, toy.values, OPTIMIZER, OPTIMIZER, CONFIG)


def fresh_state(toy):
    actor, critic = toy.params()
    return PPOState.create(
        TrainState.create(actor, OPTIMIZER), TrainState.create(critic, OPTIMIZER), kl_coef=CONFIG.kl_coef
    )


def host(tree):
    return jax.tree.map(lambda x: np.array(x, np.float64) if x.dtype == jnp.float32 else np.array(x), tree)


def drawn_rows(config, step, update):
    """The rows of an update. (`test_parts.py` proves that a draw is a fair shuffle.)"""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), step), update // config.minibatches)
    return np.asarray(draw_minibatch(jnp.arange(ROWS), key, update % config.minibatches, config.minibatches))


def token_positions(e, rows):
    return [(row, t) for row in rows for t in range(TIME) if e.response_mask[row, t]]


def numpy_actor(logits, e, config, rate):
    """Updates by gradient descent of the table of logits. Returns it, the metrics' means and the updates applied."""
    logits, log, total = logits.copy(), [], config.epochs * config.minibatches
    for update in range(total):
        tokens = token_positions(e, drawn_rows(config, 0, update))
        gradient, sums = np.zeros_like(logits), dict.fromkeys(ACTOR_METRICS, 0.0)
        for row, t in tokens:
            previous, token, a = e.tokens[row, t - 1], e.tokens[row, t], e.advantages[row, t]
            p = np.exp(logits[previous]) / np.exp(logits[previous]).sum()
            entropy = -(p * np.log(p)).sum()
            log_ratio = np.log(p[token]) - e.old_logprobs[row, t]
            ratio = np.exp(log_ratio)
            clipped = (a > 0 and ratio > 1 + config.clip_high) or (a < 0 and ratio < 1 - config.clip_low)
            loss = -a * (min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) if clipped else ratio)
            lower = config.dual_clip is not None and a < 0 and ratio > config.dual_clip
            loss = -a * config.dual_clip if lower else loss
            slope = 0.0 if clipped or lower else -a * ratio
            gradient[previous] += slope * (np.eye(len(p))[token] - p)  # d log p[token] / d logits
            gradient[previous] -= config.entropy_coef * -p * (np.log(p) + entropy)  # d entropy / d logits
            values = (loss, entropy, -log_ratio, ratio - 1 - log_ratio, ratio, clipped, lower)
            for name, value in zip(ACTOR_METRICS, values, strict=True):
                sums[name] += value / len(tokens)
        gradient /= len(tokens)
        log.append({**sums, "grad_norm": np.sqrt((gradient**2).sum())})
        if config.target_kl is not None and sums["approx_kl"] > config.target_kl:
            return logits, mean_of(log), update
        logits -= rate * gradient
    return logits, mean_of(log), total


ACTOR_METRICS = ("pg_loss", "entropy", "ppo_kl", "approx_kl", "ratio", "pg_clipfrac", "pg_clipfrac_lower")


def numpy_critic(table, e, config, rate):
    table, log = table.copy(), []
    for update in range(config.epochs * config.minibatches):
        tokens = token_positions(e, drawn_rows(config, 0, update))
        gradient, sums = np.zeros_like(table), dict.fromkeys(("vf_loss", "vf_clipfrac", "vpred_mean"), 0.0)
        for row, t in tokens:
            previous, old, target = e.tokens[row, t - 1], e.values[row, t], e.returns[row, t]
            value = table[previous]
            moved = min(max(value, old - config.value_clip), old + config.value_clip)
            clipped = (moved - target) ** 2 > (value - target) ** 2
            gradient[previous] += 0.0 if clipped else value - target
            sums["vf_loss"] += max((value - target) ** 2, (moved - target) ** 2) / 2 / len(tokens)
            sums["vf_clipfrac"] += clipped / len(tokens)
            sums["vpred_mean"] += value / len(tokens)
        gradient /= len(tokens)
        log.append({**sums, "grad_norm": np.sqrt((gradient**2).sum())})
        table -= rate * gradient
    return table, mean_of(log)


def mean_of(log):
    return {name: np.mean([entry[name] for entry in log]) for name in log[0]}


def test_weights_and_metrics_match_numpy(toy, step):
    """In micro-batches, and with garbage outside the responses, which has no influence."""
    experience = toy.experience(ROWS, TIME)
    e, (actor, critic) = host(experience), host(toy.params())
    names = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "logprobs")
    spoiled = {name: jnp.where(experience.response_mask, getattr(experience, name), jnp.nan) for name in names}
    state, metrics = step(fresh_state(toy), replace(experience, **spoiled))

    logits, actor_metrics, _ = numpy_actor(actor["logits"], e, CONFIG, RATE)
    table, critic_metrics = numpy_critic(critic["values"], e, CONFIG, RATE)
    np.testing.assert_allclose(state.actor.params["logits"], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.critic.params["values"], table, rtol=1e-5, atol=1e-6)
    assert state.actor.step == state.critic.step == 1

    mask = e.response_mask
    first = token_positions(e, drawn_rows(CONFIG, 0, 0))
    p = np.exp(actor["logits"]) / np.exp(actor["logits"]).sum(1, keepdims=True)
    gaps = [abs(p[e.tokens[r, t - 1], e.tokens[r, t]] / np.exp(e.old_logprobs[r, t]) - 1) for r, t in first]
    kl = np.mean([(e.old_logprobs - e.ref_logprobs)[row, mask[row]].sum() for row in range(ROWS)])
    unexplained = (e.returns - e.values)[mask].var(ddof=1)
    expected = {
        **{f"actor/{name}": value for name, value in actor_metrics.items()},
        **{f"critic/{name}": value for name, value in critic_metrics.items()},
        "actor/initial_ratio_gap": np.mean(gaps),
        "actor/skipped_updates": 0,
        "actor/stopped_updates": 0,
        "actor/nonfinite_updates": 0,
        "critic/nonfinite_updates": 0,
        "critic/skipped_updates": 0,
        "critic/vf_explained_var": 1 - unexplained / (e.returns[mask].var(ddof=1) + 1e-5),
        "objective/kl": kl,
        "objective/kl_coef": CONFIG.kl_coef,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert CONFIG.kl_target is not None
    moved = CONFIG.kl_coef * (1 + np.clip(kl / CONFIG.kl_target - 1, -0.2, 0.2) * ROWS / CONFIG.kl_horizon)
    np.testing.assert_allclose(state.kl.coef, moved, rtol=1e-6)
    # The case is worth its name: both clips decided somewhere, and not everywhere.
    assert 0 < metrics["actor/pg_clipfrac"] < 1 and 0 < metrics["actor/pg_clipfrac_lower"] < 1
    assert 0 < metrics["critic/vf_clipfrac"] < 1


def test_the_state_is_donated_and_nothing_recompiles(toy, step):
    experience = toy.experience(ROWS, TIME)
    state = fresh_state(toy)
    buffers = jax.tree.leaves((state.actor.params, state.critic.params, state.kl))
    for _ in range(3):
        state, _ = step(state, experience)
    assert all(x.is_deleted() for x in buffers)
    assert step._cache_size() == 1
    assert state.actor.step == state.critic.step == 3


def poison(x, row, experience, value=jnp.nan):
    at = int(jnp.argmax(experience.response_mask[row]))
    return x.at[row, at].set(value)


@pytest.mark.parametrize(("name", "value"), [("advantages", jnp.inf), ("old_logprobs", jnp.nan)])
def test_one_bad_number_costs_its_minibatches_and_never_reaches_the_weights(toy, step, name, value):
    experience = toy.experience(ROWS, TIME)
    row = 5
    bad = replace(experience, **{name: poison(getattr(experience, name), row, experience, value)})
    state, metrics = step(fresh_state(toy), bad)
    # Reference: the same updates without those that contain the row.
    e, logits = host(experience), host(toy.params()[0])["logits"]
    single = replace(CONFIG, epochs=1, minibatches=1)
    for update in range(CONFIG.epochs * CONFIG.minibatches):
        rows = drawn_rows(CONFIG, 0, update)
        if row not in rows:
            only = replace(e, response_mask=e.response_mask & np.isin(np.arange(ROWS), rows)[:, None])
            logits, _, _ = numpy_actor(logits, only, single, RATE)
    np.testing.assert_allclose(state.actor.params["logits"], logits, rtol=1e-5, atol=1e-6)
    assert metrics["actor/skipped_updates"] == CONFIG.epochs
    assert np.isfinite(metrics["actor/pg_loss"]) and np.isfinite(metrics["actor/grad_norm"])
    assert metrics["critic/skipped_updates"] == 0


def test_nothing_but_bad_numbers_or_no_token_changes_not_a_bit(toy, step):
    experience = toy.experience(ROWS, TIME)
    everywhere = jnp.full_like(experience.values, jnp.nan)
    bad = replace(experience, advantages=everywhere, returns=everywhere, ref_logprobs=everywhere)
    empty = replace(experience, response_mask=jnp.zeros((ROWS, TIME), bool))
    for batch in (bad, empty):
        state, metrics = step(fresh_state(toy), batch)
        expected = fresh_state(toy)
        assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 4
        assert np.isnan(metrics["actor/pg_loss"]) and np.isnan(metrics["objective/kl"])
        jax.tree.map(np.testing.assert_array_equal, state.actor.params, expected.actor.params)
        jax.tree.map(np.testing.assert_array_equal, state.critic.params, expected.critic.params)
        assert state.kl.coef == expected.kl.coef  # the controller ignores it, too


def test_a_model_may_return_garbage_in_the_padding_and_an_undifferentiable_entropy(toy):
    experience = toy.experience(ROWS, TIME)
    outside = jnp.where(experience.response_mask, 0.0, jnp.nan)

    def spoiled(params, tokens):
        logprobs, entropy = toy.logprobs(params, tokens)
        # The value of the square root is 0 and its derivative NaN: without entropy_coef it must not be computed.
        return logprobs + outside, entropy + outside + jnp.sqrt(0 * entropy)

    config = PPOConfig()
    state, metrics = make_actor_step(spoiled, OPTIMIZER, config)(fresh_state(toy).actor, experience)
    expected, expected_metrics, _ = numpy_actor(host(toy.params()[0])["logits"], host(experience), config, RATE)
    assert metrics["actor/skipped_updates"] == 0
    np.testing.assert_allclose(state.params["logits"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["actor/entropy"], expected_metrics["entropy"], rtol=1e-5)


def test_early_stop_applies_nothing_from_the_update_that_goes_too_far(toy):
    experience = toy.experience(ROWS, TIME, ratio_noise=0.0)
    config, rate = PPOConfig(epochs=3, minibatches=2, target_kl=0.02), 3.0
    step = make_actor_step(toy.logprobs, optax.sgd(rate), config)
    state, metrics = step(fresh_state(toy).actor, experience)
    e, logits = host(experience), host(toy.params()[0])["logits"]
    expected, expected_metrics, applied = numpy_actor(logits, e, config, rate)
    assert applied == 3  # of 6: the fourth went too far, the last two were never computed
    np.testing.assert_allclose(state.params["logits"], expected, rtol=1e-5, atol=1e-6)
    assert metrics["actor/stopped_updates"] == 3
    assert metrics["actor/skipped_updates"] == 0
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[f"actor/{name}"], value, rtol=1e-4, atol=1e-5, err_msg=name)
    # An update that is skipped is not also stopped.
    bad = replace(experience, advantages=jnp.full((ROWS, TIME), jnp.nan), old_logprobs=experience.old_logprobs - 3)
    _, metrics = step(fresh_state(toy).actor, bad)
    assert (metrics["actor/skipped_updates"], metrics["actor/stopped_updates"]) == (6, 0)


def test_no_share_of_the_variance_of_no_returns_is_explained(toy):
    experience = toy.experience(ROWS, TIME)
    nothing = replace(experience, response_mask=jnp.zeros_like(experience.response_mask))
    _, metrics = make_critic_step(toy.values, OPTIMIZER, PPOConfig())(fresh_state(toy).critic, nothing)
    assert np.isnan(metrics["critic/vf_explained_var"]) and np.isnan(metrics["critic/vf_loss"])
    assert (metrics["critic/skipped_updates"], metrics["critic/nonfinite_updates"]) == (1, 0)


def test_shuffles_differ_between_epochs_calls_and_seeds():
    cases = ((CONFIG, 0), (CONFIG, 1), (replace(CONFIG, seed=2), 0))
    draws = {tuple(drawn_rows(config, step, update)) for config, step in cases for update in (0, CONFIG.minibatches)}
    assert len(draws) == 2 * len(cases)


def test_errors_are_raised_before_anything_is_computed(toy):
    experience, state = toy.experience(ROWS, TIME), fresh_state(toy)
    odd = PPOConfig(minibatches=3)
    with pytest.raises(ValueError, match="16 rows do not divide into minibatches=3 x micro_batches=1"):
        make_actor_step(toy.logprobs, OPTIMIZER, odd)(state.actor, experience)
    with pytest.raises(ValueError, match="do not divide"):
        make_critic_step(toy.values, OPTIMIZER, odd)(state.critic, experience)

    def short(params, tokens):
        return toy.values(params, tokens)[:, 1:]

    with pytest.raises(ValueError, match=r"value_fn returned shapes \(16, 8\) for tokens of shape \(16, 9\)"):
        make_critic_step(short, OPTIMIZER, PPOConfig())(state.critic, experience)
    for output, shapes in (("logprobs", r"\(16, 9\) for"), ("pair", r"\(16, 9\), None for")):

        def wrong(params, tokens, output=output) -> Any:
            logprobs, _ = toy.logprobs(params, tokens)
            return logprobs if output == "logprobs" else (logprobs, None)

        with pytest.raises(ValueError, match=rf"returned shapes {shapes} .*: it must return \(log-probabilities, entr"):
            make_actor_step(wrong, OPTIMIZER, PPOConfig())(state.actor, experience)
    step: Any = make_ppo_step(toy.logprobs, toy.values, OPTIMIZER, OPTIMIZER, PPOConfig())
    rollout = Rollout(**{field.name: getattr(experience, field.name) for field in fields(Rollout)})
    for arguments, message in (
        ((state, rollout), "experience is of class Rollout, but must be of class Experience"),
        ((state.actor, experience), "state is of class TrainState, but must be of class PPOState"),
    ):
        with pytest.raises(TypeError, match=message):
            step(*arguments)
    with pytest.raises(ValueError, match="the experience has a KL for the loss, which has none"):
        step(state, replace(experience, kl_coef=jnp.ones(())))
    with pytest.raises(TypeError, match="config is of class GRPOConfig"):
        make_ppo_step(toy.logprobs, toy.values, OPTIMIZER, OPTIMIZER, GRPOConfig())  # pyright: ignore[reportArgumentType]
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_float64_is_trained_in_float64(toy):
    with jax.enable_x64(True):
        double = lambda tree: jax.tree.map(  # noqa: E731
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, tree
        )
        actor, critic = double(jax.tree.map(jnp.asarray, toy.params()))
        experience = toy.experience(ROWS, TIME)
        state = PPOState.create(TrainState.create(actor, OPTIMIZER), TrainState.create(critic, OPTIMIZER), kl_coef=0.1)
        state, metrics = make_ppo_step(toy.logprobs, toy.values, OPTIMIZER, OPTIMIZER, CONFIG)(state, experience)
        assert state.actor.params["logits"].dtype == state.critic.params["values"].dtype == jnp.float64
        assert metrics["actor/pg_loss"].dtype == jnp.float32 and metrics["actor/skipped_updates"] == 0


def test_bfloat16_weights_keep_their_type_and_gradients_are_summed_in_float32(toy):
    experience, optimizer = toy.experience(ROWS, TIME), optax.adamw(1e-2)
    step = make_critic_step(toy.values, optimizer, PPOConfig(epochs=2, micro_batches=4))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), toy.params()[1])
    before = np.array(half["values"])
    state, metrics = step(TrainState.create(half, optimizer), experience)
    assert state.params["values"].dtype == jnp.bfloat16
    assert metrics["critic/skipped_updates"] == 0
    assert np.all(np.asarray(state.params["values"]) != before)


def test_operations_say_in_a_trace_to_which_part_they_belong(toy, step, scopes):
    experience = toy.experience(ROWS, TIME)
    names = scopes(step, fresh_state(toy), experience)
    assert {"policy_loss", "value_loss", "optimizer"} <= names
    advantages = partial(gae, discount=1.0, lam=0.95)
    assert "advantages" in scopes(jax.jit(jax.vmap(advantages)), *[experience.values] * 2, experience.response_mask)
