"""The predicted memory of calls in stages against arrays and temporaries on the devices while they run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.algorithms.registry import graph_of
from jrlhf.config.schema import Config
from jrlhf.meshes import AXES, SCORE, TRAIN, make_mesh, to_devices
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import ForwardOptions, ModelConfig, init_sharded, make_logprobs, make_scores, make_values, pipeline
from jrlhf.planning.activations import Backend
from jrlhf.planning.memory import call_bytes
from jrlhf.planning.workload import RoleModel, Workload
from jrlhf.ppo import PreferenceBatch, TrainState, make_preference_step
from jrlhf.ppo.updates import run_on_host
from tests.support.live import live_bytes

STAGES, PARTS, ROWS, LENGTH = 4, 8, 8, 128  # rows of a micro-batch
SIZES: Any = {"heads": 8, "kv_heads": 2, "head_dim": 32, "mlp": 768, "max_positions": LENGTH}
MODEL = ModelConfig(2048, embed=256, layers=8, tie_embeddings=False, **SIZES)


def watched(function: Any, peaks: dict[Any, float], sizes: dict[Any, float]) -> Callable[..., Any]:
    """The function of a stage, which also records the bytes on its device: all arrays, and what its program adds."""

    def run(stage: Any, *arguments: Any) -> Any:
        (device,) = jax.tree.leaves(arguments[0])[0].sharding.device_set
        key = function, stage, device
        if key not in sizes:
            needs = function.lower(stage, *arguments).compile().memory_analysis()
            sizes[key] = needs.temp_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
        peaks[device] = max(peaks.get(device, 0.0), on(device) + sizes[key])
        return function(stage, *arguments)

    return run


def on(device: Any) -> float:
    """The bytes of all arrays on a device."""
    return sum(size for (number, _), size in live_bytes().items() if number == device.id)


@pytest.mark.proof("memory")
@pytest.mark.parametrize("schedule, remat", [("1f1b", "full"), ("gpipe", "full"), ("zb-h1", "products")])
def test_memory_of_stages_is_as_predicted(schedule: Any, remat: Any, monkeypatch):
    """The fullest stage of a reward model counts; pairs are twice as many rows."""
    devices, options = jax.devices()[:STAGES], ForwardOptions(remat=remat)
    groups, home = tuple(make_mesh(devices=[device]) for device in devices), make_mesh(1, STAGES, 1, devices=devices)
    stages = pipeline.Stages(MODEL, groups, TRAIN, options, schedule)
    scores, optimizer = make_scores(stages.tail, groups[-1], TRAIN, options), optax.sgd(0.1)
    gradients = partial(run_on_host, gradients_of=stages.gradients)
    step = make_preference_step(scores, optimizer, micro_batches=PARTS, pipeline=gradients)
    side: Any = np.zeros((ROWS * PARTS, LENGTH), np.int32), np.full(ROWS * PARTS, LENGTH, np.int32)
    rows = to_devices(PreferenceBatch(*side, *side), NamedSharding(groups[-1], P(AXES)))
    with jax.set_mesh(home):
        params = init_sharded(MODEL, jax.random.key(0), home, "scalar")
        state = jax.jit(lambda params: TrainState.create(params, optimizer), donate_argnums=0)(params)
    with watching(monkeypatch, devices) as measured, jax.set_mesh(groups[-1]):
        step(state, rows)

    placed = Placement(Slice(0, STAGES), "train", pipeline=STAGES, micro_batches=PARTS, schedule=schedule)
    expected = predicted("critic.update", MODEL, "scalar", 2 * ROWS * PARTS, placed, remat=remat)
    assert expected == pytest.approx(max(measured.values()), rel=0.1), measured


@pytest.mark.proof("memory")
@pytest.mark.parametrize("head, tied, parts", [("lm", False, 8), ("lm", True, 4), ("scalar", True, 4)])
def test_memory_of_scores_in_stages_is_as_predicted(head, tied, parts, monkeypatch):
    devices, options = jax.devices()[:STAGES], ForwardOptions()
    model = replace(MODEL, tie_embeddings=tied)
    groups, home = tuple(make_mesh(devices=[device]) for device in devices), make_mesh(1, STAGES, 1, devices=devices)
    stages = pipeline.Stages(model, groups, SCORE, options)
    make = make_logprobs if head == "lm" else make_values
    function, rows = make(stages.tail, groups[-1], SCORE, options), 8 * ROWS
    tokens = to_devices(np.zeros((rows, LENGTH), np.int32), NamedSharding(groups[-1], P(AXES)))
    with jax.set_mesh(home):
        params = init_sharded(model, jax.random.key(0), home, head)
    with watching(monkeypatch, devices) as measured:
        stages.scores(function, params, (tokens,), (), parts)

    placed = Placement(Slice(0, STAGES), "score", pipeline=STAGES, micro_batches=parts)
    call = "actor.logprobs" if head == "lm" else "critic.values"
    expected = predicted(call, model, head, rows, placed)
    assert expected == pytest.approx(max(measured.values()), rel=0.1), measured


@contextmanager
def watching(monkeypatch: Any, devices: Any) -> Iterator[dict[Any, float]]:
    """Yields the peak of each device in the block, which is there after it: bytes in addition to those before it."""
    before, peaks, sizes = {device: on(device) for device in devices}, dict[Any, float](), dict[Any, float]()
    for name in ("_forward", "_gradients", "_gradient_of_input"):
        monkeypatch.setattr(pipeline, name, watched(getattr(pipeline, name), peaks, sizes))
    yield peaks
    assert peaks.keys() == before.keys()
    for device, size in before.items():
        peaks[device] -= size


def predicted(call: str, model: ModelConfig, head: Any, rows: int, placed: Placement, **settings: Any) -> float:
    """The predicted bytes that a call adds on the fullest device."""
    graph = graph_of(Config(stages=("ppo",)))
    models = {call.partition(".")[0]: (RoleModel(model, head, True),)}
    widths = {"prompt": 3, "response": LENGTH - 3, "mean_prompt": 3.0, "mean_response": LENGTH - 3.0}
    workload = Workload(graph, models, rows, **widths, dtype=jnp.dtype(jnp.float32), **settings)
    return sum(call_bytes(workload, graph[call], placed, Backend("cpu")).active.values())
