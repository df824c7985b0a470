"""The four roles on one mesh: the invariants of an iteration, and who holds which memory when."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.algorithms import policy_logprobs
from jrlhf.data.batches import put_rows
from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import (
    LoRAConfig,
    SamplingConfig,
    init_lm,
    init_lora,
    lora_shardings,
    param_shardings,
)
from jrlhf.ppo import Rollout, TrainState, experience_metrics
from jrlhf.roles.actor import Actor, Reference
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.critic import CostCritic, Critic
from jrlhf.roles.model import Architecture, Compute, Model, generation_weights
from jrlhf.roles.role import Site
from jrlhf.run.checkpoints import fingerprint_of
from jrlhf.run.clock import Clock
from tests.jrlhf.roles.ppo_roles import MODEL, OPTIMIZER, PPO, PROMPT, RESPONSE, ROWS, SINGLE, Setup
from tests.support.live import live_bytes

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module", params=[0.5, pytest.param(0.9, marks=pytest.mark.full)])
def setup(request):
    return Setup(make_mesh(1, 2, 2, devices=jax.devices()[:4]), temperature=request.param)


def test_an_iteration_keeps_the_invariants(setup):
    frozen = setup.reference.model.fingerprint(), setup.reward.model.fingerprint()
    before = setup.policy.fingerprint(), fingerprint_of((setup.states["critic"].params,))
    assert before[0] == frozen[0] and before[1] == frozen[1]

    experience, metrics = setup.iterate(0)
    figures = jax.device_get(experience_metrics(experience))
    assert figures["objective/kl"] == 0.0
    assert float(metrics["actor/initial_ratio_gap"]) < 1e-5
    assert figures["rollout/logprob_gap_max"] < 1e-4
    scores = np.where(experience.finished, experience.scores, 0)  # of a row that was cut off the value stands for it
    np.testing.assert_allclose(np.asarray(experience.rewards).sum(1), scores, rtol=1e-5)

    assert (setup.reference.model.fingerprint(), setup.reward.model.fingerprint()) == frozen
    assert setup.policy.fingerprint() != before[0]
    assert fingerprint_of((setup.states["critic"].params,)) != before[1]
    assert setup.states["actor"].step == 1

    experience, _ = setup.iterate(1)
    assert jax.device_get(experience_metrics(experience))["objective/kl"] != 0.0
    assert set(setup.clock.take()) == {
        f"timing_s/{name}"
        for name in ("reshard gen reward old_log_prob ref values update_critic update_actor step").split()
    }


def test_two_critics_are_timed_apart(monkeypatch):
    monkeypatch.setattr(CompiledModel, "score_values", lambda _: lambda *_: (0, 0))
    monkeypatch.setattr(CompiledModel, "critic_step", lambda *_: lambda state, *_: (state, {"critic/grad_norm": 1.0}))
    rows: Any = SimpleNamespace(tokens=None, lengths=None)
    for kind, name, timed in ((Critic, "critic", "values"), (CostCritic, "cost_critic", "cost_values")):
        site = Site(make_mesh(1, 4, 2), Compute(), Clock())
        critic = kind(Model(Architecture(MODEL), {}), site, optimizer=OPTIMIZER, algorithm=PPO)
        critic = critic.bind(TrainState.create({}, OPTIMIZER))
        critic.values(rows)
        assert critic.update(rows) == {f"{name}/grad_norm": 1.0}
        assert set(critic.clock.take()) == {f"timing_s/{timed}", f"timing_s/update_{name}", "timing_s/step"}


@pytest.mark.full
def test_a_single_update_may_share_the_passes_that_made_its_experience():
    ends = []
    for shared_passes in (False, True):
        setup = Setup(make_mesh(1, 2, 2, devices=jax.devices()[:4]), ppo=SINGLE, temperature=0.9)
        experience, metrics = setup.iterate(0, shared_passes=shared_passes)
        ends.append(jax.device_get((experience, metrics, setup.states)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *ends)
    assert "timing_s/update" in setup.clock.take()


def test_the_generation_copy_lives_only_while_generating(setup):
    policy, mesh = setup.policy, setup.policy.mesh
    with jax.set_mesh(mesh):
        # Waited for: on simulated devices no programs with collectives may run beside others.
        jax.block_until_ready(generation_weights(policy, mesh, Compute()))  # compiled, so that constants are there
        before = live_bytes()
        copy = jax.block_until_ready(generation_weights(policy, mesh, Compute()))
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
    ends = []
    for blocking in (True, False):
        clock = Clock(blocking=blocking)
        setup = Setup(make_mesh(1, 1, 1, devices=jax.devices()[:1]), clock, temperature=1.0)
        for step in range(2):
            clock.start()
            experience, metrics = setup.iterate(step)
            taken = clock.take()
            assert 0 < taken["timing_s/gen"] and sum(taken.values()) <= 2 * taken["timing_s/step"]
        ends.append(fingerprint_of((setup.states, experience, metrics)))
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
        site, sampling = Site(mesh, Compute(), clock), SamplingConfig(max_new_tokens=RESPONSE, temperature=0.7)
        actor = Actor(policy, site, sampling=sampling, optimizer=optax.sgd(0.1), algorithm=PPO)
        bare = Model(Architecture(MODEL, shared=True), base)
        reference = Reference(bare, site, temperature=0.7, responses=RESPONSE)
        drawn = np.random.default_rng(0).integers(2, MODEL.vocab_size, (ROWS, PROMPT + RESPONSE)).astype(np.int32)
        tokens, ends = put_rows((drawn, np.full(ROWS, PROMPT, np.int32)), mesh)
        rollout = Rollout(tokens, ends, ends, tokens * 0.0, ends > 0, jnp.zeros((), jnp.int32))

        unbound, actor = actor, actor.bind(actor.create(adapter))
        old, ref = policy_logprobs(actor, reference, rollout)
        np.testing.assert_array_equal(old, ref)  # at step 0 the KL is 0, not nearly
        assert set(clock.take()) == {"timing_s/old_log_prob", "timing_s/step"}

        actor = unbound.bind(actor.create(jax.tree.map(lambda x: x + 0.3, adapter)))
        old, ref = policy_logprobs(actor, reference, rollout)
        assert old is not None and ref is not None
        np.testing.assert_allclose(old, actor.logprobs(rollout), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ref, reference.logprobs(rollout), rtol=1e-5, atol=1e-5)
        assert np.abs(np.asarray(old) - ref).max() > 0.01

        with pytest.raises(TypeError, match="a reference of pairs cannot read a Rollout"):
            Reference(bare, site, temperature=0.7, responses=None).logprobs(rollout)

        # A reference with weights of its own has a pass of its own.
        copies = bare.holding(jax.tree.map(jnp.copy, base))
        other = Reference(copies, site, temperature=0.7, responses=RESPONSE)
        clock.start()
        np.testing.assert_allclose(np.asarray(policy_logprobs(actor, other, rollout)[1]), ref, rtol=1e-5, atol=1e-5)
        assert set(clock.take()) == {"timing_s/old_log_prob", "timing_s/ref", "timing_s/step"}
