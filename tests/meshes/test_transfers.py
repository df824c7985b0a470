"""Transfers between the meshes of calls: the same bits, never through the host; and copies to the host."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import AXES, gathered, lies_elsewhere, make_mesh, transfer
from jrlhf.meshes.resharding import host_transfers_refused
from tests.support.live import live_bytes

ROWS = 16


def mesh_on(start: int, *sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    return make_mesh(*sizes, devices=jax.devices()[start : start + count])


PAIRS = {
    "other axes": ((0, 1, 4, 2), (0, 2, 1, 4)),
    "subset": ((0, 1, 4, 2), (2, 1, 2, 1)),
    "superset": ((2, 1, 2, 1), (0, 1, 4, 2)),
    "disjoint": ((0, 1, 2, 2), (4, 2, 2, 1)),
    "more": ((0, 1, 2, 1), (2, 2, 1, 2)),
    "fewer": ((0, 2, 2, 1), (6, 1, 1, 2)),
    "overlapping": ((0, 1, 4, 1), (2, 1, 2, 2)),
    "to one": ((0, 1, 4, 2), (7, 1, 1, 1)),
    "from one": ((0, 1, 1, 1), (4, 1, 4, 1)),
}


def batch() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "tokens": draw.integers(0, 99, (ROWS, 5)).astype(np.int32),
        "logprobs": draw.normal(size=(ROWS, 5)).astype(np.float32),
        "finished": draw.random(ROWS) < 0.5,
        "version": np.int32(3),
    }


def put(host: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    return {name: jax.device_put(x, NamedSharding(mesh, P(AXES) if x.ndim else P())) for name, x in host.items()}


FULL = [pytest.param(pair, marks=pytest.mark.full) for pair in ("other axes", "superset", "to one")]


@pytest.mark.parametrize("pair", ["subset", "disjoint", *FULL])
def test_rows_lie_over_the_devices_of_the_other_mesh(pair):
    source, target = (mesh_on(*sizes) for sizes in PAIRS[pair])
    host = batch()
    rows = put(host, source)
    keys = jax.device_put(jax.vmap(jax.random.key)(np.arange(ROWS)), NamedSharding(source, P(("data", "fsdp"))))
    before = live_bytes()
    assert lies_elsewhere(rows, target)
    with host_transfers_refused():
        moved, moved_keys = jax.block_until_ready(transfer((rows, keys), target))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), host)
    np.testing.assert_array_equal(jax.random.key_data(moved_keys), jax.random.key_data(keys))
    assert moved["tokens"].sharding == NamedSharding(target, P(AXES))
    assert moved["version"].sharding == NamedSharding(target, P())
    assert moved_keys.sharding.is_equivalent_to(NamedSharding(target, P(("data", "fsdp"))), 1)
    assert not lies_elsewhere((moved, moved_keys), target)
    assert live_bytes() - before == live_bytes((moved, jax.random.key_data(moved_keys)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(rows), host)


def test_what_is_there_is_not_touched():
    mesh = mesh_on(0, 1, 4, 2)
    rows = put(batch(), mesh) | {"number": 0.5, "text": "x", "nothing": None, "single": jnp.ones(3)}
    assert not lies_elsewhere(rows, mesh)
    assert transfer(rows, mesh) is rows


def test_only_what_is_elsewhere_moves():
    here, there = mesh_on(0, 1, 2, 2), mesh_on(4, 1, 2, 2)
    rows = put(batch(), here)
    mixed = rows | {"tokens": put(batch(), there)["tokens"], "text": "x"}
    moved = transfer(mixed, here)
    assert all(moved[name] is mixed[name] for name in mixed if name != "tokens")
    np.testing.assert_array_equal(moved["tokens"], rows["tokens"])
    assert moved["tokens"].sharding == rows["tokens"].sharding


def test_rows_that_do_not_divide_are_refused():
    rows = jax.device_put(np.zeros((2, 3)), NamedSharding(mesh_on(0, 1, 2, 1), P(AXES)))
    with pytest.raises(ValueError, match="divi"):
        transfer(rows, mesh_on(4, 1, 4, 1))


@pytest.fixture
def impatient():
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_what_is_gathered_may_be_fetched_by_several_threads_at_once(impatient):
    mesh = make_mesh(8, 1, 1)
    given = jax.device_put(np.arange(64.0, dtype=np.float32), NamedSharding(mesh, P("data")))
    make = jax.jit(lambda x: [x + number for number in range(8)])
    with ThreadPoolExecutor(3) as threads:
        for _ in range(40):
            whole = gathered(make(given))
            for fetched in [threads.submit(jax.device_get, whole) for _ in range(3)]:
                for number, array in enumerate(fetched.result(10)):
                    np.testing.assert_array_equal(array, np.arange(64) + number)
