"""Clocks: seconds per call of an iteration, as `timing_s/<call>`, and seconds per phase of a run."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import jax

SMALL = 16 << 20  # bytes


class Clock:
    """Collects the seconds of timed calls until they are taken, without waiting for any of them.

    A call only hands its work to the device. One thread beside it waits for the calls' arrays in the order in which
    they were handed over, and notes when they were there. A call's seconds are those that it added to what came before:

        seconds = ready - max(started, ready of the call before)

    with its tracing, compiling and other work on the host, so that the seconds of all calls lie end to end and their
    sum is at most that of the whole. What a call does on the host only, beside the device, adds none.

    deadline: seconds in which the calls that are being waited for must have ended.
    blocking: wait for each call before the next is made. None: where devices are simulated on one CPU.
    """

    def __init__(self, *, deadline: float = 3600.0, blocking: bool | None = None):
        self._deadline, self._blocking = deadline, blocking
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clock")  # ends with the clock
        self._lock = Lock()  # of what other threads note
        self.start()

    def run(self, name: str, function: Callable, *args, **kwargs):
        """Calls `function`; `name` gets its time, added up where it has several."""
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            result = function(*args, **kwargs)
        returned = time.perf_counter()
        if self._blocking is None:
            self._blocking = may_deadlock()
        if self._blocking:
            self._calls.note(name, started, returned, jax.tree.leaves(result))
        else:
            self._noted.append(self._thread.submit(self._calls.note, name, started, returned, _witnesses(result)))
        return result

    def beside(self, name: str, seconds: float) -> None:
        """Notes what ran in another thread beside the calls: its time is its own, and part of none of theirs."""
        with self._lock:
            self._beside[name] = self._beside.get(name, 0.0) + seconds

    def start(self) -> None:
        """Forgets what was collected: an iteration begins."""
        self._started = time.perf_counter()
        self._calls, self._noted = _Calls(self._started), []
        self._beside: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """`timing_s/*` since `start`, with `timing_s/step` for the whole. Waits until every call has ended.

        Raises:
            TimeoutError: one has not within the deadline.
            Exception: what a call failed with on the device.
        """
        until = time.perf_counter() + self._deadline
        for each in self._noted:
            each.result(max(0.0, until - time.perf_counter()))
        taken = {f"timing_s/{name}": seconds for name, seconds in (self._calls.seconds | self._beside).items()}
        return taken | {"timing_s/step": time.perf_counter() - self._started}


class _Calls:
    """Calls laid end to end."""

    def __init__(self, started: float):
        self.seconds: dict[str, float] = {}
        self._ready = started

    def note(self, name: str, started: float, returned: float, arrays: list[Any]) -> None:
        """Waits for the arrays of a call, and notes its seconds."""
        ready = returned
        for array in arrays:
            if isinstance(array, jax.Array):
                _wait(array)
                ready = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, ready - max(started, self._ready))
        self._ready = max(ready, self._ready)


def may_deadlock() -> bool:
    """Whether programs that were handed over one after the other could wait for each other in vain.

    XLA's CPU client may run programs that do not need each other's results at once. With several simulated devices
    each of them holds threads that wait at its collectives for peers, which then find no thread to run in.
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _witnesses(result: Any) -> list[jax.Array]:
    """Arrays of a call that tell when it has ended: small ones, or else the smallest; and the last.

    To hold a copy of the weights until it is there would keep its memory from programs that are handed over meanwhile.
    """
    arrays = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
    found = [array for array in arrays if array.nbytes <= SMALL] or sorted(arrays, key=lambda array: array.nbytes)[:1]
    # What a call of several programs, such as the switch, makes last is its last array, whatever its size.
    return found + [array for array in arrays[-1:] if not any(array is each for each in found)]


def _wait(array: jax.Array) -> None:
    try:
        array.block_until_ready()
    except RuntimeError:
        if not array.is_deleted():  # else it was donated: the call that took it over is waited for
            raise


class Stopwatch:
    """Seconds of phases that follow one another."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The phase that ends now was `name`."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def timed(name: str) -> Callable:
    """Decorates a role's method: `self.clock` counts its time under `name`."""

    def decorate(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            return self.clock.run(name, method, self, *args, **kwargs)

        return call

    return decorate
