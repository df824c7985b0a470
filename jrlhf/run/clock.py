"""Clocks: seconds of each call of an iteration, as `timing_s/<call>`, and seconds of each phase of a run."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import jax

SMALL = 16 << 20  # bytes


class Clock:
    """Collects the seconds of timed calls until they are taken, without blocking the calls.

    A call only enqueues work on the device. A thread waits for the calls' arrays in the order of the calls and notes
    when they are ready. The seconds of a call are those that it adds to the calls before it:

        seconds = ready - max(started, ready of the previous call)

    including its tracing, compilation and other work on the host. So the seconds of all calls follow each other without
    gaps or overlaps, and their sum is at most the whole time. Host work that overlaps with the device adds nothing.

    deadline: seconds within which calls must end. blocking: wait for each call before the next one is made; by default
    only if several devices are simulated on one CPU.
    """

    def __init__(self, *, deadline: float = 3600.0, blocking: bool | None = None):
        self.deadline, self._blocking = deadline, blocking
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clock")  # ends with the clock
        self._lock = Lock()  # for `add_parallel`, which other threads call
        self.start()

    def run(self, name: str, function: Callable, *args, **kwargs):
        """Calls `function` and adds its seconds to those of `name`."""
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            result = function(*args, **kwargs)
        returned = time.perf_counter()
        if self._blocking is None:
            self._blocking = may_deadlock()
        if self._blocking:
            self._calls.note(name, started, returned, jax.tree.leaves(result))
        else:
            self._pending.append(self._thread.submit(self._calls.note, name, started, returned, _witnesses(result)))
        return result

    def add_parallel(self, name: str, seconds: float) -> None:
        """Adds the seconds of work that ran in another thread at the same time; they are not part of any call's."""
        with self._lock:
            self._parallel[name] = self._parallel.get(name, 0.0) + seconds

    def start(self) -> None:
        """Forgets what was collected: an iteration begins."""
        self._started = time.perf_counter()
        self._calls, self._pending = _Calls(self._started), []
        self._parallel: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Returns `timing_s/*` since `start`, with `timing_s/step` for the whole; waits until every call has ended.

        Raises TimeoutError after the deadline, and the error of a call that failed on the device.
        """
        until = time.perf_counter() + self.deadline
        for call in self._pending:
            call.result(max(0.0, until - time.perf_counter()))
        seconds = {f"timing_s/{name}": value for name, value in (self._calls.seconds | self._parallel).items()}
        return seconds | {"timing_s/step": time.perf_counter() - self._started}


class _Calls:
    """Seconds of calls: where two overlap, the time counts for the earlier one only."""

    def __init__(self, started: float):
        self.seconds: dict[str, float] = {}
        self._ready = started

    def note(self, name: str, started: float, returned: float, arrays: list[Any]) -> None:
        """Waits for the arrays of a call and adds its seconds."""
        ready = returned
        for array in arrays:
            if isinstance(array, jax.Array):
                try:
                    array.block_until_ready()
                except RuntimeError:
                    if not array.is_deleted():  # deleted: it was donated, and the call that took it is waited for
                        raise
                ready = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, ready - max(started, self._ready))
        self._ready = max(ready, self._ready)


def may_deadlock() -> bool:
    """Tests whether programs that are enqueued one after the other can block each other forever.

    XLA's CPU client may run programs at once. With several simulated devices each holds threads that wait in its
    collectives for peers, which may then find no free thread.
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _witnesses(result: Any) -> list[jax.Array]:
    """Returns arrays that show when a call has ended: the small ones, or else the smallest; and the last one.

    Waiting for large arrays would keep their memory from programs that are enqueued meanwhile.
    """
    arrays = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
    small = [array for array in arrays if array.nbytes <= SMALL] or sorted(arrays, key=lambda array: array.nbytes)[:1]
    # A call of several programs, such as a reshard, makes its last array last, whatever its size.
    return small + [array for array in arrays[-1:] if not any(array is other for other in small)]


class Stopwatch:
    """Seconds of phases that follow one another."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends the phase `name`."""
        last, self._last = self._last, time.perf_counter()
        self.seconds[name] = self._last - last


def timed(name: str) -> Callable:
    """Decorates a role's method: `self.clock` counts its time under `name`."""

    def decorate(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            return self.clock.run(name, method, self, *args, **kwargs)

        return call

    return decorate
