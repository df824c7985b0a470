"""The clock: calls that nobody waits for are laid end to end, and what goes wrong on the device is not lost."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jrlhf.run import clock as clock_module
from jrlhf.run.clock import Clock


class Fake(jax.Array):
    """An array whose moment the test chooses."""

    def __init__(self, size: int = 4):
        self.there, self.deleted, self._size = threading.Event(), False, size
        self.error: Exception | None = None

    @property
    def nbytes(self) -> int:
        return self._size

    def block_until_ready(self):
        assert self.there.wait(10)
        if self.error is not None:
            raise self.error

    def is_deleted(self) -> bool:
        return self.deleted


Fake.__abstractmethods__ = frozenset()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def now(monkeypatch):
    """Time that only the test moves."""
    time_ = [0.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: time_[0])
    return time_


def eventually(holds) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_calls_are_not_waited_for_and_lie_end_to_end(now):
    clock, (first, second) = Clock(blocking=False), (Fake(), Fake())
    assert clock.run("first", lambda: first) is first  # returns, though it is not there
    now[0] = 1.0
    clock.run("second", lambda: second)
    now[0] = 3.0
    first.there.set()
    eventually(lambda: clock._calls.seconds == {"first": 3.0})
    now[0] = 5.0
    second.there.set()
    # Started at 1, but the device was busy with the first until 3.
    assert clock.take() == {"timing_s/first": 3.0, "timing_s/second": 2.0, "timing_s/step": 5.0}
    clock.start()
    for start, end in ((6.0, 7.0), (9.0, 9.5)):  # an idle device is nobody's time, and equal names add up
        now[0], array = start, Fake()
        clock.run("call", lambda array=array: array)
        now[0] = end
        array.there.set()
        eventually(lambda end=end: clock._calls._ready == end)
    assert clock.take() == {"timing_s/call": 1.5, "timing_s/step": 4.5}
    clock.start()
    assert clock.take() == {"timing_s/step": 0.0}


def test_waiting_on_the_host_counts_as_far_as_the_device_had_nothing_to_do(now):
    clock, array = Clock(blocking=False), Fake()
    clock.run("device", lambda: array)

    def host() -> str:
        now[0] = 2.0
        array.there.set()
        eventually(lambda: "device" in clock._calls.seconds)
        now[0] = 5.0
        return "no array"

    assert clock.run("host", host) == "no array"
    clock.add_parallel("thread", 4.0)
    clock.add_parallel("thread", 0.5)
    taken = clock.take()
    assert taken == {"timing_s/device": 2.0, "timing_s/host": 3.0, "timing_s/thread": 4.5, "timing_s/step": 5.0}


def test_what_was_donated_is_not_waited_for_and_other_errors_come_out():
    clock, donated, failed = Clock(blocking=False), Fake(), Fake()
    donated.error, donated.deleted = RuntimeError("Array has been deleted"), True
    failed.error = RuntimeError("lost")
    for array in (donated, failed):
        array.there.set()
    clock.run("donated", lambda: [donated])
    assert "timing_s/donated" in clock.take()
    clock.run("failed", lambda: {"x": failed})
    with pytest.raises(RuntimeError, match="lost"):
        clock.take()
    clock.start()
    assert set(clock.take()) == {"timing_s/step"}
    with pytest.raises(ZeroDivisionError):  # while it was called
        clock.run("wrong", lambda: 1 // 0)


def test_a_call_that_does_not_end_is_an_error_at_its_deadline():
    clock, array = Clock(deadline=0.01, blocking=False), Fake()
    clock.run("stuck", lambda: array)
    with pytest.raises(TimeoutError):
        clock.take()
    array.there.set()


def test_real_arrays_have_the_same_values():
    step = jax.jit(lambda x: (x + 1, x.sum()), donate_argnums=0)
    for blocking in (True, False):
        clock, state = Clock(blocking=blocking), jnp.arange(4.0)
        for _ in range(3):
            state, _ = clock.run("step", step, state)  # the next call donates what this one returned
        assert clock.take()["timing_s/step"] >= 0 and state.tolist() == [3.0, 4.0, 5.0, 6.0]


def test_large_arrays_are_not_held_until_they_are_there():
    large, larger, small = Fake(1 << 30), Fake(1 << 31), Fake()
    assert clock_module._witnesses({"a": larger, "b": [large, "text"], "c": small}) == [small]
    assert clock_module._witnesses([larger, large]) == [large]
    assert clock_module._witnesses([small, larger, large]) == [small, large]  # the last is made last
    assert clock_module._witnesses(None) == []


def test_threads_end_with_their_clock():
    def watchers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("clock")]

    gc.collect()
    eventually(lambda: not watchers())
    clock = Clock(blocking=False)
    for _ in range(3):
        clock.start()
        clock.run("call", jnp.zeros, 2)
        clock.take()
        assert len(watchers()) == 1
    del clock
    gc.collect()
    eventually(lambda: not watchers())


def test_simulated_devices_are_waited_for_in_order(now):
    assert clock_module.may_deadlock()
    clock, array = Clock(), Fake()
    array.there.set()
    clock.run("call", lambda: array)
    assert clock._pending == [] and clock._calls.seconds == {"call": 0.0}
