"""`Worker`: a child process that answers requests with a deadline and always ends together with its own children.

Libraries were tried on tests/jrlhf/rewards. pebble notices an exit with code 0 only at the deadline, does not end the
processes that a function started, nor its workers when the parent is killed, and lets SIGTERM end them. loky has no
deadline per task, and one crash fails all tasks.
"""

import contextlib
import json
import math
import os
import pickle
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

LAUNCH = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
descriptor = int(sys.argv[2])
del sys.argv[1:]
from {module} import main
main(descriptor)
"""
TAIL = 1 << 14  # last bytes of a worker's output that are stored to explain its death
LENGTH = struct.Struct(">I")  # the length of a frame, before its body
GRACE = 1.0  # seconds after its deadline in which a worker can end itself and print where it hung


def send(channel: socket.socket, body: bytes) -> None:
    channel.sendall(LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket, until: float = math.inf, longest: float = math.inf) -> bytes:
    """Returns the body of a frame. Raises OSError if the channel ends, or at the time `until`."""
    body, length = bytearray(), LENGTH.size
    while len(body) < length:
        if until < math.inf:
            channel.settimeout(max(0.001, until - time.monotonic()))
        part = channel.recv(min(length - len(body), 1 << 20))
        if not part:
            raise ConnectionError("the channel was closed")
        body += part
        if len(body) == LENGTH.size == length:
            length += LENGTH.unpack(body)[0]
            if length - LENGTH.size > longest:
                raise OverflowError(f"answered with {length - LENGTH.size} bytes")
    return bytes(body[LENGTH.size :])


def channel_to_parent(descriptor: int) -> socket.socket:
    """Returns the child's socket to the parent. From now on only the parent ends this process.

    Ctrl-C, a hang-up and a scheduler's SIGTERM reach many processes at once, but only the parent knows when to stop, so
    they are ignored here. (By handlers, because programs that the function starts would inherit SIG_IGN.)
    The parent stops this process by SIGKILL. If the parent itself is killed, a thread here sees the socket close and
    ends the process group. That thread cannot run during a call that holds the interpreter lock; only the parent, or a
    C thread (`faulthandler`), ends such a call at its deadline.
    """
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def in_forked_child() -> None:
        channel.close()  # otherwise the parent would not see this process end before its child
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    def watch() -> None:
        hangup = select.poll()
        hangup.register(channel, 0)  # POLLHUP and POLLERR are always reported
        hangup.poll()
        os.killpg(0, signal.SIGKILL)

    for number in numbers:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=in_forked_child)
    threading.Thread(target=watch, daemon=True).start()
    return channel


class Worker:
    """A process that answers one request at a time.

    It has its own session, so it gets no signals of the terminal's process group, and programs that it starts can be
    killed with it. It is started by exec, not by fork (this process has threads), and does not import the parent's main
    module. A thread reads its output, until the process closes it, and passes it to `log`.

    module: its function `main` gets the descriptor of the child's end of the channel.
    """

    longest: float = 1 << 28  # maximum bytes of an answer

    def __init__(self, module: str, environment: Mapping[str, str], log: Callable[[bytes], None]):
        self._log, self._tail = log, b""
        self._lock = threading.RLock()  # held while the process is ended
        self._channel, theirs = socket.socketpair()
        paths = json.dumps([str(path) for path in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", LAUNCH.format(module=module), paths, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def ended(self, seconds: float = 0.0) -> bool:
        """True if the worker has closed its end of the channel, or does so within `seconds`: it is ending."""
        try:
            self._channel.settimeout(max(seconds, 0.0))
            return not self._channel.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return True

    def request(self, body: bytes, seconds: float) -> Mapping[str, Any]:
        """Returns the answer to a request, which must come within `seconds`.

        If the worker ended, or was killed because its state is unknown, the answer is {"failure", "detail"}, with the
        kind "hang" (after the deadline) or "crash".
        """
        deadline = time.monotonic() + seconds
        detail = "wrote into the channel of its answers"
        try:
            with contextlib.suppress(BrokenPipeError):  # an answer from before its end is still read below
                self._channel.settimeout(seconds + GRACE)
                send(self._channel, body)
            answer = json.loads(receive(self._channel, deadline + GRACE, self.longest))
            if isinstance(answer, dict):
                return answer
        except OSError:  # a timeout, or the channel's end
            return self._death(seconds, late=time.monotonic() >= deadline)
        except OverflowError as error:
            detail = str(error)
        except ValueError:
            pass  # no JSON
        self.kill()
        return {"failure": "crash", "detail": detail}

    def _death(self, seconds: float, *, late: bool) -> dict[str, str]:
        """Kills the worker; tells why it gave no answer. late: the `seconds` of the request have passed."""
        code = self.kill()
        if late:
            place = _place(self._tail, rb"Thread 0x[0-9a-f]+[^\n]*\(most recent call first\):\n")
            return {"failure": "hang", "detail": f"no answer within {seconds:g} s{place}"}
        detail = f"ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        detail += _place(self._tail, rb"Current thread 0x[^\n]*:\n") or _last_words(self._tail)
        return {"failure": "crash", "detail": detail}

    def dismiss(self) -> None:
        """Asks an idle worker to exit by itself, which runs its exit handlers."""
        with contextlib.suppress(OSError):  # it has ended, or is busy
            self._channel.settimeout(0)
            send(self._channel, pickle.dumps(None))

    def interrupt(self) -> None:
        """Kills the process and the programs that it started; a request that waits for it ends at once."""
        with self._lock:
            if self._process.returncode is None:  # not waited for yet, so its process id is not reused
                # ProcessLookupError: no process is left. PermissionError on macOS: only zombies are left.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> int:
        """`interrupt`, then frees the resources of the process; returns its exit code. May be called again."""
        with self._lock:
            self.interrupt()
            try:
                code = self._process.wait(5)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL  # it hangs in the kernel, say on a dead file server
            self._reader.join(1)  # it takes longer only if a detached program holds the pipe open
            self._channel.close()
            return code

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while part := output.read(1 << 16):
                self._tail = (self._tail + part)[-TAIL:]
                with contextlib.suppress(OSError):  # on a full disk the log loses lines; the process goes on
                    self._log(part)


def _place(output: bytes, header: bytes) -> str:
    """Returns the position of the main thread in faulthandler's report, which lists the newest thread first."""
    blocks = re.split(header, output)
    frame = re.match(rb'\s*File "([^"]*)", line (\d+)', blocks[-1]) if len(blocks) > 1 else None
    return f", at {frame[1].decode(errors='replace')}:{frame[2].decode()}" if frame else ""


def _last_words(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return f", saying {lines[-1][:200]!r}" if lines else ""
