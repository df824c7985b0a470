"""Runs of every kind end, however often they start with programs in JAX's cache; one that hangs ends by a signal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.jrlhf.rollouts.test_runs import REWARD
from tests.support.runs import ROOT, Training, stage_of

STARTS, ITERATIONS, SECONDS = 10, 2, 300  # of a kind; of a run; after which a start has hanged
# Few weights and programs, because what can hang is their order.
SETTINGS = (
    "stages=[sft, grpo] compute.remat=full model.embed=16 model.layers=2 model.heads=2 model.kv_heads=1 "
    "model.head_dim=8 model.mlp=32 model.max_positions=16 data.digits=1 data.problems=60 data.heldout_rows=8 "
    "data.max_prompt=4 data.max_response=6 sft.steps=1 sft.batch=8 sft.warmup=0 sft.eval_every=1 sft.save_every=1 "
    f"evaluation.prompts=8 rollout.chunk=2 rollout.buckets=1 rollout.lengths=1 grpo.iterations={ITERATIONS} "
    f"grpo.save_every={ITERATIONS} grpo.rollout_batch=16 grpo.actor.learning_rate=0.01 grpo.actor.warmup=0 "
    "grpo.algorithm.samples=2"
)
ARGUMENTS = ["--config", "arithmetic-grpo", *SETTINGS.replace("[sft, grpo]", "[sft,grpo]").split(), REWARD]
ASYNCHRONOUS = (
    "grpo.algorithm.old_logprobs=rollout",
    "grpo.asynchronous={staleness: 2, update_steps: 3}",
)
SHAPE = "device.simulated=4", "mesh.data=2", "mesh.fsdp=2"
KINDS = {
    "synchronous": ("plan=colocate", *SHAPE),
    "split": ("plan=disaggregated", *SHAPE),
    "slices": ("plan=disaggregated", *ASYNCHRONOUS, *SHAPE),
    "slices of whole models": (
        "plan=disaggregated",
        *ASYNCHRONOUS,
        "device.simulated=4",
        "mesh.data=4",
        "mesh.fsdp=1",
    ),
    "fleet": ("plan=colocate", *ASYNCHRONOUS, "fleet.workers=1", *SHAPE),
    "pipeline": ("device.simulated=2", "mesh.data=1", "mesh.fsdp=2"),
}
# The update and the scores of the reference run in two pipeline stages.
STAGED: dict[str, Any] = {"devices": "0-1", "pipeline": 2, "micro_batches": 2}
PIPELINE = {
    "actor.generate": {"devices": "0-1", "layout": "generate", "fsdp": 2},
    "actor.logprobs": {"devices": "0-1", "layout": "score", "fsdp": 2},
    "reference.logprobs": {**STAGED, "layout": "score"},
    "actor.update": {**STAGED, "layout": "train"},
}
# A step that waits for ever, as a device does whose peers have gone.
HANGS = """
import ctypes, sys
from jrlhf.rollouts.fleet import Fleet
from jrlhf.train import cli

def waits(self, *arguments):
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

Fleet.publish = waits
sys.exit(cli(sys.argv[1:]))
"""


def arguments(directory: Path, name: str, kind: str) -> list[str]:
    settings = list(KINDS[kind])
    if kind == "pipeline":
        plan = directory / "plan.yaml"
        plan.write_text(yaml.safe_dump({"name": "staged", "calls": PIPELINE}))
        settings.append(f"plan={plan}")
    return [*ARGUMENTS, f"run_dir={directory}", f"name={name}", *settings]


def starts(directory: Path, kind: str, names: list[str], *, guard: bool) -> list[dict[str, Any]]:
    """Starts runs one after the other; returns what `tests.support.starts` prints of each."""
    file = directory / f"{names[0]}.json"
    runs = [arguments(directory, name, kind) for name in names]
    file.write_text(json.dumps({"starts": runs, "guard": guard, "seconds": SECONDS}))
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # of LLVM, which does not order collectives
    }
    command = [sys.executable, "-m", "tests.support.starts", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    log = file.with_suffix(".log").read_text()
    assert [result["code"] for result in results] == [0] * len(names), f"{results}\n{log}"
    assert all(len(stage_of(directory / name, "grpo")) == ITERATIONS for name in names)
    print(kind, results)
    return results


@pytest.mark.proof("starts")
@pytest.mark.parametrize("kind", KINDS)
def test_every_start_of_a_run_ends(kind, tmp_path):
    """Where several CPU devices may read programs from the cache, all starts but the first read all of theirs, and the
    order of collectives that the programs say is enough. As shipped, a run reads none of the same files."""
    first, *warm = starts(tmp_path, kind, [f"warm-{start}" for start in range(STARTS + 1)], guard=False)
    assert first["read"] < first["compiled"] / 2  # a run may compile a program twice
    assert all(0 < result["read"] == result["compiled"] for result in warm)
    (shipped,) = starts(tmp_path, kind, ["shipped"], guard=True)
    assert shipped["read"] == 0 and shipped["compiled"] > 0


@pytest.mark.proof("starts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_hangs_ends_within_a_minute_of_a_signal(number, tmp_path, monkeypatch, request):
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    log = tmp_path / "log"
    before = signal.signal(number, signal.SIG_DFL)  # a program that nohup or `&` started lets its children ignore it
    request.addfinalizer(lambda: signal.signal(number, before))
    training = Training(*arguments(tmp_path, "run", "slices"), log=log, module="hangs")
    while "compiling actor.update" not in log.read_text():
        assert training.process.poll() is None, log.read_text()
    training.process.send_signal(number)
    assert training.process.wait(timeout=100) == 75
    assert "was asked to stop but computed nothing for 40 seconds" in log.read_text()
