"""Predicts the seconds of calls and moves: how often a device computes each part of a call, times the part's cost.

The cost of a part is computed from a roofline (`Roofline`) or measured (`profile.ProfiledCosts`). Parts are added up:
overlap by the compiler (of gathers with products, say) is ignored. No constant was fitted to a call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import Any, Protocol

from jrlhf.meshes.graph import Call
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.pipeline import SCHEDULES, makespan
from jrlhf.meshes.plan import Placement
from jrlhf.models.remat import Remat
from jrlhf.planning import moves
from jrlhf.planning.activations import DEFAULT, Backend
from jrlhf.planning.memory import Away, call_bytes, state_bytes
from jrlhf.planning.moves import DeviceGroup
from jrlhf.planning.workload import RoleModel, Workload
from jrlhf.roles.graph import LEARNED, LEARNER, home_of

Parts = dict[str, float]  # seconds of a device by kind of work; parts follow each other


# ---- the parts of a call


class PartCosts(Protocol):
    """Costs of the parts of a call on a device. tokens, rows: of one device, or of a group that computes in slices.

    layer: one pass of a layer over rows of `length`; training adds recomputation and backward. head: log-probs over the
    vocabulary. step, draw: a layer of a decode step, and its head with sampling. update: the optimizer, for a share of
    the weights. gather, reduce: collectives. call: an empty program. on: the costs if only `devices` of them work.
    """

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts: ...
    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts: ...
    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts: ...
    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts: ...
    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts: ...
    def gather(self, group: DeviceGroup, size: float, pieces: int = 1) -> float: ...
    def reduce(self, group: DeviceGroup, size: float, pieces: int = 1) -> float: ...
    def call(self) -> Parts: ...
    def on(self, devices: int) -> "PartCosts": ...


# Attention's two products reach this share of the rate of plain products: 310 of 771 TFLOP/s in a trace of training on
# an H200. Its backward pass has five products, the forward pass two.
_ATTENTION, _ATTENTION_BACKWARD = 0.4, 2.5
# Passes over a tile of float32 logits: forward it is written and read; for the gradient it is rewritten and read again.
_LOGITS = {False: 2, True: 4}
# Bytes of an update per float32 weight: AdamW reads weight, gradient and two moments and writes three of them; the
# gradient is read once more for its norm and once for clipping. Each micro-batch reads, adds and writes a gradient.
_UPDATE, _ACCUMULATE = 36, 12
_DRAW = 8  # passes over a row's float32 logits to scale, filter, sample and score a token


class Roofline:
    """Costs computed from operations and bytes, the rates that the hardware reaches, and fixed launch times."""

    def __init__(self, workload: Workload, cluster: Cluster):
        hardware = cluster.hardware
        self._workload, self._cluster, self._size = workload, cluster, workload.itemsize
        peak = hardware.bfloat16 if self._size == 2 else hardware.float32
        self._rates = {True: peak * hardware.train, False: peak * hardware.infer}
        self._stream, self._decode = hardware.bandwidth * hardware.stream, hardware.bandwidth * hardware.decode

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts:
        numbers, hardware, remat = model.numbers, self._cluster.hardware, self._workload.remat
        dense, attention = 2.0 * numbers.layer * tokens, numbers.attention(length) * tokens
        adapters, traffic, passes = 2.0 * numbers.adapters * tokens, numbers.traffic(slices) * tokens, 1.0
        if train:
            again, attends, saved = _rematerialized(model, remat)
            backward = 1.0 if model.lora is not None else 2.0  # a frozen base has no weight gradients
            dense = dense * (1 + backward) + 2.0 * again * tokens + 3 * adapters
            attention *= 1 + _ATTENTION_BACKWARD + attends
            passes = 3.0 if remat == "gather" else 4.0
            traffic = traffic * passes + 2 * saved * tokens / slices
        else:
            dense += adapters
        operations = (dense + attention / _ATTENTION) / slices / self._rates[train]
        read = passes * numbers.layer * self._size / slices / self._stream
        parts = {
            "operations": operations,
            "weights": max(0.0, read - operations),
            "activations": traffic * self._size / self._stream,
            "launches": passes * hardware.launch,
        }
        if train and remat == "offload":
            parts["host"] = 2 * model.config.embed * tokens * self._size / hardware.host
        return parts

    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts:
        if model.head != "lm":  # a scalar head is a single column
            return {}
        products = (3 if self._workload.fused_loss else 4) - (model.lora is not None) if train else 1
        operations = 2.0 * products * model.numbers.head * tokens / self._rates[train]
        logits = _LOGITS[train] * 4.0 * model.config.padded_vocab * tokens / self._stream
        return {"operations": operations, "activations": logits}

    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts:
        numbers = model.numbers
        weights = (numbers.layer + numbers.adapters) * self._size / slices / self._decode
        cache = rows * numbers.seen(positions) * numbers.cache * self._size / self._decode
        cache /= min(slices, model.config.kv_heads)  # more slices than kv-heads read the same keys and values
        work = 2.0 * (numbers.layer + numbers.adapters) * rows + numbers.per_pair * rows * numbers.seen(positions)
        operations = work / slices / self._rates[False]
        parts = {"weights": weights, "cache": cache, "launches": self._cluster.hardware.launch}
        return parts | {"operations": max(0.0, operations - weights - cache)}

    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts:
        weights = model.numbers.head * self._size / slices / self._decode
        operations = 2.0 * model.numbers.head * rows / slices / self._rates[False]
        drawn = _DRAW * 4.0 * model.config.padded_vocab * rows / slices / self._stream
        parts = {"weights": weights, "sampling": drawn, "launches": self._cluster.hardware.launch}
        return parts | {"operations": max(0.0, operations - weights)}

    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts:
        size = _UPDATE + (_ACCUMULATE * micro_batches if micro_batches > 1 else 0)
        return {"optimizer": model.numbers.trained * share * size / self._stream}

    def gather(self, group: DeviceGroup, size: float, pieces: int = 1) -> float:
        return moves.gather_seconds(self._cluster, group, size)  # compilers combine the pieces of a layer

    def reduce(self, group: DeviceGroup, size: float, pieces: int = 1) -> float:
        return moves.reduce_seconds(self._cluster, group, size)

    def call(self) -> Parts:
        return {}

    def on(self, devices: int) -> "Roofline":
        return self  # every device has its own memory and cores


def _rematerialized(model: RoleModel, remat: Remat) -> tuple[float, float, float]:
    """Returns multiply-adds and attentions that a layer's backward pass repeats for a token, and numbers saved for it.

    Saved numbers are written by the forward pass and read by the backward pass (`models.remat`).
    """
    config = model.config
    products = 2.0 * config.embed + 2.0 * (config.heads + config.kv_heads) * config.head_dim + 2.0 * config.mlp
    again = model.numbers.layer - config.mlp * config.embed  # the mlp's last product is not repeated
    match remat:
        case "products":
            return 0.0, 0.0, products
        case "gather":
            return 0.0, 0.0, 2 * products
        case "attention":
            return again, 0.0, config.embed + config.heads * config.head_dim
    return again, 1.0, config.embed


# ---- calls


class DividedCall:
    """A call of one model in a placement. `generate`, `infer` and `train` predict the call, other methods its parts.

    Layouts "train" and "score" compute with whole layers: every device has its own rows and gathers each layer's
    weights. The others compute with slices of heads and mlp: the devices of a tensor group share their rows.
    """

    def __init__(
        self, workload: Workload, model: RoleModel, rows: int, placement: Placement, node: int, costs: PartCosts
    ):
        config = model.config
        self.workload, self.model, self.batch, self.costs = workload, model, rows, costs
        self.placement, self.node = placement, node
        self.slices, self.layers = placement.slices, config.layers / placement.pipeline
        self.matrices, self.tables = 7 if config.gated_mlp else 6, 2 if model.head == "lm" else 1
        # Bytes of a token's hidden state, of a layer in the compute layout, and of a device's slice of a table.
        self.width = config.embed * workload.itemsize
        self.layer = model.numbers.layer * workload.itemsize / self.slices
        self.table = config.padded_vocab * self.width / placement.tensor
        self.tensor, alone = self.group("tensor"), DeviceGroup(1, 1)
        # A layer is gathered over fsdp and, if slices are stored but whole layers computed, over tensor; embedding
        # tables are gathered only over fsdp.
        by_fsdp = alone if placement.layout == "generate" else self.group("fsdp")
        self.gathered = by_fsdp, self.tensor if self.slices == 1 else alone

    def group(self, axis: str) -> DeviceGroup:
        return moves.group(self.placement, self.node, axis)

    def rows(self, rows: float, parts: int) -> int:
        """Returns the rows of a device, or of its tensor group, in one of `parts` parts."""
        ways = prod(self.placement.sizes) // self.slices
        return ceil(rows / ways / parts)

    def hop(self, tokens: float) -> float:
        """Predicts sending hidden states to the next pipeline stage."""
        return self.costs.gather(DeviceGroup(2, min(2, self.group("pipeline").local)), 2 * tokens * self.width)

    def stage(self, tokens: float, train: bool, head: bool = True) -> Parts:
        """Predicts the passes of some rows through the last pipeline stage, or a stage without head and tables."""
        costs, workload, model = self.costs, self.workload, self.model
        parts: Parts = {}
        _add(parts, costs.layer(model, tokens, workload.length, self.slices, train), self.layers)
        spans = model.head == "lm" and ("train" if train else "infer") in workload.spanned
        predicted = workload.response / (workload.prompt + workload.response) if spans else 1.0
        if head:
            _add(parts, costs.head(model, predicted * tokens / self.slices, train))
        turns = 2 if train else 1
        # Slices: a layer sums partial results after attention and after the mlp, forward and backward; recomputing the
        # layer repeats the first sum, whose result the mlp reads.
        sums = 2 * turns + (1 if train and workload.remat in ("full", "offload", "attention") else 0)
        reduced = costs.reduce(self.tensor, tokens * self.width) if self.slices > 1 else 0.0
        # Whole layers: tokens of the tensor group are gathered at each device's slice of the vocabulary; all tokens for
        # an embedding, the predicted ones for an unembedding.
        sharers = self.placement.tensor // self.slices
        passed = costs.gather(self.tensor, sharers * tokens * self.width) if sharers > 1 else 0.0
        tables = self.tables - 1 + predicted if head else 0
        parts["tensor"] = sums * self.layers * reduced + tables * turns * passed
        parts["gathers"] = self.gathers(train, self.tables if head else 0)
        if self.placement.pipeline > 1:
            chunks = 2 if self.placement.schedule == "interleaved" else 1  # each sends its result
            parts["stages"] = chunks * turns * self.hop(tokens)
        return parts

    def piped(self, part: Parts, parts: int, turns: int) -> Parts:
        """Predicts the passes of `turns` parts through the stages; after every `parts` of them the pipeline drains."""
        stages = self.placement.pipeline
        total = {name: seconds * turns for name, seconds in part.items()}
        if stages > 1:
            total["bubble"] = (stages - 1) / parts * sum(part.values()) * turns
        return total

    def bubble(self, forward: float, both: float) -> float:
        """Predicts how long a device waits in an update: the makespan of its schedule's table minus its work."""
        parts = self.placement.micro_batches
        table = SCHEDULES[self.placement.schedule](self.placement.pipeline, parts)
        (pipeline,) = table.pipelines
        chunks = len(pipeline.devices) // table.devices
        weight = (both - forward) / (1 + self.repeated) if pipeline.split else 0.0
        costs = {"forward": forward / chunks, "backward": (both - forward - weight) / chunks, "weight": weight}
        return makespan(table, lambda step: costs[step.kind]) - parts * both

    def gathers(self, train: bool, tables: int) -> float:
        """Predicts the gathers of weights, twice in training, and the reduce-scatters of gradients."""
        (fsdp, tensor), gather = self.gathered, self.costs.gather
        turns = 1 if not train else 2 if self.model.lora is not None else 3
        layers = turns * gather(fsdp, self.layer / tensor.size, self.matrices)
        layers += turns * gather(tensor, self.layer, self.matrices)
        return self.layers * layers + tables * (turns * gather(fsdp, self.table))

    def sums(self) -> float:
        """Predicts the sums of gradients over data: scattered ones by layer, whole ones in float32 at once."""
        data, reduce, shards = self.group("data"), self.costs.reduce, prod(group.size for group in self.gathered)
        if shards == 1:
            summed = reduce(data, self.layers * self.layer * 4 / self.workload.itemsize, self.matrices)
        else:
            summed = self.layers * reduce(data, self.layer / shards, self.matrices)
        return summed + self.tables * reduce(data, self.table / self.placement.fsdp)

    def infer(self) -> Parts:
        parts = self.placement.micro_batches
        total = self.piped(self.stage(self.rows(self.batch, parts) * self.workload.length, False), parts, parts)
        if "stages" in total and self.workload.recomputed_stages and self.placement.layout != "generate":
            # Every stage gets its weights from all devices, in the compute dtype.
            size = self.layers * self.layer * self.slices / self.placement.tensor + self.table
            total["stages"] += self.costs.gather(self.group("pipeline"), size / self.placement.fsdp)
        return total

    @property
    def trained_tokens(self) -> float:
        """The tokens of a micro-batch on a device, or on its tensor group."""
        return self.rows(self.batch / self.workload.minibatches, self.placement.micro_batches) * self.workload.length

    def trained(self) -> tuple[Parts, Parts]:
        """Predicts a micro-batch on the fullest stage: its forward operation, and both operations together.

        The last stage, which has the head, computes in its backward operation only; all others compute their forward
        pass twice. If weight gradients are separate operations, both halves of a backward compute it.
        """
        whole = self.placement.pipeline == 1 or not self.workload.recomputed_stages
        forward, both = (self.stage(self.trained_tokens, train, head=whole) for train in (False, True))
        if whole:
            return forward, both
        last, times = self.stage(self.trained_tokens, True), 1 + self.repeated
        both, last = ({name: times * seconds for name, seconds in parts.items()} for parts in (both, last))
        _add(both, {name: seconds for name, seconds in forward.items() if name != "stages"})
        return forward, max(both, last, key=lambda parts: sum(parts.values()))

    @property
    def repeated(self) -> float:
        """The share of a stage's passes that both halves of a split backward operation compute. It is all but the
        weight gradients, which take about as long as a forward pass: both halves need each layer's input gradient.
        """
        if self.placement.schedule != "zb-h1":
            return 0.0
        forward, both = (sum(self.stage(self.trained_tokens, train, head=False).values()) for train in (False, True))
        return 1.0 if self.model.lora is not None else 1 - forward / both

    def train(self) -> Parts:
        workload, placement = self.workload, self.placement
        parts, updates = placement.micro_batches, workload.epochs * workload.minibatches
        forward, both = self.trained()
        total = self.piped(both, parts, updates * parts)
        if placement.schedule in ("interleaved", "zb-h1"):
            total["bubble"] = updates * self.bubble(sum(forward.values()), sum(both.values()))
        if placement.data > 1 and self.model.lora is None:
            # Every micro-batch sums its gradients over `data`; a pipeline sums once, after its last micro-batch.
            total["gathers"] += updates * (parts if placement.pipeline == 1 else 1) * self.sums()
        if placement.pipeline > 1 and self.model.lora is None and workload.recomputed_stages:
            # For an update, every stage gets its weights from all devices, and sends its gradients back, in float32.
            size = 4 / workload.itemsize * (self.layers * self.layer * self.slices / placement.tensor + self.table)
            total["stages"] += 2 * updates * self.costs.gather(self.group("pipeline"), size / placement.fsdp)
        _add(total, self.costs.update(self.model, moves.stored_share(placement), parts), updates)
        return total

    def generate(self) -> Parts:
        """Predicts prefill and decoding, `micro_batches` times over a part of the rows. A prompt's samples share a
        prefill.

        Without slots, finished rows continue to decode until the last row is done. With slots, a new row replaces a
        finished one: all but the last row of a slot have the mean length.
        """
        workload, placement = self.workload, self.placement
        rows = ceil(self.batch / placement.micro_batches)
        slots = rows if workload.slots is None else min(rows, workload.slots)
        refilled = rows / slots - 1
        steps = refilled * workload.mean_response + workload.response
        positions = workload.mean_prompt + (workload.mean_response if refilled else workload.response) / 2
        # In a pipeline the slots form as many parts as there are stages; each stage computes one part after the other.
        stages, total = placement.pipeline, dict[str, float]()
        prefill = self.prefill(self.rows(rows / workload.samples, stages))
        _add(total, self.piped(prefill, stages, stages), placement.micro_batches)
        _add(total, self.step(self.rows(slots, stages), positions), placement.micro_batches * stages * steps)
        return total

    def step(self, rows: int, positions: float) -> Parts:
        """Predicts a decode step of these rows of a device, or of its tensor group."""
        parts: Parts = {}
        _add(parts, self.costs.step(self.model, rows, positions, self.slices), self.layers)
        _add(parts, self.costs.draw(self.model, rows, self.slices))
        if self.slices > 1:
            parts["tensor"] = (2 * self.layers + 1) * self.costs.reduce(self.tensor, rows * self.width)
            parts["tensor"] += self.costs.gather(self.tensor, rows * self.model.config.padded_vocab * 4 / self.slices)
        if self.placement.pipeline > 1:
            parts["stages"] = self.hop(rows)
        return parts

    def prefill(self, prompts: int) -> Parts:
        """Predicts the prefill of these prompts of a device, or of its tensor group."""
        tokens, parts = prompts * self.workload.prompt, {}
        _add(parts, self.costs.layer(self.model, tokens, self.workload.prompt, self.slices, False), self.layers)
        if self.slices > 1:
            parts["tensor"] = 2 * self.layers * self.costs.reduce(self.tensor, tokens * self.width)
        return parts


def _add(total: Parts, parts: Mapping[str, float], times: float = 1.0) -> None:
    for name, seconds in parts.items():
        total[name] = total.get(name, 0.0) + times * seconds


# ---- prices for the simulator and the search


@dataclass(frozen=True)
class Price:
    """A placement of a call, with its costs on each of its devices.

    resident: bytes that its role keeps there between calls. active: further bytes while it runs. moved: bytes of the
    copy of the weights, if the role is stored elsewhere.
    """

    placement: Placement
    seconds: float
    resident: float
    active: float
    moved: float = 0.0

    @property
    def bytes(self) -> float:
        return self.resident + self.active


class Prices(Protocol):
    """Prices of calls and moves. A role is stored where it is trained, or else where its first call runs; `resident` of
    its other calls is 0. A base that roles share is counted in one call. reallocation: seconds to move weights to a
    call. transfer: seconds to move values from one call to another. capacity: bytes of a device."""

    def call(self, call: Call, placement: Placement) -> Price: ...
    def reallocation(self, role: str, home: Placement, placement: Placement) -> float: ...
    def transfer(self, source: Placement, target: Placement) -> float: ...
    @property
    def capacity(self) -> float: ...


_HANDED_OVER = 5  # numbers per token that one call passes to another: the token and results of models


@dataclass(frozen=True)
class CostModel:
    """The prices of a workload's calls on a cluster; that of a call is computed once.

    backend: compiler of the calls. costs: of parts; None: Roofline. away: what is offloaded; parts that only the call
    at the role's home needs count there as active, and are copied from and to the host. fused: parts of the time and
    active bytes of updates that run together, by the call's name and placement. processes: number of processes of the
    run, which have equally many devices.
    """

    workload: Workload
    cluster: Cluster
    backend: Backend = DEFAULT
    costs: PartCosts | None = None
    away: Away = field(default_factory=dict)
    fused: Mapping[tuple[str, Placement], tuple[Parts, float]] = field(default_factory=dict)
    processes: int = 1
    _calls: dict[Any, Price] = field(default_factory=dict, init=False)

    @property
    def capacity(self) -> float:
        return self.cluster.hardware.memory

    @property
    def per_process(self) -> int:
        """Number of devices of a process."""
        return self.cluster.devices // self.processes

    @cached_property
    def _base(self) -> Call | None:
        """The call in which the base under adapters is counted."""
        role = next(filter(self.workload.on_base, self.workload.models), None)
        return None if role is None else home_of(self.workload.graph, role)

    def call(self, call: Call, placement: Placement) -> Price:
        key = call.name, placement
        if key not in self._calls:
            sizes = call_bytes(self.workload, call, placement, self.backend)
            models = self.workload.models[call.role] if home_of(self.workload.graph, call.role) == call else ()
            stored = state_bytes(models, self.workload.itemsize, placement)
            asleep = sum(size for part, size in stored.items() if self._sleeps(call, part))
            resident = sum(size for part, size in stored.items() if part != "base" or call == self._base) - asleep
            seconds = self.seconds(call, placement) + 2 * asleep / self.cluster.hardware.host
            active = self.fused[key][1] if key in self.fused else sum(sizes.active.values())
            self._calls[key] = Price(placement, seconds, resident, active + asleep, sizes.moved)
        return self._calls[key]

    def seconds(self, call: Call, placement: Placement) -> float:
        """Predicts a call from inputs to outputs, without the move of its weights."""
        return sum(self.parts(call, placement).values())

    def parts(self, call: Call, placement: Placement) -> Parts:
        """Predicts the parts of `seconds`."""
        if (call.name, placement) in self.fused:
            return self.fused[call.name, placement][0]
        total: Parts = {}
        for divided in self._by_model(call, placement):
            predict = {"generate": divided.generate, "infer": divided.infer, "train": divided.train}[call.kind]
            _add(total, predict() | divided.costs.call())
        return total

    def stage_seconds(self, call: Call, placement: Placement) -> tuple[float, float]:
        """Predicts the forward and backward seconds of a micro-batch on a stage, for a call that trains one model."""
        forward, both = (sum(parts.values()) for parts in self.divided(call, placement).trained())
        return forward, both - forward

    def divided(self, call: Call, placement: Placement) -> DividedCall:
        """Returns a call of one model, which also predicts its parts: a decode step, a prefill, a micro-batch."""
        (divided,) = self._by_model(call, placement)
        return divided

    def _by_model(self, call: Call, placement: Placement) -> list[DividedCall]:
        workload, node = self.workload, self.cluster.node
        costs = (self.costs or Roofline(workload, self.cluster)).on(placement.devices.count)
        models, rows = workload.models[call.role], workload.rows_of(call)
        return [DividedCall(workload, model, rows, placement, node, costs) for model in models]

    def _sleeps(self, home: Call, part: str) -> bool:
        """Returns whether a part of a role's state is offloaded during every call except the one at its home."""
        roles = LEARNED if home.role == LEARNER else (home.role,)
        others = [parts for (role, call), parts in self.away.items() if role in roles and call != home.name]
        return bool(others) and all(part in parts for parts in others)

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        stored, size, itemsize = 0.0, 0.0, self.workload.itemsize
        for model in self.workload.models[role]:
            adapts = model.lora is not None
            stored += model.numbers.trained * (4 if model.trained or model.wide or adapts else itemsize)
            size += model.numbers.trained * (4 if adapts else itemsize)
        return moves.reallocation_seconds(stored, size, home, placement, self.cluster)

    def transfer(self, source: Placement, target: Placement) -> float:
        size = 4.0 * _HANDED_OVER * self.workload.rows * self.workload.length
        return moves.transfer_seconds(size, source, target, self.cluster)
