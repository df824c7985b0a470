"""What holds for every algorithm alike, whatever its advantages and its loss: experience and update in one program."""

from collections.abc import Callable
from contextlib import nullcontext
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
from jrlhf.ppo import (
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    ReMaxConfig,
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
SHARED: dict[str, Any] = dict(kl_coef=BETA, minibatches=2)
CONFIGS = {
    "ppo": PPOConfig(**SHARED, dual_clip=1.5, entropy_coef=0.05),
    "grpo": GRPOConfig(**SHARED),
    "dr_grpo": DrGRPOConfig(**SHARED, samples=4, aggregation_divisor=6),
    "dapo": DAPOConfig(**SHARED, samples=16),
    "gspo": GSPOConfig(**SHARED),
    "rloo": RLOOConfig(**SHARED, samples=2),
    "reinforce_pp": ReinforcePPConfig(**SHARED, whiten_rewards=True),
    "reinforce_pp_baseline": ReinforcePPBaselineConfig(**SHARED),
    "remax": ReMaxConfig(**SHARED, truncation="mask"),
    "safe_rlhf": SafeRLHFConfig(**SHARED),
}
# PPO's functions have such tests of their own.
every_algorithm = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "grpo" else pytest.mark.full) for name in CONFIGS]
)


def batch(toy, start="apart"):
    """A rollout, and what the update needs besides. Responses that finish end in token 0, which is the padding too."""
    experience = toy.experience(ROWS, TIME)
    rng = np.random.default_rng(3)
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
    rows = {name: jnp.asarray(rng.normal(size=ROWS), jnp.float32) for name in ("scores", "costs", "baselines", "after")}
    return dict(actor=actor, critic=critic, cost_critic=toy.params(2)[1], reference=reference, rollout=rollout, **rows)


def algorithm(toy, config) -> Callable[..., Any]:
    """data -> (experiences, weights after, metrics), compiled."""
    actor_step = make_actor_step(toy.logprobs, OPTIMIZER, config)

    def run(actor, critic, cost_critic, reference, rollout, scores, costs, baselines, after):
        old, ref = (toy.logprobs(params, rollout.tokens)[0] for params in (actor, reference))
        if isinstance(config, GRPOConfig):
            experiences = (make_group_experience(rollout, scores, old, ref, config=config, kl_coef=BETA),)
        elif isinstance(config, SafeRLHFConfig):
            values = (toy.values(params, rollout.tokens) for params in (critic, cost_critic))
            experiences = make_safe_experience(
                rollout,
                scores,
                costs,
                old,
                ref,
                *values,
                config=config,
                kl_coef=BETA,
                multiplier=1.5,
                bootstrap_values=after,
                cost_bootstrap_values=-after,
            )
        elif isinstance(config, PPOConfig):
            values = toy.values(critic, rollout.tokens)
            experiences = (
                make_experience(rollout, scores, old, ref, values, config=config, kl_coef=BETA, bootstrap_values=after),
            )
        else:
            given = baselines if isinstance(config, ReMaxConfig) else None
            experiences = (make_return_experience(rollout, scores, old, ref, given, config=config, kl_coef=BETA),)
        samples = config.samples if isinstance(config, GRPOConfig) else None
        metrics = [experience_metrics(x, samples) for x in experiences]
        state, of_actor = actor_step(TrainState.create(actor, OPTIMIZER), experiences[0])
        after_update = [state.params]
        if isinstance(config, PPOConfig):
            critic_step = make_critic_step(toy.values, OPTIMIZER, config)
            for params, x in zip((critic, cost_critic), experiences, strict=False):
                state, of_critic = critic_step(TrainState.create(params, OPTIMIZER), x)
                after_update.append(state.params)
                metrics.append(of_critic)
        return experiences, after_update, [*metrics, of_actor]

    return compiled(run)


@pytest.fixture(scope="module")
def plain(toy):
    """What an algorithm makes of the batch, undivided on one device. Computed once."""
    programs = lru_cache(lambda name: algorithm(toy, CONFIGS[name]))
    return lru_cache(lambda name, start: jax.device_get(programs(name)(**batch(toy, start))))


@every_algorithm
def test_at_step_0_the_ratio_is_one_and_the_kl_zero(plain, name):
    experiences, _, metrics = plain(name, "reference")
    assert metrics[-1]["actor/initial_ratio_gap"] < 1e-6
    assert metrics[0]["objective/kl"] == 0
    np.testing.assert_array_equal(experiences[0].old_logprobs, experiences[0].ref_logprobs)
    assert metrics[-1]["actor/skipped_updates"] == 0


@every_algorithm
def test_scores_are_conserved(plain, name):
    """Rewards sum to score - beta KL where the KL is in the reward, to the score elsewhere; costs to cost + beta KL."""
    experiences, _, _ = plain(name, "apart")
    for experience, sign in zip(experiences, (-1, 1), strict=False):
        kl = np.where(experience.response_mask, experience.old_logprobs - experience.ref_logprobs, 0).sum(1)
        penalty = sign * BETA * kl if CONFIGS[name].kl_in == "reward" else 0 * kl
        counted = experience.response_mask.any(1)
        assert counted.sum() == (ROWS if name != "remax" else experience.finished.sum())
        np.testing.assert_allclose(
            experience.rewards.sum(1), np.where(counted, experience.scores + penalty, 0), rtol=1e-5, atol=1e-6
        )
        assert np.abs(kl[counted]).min() > 0


def divided(toy, name, axis_type, micro_batches, padding):
    """The same algorithm and batch in parts, wider, with anything in the padding, on eight devices or one."""
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
    context = nullcontext()
    if axis_type is not None:
        mesh = make_mesh(data=2, fsdp=2, tensor=2, axis_type=axis_type)
        context = jax.set_mesh(mesh)

        def place(x):
            rows = np.ndim(x) and x.shape[0] == ROWS
            return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names) if rows else P()))

        data = jax.tree.map(place, data)
    with context:
        return jax.device_get(algorithm(toy, replace(CONFIGS[name], micro_batches=micro_batches))(**data))


def assert_same(plain, name, parts):
    def narrow(x):
        return x[:, :TIME] if np.ndim(x) == 2 and len(x) == ROWS else x

    (experiences, *results), (expected, *others) = parts, plain(name, "apart")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), results, others)
    for a, b in zip(experiences, expected, strict=True):
        for field in ("rewards", "advantages", "returns", "values", "old_logprobs", "ref_logprobs", "response_mask"):
            x, y = getattr(a, field), getattr(b, field)
            if y is not None:
                assert not np.any(x[:, TIME:])
                np.testing.assert_allclose(narrow(x), y, rtol=1e-5, atol=2e-6, err_msg=field)


@every_algorithm
def test_micro_batches_padding_and_the_mesh_change_nothing(toy, plain, name):
    """Masks come from lengths: here the padding holds any token and NaN, there it holds the one that ends responses."""
    assert_same(plain, name, divided(toy, name, AxisType.Explicit, micro_batches=2, padding=3))


@pytest.mark.full
@pytest.mark.parametrize(("axis_type", "micro_batches"), [(AxisType.Auto, 1), (None, 8)], ids=["auto", "one device"])
@every_algorithm
def test_nor_do_other_divisions(toy, plain, name, axis_type, micro_batches):
    assert_same(plain, name, divided(toy, name, axis_type, micro_batches, padding=0))
