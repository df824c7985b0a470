"""The loop of a stage: what it restores, refuses, warns of, and how it stops."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.config.schema import ProfileConfig
from jrlhf.errors import Preempted, UserError
from jrlhf.meshes import make_mesh
from jrlhf.run.directory import Run
from jrlhf.run.metrics import read_metrics
from jrlhf.run.preemption import PreemptionGuard
from jrlhf.stages.identity import Identity
from jrlhf.stages.loop import run_stage

MESH = make_mesh(1, 8, 1)


class Services:
    """A console that remembers warnings, and a wandb that remembers what it is sent."""

    def __init__(self):
        self.warnings, self.entries = [], []
        self.warn, self.log = self.warnings.append, lambda *entry: self.entries.append(entry)
        self.line = self.warn

    @contextlib.contextmanager
    def progress(self, *_, **__):
        yield SimpleNamespace(advance=lambda *_: None)


def context(path):
    checkpoints = SimpleNamespace(keep=2)
    config = SimpleNamespace(checkpoints=checkpoints, deadline=60.0, profile=ProfileConfig(), stages=("stage",))
    services = {"console": Services(), "wandb": Services(), "preemption": PreemptionGuard()}
    return SimpleNamespace(run=Run(path), config=config, mesh=MESH, identity=Identity(), **services)


def init():
    return {"x": jax.device_put(jnp.zeros(8), NamedSharding(MESH, P("fsdp")))}


@jax.jit
def add(state, amount):
    return {"x": state["x"] + amount}


def advance(state, step):
    return add(state, float(step)), {"loss": float(step)}


def run(here, steps=6, step=advance, meta=None, save_every=2):
    with jax.set_mesh(MESH):
        return run_stage(here, "sft", steps, init, step, save_every=save_every, meta=meta or {})


def test_a_stage_saves_when_it_is_asked_to_stop_and_goes_on_from_its_newest_checkpoint(tmp_path):
    here = context(tmp_path)

    def asked(state, step):
        here.preemption.requested = step == 2
        return advance(state, step)

    with pytest.raises(Preempted, match="sft stopped at step 3 of 6"):
        run(here, step=asked, save_every=6)
    here, taken = context(tmp_path), []

    def broken(state, step):
        taken.append(step)
        if step == 5:
            raise RuntimeError("lost")
        return advance(state, step)

    with pytest.raises(RuntimeError, match="lost"):
        run(here, step=broken)
    assert taken == [3, 4, 5]
    losses = [(stage, step, numbers["loss"]) for stage, step, numbers in here.wandb.entries]
    assert losses == [("sft", step + 1, float(step)) for step in (3, 4)]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]

    def counted(state, step):
        taken.append(step)
        return advance(state, step)

    state = run(context(tmp_path), step=counted)
    assert taken == [3, 4, 5, 4, 5]
    np.testing.assert_array_equal(state["x"], np.full(8, 15.0))
    records = [(record["step"], record["loss"]) for record in read_metrics(tmp_path)]
    assert records == [(step + 1, float(step)) for step in range(6)]
    finished = run(context(tmp_path), step=lambda *_: pytest.fail("finished stages do nothing"))
    assert finished["x"].sharding == state["x"].sharding
    with pytest.raises(UserError, match=r"stage sft was made with another reference \(None there, b here\)"):
        run(context(tmp_path), meta={"reference": "b"})


def test_a_compilation_after_the_first_iterations_is_told_with_its_cause(tmp_path):
    here = context(tmp_path)
    double = jax.jit(lambda x: 2 * x)

    def grows(state, step):
        double(jnp.ones(4 if step < 4 else 5, jnp.float16))
        return advance(state, step)

    run(here, step=grows, save_every=6)
    (warning,) = [text for text in here.console.warnings if "float16" in text or "f16[5]" in text]
    assert warning.startswith("sft step 5 compiled") and "f16[4]" in warning
    counts = [record["perf/compilations"] for record in read_metrics(tmp_path)]
    assert counts[2:4] == [0, 0] and counts[4] >= 1


def test_a_hang_ends_the_process_and_shows_where_it_was():
    code = "import time\nfrom jrlhf.stages.loop import deadline\nwith deadline(0.2):\n    time.sleep(60)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "Timeout" in ended.stderr and "line 4" in ended.stderr
