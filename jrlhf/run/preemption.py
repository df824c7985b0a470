"""Preemption: SIGTERM, SIGHUP or Ctrl-C lets the current iteration finish and save; the run exits with 75 (requeue).

One process of the run that gets the signal is enough. Outside of iterations, or as the second signal, Ctrl-C ends the
run at once: what was done since the last checkpoint is lost, such as responses that were sampled for a reward model. A
run outside of the main thread, where Python delivers no signals, ignores them.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from jrlhf.errors import Preempted
from jrlhf.run.console import drop_closed_outputs
from jrlhf.run.processes import any_process


class PreemptionGuard:
    """While entered, SIGTERM and SIGHUP only set `requested`. In `iterating`, the first SIGINT does so, too."""

    def __init__(self):
        self.requested = False
        self._iterating = False
        self._number = 0  # number of the last signal
        self._previous = {}

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
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not installed by Python
        if isinstance(error, Preempted):
            error.by_hand = self._number == signal.SIGINT

    def _request(self, number, frame) -> None:
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
