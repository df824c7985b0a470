"""The four roles on one mesh: the invariants of an iteration, and who holds which memory when."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.batches import key_for, put_rows, row_keys
from jrlhf.checkpoints import fingerprint_of
from jrlhf.clock import Clock
from jrlhf.meshes import live_bytes, make_mesh
from jrlhf.model import Architecture, Model
from jrlhf.models import ModelConfig, SamplingConfig, init_sharded, scalar_from
from jrlhf.ppo import PPOConfig, TrainState, experience_metrics, make_experience
from jrlhf.programs import Compute, generation_weights
from jrlhf.rl import ppo_iteration
from jrlhf.roles import Actor, Critic, Reference, Reward
from jrlhf.scoring import Batch

MODEL = ModelConfig(
    vocab_size=100, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32, max_positions=16, initializer_range=0.3
)
ROWS, PROMPT, RESPONSE = 16, 6, 8
PPO = PPOConfig(epochs=2, minibatches=2, truncation="bootstrap")


class Scored:
    """Rewards that are one reward model, as it is."""

    def __init__(self, reward: Reward):
        self.score = lambda rollout, batch: reward.score(rollout)


class Setup:
    """Four roles, of which actor and reference, critic and reward model begin equal."""

    def __init__(self, temperature: float):
        self.mesh = make_mesh(1, 4, 2)
        compute, clock = Compute(), Clock()
        with jax.set_mesh(self.mesh):
            params = init_sharded(MODEL, jax.random.key(0), self.mesh)
            scalar = init_sharded(MODEL, jax.random.key(1), self.mesh, "scalar", zero_head=False)
            optimizer = optax.adamw(1e-2)
            architecture, shared = Architecture(MODEL), (self.mesh, compute)
            state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
            sampling = SamplingConfig(max_new_tokens=RESPONSE, temperature=temperature, stop_ids=(1,))
            self.actor = Actor(
                Model(architecture, params), *shared, sampling=sampling, optimizer=optimizer, ppo=PPO, clock=clock
            )
            self.actor.state = state
            self.critic = Critic(Model(architecture, scalar), *shared, optimizer=optimizer, ppo=PPO, clock=clock)
            self.critic.state = TrainState.create(scalar_from(scalar, keep_head=True), optimizer)
            self.reference = Reference(Model(architecture, params), *shared, temperature=temperature, clock=clock)
            self.reward = Reward(Model(architecture, scalar), *shared, clock=clock)
        self.clock = clock

    def iterate(self, step: int):
        rng = np.random.default_rng(step)
        tokens = rng.integers(2, MODEL.vocab_size, (ROWS, PROMPT)).astype(np.int32)
        lengths = rng.integers(1, PROMPT + 1, ROWS).astype(np.int32)
        tokens[np.arange(PROMPT)[None, :] >= lengths[:, None]] = 0
        with jax.set_mesh(self.mesh):
            prompts = (*put_rows((tokens, lengths), self.mesh), row_keys(key_for(0, "test", step), ROWS, self.mesh))
            return ppo_iteration(
                self.actor,
                self.critic,
                self.reference,
                cast(Any, Scored(self.reward)),
                Batch(prompts, (), (), step),
                lambda *inputs, **more: make_experience(*inputs, config=PPO, kl_coef=0.1, **more),
            )


@pytest.fixture(scope="module", params=[0.5, pytest.param(0.9, marks=pytest.mark.slow)])
def setup(request):
    return Setup(temperature=request.param)


def test_an_iteration_keeps_the_invariants(setup):
    frozen = setup.reference.model.fingerprint(), setup.reward.model.fingerprint()
    before = setup.actor.model.fingerprint(), fingerprint_of((setup.critic.state.params,))
    assert before[0] == frozen[0] and before[1] == frozen[1]

    experience, metrics = setup.iterate(0)
    said = jax.device_get(experience_metrics(experience))
    assert said["objective/kl"] == 0.0
    assert float(metrics["actor/initial_ratio_gap"]) < 1e-5
    assert said["rollout/logprob_gap_max"] < 1e-4
    np.testing.assert_allclose(np.asarray(experience.rewards).sum(1), np.asarray(experience.scores), rtol=1e-5)

    assert (setup.reference.model.fingerprint(), setup.reward.model.fingerprint()) == frozen
    assert setup.actor.model.fingerprint() != before[0]
    assert fingerprint_of((setup.critic.state.params,)) != before[1]
    assert setup.actor.state.step == 1

    experience, _ = setup.iterate(1)
    assert jax.device_get(experience_metrics(experience))["objective/kl"] != 0.0
    assert set(setup.clock.take()) == {
        f"timing_s/{name}"
        for name in ("reshard gen reward old_log_prob ref values update_critic update_actor step").split()
    }


def test_the_generation_copy_lives_only_while_generating(setup):
    policy = setup.actor.model
    with jax.set_mesh(setup.mesh):
        generation_weights(policy, setup.mesh, Compute())  # compiled, so that constants are there
        before = live_bytes()
        copy = generation_weights(policy, setup.mesh, Compute())
        during = live_bytes()
        assert during - before == live_bytes(copy) and live_bytes(copy).total() > 0
        del copy
        assert live_bytes() == before
    # A whole iteration leaves no copy and no cache behind: the same states as before it, and its own experience.
    setup.iterate(2)
    before = live_bytes()
    experience, metrics = setup.iterate(3)
    after = live_bytes()
    del experience, metrics
    assert after != before and live_bytes() == before
