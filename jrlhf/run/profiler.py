"""Monitors a stage's loop: traces of chosen iterations, peak memory, hangs, and unexpected compilations."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import jax
from jax.sharding import Mesh

from jrlhf.config.schema import Config
from jrlhf.errors import FAILED
from jrlhf.run.clock import present_call
from jrlhf.run.processes import is_main

Result = TypeVar("Result")

PROFILE = "profile"  # a run's directory of traces
_GRACE = 10.0  # seconds after a deadline in which a thread of Python can end the process
_ends = dict[object, tuple[float, float]]()  # for each block of `deadline`: when it must have ended, and its seconds
_timer: threading.Timer | None = None
_arming = threading.Lock()
_COMPILED = "/jax/core/compile/backend_compile_duration"
_SETTLED = 2  # iterations of a stage after which nothing may compile any more


def traced(config: Config, run_dir: Path, stage: str, step: int, iteration: Callable[[], Result]) -> Result:
    """Calls `iteration()`, and records a trace of it in run_dir/profile/STAGE-STEP if the config asks for one.

    The trace is for TensorBoard's profile plugin and for Perfetto. It contains the device's programs and, on the host,
    one annotation for the iteration and one for each timed call. It ends when all results of the iteration are
    computed, or when the iteration fails.

    step: counted from 1, as in metrics.jsonl.
    """
    with jax.profiler.StepTraceAnnotation(stage, step_num=step):
        profile = config.profile
        chosen = profile is not None and step in profile.iterations and stage == (profile.stage or config.stages[-1])
        if not chosen or not is_main():
            return iteration()
        with jax.profiler.trace(run_dir / PROFILE / f"{stage}-{step}"):
            return jax.block_until_ready(iteration())


def peak_memory(mesh: Mesh) -> dict[str, float]:
    """The peak memory of the devices of this process so far. Empty if they do not report it, as CPUs do not."""
    statistics = [device.memory_stats() for device in mesh.local_devices]
    peaks = [stats["peak_bytes_in_use"] for stats in statistics if stats and "peak_bytes_in_use" in stats]
    return {"perf/max_memory_allocated_gb": max(peaks) / 1e9} if peaks else {}


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Ends the process, with a trace of all threads and a sentence, if the block takes longer: no hang goes unnoticed.

    Blocks may be nested, and run in several threads.
    """
    block = object()
    _ends[block] = time.monotonic() + seconds, seconds
    _arm()
    try:
        yield
    finally:
        del _ends[block]
        _arm()


def _arm() -> None:
    """Starts the timer of the block that must end first, or stops it if there is none.

    A call that holds the interpreter lock keeps the timer from running; then the C thread of faulthandler ends it.
    """
    global _timer
    assert sys.__stderr__ is not None  # a notebook's sys.stderr has no descriptor
    with _arming:
        faulthandler.cancel_dump_traceback_later()
        if _timer is not None:
            _timer.cancel()
        if _ends:
            end, _ = min([*_ends.values()])  # other threads may change the dict
            left = max(1e-3, end - time.monotonic())
            faulthandler.dump_traceback_later(left + _GRACE, exit=True, file=sys.__stderr__)
            _timer = threading.Timer(left, _end)
            _timer.daemon = True
            _timer.start()


def _end() -> None:
    """Ends the process, unless the block whose time is over has ended meanwhile."""
    late = [seconds for end, seconds in [*_ends.values()] if end <= time.monotonic()]
    if not late:
        return
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback(file=sys.__stderr__)
    print(
        f"error: an iteration, or a batch of answers or scores, took longer than deadline={late[0]:g} seconds: see in "
        "the threads above where it waits, or in the output of another process why that one ended; for slow "
        "iterations set a longer deadline, and resume the run",
        file=sys.__stderr__,
        flush=True,
    )
    os._exit(FAILED)


class CompilationWatch(logging.Handler):
    """Counts compilations in this process. As a context manager it also collects JAX's explanations of cache misses.

    tell: called when a program starts to compile, with the name of the call (`calling`) that needs it.
    """

    def __init__(self, tell: Callable[[str], object] = lambda call: None):
        super().__init__()
        self._tell = tell
        self._names: list[str] = []
        self._causes: list[str] = []
        self._propagate = True
        self._iterations, self._measured = 0, set[str]()

    def __enter__(self) -> "CompilationWatch":
        jax.monitoring.register_scalar_listener(self._on_begin)
        jax.monitoring.register_event_duration_secs_listener(self._on_end)
        logger = logging.getLogger("jax")
        self._propagate, logger.propagate = logger.propagate, False  # `emit` forwards all other records
        logger.addHandler(self)
        return self

    def __exit__(self, *_):
        jax.config.update("jax_explain_cache_misses", False)
        logger = logging.getLogger("jax")
        logger.removeHandler(self)
        logger.propagate = self._propagate
        jax.monitoring.unregister_event_duration_listener(self._on_end)
        jax.monitoring.unregister_scalar_listener(self._on_begin)

    def explain(self) -> None:
        """Makes JAX log the cause of every cache miss from now on; this costs nothing without misses."""
        jax.config.update("jax_explain_cache_misses", True)

    def take(self) -> tuple[list[str], list[str]]:
        """Returns the names of the programs compiled since the last call, and the causes that JAX logged."""
        taken = self._names, self._causes
        self._names, self._causes = [], []
        return taken

    def end_iteration(self, metrics: Iterable[str]) -> tuple[int, str]:
        """Returns how many programs an iteration compiled, and a clause on them if nothing should compile any more.

        metrics: their names. New ones explain a compilation: the first validation may come late, after a resume.
        """
        (names, causes), before = self.take(), len(self._measured)
        self._measured.update(metrics)
        self._iterations += 1
        if self._iterations == _SETTLED:
            self.explain()
        if not names or self._iterations <= _SETTLED or len(self._measured) > before:
            return len(names), ""
        return len(names), f"compiled {', '.join(names)} again: {' '.join(causes)}"

    def _on_begin(self, event: str, value: float | int, **_) -> None:
        if event == _COMPILED:  # JAX reports the start under the same name
            self._tell(present_call())

    def _on_end(self, event: str, duration_secs: float, fun_name: object = "a function", **_) -> None:
        if event == _COMPILED:
            self._names.append(str(fun_name))

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "persistent" in message.lower():
            return  # about the disk cache: not the cause of a compilation, and logged for each small program
        if "CACHE MISS" in message:
            self._causes.append(" ".join(message.split()))
        elif self._propagate:
            logging.getLogger().handle(record)
