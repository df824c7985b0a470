"""Runs as users have them: model directories, datasets, rewards of every kind, adapters; what they leave behind."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jrlhf.config import Config, load_config
from jrlhf.config.parse import build
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import Peak
from jrlhf.models.hf import load_adapter, load_hf, read_config
from jrlhf.roles.pretrained import check_weights
from jrlhf.run.files import read_jsonl
from jrlhf.run.metrics import MetricsLog, read_metrics
from jrlhf.stages import mfu
from jrlhf.stages.setup import select_mesh
from jrlhf.train import main
from tests.support.hub import serving
from tests.support.runs import ROOT, assert_same_run, digest, stage_of, timeless

WEIGHTS = {"reward_model": 0.5, "preference": 0.7, "short": 2.0, "graded": 0.3, "watched": 0.0}
USED = {f"perf/{name}" for name in ("mfu/actor", "mfu/critic", "mfu/actor_infer", "mfu/ref", "roofline/gen")}

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("quick_compilation")]


@pytest.fixture(scope="module")
def everything(tmp_path_factory, settings, user):
    """(run directory, summary): all stages, four roles of three families and sizes, four rewards, validation.

    The run is told the peak of its devices.
    """
    functions = user / "rewards.py"
    rewards = [
        {"name": "preference", "model": str(user / "reward"), "batch": 8},
        {"name": "short", "function": f"{functions}:short"},
        {"name": "graded", "function": f"{functions}:compute_score", "columns": {"ground_truth": "answer"}},
        {"name": "watched", "function": "numeric_answer", "columns": {"answer": "answer"}, "on_failure": 0.0},
    ]
    config = settings(
        name="everything",
        run_dir=str(tmp_path_factory.mktemp("runs")),
        stages=["sft", "reward_model", "ppo"],
        roles={"critic": str(user / "critic")},
        reward_model={"weight": WEIGHTS["reward_model"]},
        rewards=[reward | {"weight": WEIGHTS[reward["name"]]} for reward in rewards],
        validation={"every": 2, "k": 2},
        profile={"iterations": [3]},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mfu, "peak_of", lambda device: Peak(1e9, 1e10, 1e10))
        return Path(config["run_dir"], "everything"), main(build(Config, config))


def test_a_run_on_directories_and_datasets_leaves_what_is_promised(everything, user):
    path, summary = everything
    assert json.loads((path / "summary.json").read_text()) == summary
    assert (path / "report.html").stat().st_size > 10_000 and list(path.glob("tensorboard/*/events.*"))
    assert {record["stage"] for record in read_metrics(path)} == {"sft", "reward_model", "ppo"}
    held_out = summary["held_out"]
    assert held_out["measure"] == "score" and held_out["n"] == 8
    for when in ("before", "after"):
        assert set(held_out[when]["items"]) == set(WEIGHTS)
        by_source = held_out[when]["sources"]
        assert set(by_source) == {"a", "b"} and sum(figures["n"] for figures in by_source.values()) == 8
        mean = sum(figures["mean"] * figures["n"] for figures in by_source.values()) / 8
        assert math.isclose(mean, held_out[when]["score"], abs_tol=1e-6)
        total = sum(WEIGHTS[name] * value for name, value in held_out[when]["items"].items())
        assert math.isclose(total, held_out[when]["score"], abs_tol=1e-5)
    assert [entry.name for entry in (path / "profile").iterdir()] == ["ppo-3"]
    for model in ("model", "reward_model"):
        assert (path / model / "tokenizer.json").read_bytes() == (user / "actor" / "tokenizer.json").read_bytes()
    settings = [json.loads((at / "tokenizer_config.json").read_text()) for at in (user / "actor", path / "model")]
    assert settings[0] == settings[1]
    assert json.loads((path / "model" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    classifier = json.loads((path / "reward_model" / "config.json").read_text())
    assert classifier["architectures"] == ["Qwen2ForSequenceClassification"]
    # Transformers scores at the last token that is not padding: padding is a token with which no answer ends.
    assert classifier["pad_token_id"] not in classifier["eos_token_id"]
    ids = {one["content"]: one["id"] for one in json.loads((user / "actor/tokenizer.json").read_text())["added_tokens"]}
    padding = json.loads((path / "reward_model/tokenizer_config.json").read_text())["pad_token"]
    assert ids[padding] == classifier["pad_token_id"]


def test_training_keeps_its_invariants(everything):
    """Scores are the weighted sum of the rewards by their names; step 0 has no KL; the loop settles."""
    path, _ = everything
    first, *_ = iterations = stage_of(path, "ppo")
    assert first["objective/kl"] == 0.0 and first["actor/initial_ratio_gap"] < 1e-5 and len(iterations) == 4
    for record in iterations:
        total = sum(weight * record[f"rewards/{name}/mean"] for name, weight in WEIGHTS.items())
        assert math.isclose(record["critic/score/mean"], total, abs_tol=1e-5)
        assert record["rewards/graded/of_a"] in np.arange(9) / 8
        shaped = record["critic/score/mean"] - record["objective/kl_coef"] * record["objective/kl"]
        assert math.isclose(record["critic/rewards/mean"], shaped, abs_tol=1e-4)
        assert record["rewards/short/failures"] == 0 and record["rollout/logprob_gap_max"] < 1e-4
        assert {name for name in record if "/mfu" in name or "/roofline" in name} == USED
        assert all(record[name] > 0 for name in USED)
    assert len({record["rewards/preference/mean"] for record in iterations}) == 4
    # A reward model with its own tokenizer may compile a width that is new, always a power of two; nothing else does.
    for stage in ("sft", "reward_model", "ppo"):
        compiled = [record["perf/compilations"] for record in stage_of(path, stage)]
        assert compiled[0] > 0 and set(compiled[2:]) <= {0}, (stage, compiled)


def test_validation_is_done_every_second_iteration_and_by_source(everything):
    path, _ = everything
    records = stage_of(path, "ppo")
    names = [f"val-core/{source}/score/{of}" for source in ("all", "a", "b") for of in ("mean@2", "best@2/mean")]
    names += [f"val-aux/{source}/{name}/mean@2" for source in ("all", "a", "b") for name in WEIGHTS]
    for record in records:
        there = {name for name in record if name.startswith("val-")}
        assert there == (set(names) if record["step"] % 2 else set()), record["step"]
    for record in records[::2]:
        aux = sum(weight * record[f"val-aux/all/{name}/mean@2"] for name, weight in WEIGHTS.items())
        assert math.isclose(record["val-core/all/score/mean@2"], aux, abs_tol=1e-5)
        assert record["val-core/all/score/best@2/mean"] >= record["val-core/all/score/mean@2"]
    validated = [sample for sample in read_jsonl(path / "samples.jsonl") if sample.get("kind") == "validation"]
    assert {sample["step"] for sample in validated} == {1, 3}
    assert {sample["source"] for sample in validated} == {"a", "b"}
    of_training = [sample for sample in read_jsonl(path / "samples.jsonl") if sample["stage"] == "ppo"]
    for sample in of_training:  # training and validation
        assert sum(WEIGHTS[name] * score for name, score in sample["scores"].items()) == pytest.approx(
            sample["score"], abs=1e-5
        )
    ends = [sample for sample in read_jsonl(path / "samples.jsonl") if sample["stage"] == "evaluation"]
    assert len(ends) == 8 and all("<|im_start|>user\nWhat is" in sample["prompt"] for sample in ends)
    assert all(sample["scores_before"].keys() == sample["scores_after"].keys() == WEIGHTS.keys() for sample in ends)


def test_an_export_is_pushed_to_the_hub(everything, tmp_path):
    path, _ = everything
    command = [sys.executable, "-m", "jrlhf.export", str(path), "--out", str(tmp_path), "--push", "mine"]
    with serving() as hub:
        environment = hub.environment(tmp_path / "home")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{hub.address}/someone/mine", done.stderr
        files = hub.repositories["models/someone/mine"].branches["main"]
        assert files == {file.name: file.read_bytes() for file in (path / "model").iterdir()}
        command.append("--adapter")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and "trains no adapter: leave it out" in done.stderr


def test_the_exported_models_load_again(everything, user):
    path, _ = everything
    mesh = select_mesh(load_config(str(path / "config.yaml")))[0]
    config, _ = load_hf(path / "model", mesh)
    assert config.model == read_config(user / "actor").model and config.head == "lm"
    start = load_file(user / "actor" / "model.safetensors")
    weights = load_file(path / "model" / "model.safetensors")
    assert weights.keys() == start.keys()
    assert all(not np.array_equal(weights[name], start[name]) for name in weights)
    assert load_hf(path / "reward_model", mesh, head="scalar")[0].head == "scalar"
    assert "# actor, trained with SFT and PPO" in (path / "model" / "README.md").read_text()
    assert "# A reward model of actor" in (path / "reward_model" / "README.md").read_text()
    assert load_tokenizer(path / "model").eos_ids == load_tokenizer(user / "actor").eos_ids


# --- Adapters ---


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, settings, user, make_model):
    """(run directory, model directory): PPO by adapters, against scores of tokens that are normalised."""
    root = tmp_path_factory.mktemp("runs")
    actor = make_model(root / "actor", seed=3, layers=1)  # its layers are not in a scan: more take long to compile
    config = settings(
        name="adapted",
        run_dir=str(root),
        model={"path": str(actor)},
        lora={"rank": 4},
        rewards=[{"name": "even", "function": f"{user / 'rewards.py'}:tokens"}],
        ppo={"scores": {"normalise": True, "clip": 2.0, "missing_eos_penalty": 0.5, "overlong_buffer": 4}},
    )
    main(build(Config, config))
    return root / "adapted", actor


@pytest.mark.proof("runs")
def test_scores_of_tokens_are_normalised_and_penalised(adapted):
    records = stage_of(adapted[0], "ppo")
    for record in records:
        assert math.isclose(record["score/raw/mean"], record["rewards/even/mean"], abs_tol=1e-5)
        assert record["score/missing_eos_penalty"] > 0 and abs(record["critic/score/mean"]) < 12
    seen = np.mean([record["rewards/even/mean"] for record in records])
    assert math.isclose(records[-1]["score/running_mean"], seen, rel_tol=1e-4)


@pytest.mark.proof("runs")
def test_adapters_are_trained_on_a_base_that_stays(adapted):
    path, actor = adapted
    mesh = select_mesh(load_config(str(path / "config.yaml")))[0]
    first, *_, last = stage_of(path, "ppo")
    assert first["objective/kl"] == 0.0 and first["actor/initial_ratio_gap"] < 1e-5
    assert last["objective/kl"] != 0.0
    assert first["rollout/logprob_gap_max"] < 1e-4
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"]) == ("LORA", "CAUSAL_LM", 4)
    assert config["base_model_name_or_path"] == str(actor)
    assert "library_name: peft" in (path / "adapter" / "README.md").read_text()
    start = load_file(actor / "model.safetensors")
    merged = load_file(path / "model" / "model.safetensors")
    tensors = load_file(path / "adapter" / "adapter_model.safetensors")
    assert start.keys() == merged.keys()
    for name, before in start.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in tensors:
            assert np.array_equal(before, merged[name]), name
            continue
        product = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        assert np.abs(product).max() > 0
        np.testing.assert_allclose(merged[name], before + config["lora_alpha"] / 4 * product, atol=1e-5)
    lora, _ = load_adapter(path / "adapter", read_config(actor).model, mesh)
    assert lora.rank == 4


@pytest.mark.proof("runs")
def test_an_adapter_names_the_hub_name_of_its_base(tmp_path, settings, user, make_model):
    actor, one = make_model(tmp_path / "actor"), {"device": {"simulated": 1}, "mesh": {"fsdp": 1, "tensor": 1}}
    (actor / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    config = settings(name="named", run_dir=str(tmp_path), stages=["sft"], model={"path": "lab/tiny"}, **one)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"lora": {"rank": 2}}))
    command = [sys.executable, "-m", "jrlhf.train", "--config", str(tmp_path / "config.yaml")]
    with serving() as hub:
        hub.add("models/lab/tiny", actor)
        environment = hub.environment(tmp_path / "home")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "named" / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "lab/tiny"
    assert (tmp_path / "named" / "hub.txt").read_text() == "lab/tiny\n"
    for name in ("adapter", "model"):
        card = (tmp_path / "named" / name / "README.md").read_text()
        assert "license: apache-2.0\nbase_model: lab/tiny\n" in card and str(tmp_path) not in card


@pytest.mark.proof("runs")
def test_all_stages_with_adapters_on_int8_in_bfloat16(tmp_path, settings, make_model):
    model = {"path": str(make_model(tmp_path / "actor", seed=3, layers=1))}
    config = settings(
        model=model,
        run_dir=str(tmp_path),
        name="stages",
        stages=["sft", "reward_model", "ppo"],
        lora={"rank": 4, "base": "int8"},
        compute={"dtype": "bfloat16"},
        ppo={"iterations": 3},
    )
    main(build(Config, config))
    path = tmp_path / "stages"
    records = stage_of(path, "ppo")
    assert records[0]["objective/kl"] == 0.0 and records[0]["actor/initial_ratio_gap"] < 1e-5
    assert all(record["perf/compilations"] == 0 for record in records[2:])
    for name in ("adapter", "reward_adapter"):
        tensors = load_file(path / name / "adapter_model.safetensors")
        assert all(np.isfinite(tensor).all() for tensor in tensors.values())
    assert json.loads((path / "reward_adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    # The adapter can be gone on from, and a reward adapter's head lies with it.
    lora = {"path": str(path / "adapter"), "base": "int8"}
    main(build(Config, settings(run_dir=str(tmp_path), name="again", model=model, lora=lora, ppo={"iterations": 1})))
    record = next(iter(read_metrics(tmp_path / "again")))
    assert record["objective/kl"] == 0.0


# --- Failure and resume ---

FLAKY = '''import os

def flaky(completions, completion_ids):
    """A score for each token, until the sign is there."""
    if os.path.exists(SIGN):
        raise RuntimeError("the judge is out")
    return [[float(token % 2 == 0) for token in ids] for ids in completion_ids]
'''


@pytest.mark.proof("runs")
def test_a_run_that_a_reward_stopped_goes_on_in_the_same_bits(tmp_path, settings, user, monkeypatch):
    """The reward fails in the third iteration; a resume later takes two more. Moments, validation, order: all alike."""
    sign = tmp_path / "sign"
    function = tmp_path / "flaky.py"
    function.write_text(FLAKY.replace("SIGN", repr(str(sign))))

    def config(name: str) -> Config:
        return build(
            Config,
            settings(
                name=name,
                run_dir=str(tmp_path),
                roles={"critic": str(user / "critic")},
                rewards=[{"name": "even", "function": f"{function}:flaky"}],
                ppo={"scores": {"normalise": True, "clip": 2.0, "missing_eos_penalty": 0.5}},
                validation={"every": 2, "k": 2},
            ),
        )

    original = MetricsLog.log

    def log(self, stage, step, *rest):
        if step == 2:
            sign.touch()
        return original(self, stage, step, *rest)

    main(config("undisturbed"))
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the judge is out.*What is"):
        patch.setattr(MetricsLog, "log", log)
        main(config("stopped"))
    sign.unlink()
    main(config("stopped"), resume=True)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "stopped")
    # Normalised by what all four iterations saw.
    assert read_metrics(tmp_path / "undisturbed")[-1]["score/running_mean"] != 0


# --- Parts of the whole ---


@pytest.mark.proof("runs")
def test_stages_by_themselves(everything, tmp_path, settings, user, capsys):
    """Supervised learning alone is the same as in a whole run; a reward model alone learns from the actor as it is."""
    config = settings(name="alone", run_dir=str(tmp_path), stages=["sft"], rewards=[])
    summary = main(build(Config, config))
    assert "held_out" not in summary  # nothing could measure the answers
    assert timeless(tmp_path / "alone") == [row for row in timeless(everything[0]) if row["stage"] == "sft"]
    assert not (tmp_path / "alone" / "reward_model").exists()
    config = settings(name="judge", run_dir=str(tmp_path), stages=["reward_model"], rewards=[])
    capsys.readouterr()
    jax.clear_caches()  # the runs before have compiled the program that scores, which all of this architecture share
    summary = main(build(Config, config))
    announcements = [line for line in capsys.readouterr().out.splitlines() if ": compiling " in line]
    calls = ["reward_model.update (1 of 2)", "reward_model.score (2 of 2)"]
    assert announcements == [f"reward_model: compiling {call}" for call in calls]
    assert summary["reward_model_accuracy"] >= 0.5
    assert digest(tmp_path / "judge" / "model")["model.safetensors"] == digest(user / "actor")["model.safetensors"]
    # What it leaves is a reward that the next run can name.
    assert check_weights(str(tmp_path / "judge" / "reward_model"), "rewards[0].model", head="scalar").head == "scalar"
