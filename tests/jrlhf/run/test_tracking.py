"""Metrics to Weights & Biases, which a stand-in replaces: it gets every number, and it cannot stop the run."""

import json
import os
import re
import time

import pytest

from jrlhf.config.check import validate
from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.models import ModelConfig
from jrlhf.run import tracking
from jrlhf.run.directory import open_run
from jrlhf.run.tracking import Wandb, check_wandb

STAND_IN = """
import json, os, time

def init(**settings):
    MODE
    note("init", settings)
    return Run()

def note(*what):
    with open(os.path.join(os.path.dirname(__file__), "calls.jsonl"), "a") as file:
        file.write(json.dumps(what) + "\\n")

class Run:
    def define_metric(self, name, step_metric=None):
        note("axis", name, step_metric)

    def log(self, numbers):
        note("log", numbers)

    def finish(self):
        note("finish")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Installs a fake `wandb` whose `init` begins with a line of code; returns a function that lists its calls."""

    def make(mode: str = "pass"):
        package = tmp_path / "packages" / "wandb"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(STAND_IN.replace("MODE", mode))
        monkeypatch.syspath_prepend(str(package.parent))
        return lambda: [json.loads(line) for line in (package / "calls.jsonl").read_text().splitlines()]

    return make


def config_of(tmp_path, **wandb) -> Config:
    return build(Config, {"name": "followed", "run_dir": str(tmp_path), "wandb": {"project": "sums", **wandb}})


def test_every_number_arrives_under_its_stage_and_a_resumed_run_keeps_its_id(tmp_path, stand_in):
    messages, warnings = stand_in(), []
    for resume, mode in ((False, "offline"), (True, "online")):
        config = config_of(tmp_path, mode=mode)
        with open_run(config, resume=resume) as run, tracking.tracking(config, run, warnings.append) as (wandb,):
            wandb.log("sft", 1, {"sft/loss": 2.5, "timing_s/step": 0.25})
            wandb.log("ppo", 1, {"critic/score/mean": float("nan")})
    lines = messages()
    first, second = [line[1] for line in lines if line[0] == "init"]
    assert first["id"] == second["id"] and len(first["id"]) == 16
    assert (first["mode"], second["mode"], first["resume"]) == ("offline", "online", "allow")
    assert (first["project"], first["entity"], first["name"]) == ("sums", None, "followed")
    assert first["dir"] == str(tmp_path / "followed") and first["config"]["ppo"]["rollout_batch"] == 128
    assert lines[1:5] == [
        ["axis", "sft/step", None],
        ["axis", "sft/*", "sft/step"],
        ["log", {"sft/step": 1, "sft/loss": 2.5, "sft/timing_s/step": 0.25}],
        ["axis", "ppo/step", None],
    ]
    assert str(lines[6]) == "['log', {'ppo/step': 1, 'ppo/critic/score/mean': nan}]"
    assert lines[7] == ["finish"] and warnings == []


def test_what_fails_is_told_once_and_the_run_goes_on(tmp_path, stand_in, monkeypatch):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(60)")
    stand_in("exec(open(settings['project']).read())")  # each case is a file of code
    for number, (code, reason) in enumerate(
        (
            ("raise OSError('no network')", "OSError: no network"),
            ("os._exit(3)", "exit code 3"),
            ("time.sleep(60)", "it was not done 1 s after the run"),
            (None, "it does not read what it is sent"),  # given up at once
        )
    ):
        if code is None:
            monkeypatch.setattr(tracking, "SCRIPT", script)
        warnings, path, log = [], tmp_path / f"code{number}", tmp_path / f"log{number}"
        path.write_text(code or "")
        wandb = Wandb({"project": str(path)}, log, warnings.append, patience=1.0 if code == "time.sleep(60)" else 60.0)
        started = time.monotonic()
        for step in range(100 if code is None else 3):
            wandb.log("sft", step, {"x" * 5000 if code is None else "sft/loss": 1.0})
        assert time.monotonic() - started < 10
        wandb.close()
        wandb.log("sft", 4, {"sft/loss": 1.0})
        wandb.close()
        assert warnings == [f"nothing more is sent to wandb, and the run goes on ({reason}): see {log}"]


def test_the_process_ends_after_a_killed_run_even_if_the_server_hangs(tmp_path, stand_in, monkeypatch):
    stand_in("time.sleep(600)")
    script = tmp_path / "sender.py"
    script.write_text(re.sub("LONGEST = .*", "LONGEST = 0.1", tracking.SCRIPT.read_text()))
    monkeypatch.setattr(tracking, "SCRIPT", script)
    wandb = Wandb({}, tmp_path / "log", print)
    wandb._stdin.close()  # as the system does when the run is killed
    assert wandb._process.wait(60) == 1


def test_what_is_missing_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb.project=sums needs its extra, pip install 'jrlhf\[wandb\]'"):
        check_wandb(config_of(tmp_path))
    check_wandb(Config())
    off = Config(run_dir=str(tmp_path))
    with open_run(off) as run, tracking.tracking(off, run, print) as trackers:
        assert trackers == []
    with pytest.raises(UserError, match="wandb.mode=offline has no effect with wandb.project=null: leave it out"):
        validate(build(Config, {"wandb": {"mode": "offline"}}), 1, {"actor": ModelConfig(8, 8, 1, 1, 1, 8, 8, 64)})


SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{run="([^"\\\n]*)",stage="([^"\\\n]*)"\} ([-+.\w]+)')


def test_prometheus_reads_each_number_of_the_newest_iteration_under_a_name_of_its_own(tmp_path):
    """By the grammar of the text format: a TYPE line before each sample, no name twice, a line end after the last."""
    config = build(Config, {"name": "followed", "run_dir": str(tmp_path), "prometheus": "true"})
    metrics = {"critic/score/mean": 0.1, "critic/score_mean": 2, "timing_s/gen": 1e-300, "a-b": float("nan")}
    metrics |= {"actor/infinite": float("-inf"), "flag": True, "perf/\u00e9": 7}
    before = time.time()
    with open_run(config) as run, tracking.tracking(config, run, print) as (prometheus,):
        prometheus.log("sft", 9, {"old": 1.0})
        assert "checkpoint" not in (run.path / "metrics.prom").read_text(encoding="utf-8")
        for step in (1, 10):
            (run.path / "checkpoints" / "ppo" / str(step)).mkdir(parents=True)
            os.utime(run.path / "checkpoints" / "ppo" / str(step), (step, step))
        prometheus.log("ppo", 3, metrics)
        *lines, end = (run.path / "metrics.prom").read_text(encoding="utf-8").split("\n")
        assert end == "" and [file.name for file in run.path.glob("*.prom")] == ["metrics.prom"]
    assert not (run.path / "metrics.prom").exists()  # its series end with the run
    samples = dict[str, str]()
    for comment, line in zip(lines[::2], lines[1::2], strict=True):
        match = SAMPLE.fullmatch(line)
        assert match is not None and match.group(2, 3) == ("followed", "ppo")
        assert comment == f"# TYPE {match[1]} gauge" and match[1] not in samples
        samples[match[1]] = match[4]
    assert samples.pop("jrlhf_step") == "3.0"
    assert before <= float(samples.pop("jrlhf_timestamp_seconds")) <= time.time()
    assert samples.pop("jrlhf_checkpoint_timestamp_seconds") == "10.0"
    names = ["jrlhf_critic_score_mean", "jrlhf_critic_score_mean_2", "jrlhf_timing_s_gen", "jrlhf_a_b"]
    assert list(samples) == [*names, "jrlhf_actor_infinite", "jrlhf_flag", "jrlhf_perf__"]
    assert list(samples.values()) == ["0.1", "2.0", "1e-300", "NaN", "-Inf", "1.0", "7.0"]
