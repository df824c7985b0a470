"""The four roles on one mesh: the invariants of an iteration, and its memory, with and without offloading."""

import gc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.algorithms import policy_logprobs
from jrlhf.algorithms.ppo import ppo
from jrlhf.algorithms.registry import graph_of
from jrlhf.algorithms.roles import ROLES
from jrlhf.config import Config
from jrlhf.config.schema import SleepConfig
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
from jrlhf.planning.memory import residency
from jrlhf.ppo import Rollout, TrainState, experience_metrics
from jrlhf.roles import critic as critic_roles
from jrlhf.roles.actor import Actor
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.critic import CostCritic, Critic
from jrlhf.roles.frozen import Reference
from jrlhf.roles.graph import trace
from jrlhf.roles.model import Architecture, Compute, Model, generation_weights
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.planned_placement import Prefetch
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock
from jrlhf.run.fingerprints import fingerprint_of
from jrlhf.run.profiler import CompilationWatch
from tests.jrlhf.roles.ppo_roles import MODEL, OPTIMIZER, PPO, PROMPT, RESPONSE, ROWS, Setup
from tests.support.live import bytes_by_kind, live_bytes

ALL = SleepConfig(optimizer="host", actor="host", critic="host", reference="host", reward="host")
CALLS = ("reshard", "gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor")
EVENTS = {"actor.generate": "gen", "reward.score": "reward", "actor.logprobs": "old_log_prob"}
EVENTS |= {"reference.logprobs": "ref", "critic.values": "values", "critic.update": "update_critic"}
EVENTS |= {"actor.update": "update_actor"}


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.full
def test_an_iteration_keeps_the_invariants(awake):
    first, second = awake.iterations[:2]
    assert first.figures()["objective/kl"] == 0.0 != second.figures()["objective/kl"]
    assert first.metrics["actor/initial_ratio_gap"] < 1e-5
    assert first.figures()["rollout/logprob_gap_max"] < 1e-4
    e = first.experience
    scores = np.where(e.finished, e.scores, 0)  # of a row that was cut off the value stands for it
    np.testing.assert_allclose(e.rewards.sum(1), scores, rtol=1e-5)

    before, after = first.before, first.after
    assert before["actor"] == before["reference"] and before["critic"] == before["reward"]
    assert {name for name in before if before[name] != after[name]} == {"actor", "critic"}
    assert first.step == 1
    assert set(awake.clock.take()) == {f"timing_s/{name}" for name in (*CALLS, "step")}


def test_two_critics_are_timed_apart(monkeypatch):
    monkeypatch.setattr(CompiledModel, "score_values", lambda _: lambda *_: (0, 0))
    monkeypatch.setattr(critic_roles, "critic_step", lambda *_: lambda state, *_: (state, {"critic/grad_norm": 1.0}))
    rows: Any = SimpleNamespace(tokens=np.zeros((2, 3)), lengths=None)
    for kind, name, timed in ((Critic, "critic", "values"), (CostCritic, "cost_critic", "cost_values")):
        mesh = make_mesh(1, 4, 2)
        site = Site(RolePlacement.of(mesh), Compute(), Clock())
        weights = {"head": jax.device_put(jnp.zeros(8), NamedSharding(mesh, P()))}
        critic = kind(Model(Architecture(MODEL), weights), site, optimizer=OPTIMIZER, algorithm=PPO)
        critic = critic.bind(TrainState.create(weights, OPTIMIZER))
        critic.values(rows)
        assert critic.update(rows) == {f"{name}/grad_norm": 1.0}
        assert set(critic.clock.take()) == {f"timing_s/{timed}", f"timing_s/update_{name}", "timing_s/step"}


@pytest.mark.full
def test_the_generation_copy_lives_only_while_generating(sleepers, awake):
    if sleepers.config != SleepConfig():
        sleepers.begin(SleepConfig())
    setup = sleepers.setup
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


@pytest.mark.proof("runs")
def test_calls_that_are_not_waited_for_give_the_same_bits():
    ends = []
    for blocking in (True, False):
        clock = Clock(blocking=blocking)
        setup = Setup(make_mesh(1, 1, 1, devices=jax.devices()[:1]), clock, model=replace(MODEL, layers=1))
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
        site = Site(RolePlacement.of(mesh), Compute(), clock)
        sampling = SamplingConfig(max_new_tokens=RESPONSE, temperature=0.7)
        actor = Actor(policy, site, sampling=sampling, optimizer=optax.sgd(0.1), algorithm=PPO)
        bare = Model(Architecture(MODEL, shared=True), base)
        reference = Reference(bare, site, sampling=sampling)
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

        # A reference with weights of its own has a pass of its own.
        copies = bare.holding(jax.tree.map(jnp.copy, base))
        other = Reference(copies, site, sampling=sampling)
        clock.start()
        np.testing.assert_allclose(np.asarray(policy_logprobs(actor, other, rollout)[1]), ref, rtol=1e-5, atol=1e-5)
        assert set(clock.take()) == {"timing_s/old_log_prob", "timing_s/ref", "timing_s/step"}


# ---- offloaded between their calls


class Watch(Clock):
    """Notes what is in which memory when a call begins, and when it has ended."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple[str, Counter[str], Counter[str]]] = []
        self.made: dict[str, int] = {}

    def run(self, name, function, *args, **kwargs):
        def watched(*args, **kwargs):
            before = bytes_by_kind()
            result = jax.block_until_ready(function(*args, **kwargs))
            self.log.append((name, before, bytes_by_kind()))
            self.made[name] = bytes_by_kind(result)["device"]
            return result

        return super().run(name, watched, *args, **kwargs)

    def calls(self) -> list[tuple[str, Counter[str], Counter[str]]]:
        return [entry for entry in self.log if entry[0] != "sleep"]


class Iteration(NamedTuple):
    """What an iteration made, on the host."""

    experience: Any
    metrics: Any
    before: dict[str, str]  # digests of the roles' weights
    after: dict[str, str]
    step: int
    word: str  # a digest of all that it made

    @classmethod
    def of(cls, setup: Setup, step: int) -> "Iteration":
        before = digests(setup)
        experience, metrics = setup.iterate(step)
        word = fingerprint_of((experience, metrics, list(setup.states.values())))
        host_experience, host_metrics = jax.device_get((experience, metrics))
        del experience, metrics
        gc.collect()
        return cls(host_experience, host_metrics, before, digests(setup), int(setup.states["actor"].step), word)

    def figures(self) -> Any:
        return jax.device_get(experience_metrics(jax.tree.map(jnp.asarray, self.experience)))


def digests(setup: Setup) -> dict[str, str]:
    trained = {name: fingerprint_of((state.params,)) for name, state in setup.states.items()}
    return trained | {name: getattr(setup, name).model.fingerprint() for name in Sleepers.frozen}


class Sleepers:
    """Four roles with weights of their own, built anew for each config."""

    setup: Setup | None = None
    config: SleepConfig | None = None
    trained, frozen = ("actor", "critic"), ("reference", "reward")

    def begin(self, config: SleepConfig, prefetch: Prefetch | None = None) -> tuple[Watch, dict[str, int]]:
        """Builds the roles, offloaded as the config says. Returns a clock that watches, and each part's bytes there."""
        watch, asleep, self.setup, self.config = Watch(), {}, None, config
        gc.collect()
        mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
        self.setup = Setup(mesh, watch, sleep=config, prefetch=prefetch)
        for name, state in self.setup.states.items():
            asleep[name] = bytes_by_kind(state.params)["pinned_host"]
            asleep[f"{name} optimizer"] = bytes_by_kind(state.opt_state)["pinned_host"]
        for name in self.frozen:
            asleep[name] = bytes_by_kind(getattr(self.setup, name).model.params)["pinned_host"]
        gc.collect()
        watch.log.clear()
        return watch, asleep

    def iterate(self, *steps: int) -> list[str]:
        """One digest of all that each iteration makes."""
        assert self.setup is not None
        words = []
        for step in steps:
            experience, metrics = self.setup.iterate(step)
            words.append(fingerprint_of((experience, metrics, list(self.setup.states.values()))))
            del experience, metrics
            gc.collect()  # arrays in cycles of objects would count in the next iteration
        return words


@pytest.fixture(scope="module")
def sleepers():
    return Sleepers()


@pytest.fixture(scope="module")
def awake(sleepers):
    """Three iterations without sleep."""
    watch, asleep = sleepers.begin(SleepConfig())
    assert sum(asleep.values()) == 0
    iterations = [Iteration.of(sleepers.setup, step) for step in range(3)]
    words = [iteration.word for iteration in iterations]
    assert [name for name, *_ in watch.log] == [*CALLS] * 3 and len(set(words)) == 3
    assert all(before["pinned_host"] == after["pinned_host"] == 0 for _, before, after in watch.log)
    # Copies, for other tests go on with these roles.
    return SimpleNamespace(iterations=iterations, words=words, clock=watch, calls=watch.calls(), made=dict(watch.made))


@pytest.mark.proof("memory")
def test_three_iterations_asleep_are_those_awake_and_every_byte_is_in_its_place(sleepers, awake):
    watch, size = sleepers.begin(ALL)
    total = sum(size.values())
    assert all(size.values()) and bytes_by_kind()["pinned_host"] == total
    outputs = sleepers.iterate(0, 1)
    with CompilationWatch() as compilations:
        outputs += sleepers.iterate(2)
        assert compilations.take()[0] == []
    assert outputs == awake.words

    states = {name: size[name] + size[f"{name} optimizer"] for name in ("actor", "critic")}
    # Between two calls everything sleeps, and also when those have ended that bring what they need and let it go. Else:
    there = {"update_critic": states["critic"], "update_actor": states["actor"]}
    for (name, *with_it), (same, *without) in zip(awake.calls, watch.calls(), strict=True):
        assert name == same
        for before, now in zip(with_it, without, strict=True):
            assert before["device"] - now["device"] == total - there.get(name, 0), name
            used_up = there[name] if name.startswith("update") else 0
            assert now["pinned_host"] == total - used_up, name

    # The function that a memory model asks says the same of every call.
    loans: Counter[str] = Counter()
    for name, before, after in watch.log[: len(watch.log) // 3]:
        gained, pending = max(after["device"] - before["device"], 0), loans.pop("", 0)
        loans["" if name == "sleep" else name] = pending + gained if name == "sleep" else pending
    for call in graph_of(Config(sleep=ALL)):
        if call.kind != "compute":
            here = {role: residency(Config(sleep=ALL), role, call) for role in (*sleepers.trained, *sleepers.frozen)}
            amount = sum(size[role] for role, places in here.items() if places["weights"] == "device")
            amount += sum(size[f"{role} optimizer"] for role in sleepers.trained if here[role]["optimizer"] == "device")
            assert amount == loans[EVENTS[call.name]], call.name

    moves = [after["device"] - before["device"] for name, before, after in watch.log if name == "sleep"]
    brought = [size["actor"], size["reward"], size["actor"], size["reference"], size["critic"]]
    updates = [states["critic"], -states["critic"], states["actor"], -states["actor"]]
    assert moves == [*brought, *updates] * 3
    # The copy that generates, and its cache, are gone when the rollout is there.
    for calls, results in ((awake.calls, awake.made), (watch.calls(), watch.made)):
        begins = {name: before["device"] for name, before, _ in calls[: len(CALLS)]}
        assert begins["reward"] == begins["reshard"] + results["gen"]
        assert results["reshard"] > 0
    assert {f"timing_s/{name}" for name in (*CALLS, "sleep", "step")} == set(watch.take())


@pytest.mark.proof("memory")
@pytest.mark.parametrize("part", SleepConfig.SWITCHES)
def test_each_part_sleeps_by_itself(part, sleepers, awake):
    watch, size = sleepers.begin(replace(SleepConfig(), **{part: "host"}))
    names = ("actor optimizer", "critic optimizer") if part == "optimizer" else (part,)
    assert {name for name, nbytes in size.items() if nbytes} == set(names)
    assert sleepers.iterate(0) == awake.words[:1]
    generating = [
        next(before["device"] for name, before, _ in calls if name == "gen") for calls in (awake.calls, watch.calls())
    ]
    assert generating[0] - generating[1] == bytes_by_kind()["pinned_host"] == sum(size.values())


@pytest.mark.proof("memory")
def test_what_the_next_call_needs_is_on_its_way_while_one_runs(sleepers, awake):
    graph = trace(ppo, ROLES, {"actor.recomputes": True, "reference.is_base_of": False})
    watch, size = sleepers.begin(ALL, Prefetch(graph))
    assert sleepers.iterate(0, 1) == awake.words[:2]
    states = {name: size[name] + size[f"{name} optimizer"] for name in ("actor", "critic")}
    here = {
        "reshard": size["reward"],
        "old_log_prob": size["reference"],
        "ref": size["reference"] + size["critic"],
        "values": size["critic"],
        "update_critic": states["critic"] + states["actor"],
        "update_actor": states["actor"],
    }
    for (name, before, _), (_, now, _) in zip(awake.calls, watch.calls(), strict=False):
        if name in here:
            assert before["device"] - now["device"] == sum(size.values()) - here[name], name
