"""Whole runs of several processes do what one process does, killed and resumed, too."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jrlhf.run.files import read_jsonl
from tests.support.launched import LAYOUTS, SMALL, TINY, Launched, launch, train
from tests.support.runs import timeless

EARLY = """
import json, sys
from dataclasses import replace
from jrlhf.roles.open_rollout import OpenRollout
from jrlhf.stages.context import Context
from jrlhf.train import cli

hand_out, early = OpenRollout._hand_out, []
sampling = Context.sampling.fget
Context.sampling = property(lambda self: replace(sampling(self), stop_ids=tuple(range(0, 300, 4))))  # unlike lengths

def counted(self, done, read, mesh):
    hand_out(self, done, read, mesh)
    early.append([mesh.size, sum(len(reader.results) for reader in self._readers if reader.devices)])

OpenRollout._hand_out = counted
code = cli(sys.argv[1:])
print(json.dumps({"early": early}))
sys.exit(code)
"""


def train_one_and_two(runs: Path, *overrides: str, config: str = TINY) -> tuple[Path, Path]:
    """Trains the same run in one process with 8 devices, and in two processes with 4 each."""
    for count, name in ((1, "one"), (2, "two")):
        train(count, runs, name, *overrides, config=config).assert_codes(900, *[0] * count)
    return runs / "one", runs / "two"


def texts(run: Path) -> list[dict]:
    samples = read_jsonl(run / "samples.jsonl")
    return [{name: value for name, value in sample.items() if isinstance(value, str)} for sample in samples]


def assert_same_run(one: Path, two: Path, *models: str) -> None:
    """Numbers but for rounding, texts to the letter."""
    for alone, together in zip(timeless(one), timeless(two), strict=True):
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            # Differences of nearly equal numbers (a KL, an advantage's mean) are as exact as these are.
            close = pytest.approx(value, rel=1e-5, abs=2e-6) if isinstance(value, float) else value
            assert together[name] == close, (alone["stage"], alone["step"], name)
    assert texts(one) == texts(two)
    for model in models:
        weights, same = (load_file(run / model / "model.safetensors") for run in (one, two))
        assert weights.keys() == same.keys()
        for name in weights:
            np.testing.assert_allclose(same[name], weights[name], atol=1e-5, rtol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """SFT, a reward model and PPO, in one process and in two."""
    runs = tmp_path_factory.mktemp("runs")
    train_one_and_two(runs, *SMALL)
    return runs


@pytest.mark.proof("processes")
def test_two_processes_do_what_one_does_and_write_files_once(runs: Path):
    assert_same_run(runs / "one", runs / "two", "model", "reward_model")
    for name in ("preferences.jsonl", "tokenizer.json"):
        assert (runs / "one" / name).read_bytes() == (runs / "two" / name).read_bytes()

    def files(run: Path) -> set[str]:
        paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file() and "checkpoints" not in str(path))
        return {re.sub(r"events\..*", "events", str(path)) for path in paths}

    assert files(runs / "one") == files(runs / "two")
    assert (runs / "two" / "environment.txt").read_text().count("# command:") == 1
    assert len(list((runs / "two" / "tensorboard" / "ppo").iterdir())) == 1
    output = (runs / "name=two.1.log").read_text()
    assert "ppo" not in output and "ppo 3/3" in (runs / "name=two.0.log").read_text()


def kill_second(launched: Launched, run: Path, iterations: int) -> None:
    """Kills the second of two processes as soon as so many iterations are recorded; the first one ends by itself."""
    metrics = run / "metrics.jsonl"
    launched.wait_until(lambda: metrics.exists() and metrics.read_text().count('"stage": "ppo"') == iterations, 400)
    launched.processes[1].kill()
    launched.processes[1].wait()
    assert launched.processes[0].wait(60) == 1
    assert f"process 1 of 2 on {socket.gethostname()} gave no sign of life" in launched.text(0)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """Actor and reference on one half of the devices, critic and reward model on the other: in one process and two."""
    runs = tmp_path_factory.mktemp("split")
    train_one_and_two(runs, *SMALL, "plan=split")
    return runs


@pytest.mark.proof("processes")
def test_calls_on_slices_of_two_processes_do_what_they_do_in_one(split: Path):
    assert_same_run(split / "one", split / "two", "model", "reward_model")
    lines = [line for line in read_jsonl(split / "two" / "timeline.jsonl") if line["stage"] == "ppo"]
    busy = {call["devices"]: call["end"] - call["start"] for line in lines for call in line["calls"]}
    assert busy.keys() == {"0-3", "4-7"} and min(busy.values()) > 0.001  # process 0 writes the times of both


@pytest.mark.proof("processes")
def test_a_killed_run_on_slices_goes_on_to_the_same_bits_and_under_another_plan(split: Path):
    asleep = "plan=split", "sleep.optimizer=host", "distributed.heartbeat=10"
    kill_second(train(2, split, "killed", *SMALL, *asleep), split / "killed", 2)
    train(2, split, "killed", *SMALL, *asleep, "--resume").assert_codes(400, 0, 0)
    assert timeless(split / "killed") == timeless(split / "two")
    train(4, split, "killed", *SMALL, "plan=standalone", "--resume", "ppo.iterations=4").assert_codes(400, *[0] * 4)
    assert timeless(split / "killed")[-1]["step"] == 4


@pytest.mark.proof("processes")
def test_devices_of_another_process_score_while_the_last_rows_decode(tmp_path: Path, user: Path):
    """Generation on all four groups of devices; the last rows move to one of process 0, and process 1 scores.

    One reward model reads tokens, and one reads text.
    """
    calls = {call: {"layout": layout, "devices": "0-3", "fsdp": 2, "tensor": 2} for call, layout in LAYOUTS.items()}
    calls["actor.generate"] |= {"devices": "0-7", "fsdp": 4}
    for call in ("reference.logprobs", "critic.values", "reward.score"):
        calls[call] |= {"devices": "4-7"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"name": "by hand", "calls": calls}))
    settings = f"run_dir={tmp_path}", f"plan={tmp_path / 'plan.yaml'}", "compute.score_rows=4", "rollout.chunk=1"
    counts = []
    for count, name in ((1, "one"), (2, "two")):
        judge = f"rewards=[{{name: judge, model: {user / 'reward'}, batch: 4}}]"
        own = *settings, judge, "rollout.last_groups=1", f"device.simulated={8 // count}", f"name={name}"
        launched = launch(count, tmp_path, "-c", EARLY, "--config", TINY, *SMALL, *own)
        counts += [answer["early"] for answer in launched.answers(600)]
    assert counts[0] == counts[1] == counts[2]
    assert {size for size, scored in counts[0]} == {2, 8}
    assert all(scored == 0 for size, scored in counts[0] if size == 8) and max(scored for _, scored in counts[0]) > 0
    assert_same_run(tmp_path / "one", tmp_path / "two", "model", "reward_model")


@pytest.mark.proof("processes")
def test_pipelines_of_two_processes_do_what_they_do_in_one(tmp_path: Path):
    """The actor has a stage in each process, the critic both in the second; then both share one table. Models score in
    stages, too.

    There a run that is killed goes on to the same bits.
    """
    staged: dict[str, Any] = {"layout": "train", "fsdp": 2, "pipeline": 2, "micro_batches": 2}
    actor, critic = staged | {"devices": "0-7", "tensor": 2}, staged | {"devices": "4-7", "schedule": "zb-h1"}
    calls = {call: {"layout": layout, "devices": "0-7", "fsdp": 4, "tensor": 2} for call, layout in LAYOUTS.items()}
    calls |= {"reference.logprobs": actor | {"layout": "score"}, "critic.values": staged | {"devices": "4-7"}}
    calls["critic.values"] |= {"layout": "train_tp"}
    fused = {call: actor | {"schedule": "fused"} for call in ("actor.update", "critic.update")}
    for name, updates in (("apart", {"actor.update": actor, "critic.update": critic}), ("fused", fused)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "calls": calls | updates}))
    train_one_and_two(tmp_path, *SMALL, f"plan={tmp_path / 'apart.yaml'}")
    assert_same_run(tmp_path / "one", tmp_path / "two", "model", "reward_model")
    resumed = f"plan={tmp_path / 'fused.yaml'}", "ppo.iterations=5", "distributed.heartbeat=10", "--resume"
    shutil.copytree(tmp_path / "two", tmp_path / "killed")
    for count, name in ((1, "one"), (2, "two")):
        train(count, tmp_path, name, *SMALL, *resumed).assert_codes(900, *[0] * count)
    assert_same_run(tmp_path / "one", tmp_path / "two", "model")
    assert timeless(tmp_path / "two")[-1]["step"] == 5
    kill_second(train(2, tmp_path, "killed", *SMALL, *resumed), tmp_path / "killed", 4)
    train(2, tmp_path, "killed", *SMALL, *resumed).assert_codes(400, 0, 0)
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "two")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "two")]
    assert weights[0] == weights[1]


FUNCTION = """
import os
from pathlib import Path

def shorter(completions):
    with Path(os.environ["WHO"]).open("a") as file:
        file.write(f"{os.getppid()}\\n")
    if Path(os.environ["WHO"]).read_text().count("\\n") > int(os.environ["GOOD"]):
        raise ValueError("no more")
    return [-len(completion[0]["content"]) / 10 for completion in completions]
"""
RATES = {"learning_rate": 1e-3, "warmup": 0}


@pytest.mark.proof("processes")
def test_pairs_in_two_processes(settings, tmp_path: Path):
    path = tmp_path / "config.yaml"
    stage = {"steps": 3, "batch": 8, "eval_every": 2, **RATES}
    best = {"best": "-dpo/eval_loss"}
    path.write_text(yaml.safe_dump(settings(stages=["dpo"], rewards=[], dpo=stage, checkpoints=best)))
    one, two = train_one_and_two(tmp_path, config=str(path))
    assert_same_run(one, two, "model")
    chosen = [json.loads((run / "summary.json").read_text())["best"]["step"] for run in (one, two)]
    assert chosen[0] == chosen[1] in (2, 3)


@pytest.mark.proof("processes")
@pytest.mark.parametrize("last", ["reward_model", "dpo"])
def test_fixed_rows_in_pipeline_stages_of_two_processes(last, settings, tmp_path: Path):
    """A stage in each process: only the second one has devices that read rows."""
    path, parts = tmp_path / "config.yaml", {"micro_batches": 2}
    stage = {"steps": 3, "batch": 8, "eval_every": 2, "pipeline": {"stages": 2}, **RATES}
    sections = {"sft": stage | parts, last: stage | ({"algorithm": parts} if last == "dpo" else parts)}
    path.write_text(json.dumps(settings(stages=["sft", last], rewards=[], **sections)))
    assert_same_run(*train_one_and_two(tmp_path, config=str(path)), "model")


@pytest.mark.proof("processes")
def test_all_processes_learn_from_a_model_of_text_and_from_a_function_in_the_first(
    user: Path, settings, tmp_path: Path, monkeypatch
):
    (tmp_path / "rewards.py").write_text(FUNCTION)
    rewards = [{"name": "judge", "model": str(user / "reward")}]
    rewards += [{"name": "short", "function": f"{tmp_path / 'rewards.py'}:shorter"}]
    grpo = {"iterations": 2, "rollout_batch": 16, "algorithm": {"samples": 4}, "actor": RATES}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(stages=["grpo"], rewards=rewards, grpo=grpo)))
    monkeypatch.setenv("GOOD", "1000")
    for count, name in ((1, "one"), (2, "two")):
        monkeypatch.setenv("WHO", str(tmp_path / f"{name}.txt"))
        launched = train(count, tmp_path, name, config=str(path))
        launched.assert_codes(300, *[0] * count)
        callers = {int(line) for line in (tmp_path / f"{name}.txt").read_text().split()}
        assert callers == {launched.processes[0].pid}
    assert_same_run(tmp_path / "one", tmp_path / "two", "model")
    assert all(record["rewards/short/mean"] < 0 for record in timeless(tmp_path / "two"))
    # One that fails ends both with its one sentence, and what was learnt is kept.
    monkeypatch.setenv("GOOD", "1")
    monkeypatch.setenv("WHO", str(tmp_path / "failing.txt"))
    launched = train(2, tmp_path, "failing", config=str(path))
    launched.assert_codes(300, 2, 2)
    for number in (0, 1):
        assert len(re.findall("error: .*no more", launched.text(number))) == 1, launched.text(number)[-2000:]
