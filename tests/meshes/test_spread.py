"""Arrays of some devices are divided over all of them, and return, bit for bit."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import spread as module
from jrlhf.meshes.spread import move, spread


@pytest.mark.parametrize("count", [2, 6])
def test_every_device_gets_a_part(count: int, monkeypatch):
    """The last devices are those of a process that has none of the arrays. 6 devices do not divide all 8."""
    mesh = Mesh(np.asarray(jax.devices()[:count]).reshape(count // 2, 2), ("fsdp", "tensor"))
    monkeypatch.setattr(module, "absent_processes", lambda own: [jax.devices()[7]] if own == mesh else [])
    shapes = {"layers": (3, 6, 12), "matrix": (12, 8), "vector": (6,), "number": ()}
    specs = {"layers": P(None, "fsdp", "tensor"), "matrix": P("fsdp", "tensor"), "vector": P("fsdp"), "number": P()}
    tree = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given = {name: jax.device_put(tree[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}
    saved = spread(given)
    for name, array in saved.items():
        np.testing.assert_array_equal(array, tree[name])
        assert array.sharding.device_set == set(jax.devices())
    shards = {name: array.sharding.shard_shape(array.shape) for name, array in saved.items()}
    even = {"layers": (3, 3, 3), "matrix": (3, 4), "vector": (3,), "number": ()}  # axes that were divided come first
    further = {"layers": (3, 3, 6), "matrix": (3, 4), "vector": (3,), "number": ()}  # shards are divided further
    assert shards == (even if count == 6 else further)
    again = move(list(saved.values()), [given[name].sharding for name in saved], donate=True)
    for array, name in zip(again, saved, strict=True):
        np.testing.assert_array_equal(array, tree[name])
        assert array.sharding == given[name].sharding
    assert all(array.is_deleted() for array in saved.values())
