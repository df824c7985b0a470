"""Preemption: SIGTERM or Ctrl-C lets the current iteration finish, saves, and leaves with exit code 75 (requeue).

It is enough that one process of the run is asked.
"""

import os
import signal

from jrlhf.processes import any_process


class Preempted(Exception):
    """The run was asked to stop and has saved its state."""


class PreemptionGuard:
    """While entered, a first SIGTERM or SIGINT only sets `requested`; a second SIGINT interrupts at once."""

    def __init__(self):
        self.requested = False
        self._previous = {}

    def agreed(self) -> bool:
        """Whether any process of the run was asked to stop: all then do, at the same step. To be called by all."""
        return any_process(self.requested)

    def __enter__(self) -> "PreemptionGuard":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number, frame) -> None:
        self.requested = True
        os.write(2, b"\nstopping: the iteration is finished and saved first\n")  # print is not safe in a handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
