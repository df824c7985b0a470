"""One frozen base under actor, reference, critic and reward model, in a whole PPO iteration."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import (
    LoRAConfig,
    ModelConfig,
    SamplingConfig,
    init_lora,
    lora_shardings,
    make_generate,
    make_logprobs,
    make_scores,
    make_values,
    param_shardings,
)
from jrlhf.ppo import PPOConfig, Rollout, TrainState, make_actor_step, make_critic_step, make_experience
from tests.models.shared import QUICK, fast_jit, shapes_on, unstacked
from tests.support.live import live_bytes

CONFIG = ModelConfig(150, 32, 2, 8, 2, 8, mlp=1024, max_positions=32, qkv_bias=True)
LORA = LoRAConfig(rank=2, alpha=8.0)
PPO = PPOConfig(epochs=2, minibatches=1, micro_batches=1, truncation="zero")
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
B, P, R, TEMPERATURE = 16, 6, 8, 0.9


def prompts():
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, P + 1, B).astype(np.int32)
    tokens = generator.integers(0, CONFIG.vocab_size, (B, P)).astype(np.int32)
    return np.where(np.arange(P)[None, :] < lengths[:, None], tokens, 0), lengths


def in_response(rollout):
    place, start = np.arange(P + R)[None, :], np.asarray(rollout.prompt_lengths)[:, None]
    return (place >= start) & (place < start + np.asarray(rollout.response_lengths)[:, None])


def pointers(tree):
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


@pytest.mark.full
def test_one_base_serves_every_role_and_nothing_else_is_kept(reference):
    """An iteration as in `jrlhf/stages/rl.py`, on a mesh with all three axes; all of it reads one base."""
    mesh, generator = make_mesh(2, 2, 2), np.random.default_rng(1)
    host = reference.random_params(CONFIG)
    host["embedding"] = host["embedding"] * np.float32(0.3)
    host["layers"] = jax.tree.map(lambda x: 0.3 * x if x.ndim > 2 else x, host["layers"])
    host = unstacked(host)

    def trained(head):
        shapes = jax.eval_shape(lambda key: init_lora(CONFIG, LORA, key, head), jax.random.key(0))
        adapter = jax.tree.map(lambda x: (0.1 * generator.normal(size=x.shape)).astype(np.float32), shapes)
        return jax.device_put(adapter, lora_shardings(CONFIG, mesh, LORA, head))

    logprobs = make_logprobs(CONFIG, mesh, GENERATE, temperature=TEMPERATURE, lora=LORA)
    values = make_values(CONFIG, mesh, GENERATE, lora=LORA)
    before_token = lambda params, tokens, base: values(params, tokens, base)[:, :-1]  # noqa: E731
    scores = fast_jit(make_scores(CONFIG, mesh, GENERATE, lora=LORA))
    sampling = SamplingConfig(R, temperature=TEMPERATURE, stop_ids=(3, 9))
    generate = fast_jit(make_generate(CONFIG, mesh, sampling, lora=LORA))
    score_actor = fast_jit(logprobs)
    score_base = fast_jit(make_logprobs(CONFIG, mesh, GENERATE, temperature=TEMPERATURE))

    def rollout_of(adapter, base):
        """A rollout, its log-probabilities again, and the reference's."""
        drawn = generate(adapter, *prompts(), jax.random.split(jax.random.key(11), B), base)
        rollout = Rollout(**vars(drawn), version=jnp.zeros((), jnp.int32))
        old, ref = score_actor(adapter, rollout.tokens, base)[0], score_base(base, rollout.tokens)[0]
        inside = in_response(rollout)
        # Generation and scoring apply the adapter unmerged.
        np.testing.assert_allclose(np.asarray(rollout.logprobs)[inside], np.asarray(old)[inside], atol=1e-4)
        return rollout, old, ref

    gc.collect()
    before = live_bytes()
    with jax.set_mesh(mesh):
        base = jax.device_put(host, param_shardings(CONFIG, mesh, GENERATE))
        fresh = jax.device_get(init_lora(CONFIG, LORA, jax.random.key(1)))
        actor = TrainState.create(jax.device_put(fresh, lora_shardings(CONFIG, mesh, LORA)), OPTIMIZER)
        critic, reward = TrainState.create(trained("scalar"), OPTIMIZER), trained("scalar")
        at = pointers(base)
        rollout, old, ref = rollout_of(actor.params, base)
        np.testing.assert_array_equal(old, ref)  # a new adapter changes nothing: the KL is 0
        score = scores(reward, rollout.tokens, rollout.prompt_lengths + rollout.response_lengths, base)
        value = fast_jit(before_token)(critic.params, rollout.tokens, base)
        experience = make_experience(rollout, score, old, ref, value, config=PPO, kl_coef=0.1)
        step = fast_jit(make_critic_step(before_token, OPTIMIZER, PPO), donate_argnums=0)
        critic, critic_metrics = step(critic, experience, base)
        step = fast_jit(make_actor_step(logprobs, OPTIMIZER, PPO), donate_argnums=0)
        actor, actor_metrics = step(actor, experience, base)
        metrics = jax.device_get({**actor_metrics, **critic_metrics})
    assert pointers(base) == at
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(base), host)  # bit for bit
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), jax.device_get(actor.params), fresh)
    assert min(low["b"] for part in moved["layers"].values() for low in part.values()) > 0
    assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 0
    assert metrics["actor/initial_ratio_gap"] < 1e-6

    del experience, score, value, actor_metrics, critic_metrics
    gc.collect()
    now, expected, one = live_bytes(), live_bytes((base, actor, critic, reward, rollout, old, ref)), live_bytes(base)
    for device in expected:
        assert now[device] - before[device] == expected[device]
        # A device's slices of the base; three bases would be three times this, before any state.
        own = sum(x.addressable_shards[device[0]].data.nbytes for x in jax.tree.leaves(base))
        assert one[device] == own and expected[device] < 1.5 * own

    with jax.set_mesh(mesh):  # the same where the adapter is not new
        rollout, old, ref = rollout_of(trained("lm"), base)
    assert np.abs(np.asarray(old) - np.asarray(ref))[in_response(rollout)].max() > 0.1


def test_generation_holds_the_base_once():
    """Compiled: its temporary memory is the cache and activations, not another base."""
    config, mesh = replace(CONFIG, embed=128, mlp=2048), make_mesh(1, 2, 4)
    with jax.set_mesh(mesh):
        base = shapes_on(config, mesh, shardings=param_shardings(config, mesh, GENERATE))
        shapes = jax.eval_shape(partial(init_lora, config, LORA), jax.random.key(0))
        stored = lora_shardings(config, mesh, LORA)
        actor = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, stored)
        arguments = actor, *prompts(), jax.random.split(jax.random.key(11), B), base
        generate = jax.jit(make_generate(config, mesh, SamplingConfig(R), lora=LORA))
        memory: Any = generate.lower(*arguments).compile(QUICK).memory_analysis()
    a_device = sum(np.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(base))
    assert a_device <= memory.argument_size_in_bytes < 1.3 * a_device
    assert memory.temp_size_in_bytes < a_device / 2
