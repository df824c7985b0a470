"""PPO with models of 7 to 70 billion parameters on clusters, for tests of the search; and a table of prices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jrlhf.meshes import Call, Graph
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.models import ModelConfig
from jrlhf.models.weights import HeadKind
from jrlhf.planning.simulate import simulate
from jrlhf.planning.time import CostModel, Price
from jrlhf.planning.workload import RoleModel, Workload

PPO = Graph(
    "ppo",
    ("prompts",),
    (
        Call("actor.generate", "actor", "generate", ("prompts",), ("rollout",)),
        Call("reward.score", "reward", "infer", ("rollout",), ("scores",)),
        Call("reference.logprobs", "reference", "infer", ("rollout",), ("ref",)),
        Call("critic.values", "critic", "infer", ("rollout",), ("values",)),
        Call("estimator.experience", "estimator", "compute", ("scores", "ref", "values"), ("experience",)),
        Call("critic.update", "critic", "train", ("experience",), ("critic_metrics",)),
        Call("actor.update", "actor", "train", ("experience",), ("actor_metrics",)),
    ),
)


@dataclass(frozen=True)
class Table:
    """Prices that are a table of seconds, with nothing between calls and no memory."""

    seconds: Mapping[str, float]
    capacity: float = 1.0

    def call(self, call: Call, placement: Placement) -> Price:
        return Price(placement, self.seconds[call.name], 0.0, 0.0)

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        return 0.0

    def transfer(self, source: Placement, target: Placement) -> float:
        return 0.0


SIZES = {"7b": (32, 4096, 8, 14336), "34b": (48, 8192, 8, 22016), "70b": (80, 8192, 8, 28672)}
HEADS: dict[str, HeadKind] = {"actor": "lm", "critic": "scalar", "reference": "lm", "reward": "scalar"}


def decoder(name: str) -> ModelConfig:
    layers, embed, kv_heads, mlp = SIZES[name]
    return ModelConfig(
        128256, embed, layers, heads=embed // 128, kv_heads=kv_heads, head_dim=128, mlp=mlp, max_positions=8192
    )


def problem(
    devices: int,
    actor: str = "7b",
    critic: str = "7b",
    rows: int = 512,
    minibatches: int = 8,
    hardware: str = "h100",
    **changes: Any,
) -> CostModel:
    """The prices of PPO with 1024 + 1024 tokens on nodes of eight. changes: of the hardware."""
    models = {
        role: (RoleModel(decoder(critic if head == "scalar" else actor), head, role in ("actor", "critic")),)
        for role, head in HEADS.items()
    }
    workload = Workload(
        PPO, models, rows, 1024, 1024, 1024.0, 1024.0, minibatches=minibatches, dtype=jnp.dtype(jnp.bfloat16)
    )
    cluster = Cluster(replace(HARDWARE[hardware], **changes), devices)
    return CostModel(workload, cluster)


LAYOUTS = {"generate": ("generate",), "infer": ("score", "train_tp"), "train": ("train", "train_tp")}


def assert_runs(plan: Plan, prices: CostModel) -> None:
    """Every call with a model has a place among the devices, in a layout of its kind, without pipelines; axes divide
    models and rows; the devices of two calls are the same, apart, or within each other; and all fits."""
    workload = prices.workload
    calls = {call.name: call for call in workload.graph if call.kind != "compute"}
    assert plan.placements.keys() == calls.keys()
    used = []
    for name, placed in plan.placements.items():
        call, fsdp, tensor = calls[name], placed.fsdp, placed.tensor
        devices = set(range(placed.devices.start, placed.devices.stop))
        assert devices <= set(range(prices.cluster.devices)) and placed.pipeline == 1, name
        assert placed.layout in LAYOUTS[call.kind], name
        assert all(not devices & other or devices <= other or other <= devices for other in used), name
        used.append(devices)
        for model in workload.models[call.role]:
            config = model.config
            sizes = (config.heads, config.mlp, config.padded_vocab, max(config.kv_heads, tensor))
            assert not config.embed % fsdp and not any(size % tensor for size in sizes), name
        parts = placed.micro_batches * (workload.minibatches if call.kind == "train" else 1)
        assert workload.rows % (len(devices) * parts) == 0, name
    assert simulate(workload.graph, plan, prices).peak <= prices.capacity
