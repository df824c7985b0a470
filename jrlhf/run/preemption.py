"""Preemption: SIGTERM, SIGHUP or Ctrl-C lets the current iteration finish and save; the run exits with 75 (requeue).

One process of the run that gets the signal is enough. Outside of iterations, or as the second signal, Ctrl-C ends the
run at once: what was done since the last checkpoint is lost, such as responses that were sampled for a reward model. A
run outside of the main thread, where Python delivers no signals, ignores them.

An iteration that hangs would never finish, and Python runs no handler while the main thread waits for a device. So on
CPUs a thread, which C code wakes at a signal, ends a run that has stopped computing and whose main thread answers no
signal. One that waits in Python, as for a judge on another machine, a file or a worker, answers and goes on. A run of
several processes is not watched: a process may wait for another one that computes.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jrlhf.errors import PREEMPTED, Preempted
from jrlhf.run.console import drop_closed_outputs
from jrlhf.run.processes import any_process

STILL = 40.0  # seconds; a run that waits as long, after a signal, is taken for one that hangs
IDLE = 0.05  # processor seconds per second of a run that waits: threads that look for work, a progress bar


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process and of those that it started; of this one only, without Linux's /proc."""
    if not (tasks := Path(f"/proc/{pid}/task")).exists():
        return time.process_time() if pid == os.getpid() else 0.0
    with suppress(OSError):  # it has ended
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        started = [int(child) for own in tasks.glob("*/children") for child in own.read_text().split()]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, started))
    return 0.0


def wait_until_still(seconds: float, ended: Callable[[float], bool], used: Callable[[], float]) -> bool:
    """Waits until less than `IDLE` was computed for `seconds`, and returns True; False as soon as it has ended.

    ended: waits for so many seconds, or until the end; returns whether this has come. used: see `cpu_seconds`.
    """
    since, then = time.monotonic(), used()
    while not ended(seconds / 8):
        if (now := used()) - then > IDLE * seconds:
            since, then = time.monotonic(), now
        elif time.monotonic() - since > seconds:
            return True
    return False


class PreemptionGuard:
    """While entered, SIGTERM and SIGHUP only set `requested`. In `iterating`, the first SIGINT does so, too.

    still: seconds after which a run that was asked to stop, and computes nothing on its CPUs, is ended.
    """

    def __init__(self, still: float = STILL):
        self._still, self._left = still, threading.Event()
        self._leaving = threading.Lock()  # no signal may come when the handlers are gone
        self.requested = False
        self._iterating = False
        self._asked, self._answered = False, False  # whether the main thread still runs handlers; see `_answers`
        self._number = 0  # number of the last signal
        self._previous = {}
        self._wakeup: tuple[int, int] | None = None  # the pipe to which C code writes signals, and the one before

    def agreed(self) -> bool:
        """True if any process got a signal. All processes must call this at the same step, and so stop together."""
        return any_process(self.requested)

    @contextmanager
    def iterating(self) -> Iterator[None]:
        """Marks a block that checks `agreed` after every iteration and saves."""
        self._iterating = True
        try:
            yield
        finally:
            self._iterating = False

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is not threading.main_thread():
            return self
        # A command that a script starts with `&` ignores SIGINT, and one under nohup SIGHUP; they go on doing so.
        heeded = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        for number in (signal.SIGTERM, *heeded):
            self._previous[number] = signal.signal(number, self._request)
        # The work of other devices takes no time of this machine's processors.
        if jax.default_backend() == "cpu" and jax.process_count() == 1:
            self._signals, signals = os.pipe()
            os.set_blocking(signals, False)
            self._wakeup = signals, signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
            threading.Thread(target=self._end_if_still, daemon=True).start()
        return self

    def _end_if_still(self) -> None:
        """Waits for a signal. If then the run computes nothing for a while, ends the process with a sentence."""
        with open(self._signals, "rb", buffering=0) as signals:
            heeded = iter(lambda: signals.read(1), b"")
            if not any(number[0] in self._previous for number in heeded):
                return  # the guard was left
            # Less what this thread computes: it looks at every thread of the run.
            while wait_until_still(self._still, self._left.wait, lambda: cpu_seconds(os.getpid()) - time.thread_time()):
                if self._answers():
                    continue
                text = (
                    f"error: the run was asked to stop but computed nothing for {self._still:g} seconds, so it is "
                    "ended: what was done since the last checkpoint is lost; go on with --resume\n"
                )
                with suppress(OSError):
                    os.write(2, text.encode())
                os._exit(PREEMPTED)

    def _answers(self) -> bool:
        """Returns whether the main thread runs a handler within seconds, as it does where it waits in Python."""
        self._asked, self._answered = True, False
        with self._leaving:
            if not self._left.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        for _ in range(50):
            if self._answered or self._left.wait(0.1):
                break
        self._asked = False
        return self._answered or self._left.is_set()

    def __exit__(self, kind, error, trace):
        with self._leaving:
            self._left.set()
        if self._wakeup is not None:
            signals, previous = self._wakeup
            signal.set_wakeup_fd(previous)
            os.close(signals)
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not installed by Python
        if isinstance(error, Preempted):
            error.by_hand = self._number == signal.SIGINT

    def _request(self, number, frame) -> None:
        if self._asked and number == signal.SIGTERM:
            self._answered = True
            return
        if number == signal.SIGINT and (self.requested or not self._iterating):
            raise KeyboardInterrupt
        self.requested, self._number = True, number
        if number == signal.SIGHUP:
            drop_closed_outputs()
        what = b"the iteration is finished and saved first"
        if not self._iterating:
            what = b"the next iteration is finished and saved first; if none is left, the run ends as usual"
        again = b"a second Ctrl-C or interrupt stops at once and loses what was done since the last checkpoint"
        with suppress(OSError):
            os.write(2, b"\nstopping: " + what + b" (" + again + b")\n")  # print is not safe in a handler
