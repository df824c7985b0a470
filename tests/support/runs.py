"""Helpers of tests that compare whole runs, and of those that start runs in processes of their own."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jrlhf.run.metrics import read_metrics
from jrlhf.train import main

ROOT = Path(__file__).resolve().parents[2]


def timeless(path: Path) -> list[dict[str, Any]]:
    """A run's metrics, without those of the clock, of a fleet, or of what this process had compiled before."""
    return [
        {name: x for name, x in record.items() if not name.startswith(("timing_", "perf/", "fleet/"))}
        for record in read_metrics(path)
    ]


def stage_of(path: Path, stage: str) -> list[dict[str, Any]]:
    """A run's metrics of one stage."""
    return [record for record in read_metrics(path) if record["stage"] == stage]


def digest(path: Path) -> dict[str, str]:
    """File below `path` -> digest of its bytes."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def assert_same_run(path: Path, other: Path, *names: str) -> None:
    """Two runs have the same metrics, the same models and the same bytes in the files `names`."""
    assert timeless(path) == timeless(other)
    for name in ("samples.jsonl", *names):
        assert (path / name).read_bytes() == (other / name).read_bytes(), name
    for model in ("model", "adapter"):
        assert digest(path / model) == digest(other / model)


def resumed(config: Any, *steps: int) -> None:
    """Deletes these last checkpoints of a run's last stage, and its model, and resumes it."""
    path = Path(config.run_dir) / config.name
    for step in steps:
        shutil.rmtree(path / "checkpoints" / config.stages[-1] / str(step))
    shutil.rmtree(path / "model")
    main(config, resume=True)


class Training:
    """`python -m jrlhf.train` in a process of its own. programs: a folder for compiled programs, kept between runs.

    module: what runs instead, with the same arguments.
    """

    def __init__(self, *arguments: str | Path, log: Path, programs: Path | None = None, module: str = "jrlhf.train"):
        environment = dict(os.environ)
        if programs is not None:
            environment |= {"JAX_COMPILATION_CACHE_DIR": str(programs)}
            environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._log = log
        with open(log, "a") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

    def wait(self, expected: int = 0) -> str:
        """Waits for the end; returns what was printed."""
        code = self.process.wait(timeout=600)
        text = self._log.read_text()
        assert code == expected, text
        return text

    def reach(self, run: Path, records: int) -> bool:
        """Waits until metrics.jsonl has this number of records. False if the process ends before."""
        metrics = run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < records:
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def stop(self, signal: int) -> None:
        self.process.send_signal(signal)
        self.process.wait(timeout=600)
