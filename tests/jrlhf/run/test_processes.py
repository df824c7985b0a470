"""Several processes on one machine: they find each other, agree, share arrays, and end together."""

import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from jrlhf.config import load_config
from jrlhf.config.schema import DistributedConfig
from jrlhf.errors import UserError
from jrlhf.run.cluster import start
from jrlhf.run.resume import other_settings
from tests.support.launched import LAYOUTS, TINY, launch
from tests.support.processes import free_port

AGREE = """
import json, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jrlhf.config import load_config
from jrlhf.config.schema import DeviceConfig, DistributedConfig
from jrlhf.run.devices import select
from jrlhf.errors import UserError
from jrlhf.stages.setup import architectures
from jrlhf.planning.resolve import select_plan
from jrlhf.meshes import gathered, make_mesh, reshard, to_devices, to_host
from jrlhf.meshes.spread import spread
from jrlhf.run.processes import any_process, from_main, is_main, share, to_all_hosts

devices = select(DeviceConfig(platform="cpu", simulated=2), DistributedConfig(timeout=60))
number, results = jax.process_index(), {}
called = []
results["value"] = from_main(lambda: called.append(number) or {"process": number, "size": len(b"x" * 9_000_000)})
results["called"] = called

def fail():
    raise UserError("rewards[0] is not there")

try:
    from_main(fail)
except UserError as error:
    results["error"] = str(error)
results["any"] = [any_process(False), any_process(number == 1), any_process(True)]

mesh = make_mesh(1, 2, 2, devices=devices)
rows = NamedSharding(mesh, P("fsdp", "tensor"))
host = {"x": np.arange(24.0, dtype=np.float32).reshape(4, 6).T[:, ::-1], "n": np.int32(7)}
placed = to_devices(host, {"x": rows, "n": NamedSharding(mesh, P())})
results["shards"] = {str(s.index): s.data.tolist() for s in placed["x"].addressable_shards}
doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(placed)
whole = gathered(doubled)
fetched = []
thread = threading.Thread(target=lambda: fetched.append(jax.device_get(whole)))
thread.start(); thread.join()
results["doubled"] = [fetched[0]["x"].tolist(), to_host(doubled)["x"].tolist(), int(fetched[0]["n"])]
keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(np.arange(4))
divided = to_devices(keys, NamedSharding(mesh, P(("fsdp", "tensor"))))
own = P(("fsdp", "tensor"))
draw = jax.jit(jax.shard_map(jax.vmap(jax.random.bits), mesh=mesh, in_specs=own, out_specs=own))
results["drawn"] = to_host(draw(divided)).tolist()
moved = to_devices(divided, NamedSharding(mesh, P("fsdp")))  # from devices to devices
results["moved"] = to_host(draw(jax.jit(lambda k: k, out_shardings=divided.sharding)(moved))).tolist()
results["expected"] = np.asarray(jax.vmap(jax.random.bits)(keys)).tolist()
parts = {name: make_mesh(1, -1, 1, devices=own) for name, own in {
    "first": devices[:2], "second": devices[2:], "middle": devices[1:3], "last": devices[3:]}.items()} | {"all": mesh}
rows = {name: to_devices(host, {"x": NamedSharding(part, P("fsdp")), "n": NamedSharding(part, P())}) for name, part in
    parts.items() if name in ("first", "second", "all")}
loop = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000_000, lambda _, x: x * 0.999 + 1, x))
loop = loop.lower(rows["second"]["x"]).compile()
to_all_hosts(rows["first"])  # compiled, too
from_main(lambda: None)  # all processes are here
slow = loop(rows["second"]["x"])
results["read"] = [to_all_hosts(rows["first"])]
results["busy"] = number == 1 and not slow.is_ready()
results["read"] += [to_all_hosts(rows["second"]), to_all_hosts(rows["all"])]
results["read"] = [[tree["x"].tolist(), int(tree["n"])] for tree in results["read"]]
flags = to_devices(np.arange(6) % 3 == 0, NamedSharding(parts["first"], P("fsdp")))
some = to_all_hosts({"x": rows["first"]["x"], "done": flags}, np.isin(np.arange(6), [1, 3]))
results["some"] = [some["x"][[1, 3]].tolist(), some["done"][[1, 3]].tolist()]
results["slices"] = {}
for pair in ("first second", "all last", "middle second"):
    source, target = (parts[name] for name in pair.split())
    given = to_devices(host, {"x": NamedSharding(source, P(None, "fsdp")), "n": NamedSharding(source, P())})
    moved = reshard(given, {"x": NamedSharding(target, P("fsdp", "tensor")), "n": NamedSharding(target, P())})
    saved = spread(moved)
    own = [shard.data.shape for shard in saved["x"].addressable_shards]
    arrived = to_host([moved["x"], moved["n"], saved["x"]])
    results["slices"][pair] = [*(array.tolist() for array in arrived), own]
tiny, directory = sys.argv[1:]
results["shared"] = [share(Path(directory, name)) for name in ("together", f"apart-{number}")]
config = load_config(tiny, [f"plan={directory}/{number}.yaml", "mesh.fsdp=2"])
results["plan"] = select_plan(config, architectures(config), devices).as_dict()
print(json.dumps(results))
"""


@pytest.mark.full
def test_processes_agree_and_share_arrays(tmp_path: Path):
    placed = {name: {"layout": layout, "devices": "0-3", "fsdp": 4} for name, layout in LAYOUTS.items()}
    (tmp_path / "0.yaml").write_text(yaml.safe_dump({"calls": placed}))  # process 1 has none
    launched = launch(2, tmp_path, "-c", AGREE, TINY, str(tmp_path))
    first, second = launched.answers(300)
    assert first.pop("called") == [0] and second.pop("called") == []
    assert (first.pop("busy"), second.pop("busy")) == (False, True)  # its devices compute while it gets others' arrays
    expected = np.arange(24.0, dtype=np.float32).reshape(4, 6).T[:, ::-1]
    shards = first.pop("shards") | second.pop("shards")
    assert len(shards) == 4  # each process has only its own
    for index, values in shards.items():
        rows, columns = (slice(*map(int, part)) for part in re.findall(r"slice\((\d+), (\d+), None\)", index))
        np.testing.assert_array_equal(values, expected[rows, columns])
    assert first == second
    assert first["value"] == {"process": 0, "size": 9_000_000}
    assert first["error"] == "rewards[0] is not there"
    assert first["any"] == [False, True, True]
    assert first["shared"] == [True, False]
    assert first["doubled"] == [(2 * expected).tolist()] * 2 + [14]
    assert first["drawn"] == first["moved"] == first["expected"]
    assert first["read"] == [[expected.tolist(), 7]] * 3
    assert first["some"] == [expected[[1, 3]].tolist(), [False, True]]
    for moved, number, saved, shards in first["slices"].values():
        assert moved == saved == expected.tolist() and number == 7
        assert len(shards) == 2 and np.prod(shards[0]) < 24  # each process has a part of what is saved
    assert first["plan"]["calls"] == placed


@pytest.fixture
def no_cluster(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_", "OMPI_", "KUBERNETES")):
            monkeypatch.delenv(name)


def test_an_address_is_complete_or_absent(no_cluster, monkeypatch):
    start(DistributedConfig())  # one process, as nothing says otherwise
    assert not jax.distributed.is_initialized() and jax.process_count() == 1
    complete = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"process": 1}, {}, "distributed.process=1 without distributed.coordinator"),
        ({"processes": 2}, {}, "distributed.processes=2 without distributed.coordinator"),
        ({}, {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID=one must be a whole number"),
        ({}, {"JAX_COORDINATOR_ADDRESS": "host"}, "distributed.coordinator='host': it must be HOST:PORT"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, {}, "numbered from 0, set it to 1 at most"),
        ({}, complete, "comes too late"),
    ]
    for config, environment, sentence in cases:
        with monkeypatch.context() as patched, pytest.raises(UserError, match=re.escape(sentence)):
            for name, value in environment.items():
                patched.setenv(name, value)
            start(DistributedConfig(**config))
    with pytest.raises(UserError, match="distributed.coordinator='host': it must be HOST:PORT"):
        load_config(TINY, ["distributed.coordinator=host"])


@pytest.mark.full
@pytest.mark.parametrize("source", ["config", pytest.param("slurm", marks=pytest.mark.proof("processes"))])
def test_a_coordinator_that_does_not_answer_is_named(tmp_path: Path, source: str):
    address = f"127.0.0.1:{free_port()}"
    keys = [f"distributed.coordinator={address}", "distributed.processes=2", "distributed.process=1"]
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    overrides, more = (keys, {}) if source == "config" else ([], slurm)
    arguments = ["--config", TINY, f"run_dir={tmp_path}", "distributed.timeout=1", *overrides]
    launched = launch(1, tmp_path, "-m", "jrlhf.train", *arguments, **more)
    launched.assert_codes(60, 2)
    sentence = launched.text(0).strip()
    place = address if source == "config" else "of the cluster that JAX found"
    assert sentence.count("\n") == 0 and sentence.startswith("error: ") and place in sentence
    assert "distributed.timeout=1 seconds" in sentence
    assert not (tmp_path / "tiny").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "difference"),
    [
        ("[f'seed={number}']", "seed=1 (process 0: 0)"),
        ("[f'seed={number}', '--dry-run']", "seed=1 (process 0: 0)"),
        ("['--resume'] * int(number)", "--resume=true (process 0: false)"),
    ],
)
def test_processes_with_other_settings_are_refused_at_the_start(tmp_path: Path, more: str, difference: str):
    settings = f"run_dir={tmp_path}", "device.simulated=1", "mesh.fsdp=2"
    command, code = tmp_path / "command.py", "import sys\nfrom jrlhf.train import cli\nnumber, *given = sys.argv[1:]\n"
    command.write_text(f"{code}if __name__ == '__main__':\n    sys.exit(cli([*given, *{more}]))\n")
    launched = launch(2, tmp_path, str(command), "{process}", "--config", TINY, *settings)
    launched.assert_codes(120, 2, 2)
    for process in launched.processes:
        process.communicate()  # closes its pipe
    for number in range(2):
        (sentence,) = re.findall("^error: .*", launched.text(number), re.M)
        assert f"process 1 has {difference}: start all processes with the same config" in sentence
    assert not (tmp_path / "tiny").exists()


def test_only_settings_of_a_process_may_differ_between_processes():
    own = {"seed": "0", "distributed.process": "0", "plan": "a.yaml", "storage.scratch": "/a", "model.path": "/a/Qwen"}
    cases: list[tuple[dict[str, str], str]] = [
        ({"distributed.process": "1", "plan": "auto", "storage.scratch": "/b", "model.path": "/data/Qwen"}, ""),
        ({"seed": "1"}, "processes 1, 2 have seed=1 (process 0: 0)"),
        ({"model.path": "/a/Llama"}, "processes 1, 2 have model.path=/a/Llama (process 0: /a/Qwen)"),
        ({"model.path": "org/Qwen"}, "processes 1, 2 have model.path=org/Qwen (process 0: /a/Qwen)"),
        ({"seed": "1", "jax": "2"}, "processes 1, 2 have seed=1 (process 0: 0), jax=2 (process 0: absent)"),
    ]
    for change, clause in cases:
        assert other_settings([own, own | change, own | change]) == [clause] * bool(clause), change
    assert other_settings([own, own | {"seed": "1"}, own, own | {"seed": "3"}]) == [
        "process 1 has seed=1 (process 0: 0)",
        "process 3 has seed=3 (process 0: 0)",
    ]
