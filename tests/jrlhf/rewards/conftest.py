"""Reward functions written to files, samples, and a look at what is left when a test is over."""

import os
import textwrap
import time
from pathlib import Path

import pytest

from jrlhf.rewards.functions import FunctionReward
from jrlhf.rewards.types import Sample


def make_sample(row: int = 0, response: str | None = None, tokens: int = 3, **columns) -> Sample:
    text = f"response {row}" if response is None else response
    return Sample(
        prompt=f"prompt {row}",
        prompt_text=f"<user>prompt {row}",
        completion=text,
        response_text=text,
        response_ids=list(range(10 * row, 10 * row + tokens)),
        finished=True,
        source="here",
        columns=columns,
    )


def alive(pid: int) -> bool:
    """Is it running? A dead process that nobody has waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, within: float) -> bool:
    until = time.monotonic() + within
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def open_files() -> set[str]:
    return {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def pids(reward: FunctionReward) -> list[int]:
    """The process numbers of the workers, in their order."""
    return [worker.pid for _, worker in sorted(reward._pool.items())]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def children() -> set[int]:
    """The processes that this one started, dead ones that nobody has waited for included."""
    processes = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid():
                processes.add(int(entry))
    return processes


@pytest.fixture
def start(tmp_path):
    """start(source, ...) -> a started FunctionReward of the function f in `source`. Nothing of it may be left after.

    Every process is gone, waited for, and every file descriptor closed, whatever the function did.
    """
    before, kin, started = open_files(), children(), []

    def begin(source: str, **arguments) -> FunctionReward:
        file = tmp_path / f"function{len(started)}.py"
        file.write_text(textwrap.dedent(source))
        arguments.setdefault("log", tmp_path / "log")
        arguments.setdefault("deadline", 20.0)
        reward = FunctionReward("judge", f"{file}:f", **arguments)
        started.append(reward)
        return reward.__enter__()

    yield begin
    running = [pid for reward in started for pid in pids(reward)]
    for reward in started:
        reward.close()
    assert not [pid for pid in running if alive(pid)]
    assert children() <= kin
    assert not {name for name in open_files() - before if "pipe" in name or "socket" in name or str(tmp_path) in name}
