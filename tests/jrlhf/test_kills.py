"""Real runs, killed at random moments and resumed: the same bits as a run that was never killed."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import children, gone
from tests.support.runs import Training

SEED = int(os.environ.get("PROOF_SEED", "0"))
LOOP = {"iterations": 6, "rollout_batch": 16, "save_every": 2, "actor": {"learning_rate": 3.0e-4, "warmup": 1}}
STAGES: dict[str, dict[str, Any]] = {
    "ppo": {**LOOP, "algorithm": {"epochs": 2, "minibatches": 2, "kl_target": 4.0, "kl_horizon": 500}},
    "dapo": {**LOOP, "algorithm": {"samples": 4}},
    "grpo": {**LOOP, "algorithm": {"samples": 2}},
}
ASYNCHRONOUS = {"staleness": 2, "uncorrected": True, "update_steps": 3, "logical_workers": 2}
DELTA = {"engine": "local", "workers": 2, "transfer": "delta", "anchor_every": 3}
# Stage, what happens to unfinished rows when new weights arrive, rollout processes.
CASES = [
    *(("ppo", None, None), ("dapo", None, None)),
    *(("grpo", rule, fleet) for rule in ("keep_cache", "prefill_again") for fleet in (None, DELTA)),
]
SFT = 2  # number of its records


def settings(number: int) -> dict[str, Any]:
    stage, rule, fleet = CASES[number]
    own = {**STAGES[stage], **({"asynchronous": {**ASYNCHRONOUS, "on_new_weights": rule}} if rule else {})}
    return {
        "name": "run",
        "device": {"platform": "cpu", "simulated": 2},
        "mesh": {"data": 2, "fsdp": 1} if rule else {"data": 1, "fsdp": 2},
        "plan": "disaggregated" if rule else "colocate",
        "model": {"vocab_size": 14, "embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32}
        | {"max_positions": 16},
        "data": {"source": "arithmetic", "max_prompt": 6, "max_response": 4, "heldout_rows": 8}
        | {"terms": 2, "digits": 1, "problems": 60},
        # So few steps teach no sums: rewards that differ need another rule.
        "rewards": [{"name": "low", "function": "format_regex", "options": {"pattern": "[0-4].*"}}],
        "stages": ["sft", stage],
        "sft": {"steps": 4, "batch": 8, "warmup": 1, "eval_every": 2, "save_every": 2},
        "evaluation": {"prompts": 8},
        stage: own,
        **({"fleet": fleet} if fleet else {}),
    }


def outcome(run: Path) -> tuple[dict[tuple[str, int], dict[str, Any]], bytes]:
    """Metrics without times, by stage and step; and the bytes of the final weights."""
    records = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        key = record["stage"], record["step"]
        assert key not in records, "a step is recorded once"
        records[key] = {name: x for name, x in record.items() if not name.startswith(("timing_", "perf/", "fleet/"))}
    return records, (run / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[[Path, int], Training]:
    """A function: directory, number of a case -> its run, started or resumed. Runs share their compiled programs."""
    programs = tmp_path_factory.mktemp("programs")

    def started(directory: Path, number: int) -> Training:
        config, existing = directory / "config.yaml", (directory / "run" / "config.yaml").is_file()
        config.write_text(yaml.safe_dump({**settings(number), "run_dir": str(directory)}))
        return Training("--config", config, *["--resume"] * existing, log=directory / "log", programs=programs)

    return started


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, start) -> Callable[[int], tuple[float, Any]]:
    """A function: number of a case -> (seconds, outcome) of a run that nobody kills and whose programs are compiled."""

    @cache
    def run(number: int) -> tuple[float, Any]:
        outcomes, began = [], 0.0
        for _ in range(2):
            directory, began = tmp_path_factory.mktemp("run"), time.monotonic()
            start(directory, number).wait()
            outcomes.append(outcome(directory / "run"))
        assert outcomes[0] == outcomes[1]
        scores = [record["critic/score/mean"] for (name, _), record in outcomes[0][0].items() if name != "sft"]
        assert len(set(scores)) > 1
        return time.monotonic() - began, outcomes[0]

    return run


@pytest.mark.proof("kills")
@pytest.mark.parametrize("number", range(25))
def test_a_killed_run_resumes_to_the_same_bits(number: int, uninterrupted, start, tmp_path: Path):
    """Also an asynchronous one, in one process and in three, whose rollout processes end with it."""
    draw, case = random.Random(f"{SEED} {number}"), number % len(CASES)
    rule, (seconds, expected) = CASES[case][1], uninterrupted(case)
    kills, directory, attempts = draw.choice((1, 1, 2)), tmp_path, 0  # sometimes the resumed run is killed, too
    while kills:
        training, begin = start(directory, case), time.monotonic()
        if rule:  # its rollouts are to be hit
            training.reach(directory / "run", SFT)
        moment = draw.uniform(0.05, 0.98) * max(0.0, seconds - (time.monotonic() - begin))
        time.sleep(moment)
        workers, ended = children(training.process.pid), training.process.poll() is not None
        training.stop(signal.SIGKILL)
        assert all(gone(pid) for pid in workers)
        print(f"seed {SEED}, run {number} {CASES[case]}, {len(workers)} workers after {moment:.2f} s, ended: {ended}")
        if ended:  # before the kill: another run begins
            assert training.process.returncode == 0 and outcome(directory / "run") == expected
            attempts += 1
            directory = tmp_path / str(attempts)
            directory.mkdir()
        kills -= not ended
    start(directory, case).wait()
    assert outcome(directory / "run") == expected
