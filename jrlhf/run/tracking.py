"""Trackers of a run's metrics: Weights & Biases, and Prometheus through a file.

Metrics are sent to wandb by a separate process that can neither stop nor slow the run. (wandb in the run's process
would delay its end if the server hangs.)
"""

import itertools
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from jrlhf.config.parse import config_yaml
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.run.directory import RunDirectory
from jrlhf.run.files import saved_steps, sha256, write_atomic

SCRIPT = Path(__file__).with_name("wandb_process.py")
IDENTITY, LOG, PROMETHEUS = "wandb.id", "wandb.log", "metrics.prom"  # files of the run
PATIENCE = 30.0  # seconds after the run's end for sending the last metrics


def check_wandb(config: Config) -> None:
    """Checks that wandb is installed if the config uses it."""
    spec = find_spec("wandb")  # a plain folder, such as wandb itself creates, has no origin
    if config.wandb is not None and (spec is None or spec.origin is None):
        raise UserError(f"wandb.project={config.wandb.project} needs its extra, pip install 'jrlhf[wandb]'")


class Wandb:
    """Sends a run's metrics to the wandb process. After a failure there it prints one warning and sends nothing more.

    settings: arguments of `wandb.init`. log: file for the process's output. patience: see `close`.
    """

    def __init__(
        self, settings: Mapping[str, Any], log: Path, warn: Callable[[str], None], *, patience: float = PATIENCE
    ):
        self._log, self._warn, self._patience, self._gone = log, warn, patience, False
        environment = {**os.environ, "WANDB_CONSOLE": "off", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        command = [sys.executable, "-P", str(SCRIPT)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT, "bufsize": 0}
        with open(log, "ab") as output:  # its own session, so that it gets no Ctrl-C
            self._process = subprocess.Popen(command, stdout=output, env=environment, start_new_session=True, **pipes)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._send(settings)

    def log(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Sends the metrics of an iteration without waiting."""
        self._send({"stage": stage, "step": step, "metrics": dict(metrics)})

    def close(self) -> None:
        """Waits until everything is sent, but at most `patience` seconds."""
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
            if self._stdin.write(line) != len(line):  # None: nothing could be written
                self._give_up("it does not read what it is sent")
        except BrokenPipeError:
            self._give_up()

    def _give_up(self, reason: str | None = None) -> None:
        """Ends the process. reason: by default the last line that it printed."""
        self._gone = True
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        if reason is None:
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), f"exit code {self._process.returncode}")
        self._warn(f"nothing more is sent to wandb, and the run goes on ({reason}): see {self._log}")


class Prometheus:
    """Writes the metrics of the newest iteration to a file that the textfile collector of node_exporter reads.

    A metric such as `critic/score/mean` is the gauge `jrlhf_critic_score_mean` with the labels run and stage; if two
    had the same name, the later one ends in `_2`. `jrlhf_step` and `jrlhf_timestamp_seconds` are the newest iteration
    and its time, `jrlhf_checkpoint_timestamp_seconds` is the time of the stage's newest checkpoint. The file is
    replaced atomically, and deleted when the run ends, so that its series end, too.
    """

    def __init__(self, path: Path, name: str):
        self._path, self._name = path, name

    def log(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Replaces the file."""
        own, saved = {"step": step, "timestamp_seconds": time.time()}, self._path.parent / "checkpoints" / stage
        with suppress(OSError):  # it may just be removed
            for newest in saved_steps(saved)[-1:]:
                own["checkpoint_timestamp_seconds"] = (saved / str(newest)).stat().st_mtime
        names, lines = set[str](), list[str]()
        for metric, value in {**own, **metrics}.items():
            gauge = first = "jrlhf_" + re.sub(r"\W", "_", metric, flags=re.ASCII)
            for number in itertools.count(2):
                if gauge not in names:
                    break
                gauge = f"{first}_{number}"
            names.add(gauge)
            number = repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")
            lines += [f"# TYPE {gauge} gauge", f'{gauge}{{run="{self._name}",stage="{stage}"}} {number}']
        write_atomic(self._path, "\n".join(lines) + "\n")

    def close(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)


Tracker = Wandb | Prometheus


@contextmanager
def tracking(config: Config, run: RunDirectory, warn: Callable[[str], None]) -> Iterator[list[Tracker]]:
    """Yields the trackers of a run, in addition to its own files."""
    with ExitStack() as stack:
        trackers = list[Tracker]()
        if config.wandb is not None and run.writes:
            settings = asdict(config.wandb) | {"name": config.name, "id": run_id(run, warn), "resume": "allow"}
            settings |= {"dir": str(run.path), "config": yaml.safe_load(config_yaml(config))}
            trackers.append(stack.enter_context(closing(Wandb(settings, run.path / LOG, warn))))
        if config.prometheus and run.writes:
            trackers.append(stack.enter_context(closing(Prometheus(run.path / PROMETHEUS, config.name))))
        yield trackers


def run_id(run: RunDirectory, warn: Callable[[str], None]) -> str:
    """Returns the id of the run in wandb: 8 random digits, and 8 check digits."""
    path, first = run.path / IDENTITY, uuid.uuid4().hex[:8]
    if path.exists():
        saved = path.read_text(encoding="utf-8", errors="replace").strip()
        if saved == saved[:8] + sha256(saved[:8])[:8]:
            return saved
        warn(f"{path} is damaged: the metrics go to a new run of wandb")
    run.write(IDENTITY, f"{first}{sha256(first)[:8]}\n")
    return first + sha256(first)[:8]
