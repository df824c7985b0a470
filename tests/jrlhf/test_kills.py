"""Real runs, killed at random moments and resumed: the same bits as a run that was never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("PROOF_SEED", "0"))
LOOP = {"iterations": 6, "rollout_batch": 16, "save_every": 2, "actor": {"learning_rate": 3.0e-4, "warmup": 1}}
STAGES: dict[str, dict[str, Any]] = {
    "ppo": {**LOOP, "algorithm": {"epochs": 2, "minibatches": 2, "kl_target": 4.0, "kl_horizon": 500}},
    "dapo": {**LOOP, "algorithm": {"samples": 4}},
    "grpo": {**LOOP, "algorithm": {"samples": 2}, "asynchronous": {"staleness": 2, "update_steps": 3}},
}


def settings(stage: str) -> dict[str, Any]:
    return {
        "name": stage,
        "device": {"platform": "cpu", "simulated": 2},
        "mesh": {"data": 2, "fsdp": 1} if "asynchronous" in STAGES[stage] else {"data": 1, "fsdp": 2},
        "plan": "disaggregated" if "asynchronous" in STAGES[stage] else "colocate",
        "model": {"vocab_size": 14, "embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32}
        | {"max_positions": 16},
        "data": {"source": "arithmetic", "max_prompt": 6, "max_response": 4, "heldout_rows": 8},
        "arithmetic": {"terms": 2, "digits": 1, "problems": 60},
        # So few steps teach no sums: rewards that differ need another rule.
        "rewards": [{"name": "low", "function": "format_regex", "options": {"pattern": "[0-4].*"}}],
        "stages": ["sft", stage],
        "sft": {"steps": 4, "batch": 8, "warmup": 1, "eval_every": 2, "save_every": 2},
        "evaluation": {"prompts": 8},
        stage: STAGES[stage],
    }


def start(directory: Path, stage: str, *flags: str) -> subprocess.Popen[str]:
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump({**settings(stage), "run_dir": str(directory)}))
    return subprocess.Popen(
        [sys.executable, "-m", "jrlhf.train", "--config", str(config), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def outcome(run: Path) -> tuple[dict[tuple[str, int], dict[str, Any]], bytes]:
    """Metrics without times, by stage and step; and the bytes of the final weights."""
    records = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        key = record["stage"], record["step"]
        assert key not in records, "a step is recorded once"
        records[key] = {name: x for name, x in record.items() if not name.startswith(("timing_", "perf/"))}
    return records, (run / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, tuple[float, Any]]:
    """Stage -> (seconds, outcome) of a run that nobody kills."""
    runs = {}
    for stage in STAGES:
        directory, began = tmp_path_factory.mktemp(stage), time.monotonic()
        process = start(directory, stage)
        text, _ = process.communicate(timeout=600)
        assert process.returncode == 0, text
        runs[stage] = time.monotonic() - began, outcome(directory / stage)
        scores = [record["critic/score/mean"] for (name, _), record in runs[stage][1][0].items() if name == stage]
        assert len(set(scores)) > 1
    return runs


@pytest.mark.proof("kills")
@pytest.mark.parametrize("number", range(25))
def test_a_killed_run_resumes_to_the_same_bits(number: int, uninterrupted, tmp_path: Path):
    draw = random.Random(f"{SEED} {number}")
    stage = draw.choice(sorted(STAGES))
    seconds, expected = uninterrupted[stage]
    for kill in range(draw.choice((1, 1, 2))):  # sometimes the resumed run is killed, too
        moment = draw.uniform(0.05, 0.98) * seconds
        existing = (tmp_path / stage / "config.yaml").is_file()
        process = start(tmp_path, stage, *["--resume"] * existing)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        print(f"seed {SEED}, kill {kill + 1} of run {number} ({stage}) after {moment:.2f} s")
    existing = (tmp_path / stage / "config.yaml").is_file()
    process = start(tmp_path, stage, *["--resume"] * existing)
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text
    assert outcome(tmp_path / stage) == expected
