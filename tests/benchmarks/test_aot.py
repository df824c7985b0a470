"""Compiles the programs for absent hardware on simulated devices instead: no compiler is installed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import aot, targets
from benchmarks.shapes import device_bytes, train_state, whole_weights
from jrlhf.config import load_config
from jrlhf.errors import UserError
from jrlhf.models import init_sharded
from jrlhf.ppo import TrainState
from jrlhf.roles.optimizers import adamw

TINY = str(Path(__file__).parents[1] / "jrlhf" / "tiny.yaml")


@pytest.fixture(scope="module")
def setup() -> aot.Setup:
    config = load_config(TINY, ["data.max_prompt=8", "data.max_response=8"])
    return aot.setup_on(aot.fitted(config, 8), jax.devices())


def test_a_config_is_fitted_to_the_devices_of_a_target():
    for target, devices in [("h200x1", 1), ("h200x16", 16), ("v5p-8", 4), ("v5p-512", 256)]:
        assert targets.TARGETS[target].devices == devices
    config = load_config("llama3-8b-ppo")
    assert aot.fitted(config, 8) is config
    # 256 rows in 4 minibatches are 64: this number on each device, and every micro-batch has at least one of them.
    for devices, *expected in [(1, 1, 1, 1, 8), (4, 1, 4, 1, 8), (16, 1, 16, 1, 4), (64, 1, 64, 1, 1)]:
        fitted = aot.fitted(config, devices)
        mesh = fitted.mesh
        assert [mesh.data, mesh.fsdp, mesh.tensor, fitted.rl.algorithm.micro_batches] == expected
    # Tensor parallelism stays as far as it divides the devices.
    large = aot.fitted(load_config("llama3-70b-ppo"), 64)
    assert (large.mesh.fsdp, large.mesh.tensor) == (8, 8)
    assert aot.fitted(load_config("llama3-70b-ppo"), 4).mesh.tensor == 4
    with pytest.raises(UserError, match="qwen3-8b-lora trains adapters of a critic"):
        aot.fitted(load_config("qwen3-8b-lora"), 8)


def test_an_algorithm_without_a_critic_has_programs_of_its_own():
    """GRPO's update takes the weight of the KL in the loss, and no values."""
    config = aot.fitted(load_config("arithmetic-grpo", ["model.embed=32", "grpo.rollout_batch=64"]), 8)
    grpo = aot.setup_on(config, jax.devices())
    assert grpo.experience.values is None and grpo.experience.kl_coef.shape == ()
    with jax.set_mesh(grpo.mesh):
        program = aot.train_actor(grpo)
    assert (
        program.resident == 3 * device_bytes(whole_weights(grpo.models["actor"], grpo.mesh)) + 3 * 4
    )  # three counters


def test_adapters_and_the_base_under_them_stay():
    settings = ["model.embed=32", "grpo.rollout_batch=64", "lora.rank=2", "data.max_prompt=8", "data.max_response=8"]
    setup = aot.setup_on(aot.fitted(load_config("arithmetic-grpo", settings), 8), jax.devices())
    _, adapter, base = setup.actor
    assert 0 < device_bytes(adapter) < device_bytes(base)
    resident = {name: device_bytes((adapter, base)) for name in ("generate", "score_logprobs")}
    resident["train_actor"] = resident["generate"] + 2 * device_bytes(adapter) + 3 * 4  # AdamW's moments and counters
    for name, size in resident.items():
        with jax.set_mesh(setup.mesh):
            assert aot.PROGRAMS[name](setup).resident == size
    reference = device_bytes(adapter)  # the adapter after SFT
    assert aot.held(setup) == pytest.approx(resident["train_actor"] + reference, rel=1e-3)


def test_the_version_of_a_compiler_is_the_one_jax_asks_for():
    assert targets.requirement("libtpu").startswith("libtpu==")
    assert targets.requirement("jax-cuda12-plugin").startswith("jax-cuda12-plugin")
    assert "[" not in targets.requirement("jax-cuda12-plugin")
    with pytest.raises(UserError, match="names no version of no-such-package"):
        targets.requirement("no-such-package")


def test_a_train_state_as_shapes_is_the_real_one(setup: aot.Setup):
    model, section = setup.models["actor"], setup.config.rl.actor
    real = TrainState.create(init_sharded(model, jax.random.key(0), setup.mesh), adamw(section, updates=1))
    shapes = train_state(section, whole_weights(model, setup.mesh), setup.mesh)
    assert jax.tree.structure(real) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(real), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)


def test_a_scoring_program_reads_its_weights_and_gathers_them(setup: aot.Setup):
    measurement = aot.measured("score_logprobs", setup, memory=2**40)
    weights = device_bytes(whole_weights(setup.models["actor"], setup.mesh))
    tokens = setup.config.rl.rollout_batch * (setup.length + 1) * 4 // 8  # and where each response begins
    assert measurement["arguments"] == weights + tokens
    assert (
        measurement["peak"]
        == aot.held(setup) + tokens + measurement["outputs"] - measurement["alias"] + measurement["temp"]
    )
    assert measurement["fits"] and not aot.measured("score_logprobs", setup, memory=measurement["peak"] - 1)["fits"]
    assert measurement["collectives"]["all-gather"]["count"] > 0
    json.dumps(measurement)


def test_the_switch_makes_the_generation_copy_and_only_gathers(setup: aot.Setup):
    measurement = aot.measured("reshard", setup, memory=2**40)
    copy = aot.generation_copy(setup.models["actor"], setup.mesh, jnp.float32)
    pointers = measurement["outputs"] - device_bytes(copy)  # a tuple is a table of them
    assert 0 <= pointers <= 16 * len(jax.tree.leaves(copy))
    assert measurement["collectives"].keys() == {"all-gather"}


def test_scores_of_attention(setup: aot.Setup):
    # 2 heads; 32 rows over 8 devices, of which each pair shares the heads while it generates; 2 minibatches.
    assert aot.attention_scores("reshard", setup) == 0
    assert aot.attention_scores("generate", setup) == 4 * 8 * 1 * 8 * 8
    assert aot.attention_scores("score_values", setup) == 4 * 4 * 2 * 16 * 16
    assert aot.attention_scores("train_actor", setup) == 4 * 2 * 2 * 16 * 16


@pytest.mark.proof("memory")
def test_every_program_compiles(setup: aot.Setup):
    for name in aot.PROGRAMS:
        measurement = aot.measured(name, setup, memory=2**40)
        assert measurement["program"] == name and measurement["fits"]


def test_a_process_that_fails_or_hangs_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n[ $3 = --target ] && echo 'ValueError: no such target' >&2 && exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(aot, "compiler_environment", lambda _: None)
    monkeypatch.setattr(aot.sys, "executable", str(program))
    failed = aot.in_process_of_its_own("generate", targets.TARGETS["v5p-8"], [], deadline=60)
    assert failed["fits"] is None and failed["error"] == "ValueError: no such target"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    hung = aot.in_process_of_its_own("generate", targets.TARGETS["v5p-8"], [], deadline=0.1)
    assert hung["error"] == "not compiled within 0 s"
    assert "not compiled" in aot.table([failed, hung])
