"""Processes that tests wait for, and ports for them."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    """Returns a port of this machine on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def state(pid: int) -> list[str]:
    """The state of a process and the number of its parent; X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def alive(pid: int) -> bool:
    """Returns whether a process runs; a dead one that nobody has waited for does not."""
    return state(pid)[0] not in "ZX"


def gone(pid: int, within: float = 5.0) -> bool:
    return eventually(lambda: not alive(pid), within)


def eventually(holds: Callable[[], bool], within: float) -> bool:
    until = time.monotonic() + within
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def children(pid: int) -> list[int]:
    """The processes that a process has started and that were not waited for."""
    pids = list[int]()
    for own in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            pids += map(int, own.read_text().split())
    return pids
