"""The small services of a run: clock, traces, compilation watch, preemption, devices."""

import logging
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.config import Config, load_config
from jrlhf.config.check import validate
from jrlhf.config.schema import DeviceConfig, ProfileConfig
from jrlhf.errors import UserError
from jrlhf.models import ModelConfig
from jrlhf.run import devices
from jrlhf.run.clock import Clock, Stopwatch, calling, timed
from jrlhf.run.devices import select
from jrlhf.run.preemption import PreemptionGuard, cpu_seconds, wait_until_still
from jrlhf.run.profiler import CompilationWatch, traced


class Sleeper:
    clock = Clock()

    @timed("sleep")
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def test_clock_and_stopwatch_add_up_seconds():
    sleeper, watch = Sleeper(), Stopwatch()
    sleeper.clock.start()
    assert sleeper.sleep(0.02) == 0.02
    sleeper.sleep(0.03)
    watch.lap("first")
    assert watch.lap("second") == watch.seconds["second"]
    taken = sleeper.clock.take()
    assert set(taken) == {"timing_s/sleep", "timing_s/step"}
    assert 0.05 <= taken["timing_s/sleep"] <= taken["timing_s/step"]
    assert watch.seconds["first"] >= 0.05 > watch.seconds["second"] >= 0


def test_a_compilation_is_counted_and_after_settling_explained(caplog):
    def twice(x):
        return 2 * x

    double, begun = jax.jit(twice), []
    two, three = jnp.arange(2), jnp.arange(3)
    with CompilationWatch(begun.append) as watch:
        with calling("actor.update"):
            double(two)
        names, causes = watch.take()
        assert len(names) == 1 and causes == []
        watch.explain()
        double(two)
        assert watch.take() == ([], [])
        double(three)
        names, causes = watch.take()
        assert len(names) == 1 and "i32[3]" in causes[0] and "i32[2]" in causes[0]
        for message in (
            "Not writing persistent cache entry for 'jit_f'",
            "PERSISTENT COMPILATION CACHE MISS for 'jit_f'",
        ):
            logging.getLogger("jax._src.compiler").warning(message)
        assert watch.take() == ([], [])
    assert begun == ["actor.update", ""]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not jax.config.jax_explain_cache_misses  # pyright: ignore[reportAttributeAccessIssue]
    double(jnp.arange(4))
    assert watch.take() == ([], [])


def interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_signals_wait_for_an_iteration_and_a_second_interrupt_for_nothing(capfd):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with PreemptionGuard() as guard:
        assert not guard.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.requested and "the next iteration is finished and saved first; if none" in capfd.readouterr().err
        interrupted()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with PreemptionGuard() as guard, guard.iterating():
        os.kill(os.getpid(), signal.SIGINT)
        line = capfd.readouterr().err
        assert guard.requested and "stopping: the iteration is finished and saved first (a second Ctrl-C" in line
        assert "loses what was done since the last checkpoint" in line
        interrupted()
    with PreemptionGuard() as guard:
        interrupted()
        assert not guard.requested
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a command that a script starts with `&`
    with PreemptionGuard():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGINT, handler)


_HANGS_UP = """
import os, signal, sys
from jrlhf.run.console import Console
from jrlhf.run.preemption import PreemptionGuard
with PreemptionGuard() as guard, guard.iterating():
    console = Console()
    console.line("begun")
    sys.stdin.readline()
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        os.kill(os.getpid(), signal.SIGHUP)
    console.line("saved")
    open(sys.argv[1], "w").write(f"{guard.requested}")
"""


@pytest.mark.full
def test_a_hang_up_stops_the_run_after_an_iteration_although_nobody_reads_any_more(tmp_path):
    pipe, processes = subprocess.PIPE, []
    for ignored in (False, True):  # as nohup has it
        command = [sys.executable, "-c", _HANGS_UP, str(tmp_path / str(ignored))]
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe))
        signal.signal(signal.SIGHUP, before)
    for ignored, process in zip((False, True), processes, strict=True):
        assert process.stdin and process.stdout and process.stderr and process.stdout.readline() == b"begun\n"
        process.stdout.close()
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0 and (tmp_path / str(ignored)).read_text() == str(not ignored)


def test_devices_that_cannot_be_had_are_refused(monkeypatch):
    keeps = []
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: keeps.append(True))
    assert len(select(DeviceConfig(platform="cpu", simulated=8))) == 8
    assert len(select(DeviceConfig())) == 8 and keeps  # on CPUs a run keeps freed memory
    with pytest.raises(UserError, match="device.platform=tpu comes too late: JAX already runs on cpu"):
        select(DeviceConfig(platform="tpu"))
    jax.config.update("jax_platforms", "cpu")
    with pytest.raises(UserError, match="device.simulated=3 asks for that many CPU devices, but JAX already runs on 8"):
        select(DeviceConfig(simulated=3))
    for error, reason in (
        (RuntimeError("no such thing\nand more"), "no such thing and more"),
        (AssertionError(), "JAX has no plugin for it"),
    ):

        def absent(error=error):
            raise error

        monkeypatch.setattr(jax, "devices", absent)
        with pytest.raises(UserError, match=rf"not available here \({reason}\)") as caught:
            select(DeviceConfig())
        assert "\n" not in str(caught.value) and "device.platform=cpu device.simulated=8" in str(caught.value)


_TWICE = """
import ctypes, resource
from jrlhf.run.devices import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before, keeps = faults(), keep_freed_memory()
faults()
print(before, int(keeps), faults())
"""


@pytest.mark.full
def test_freed_memory_is_kept_and_comes_without_page_faults():
    output = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, text=True, check=True).stdout
    before, keeps, after = map(int, output.split())
    assert 10 * after < before if keeps else after > before / 2


def test_chosen_iterations_leave_a_trace(tmp_path):
    config = Config(profile=ProfileConfig(iterations=(2, 3), stage="sft"))
    add = jax.jit(lambda x: x + 1)
    for step in (1, 2):
        assert traced(config, tmp_path, "sft", step, lambda step=step: (add(jnp.ones(())), {"x": "text"}))[0] == 2
        traced(config, tmp_path, "ppo", step, lambda: None)
    with pytest.raises(ZeroDivisionError):
        traced(config, tmp_path, "sft", 3, lambda: 1 // 0)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["sft-2", "sft-3"]
    (tensorboard,) = (tmp_path / "profile" / "sft-2").glob("plugins/profile/*/*.xplane.pb")
    (perfetto,) = (tmp_path / "profile" / "sft-2").glob("plugins/profile/*/*.trace.json.gz")
    assert tensorboard.stat().st_size > 0 and perfetto.stat().st_size > 0


def test_iterations_that_will_not_come_are_refused():
    for overrides, message in (
        (["profile.iterations=[0]"], r"iterations=.*it must be iterations, the first of which is 1"),
        (["profile.iterations=[3,41]"], "profile.iterations has 41, but ppo ends after 40"),
        (
            ["profile.iterations=[3]", "stages=[sft]", "profile.stage=ppo"],
            r"profile.stage=ppo is not among stages=\[sft\]",
        ),
    ):
        with pytest.raises(UserError, match=message):
            config = load_config("quickstart", ["ppo.iterations=40", "device.platform=cpu", *overrides])
            validate(config, 4, {"actor": ModelConfig.tiny(config.model.vocab_size)})
    assert Config().profile is None


_HANGS = """
import ctypes
from jrlhf.run.preemption import PreemptionGuard
mutex = ctypes.create_string_buffer(64)
with PreemptionGuard(still=1.0) as guard, guard.iterating():
    print("begun", flush=True)
    for _ in range(2):  # the second time it waits for itself
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.full
def test_a_run_that_hangs_in_c_code_ends_after_a_signal():
    """Python calls no handler there, as while it waits for a device."""
    command = [sys.executable, "-c", _HANGS]
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "begun\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 75 and "asked to stop but computed nothing for 1 seconds" in errors


_WAITS = """
import socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from jrlhf.run.preemption import PreemptionGuard
kind = sys.argv[1]
with PreemptionGuard(still=0.5) as guard, guard.iterating():
    print("begun", flush=True)
    if kind == "judge":
        here, there = socket.socketpair()
        threading.Timer(3.0, there.send, [b"1"]).start()
        here.recv(1)
    elif kind == "future":
        ThreadPoolExecutor(1).submit(time.sleep, 3.0).result()
    else:
        subprocess.run(["sleep", "3"])
    print("saved", guard.requested, flush=True)
"""


@pytest.mark.parametrize("kind", [*(pytest.param(x, marks=pytest.mark.full) for x in ("judge", "future")), "program"])
def test_a_run_that_waits_for_others_finishes_its_iteration_after_a_signal(kind):
    """It computes nothing for longer than a run that hangs may, but its main thread runs handlers."""
    command = [sys.executable, "-c", _WAITS, kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "saved True\n"), errors
    assert errors.count("stopping: ") == 1


def test_a_run_that_computes_is_not_still():
    """The run goes on while it uses a processor; the wait is counted from its last work."""
    for shares, expected in (([0.0] * 30, True), ([0.5] * 30, False), ([0.5] * 5 + [0.0] * 25, True)):
        times = iter(np.cumsum([0.0, *shares]).tolist())
        clock = iter(range(100))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jrlhf.run.preemption.time.monotonic", lambda clock=clock: float(next(clock)))
            waits = iter([False] * 20 + [True])
            still = wait_until_still(10.0, lambda seconds, waits=waits: next(waits), lambda times=times: next(times))
        assert still == expected


def test_processor_time_includes_that_of_processes_which_were_started():
    """A process that waits uses none."""
    busy = "import time\nwhile time.process_time() < 0.4: pass\nprint(1, flush=True); input()"
    before = cpu_seconds(os.getpid())
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", busy], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout and process.stdout.readline() == "1\n"
        assert cpu_seconds(os.getpid()) - before >= 0.3
        process.kill()
