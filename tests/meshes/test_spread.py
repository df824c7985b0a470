"""Arrays of some devices are divided over all of them, and return, bit for bit."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import reshard
from jrlhf.meshes import spread as module
from jrlhf.meshes.spread import spread


@pytest.mark.parametrize("count", [2, 6])
def test_every_device_gets_a_part(count: int, monkeypatch):
    """The last devices are those of a process that has none of the arrays. 6 devices do not divide all 8."""
    mesh = Mesh(np.asarray(jax.devices()[:count]).reshape(count // 2, 2), ("fsdp", "tensor"))
    monkeypatch.setattr(module, "absent_processes", lambda own: [jax.devices()[7]] if own == mesh else [])
    tree = {"w": np.arange(48.0).reshape(6, 8), "b": np.arange(6.0), "n": np.float32(7)}
    specs = {"w": P("fsdp", "tensor"), "b": P("fsdp"), "n": P()}
    given = {name: jax.device_put(tree[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}
    saved = spread(given)
    for name, array in saved.items():
        np.testing.assert_array_equal(array, tree[name])
        assert array.sharding.device_set == set(jax.devices())
    shards = [array.sharding.shard_shape(array.shape) for array in (saved["w"], saved["b"])]
    assert shards == [(6, 1), (3,) if count == 6 else (3,)]
    again = reshard(saved, {name: array.sharding for name, array in given.items()})
    for name, array in again.items():
        np.testing.assert_array_equal(array, tree[name])
