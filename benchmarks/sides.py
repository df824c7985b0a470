"""The two sides of a comparison: their environments, and processes of theirs that take turns."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.common import TURN, Job
from jrlhf.run.devices import KEPT_BLOCK, KEPT_MEMORY

TURN_SECONDS = 600.0  # no process may compute longer before it waits or ends
MEMORY_KEPT = ", memory kept"  # behind any variant: glibc keeps freed memory, as `jrlhf.train` has it do
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(KEPT_BLOCK), "MALLOC_TRIM_THRESHOLD_": str(KEPT_MEMORY)}
# What would tune one side and not the other, or both otherwise than the record says: by the beginning of its name.
TUNING = ("PYTHONPATH", "XLA_", "JAX_", "PJRT_", "NPROC", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_")
TUNING += ("GLIBC_TUNABLES", "LD_PRELOAD")


class CompareError(Exception):
    """A comparison cannot be made; the message says why, in a sentence."""


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The Python of an environment that has these requirements; made first if it is not there as they ask for.

    Where pip would download a torch that is built for GPUs, name an index of builds for CPUs in PIP_EXTRA_INDEX_URL.

    Raises:
        CompareError: pip fails.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    directory = cache / "jrlhf" / "peers" / name
    python, complete = directory / "bin" / "python", directory / "complete.txt"
    wanted = "\n".join(requirements)
    if complete.is_file() and complete.read_text() == wanted:
        return python
    print(f"making {directory} with {', '.join(requirements)}", flush=True)
    venv.create(directory, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    if subprocess.run(pip, stdin=subprocess.DEVNULL).returncode != 0:
        raise CompareError(f"pip could not install {' '.join(requirements)} into {directory}: its words are above")
    complete.write_text(wanted)
    return python


@dataclass(frozen=True)
class Side:
    """A Python with a module of `benchmarks.peers`, run in a directory that has `benchmarks` in it."""

    python: Path
    module: str
    directory: Path

    def run(self, job: Job) -> dict[str, Any]:
        """Does a job in a process of its own, and returns what it printed last.

        Raises:
            CompareError: as `Running.turn`.
        """
        with Running(self, job) as running:
            result = running.turn()
        assert result is not None, "nobody else computes"
        return result


class Running:
    """A side that does a job in a process of its own, turn by turn. Left, it is ended with all that it started."""

    def __init__(self, side: Side, job: Job):
        plain = replace(job, variant=job.variant.removesuffix(MEMORY_KEPT))
        command = [str(side.python), "-m", f"benchmarks.peers.{side.module}", plain.to_json()]
        pinned = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        pinned |= {"TRL_EXPERIMENTAL_SILENCE": "1", "JAX_NUM_CPU_DEVICES": str(job.devices)}
        pinned |= KEEPING if job.variant.endswith(MEMORY_KEPT) else {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(TUNING)}
        self._what = f"{side.module} {job.case} {job.variant}".strip()
        self._waits, self._late, self._last = False, False, ""
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            cwd=side.directory,
            env=inherited | pinned,
            stdin=subprocess.PIPE if job.in_turn else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # compilers that it has started end with it
        )

    def turn(self) -> dict[str, Any] | None:
        """Lets it compute until it waits for its turn: None; or to its end: what it printed last.

        Raises:
            CompareError: it failed, or computed longer than TURN_SECONDS.
        """
        deadline = threading.Timer(TURN_SECONDS, self._end_late)
        deadline.start()
        try:
            if self._go_on():
                return None
            code = self._process.wait()
        finally:
            deadline.cancel()
        if self._late and code == -signal.SIGKILL:
            raise CompareError(f"{self._what} took longer than {TURN_SECONDS:.0f} seconds")
        if code != 0:
            self._errors.seek(0)
            message = (self._errors.read().strip() or "no message").splitlines()[-1]
            raise CompareError(f"{self._what} failed with exit code {code}: {message}")
        return json.loads(self._last)

    def _go_on(self) -> bool:
        """Until it waits, or its output ends; whether it waits."""
        assert self._process.stdout is not None
        if self._waits:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended while it waited
                self._process.stdin.write("\n")
                self._process.stdin.flush()
        for line in self._process.stdout:
            if line.rstrip("\n") == TURN:
                self._waits = True
                return True
            self._last = line.strip() or self._last
        return False

    def _end_late(self) -> None:
        self._late = True
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._process.communicate()
        self._errors.close()


def take_turns(jobs: Mapping[str, tuple[Side, Job]]) -> dict[str, dict[str, Any]]:
    """What a process for each of these jobs printed last, by the same names; they compute in turn, in this order.

    Raises:
        CompareError: one of them failed.
    """
    with contextlib.ExitStack() as stack:
        running, results = {}, {}
        for name, (side, job) in jobs.items():
            running[name] = stack.enter_context(Running(side, replace(job, in_turn=True)))
            results[name] = running[name].turn()
        while None in results.values():
            for name, process in running.items():
                results[name] = results[name] or process.turn()
        return results
