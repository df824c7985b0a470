"""Invariants: of PPO in one program of experience and update; of other algorithms' experience."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.meshes.rows import whole
from jrlhf.ppo import (
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    Rollout,
    SafeRLHFConfig,
    TrainState,
    experience_metrics,
    make_actor_step,
    make_critic_step,
    make_experience,
    make_group_experience,
    make_return_experience,
    make_safe_experience,
)
from tests.support.tabular import compiled

ROWS, TIME, BETA = 32, 9, 0.2
OPTIMIZER = optax.sgd(0.5)
CONFIG = PPOConfig(kl_coef=BETA, minibatches=2, dual_clip=1.5, entropy_coef=0.05, whiten_rewards=True)


def batch(toy, start="apart"):
    """A rollout, scores and weights. Responses that finish end in token 0, which is the padding too."""
    experience = toy.experience(ROWS, TIME)
    clock, lengths = np.arange(TIME)[None], np.asarray(experience.lengths)[:, None]
    tokens = np.where(clock < lengths, np.asarray(experience.tokens), 0)
    tokens[(clock == lengths - 1) & np.asarray(experience.finished)[:, None]] = 0
    tokens = jnp.asarray(tokens)
    actor, critic = toy.params(0)
    reference = actor if start == "reference" else toy.params(1)[0]
    old = toy.logprobs(actor, tokens)[0]
    rollout = Rollout(
        tokens, experience.prompt_lengths, experience.response_lengths, old, experience.finished, experience.version
    )
    scores = jnp.asarray(np.random.default_rng(3).normal(size=ROWS), jnp.float32)
    return dict(actor=actor, critic=critic, reference=reference, rollout=rollout, scores=scores)


def algorithm(toy, config) -> Callable[..., Any]:
    """data -> (experience, weights after, metrics), compiled."""
    actor_step, critic_step = (
        make_actor_step(toy.logprobs, OPTIMIZER, config),
        make_critic_step(toy.values, OPTIMIZER, config),
    )

    def run(actor, critic, reference, rollout, scores):
        old, ref = (toy.logprobs(params, rollout.tokens)[0] for params in (actor, reference))
        values = toy.values(critic, rollout.tokens)
        experience = make_experience(rollout, scores, old, ref, values, config=config, kl_coef=BETA)
        critic_state, metrics = critic_step(TrainState.create(critic, OPTIMIZER), experience)
        state, actor_metrics = actor_step(TrainState.create(actor, OPTIMIZER), experience)
        return experience, (state.params, critic_state.params), metrics | experience_metrics(experience) | actor_metrics

    return compiled(run)


@pytest.fixture(scope="module")
def plain(toy):
    """The results for the batch, undivided on one device. Computed once."""
    program = algorithm(toy, CONFIG)
    return lru_cache(lambda start: jax.device_get(program(**batch(toy, start))))


def test_at_step_0_the_ratio_is_one_and_the_kl_zero(plain):
    experience, _, metrics = plain("reference")
    assert metrics["actor/initial_ratio_gap"] < 1e-6
    assert metrics["objective/kl"] == metrics["actor/skipped_updates"] == 0
    np.testing.assert_array_equal(experience.old_logprobs, experience.ref_logprobs)


def divided(toy, program, axis_type, padding, sizes):
    """A program's results for the same batch, wider, with anything in the padding, on eight devices."""
    data: dict[str, Any] = batch(toy)
    rollout = data["rollout"]

    def wide(x):
        return np.pad(np.asarray(x), ((0, 0), (0, padding)))

    outside = np.arange(TIME + padding)[None] >= np.asarray(rollout.lengths)[:, None]
    noise = np.random.default_rng(9).integers(0, toy.vocab, outside.shape)
    data["rollout"] = replace(
        rollout,
        tokens=jnp.asarray(np.where(outside, noise, wide(rollout.tokens)), jnp.int32),
        logprobs=jnp.asarray(np.where(outside, np.nan, wide(rollout.logprobs))),
    )
    mesh = make_mesh(*sizes, axis_type=axis_type)

    def place(x):
        rows = np.ndim(x) and x.shape[0] == ROWS
        return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names) if rows else P()))

    with jax.set_mesh(mesh):
        return jax.device_get(program(**jax.tree.map(place, data)))


def assert_same(actual, expected):
    """Compares trees of experiences and other results; those of tokens up to the width of the batch."""

    def same(path, x, y):
        if np.ndim(y) == 2 and y.shape == (ROWS, TIME):
            assert not np.any(x[:, TIME:]) or path[-1].name in ("tokens", "logprobs")
            x = x[:, :TIME]
        if getattr(path[-1], "name", None) not in ("tokens", "logprobs"):  # what the padding holds is there
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(same, actual, expected)


@pytest.mark.parametrize(
    ("axis_type", "sizes", "micro_batches", "padding"),
    [
        (AxisType.Explicit, (2, 2, 2), 2, 3),
        pytest.param(AxisType.Auto, (2, 2, 2), 1, 0, marks=pytest.mark.full),
        pytest.param(AxisType.Explicit, (1, 2, 4), 2, 0, marks=pytest.mark.full),
    ],
)
def test_micro_batches_padding_and_the_mesh_change_nothing(toy, plain, axis_type, sizes, micro_batches, padding):
    """Masks come from lengths: here the padding holds any token and NaN, there it holds the one that ends responses."""
    program = algorithm(toy, replace(CONFIG, micro_batches=micro_batches))
    assert_same(divided(toy, program, axis_type, padding, sizes), plain("apart"))


def test_no_other_algorithms_experience_depends_on_padding_or_the_mesh(toy):
    @compiled
    def experiences(actor, critic, reference, rollout, scores):
        old, ref = (toy.logprobs(params, rollout.tokens)[0] for params in (actor, reference))
        values, given = toy.values(critic, rollout.tokens), (rollout, scores, old, ref)
        beta: dict[str, Any] = {"kl_coef": BETA}
        safe = SafeRLHFConfig(truncation="zero", discount=0.9)
        # As a reward function on the host gives them: rows are divided over devices in the rollout only.
        streams = rollout, *map(whole, (scores, jnp.sin(scores), old, ref, values, 2 * values))
        return {
            "rloo": make_group_experience(*given, config=RLOOConfig(samples=4, equal_groups="drop"), **beta),
            "reinforce_pp": make_return_experience(*given, config=ReinforcePPConfig(discount=0.9), **beta),
            "safe_rlhf": make_safe_experience(*streams, config=safe, multiplier=0.5, **beta),
        }

    expected = jax.device_get(experiences(**batch(toy)))
    assert all(np.any(x.advantages) for x in [*list(expected.values())[:-1], *expected["safe_rlhf"]])
    assert_same(divided(toy, experiences, AxisType.Explicit, padding=3, sizes=(2, 2, 2)), expected)
