"""A row without a finite score counts nowhere: batches with it teach, and measure, what batches without it do."""

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.ppo import (
    Experience,
    GRPOConfig,
    PPOConfig,
    ReinforcePPConfig,
    Rollout,
    SafeRLHFConfig,
    TrainState,
    experience_metrics,
    make_actor_step,
    make_experience,
    make_group_experience,
    make_return_experience,
)
from jrlhf.ppo.experience import where_chosen
from jrlhf.ppo.safe import make_safe_experience

ROWS, TIME, VOCAB, INVALID = 8, 7, 11, 5  # of two groups of four rows
RECORDER = optax.GradientTransformation(  # its state: the gradients
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
)


def batch() -> dict[str, Any]:
    """Arguments of the makers of experience, for rows whose first token is their number."""
    rng = np.random.default_rng(0)
    prompts, responses = np.array([1, 2, 3, 1, 2, 2, 1, 4], np.int32), np.array([6, 3, 4, 2, 1, 5, 2, 3], np.int32)
    tokens = rng.integers(0, VOCAB, (ROWS, TIME)).astype(np.int32)
    tokens[:, 0] = np.arange(ROWS)
    finished = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
    logprobs, old, ref = (rng.normal(-2, 0.3, (ROWS, TIME)).astype(np.float32) for _ in range(3))
    rollout = Rollout(*map(jnp.asarray, (tokens, prompts, responses, logprobs, finished)), version=jnp.int32(0))
    scores, values = rng.normal(size=ROWS), rng.normal(size=(ROWS, TIME))
    given = {"scores": scores, "values": values, "old_logprobs": old, "ref_logprobs": ref}
    return {"rollout": rollout} | {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}


def cut(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x: x[rows] if x.ndim else x, tree)


def joined(first: Experience, second: Experience) -> Experience:
    def both(a: Any, b: Any) -> Any:
        return jnp.concatenate([a, b]) if a.ndim else a

    return jax.tree.map(both, first, second)


def actor_gradient(experience: Experience, config: Any) -> tuple[np.ndarray, dict[str, Any]]:
    def logprobs(params: Any, tokens: Any) -> Any:
        scores = jax.nn.log_softmax(params[tokens[:, 0]])
        own = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        return own, -jnp.sum(jnp.exp(scores) * scores, axis=-1)

    params = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, TIME, VOCAB)), jnp.float32)
    step = make_actor_step(logprobs, RECORDER, config)
    state, metrics = step(TrainState.create(params, RECORDER), experience)
    return np.asarray(state.opt_state), jax.device_get(metrics)


def assert_equal(measured: dict[str, Any], expected: dict[str, Any]) -> None:
    assert measured.keys() == expected.keys() and len(expected) > 3
    for name, value in expected.items():
        if not name.endswith("nonfinite"):
            np.testing.assert_allclose(measured[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean"])
def test_a_group_teaches_as_if_it_had_one_row_less(aggregation: str, score: float):
    config = GRPOConfig(samples=4, epochs=1, kl_coef=0.05, kl_in="loss", aggregation=aggregation)  # type: ignore[arg-type]
    whole = batch()
    del whole["values"]
    others = [make_group_experience(**cut(whole, slice(0, 4)), config=config, kl_coef=0.05)]
    left = cut(whole, np.array([4, 6, 7]))
    others.append(make_group_experience(**left, config=replace(config, samples=3), kl_coef=0.05))
    without = joined(*others)
    whole["scores"] = whole["scores"].at[INVALID].set(score)
    whole["ref_logprobs"] = whole["ref_logprobs"].at[INVALID].set(jnp.nan)
    experience = make_group_experience(**whole, config=config, kl_coef=0.05)
    assert not experience.valid[INVALID] and experience.valid.sum() == ROWS - 1
    assert_equal(experience_metrics(experience), experience_metrics(without))
    if aggregation == "prompt-mean":  # a step on the rows alone cannot know of groups of unequal sizes
        gradient, _ = actor_gradient(experience, config)
        first, _ = actor_gradient(others[0], config)
        second, _ = actor_gradient(others[1], replace(config, samples=3))
        np.testing.assert_allclose(gradient, (first + second) / 2, rtol=1e-5, atol=1e-8)
        return
    gradient, metrics = actor_gradient(experience, config)
    expected, expected_metrics = actor_gradient(without, config)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)
    assert_equal(metrics, expected_metrics)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp", "safe_rlhf"])
def test_a_batch_is_whitened_and_measured_as_if_it_had_one_row_less(algorithm: str):
    whole, others = batch(), np.delete(np.arange(ROWS), INVALID)
    costs = jnp.linspace(-1, 1, ROWS)

    def made(given: dict[str, Any], costs: Any) -> list[Experience]:
        if algorithm == "ppo":
            return [make_experience(**given, config=PPOConfig(whiten_rewards=True), kl_coef=0.05)]
        values = given.pop("values")
        if algorithm == "reinforce_pp":
            return [make_return_experience(**given, config=ReinforcePPConfig(kl_coef=0.05), kl_coef=0.05)]
        both = {"values": values, "cost_values": -values, "config": SafeRLHFConfig(), "kl_coef": 0.05}
        return list(make_safe_experience(**given, **both, costs=costs, multiplier=0.3))

    expected = made(cut(whole, others), costs[others])
    if algorithm == "safe_rlhf":  # a row without a cost has no valid reward either
        costs = costs.at[INVALID].set(jnp.inf)
    else:
        whole["scores"] = whole["scores"].at[INVALID].set(jnp.inf)
    for experience, without in zip(made(whole, costs), expected, strict=True):
        assert not experience.valid[INVALID]
        assert_equal(experience_metrics(experience), experience_metrics(without))
        for item in fields(Experience):
            own, other = (getattr(x, item.name) for x in (experience, without))
            if other is not None and other.ndim:
                np.testing.assert_allclose(own[others], other, rtol=1e-5, atol=1e-6, err_msg=item.name)


def test_only_the_chosen_rows_are_learned_from():
    config, whole = GRPOConfig(samples=4, kl_coef=0.05, kl_in="loss", epochs=1), batch()
    del whole["values"]
    experience = make_group_experience(**whole, config=config, kl_coef=0.05)
    chosen = where_chosen(experience, chosen=lambda e, _: e.scores > 0, config=config)
    rows = np.asarray(experience.scores) > 0
    assert 0 < rows.sum() < ROWS
    np.testing.assert_array_equal(chosen.response_mask, experience.response_mask & rows[:, None])
    np.testing.assert_array_equal(chosen.advantages, experience.advantages)
    gradient, _ = actor_gradient(chosen, config)
    expected, _ = actor_gradient(cut(experience, np.flatnonzero(rows)), config)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)
    for wrong in (lambda e, _: e.scores, lambda e, _: e.response_mask):
        with pytest.raises(ValueError, match=r"the mask of rows is (float32\[8\]|bool\[8, 7\]): it must be bool\[8\]"):
            where_chosen(experience, chosen=wrong, config=config)
