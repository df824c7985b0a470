"""Roles that sleep: the same bits from less memory, counted at every call."""

import gc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.algorithms.ppo import ppo
from jrlhf.algorithms.registry import graph_of
from jrlhf.algorithms.roles import ROLES
from jrlhf.config import Config, load_config
from jrlhf.config.parse import build
from jrlhf.config.schema import LoRASection, SleepConfig
from jrlhf.errors import UserError
from jrlhf.meshes import Call, make_mesh
from jrlhf.meshes.offload import free_host, is_on_host, offload
from jrlhf.planning.memory import residency
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.graph import trace
from jrlhf.roles.placement import Prefetch
from jrlhf.roles.role import Offloader
from jrlhf.run.checkpoints import Checkpoints, fingerprint_of, like
from jrlhf.run.clock import Clock
from jrlhf.run.profiler import CompilationWatch
from jrlhf.stages.setup import check_sleep, select_mesh
from tests.jrlhf.roles.ppo_roles import Setup
from tests.support.live import live_bytes

ALL = SleepConfig(optimizer="host", actor="host", critic="host", reference="host", reward="host")
CALLS = ("reshard", "gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor")
EVENTS = {"actor.generate": "gen", "reward.score": "reward", "actor.logprobs": "old_log_prob"}
EVENTS |= {"reference.logprobs": "ref", "critic.values": "values", "critic.update": "update_critic"}
EVENTS |= {"actor.update": "update_actor"}

pytestmark = pytest.mark.usefixtures("quick_programs")


class Watch(Clock):
    """Notes what is in which memory when a call begins, and when it has ended."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple[str, Counter[str], Counter[str]]] = []
        self.made: dict[str, int] = {}

    def run(self, name, function, *args, **kwargs):
        def watched(*args, **kwargs):
            before = by_kind()
            result = jax.block_until_ready(function(*args, **kwargs))
            self.log.append((name, before, by_kind()))
            self.made[name] = by_kind(result)["device"]
            return result

        return super().run(name, watched, *args, **kwargs)

    def calls(self) -> list[tuple[str, Counter[str], Counter[str]]]:
        return [entry for entry in self.log if entry[0] != "sleep"]


def by_kind(tree=None) -> Counter[str]:
    total: Counter[str] = Counter()
    for (_, kind), size in live_bytes(tree).items():
        total[kind] += size
    return total


class Sleepers:
    """Four roles with weights of their own, built anew for each config."""

    setup: Setup | None = None
    trained, frozen = ("actor", "critic"), ("reference", "reward")

    def begin(self, config: SleepConfig, prefetch: Prefetch | None = None) -> tuple[Watch, dict[str, int]]:
        """Builds the roles, offloaded as the config says. Returns a clock that watches, and each part's bytes there."""
        watch, asleep, self.setup = Watch(), {}, None
        gc.collect()
        mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
        self.setup = Setup(mesh, watch, sleep=config, prefetch=prefetch)
        for name, state in self.setup.states.items():
            asleep[name] = by_kind(state.params)["pinned_host"]
            asleep[f"{name} optimizer"] = by_kind(state.opt_state)["pinned_host"]
        for name in self.frozen:
            asleep[name] = by_kind(getattr(self.setup, name).model.params)["pinned_host"]
        gc.collect()
        watch.log.clear()
        return watch, asleep

    def iterate(self, *steps: int, shared_passes: bool = False) -> list[str]:
        """One digest of all that each iteration makes."""
        assert self.setup is not None
        words = []
        for step in steps:
            experience, metrics = self.setup.iterate(step, shared_passes=shared_passes)
            words.append(fingerprint_of((experience, metrics, list(self.setup.states.values()))))
            del experience, metrics
        return words


@pytest.fixture(scope="module")
def sleepers():
    return Sleepers()


@pytest.fixture(scope="module")
def awake(sleepers):
    """(words, clock) of three iterations without sleep."""
    watch, asleep = sleepers.begin(SleepConfig())
    assert sum(asleep.values()) == 0
    words = sleepers.iterate(0, 1, 2)
    assert [name for name, *_ in watch.log] == [*CALLS] * 3 and len(set(words)) == 3
    assert all(before["pinned_host"] == after["pinned_host"] == 0 for _, before, after in watch.log)
    return words, watch


def awake_only(patch: pytest.MonkeyPatch, setup: Setup) -> Counter[str]:
    """Counts the roles' compiled as they are called: with arrays on devices, or an accelerator could not run them."""
    computed: Counter[str] = Counter()

    def checked(name, program):
        def run(*arguments):
            assert not is_on_host(arguments), name
            computed[name] += 1
            return program(*arguments)

        return run

    scores = CompiledModel.score_sequences
    patch.setattr(CompiledModel, "score_sequences", lambda model: checked("Reward.score", scores(model)))
    for role in (setup.actor, setup.critic, setup.reference):
        for name in ("_generate", "_logprobs", "_values", "_update"):
            if hasattr(role, name):
                patch.setattr(role, name, checked(f"{type(role).__name__}.{name}", getattr(role, name)))
    return computed


@pytest.mark.full
def test_three_iterations_asleep_are_those_awake_and_every_byte_is_in_its_place(sleepers, awake, monkeypatch):
    words, usual = awake
    watch, size = sleepers.begin(ALL)
    total = sum(size.values())
    computed = awake_only(monkeypatch, sleepers.setup)
    assert all(size.values()) and by_kind()["pinned_host"] == total
    outputs = sleepers.iterate(0, 1)
    with CompilationWatch() as compilations:
        outputs += sleepers.iterate(2)
        assert compilations.take()[0] == []
    assert outputs == words and len(computed) == 7 and set(computed.values()) == {3}

    states = {name: size[name] + size[f"{name} optimizer"] for name in ("actor", "critic")}
    # Between two calls everything sleeps, and also when those have ended that bring what they need and let it go. Else:
    there = {"update_critic": states["critic"], "update_actor": states["actor"]}
    for (name, *with_it), (same, *without) in zip(usual.calls(), watch.calls(), strict=True):
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
    for watching in (usual, watch):  # the copy that generates, and its cache, are gone when the rollout is there
        begins = {name: before["device"] for name, before, _ in watching.calls()[: len(CALLS)]}
        assert begins["reward"] == begins["reshard"] + watching.made["gen"]
        assert watching.made["reshard"] > 0
    assert {f"timing_s/{name}" for name in (*CALLS, "sleep", "step")} == set(watch.take())


@pytest.mark.full
@pytest.mark.parametrize("part", SleepConfig.SWITCHES)
def test_each_part_sleeps_by_itself(part, sleepers, awake):
    words, usual = awake
    watch, size = sleepers.begin(replace(SleepConfig(), **{part: "host"}))
    names = ("actor optimizer", "critic optimizer") if part == "optimizer" else (part,)
    assert {name for name, nbytes in size.items() if nbytes} == set(names)
    assert sleepers.iterate(0) == words[:1]
    generating = [
        next(before["device"] for name, before, _ in clock.calls() if name == "gen") for clock in (usual, watch)
    ]
    assert generating[0] - generating[1] == by_kind()["pinned_host"] == sum(size.values())


def test_what_the_next_call_needs_is_on_its_way_while_one_runs(sleepers, awake):
    words, usual = awake
    graph = trace(ppo, ROLES, {"actor.recomputes": True, "reference.is_base_of": False})
    watch, size = sleepers.begin(ALL, Prefetch(graph))
    assert sleepers.iterate(0, 1) == words[:2]
    states = {name: size[name] + size[f"{name} optimizer"] for name in ("actor", "critic")}
    here = {
        "reshard": size["reward"],
        "old_log_prob": size["reference"],
        "ref": size["reference"] + size["critic"],
        "values": size["critic"],
        "update_critic": states["critic"] + states["actor"],
        "update_actor": states["actor"],
    }
    for (name, before, _), (_, now, _) in zip(usual.calls(), watch.calls(), strict=False):
        if name in here:
            assert before["device"] - now["device"] == sum(size.values()) - here[name], name


def test_what_was_brought_ahead_never_stands_for_newer_weights():
    rest, sharding = Offloader(Clock()), NamedSharding(make_mesh(1, 8, 1), P("fsdp"))
    older, newer = (offload({"w": jax.device_put(np.full((8, 4), value), sharding)}) for value in (1.0, 2.0))
    usage = by_kind()["device"]
    rest.prefetch(older)
    assert by_kind()["device"] > usage
    np.testing.assert_array_equal(rest.onload(newer)["w"], np.full((8, 4), 2.0))
    assert by_kind()["device"] == usage  # both copies are gone


@pytest.mark.full
def test_shared_passes_asleep_are_those_awake(sleepers):
    results = []
    for config in (SleepConfig(), ALL):
        watch, size = sleepers.begin(config)
        results.append(sleepers.iterate(0, 1, 2, shared_passes=True))
        assert by_kind()["pinned_host"] == sum(size.values())
        assert ("sleep" in watch.made) == (config == ALL)
    assert results[0] == results[1]


def test_where_parts_rest_follows_the_config_and_the_call():
    generate, score = (
        Call("actor.generate", "actor", "generate", (), ()),
        Call("reward.score", "reward", "infer", (), ()),
    )
    values, learn = Call("critic.values", "critic", "infer", (), ()), Call("learner.update", "learner", "train", (), ())
    usual = Config()
    assert residency(usual, "actor", values) == {"weights": "device", "optimizer": "device", "generation": "dropped"}
    assert residency(usual, "actor", generate)["generation"] == "device"
    assert residency(usual, "reward", values) == {"weights": "device"}

    config = Config(sleep=ALL)
    for role in ("actor", "critic"):
        there = {part: place for part, place in residency(config, role, learn).items() if part != "generation"}
        assert there == {"weights": "device", "optimizer": "device"}
        assert residency(config, role, score)["weights"] == residency(config, role, score)["optimizer"] == "pinned_host"
    assert residency(config, "critic", values) == {"weights": "device", "optimizer": "pinned_host"}
    assert residency(config, "cost_critic", values) == {"weights": "pinned_host", "optimizer": "pinned_host"}
    assert residency(config, "cost", score) == {"weights": "pinned_host"}
    # The copy is made of weights that go back at once; an adapter is generated with as it is.
    assert residency(config, "actor", generate)["weights"] == "pinned_host"
    assert residency(replace(config, lora=LoRASection(rank=2)), "actor", generate)["weights"] == "device"

    assert residency(config, "critic", score, values)["weights"] == "pinned_host"
    ahead = replace(config, sleep=replace(ALL, ahead=True))
    assert residency(ahead, "critic", score, values) == {"weights": "device", "optimizer": "pinned_host"}
    assert residency(ahead, "critic", score, learn) == {"weights": "device", "optimizer": "device"}
    train = Call("critic.update", "critic", "train", (), ())
    assert residency(ahead, "critic", values, train)["optimizer"] == "pinned_host"


WITHOUT_EFFECT = [
    ("quickstart", "stages=[sft] sleep.optimizer=host", "sleep.optimizer=host has no effect with stages=[sft]"),
    ("quickstart-dpo", "sleep.reference=host", "sleep.reference=host has no effect with stages=[sft, dpo]"),
    ("arithmetic-grpo", "sleep.reward=host", "sleep.reward=host has no effect with rewards that are all functions"),
    ("arithmetic-grpo", "sleep.critic=host", "sleep.critic=host has no effect with grpo, which has none"),
    ("quickstart", "sleep.ahead=true", "sleep.ahead=True has no effect with nothing asleep"),
]


def test_sleep_that_has_no_effect_is_refused():
    for config, overrides, message in WITHOUT_EFFECT:
        with pytest.raises(UserError) as refused:
            select_mesh(load_config(config, ["device.simulated=8", *overrides.split(" ")]))
        assert str(refused.value) == f"{message}: leave it out"


def test_the_base_under_an_adapter_never_sleeps(settings):
    learnt = {"stages": ["reward_model", "ppo"], "lora": {"rank": 2}}
    select_mesh(build(Config, settings(**learnt, sleep={"actor": "host", "critic": "host", "reward": "host"})))
    with pytest.raises(UserError, match="^sleep.reference=host has no effect with lora, whose base is the reference: "):
        select_mesh(build(Config, settings(**learnt, sleep={"reference": "host"})))


def test_devices_without_memory_of_their_host_are_one_sentence():
    mesh = make_mesh(1, 8, 1)
    check_sleep(ALL, mesh)
    device = SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind="device")])
    bare = cast(Any, SimpleNamespace(local_devices=[device]))
    check_sleep(SleepConfig(), bare)
    with pytest.raises(UserError, match=r"sleep.critic=host: device .* has no pinned_host memory.*: set it to device$"):
        check_sleep(SleepConfig(critic="host"), bare)


def test_a_checkpoint_of_what_sleeps_is_one_of_what_is_awake(tmp_path):
    mesh = make_mesh(1, 4, 2)

    def state(seed: int):
        shapes = {"stack": (P(None, "fsdp", "tensor"), (4, 64, 64)), "vector": (P("tensor"), (64,)), "count": (P(), ())}
        draw = np.random.default_rng(seed)
        return {
            name: jax.device_put(draw.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec))
            for name, (spec, shape) in shapes.items()
        }

    word = fingerprint_of(state(0))
    assert word != fingerprint_of(state(1)) and fingerprint_of(offload(state(0))) == word
    with Checkpoints(tmp_path) as checkpoints:
        asleep = {**state(0), "stack": offload(state(0)["stack"])}
        target = like(asleep, mesh)
        checkpoints.save(1, asleep, {})
        free_host(asleep)  # as soon as save returns
        overwritten = [offload(state(seed)) for seed in range(2, 6)]
        for template, kind in ((target, "pinned_host"), (like(state(0), mesh), "device")):
            restored = checkpoints.restore_latest(template)
            assert restored is not None and fingerprint_of(restored[1]) == word
            assert restored[1]["stack"].sharding.memory_kind == kind
            assert restored[1]["vector"].sharding.memory_kind == "device"
        del overwritten
