"""Starts a run, or any command, in several processes of this machine that find each other."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jrlhf.algorithms.registry import graph_of
from jrlhf.config import Config
from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "tests/jrlhf/tiny.yaml")
SMALL = (
    "sft.steps=3 sft.batch=8 sft.eval_every=2 reward_model.steps=2 data.annotator.prompts=8 "
    "data.annotator.heldout_prompts=8 ppo.iterations=3 ppo.rollout_batch=16 ppo.save_every=1 ppo.algorithm.epochs=1 "
    "evaluation.prompts=8 rollout.chunk=12 rollout.slots=8 rollout.buckets=1 rollout.lengths=1"
).split()
_LAYOUT = {"generate": "generate", "infer": "score", "train": "train"}  # by a call's kind
LAYOUTS = {call.name: _LAYOUT[call.kind] for call in graph_of(Config()) if call.kind in _LAYOUT}


@dataclass
class Launched:
    """Processes of one run, and the files with their output."""

    processes: list[subprocess.Popen]
    logs: list[Path]

    def assert_codes(self, seconds: float, *expected: int) -> None:
        """Waits for the exit codes; processes that do not end in time are killed."""
        until = time.monotonic() + seconds
        try:
            codes = tuple(process.wait(max(0.1, until - time.monotonic())) for process in self.processes)
        except subprocess.TimeoutExpired:
            pytest.fail(f"a process hangs: {[log.read_text()[-2000:] for log in self.logs]}")
        finally:
            for process in self.processes:
                process.kill()
        assert codes == expected, self.text(0)[-3000:]

    def answers(self, seconds: float) -> list[Any]:
        """Waits for exit codes of 0; returns the last JSON object that each process printed into its pipe. Processes
        that do not end in time are killed."""
        until, outputs = time.monotonic() + seconds, list[str]()
        try:
            for process in self.processes:
                outputs.append(process.communicate(timeout=max(0.1, until - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            pass
        self.assert_codes(0.1, *[0] * len(self.processes))
        return [json.loads(re.findall(r"^\{.*", output, re.M)[-1]) for output in outputs]  # Gloo prints into them, too

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until and all(process.poll() is None for process in self.processes)
            time.sleep(0.05)

    def text(self, number: int) -> str:
        return self.logs[number].read_text(errors="replace")


def launch(count: int, directory: Path, *arguments: str, **more: str) -> Launched:
    """Starts the same command in `count` processes that find each other by the environment.

    `{process}` in an argument stands for the number of the process.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | more
    if count > 1:
        environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    launched = Launched([], [])
    for number in range(count):
        variables = environment | ({"JAX_PROCESS_ID": str(number)} if count > 1 else {})
        launched.logs.append(directory / f"{arguments[-1].replace('/', '-')[-40:]}.{number}.log")
        with open(launched.logs[-1], "w") as log:
            output = log if arguments[0] == "-m" else subprocess.PIPE
            command = [sys.executable, *(argument.replace("{process}", str(number)) for argument in arguments)]
            process = subprocess.Popen(command, stdout=output, stderr=log, text=True, env=variables, cwd=ROOT)
            launched.processes.append(process)
    return launched


def train(count: int, runs: Path, name: str, *overrides: str, config: str = TINY) -> Launched:
    settings = (f"run_dir={runs}", f"device.simulated={8 // count}", *overrides, f"name={name}")
    command = ("-m", "jrlhf.train", "--config", config, *settings)
    return launch(count, runs, *command, JAX_COMPILATION_CACHE_DIR=str(runs / "programs"))
