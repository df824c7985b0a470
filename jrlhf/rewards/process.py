"""A worker process seen from its parent: bytes in and out without ever blocking, and a death that leaves nothing."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jrlhf.rewards.worker import LENGTH

LAUNCH = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
descriptor = int(sys.argv[2])
del sys.argv[1:]
from jrlhf.rewards.worker import main
main(descriptor)
"""
LONGEST = 1 << 28  # bytes of an answer
TAIL = 1 << 14  # bytes of a worker's output that are kept to explain its death
GRACE = 1.0  # seconds beyond its deadline in which a worker may end itself, showing where it hung


@dataclass(frozen=True)
class Death:
    """How a worker ended while it was asked something. kind: "hang" (beyond its deadline) or "crash"."""

    kind: str
    detail: str


class Worker:
    """A process that answers one request at a time.

    It has a session of its own, so that a signal to the terminal's process group passes it by, and so that whatever
    programs it starts can be killed with it. It is started by exec, not by fork (this process has threads), and does
    not import the parent's main module.
    """

    def __init__(self, environment: Mapping[str, str], output: Callable[[bytes], None]):
        self._output = output
        self._tail = b""
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._began = self._seconds = 0.0
        self._ended = False
        self.busy = False
        self.facts: dict[str, Any] | None = None  # what the worker said when it was ready
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-u",
                    "-c",
                    LAUNCH,
                    json.dumps([str(path) for path in sys.path]),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = ours
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        ours.setblocking(False)
        os.set_blocking(self._stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """It closed its end: it is dead or dying."""
        return self._ended

    @property
    def seconds_left(self) -> float:
        """Until its request is overdue."""
        return self._began + self._seconds + GRACE - time.monotonic()

    def ask(self, request: bytes, seconds: float) -> None:
        """Sends a request that must be answered within so many seconds."""
        assert not self.busy
        self._outgoing += LENGTH.pack(len(request)) + request
        self._began, self._seconds, self.busy = time.monotonic(), seconds, True

    def answer(self) -> Mapping[str, Any] | Death | None:
        """What came of the request; None while it is still open. After a `Death` the worker has been killed."""
        if len(self._incoming) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._incoming)
            if length > LONGEST:
                self.kill()
                return Death("crash", f"answered with {length} bytes")
            if len(self._incoming) >= LENGTH.size + length:
                body = bytes(self._incoming[LENGTH.size : LENGTH.size + length])
                del self._incoming[: LENGTH.size + length]
                self.busy = False
                try:
                    answer = json.loads(body)
                    assert isinstance(answer, dict)
                    return answer
                except (ValueError, AssertionError):
                    self.kill()
                    return Death("crash", "wrote into the channel of its answers")
        late = time.monotonic() - self._began >= self._seconds
        if self._ended or self.seconds_left <= 0:
            code = self.kill()
            if late:
                place = _place(self._tail, rb"Thread 0x[0-9a-f]+[^\n]*\(most recent call first\):\n")
                return Death("hang", f"no answer within {self._seconds:g} s{place}")
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            place = _place(self._tail, rb"Current thread 0x[^\n]*:\n")
            return Death("crash", how + (place or _last_words(self._tail)))
        return None

    def register(self, poll: select.poll) -> None:
        """Has `poll` wake up for this worker."""
        if not self._stdout.closed:
            poll.register(self._stdout, select.POLLIN)
        if not self._ended:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._outgoing else 0))

    def pump(self) -> None:
        """Moves what can be moved now."""
        self._drain()
        if self._ended:
            return
        try:
            if self._outgoing:
                del self._outgoing[: self._channel.send(bytes(self._outgoing[: 1 << 20]))]
        except BlockingIOError:
            pass
        except OSError:
            pass  # it is gone; what it said before is still read below
        try:
            part = self._channel.recv(1 << 20)
            self._incoming += part
            self._ended = not part
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True

    def kill(self) -> int:
        """Ends the worker and the programs that it started, at once; returns its exit code. May be called again."""
        if self._process.returncode is None:
            # Before the process is waited for: its number still is its own, even if it is dead.
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # nobody left (PermissionError: on macOS, only the dead)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL  # stuck in the kernel, on a dead file server: it dies when that lets go
        self._drain(16)
        self._ended, self.busy = True, False
        self._channel.close()
        self._stdout.close()
        code = self._process.returncode
        assert code is not None
        return code

    def _drain(self, most: int = 1) -> None:
        for _ in range(most):
            if self._stdout.closed:
                return
            part = self._stdout.read(1 << 16)
            if part is None:
                return  # nothing now
            if not part:
                self._stdout.close()
                return
            self._output(part)
            self._tail = (self._tail + part)[-TAIL:]


def wait(workers: Iterable[Worker], seconds: float) -> None:
    """Waits until a worker says something or can be told something, or for so long; then moves the bytes."""
    workers = list(workers)
    poll = select.poll()
    for worker in workers:
        worker.register(poll)
    poll.poll(max(0.0, seconds) * 1000)
    for worker in workers:
        worker.pump()


def dismiss(workers: Iterable[Worker], goodbye: bytes, seconds: float = 2.0) -> None:
    """Lets idle workers leave by themselves, running their exit handlers, and ends those that do not."""
    workers = list(workers)
    leaving = [worker for worker in workers if not worker.busy and not worker.ended]
    until = time.monotonic() + seconds
    for worker in leaving:
        worker.ask(goodbye, seconds)
    while (staying := [worker for worker in leaving if not worker.ended]) and time.monotonic() < until:
        wait(staying, until - time.monotonic())
    for worker in workers:
        worker.kill()


def _place(output: bytes, header: bytes) -> str:
    """Where the main thread was, from faulthandler's report; threads are listed youngest first."""
    blocks = re.split(header, output)
    found = re.match(rb'\s*File "([^"]*)", line (\d+)', blocks[-1]) if len(blocks) > 1 else None
    return f", at {found[1].decode(errors='replace')}:{found[2].decode()}" if found else ""


def _last_words(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return f", saying {lines[-1][:200]!r}" if lines else ""
