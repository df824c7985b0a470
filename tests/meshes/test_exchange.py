"""Exchanges by collectives over the devices of both sides: the same bits, from any mesh to any other."""

import random
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import AXES
from jrlhf.meshes.exchange import exchange, permutations
from jrlhf.meshes.resharding import host_transfers_refused
from tests.meshes.test_transfers import PAIRS, batch, mesh_on
from tests.support.launched import launch

MOVED = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jrlhf.config.schema import DeviceConfig, DistributedConfig
from jrlhf.run.devices import select

select(DeviceConfig(platform="cpu", simulated=int(sys.argv[1])), DistributedConfig(timeout=60))
from jrlhf.meshes import AXES, to_devices, to_host, transfer
from tests.meshes.test_transfers import PAIRS, batch, mesh_on

host, shards = batch(), {}
for pair, sizes in {**PAIRS, "same": ((2, 1, 2, 2), (2, 2, 2, 1))}.items():
    source, target = (mesh_on(*size) for size in sizes)
    rows = to_devices(host, {name: NamedSharding(source, P(AXES) if x.ndim else P()) for name, x in host.items()})
    moved = transfer(rows, target)
    for name, x in moved.items():
        assert x.sharding == NamedSharding(target, P(AXES) if x.ndim else P()), (pair, name)
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, host[name][shard.index], err_msg=f"{pair} {name}")
    shards[pair] = [shard.device.id for shard in moved["tokens"].addressable_shards]
    for tree in (rows, moved):  # the source is not freed
        jax.tree.map(np.testing.assert_array_equal, to_host(tree), host)
print(json.dumps(shards))
"""


@pytest.mark.parametrize("pair", ["disjoint", "overlapping", "from one"])  # the others: part `processes`
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


@pytest.mark.proof("processes")
@pytest.mark.parametrize("processes, same", [(2, [2, 2]), (4, [0, 2, 2, 0])])
def test_rows_go_from_any_slice_to_any_other_in_several_processes(tmp_path: Path, processes: int, same: list[int]):
    launched = launch(processes, tmp_path, "-c", MOVED, str(8 // processes))
    shards = launched.answers(300)
    for pair, (_, target) in PAIRS.items():
        assert sum(len(one[pair]) for one in shards) == mesh_on(*target).size  # each process has its own devices' rows
    assert [len(one["same"]) for one in shards] == same
