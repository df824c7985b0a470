"""Prices by a handful of physical numbers, for tests of the search: a cluster of decoders, nodes and links.

Passes over whole sequences are bound by operations and by their collectives, decoding by the bytes of weights and
cache; states, gathered copies, cache and activations are counted. It is written apart from the program's own estimates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jrlhf.meshes import Call, Graph
from jrlhf.meshes.graph import home_of
from jrlhf.meshes.hardware import Cluster, Hardware
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.models import ModelConfig
from jrlhf.planning.simulate import simulate
from jrlhf.planning.time import Price
from jrlhf.planning.workload import RoleModel, Workload

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """A decoder's numbers."""

    params: float
    layers: int
    embed: int
    kv: int  # kv-heads x head_dim


SIZES = {
    "7b": Size(8.03e9, 32, 4096, 1024),
    "13b": Size(14.0e9, 40, 5120, 5120),
    "34b": Size(35.3e9, 48, 8192, 1024),
    "70b": Size(70.6e9, 80, 8192, 1024),
}

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
class Physical:
    """Prices of a graph's calls for models of these sizes.

    Rates are of a device: bfloat16 operations, bytes of memory, of links within and between nodes.
    """

    graph: Graph
    sizes: Mapping[str, Size]
    rows: int
    prompt: int
    response: int
    minibatches: int = 8
    flops: float = 989e12
    memory: float = 80 * GIB
    bandwidth: float = 3.35e12
    node: int = 8
    link: float = 300e9
    network: float = 50e9
    train: float = 0.4
    infer: float = 0.5
    latency: float = 20e-6
    hidden: bool = True  # whether weights are gathered while the layer before computes

    @property
    def capacity(self) -> float:
        return self.memory

    def call(self, call: Call, placement: Placement) -> Price:
        size = self.sizes[call.role]
        home = home_of(self.graph, call.role) == call
        count, parts = placement.devices.count, placement.fsdp * placement.tensor * placement.pipeline
        resident = (16.0 if call.kind == "train" else 2.0) * size.params / parts if home else 0.0
        kind = {"generate": self._generate, "infer": self._infer, "train": self._train}[call.kind]
        seconds, active = kind(size, placement)
        moved = 0.0 if home else 2 * size.params / (placement.tensor * placement.pipeline)
        if call.kind != "generate" and not home:
            moved /= placement.fsdp
        stages = placement.pipeline
        bubble = (stages - 1 + placement.micro_batches) / placement.micro_batches
        assert count == placement.data * parts
        return Price(seconds * bubble, resident, active + moved)

    def _generate(self, size: Size, placement: Placement) -> tuple[float, float]:
        tensor, stages = placement.tensor, placement.pipeline
        rows = self.rows / (placement.data * placement.fsdp)
        cache = 4 * size.layers * rows * size.kv * (self.prompt + self.response) / (tensor * stages)
        read = 2 * size.params / tensor + 0.75 * cache * stages
        compute = 2 * size.params * rows / tensor / (self.flops * self.infer)
        collectives = 2 * size.layers * self._reduce(2 * rows * size.embed, tensor) if tensor > 1 else 0.0
        step = max(read / (0.7 * self.bandwidth), compute) + collectives + size.layers * 15e-6
        prefill = 2 * size.params * rows * self.prompt / tensor / (self.flops * self.infer)
        return prefill + self.response * step, cache

    def _infer(self, size: Size, placement: Placement) -> tuple[float, float]:
        tokens = self.rows * (self.prompt + self.response) / placement.devices.count
        compute = 2 * size.params * tokens / (self.flops * self.infer)
        gathers = placement.micro_batches * self._gathers(size, placement)
        layers = placement.micro_batches * size.layers * 50e-6
        activations = 20 * tokens / placement.micro_batches * size.embed
        return self._both(compute, gathers) + layers, activations + 4 * size.params / size.layers

    def _train(self, size: Size, placement: Placement) -> tuple[float, float]:
        tensor = placement.tensor if placement.layout == "train_tp" else 1
        tokens = self.rows * (self.prompt + self.response) / placement.devices.count
        passes = self.minibatches * placement.micro_batches
        compute = 8 * size.params * tokens / (self.flops * self.train)
        gathers = 3 * passes * self._gathers(size, placement)
        own = tokens * tensor / passes
        reduced = 6 * passes * size.layers * self._reduce(2 * own * size.embed, tensor) if tensor > 1 else 0.0
        replicas = self.minibatches * self._across(
            placement.data, 4 * size.params / (placement.fsdp * placement.tensor)
        )
        optimizer = self.minibatches * 16 * size.params / placement.devices.count * placement.data / self.bandwidth
        saved = 2 * own * size.embed * size.layers / placement.pipeline + 34 * own * size.embed / tensor
        grads = 4 * size.params / (placement.fsdp * placement.tensor * placement.pipeline)
        seconds = self._both(compute, gathers) + reduced + replicas + optimizer + passes * size.layers * 150e-6
        return seconds, saved + grads + 4 * size.params / size.layers

    def _both(self, compute: float, gathers: float) -> float:
        return max(compute, gathers) if self.hidden else compute + gathers

    def _gathers(self, size: Size, placement: Placement) -> float:
        """A whole model's weights to each device, a layer at a time; slices stay slices in train_tp."""
        slices = placement.tensor if placement.layout == "train_tp" else 1
        shards = placement.fsdp * placement.tensor // slices
        return self._across(shards * placement.tensor, 2 * size.params / slices) if shards > 1 else 0.0

    def _across(self, count: int, size: float) -> float:
        if count == 1:
            return 0.0
        return size / (self.link if count <= self.node else self.network * self.node / 2) + self.latency

    def _reduce(self, size: float, count: int) -> float:
        return 2 * (count - 1) / count * size / (self.link if count <= self.node else self.network) + self.latency

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        size = 2 * self.sizes[role].params
        inside = home.devices == placement.devices
        if inside and home.sizes == placement.sizes and placement.layout != "generate":
            return 0.0
        received = size / placement.tensor / (1 if placement.layout == "generate" else placement.fsdp)
        together = min(home.devices.start, placement.devices.start), max(home.devices.stop, placement.devices.stop)
        near = together[1] - together[0] <= self.node
        return received / (self.link if near else self.network) + 0.01

    def transfer(self, source: Placement, target: Placement) -> float:
        if source.devices == target.devices and source.sizes == target.sizes:
            return 0.0
        size = 24 * self.rows * (self.prompt + self.response)
        return size / min(source.devices.count, target.devices.count) / self.network + 1e-3


@dataclass(frozen=True)
class Table:
    """Prices that are a table of seconds, with nothing between calls and no memory."""

    seconds: Mapping[str, float]
    capacity: float = 1.0

    def call(self, call: Call, placement: Placement) -> Price:
        return Price(self.seconds[call.name], 0.0, 0.0)

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        return 0.0

    def transfer(self, source: Placement, target: Placement) -> float:
        return 0.0


def decoder(name: str) -> ModelConfig:
    """The configuration whose numbers are `SIZES[name]`'s."""
    size = SIZES[name]
    heads, mlp = size.embed // 128, {"7b": 14336, "13b": 13824, "34b": 22016, "70b": 28672}[name]
    return ModelConfig(
        vocab_size=128256,
        embed=size.embed,
        layers=size.layers,
        heads=heads,
        kv_heads=size.kv // 128,
        head_dim=128,
        mlp=mlp,
        max_positions=8192,
    )


def problem(
    devices: int, actor: str = "7b", critic: str = "7b", rows: int = 512, minibatches: int = 8, **rates: Any
) -> tuple[Workload, Cluster, Physical]:
    """PPO with 1024 + 1024 tokens on nodes of eight, and its prices."""
    names = {"actor": actor, "critic": critic, "reference": actor, "reward": critic}
    models = {
        role: (RoleModel(decoder(name), "lm" if name == actor else "scalar", role in ("actor", "critic")),)
        for role, name in names.items()
    }
    workload = Workload(PPO, models, rows, 1024, 1024, 1024.0, 1024.0, minibatches=minibatches)
    sizes = {role: SIZES[name] for role, name in names.items()}
    prices = Physical(PPO, sizes, rows, 1024, 1024, minibatches, **rates)
    hardware = Hardware(
        "synthetic",
        prices.memory,
        prices.bandwidth,
        prices.flops,
        prices.flops / 16,
        prices.node,
        prices.link,
        prices.network,
        prices.network,
        prices.infer,
        prices.train,
        0.7,
        15e-6,
        prices.latency,
    )
    return workload, Cluster(hardware, devices), prices


LAYOUTS = {"generate": ("generate",), "infer": ("score", "train_tp"), "train": ("train", "train_tp")}


def assert_runs(workload: Workload, plan: Plan, cluster: Cluster, prices: Physical) -> None:
    """Every call with a model has a place among the devices, in a layout of its kind, without pipelines; axes divide
    models and rows; the devices of two calls are the same, apart, or within each other; and all fits."""
    calls = {call.name: call for call in workload.graph if call.kind != "compute"}
    assert plan.placements.keys() == calls.keys()
    used = []
    for name, placed in plan.placements.items():
        call, fsdp, tensor = calls[name], placed.fsdp, placed.tensor
        devices = set(range(placed.devices.start, placed.devices.stop))
        assert devices <= set(range(cluster.devices)) and placed.pipeline == 1, name
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
