"""Seconds of calls: how often each of a call's parts is computed on a device, times what it costs there.

Parts follow each other: what a compiler lets overlap (gathers with products, say) is not taken off.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import jax.numpy as jnp

from jrlhf.meshes import Call
from jrlhf.meshes.graph import home_of
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement
from jrlhf.planning.activations import WIDE
from jrlhf.planning.collectives import Group, group, reallocation_seconds, stored, transfer_seconds
from jrlhf.planning.prices import Price
from jrlhf.planning.units import Parts, Physical, numbers
from jrlhf.planning.workload import RoleModel, Workload

_HANDED = 5  # numbers a token that one call hands to another: tokens, and what models say of them


@dataclass(frozen=True)
class CallTime:
    """One call on each of its devices. parts: seconds by what they go to, which follow each other."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


class Units(Protocol):
    """What the parts of a call cost: by arithmetic (`units.Physical`) or as measured (`measured.Measured`)."""

    def layer(self, model: RoleModel, tokens: float, length: int, slices: int, train: bool) -> Parts: ...
    def head(self, model: RoleModel, tokens: float, train: bool) -> Parts: ...
    def step(self, model: RoleModel, rows: float, positions: float, slices: int) -> Parts: ...
    def draw(self, model: RoleModel, rows: float, slices: int) -> Parts: ...
    def update(self, model: RoleModel, share: float, micro_batches: int) -> Parts: ...
    def gather(self, group: Group, size: float, pieces: int = 1) -> float: ...
    def reduce(self, group: Group, size: float, pieces: int = 1) -> float: ...
    def call(self) -> Parts: ...
    def on(self, devices: int) -> "Units": ...


def physical(workload: Workload, cluster: Cluster) -> Physical:
    """The units of a workload by arithmetic."""
    return Physical(cluster, workload.dtype, workload.remat, workload.fused_loss)


def call_seconds(
    workload: Workload, call: Call, placement: Placement, cluster: Cluster, *, units: Units | None = None
) -> CallTime:
    """The time of a call that has a model: from its inputs being there to its outputs. Moving weights is not in it."""
    units = units or physical(workload, cluster)
    work = {"generate": _generate, "infer": _infer, "train": _train}[call.kind]
    total: Parts = {}
    for model in workload.models[call.role]:
        _add(total, work(_Mesh(workload, model, placement, cluster, units), call))
    return CallTime(total)


class _Mesh:
    """How a placement divides one model and its rows, and the collectives that follow from that."""

    def __init__(self, workload: Workload, model: RoleModel, placement: Placement, cluster: Cluster, units: Units):
        self.workload, self.model, self.units = workload, model, units.on(placement.devices.count)
        self.layers = model.config.layers / placement.pipeline  # of a stage
        self.stages, self.parts = placement.pipeline, placement.micro_batches
        whole_layers = placement.layout in ("train", "score")
        self.slices = 1 if whole_layers else placement.tensor
        self.ways = placement.data * placement.fsdp * (placement.tensor if whole_layers else 1)
        self.sharers = placement.tensor if whole_layers else 1  # devices whose tokens meet at a slice of the vocabulary
        self.share = stored(placement)
        node = cluster.node
        self.tensor, self.fsdp = group(placement, node, "tensor"), group(placement, node, "fsdp")
        self.data, self.pipeline = group(placement, node, "data"), group(placement, node, "pipeline")
        self.stored = Group(1, 1) if placement.layout == "generate" else self.fsdp
        self.regathered = self.tensor if whole_layers else Group(1, 1)  # stored as slices, and computed with whole
        self.size = jnp.dtype(workload.dtype).itemsize
        config = model.config
        self.matrices = 7 if config.gated_mlp else 6
        self.layer_bytes = numbers(model).layer * self.size / self.slices
        self.table_bytes = config.padded_vocab * config.embed * self.size / placement.tensor
        self.tables = 2 if model.head == "lm" else 1  # the embedding, and the unembedding, which may be the same
        self.responses = workload.response / (workload.prompt + workload.response)  # of the tokens
        self.gathers_tables = placement.fsdp > 1 and placement.layout != "generate"

    def tokens(self, rows: float, parts: int, width: float) -> float:
        """Of one of so many parts of the rows of a device."""
        return ceil(rows / self.ways / parts) * width

    def stage(self, tokens: float, length: int, train: bool) -> Parts:
        """A part of the rows through the last pipeline stage, which has the head too: all others wait for it."""
        units, parts = self.units, dict(self.units.layer(self.model, tokens, length, self.slices, train))
        for name in parts:
            parts[name] *= self.layers
        predicted = self.responses if self.model.head == "lm" and self.spans(train) else 1.0
        _add(parts, units.head(self.model, predicted * tokens / self.slices, train))
        width = self.model.config.embed * self.size
        reduced = units.reduce(self.tensor, tokens * width) if self.slices > 1 else 0.0
        passed = units.gather(self.tensor, self.sharers * tokens * width) if self.sharers > 1 else 0.0
        turns = 2 if train else 1
        sums = 2 * turns + (1 if train and self.workload.remat in ("full", "offload", "attention") else 0)
        tables = self.tables - 1 + predicted  # an embedding meets all tokens, an unembedding those that are predicted
        parts["tensor"] = sums * self.layers * reduced + tables * turns * passed
        parts["gathers"] = self.weights(train)
        if self.stages > 1:
            parts["stages"] = turns * units.gather(Group(2, min(2, self.pipeline.local)), 2 * tokens * width)
        return parts

    def spans(self, train: bool) -> bool:
        """Whether such a call has a head for responses only."""
        return ("train" if train else "infer") in self.workload.spanned

    def weights(self, train: bool) -> float:
        """Weights gathered where they are used, twice in training, and gradients scattered back."""
        units, turns = self.units, 3 if train and self.model.lora is None else 2 if train else 1
        layer = turns * units.gather(self.stored, self.layer_bytes / self.regathered.size, self.matrices)
        layer += turns * units.gather(self.regathered, self.layer_bytes, self.matrices)
        tables = turns * units.gather(self.fsdp, self.table_bytes) if self.gathers_tables else 0.0
        return self.layers * layer + self.tables * tables

    def sums(self) -> float:
        """Gradients summed over `data`: scattered ones layer by layer, whole ones in float32, once for all layers."""
        if self.data.size == 1 or self.model.lora is not None:
            return 0.0
        divided = self.stored.size * self.regathered.size
        if divided == 1:
            layers = self.units.reduce(self.data, self.layers * self.layer_bytes * WIDE / self.size, self.matrices)
        else:
            layers = self.layers * self.units.reduce(self.data, self.layer_bytes / divided, self.matrices)
        return layers + self.tables * self.units.reduce(self.data, self.table_bytes / self.fsdp.size)


def _infer(mesh: _Mesh, call: Call) -> Parts:
    workload = mesh.workload
    tokens = mesh.tokens(workload.rows_of(call), mesh.parts, workload.length)
    one = mesh.stage(tokens, workload.length, False)
    return _piped(mesh, one, mesh.parts, mesh.parts) | mesh.units.call()


def _train(mesh: _Mesh, call: Call) -> Parts:
    workload = mesh.workload
    updates = workload.epochs * workload.minibatches
    tokens = mesh.tokens(workload.rows / workload.minibatches, mesh.parts, workload.length)
    total = _piped(mesh, mesh.stage(tokens, workload.length, True), mesh.parts, updates * mesh.parts)
    # Every micro-batch sums its gradients over `data`; a pipeline has one sum, after its last part.
    total["gathers"] += updates * (mesh.parts if mesh.stages == 1 else 1) * mesh.sums()
    _add(total, mesh.units.update(mesh.model, mesh.share, mesh.parts), updates)
    return total | mesh.units.call()


def _piped(mesh: _Mesh, one: Parts, parts: int, turns: int) -> Parts:
    """`turns` parts through the stages, of which always `parts` follow each other before the stages run dry."""
    bubble = (mesh.stages - 1) / parts * sum(one.values()) * turns if mesh.stages > 1 else 0.0
    total = {name: seconds * turns for name, seconds in one.items()}
    if bubble:
        total["bubble"] = bubble
    return total


def _generate(mesh: _Mesh, call: Call) -> Parts:
    """Prefill and decoding, `micro_batches` times over a part of the rows. A prompt's samples share its prefill.

    Without slots, rows that are done are fed on until the last one is. With slots, a row takes the place of one that is
    done: all but the last row of a slot are as long as the mean.
    """
    workload, units = mesh.workload, mesh.units
    rows = ceil(workload.rows / mesh.parts)
    slots = rows if workload.slots is None else min(rows, workload.slots)
    refilled = rows / slots - 1
    steps = refilled * workload.mean_response + workload.response
    positions = workload.mean_prompt + (workload.mean_response if refilled else workload.response) / 2
    # In a pipeline as many parts of the slots as stages go round; a step of all of them takes each stage so many turns.
    stages = mesh.stages
    here = ceil(slots / mesh.ways / stages)
    step = {name: mesh.layers * each for name, each in units.step(mesh.model, here, positions, mesh.slices).items()}
    _add(step, units.draw(mesh.model, here, mesh.slices))
    if mesh.slices > 1:
        width = mesh.model.config.embed * mesh.size
        step["tensor"] = (2 * mesh.layers + 1) * units.reduce(mesh.tensor, here * width)
        step["tensor"] += units.gather(mesh.tensor, here * mesh.model.config.padded_vocab * 4 / mesh.slices)
    if stages > 1:
        hop = here * mesh.model.config.embed * mesh.size
        step["stages"] = units.gather(Group(2, min(2, mesh.pipeline.local)), 2 * hop)
    prefill = {}
    filled = mesh.tokens(rows / workload.samples, stages, workload.prompt)
    for name, each in units.layer(mesh.model, filled, workload.prompt, mesh.slices, False).items():
        prefill[name] = mesh.layers * each
    if mesh.slices > 1:
        width = mesh.model.config.embed * mesh.size
        prefill["tensor"] = 2 * mesh.layers * units.reduce(mesh.tensor, filled * width)
    total: Parts = {}
    _add(total, _piped(mesh, prefill, stages, stages), mesh.parts)
    _add(total, step, mesh.parts * stages * steps)
    return total | units.call()


def _add(total: Parts, parts: Mapping[str, float], times: float = 1.0) -> None:
    for name, seconds in parts.items():
        total[name] = total.get(name, 0.0) + times * seconds


class Estimator:
    """The prices of a workload's calls on a cluster: `prices.Prices`. Every question is answered once.

    bytes_of: (workload, call, placement) -> bytes of a device, as `memory.call_bytes` has them.
    units: of time; None for those of the hardware's figures.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        bytes_of: Callable[[Workload, Call, Placement], Any],
        units: Units | None = None,
    ):
        self._workload, self._cluster, self._bytes = workload, cluster, bytes_of
        self._units = units or physical(workload, cluster)
        on_base = [role for role, models in workload.models.items() if any(model.shared for model in models)]
        self._base = home_of(workload.graph, on_base[0]) if on_base else None  # the base is there once for all of them
        self._calls: dict[Any, Price] = {}
        self._moves: dict[Any, float] = {}

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        return self._cluster.hardware.memory

    def call(self, call: Call, placement: Placement) -> Price:
        """Of a call that has a model."""
        key = call.name, placement
        if key not in self._calls:
            seconds = self.time(call, placement).seconds
            held = self._bytes(self._workload, call, placement)
            kept = held.resident if home_of(self._workload.graph, call.role) == call else {}
            resident = sum(size for part, size in kept.items() if part != "base" or call == self._base)
            self._calls[key] = Price(seconds, resident, sum(held.active.values()), held.moved)
        return self._calls[key]

    def time(self, call: Call, placement: Placement) -> CallTime:
        """The seconds of a call by part."""
        return call_seconds(self._workload, call, placement, self._cluster, units=self._units)

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        """Seconds to bring a role's weights from where it lives to where, and as, a call needs them; 0 if they are."""
        key = role, home, placement
        if key not in self._moves:
            size = sum(_weight_bytes(model, self._workload.dtype) for model in self._workload.models[role])
            self._moves[key] = reallocation_seconds(size, home, placement, self._cluster)
        return self._moves[key]

    def transfer(self, source: Placement, target: Placement) -> float:
        """Seconds to bring what one call hands to another from its devices to the other's."""
        size = 4.0 * _HANDED * self._workload.rows * self._workload.length
        return transfer_seconds(size, source, target, self._cluster)


def _weight_bytes(model: RoleModel, dtype: Any) -> float:
    """What travels of a model: its matrices in the compute dtype; of an adapter the adapter, in float32."""
    return numbers(model).trained * (4.0 if model.lora is not None else jnp.dtype(dtype).itemsize)
