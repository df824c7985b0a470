"""A Ray cluster for tests."""

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import children, eventually, free_port

TOKEN = secrets.token_hex(32)  # of all clusters: Ray reads it once in a process


@pytest.fixture
def alone():
    """Waits until no other test of this machine has a Ray cluster: two would share a file of the present one."""
    with open(Path(tempfile.gettempdir()) / "jrlhf-test-ray.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kills `ray start` and all that it has started, as if a machine lost its power."""
    pids = [process.pid]
    for pid in pids:
        pids += children(pid)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def cluster(request, monkeypatch, alone) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """A Ray cluster of this machine, at RAY_ADDRESS, with 3 CPUs or as many as the test's parameter says.

    The value is a function: adds a machine of one CPU, which `lose` ends.
    """
    port = free_port()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default everything else on a busy machine goes first
    import ray  # an extra, which reads these variables now

    def answers() -> bool:
        assert head.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    def start(*options: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([Path(sys.executable).with_name("ray"), "start", "--block", *options]))
        return started[-1]

    options = "--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={getattr(request, 'param', 3)}"
    started = list[subprocess.Popen[bytes]]()
    head = start("--head", f"--port={port}", *options)
    try:
        assert eventually(answers, 120)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        yield lambda: start(f"--address=127.0.0.1:{port}", "--num-cpus=1")
    finally:
        ray.shutdown()
        for process in reversed(started):
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
