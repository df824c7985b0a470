"""The small services of a run: optimizer, clock, compilation watch, preemption, devices."""

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.config.schema import DeviceConfig
from jrlhf.config.stages import OptimizerConfig
from jrlhf.errors import UserError
from jrlhf.roles.initial import adamw
from jrlhf.run import devices
from jrlhf.run.clock import Clock, Stopwatch, timed
from jrlhf.run.compilations import CompilationWatch
from jrlhf.run.devices import select
from jrlhf.run.preemption import PreemptionGuard


def rates(config: OptimizerConfig, updates: int) -> list[float]:
    """The learning rates that a run uses: with one weight and a constant gradient, AdamW moves by just the rate."""
    optimizer = adamw(config, updates=updates)
    weight = jnp.zeros(())
    state, moved = optimizer.init(weight), []
    for _ in range(updates):
        update, state = optimizer.update(jnp.ones(()), state, weight)
        moved.append(-np.asarray(update).item())
    return moved


def test_the_rate_rises_to_its_peak_and_falls_to_its_final_share():
    config = OptimizerConfig(learning_rate=0.1, warmup=4, final=0.2, weight_decay=0.0, max_grad_norm=None)
    found = rates(config, 12)
    np.testing.assert_allclose(found[:4], [0.025, 0.05, 0.075, 0.1], rtol=1e-4)
    cosine = 0.1 * (0.2 + 0.8 * (1 + np.cos(np.pi * np.arange(8) / 8)) / 2)
    np.testing.assert_allclose(found[4:], cosine, rtol=1e-4)


def test_a_constant_rate_without_warmup():
    config = OptimizerConfig(learning_rate=0.1, warmup=0, final=1.0, weight_decay=0.0, max_grad_norm=None)
    np.testing.assert_allclose(rates(config, 5), 0.1, rtol=1e-4)


def test_gradients_are_clipped_by_their_global_norm():
    config = OptimizerConfig(learning_rate=1.0, warmup=0, final=1.0, weight_decay=0.0, max_grad_norm=0.5)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    large = jax.tree.map(lambda x: jnp.full_like(x, 10.0), params)
    state = adamw(config, updates=2).init(params)
    _, state = adamw(config, updates=2).update(large, state, params)
    first_moment = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(optax.tree.norm(first_moment), 0.1 * 0.5, rtol=1e-5)


def test_moments_and_epsilon_are_adams():
    """Against Adam's own equations (Kingma & Ba 2015, algorithm 1), in NumPy."""
    config = OptimizerConfig(learning_rate=0.1, warmup=0, final=1.0, weight_decay=0.0, max_grad_norm=None)
    config = replace(config, b1=0.7, b2=0.8, eps=0.5)
    optimizer, weight = adamw(config, updates=4), jnp.zeros(())
    state, mean, square = optimizer.init(weight), 0.0, 0.0
    for number, gradient in enumerate([1.0, -3.0, 0.5, 2.0], start=1):
        update, state = optimizer.update(jnp.asarray(gradient), state, weight)
        mean, square = 0.7 * mean + 0.3 * gradient, 0.8 * square + 0.2 * gradient**2
        expected = mean / (1 - 0.7**number) / (np.sqrt(square / (1 - 0.8**number)) + 0.5)
        np.testing.assert_allclose(-np.asarray(update).item(), 0.1 * expected, rtol=1e-5)


@dataclass
class Sleeper:
    clock: Clock = field(default_factory=Clock)

    @timed("sleep")
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def test_the_clock_adds_up_calls_and_forgets_at_the_next_start():
    sleeper = Sleeper()
    sleeper.clock.start()
    assert sleeper.sleep(0.02) == 0.02
    sleeper.sleep(0.03)
    taken = sleeper.clock.take()
    assert set(taken) == {"timing_s/sleep", "timing_s/step"}
    assert 0.05 <= taken["timing_s/sleep"] <= taken["timing_s/step"]
    sleeper.clock.start()
    assert set(sleeper.clock.take()) == {"timing_s/step"}


def test_the_stopwatch_gives_each_phase_its_time():
    watch = Stopwatch()
    time.sleep(0.02)
    watch.lap("first")
    watch.lap("second")
    assert watch.seconds["first"] >= 0.02 > watch.seconds["second"] >= 0


def test_a_compilation_is_counted_and_after_settling_explained(caplog):
    double = jax.jit(lambda x: 2 * x)
    two, three = jnp.arange(2), jnp.arange(3)
    with CompilationWatch() as watch:
        double(two)
        names, causes = watch.take()
        assert len(names) == 1 and causes == []
        watch.explain()
        double(two)
        assert watch.take() == ([], [])
        double(three)
        names, causes = watch.take()
        assert len(names) == 1 and "i32[3]" in causes[0] and "i32[2]" in causes[0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not jax.config.jax_explain_cache_misses  # pyright: ignore[reportAttributeAccessIssue]
    double(jnp.arange(4))
    assert watch.take() == ([], [])


def test_the_first_signal_asks_and_a_second_interrupt_interrupts():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with PreemptionGuard() as guard:
        assert not guard.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_an_interrupt_waits_for_an_iteration_and_for_nothing_else():
    with PreemptionGuard() as guard, guard.iterating():
        os.kill(os.getpid(), signal.SIGINT)
        assert guard.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    with PreemptionGuard() as guard:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert not guard.requested


def test_devices_that_cannot_be_had_are_refused():
    assert len(select(DeviceConfig(platform="cpu", simulated=8))) == 8
    assert len(select(DeviceConfig())) == 8
    with pytest.raises(UserError, match="device.platform=tpu comes too late: JAX already runs on cpu"):
        select(DeviceConfig(platform="tpu"))
    jax.config.update("jax_platforms", "cpu")
    with pytest.raises(UserError, match="device.simulated=3 asks for that many CPU devices, but JAX already runs on 8"):
        select(DeviceConfig(simulated=3))


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


def test_freed_memory_is_kept_and_comes_without_page_faults():
    said = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, text=True, check=True).stdout
    before, keeps, after = map(int, said.split())
    assert 10 * after < before if keeps else after > before / 2


def test_a_run_on_cpus_keeps_freed_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: asked.append(True))
    select(DeviceConfig())
    assert asked


@pytest.mark.parametrize("error", [RuntimeError("no such thing\nand more"), AssertionError()])
def test_a_platform_that_is_not_there_is_one_sentence(monkeypatch, error):
    def absent():
        raise error

    monkeypatch.setattr(jax, "devices", absent)
    with pytest.raises(UserError, match=r"not available here \((no such thing|JAX has no plugin for it)\)") as caught:
        select(DeviceConfig())
    assert "\n" not in str(caught.value)
