"""Clocks: measure the seconds of each call of an iteration (`timing_s/<call>`) and of each phase of a run."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from jrlhf.run.processes import several, to_main

_call = ContextVar("call", default="")
SMALL = 16 << 20  # bytes: arrays up to this size are waited for, see `_small`


class Clock:
    """Records when calls begin and end, without blocking them.

    A call only enqueues work on its devices. Threads, one per set of devices, wait for the calls' arrays in the order
    of the calls and record when they are ready. A call begins when it is dispatched, its inputs are ready, and its
    devices have ended the previous calls:

        seconds = ready - max(dispatched, inputs ready, ready of the previous call on one of its devices)

    including its tracing, compilation and other work on the host; inputs that are ready when it returns count as ready
    at the dispatch. A call that returns no arrays has worked on the host until it returned. So calls on the same
    devices do not overlap, and the sum of their seconds is at most the total time. Calls on separate devices may
    overlap. Host work adds nothing while the devices work.

    deadline: seconds within which calls must end. blocking: wait for each call before the next one is dispatched; by
    default only for calls on several devices that one CPU simulates.
    """

    def __init__(self, *, deadline: float = 3600.0, blocking: bool | None = None):
        self.deadline, self._blocking = deadline, blocking
        # By the call's devices and those of inputs on other devices. The threads end with the clock.
        self._threads = defaultdict[tuple, ThreadPoolExecutor](partial(ThreadPoolExecutor, 1, "clock"))
        self._lock = Lock()  # for `add_parallel` and `add_chunk`, which other threads call
        self.start()

    def run(self, name: str, function: Callable, *args, **kwargs):
        """Calls `function` and adds its seconds to those of `name`."""
        call = _Call(name, time.perf_counter())
        outer, self._running = self._running, call
        try:
            with jax.profiler.TraceAnnotation(name):
                result = function(*args, **kwargs)
        finally:
            self._running = outer
        call.ready = time.perf_counter()
        devices = _devices(result)
        inputs = _arrays((args, kwargs)) if devices else []
        devices, sources = devices or _own_devices(), _devices(inputs)
        call.devices, call.copies = call.devices or devices, not sources <= devices
        self._calls.append(call)
        if may_deadlock(len(devices)) if self._blocking is None else self._blocking:
            call.wait([], _arrays(result))
        else:
            thread = self._threads[devices, sources - devices]
            small: list[Any] = _small(inputs)  # JAX's types lack `is_ready`
            awaited = [array for array in small if not (array.is_deleted() or array.is_ready())]
            self._pending.append(thread.submit(call.wait, awaited, _witnesses(result)))
        return result

    def watch(self, done: Bool[np.ndarray, "B"], assemble: object, mesh: Mesh) -> None:
        """Records the unfinished rows of the running call after a chunk of decode steps (an engine's `Watch`).

        If rows have left devices since the last chunk, the time before counts as another call on all devices.
        """
        if (call := self._running) is None:
            return
        devices = frozenset(mesh.devices.flat)
        if call.devices and call.devices != devices:
            before = copy(call)
            call.inputs = before.ready = call.rows[-1][0]
            call.rows = call.rows[-1:]
            self._calls.append(before)
        call.devices = devices
        call.rows = call.rows or [(call.started, len(done))]
        call.rows.append((time.perf_counter(), int(np.sum(~done))))

    def add_parallel(self, name: str, seconds: float) -> None:
        """Adds the seconds of work that ran in another thread at the same time; no call contains them."""
        with self._lock:
            self._parallel[name] = self._parallel.get(name, 0.0) + seconds

    def add_chunk(self, lane: int, seconds: float) -> None:
        """Records that rollout processes, those of a lane of a fleet, decoded for these seconds until now."""
        end = time.perf_counter() - self._started
        start = max(end - seconds, 0.0)
        with self._lock:
            self._chunks.append({"name": "chunk", "lane": lane, "start": round(start, 6), "end": round(end, 6)})

    def start(self) -> None:
        """Clears the records: an iteration begins."""
        self._started = time.perf_counter()
        self._calls, self._pending = list[_Call](), []
        self._running: _Call | None = None
        self._parallel: dict[str, float] = {}
        self._chunks: list[dict[str, Any]] = []

    def take(self) -> dict[str, float]:
        """Returns `timing_s/*` since `start`, with `timing_s/step` for the whole; waits until every call has ended.

        With several processes only process 0 has the times of calls on other processes' devices. All must call this.
        Raises TimeoutError after the deadline, and the error of a call that failed on the device.
        """
        until = time.perf_counter() + self.deadline
        for call in self._pending:
            call.result(max(0.0, until - time.perf_counter()))
        self._ask_others()
        seconds: dict[str, float] = {}
        for call, start, end in self._times():
            seconds[call.name] = seconds.get(call.name, 0.0) + end - start
        seconds = {f"timing_s/{name}": value for name, value in (seconds | self._parallel).items()}
        return seconds | {"timing_s/step": time.perf_counter() - self._started}

    def _ask_others(self) -> None:
        """Gets the times of calls on devices of other processes, in process 0. All processes make all calls."""
        if not several():
            return
        witness = [min(device.process_index for device in call.devices) for call in self._calls]
        if not any(witness):
            return
        own = [
            (call.started - self._started, call.inputs - self._started, call.ready - self._started)
            for call in self._calls
        ]
        for process, times in enumerate(to_main(own, seconds=self.deadline)):
            for call, seen_by, seconds in zip(self._calls, witness, times, strict=True):
                if seen_by == process:
                    call.started, call.inputs, call.ready = (self._started + second for second in seconds)

    def _times(self) -> Iterator[tuple["_Call", float, float]]:
        """Yields the calls in the order of their dispatch, with their start and end in seconds since `start`."""
        free: dict[Any, float] = {}  # device -> time at which it has ended all calls so far
        for call in self._calls:
            busy = [] if call.copies else [free.get(device, 0.0) for device in call.devices]
            start = max(self._started, call.started, call.inputs, *busy)
            end = max(start, call.ready)
            if not call.copies:
                free |= dict.fromkeys(call.devices, end)
            yield call, start - self._started, end - self._started

    def calls(self, mesh: Mesh) -> list[dict[str, Any]]:
        """Returns the calls that have ended as records; devices are numbered by their position in `mesh`, as in plans.

        Chunks of rollout processes have the number of their lane instead.
        """
        numbers = {device: number for number, device in enumerate(mesh.devices.flat)}
        records = []
        for call, start, end in self._times():
            own = [numbers[device] for device in call.devices if device in numbers] or list(numbers.values())
            devices = str(own[0]) if len(own) == 1 else f"{min(own)}-{max(own)}"
            times = {"start": round(start, 6), "end": round(end, 6)}
            records.append({"name": call.name, "devices": devices, **times, "copies": call.copies})
            if call.rows:
                changes = [call.rows[0], *(new for old, new in pairwise(call.rows) if old[1] != new[1])]
                records[-1]["rows"] = [[round(when - self._started, 6), left] for when, left in changes]
        with self._lock:
            return records + self._chunks


class _Call:
    """A call, with the times at which its inputs and its results were ready.

    devices: those of its results or, if it has none, of the mesh under which it was called. copies: True if it copied
    arrays from other devices; then it may overlap with calls on the same devices. rows: (time, number of unfinished
    rows from then on), if it draws in chunks of decode steps.
    """

    def __init__(self, name: str, started: float):
        self.name, self.started, self.inputs, self.ready = name, started, started, started
        self.devices, self.copies = frozenset[Any](), False
        self.rows = list[tuple[float, int]]()

    def wait(self, inputs: list[jax.Array], results: list[jax.Array]) -> None:
        """Waits for the arrays and records the times."""
        self.inputs = _wait(inputs, self.inputs)
        self.ready = _wait(results, self.ready)


def _wait(arrays: list[jax.Array], otherwise: float) -> float:
    """Returns the time at which the arrays were ready."""
    for array in arrays:
        try:
            array.block_until_ready()
        except RuntimeError:
            if not array.is_deleted():  # a deleted array was donated to a call, which is waited for itself
                raise
    return time.perf_counter() if arrays else otherwise


def may_deadlock(devices: int = 2) -> bool:
    """True if programs on this number of devices that are enqueued one after the other can block each other forever.

    XLA's CPU client may run programs concurrently. With several simulated devices each program occupies threads that
    wait in its collectives for peers, for which there may be no free thread.
    """
    return jax.default_backend() == "cpu" and min(devices, jax.device_count()) > 1


def _arrays(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _devices(tree: Any) -> frozenset[Any]:
    shardings = {array.sharding for array in _arrays(tree)}  # many arrays share one
    return frozenset().union(*(sharding.device_set for sharding in shardings))


def _own_devices() -> frozenset[Any]:
    """Returns the devices of the present mesh, or all devices without one."""
    mesh = jax.sharding.get_mesh()
    return frozenset(jax.devices() if mesh.empty else mesh.devices.flat)


def _witnesses(result: Any) -> list[jax.Array]:
    """Returns arrays that show when a call has ended: the small ones, and the last one."""
    arrays = _arrays(result)
    # A call of several programs, such as a reshard, completes its last array last, whatever its size.
    return list({id(array): array for array in _small(arrays) + arrays[-1:]}.values())


def _small(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns the small arrays, or else the smallest.

    Waiting for large arrays would keep their memory allocated while other programs are enqueued. Random keys cannot say
    whether they are ready.
    """
    arrays = [array for array in arrays if hasattr(array, "is_ready")]
    return [array for array in arrays if array.nbytes <= SMALL] or sorted(arrays, key=lambda array: array.nbytes)[:1]


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Names what the block computes, for a `CompilationWatch`: a call of the stage's graph, such as actor.update."""
    token = _call.set(name)
    try:
        yield
    finally:
        _call.reset(token)


def present_call() -> str:
    """Returns the name that `calling` gave; empty outside of its blocks."""
    return _call.get()


class Stopwatch:
    """Seconds of phases that follow one another. A phase that processes share has the seconds of them all."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> float:
        """Gives the time since the last lap to the phase `name`; returns the seconds of this phase so far."""
        last, self._last = self._last, time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._last - last
        return self.seconds[name]

    def resume(self, name: str, seconds: float) -> None:
        """Begins the phase where an earlier process left it, after these seconds. What led here belongs to `start`."""
        self.lap("start")
        self.seconds[name] = seconds


class TrainerWait:
    """The seconds in which the trainer waits for rollouts and has no update to compute.

    update: the arrays of the newest update, until they are seen to be ready.
    """

    def __init__(self):
        self.update, self.seconds, self._ended = list[Any](), 0.0, 0.0

    def update_is_done(self) -> bool:
        """True if the newest update is done. Records when this is first seen."""
        if self.update and all(leaf.is_deleted() or leaf.is_ready() for leaf in self.update):
            self.update, self._ended = [], time.monotonic()
        return not self.update

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the part of the block in which no update is computed."""
        began = time.monotonic()
        yield
        if self.update_is_done():
            self.seconds += time.monotonic() - max(began, self._ended)


def timed(name: str) -> Callable:
    """Decorates a role's method: `self.clock` records its time as `name`."""

    def decorate(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            return self.clock.run(name, method, self, *args, **kwargs)

        return call

    return decorate
