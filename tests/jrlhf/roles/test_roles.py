"""The four roles on one mesh: the invariants of an iteration, and who holds which memory when."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jrlhf.algorithms import registry as algorithms
from jrlhf.algorithms.registry import on_policy, policy_logprobs
from jrlhf.data.batches import Batch, key_for, put_rows, row_keys
from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import (
    LoRAConfig,
    ModelConfig,
    SamplingConfig,
    init_lm,
    init_lora,
    init_sharded,
    lora_shardings,
    param_shardings,
    scalar_from,
)
from jrlhf.ppo import PPOConfig, Rollout, TrainState, experience_metrics
from jrlhf.roles.compiled import Compute, generation_weights
from jrlhf.roles.model import Architecture, Model
from jrlhf.roles.offloading import Offloader
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.roles import Actor, Critic, ExperienceMaker, FusedUpdate, Reference, Reward
from jrlhf.run.checkpoints import fingerprint_of
from jrlhf.run.clock import Clock
from tests.support.live import live_bytes

MODEL = ModelConfig(
    vocab_size=100, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32, max_positions=16, initializer_range=0.3
)
ROWS, PROMPT, RESPONSE = 16, 6, 8
PPO = PPOConfig(epochs=2, minibatches=2, truncation="bootstrap")
SINGLE = PPOConfig(truncation="bootstrap")
OPTIMIZER = optax.adamw(1e-2)


class Scored:
    """Rewards that are one reward model, as it is."""

    def __init__(self, reward: Reward):
        self.reward = reward

    def score(self, rollout, prompts):
        return self.reward.score(rollout)


class Setup:
    """Four roles, of which actor and reference, critic and reward model begin equal."""

    def __init__(self, temperature: float, mesh: Mesh, clock: Clock, ppo: PPOConfig = PPO):
        self.mesh, compute, self.ppo = mesh, Compute(), ppo
        with jax.set_mesh(self.mesh):
            params = init_sharded(MODEL, jax.random.key(0), self.mesh)
            scalar = init_sharded(MODEL, jax.random.key(1), self.mesh, "scalar", zero_head=False)
            optimizer = OPTIMIZER
            architecture, shared = Architecture(MODEL), (self.mesh, compute)
            state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
            sampling = SamplingConfig(max_new_tokens=RESPONSE, temperature=temperature, stop_ids=(1,))
            self.actor = Actor(
                Model(architecture, params), *shared, sampling=sampling, optimizer=optimizer, algorithm=ppo, clock=clock
            )
            self.actor.state = state
            self.critic = Critic(Model(architecture, scalar), *shared, optimizer=optimizer, algorithm=ppo, clock=clock)
            self.critic.state = TrainState.create(scalar_from(scalar, keep_head=True), optimizer)
            asked = {"temperature": temperature, "responses": RESPONSE}
            self.reference = Reference(Model(architecture, params), *shared, **asked, clock=clock)
            self.reward = Reward(Model(architecture, scalar), *shared, clock=clock)
            roles = self.actor, self.critic, *shared
            self.learner = FusedUpdate(*roles, optimizers=(optimizer, optimizer), algorithm=SINGLE, **asked)
        self.estimator = ExperienceMaker(ppo, Clock())
        self.clock = clock

    def iterate(self, step: int, *, shared_passes: bool = False):
        rng = np.random.default_rng(step)
        tokens = rng.integers(2, MODEL.vocab_size, (ROWS, PROMPT)).astype(np.int32)
        lengths = rng.integers(1, PROMPT + 1, ROWS).astype(np.int32)
        tokens[np.arange(PROMPT)[None, :] >= lengths[:, None]] = 0
        with jax.set_mesh(self.mesh):
            prompts = (*put_rows((tokens, lengths), self.mesh), row_keys(key_for(0, "test", step), ROWS, self.mesh))
            batch, rewards = Batch(prompts, (), (), step), cast(Any, Scored(self.reward))
            if shared_passes:
                return on_policy(self.actor, self.learner, self.reference, rewards, batch, 0.1)
            return algorithms.ppo(self.actor, self.critic, self.reference, rewards, self.estimator, batch, 0.1)


@pytest.fixture(scope="module", params=[0.5, pytest.param(0.9, marks=pytest.mark.full)])
def setup(request):
    return Setup(request.param, make_mesh(1, 2, 2, devices=jax.devices()[:4]), Clock())


def test_an_iteration_keeps_the_invariants(setup):
    frozen = setup.reference.model.fingerprint(), setup.reward.model.fingerprint()
    before = setup.actor.model.fingerprint(), fingerprint_of((setup.critic.state.params,))
    assert before[0] == frozen[0] and before[1] == frozen[1]

    experience, metrics = setup.iterate(0)
    said = jax.device_get(experience_metrics(experience))
    assert said["objective/kl"] == 0.0
    assert float(metrics["actor/initial_ratio_gap"]) < 1e-5
    assert said["rollout/logprob_gap_max"] < 1e-4
    kept = np.where(experience.finished, experience.scores, 0)  # of a row that was cut off the value stands for it
    np.testing.assert_allclose(np.asarray(experience.rewards).sum(1), kept, rtol=1e-5)

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


@pytest.mark.parametrize("name, timed", [("critic", "values"), ("cost_critic", "cost_values")])
def test_two_critics_are_timed_apart(name, timed):
    critic: Any = object.__new__(Critic)
    critic._name, critic.clock, critic._model = name, Clock(), Model(Architecture(MODEL), {})
    critic.placement, critic._compute = RolePlacement.of(make_mesh(1, 4, 2)), Compute()
    critic.offloader = Offloader(critic.clock)
    critic.state = TrainState.create({}, OPTIMIZER)
    critic._values = lambda *_: (0, 0)
    critic._update = lambda state, *_: (state, {"critic/grad_norm": 1.0})
    rows: Any = None
    critic.values(SimpleNamespace(tokens=None, lengths=None))
    assert critic.update(rows) == {f"{name}/grad_norm": 1.0}
    assert set(critic.clock.take()) == {f"timing_s/{timed}", f"timing_s/update_{name}", "timing_s/step"}


@pytest.mark.full
def test_a_single_update_may_share_the_passes_that_made_its_experience():
    ends = []
    for shared_passes in (False, True):
        setup = Setup(0.9, make_mesh(1, 2, 2, devices=jax.devices()[:4]), Clock(), SINGLE)
        experience, metrics = setup.iterate(0, shared_passes=shared_passes)
        ends.append(jax.device_get((experience, metrics, setup.actor.state, setup.critic.state)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *ends)
    assert "timing_s/update" in setup.clock.take()


def test_the_generation_copy_lives_only_while_generating(setup):
    policy = setup.actor.model
    with jax.set_mesh(setup.mesh):
        # Waited for: on simulated devices no programs with collectives may run beside others.
        jax.block_until_ready(
            generation_weights(policy, setup.mesh, Compute())
        )  # compiled, so that constants are there
        before = live_bytes()
        copy = jax.block_until_ready(generation_weights(policy, setup.mesh, Compute()))
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


@pytest.mark.full
def test_calls_that_are_not_waited_for_give_the_same_bits():
    setup = Setup(1.0, make_mesh(1, 1, 1, devices=jax.devices()[:1]), Clock())
    states = setup.actor.state, setup.critic.state
    start, places = jax.device_get(states), jax.tree.map(lambda leaf: leaf.sharding, states)
    ends = []
    for blocking in (True, False):
        clock = Clock(blocking=blocking)
        for role in (setup.actor, setup.critic, setup.reference, setup.reward):
            role.clock = clock
        setup.actor.state, setup.critic.state = jax.device_put(start, places)
        for step in range(2):
            clock.start()
            experience, metrics = setup.iterate(step)
            taken = clock.take()
            assert 0 < taken["timing_s/gen"] and sum(taken.values()) <= 2 * taken["timing_s/step"]
        ends.append(fingerprint_of((setup.actor.state, setup.critic.state, experience, metrics)))
    assert ends[0] == ends[1]


@pytest.mark.full
def test_an_adapter_and_the_base_that_is_its_reference_are_scored_in_one_pass():
    mesh, clock, lora = make_mesh(1, 2, 2, devices=jax.devices()[:4]), Clock(), LoRAConfig(rank=2, alpha=8.0)
    with jax.set_mesh(mesh):
        base = init_lm(MODEL, jax.random.key(0))
        base["layers"] = [jax.tree.map(lambda x, i=i: x[i], base["layers"]) for i in range(MODEL.layers)]
        base = jax.device_put(base, param_shardings(MODEL, mesh, GENERATE))
        adapter = jax.device_put(init_lora(MODEL, lora, jax.random.key(1)), lora_shardings(MODEL, mesh, lora))
        policy = Model(Architecture(MODEL, lora, shared=True), adapter, base)
        shared, sampling = (mesh, Compute()), SamplingConfig(max_new_tokens=RESPONSE, temperature=0.7)
        actor = Actor(policy, *shared, sampling=sampling, optimizer=optax.sgd(0.1), algorithm=PPO, clock=clock)
        bare = Model(Architecture(MODEL, shared=True), base)
        reference = Reference(bare, *shared, temperature=0.7, responses=RESPONSE, clock=clock)
        drawn = np.random.default_rng(0).integers(2, MODEL.vocab_size, (ROWS, PROMPT + RESPONSE)).astype(np.int32)
        tokens, ends = put_rows((drawn, np.full(ROWS, PROMPT, np.int32)), mesh)
        rollout = Rollout(tokens, ends, ends, tokens * 0.0, ends > 0, jnp.zeros((), jnp.int32))

        actor.state = TrainState.create(adapter, optax.sgd(0.1))
        old, ref = policy_logprobs(actor, reference, rollout)
        np.testing.assert_array_equal(old, ref)  # at step 0 the KL is 0, not nearly
        assert set(clock.take()) == {"timing_s/old_log_prob", "timing_s/step"}

        actor.state = TrainState.create(jax.tree.map(lambda x: x + 0.3, adapter), optax.sgd(0.1))
        old, ref = policy_logprobs(actor, reference, rollout)
        assert old is not None and ref is not None
        np.testing.assert_allclose(old, actor.logprobs(rollout), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ref, reference.logprobs(rollout), rtol=1e-5, atol=1e-5)
        assert np.abs(np.asarray(old) - ref).max() > 0.01

        with pytest.raises(TypeError, match="a reference of pairs cannot read a Rollout"):
            Reference(bare, *shared, temperature=0.7, responses=None, clock=clock).logprobs(rollout)

        # A reference with weights of its own has a pass of its own.
        other = Reference(
            bare.holding(jax.tree.map(jnp.copy, base)), *shared, temperature=0.7, responses=RESPONSE, clock=clock
        )
        clock.start()
        np.testing.assert_allclose(np.asarray(policy_logprobs(actor, other, rollout)[1]), ref, rtol=1e-5, atol=1e-5)
        assert set(clock.take()) == {"timing_s/old_log_prob", "timing_s/ref", "timing_s/step"}
