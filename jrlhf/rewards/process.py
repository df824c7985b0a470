"""A worker process seen from its parent: requests with a deadline, and a death that leaves nothing behind.

Libraries were tried against tests/jrlhf/rewards. pebble notices an exit with code 0 only at the deadline, leaves what
a function started running, leaves its workers running when the parent is killed, and lets SIGTERM end them. loky has no
deadline per task, and one crash fails all tasks.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
GRACE = 1.0  # seconds beyond its deadline in which a worker may end itself, printing where it hung


def _failure(kind: str, detail: str) -> dict[str, str]:
    return {"failure": kind, "detail": detail}


class Worker:
    """A process that answers one request at a time.

    It has a session of its own: a signal to the terminal's process group passes it by, and the programs that it starts
    can be killed with it. It is started by exec, not by fork (this process has threads), and does not import the
    parent's main module. `log` gets its output, from a thread that reads until the process closes it.
    """

    def __init__(self, environment: Mapping[str, str], log: Callable[[bytes], None]):
        self._log, self._tail = log, b""
        self._lock = threading.RLock()  # of ending the process
        self._channel, theirs = socket.socketpair()
        paths = json.dumps([str(path) for path in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", LAUNCH, paths, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True once the process has closed its end of the channel: it is dead or dying."""
        try:
            self._channel.settimeout(0)
            return not self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def request(self, body: bytes, seconds: float) -> Mapping[str, Any]:
        """The answer to a request, which must come within `seconds`.

        If the worker ended, or was killed because it must not be asked again, the answer is {"failure", "detail"}, with
        the kind "hang" (beyond the deadline) or "crash".
        """
        began = time.monotonic()
        try:
            return self._exchange(body, began + seconds + GRACE)
        except ValueError as error:
            self.kill()
            return _failure("crash", str(error))
        except OSError:  # a timeout, or the channel's end
            late = time.monotonic() - began >= seconds
            code = self.kill()
        if late:
            place = _place(self._tail, rb"Thread 0x[0-9a-f]+[^\n]*\(most recent call first\):\n")
            return _failure("hang", f"no answer within {seconds:g} s{place}")
        ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return _failure(
            "crash", ending + (_place(self._tail, rb"Current thread 0x[^\n]*:\n") or _last_words(self._tail))
        )

    def dismiss(self, goodbye: bytes) -> None:
        """Asks an idle worker to exit by itself, which runs its exit handlers."""
        try:
            self._channel.settimeout(0)
            self._channel.send(LENGTH.pack(len(goodbye)) + goodbye)
        except OSError:
            pass  # it is gone, or busy

    def wait(self, seconds: float) -> None:
        """Waits until the process exits, at most for `seconds`."""
        try:
            while self._receive(1, time.monotonic() + seconds):
                pass
        except OSError:
            pass

    def interrupt(self) -> None:
        """Kills the process and the programs that it started; a request that waits for it ends at once."""
        with self._lock:
            if self._process.returncode is None:  # nobody has waited for it: its number is still its own
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass  # nobody left (PermissionError: on macOS, only the dead)

    def kill(self) -> int:
        """`interrupt`, then frees what the process used; returns its exit code. May be called again."""
        with self._lock:
            self.interrupt()
            try:
                code = self._process.wait(5)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL  # stuck in the kernel, on a dead file server: it dies when that lets go
            self._reader.join(1)  # longer only if a detached program holds the pipe open
            self._channel.close()
            return code

    def _exchange(self, body: bytes, until: float) -> Mapping[str, Any]:
        try:
            self._channel.settimeout(max(0.001, until - time.monotonic()))
            self._channel.sendall(LENGTH.pack(len(body)) + body)
        except BrokenPipeError:
            pass  # what it answered before it ended is still read below
        (length,) = LENGTH.unpack(self._receive(LENGTH.size, until))
        if length > LONGEST:
            raise ValueError(f"answered with {length} bytes")
        try:
            answer = json.loads(self._receive(length, until))
            assert isinstance(answer, dict)
            return answer
        except (ValueError, AssertionError) as error:
            raise ValueError("wrote into the channel of its answers") from error

    def _receive(self, count: int, until: float) -> bytes:
        body = bytearray()
        while len(body) < count:
            self._channel.settimeout(max(0.001, until - time.monotonic()))
            part = self._channel.recv(min(count - len(body), 1 << 20))
            if not part:
                raise ConnectionError("the worker closed the channel")
            body += part
        return bytes(body)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while part := output.read(1 << 16):
                self._log(part)
                self._tail = (self._tail + part)[-TAIL:]


def _place(output: bytes, header: bytes) -> str:
    """Where the main thread was, from faulthandler's report; it lists the youngest thread first."""
    blocks = re.split(header, output)
    frame = re.match(rb'\s*File "([^"]*)", line (\d+)', blocks[-1]) if len(blocks) > 1 else None
    return f", at {frame[1].decode(errors='replace')}:{frame[2].decode()}" if frame else ""


def _last_words(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return f", saying {lines[-1][:200]!r}" if lines else ""
