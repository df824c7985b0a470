"""Clocks: seconds per call of an iteration, as `timing_s/<call>`, and seconds per phase of a run."""

import functools
import time
from collections.abc import Callable

import jax


class Clock:
    """Collects the seconds of timed calls until they are taken."""

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def run(self, name: str, function: Callable, *args, **kwargs):
        """Calls `function` and waits for its arrays, so that the device's work is counted where it was asked for."""
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            result = jax.block_until_ready(function(*args, **kwargs))
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
        return result

    def start(self) -> None:
        """Forgets what was collected: an iteration begins."""
        self._seconds, self._started = {}, time.perf_counter()

    def take(self) -> dict[str, float]:
        """`timing_s/*` since `start`, with `timing_s/step` for the whole."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        return taken | {"timing_s/step": time.perf_counter() - self._started}


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
