"""Offloading: where parts of a role are stored when, what is refused, and checkpoints of offloaded states."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.config import Config, load_config
from jrlhf.config.parse import build
from jrlhf.config.schema import LoRASection, SleepConfig
from jrlhf.errors import UserError
from jrlhf.meshes import Call, make_mesh
from jrlhf.meshes.offload import free_host, offload
from jrlhf.planning.memory import residency
from jrlhf.roles.role import Offloader
from jrlhf.run.checkpoints import Checkpoints, like
from jrlhf.run.clock import Clock
from jrlhf.run.fingerprints import fingerprint_of
from jrlhf.stages.setup import check_sleep, select_mesh
from tests.support.live import bytes_by_kind

ALL = SleepConfig(optimizer="host", actor="host", critic="host", reference="host", reward="host")
pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_what_was_brought_ahead_never_stands_for_newer_weights():
    rest, sharding = Offloader(Clock()), NamedSharding(make_mesh(1, 8, 1), P("fsdp"))
    older, newer = (offload({"w": jax.device_put(np.full((8, 4), value), sharding)}) for value in (1.0, 2.0))
    usage = bytes_by_kind()["device"]
    rest.prefetch(older)
    assert bytes_by_kind()["device"] > usage
    np.testing.assert_array_equal(rest.onload(newer)["w"], np.full((8, 4), 2.0))
    assert bytes_by_kind()["device"] == usage  # both copies are gone


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
    sentence = r"sleep.critic=host: device .* has no pinned_host memory, only device.*: set it to device$"
    with pytest.raises(UserError, match=sentence):
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
