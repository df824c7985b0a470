"""Predicted seconds of calls and moves: how often a device computes each part of a call, times what the part costs.

A part costs what a roofline says (`Roofline`) or what was measured (`profile.ProfiledCosts`). Parts follow each other:
what a compiler overlaps (gathers with products, say) is not taken off. No constant was fitted to a call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from jrlhf.meshes import Call
from jrlhf.meshes.graph import home_of
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models.remat import Remat
from jrlhf.planning.workload import RoleModel, Workload

Parts = dict[str, float]  # seconds by what they are spent on


class Group(NamedTuple):
    """The devices of one collective: their number, and how many of them are on one node."""

    size: int
    local: int


# ---- moving bytes

_AXES = ("pipeline", "data", "fsdp", "tensor")  # a device's number changes fastest along the last one


def group(placement: Placement, node: int, *axes: str) -> Group:
    """Returns the group of a collective over these neighbouring mesh axes, on nodes of `node` devices."""
    inner = _AXES[_AXES.index(axes[-1]) + 1 :]
    size = prod(getattr(placement, axis) for axis in axes)
    stride = prod(getattr(placement, axis) for axis in inner)
    start = placement.devices.start % node
    here = node if start + min(placement.devices.count, node) <= node else node - start
    return Group(size, max(1, min(size, here // stride)))


def gather_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Predicts an all-gather to `size` bytes on each device, or a reduce-scatter of `size` bytes.

    On a ring every device sends and receives (g - 1) / g of the bytes. Between nodes, as many rings run as the group
    has members on a node, each through its own port (as NCCL does); all of them share the link inside the node.
    """
    if group.size == 1:
        return 0.0
    hardware = cluster.hardware
    inside = hardware.link
    if group.local < group.size:
        inside = min(inside, group.local * hardware.network)
    return (group.size - 1) / group.size * size / (hardware.collective * inside) + hardware.latency


def reduce_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Predicts an all-reduce of `size` bytes: a reduce-scatter and an all-gather, started together."""
    if group.size == 1:
        return 0.0
    return 2 * gather_seconds(cluster, group, size) - cluster.hardware.latency


def reallocation_seconds(size: float, home: Placement, placement: Placement, cluster: Cluster) -> float:
    """Predicts bringing weights of `size` bytes from where they are stored to where, and as, a call needs them.

    A device receives its new shard without the part that it already has. Where one device sends to several, its port
    is the bottleneck.
    """
    if stored_alike(home, placement):
        return 0.0
    received = size * max(0.0, stored_share(placement) - _kept_share(home, placement))
    fanout = max(1.0, placement.devices.count / home.devices.count)
    return _move_seconds(received * fanout, home.devices, placement.devices, cluster)


def transfer_seconds(size: float, source: Placement, target: Placement, cluster: Cluster) -> float:
    """Predicts bringing `size` bytes of rows from one call's devices to another's; rows are on all devices."""
    if source.devices == target.devices:
        return 0.0
    return _move_seconds(
        size / min(source.devices.count, target.devices.count), source.devices, target.devices, cluster
    )


def stored_share(placement: Placement) -> float:
    """Returns the share of a model's matrices that each device stores in this placement."""
    divided = placement.tensor * placement.pipeline
    return 1 / (divided if placement.layout == "generate" else divided * placement.fsdp)


def stored_alike(home: Placement, placement: Placement) -> bool:
    """Returns whether both placements store the same shards: training and scoring layouts store weights alike."""
    same_storage = (home.layout == "generate") == (placement.layout == "generate")
    return same_storage and (home.devices, home.sizes) == (placement.devices, placement.sizes)


def _kept_share(home: Placement, placement: Placement) -> float:
    """Returns the share of the model that every device already has of its new shard, at the least."""
    if not (home.devices.start <= placement.devices.start and placement.devices.stop <= home.devices.stop):
        return 0.0
    old, new = stored_share(home), stored_share(placement)
    if home.sizes == placement.sizes and home.pipeline == placement.pipeline and home.devices == placement.devices:
        return min(old, new)  # the remaining axes stay where they were: one shard contains the other
    if home.pipeline == placement.pipeline and home.tensor == placement.tensor:
        return old * new * home.tensor * home.pipeline  # the same slices of heads and mlp, other slices of embed
    return old * new  # slices of different dimensions cross


def _move_seconds(size: float, source: Slice, target: Slice, cluster: Cluster) -> float:
    """Predicts `size` bytes a device between two slices: over links inside a node, else over the network."""
    hardware, node = cluster.hardware, cluster.node
    first, last = min(source.start, target.start), max(source.stop, target.stop)
    rate = hardware.link if first // node == (last - 1) // node else min(hardware.link, hardware.network)
    return size / (hardware.collective * rate) + hardware.latency


# ---- the parts of a call


class PartCosts(Protocol):
    """What the parts of a call cost a device. tokens, rows: of one device, or of the devices that share them as slices.

    layer: one pass of a layer over rows of `length`; training adds recomputation and backward. head: log-probs over the
    vocabulary. step, draw: a layer of a decode step, and its head with sampling. update: the optimizer, for a share of
    the weights. gather, reduce: collectives. call: an empty program. on: the costs where only `devices` are at work.
    """

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts: ...
    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts: ...
    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts: ...
    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts: ...
    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts: ...
    def gather(self, group: Group, size: float, pieces: int = 1) -> float: ...
    def reduce(self, group: Group, size: float, pieces: int = 1) -> float: ...
    def call(self) -> Parts: ...
    def on(self, devices: int) -> "PartCosts": ...


# Attention's two products reach this share of what plain products reach: 310 of 771 TFLOP/s in a trace of training on
# an H200. Its backward pass has five products where the forward pass has two.
_ATTENTION, _ATTENTION_BACKWARD = 0.4, 2.5
# Passes over a tile of float32 logits: forward it is written and read; for the gradient it is rewritten and read again.
_LOGITS = {False: 2, True: 4}
# Bytes of an update for each float32 weight: AdamW reads weight, gradient and two moments and writes three of them; the
# gradient is read once more for its norm and once for clipping. Each micro-batch reads, adds and writes a gradient.
_UPDATE, _ACCUMULATE = 36, 12
_DRAW = 8  # passes over a row's float32 logits to scale, filter, sample and score a token


@dataclass(frozen=True)
class Roofline:
    """Costs by arithmetic: operations and bytes over the rates that the hardware reaches, and fixed launch times."""

    cluster: Cluster
    dtype: Any
    remat: Remat = "full"
    fused_loss: bool = True

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts:
        numbers = model.numbers
        dense, attention = 2.0 * numbers.layer * tokens, numbers.attention(length) * tokens
        traffic, passes, offloaded = numbers.traffic(slices) * tokens, 1.0, 0.0
        adapters = 2.0 * numbers.adapters * tokens
        if train:
            again, attends = _recomputed(model, self.remat)
            backward = 1.0 if model.lora is not None else 2.0  # a frozen base has no weight gradients
            dense = dense * (1 + backward) + 2.0 * again * tokens + 3 * adapters
            attention *= 1 + _ATTENTION_BACKWARD + attends
            passes = 3.0 if self.remat == "gather" else 4.0
            traffic = traffic * passes + 2 * _saved(model, self.remat) * tokens / slices
            offloaded = 2 * model.config.embed * tokens * self._size if self.remat == "offload" else 0.0
        else:
            dense += adapters
        operations = (dense + attention / _ATTENTION) / slices / self._rate(train)
        read = passes * numbers.layer * self._size / slices / self._stream
        parts = {
            "operations": operations,
            "weights": max(0.0, read - operations),
            "activations": traffic * self._size / self._stream,
            "launches": passes * self.cluster.hardware.launch,
        }
        return parts | ({"host": offloaded / self.cluster.hardware.host} if offloaded else {})

    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts:
        if model.head != "lm":  # a scalar head is a single column
            return {}
        products = (3 if self.fused_loss else 4) if train else 1
        if train and model.lora is not None:
            products -= 1
        operations = 2.0 * products * model.numbers.head * tokens / self._rate(train)
        logits = _LOGITS[train] * 4.0 * model.config.padded_vocab * tokens / self._stream
        return {"operations": operations, "activations": logits}

    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts:
        numbers = model.numbers
        weights = (numbers.layer + numbers.adapters) * self._size / slices / self._decode
        cache = rows * numbers.seen(positions) * numbers.cache * self._size / self._decode
        cache /= min(slices, model.config.kv_heads)  # more slices than kv-heads read the same keys and values
        work = 2.0 * (numbers.layer + numbers.adapters) * rows + numbers.per_pair * rows * numbers.seen(positions)
        operations = work / slices / self._rate(False)
        parts = {"weights": weights, "cache": cache, "launches": self.cluster.hardware.launch}
        return parts | {"operations": max(0.0, operations - weights - cache)}

    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts:
        weights = model.numbers.head * self._size / slices / self._decode
        operations = 2.0 * model.numbers.head * rows / slices / self._rate(False)
        drawn = _DRAW * 4.0 * model.config.padded_vocab * rows / slices / self._stream
        parts = {"weights": weights, "sampling": drawn, "launches": self.cluster.hardware.launch}
        return parts | {"operations": max(0.0, operations - weights)}

    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts:
        size = _UPDATE + (_ACCUMULATE * micro_batches if micro_batches > 1 else 0)
        return {"optimizer": model.numbers.trained * share * size / self._stream}

    def gather(self, group: Group, size: float, pieces: int = 1) -> float:
        return gather_seconds(self.cluster, group, size)  # compilers join the pieces of a layer

    def reduce(self, group: Group, size: float, pieces: int = 1) -> float:
        return reduce_seconds(self.cluster, group, size)

    def call(self) -> Parts:
        return {}

    def on(self, devices: int) -> "Roofline":
        return self  # every device has its own memory and cores

    def _rate(self, train: bool) -> float:
        hardware = self.cluster.hardware
        peak = hardware.bfloat16 if self._size == 2 else hardware.float32
        return peak * (hardware.train if train else hardware.infer)

    @cached_property
    def _size(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @cached_property
    def _stream(self) -> float:
        return self.cluster.hardware.bandwidth * self.cluster.hardware.stream

    @cached_property
    def _decode(self) -> float:
        return self.cluster.hardware.bandwidth * self.cluster.hardware.decode


def _recomputed(model: RoleModel, remat: Remat) -> tuple[float, float]:
    """Returns what the backward pass recomputes (`models.remat`): multiply-adds a token and layer, and attentions."""
    if remat in ("products", "gather"):
        return 0.0, 0.0
    down = model.config.mlp * model.config.embed  # nothing after the mlp's last product is needed again
    return model.numbers.layer - down, 0.0 if remat == "attention" else 1.0


def _saved(model: RoleModel, remat: Remat) -> float:
    """Returns the numbers a token and layer that are written for the backward pass and read again (`models.remat`)."""
    config = model.config
    heads = config.heads * config.head_dim
    products = 2.0 * config.embed + 2.0 * (config.heads + config.kv_heads) * config.head_dim + 2.0 * config.mlp
    attention = config.embed + heads
    saved = {"offload": config.embed, "full": config.embed, "attention": attention, "products": products}
    return 2 * products if remat == "gather" else saved[remat]


# ---- calls


@dataclass(frozen=True)
class CallTime:
    """Seconds of a call on each of its devices, by part. Parts follow each other."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def call_seconds(
    workload: Workload, call: Call, placement: Placement, cluster: Cluster, *, costs: PartCosts | None = None
) -> CallTime:
    """Predicts a call that has a model, from its inputs being there to its outputs, without moving its weights."""
    costs = (costs or roofline(workload, cluster)).on(placement.devices.count)
    seconds = {"generate": _generate, "infer": _infer, "train": _train}[call.kind]
    total: Parts = {}
    for model in workload.models[call.role]:
        _add(total, seconds(_Divided(workload, model, placement, cluster.node, costs), call))
    return CallTime(total)


def roofline(workload: Workload, cluster: Cluster) -> Roofline:
    return Roofline(cluster, workload.dtype, workload.remat, workload.fused_loss)


@dataclass(frozen=True)
class _Divided:
    """One model and its rows, divided by a placement.

    Layouts "train" and "score" compute with whole layers: every device has rows of its own and gathers each layer's
    weights. The others compute with slices of heads and mlp: the devices of a tensor group share their rows.
    """

    workload: Workload
    model: RoleModel
    placement: Placement
    node: int
    costs: PartCosts

    @cached_property
    def whole_layers(self) -> bool:
        return self.placement.layout in ("train", "score")

    @cached_property
    def slices(self) -> int:
        return 1 if self.whole_layers else self.placement.tensor

    @cached_property
    def layers(self) -> float:
        return self.model.config.layers / self.placement.pipeline

    @cached_property
    def size(self) -> int:
        return jnp.dtype(self.workload.dtype).itemsize

    def group(self, axis: str) -> Group:
        return group(self.placement, self.node, axis)

    def rows(self, rows: float, parts: int) -> int:
        """Returns the rows of a device, or of its tensor group, in one of `parts` parts."""
        ways = self.placement.data * self.placement.fsdp * (self.placement.tensor if self.whole_layers else 1)
        return ceil(rows / ways / parts)

    def hop(self, tokens: float) -> float:
        """Predicts handing hidden states to the next pipeline stage."""
        size = 2 * tokens * self.model.config.embed * self.size
        return self.costs.gather(Group(2, min(2, self.group("pipeline").local)), size)

    @cached_property
    def weights(self) -> "_Weights":
        """The collectives over the model's weights and gradients."""
        config, placement = self.model.config, self.placement
        return _Weights(
            stored=Group(1, 1) if placement.layout == "generate" else self.group("fsdp"),
            regathered=self.group("tensor") if self.whole_layers else Group(1, 1),
            table=self.group("fsdp") if placement.fsdp > 1 and placement.layout != "generate" else Group(1, 1),
            matrices=7 if config.gated_mlp else 6,
            layer_bytes=self.model.numbers.layer * self.size / self.slices,
            table_bytes=config.padded_vocab * config.embed * self.size / placement.tensor,
            tables=2 if self.model.head == "lm" else 1,
        )

    def stage(self, tokens: float, train: bool) -> Parts:
        """Predicts some rows through the last pipeline stage. It has the head too, so all others wait for it."""
        costs, workload, model = self.costs, self.workload, self.model
        parts = dict(costs.layer(model, tokens, workload.length, self.slices, train))
        for name in parts:
            parts[name] *= self.layers
        spans = model.head == "lm" and ("train" if train else "infer") in workload.spanned
        predicted = workload.response / (workload.prompt + workload.response) if spans else 1.0
        _add(parts, costs.head(model, predicted * tokens / self.slices, train))
        tensor, turns = self.group("tensor"), 2 if train else 1
        # Slices: a layer has two partial sums, one after attention and one after the mlp, forward and again backward;
        # recomputing the layer repeats the first one, whose result the mlp reads.
        sums = 2 * turns + (1 if train and workload.remat in ("full", "offload", "attention") else 0)
        width = model.config.embed * self.size
        reduced = costs.reduce(tensor, tokens * width) if self.slices > 1 else 0.0
        # Whole layers: tokens of the tensor group meet at each device's slice of the vocabulary. An embedding meets all
        # tokens, an unembedding those that are predicted.
        sharers = self.placement.tensor if self.whole_layers else 1
        passed = costs.gather(tensor, sharers * tokens * width) if sharers > 1 else 0.0
        tables = self.weights.tables - 1 + predicted
        parts["tensor"] = sums * self.layers * reduced + tables * turns * passed
        parts["gathers"] = self.weights.gathers(costs, self.layers, train, model.lora is not None)
        if self.placement.pipeline > 1:
            parts["stages"] = turns * self.hop(tokens)
        return parts

    def piped(self, part: Parts, parts: int, turns: int) -> Parts:
        """Predicts `turns` parts through the stages; after every `parts` of them the stages run dry."""
        stages = self.placement.pipeline
        total = {name: seconds * turns for name, seconds in part.items()}
        if stages > 1:
            total["bubble"] = (stages - 1) / parts * sum(part.values()) * turns
        return total


@dataclass(frozen=True)
class _Weights:
    """Groups that weights are gathered over, and the bytes of a layer and of an embedding table."""

    stored: Group
    regathered: Group  # stored as slices, computed with whole
    table: Group
    matrices: int
    layer_bytes: float
    table_bytes: float
    tables: int

    def gathers(self, costs: PartCosts, layers: float, train: bool, adapter: bool) -> float:
        """Predicts gathering weights where they are used, twice in training, and scattering their gradients."""
        turns = 3 if train and not adapter else 2 if train else 1
        layer = turns * costs.gather(self.stored, self.layer_bytes / self.regathered.size, self.matrices)
        layer += turns * costs.gather(self.regathered, self.layer_bytes, self.matrices)
        tables = turns * costs.gather(self.table, self.table_bytes) if self.table.size > 1 else 0.0
        return layers * layer + self.tables * tables

    def sums(self, costs: PartCosts, layers: float, data: Group, fsdp: int, size: int) -> float:
        """Predicts summing gradients over `data`: scattered ones layer by layer, whole ones in float32 all at once."""
        divided = self.stored.size * self.regathered.size
        if divided == 1:
            summed = costs.reduce(data, layers * self.layer_bytes * 4 / size, self.matrices)
        else:
            summed = layers * costs.reduce(data, self.layer_bytes / divided, self.matrices)
        return summed + self.tables * costs.reduce(data, self.table_bytes / fsdp)


def _infer(divided: _Divided, call: Call) -> Parts:
    workload, parts = divided.workload, divided.placement.micro_batches
    tokens = divided.rows(workload.rows_of(call), parts) * workload.length
    return divided.piped(divided.stage(tokens, False), parts, parts) | divided.costs.call()


def _train(divided: _Divided, call: Call) -> Parts:
    workload, placement, costs = divided.workload, divided.placement, divided.costs
    parts, updates = placement.micro_batches, workload.epochs * workload.minibatches
    tokens = divided.rows(workload.rows / workload.minibatches, parts) * workload.length
    total = divided.piped(divided.stage(tokens, True), parts, updates * parts)
    data = divided.group("data")
    if data.size > 1 and divided.model.lora is None:
        # Every micro-batch sums its gradients over `data`; a pipeline sums once, after its last part.
        summed = divided.weights.sums(costs, divided.layers, data, placement.fsdp, divided.size)
        total["gathers"] += updates * (parts if placement.pipeline == 1 else 1) * summed
    _add(total, costs.update(divided.model, stored_share(placement), parts), updates)
    return total | costs.call()


def _generate(divided: _Divided, call: Call) -> Parts:
    """Predicts prefill and decoding, `micro_batches` times over a part of the rows. A prompt's samples share a prefill.

    Without slots, rows that are done decode on until the last one is. With slots, a new row takes the place of a
    finished one: all but the last row of a slot have the mean length.
    """
    workload, costs, model, placement = divided.workload, divided.costs, divided.model, divided.placement
    rows = ceil(workload.rows / placement.micro_batches)
    slots = rows if workload.slots is None else min(rows, workload.slots)
    refilled = rows / slots - 1
    steps = refilled * workload.mean_response + workload.response
    positions = workload.mean_prompt + (workload.mean_response if refilled else workload.response) / 2
    # In a pipeline the slots go round in as many parts as there are stages; one step of all slots takes each stage as
    # many turns.
    stages, slices, tensor = placement.pipeline, divided.slices, divided.group("tensor")
    here = divided.rows(slots, stages)
    step = {name: divided.layers * part for name, part in costs.step(model, here, positions, slices).items()}
    _add(step, costs.draw(model, here, slices))
    width = model.config.embed * divided.size
    if slices > 1:
        step["tensor"] = (2 * divided.layers + 1) * costs.reduce(tensor, here * width)
        step["tensor"] += costs.gather(tensor, here * model.config.padded_vocab * 4 / slices)
    if stages > 1:
        step["stages"] = divided.hop(here)
    filled = divided.rows(rows / workload.samples, stages) * workload.prompt
    prefill = {
        name: divided.layers * part for name, part in costs.layer(model, filled, workload.prompt, slices, False).items()
    }
    if slices > 1:
        prefill["tensor"] = 2 * divided.layers * costs.reduce(tensor, filled * width)
    total: Parts = {}
    _add(total, divided.piped(prefill, stages, stages), placement.micro_batches)
    _add(total, step, placement.micro_batches * stages * steps)
    return total | costs.call()


def _add(total: Parts, parts: Mapping[str, float], times: float = 1.0) -> None:
    for name, seconds in parts.items():
        total[name] = total.get(name, 0.0) + times * seconds


# ---- what the simulator and the search ask for


@dataclass(frozen=True)
class Price:
    """Costs of one call in one placement, on each of its devices.

    resident: bytes that its role keeps there between calls. active: further bytes while it runs. moved: bytes of the
    copy of the weights, if the role is stored elsewhere.
    """

    seconds: float
    resident: float
    active: float
    moved: float = 0.0


class Prices(Protocol):
    """A role is stored where it is trained, or else where its first call runs; in other calls `resident` is 0. What
    roles share is counted in one call. reallocation: seconds to bring weights to a call. transfer: seconds to bring
    values from one call to another. capacity: bytes of a device."""

    def call(self, call: Call, placement: Placement) -> Price: ...
    def reallocation(self, role: str, home: Placement, placement: Placement) -> float: ...
    def transfer(self, source: Placement, target: Placement) -> float: ...
    @property
    def capacity(self) -> float: ...


_HANDED_OVER = 5  # numbers a token that one call hands to another: tokens, and what models say about them


class CostModel:
    """The prices of a workload's calls on a cluster, each computed once.

    bytes_of: (workload, call, placement) -> bytes of a device, as `memory.call_bytes`. costs: of parts; None: Roofline.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        bytes_of: Callable[[Workload, Call, Placement], Any],
        costs: PartCosts | None = None,
    ):
        self._workload, self._cluster, self._bytes = workload, cluster, bytes_of
        self._costs = costs or roofline(workload, cluster)
        on_base = [role for role in workload.models if workload.on_base(role)]
        self._base = home_of(workload.graph, on_base[0]) if on_base else None  # the base is counted in this call only
        self._calls: dict[Any, Price] = {}
        self._moves: dict[Any, float] = {}

    @property
    def capacity(self) -> float:
        return self._cluster.hardware.memory

    def call(self, call: Call, placement: Placement) -> Price:
        key = call.name, placement
        if key not in self._calls:
            seconds = call_seconds(self._workload, call, placement, self._cluster, costs=self._costs).seconds
            sizes = self._bytes(self._workload, call, placement)
            stored = sizes.resident if home_of(self._workload.graph, call.role) == call else {}
            resident = sum(size for part, size in stored.items() if part != "base" or call == self._base)
            self._calls[key] = Price(seconds, resident, sum(sizes.active.values()), sizes.moved)
        return self._calls[key]

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        key = role, home, placement
        if key not in self._moves:
            size = sum(self._moved_bytes(model) for model in self._workload.models[role])
            self._moves[key] = reallocation_seconds(size, home, placement, self._cluster)
        return self._moves[key]

    def _moved_bytes(self, model: RoleModel) -> float:
        """Returns what travels when a model is resharded: matrices in the compute dtype, adapters in float32."""
        itemsize = 4.0 if model.lora is not None else jnp.dtype(self._workload.dtype).itemsize
        return model.numbers.trained * itemsize

    def transfer(self, source: Placement, target: Placement) -> float:
        size = 4.0 * _HANDED_OVER * self._workload.rows * self._workload.length
        return transfer_seconds(size, source, target, self._cluster)
