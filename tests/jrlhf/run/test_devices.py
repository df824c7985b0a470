"""Simulated devices that wait for each other, on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jrlhf.run import devices

ROOT = Path(__file__).parents[3]
PROGRAMS = """
import threading
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from jrlhf.config.schema import DeviceConfig
from jrlhf.run.devices import select

select(DeviceConfig(platform="cpu", simulated=8))
mesh = jax.make_mesh((8,), ("x",))

def body(x):
    busy = jax.lax.fori_loop(0, 3000, lambda _, y: jax.numpy.sin(y), x)
    return jax.lax.psum(x + 0 * busy, "x") / 8 + 1

step, results = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))), []

def dispatch():
    x = jax.device_put(np.arange(8, dtype=np.float32), jax.sharding.NamedSharding(mesh, P("x")))
    for _ in range(100):
        x = step(x)
    results.append(np.asarray(x).tolist())

threads = [threading.Thread(target=dispatch) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(results == [[103.5] * 8] * 3)
"""


@pytest.mark.full
def test_programs_that_are_dispatched_from_three_threads_without_waiting_all_end():
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    command = [sys.executable, "-c", PROGRAMS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=100)
    assert done.stdout == "True\n", done.stderr[-2000:]


def test_an_accelerator_is_seen_without_jax(monkeypatch):
    monkeypatch.setattr(devices, "Path", lambda place: Path("/no/such/place"))
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    assert devices.accelerator() is None and devices.idle_accelerator() is None
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    assert devices.accelerator() == "tpu" and "jrlhf[tpu]" in str(devices.idle_accelerator())
    monkeypatch.setattr(devices.shutil, "which", {"nvidia-smi": "/usr/bin/nvidia-smi"}.get)
    assert devices.accelerator() == "gpu" and "jrlhf[cuda12]" in str(devices.idle_accelerator())
