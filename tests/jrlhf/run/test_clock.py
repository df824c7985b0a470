"""The clock: when calls begin and end that nobody waits for, and what goes wrong on the device is not lost."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import make_mesh
from jrlhf.run import clock as clock_module
from jrlhf.run.clock import Clock


def mesh_on(start: int, count: int) -> jax.sharding.Mesh:
    return make_mesh(1, count, 1, devices=jax.devices()[start : start + count])


class Fake(jax.Array):
    """An array whose moment the test chooses."""

    def __init__(self, size: int = 4, *devices: int):
        self.there, self.deleted, self._size = threading.Event(), False, size
        self._sharding = jax.NamedSharding(mesh_on(*(devices or (0, 1))), jax.P())
        self.error: Exception | None = None

    @property
    def nbytes(self) -> int:
        return self._size

    @property
    def sharding(self):
        return self._sharding

    def block_until_ready(self):
        assert self.there.wait(10)
        if self.error is not None:
            raise self.error

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        return self.there.is_set()


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
    eventually(lambda: clock._calls[0].ready == 3.0)
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
        eventually(lambda end=end: clock._calls[-1].ready == end)
    assert clock.take() == {"timing_s/call": 1.5, "timing_s/step": 4.5}
    clock.start()
    assert clock.take() == {"timing_s/step": 0.0}


def test_waiting_on_the_host_counts_as_far_as_the_device_had_nothing_to_do(now):
    clock, array = Clock(blocking=False), Fake()
    clock.run("device", lambda: array)

    def host() -> str:
        now[0] = 2.0
        array.there.set()
        eventually(lambda: clock._calls[0].ready == 2.0)
        now[0] = 5.0
        return "no array"

    assert clock.run("host", host) == "no array"
    clock.add_parallel("thread", 4.0)
    clock.add_parallel("thread", 0.5)
    for lane, seconds in ((1, 2.0), (0, 7.0)):  # the second one began before the iteration
        clock.add_chunk(lane, seconds)
    ends = [(record["lane"], record["start"], record["end"]) for record in clock.calls(mesh_on(0, 4))[2:]]
    assert ends == [(1, 3.0, 5.0), (0, 0.0, 5.0)]
    taken = clock.take()
    assert taken == {"timing_s/device": 2.0, "timing_s/host": 3.0, "timing_s/thread": 4.5, "timing_s/step": 5.0}


def test_a_call_that_leaves_devices_counts_on_them_until_then(now):
    """Rows draw on four devices, then on the first two; meanwhile a tile is scored on the others."""
    clock, whole, drawn, scores = Clock(blocking=False), mesh_on(0, 4), Fake(4, 0, 4), Fake(4, 2, 2)

    def look(seconds: float, unfinished: int, mesh: jax.sharding.Mesh) -> None:
        now[0] = seconds
        clock.watch(np.arange(8) >= unfinished, None, mesh)

    def draw() -> Fake:
        look(2.0, 8, whole)
        look(3.0, 2, whole)  # they move
        look(4.0, 2, mesh_on(0, 2))
        clock.run("ref", lambda: scores)
        look(5.0, 1, mesh_on(0, 2))
        now[0] = 6.0
        return drawn

    now[0] = 1.0
    clock.run("gen", draw)
    for array, ready in ((scores, 6.5), (drawn, 7.0)):
        now[0] = ready
        array.there.set()
        eventually(lambda ready=ready: ready in {call.ready for call in clock._calls})
    whole_mesh = make_mesh(1, 8, 1)
    assert clock.take() == {"timing_s/gen": 6.0, "timing_s/ref": 2.5, "timing_s/step": 7.0}
    assert clock.calls(whole_mesh) == [
        {"name": "gen", "devices": "0-3", "start": 1.0, "end": 3.0, "copies": False, "rows": [[1.0, 8], [3.0, 2]]},
        {"name": "ref", "devices": "2-3", "start": 4.0, "end": 6.5, "copies": False},
        {"name": "gen", "devices": "0-1", "start": 3.0, "end": 7.0, "copies": False, "rows": [[3.0, 2], [5.0, 1]]},
    ]


def test_a_call_that_waits_for_its_work_on_the_host_counts_from_when_it_was_made(now):
    clock, weights, drawn = Clock(blocking=False), Fake(), Fake()

    def draw(_: Fake) -> Fake:
        weights.there.set()  # at some time while the host decodes one chunk after the other
        now[0] = 4.0
        return drawn

    clock.run("gen", draw, weights)
    now[0] = 5.0
    drawn.there.set()
    assert clock.take() == {"timing_s/gen": 5.0, "timing_s/step": 5.0}


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
    clock, array, single = Clock(), Fake(4, 0, 2), Fake(4, 1, 1)
    array.there.set()
    clock.run("call", lambda: array)
    with jax.set_mesh(mesh_on(2, 4)):
        clock.run("without an array", lambda: None)
    assert clock._pending == []
    clock.run("on one device", lambda: single)  # it needs no peer
    assert len(clock._pending) == 1
    single.there.set()
    clock.take()
    assert [call["devices"] for call in clock.calls(mesh_on(0, 8))] == ["0-1", "2-5", "1"]


def test_calls_on_separate_devices_overlap_and_copies_wait_for_what_they_copy(now):
    """Two slices: a call on all devices, then one on each at a time, a copy from one to the other, and its reader."""
    clock, mesh = Clock(blocking=False), make_mesh(2, 1, 1, devices=jax.devices()[:2])
    everything, update, rollout, copy, reader = Fake(), Fake(), Fake(4, 1, 1), Fake(), Fake()

    def end(array: Fake, when: float, readers: int = 0) -> None:
        """Also waits until the calls that read the array have noted its time."""
        now[0] = when
        array.there.set()
        eventually(lambda: sum(when in (call.ready, call.inputs) for call in clock._calls) == 1 + readers)

    with jax.set_mesh(mesh):
        clock.run("both", lambda later: None, everything)  # returns no array: waits for none, on the mesh's devices
    clock.run("update", lambda: update)
    clock.run("gen", lambda: rollout)
    clock.run("transfer", lambda rows: copy, rollout)
    clock.run("reader", lambda rows: reader, copy)
    clock.run("update", lambda: everything)
    end(update, 2.0)
    end(rollout, 5.0, readers=1)
    end(copy, 6.0, readers=1)
    end(reader, 8.0)
    end(everything, 9.0)
    assert clock.take() == {
        "timing_s/both": 0.0,
        "timing_s/update": 3.0,
        "timing_s/gen": 5.0,
        "timing_s/transfer": 1.0,
        "timing_s/reader": 2.0,
        "timing_s/step": 9.0,
    }
    assert [tuple(call.values()) for call in clock.calls(mesh)] == [
        ("both", "0-1", 0.0, 0.0, False),
        ("update", "0", 0.0, 2.0, False),
        ("gen", "1", 0.0, 5.0, False),
        ("transfer", "0", 5.0, 6.0, True),
        ("reader", "0", 6.0, 8.0, False),
        ("update", "0", 8.0, 9.0, False),
    ]
