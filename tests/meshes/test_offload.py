"""Moves of trees between devices and host: values, placement and memory."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.meshes.offload import free_host, groups, offload, onload
from jrlhf.meshes.transfers import is_on_host
from tests.support.live import live_bytes


def tree_on(mesh, seed=0):
    """Float32, bfloat16 and integers; sharded over two axes, over one, replicated; a scalar."""
    draw = np.random.default_rng(seed)

    def place(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    return {
        "matrix": place(draw.normal(size=(16, 6)).astype(np.float32), "fsdp", "tensor"),
        "stack": [place(jnp.asarray(draw.normal(size=(3, 8, 4)), jnp.bfloat16), None, "fsdp", None)],
        "rows": place(np.arange(8, dtype=np.int32), "fsdp"),
        "count": place(np.float32(3)),
    }


def bits(tree):
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()), tree)


def total(kind):
    return sum(size for (_, of), size in live_bytes().items() if of == kind)


def test_there_and_back_is_the_same_tree_and_every_byte_is_in_one_place():
    mesh = make_mesh(fsdp=4, tensor=2)
    tree = tree_on(mesh)
    before, shardings, size = bits(tree), jax.tree.map(lambda x: x.sharding, tree), live_bytes(tree)
    gc.collect()
    start = live_bytes()

    asleep = offload(tree, group_bytes=60)
    moved = live_bytes()
    for (device, kind), count in size.items():
        assert kind == "device" and count > 0
        assert start[device, "device"] - moved[device, "device"] == count
        assert moved[device, "pinned_host"] - start[device, "pinned_host"] == count
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree)) and bits(asleep) == before
    assert jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), asleep) == shardings

    awake = onload(asleep)
    assert bits(awake) == before and jax.tree.map(lambda x: x.sharding, awake) == shardings
    assert live_bytes(awake) == size and live_bytes(asleep) == {
        (d, "pinned_host"): count for (d, _), count in size.items()
    }
    free_host(asleep)
    free_host(awake)  # nothing of it is there
    assert live_bytes() == start and bits(awake) == before


def test_what_is_there_already_is_not_moved():
    mesh = make_mesh(fsdp=4, tensor=2)
    tree = tree_on(mesh)
    assert onload(tree) is tree and not is_on_host(tree)
    mixed = {"asleep": offload(tree_on(mesh, 1)), "awake": tree}
    assert is_on_host(mixed)
    again = offload(mixed["asleep"])
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (again, mixed["asleep"])), strict=True))
    awake = onload(mixed)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (awake["awake"], tree)), strict=True))
    assert not is_on_host(awake) and not is_on_host({"numpy": np.zeros(3), "none": None})


def test_an_array_that_stands_twice_in_a_tree_moves_once():
    mesh = make_mesh(fsdp=4, tensor=2)
    x = jax.device_put(np.arange(32.0, dtype=np.float32), NamedSharding(mesh, P("fsdp")))
    aliased = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards])
    assert aliased is not x
    start = total("pinned_host")
    asleep = offload({"a": x, "b": [x, aliased]})
    assert asleep["a"] is asleep["b"][0] is asleep["b"][1]
    assert total("pinned_host") - start == 8 * x.nbytes // 4  # tensor replicates


def test_groups_are_neighbours_within_the_limit_of_a_device():
    mesh = make_mesh(fsdp=8)
    arrays = [jax.device_put(np.zeros(8 * n, np.float32), NamedSharding(mesh, P("fsdp"))) for n in (1, 2, 9, 1, 1, 1)]
    assert list(groups(arrays, 12)) == [[0, 1], [2], [3, 4, 5]]
    assert list(groups(arrays, 4)) == [[i] for i in range(6)] and list(groups([])) == []


def test_a_program_takes_what_came_back_for_what_had_stayed():
    mesh = make_mesh(fsdp=4, tensor=2)
    traced = []

    @jax.jit
    def double(tree):
        traced.append(True)
        return jax.tree.map(lambda x: x + x, tree)

    stayed = bits(double(tree_on(mesh)))
    assert bits(double(onload(offload(tree_on(mesh))))) == stayed and len(traced) == 1
