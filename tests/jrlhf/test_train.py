"""A whole run at a tiny size, and the command line's answers to good and bad input."""

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf.config import load_config
from jrlhf.export import cli as export
from jrlhf.meshes.hardware import Peak
from jrlhf.models import init_sharded
from jrlhf.models.hf.export import hf_weights
from jrlhf.planning.fit import memory_of
from jrlhf.ppo import KLState, TrainState
from jrlhf.ppo.shaping import RunningMoments
from jrlhf.roles.initial import adamw
from jrlhf.run.checkpoints import Checkpoints, like
from jrlhf.run.files import read_jsonl
from jrlhf.run.metrics import read_metrics
from jrlhf.stages import mfu, setup
from jrlhf.stages.graphs import stage_graph
from jrlhf.stages.rl import RLState
from jrlhf.stages.setup import select_mesh
from jrlhf.train import cli, main
from tests.support.live import live_bytes

TINY, LOG = str(Path(__file__).with_name("tiny.yaml")), "log.txt"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(run directory, summary) of one tiny run."""
    directory = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mfu, "peak_of", lambda device: Peak(1e9, 1e10, 1e10))
        summary = main(load_config(TINY, [f"run_dir={directory}", "profile.iterations=[3]"]))
    return directory / "tiny", summary


def test_a_run_leaves_what_is_promised(finished):
    path, summary = finished
    files = ("config.yaml", "before.json", "metrics.jsonl", "samples.jsonl", "preferences.jsonl")
    for name in (*files, "report.html", "tokenizer.json"):
        assert (path / name).stat().st_size > 0, name
    assert list(path.glob("tensorboard/*/events.*"))
    assert json.loads((path / "summary.json").read_text()) == summary and summary["chat"] is False
    assert load_config(str(path / "config.yaml")) == load_config(
        TINY, [f"run_dir={path.parent}", "profile.iterations=[3]"]
    )
    assert {record["stage"] for record in read_metrics(path)} == {"sft", "reward_model", "ppo"}
    assert len([record for record in read_jsonl(path / "samples.jsonl") if record["stage"] == "evaluation"]) == 16


def test_an_iteration_tells_how_well_it_used_its_devices(finished):
    path, _ = finished
    names = {f"perf/{name}" for name in ("mfu/actor", "mfu/critic", "mfu/actor_infer", "mfu/ref", "roofline/gen")}
    for record in read_metrics(path):
        shares = {name: record[name] for name in record if name.startswith(("perf/mfu", "perf/roofline"))}
        assert set(shares) == (names if record["stage"] == "ppo" else set())
        assert all(share > 0 for share in shares.values())
        calls = sum(
            seconds for name, seconds in record.items() if name.startswith("timing_s/") and name != "timing_s/step"
        )
        assert calls <= record.get("timing_s/step", math.inf)
    assert [entry.name for entry in (path / "profile").iterdir()] == ["ppo-3"]


def test_step_zero_has_no_kl_and_all_ratios_are_one(finished):
    path, _ = finished
    first = next(record for record in read_metrics(path) if record["stage"] == "ppo")
    assert first["objective/kl"] == 0.0
    assert first["actor/initial_ratio_gap"] < 1e-5
    assert first["rollout/logprob_gap_max"] < 1e-4


def test_the_loop_settles_and_compiles_nothing_more(finished):
    path, _ = finished
    for stage in ("sft", "reward_model", "ppo"):
        compiled = [record["perf/compilations"] for record in read_metrics(path) if record["stage"] == stage]
        assert compiled[0] > 0 and compiled[2:] == [0] * 4, (stage, compiled)


def test_a_score_is_conserved_on_its_way_into_rewards(finished):
    path, _ = finished
    for record in read_metrics(path):
        if record["stage"] == "ppo":
            expected = record["critic/score/mean"] - record["objective/kl_coef"] * record["objective/kl"]
            assert math.isclose(record["critic/rewards/mean"], expected, rel_tol=1e-4, abs_tol=1e-5)


def test_the_exported_model_is_the_last_checkpoint(finished):
    path, _ = finished
    config = load_config(str(path / "config.yaml"))
    mesh, models = select_mesh(config)
    with jax.set_mesh(mesh):
        optimizer = adamw(config.rl.actor, updates=1)
        actor, critic = (
            TrainState.create(init_sharded(models["actor"], jax.random.key(9), mesh, head), optimizer)
            for head in ("lm", "scalar")
        )
        with Checkpoints(path / "checkpoints" / "ppo") as checkpoints:
            trained, zero = {"actor": actor, "critic": critic}, jnp.zeros((), jnp.int32)
            state = RLState(trained, KLState(jnp.ones(())), RunningMoments.create(), zero)
            restored = checkpoints.restore_latest(like(state, mesh))
    assert restored is not None and restored[0] == 6
    tensors = hf_weights(jax.tree.map(np.asarray, restored[1].trained["actor"].params), models["actor"])
    saved = {tensor.name: tensor.fetch() for tensor in tensors}
    weights = load_file(path / "model" / "model.safetensors")
    assert weights.keys() == saved.keys() and all(np.array_equal(weights[name], saved[name]) for name in saved)
    assert not np.array_equal(weights["model.embed_tokens.weight"], np.asarray(actor.params["embedding"]))
    config = json.loads((path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 2


def test_the_export_of_the_last_checkpoint_is_the_model_that_the_run_left(finished, tmp_path, capsys):
    path, _ = finished
    assert export([str(path), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/model is the policy of ppo after step 6 of 6\n"
    assert digest(tmp_path / "model") == digest(path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_an_interrupt_before_the_run_begins_is_one_sentence(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "load_task", interrupted)
    assert cli(["--config", TINY, f"run_dir={tmp_path}"]) == 130
    assert capsys.readouterr().err == "interrupted\n" and not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_same_seed_gives_the_same_run(finished, tmp_path):
    path, _ = finished
    main(load_config(TINY, [f"run_dir={tmp_path}", "name=again", "profile.iterations=[3]"]))
    assert timeless(read_metrics(tmp_path / "again")) == timeless(read_metrics(path))
    assert digest(tmp_path / "again" / "model") == digest(path / "model")


def test_dry_run_prints_config_memory_and_plan_and_writes_nothing(tmp_path, capsys):
    assert cli(["--config", TINY, f"run_dir={tmp_path}", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "embed: 32" in out and "actor.generate" in out and "layout generate" in out and "critic" in out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_counts_the_bytes_that_states_really_take(tmp_path):
    config = load_config(TINY)
    mesh, models = select_mesh(config)
    with jax.set_mesh(mesh):
        params = init_sharded(models["actor"], jax.random.key(0), mesh)
        state = TrainState.create(params, adamw(config.rl.actor, updates=1))
    predicted = memory_of(config, stage_graph(config, config.stages[-1]), mesh, models).roles["actor"]
    on_device = {device for device, _ in live_bytes(state.params)}
    for device in on_device:
        assert live_bytes(state.params)[device, "device"] == predicted["weights"]
        assert live_bytes(state.opt_state)[device, "device"] == predicted["optimizer"]


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys):
    table = [
        (["--config", "quikstart"], "did you mean quickstart"),
        (["--config", TINY, "sft.lerning_rate=1"], "did you mean sft.learning_rate"),
        (["--config", TINY, "sft.steps=0"], "sft.steps=0: it must be at least 1"),
        (["--config", TINY, "mesh.fsdp=3"], "choose sizes whose product is 8"),
        (["--config", TINY, "model.heads=3", "model.kv_heads=3"], "model.heads=3 does not divide"),
        (["--config", TINY, "ppo.rollout_batch=24"], "ppo.rollout_batch=24 does not divide"),
        (["--config", TINY, "data.max_response=100"], "choose a model with more"),
        (["--config", TINY, "stages=[ppo]"], "name sft before it or give model.path"),
        (["--config", TINY, "device.simulated=5", "mesh.fsdp=5", "mesh.tensor=1"], "restart the process"),
        (["--config", TINY, "model.vocab_size=100"], "vocab_size=100 is too small"),
        (["--config", TINY, "--resume"], "leave out --resume"),
        (["--config", TINY, "run_dir=/proc/none"], "cannot be written"),
        (["--config", TINY, "sft.steps"], "write key=value"),
    ]
    for arguments, message in table:
        assert (
            cli(["--config", TINY, f"run_dir={tmp_path}", *arguments[2:]] if arguments[1] == TINY else arguments) == 2
        )
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_overwritten(finished, capsys):
    path, _ = finished
    before = digest(path)
    again = ["--config", TINY, f"run_dir={path.parent}", "profile.iterations=[3]"]
    assert cli(again) == 2
    assert "already holds this run" in capsys.readouterr().err
    assert cli([*again, "seed=1"]) == 2
    assert "seed: 0 there, 1 here" in capsys.readouterr().err
    assert digest(path) == before


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts `python -m jrlhf.train` on the tiny config; compiled programs are kept between its starts."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(directory, *more: str) -> subprocess.Popen:
        arguments = [sys.executable, "-m", "jrlhf.train", "--config", TINY, f"run_dir={directory}", *more]
        with open(directory / LOG, "w") as log:
            return subprocess.Popen(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT)

    return start


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    process = command(directory)
    assert process.wait(timeout=600) == 0, (directory / LOG).read_text()
    return directory / "tiny"


@pytest.mark.full
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(command, undisturbed, tmp_path):
    moments, kills = random.Random(0), 0
    process = command(tmp_path)
    while True:
        records = len((tmp_path / "tiny" / "metrics.jsonl").read_bytes().splitlines()) if kills else 0
        try:
            # Killed soon after it made progress, at any moment of an iteration or of a save.
            progress(process, tmp_path / "tiny", records + 1 + moments.randrange(3))
        except EOFError:
            break
        time.sleep(moments.random() * 0.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        process = command(tmp_path, "--resume")
    assert process.wait(timeout=600) == 0, (tmp_path / LOG).read_text()
    assert kills >= 5
    assert timeless(read_metrics(tmp_path / "tiny")) == timeless(read_metrics(undisturbed))
    for name in ("samples.jsonl", "preferences.jsonl"):
        assert (tmp_path / "tiny" / name).read_bytes() == (undisturbed / name).read_bytes()
    assert digest(tmp_path / "tiny" / "model") == digest(undisturbed / "model")


@pytest.mark.full
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(command, undisturbed, tmp_path):
    process = command(tmp_path)
    progress(process, tmp_path / "tiny", 14)  # in the third stage
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 75 and "its state is saved" in (tmp_path / LOG).read_text()
    process = command(tmp_path, "--resume")
    assert process.wait(timeout=600) == 0, (tmp_path / LOG).read_text()
    assert timeless(read_metrics(tmp_path / "tiny")) == timeless(read_metrics(undisturbed))
    assert digest(tmp_path / "tiny" / "model") == digest(undisturbed / "model")


def progress(process: subprocess.Popen, path, records: int) -> None:
    """Waits until metrics.jsonl has so many records. Raises EOFError if the process ends before."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EOFError
        file = path / "metrics.jsonl"
        if file.exists() and len(file.read_bytes().splitlines()) >= records:
            return
        time.sleep(0.01)
    process.kill()
    raise TimeoutError(f"{path} did not reach {records} records")


def timeless(records: list[dict]) -> list[dict]:
    """Records without what depends on the clock, or on what this process had compiled before."""
    dependent = ("timing_s/", "perf/mfu/", "perf/roofline/", "perf/throughput", "perf/compilations")
    return [{key: value for key, value in record.items() if not key.startswith(dependent)} for record in records]


def digest(path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
