"""One frozen base under actor, reference, critic and reward model, in a whole PPO iteration."""

import gc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
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
    init_lm,
    init_lora,
    lora_shardings,
    make_generate,
    make_logprobs,
    make_scores,
    make_values,
    param_shardings,
)
from jrlhf.models.presets import PRESETS
from jrlhf.ppo import PPOConfig, Rollout, TrainState, make_actor_step, make_critic_step, make_experience
from tests.support.live import live_bytes

CONFIG = ModelConfig(
    vocab_size=150, embed=32, layers=2, heads=8, kv_heads=2, head_dim=8, mlp=1024, max_positions=32, qkv_bias=True
)
LORA = LoRAConfig(rank=2, alpha=8.0)
PPO = PPOConfig(epochs=2, minibatches=1, micro_batches=1, truncation="zero")
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
B, P, R = 16, 6, 8
QUICK: Any = {"xla_backend_optimization_level": 0}
fast_jit = partial(jax.jit, compiler_options=QUICK)


def host_weights(reference):
    """The base, unstacked, and adapters of actor, critic and reward model: the actor's is new, the others trained."""
    base = reference.random_params(CONFIG)
    base["embedding"] = base["embedding"] * np.float32(0.3)
    base["layers"] = jax.tree.map(lambda x: 0.3 * x if x.ndim > 2 else x, base["layers"])
    layers = [jax.tree.map(lambda x, i=i: x[i], base["layers"]) for i in range(CONFIG.layers)]
    generator = np.random.default_rng(1)

    def trained(head):
        shapes = jax.eval_shape(lambda key: init_lora(CONFIG, LORA, key, head), jax.random.key(0))
        return jax.tree.map(lambda x: (0.1 * generator.normal(size=x.shape)).astype(np.float32), shapes)

    actor = jax.device_get(init_lora(CONFIG, LORA, jax.random.key(1)))
    return {**base, "layers": layers}, actor, trained("scalar"), trained("scalar"), trained("lm")


def prompts():
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, P + 1, B).astype(np.int32)
    tokens = generator.integers(0, CONFIG.vocab_size, (B, P)).astype(np.int32)
    return np.where(np.arange(P)[None, :] < lengths[:, None], tokens, 0), lengths


def pointers(tree):
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


def adapters_on(mesh, adapter, head: Any = "lm"):
    return jax.device_put(adapter, lora_shardings(CONFIG, mesh, LORA, head))


@pytest.fixture(scope="module")
def weights(reference):
    return host_weights(reference)


class Roles:
    """The functions of one iteration on one mesh, compiled."""

    def __init__(self, mesh, temperature):
        self.logprobs = make_logprobs(CONFIG, mesh, GENERATE, temperature=temperature, lora=LORA)
        values = make_values(CONFIG, mesh, GENERATE, lora=LORA)

        def before(params, tokens, frozen):
            return values(params, tokens, frozen)[:, :-1]

        self.values = fast_jit(before)
        self.scores = fast_jit(make_scores(CONFIG, mesh, GENERATE, lora=LORA))
        self.reference = fast_jit(make_logprobs(CONFIG, mesh, GENERATE, temperature=temperature))
        self.generate = fast_jit(
            make_generate(CONFIG, mesh, SamplingConfig(R, temperature=temperature, stop_ids=(3, 9)), lora=LORA)
        )
        self.score_actor = fast_jit(self.logprobs)
        self.train_actor = fast_jit(make_actor_step(self.logprobs, OPTIMIZER, PPO), donate_argnums=0)
        self.train_critic = fast_jit(make_critic_step(before, OPTIMIZER, PPO), donate_argnums=0)

    def rollout(self, actor, base):
        drawn = self.generate(actor, *prompts(), jax.random.split(jax.random.key(11), B), base)
        return Rollout(**vars(drawn), version=jnp.zeros((), jnp.int32))

    def iteration(self, base, actor, critic, reward):
        """What happens in one iteration, as in `jrlhf/stages/rl.py`; all of it reads one `base`."""
        rollout = self.rollout(actor.params, base)
        lengths = rollout.prompt_lengths + rollout.response_lengths
        old, _ = self.score_actor(actor.params, rollout.tokens, base)
        ref, _ = self.reference(base, rollout.tokens)
        out = SimpleNamespace(rollout=rollout, old=old, ref=ref)
        experience = make_experience(
            rollout,
            self.scores(reward, rollout.tokens, lengths, base),
            old,
            ref,
            self.values(critic.params, rollout.tokens, base),
            config=PPO,
            kl_coef=0.1,
        )
        out.critic, critic_metrics = self.train_critic(critic, experience, base)
        out.actor, actor_metrics = self.train_actor(actor, experience, base)
        out.metrics = jax.device_get({**actor_metrics, **critic_metrics})
        return out


def run(mesh, weights, temperature=0.9):
    base, actor, critic, reward, _ = weights
    with jax.set_mesh(mesh):
        base = jax.device_put(base, param_shardings(CONFIG, mesh, GENERATE))
        actor = TrainState.create(adapters_on(mesh, actor), OPTIMIZER)
        critic = TrainState.create(adapters_on(mesh, critic, "scalar"), OPTIMIZER)
        reward = adapters_on(mesh, reward, "scalar")
        roles = Roles(mesh, temperature)
        at = pointers(base)
        out = roles.iteration(base, actor, critic, reward)
        assert pointers(base) == at
    return base, reward, roles, out


def in_response(rollout):
    place, start = np.arange(P + R)[None, :], np.asarray(rollout.prompt_lengths)[:, None]
    return (place >= start) & (place < start + np.asarray(rollout.response_lengths)[:, None])


@pytest.fixture(scope="module")
def iterated(weights):
    """An iteration on a mesh with all three axes, and what was live before it."""
    gc.collect()
    before = live_bytes()
    return before, *run(make_mesh(2, 2, 2), weights)


@pytest.mark.full
def test_one_base_serves_every_role_and_nothing_else_is_kept(iterated, weights):
    before, base, reward, _, out = iterated
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(base), weights[0])  # bit for bit
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), jax.device_get(out.actor.params), weights[1])
    assert min(low["b"] for part in moved["layers"].values() for low in part.values()) > 0
    assert out.metrics["actor/skipped_updates"] == out.metrics["critic/skipped_updates"] == 0

    roles = {"actor": out.actor, "critic": out.critic, "reward": reward}
    gc.collect()
    now, held = live_bytes(), live_bytes((base, roles, out.rollout, out.old, out.ref))
    for device in held:
        assert now[device] - before[device] == held[device]
    # A device's slices of the base, in bytes, and what three bases of their own would be.
    one = live_bytes(base)
    for device in one:
        own = sum(x.addressable_shards[device[0]].data.nbytes for x in jax.tree.leaves(base))
        assert one[device] == own
        assert held[device] < 1.5 * own  # three bases would be 3 * own, before any state


@pytest.mark.full
def test_at_the_first_step_the_ratio_is_1_and_the_kl_is_0(iterated):
    *_, out = iterated
    np.testing.assert_array_equal(out.old, out.ref)
    assert out.metrics["actor/initial_ratio_gap"] < 1e-6


@pytest.mark.full
def test_an_iteration_does_not_depend_on_the_mesh(iterated, weights):
    *_, out = iterated
    *_, other = run(make_mesh(1, 1, 1, devices=jax.devices()[:1]), weights)
    np.testing.assert_array_equal(out.rollout.tokens, other.rollout.tokens)
    for name, value in out.metrics.items():
        np.testing.assert_allclose(other.metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    for state, same in ((out.actor, other.actor), (out.critic, other.critic)):
        for x, y in zip(*(jax.tree.leaves(jax.device_get(s.params)) for s in (state, same)), strict=True):
            assert np.abs(x - y).max() <= 1e-5 * np.abs(x).max()


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.9, 0.5, 1.0])
def test_rollout_logprobs_are_the_recomputed_ones(iterated, weights, temperature):
    """Also where the adapter is not new: generation and scoring apply it unmerged."""
    _, base, _, roles, _ = iterated
    _, fresh, _, _, trained = weights
    mesh = base["embedding"].sharding.mesh
    with jax.set_mesh(mesh):
        if temperature != 0.9:
            roles = Roles(mesh, temperature)
        for adapter in (fresh, trained):
            placed = adapters_on(mesh, adapter)
            rollout = roles.rollout(placed, base)
            old, _ = roles.score_actor(placed, rollout.tokens, base)
            ref, _ = roles.reference(base, rollout.tokens)
            inside = in_response(rollout)
            np.testing.assert_allclose(np.asarray(rollout.logprobs)[inside], np.asarray(old)[inside], atol=1e-4)
            if adapter is fresh:
                np.testing.assert_array_equal(old, ref)
            else:
                assert np.abs(np.asarray(old) - np.asarray(ref))[inside].max() > 0.1


def test_generation_holds_the_base_once():
    """Compiled: its temporary memory is the cache and activations, not another base."""
    config, mesh = replace(CONFIG, embed=128, mlp=2048), make_mesh(1, 2, 4)

    def shapes(init, shardings):
        tree = jax.eval_shape(init, jax.random.key(0))
        if isinstance(shardings["layers"], list):
            layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree["layers"])
            tree = {**tree, "layers": [layer] * config.layers}
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    with jax.set_mesh(mesh):
        base = shapes(partial(init_lm, config), param_shardings(config, mesh, GENERATE))
        actor = shapes(partial(init_lora, config, LORA), lora_shardings(config, mesh, LORA))
        arguments = actor, *prompts(), jax.random.split(jax.random.key(11), B), base
        generate = jax.jit(make_generate(config, mesh, SamplingConfig(R), lora=LORA))
        memory: Any = generate.lower(*arguments).compile(QUICK).memory_analysis()
    a_device = sum(np.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(base))
    assert a_device <= memory.argument_size_in_bytes < 1.3 * a_device
    assert memory.temp_size_in_bytes < a_device / 2


def test_the_sums_of_the_memory_table_for_qwen3_8b():
    """Arithmetic, from the shapes: rank 32 on every projection, 16 bytes a trained parameter, 2 a frozen one."""
    config, lora = PRESETS["Qwen/Qwen3-8B"], LoRAConfig(rank=32, alpha=64.0)

    def count(init):
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))

    base, adapter = count(partial(init_lm, config)), count(partial(init_lora, config, lora))
    assert adapter == 87_293_952
    states = 16 * adapter
    assert round((2 * base + states) / 1e9, 1) == 17.8
    assert round((3 * 2 * base + states) / 1e9, 1) == 50.5
