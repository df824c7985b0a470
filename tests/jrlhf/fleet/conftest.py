"""A Ray cluster for tests."""

import fcntl
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.processes import eventually, free_port

TOKEN = secrets.token_hex(32)  # of all clusters: Ray reads it once in a process


@pytest.fixture
def alone():
    """Waits until no other test of this machine has a Ray cluster: two would share a file of the present one."""
    with open(Path(tempfile.gettempdir()) / "jrlhf-test-ray.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def cluster(monkeypatch, alone):
    """A Ray cluster of this machine, at RAY_ADDRESS."""
    port = free_port()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default everything else on a busy machine goes first
    import ray  # an extra, which reads these variables now

    def answers() -> bool:
        assert head.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    options = "--head", "--block", "--num-cpus=3", "--include-dashboard=false", "--disable-usage-stats"
    with subprocess.Popen([Path(sys.executable).with_name("ray"), "start", f"--port={port}", *options]) as head:
        try:
            assert eventually(answers, 120)
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            yield
        finally:
            ray.shutdown()
            head.terminate()
