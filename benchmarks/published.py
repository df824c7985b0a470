"""Measured times of other systems, for the cost model to be held against.

ReaL (arXiv 2406.14088): PPO of a Llama 3 8B actor and an equal critic on two nodes of eight H100, 512 prompts of 1024
tokens with 1024 generated, 8 minibatches, everything recomputed in backward passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jrlhf.meshes import Call, Graph
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import ModelConfig
from jrlhf.models.hf.presets import PRESETS
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import RoleModel, Workload

# What differs from HARDWARE["h100"] is the engine's, and the same for all calls and sizes. PyTorch of 2024 runs
# products nearer to half of the peak where XLA's kernels measured 0.78; its operators run one by one, so elementwise
# work moves about twice the bytes (`stream`), and NCCL's all-reduces stand alone between them (`collective`). A decoder
# layer's kernels are launched one by one from Python, 0.7 ms, or replayed from a CUDA graph; they read weights and
# cache at 0.8 of the bandwidth.
ENGINE = {"infer": 0.5, "train": 0.7, "decode": 0.8, "stream": 0.45, "collective": 0.4, "launch": 0.2e-3}
REAL = replace(HARDWARE["h100"], name="h100 under ReaL", **ENGINE)
REAL_WITHOUT_GRAPHS = replace(REAL, launch=0.68e-3)

GRAPH = Graph(
    "ppo",
    ("prompts",),
    (
        Call("actor.generate", "actor", "generate", ("prompts",), ("rollout",)),
        Call("reward.score", "reward", "infer", ("rollout",), ("scores",)),
        Call("reference.logprobs", "reference", "infer", ("rollout",), ("ref",)),
        Call("critic.values", "critic", "infer", ("rollout",), ("values",)),
        Call("critic.update", "critic", "train", ("scores", "ref", "values"), ("critic_metrics",)),
        Call("actor.update", "actor", "train", ("scores", "ref", "values", "rollout"), ("actor_metrics",)),
    ),
)


@dataclass(frozen=True)
class Row:
    """One call of the table. seconds: measured. strategy: tensor, pipeline, data, micro-batches as ReaL counts them."""

    call: str
    devices: Slice
    strategy: tuple[int, int, int, int]
    seconds: float
    without_graphs: float | None = None

    @property
    def placement(self) -> Placement:
        """The same in our terms.

        ReaL flushes the pipeline after each of its micro-batches, which it divides into as many parts as there are
        stages (twice as many in training): those are what fills the pipeline.
        """
        tensor, pipeline, data, parts = self.strategy
        train = self.call.endswith("update")
        if pipeline > 1:
            parts = pipeline * (2 if train else 1)
        if self.call == "actor.generate":
            parts = self.strategy[3]
        layout = "train_tp" if train else "generate"
        return Placement(self.devices, layout, data=data, tensor=tensor, pipeline=pipeline, micro_batches=parts)


BOTH, FIRST, SECOND = Slice(0, 16), Slice(0, 8), Slice(8, 8)
SEARCHED = (
    Row("actor.generate", BOTH, (2, 2, 4, 1), 16.3, 34.5),
    Row("reward.score", FIRST, (2, 1, 4, 16), 6.0),
    Row("reference.logprobs", SECOND, (1, 2, 4, 16), 8.0),
    Row("critic.values", BOTH, (1, 2, 8, 8), 4.7),
    Row("critic.update", SECOND, (4, 2, 1, 2), 28.1),
    Row("actor.update", FIRST, (2, 4, 1, 2), 26.6),
)
HEURISTIC = tuple(
    Row(call, BOTH, (8, 1, 2, 4), seconds, without)
    for call, seconds, without in (
        ("actor.generate", 44.2, 104.6),
        ("reward.score", 7.3, None),
        ("reference.logprobs", 7.6, None),
        ("critic.values", 6.8, None),
        ("critic.update", 24.3, None),
        ("actor.update", 24.7, None),
    )
)
# End to end, in seconds: with CUDA graphs and without.
MEASURED = {"searched": (64.0, 82.2), "heuristic": (122.6, 183.0)}


def workload(
    actor: ModelConfig = PRESETS["meta-llama/Meta-Llama-3-8B"], critic: ModelConfig | None = None, **changes: Any
) -> Workload:
    """The table's iteration, of these models."""
    critic = critic or actor
    models: Mapping[str, tuple[RoleModel, ...]] = {
        "actor": (RoleModel(actor, "lm", True),),
        "critic": (RoleModel(critic, "scalar", True),),
        "reference": (RoleModel(actor, "lm", False),),
        "reward": (RoleModel(critic, "scalar", False),),
    }
    settings: dict[str, Any] = {"rows": 512, "prompt": 1024, "response": 1024, "minibatches": 8, "fused_loss": False}
    settings |= {"mean_prompt": 1024.0, "mean_response": 1024.0, "dtype": jnp.dtype(jnp.bfloat16)}
    settings |= {"recomputed_stages": False}
    return Workload(GRAPH, models, **(settings | changes))


def cluster(graphs: bool = True, devices: int = 16) -> Cluster:
    """Nodes of eight H100 under ReaL."""
    return Cluster(REAL if graphs else REAL_WITHOUT_GRAPHS, devices)


def end_to_end(rows: tuple[Row, ...], seconds: Mapping[str, float], on: Cluster, work: Workload) -> float:
    """An iteration of the table's plan, of these seconds a call: generation, inference, training, and what moves.

    Calls of a phase run side by side where their devices are apart: here that is the sum over phases of the longest
    chain on any device. Weights move where a model is trained elsewhere than it is used.
    """
    placed = {row.call: row.placement for row in rows}
    total = 0.0
    for phase in ("generate", "infer", "train"):
        calls = [call for call in GRAPH if call.kind == phase]
        busy = dict.fromkeys(range(on.devices), 0.0)
        for call in calls:  # in the order of the table, all of whose calls are ready
            devices = range(placed[call.name].devices.start, placed[call.name].devices.stop)
            end = max(busy[device] for device in devices) + seconds[call.name]
            busy |= dict.fromkeys(devices, end)
        total += max(busy.values())
    prices = CostModel(work, on)
    total += prices.reallocation("actor", placed["actor.update"], placed["actor.generate"])
    total += prices.reallocation("critic", placed["critic.update"], placed["critic.values"])
    return total
