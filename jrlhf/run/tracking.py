"""Metrics to Weights & Biases, beside metrics.jsonl: from a process of their own, which can neither stop nor slow the
run."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from jrlhf.config import Config, config_yaml
from jrlhf.errors import UserError
from jrlhf.run.directory import Run

LAUNCH = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from jrlhf.run.wandb_process import main
main()
"""
IDENTITY, LOG = "wandb.id", "wandb.log"  # files of the run
PATIENCE = 30.0  # seconds after the run in which the last metrics may be sent


def check_wandb(config: Config) -> None:
    """Whether wandb is installed, where the config wants it.

    Raises:
        UserError: it is not.
    """
    found = find_spec("wandb")
    missing = found is None or found.origin is None  # a mere folder, such as wandb itself makes, has no origin
    if config.wandb is not None and missing:
        raise UserError(f"wandb.project={config.wandb.project} needs its extra, pip install 'jrlhf[wandb]'")


class Wandb:
    """Sends a run's metrics to its process. What fails there is told once, and nothing is sent any more.

    settings: the arguments of `wandb.init`.
    log: gets what the process says.
    """

    def __init__(
        self, settings: Mapping[str, Any], log: Path, tell: Callable[[str], None], *, patience: float = PATIENCE
    ):
        self._log, self._tell, self._patience, self._gone = log, tell, patience, False
        command = [sys.executable, "-P", "-c", LAUNCH, json.dumps([str(path) for path in sys.path])]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "WANDB_CONSOLE": "off"},
                start_new_session=True,  # Ctrl-C is the run's to hear
                bufsize=0,
            )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._send(settings)

    def log(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Hands over the numbers of an iteration; returns at once."""
        self._send({"stage": stage, "step": step, "metrics": dict(metrics)})

    def close(self) -> None:
        """Waits until all is sent, but no longer than `patience` seconds."""
        if self._gone:
            return
        self._stdin.close()
        try:
            if self._process.wait(self._patience):
                self._give_up()
        except subprocess.TimeoutExpired:
            self._give_up(f"it was not done {self._patience:g} s after the run")

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._gone:
            return
        line = json.dumps(message).encode() + b"\n"
        try:
            if self._stdin.write(line) != len(line):  # None where nothing could be written
                self._give_up("it does not read what it is sent")
        except BrokenPipeError:
            self._give_up()

    def _give_up(self, reason: str | None = None) -> None:
        """reason: where the process itself did not end with one."""
        self._gone = True
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        if reason is None:
            said = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            reason = next((line for line in reversed(said) if line.strip()), f"exit code {self._process.returncode}")
        self._tell(f"nothing more is sent to wandb, and the run goes on ({reason}): see {self._log}")


@contextmanager
def tracking(config: Config, run: Run, tell: Callable[[str], None]) -> Iterator[Wandb | None]:
    """The run's metrics in Weights & Biases, under one id however often it is resumed; None where nobody wants them."""
    section = config.wandb
    if section is None or not run.writes:
        yield None
        return
    path = run.path / IDENTITY
    if not path.exists():
        run.write(IDENTITY, uuid.uuid4().hex[:8] + "\n")
    settings = {
        "project": section.project,
        "entity": section.entity,
        "group": section.group,
        "mode": section.mode,
        "name": config.name,
        "id": path.read_text(encoding="utf-8").strip(),
        "resume": "allow",
        "dir": str(run.path),
        "config": yaml.safe_load(config_yaml(config)),
    }
    wandb = Wandb(settings, run.path / LOG, tell)
    try:
        yield wandb
    finally:
        wandb.close()
