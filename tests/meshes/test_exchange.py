"""Exchanges by collectives over the devices of both sides: the same bits, from any mesh to any other."""

import random

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import AXES
from jrlhf.meshes.exchange import exchange, permutations
from jrlhf.meshes.reshard import host_transfers_refused
from tests.meshes.test_transfer import PAIRS, batch, mesh_on


@pytest.mark.parametrize("pair", PAIRS)
def test_devices_get_their_shards(pair: str):
    source, target = (mesh_on(*sizes) for sizes in PAIRS[pair])
    host, divided = batch(), target.size <= source.size  # every shard of the destination must be one at the source
    mesh = mesh_on(PAIRS[pair][0][0], 1, target.size, source.size // target.size) if divided else source
    given, parts = {}, {}
    for name, x in host.items():
        given[name] = jax.device_put(x, NamedSharding(mesh, P("fsdp") if divided and x.ndim else P()))
        parts[name] = NamedSharding(target, P(AXES) if divided and x.ndim else P())
    with host_transfers_refused():
        moved = exchange(list(given.values()), list(parts.values()))
    for x, (name, sharding) in zip(moved, parts.items(), strict=True):
        assert x.sharding == sharding and x.dtype == host[name].dtype
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, host[name][shard.index])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(given), host)


def test_every_device_gets_what_it_wants_once():
    draw = random.Random(0)
    for _ in range(200):
        sent = [draw.choice([None, 0, 1, 2]) for _ in range(draw.randint(1, 9))] + [0, 1, 2]
        wanted = [draw.choice([None, 0, 1, 2]) for _ in sent]
        have = list(sent)
        for pairs in permutations(sent, wanted):
            assert len({sender for sender, _ in pairs}) == len({receiver for _, receiver in pairs}) == len(pairs)
            copies = {receiver: have[sender] if sent[sender] is None else sent[sender] for sender, receiver in pairs}
            for receiver, shard in copies.items():
                assert have[receiver] is sent[receiver] and shard is not None, "a device receives twice, or nothing"
                have[receiver] = shard
        assert all(shard is None or have[device] == shard for device, shard in enumerate(wanted))


def test_many_devices_take_few_rounds():
    assert len(permutations([0] * 4 + [None] * 124, [None] * 4 + [0] * 124)) == 5  # 4, 8, 16, ... 128 have it
