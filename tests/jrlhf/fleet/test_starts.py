"""Runs of every kind end, however often they start with programs in JAX's cache; one that hangs ends by a signal."""

import os
import signal
from pathlib import Path

import pytest

from tests.jrlhf.fleet.test_runs import REWARD, SETTINGS
from tests.support.runs import Training, stage_of

STARTS, ITERATIONS = 10, 3
SECTION = (
    f"iterations={ITERATIONS} rollout_batch=16 actor.learning_rate=0.01 actor.warmup=0 algorithm.samples=2".split()
)
ASYNCHRONOUS = "grpo.algorithm.old_logprobs=rollout", "grpo.asynchronous={staleness: 2, update_steps: 3}"
SLICES = "plan=disaggregated", *ASYNCHRONOUS
SHAPE = "device.simulated=4", "mesh.data=2", "mesh.fsdp=2"
KINDS = {
    "synchronous": ("plan=colocate", *SHAPE),
    "split": ("plan=disaggregated", *SHAPE),
    "slices": (*SLICES, *SHAPE),
    "slices of whole models": (*SLICES, "device.simulated=4", "mesh.data=4", "mesh.fsdp=1"),
    "fleet": (*ASYNCHRONOUS, "plan=colocate", "fleet.workers=1", *SHAPE),
    "pipeline": ("plan=colocate", "device.simulated=2", "mesh.data=1", "mesh.fsdp=2", "sft.pipeline.stages=2"),
}
# A step that waits for ever, as a device does whose peers have gone.
HANGS = """
import ctypes, sys
from jrlhf.fleet.fleet import Fleet
from jrlhf.train import cli

def waits(self, *arguments):
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

Fleet.publish = waits
sys.exit(cli(sys.argv[1:]))
"""


def arguments(directory: Path, name: str, *settings: str) -> list[str]:
    named = [f"run_dir={directory}", f"name={name}", "stages=[sft, grpo]"]
    section = [f"grpo.{setting}" for setting in SECTION]
    return ["--config", "arithmetic-grpo", *SETTINGS, REWARD, *named, *section, *settings]


@pytest.mark.proof("starts")
@pytest.mark.parametrize("kind", KINDS)
def test_every_start_of_a_run_ends(kind, tmp_path):
    """`Training` waits for 600 seconds. Programs of all sizes are kept in a directory of the test's own."""
    for start in range(STARTS):
        name = f"start-{start}"
        log = tmp_path / f"{name}.log"
        Training(*arguments(tmp_path, name, *KINDS[kind]), log=log, programs=tmp_path / "programs").wait()
        assert len(stage_of(tmp_path / name, "grpo")) == ITERATIONS


@pytest.mark.proof("starts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_hangs_ends_within_a_minute_of_a_signal(number, tmp_path):
    script, run = tmp_path / "hangs.py", tmp_path / "run"
    script.write_text(HANGS)
    os.environ["PYTHONPATH"] = str(tmp_path)
    training = Training(*arguments(tmp_path, "run", *KINDS["slices"]), log=tmp_path / "log", module="hangs")
    assert training.reach(run, 2)  # those of sft
    while "update" not in (tmp_path / "log").read_text():
        assert training.process.poll() is None
    training.process.send_signal(number)
    assert training.process.wait(timeout=75) == 75
    assert "was asked to stop but computed nothing for 40 seconds" in (tmp_path / "log").read_text()
