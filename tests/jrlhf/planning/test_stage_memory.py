"""The predicted memory of an update in stages against arrays and temporaries on the devices while it runs."""

from collections.abc import Callable
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
from jrlhf.meshes import AXES, TRAIN, make_mesh, to_devices
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import ForwardOptions, ModelConfig, init_sharded, make_scores, pipeline
from jrlhf.planning.activations import Backend
from jrlhf.planning.memory import call_bytes
from jrlhf.planning.workload import RoleModel, Workload
from jrlhf.ppo import PreferenceBatch, TrainState, make_preference_step
from jrlhf.ppo.updates import finish

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
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.full
@pytest.mark.proof("memory")
@pytest.mark.parametrize("schedule, remat", [("1f1b", "full"), ("gpipe", "full"), ("zb-h1", "products")])
def test_memory_of_stages_is_as_predicted(schedule: Any, remat: Any, monkeypatch):
    """The fullest stage of a reward model counts; pairs are twice as many rows."""
    devices, options = jax.devices()[:STAGES], ForwardOptions(remat=remat)
    groups, home = tuple(make_mesh(devices=[device]) for device in devices), make_mesh(1, STAGES, 1, devices=devices)
    stages = pipeline.Stages(MODEL, groups, TRAIN, options, schedule)
    scores, optimizer = make_scores(stages.tail, groups[-1], TRAIN, options), optax.sgd(0.1)
    gradients = partial(finish, gradients_fn=stages.gradients)
    step = make_preference_step(scores, optimizer, micro_batches=PARTS, pipeline=gradients)
    side: Any = np.zeros((ROWS * PARTS, LENGTH), np.int32), np.full(ROWS * PARTS, LENGTH, np.int32)
    rows = to_devices(PreferenceBatch(*side, *side), NamedSharding(groups[-1], P(AXES)))
    with jax.set_mesh(home):
        params = init_sharded(MODEL, jax.random.key(0), home, "scalar")
        state = jax.jit(lambda params: TrainState.create(params, optimizer), donate_argnums=0)(params)
    before, peaks, sizes = {device: on(device) for device in devices}, dict[Any, float](), dict[Any, float]()
    for name in ("_forward", "_gradients", "_gradient_of_input"):
        monkeypatch.setattr(pipeline, name, watched(getattr(pipeline, name), peaks, sizes))
    with jax.set_mesh(groups[-1]):
        step(state, rows)

    graph = graph_of(Config(stages=("ppo",)))
    models = {"critic": (RoleModel(MODEL, "scalar", True),)}
    widths = {"prompt": 3, "response": LENGTH - 3, "mean_prompt": 3.0, "mean_response": LENGTH - 3.0}
    workload = Workload(graph, models, 2 * ROWS * PARTS, **widths, dtype=jnp.dtype(jnp.float32), remat=remat)
    placed = Placement(Slice(0, STAGES), "train", pipeline=STAGES, micro_batches=PARTS, schedule=schedule)
    predicted = sum(call_bytes(workload, graph["critic.update"], placed, Backend("cpu")).active.values())
    measured = {device: peak - before[device] for device, peak in peaks.items()}
    assert len(measured) == STAGES
    assert predicted == pytest.approx(max(measured.values()), rel=0.1), measured
