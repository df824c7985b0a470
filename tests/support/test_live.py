import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from tests.support.live import live_bytes


def test_bytes_by_device_and_memory_kind():
    mesh = make_mesh(fsdp=4, tensor=2)
    tree = {
        "sharded": jax.device_put(np.zeros((16, 6), np.float32), NamedSharding(mesh, P("fsdp", "tensor"))),
        "replicated": jax.device_put(jnp.zeros(5, jnp.bfloat16), NamedSharding(mesh, P())),
        "host": jax.device_put(np.zeros(8, np.int32), NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")),
        "one": jax.device_put(np.zeros(7, np.int8), jax.devices()[3]),
    }
    sizes = live_bytes(tree)
    for device in range(8):
        assert sizes[device, "device"] == 16 * 6 * 4 // 8 + 5 * 2 + (7 if device == 3 else 0)
        assert sizes[device, "pinned_host"] == 2 * 4
    assert len(sizes) == 16


def test_by_default_of_the_process_and_shared_memory_counts_once():
    gc.collect()  # what earlier tests left in reference cycles
    before = live_bytes()
    x = jax.device_put(np.zeros(1024, np.float32), NamedSharding(make_mesh(fsdp=8), P("fsdp")))
    alias = jax.device_put(x, NamedSharding(make_mesh(tensor=8), P("tensor")))
    shards = [shard.data for shard in x.addressable_shards]
    assert shards[0].unsafe_buffer_pointer() == alias.addressable_shards[0].data.unsafe_buffer_pointer()
    sizes = live_bytes()
    assert {device: sizes[device, "device"] - before[device, "device"] for device in range(8)} == dict.fromkeys(
        range(8), 512
    )
    assert live_bytes([x, alias, shards]) == live_bytes(x)
    for array in (x, alias, *shards):
        array.delete()  # deleted arrays hold nothing
    assert not live_bytes(x) and live_bytes() == before
