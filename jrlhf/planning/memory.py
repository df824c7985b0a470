"""Predicted bytes of each device: what roles keep there between calls, and what each call adds while it runs.

What roles keep is exact, from the shapes of shards. What a call adds follows XLA's peaks (`activations.py`). All of it
is arithmetic: no device or compiler is asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrlhf.meshes import GENERATE, TRAIN, Call, Layout
from jrlhf.meshes.graph import LEARNED, LEARNER, home_of
from jrlhf.meshes.layout import axis_names
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.models import LoRAConfig, ModelConfig, Schedule, init_lm, init_lora, init_scalar
from jrlhf.models.lora import lora_axes
from jrlhf.models.params import Axes, HeadKind, is_axes, lm_axes, scalar_axes
from jrlhf.planning.activations import (
    DEFAULT,
    WIDE,
    Backend,
    Gradients,
    Phase,
    arrays,
    cache_bytes,
    generate_phase,
    infer_phase,
    train_phase,
)
from jrlhf.planning.residency import Away
from jrlhf.planning.simulate import segments
from jrlhf.planning.time import stored_alike
from jrlhf.planning.workload import RoleModel, Workload

GIB = 2**30
COUNTERS = 8  # AdamW counts its updates twice: for the bias of the moments, and for the schedule
# Bytes a token of a call's inputs and outputs.
TRAINED = 13  # a step reads token, mask and three float32 of an experience
SCORED = 12  # token, log-prob, entropy
GENERATED = 8  # token, log-prob


# ---- weights


class Weight(NamedTuple):
    """A weight of a model, of all layers together where layers have one. axes: the logical axes of its dimensions."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: Axes

    @property
    def layered(self) -> bool:
        return self.path[0] == "layers"

    @property
    def matrix(self) -> bool:
        """Whether a frozen model has it in the compute dtype. Vectors stay float32."""
        return len(self.shape) > (2 if self.layered else 1)

    def shard(self, layout: Layout, fsdp: int, tensor: int) -> tuple[int, ...]:
        """Returns the shape of a device's shard. Raises a ValueError where the weight does not divide."""
        sizes = {"fsdp": fsdp, "tensor": tensor}
        parts = [prod(sizes[axis] for axis in axis_names(entry)) for entry in layout.storage.spec(self.axes)]
        for size, part in zip(self.shape, parts, strict=True):
            if size % part:
                raise ValueError(f"{'.'.join(self.path)} of shape {self.shape} does not divide over {fsdp} x {tensor}")
        return tuple(size // part for size, part in zip(self.shape, parts, strict=True))

    def bytes(self, layout: Layout, fsdp: int, tensor: int, itemsize: int) -> int:
        return prod(self.shard(layout, fsdp, tensor)) * (itemsize if self.matrix else WIDE)


@cache
def weights(config: ModelConfig, head: HeadKind, tensor: int, lora: LoRAConfig | None = None) -> tuple[Weight, ...]:
    """Returns all weights of a model, or of its adapter with the scalar head, for a `tensor` axis of this size."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if lora is not None:
        shapes = jax.eval_shape(partial(init_lora, config, lora, head=head), key)
        axes = lora_axes(config, lora, tensor, head)
    else:
        shapes = jax.eval_shape(partial(init_lm if head == "lm" else init_scalar, config), key)
        axes = (lm_axes if head == "lm" else scalar_axes)(config, tensor)
    named = dict(jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)[0])
    leaves: Any = jax.tree_util.tree_flatten_with_path(shapes)[0]
    return tuple(Weight(tuple(step.key for step in path), leaf.shape, named[path]) for path, leaf in leaves)


@cache
def stored_bytes(
    config: ModelConfig,
    head: HeadKind,
    layout: Layout,
    fsdp: int,
    tensor: int,
    itemsize: int,
    lora: LoRAConfig | None = None,
) -> float:
    """Returns the bytes of a model's weights on a device, or of its adapter's: matrices of this item size."""
    return float(sum(weight.bytes(layout, fsdp, tensor, itemsize) for weight in weights(config, head, tensor, lora)))


# The leading dimensions that a matrix of a layer is summed over: int8 has one scale for each of the other entries.
_INPUTS = {"wq": 1, "wk": 1, "wv": 1, "wo": 2, "gate": 1, "up": 1, "down": 1}


@cache
def base_bytes(config: ModelConfig, tensor: int, itemsize: int, int8: bool) -> float:
    """Returns the bytes of the base under adapters, which is a language model stored as generation needs it."""
    total = 0
    for weight in weights(config, "lm", tensor):
        if not (int8 and weight.layered and weight.path[-1] in _INPUTS):
            total += weight.bytes(GENERATE, 1, tensor, itemsize)
            continue
        shard, summed = weight.shard(GENERATE, 1, tensor), _INPUTS[weight.path[-1]]
        total += prod(shard) + WIDE * shard[0] * prod(shard[1 + summed :])
    return float(total)


def trained_bytes(model: RoleModel, fsdp: int, tensor: int) -> float:
    """Returns the bytes of what a role trains, in float32: its weights, or its adapter's. Gradients need as many."""
    if model.lora is not None:
        return stored_bytes(model.config, model.head, GENERATE, 1, tensor, WIDE, model.lora)
    return stored_bytes(model.config, model.head, TRAIN, fsdp, tensor, WIDE)


def resident(model: RoleModel, dtype: Any, placement: Placement) -> dict[str, float]:
    """Returns the bytes that a role keeps of one model on each device of its home, by part.

    "base" is there once for all roles that share it. Raises a ValueError where the model does not divide.
    """
    itemsize, fsdp, tensor = jnp.dtype(dtype).itemsize, placement.fsdp, placement.tensor
    sizes: dict[str, float] = {}
    if model.shared:
        sizes["base"] = base_bytes(model.config, tensor, itemsize, model.int8)
    if model.trained or model.lora is not None:
        sizes["weights"] = trained_bytes(model, fsdp, tensor)
    elif not model.is_base:
        size = WIDE if model.wide else itemsize
        sizes["weights"] = stored_bytes(model.config, model.head, _storage(placement), fsdp, tensor, size)
    if model.trained:
        sizes["optimizer"] = 2 * sizes["weights"] + COUNTERS
    return sizes


def _storage(placement: Placement) -> Layout:
    """Returns the layout that stores a frozen model's own weights."""
    return GENERATE if placement.layout == "generate" else TRAIN


@cache
def _layer_numbers(config: ModelConfig, head: HeadKind, fsdp: int, tensor: int, last_gathered: bool) -> float:
    """Returns the numbers of a device's shards of the layers; with `last_gathered`, of those alone whose last dimension
    is sharded over fsdp."""
    layered = [weight for weight in weights(config, head, tensor) if weight.layered]
    chosen = [weight for weight in layered if weight.axes[-1] == "embed" or not last_gathered]
    return float(sum(prod(weight.shard(TRAIN, fsdp, tensor)) for weight in chosen))


def tiled(shape: tuple[int, ...]) -> int:
    """Returns the numbers of a float32 array in a TPU's row-major tiles of 8 x 128; 1, 2 or 4 rows are not padded."""
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[-2:]
    height = rows if rows in (1, 2, 4) else 8 * ceil(rows / 8)
    return prod(shape[:-2]) * height * 128 * ceil(columns / 128)


@cache
def _tiled_numbers(config: ModelConfig, head: HeadKind, fsdp: int, tensor: int) -> tuple[float, float]:
    """Returns the numbers of a device's shards after padding to TPU tiles: of all, and of the padded arrays only."""
    shards = [weight.shard(TRAIN, fsdp, tensor) for weight in weights(config, head, tensor) if weight.matrix]
    sizes = [(tiled(shard), prod(shard)) for shard in shards]
    return float(sum(size for size, _ in sizes)), float(sum(size for size, real in sizes if size != real))


# ---- calls


@dataclass(frozen=True)
class CallBytes:
    """Bytes of one device, by name.

    resident: what the call's role keeps on each device of its home. active: what the call adds while it runs. moved: a
    copy of the weights, which is added where the role is stored elsewhere.
    """

    resident: Mapping[str, float]
    active: Mapping[str, float]
    moved: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.resident.values()) + sum(self.active.values())


def call_bytes(workload: Workload, call: Call, placement: Placement, backend: Backend = DEFAULT) -> CallBytes:
    """Predicts the bytes of a call that has a model.

    resident: {"weights", "optimizer"}, as if this placement were the role's home, and "base" for a role on the shared
    base; {} where a learner trains and keeps these weights. Raises a ValueError where a model does not divide.
    """
    models = workload.models.get(call.role, ())
    home, moved = home_of(workload.graph, call.role), 0.0
    owned = home is not None and home.role == call.role
    active: dict[str, float] = {}
    for model in models:
        needs = dict(_active(workload, call, _stage(model, placement), placement, backend))
        copied = 0.0  # adapters compute with the base that is there
        if not model.shared:
            size, staged = jnp.dtype(workload.dtype).itemsize, _stage(model, placement)
            layout, fsdp, tensor = _storage(placement), placement.fsdp, placement.tensor
            copied = stored_bytes(staged.config, staged.head, layout, fsdp, tensor, size)
        if call.kind == "generate":
            needs["generation weights"] = copied
        else:
            moved = max(moved, copied)
        if call.kind == "train":  # of several models in one program, each keeps what its backward pass needs
            active = {part: active.get(part, 0.0) + needs.get(part, 0.0) for part in {**active, **needs}}
        else:  # one after the other
            active = max(active, needs, key=lambda parts: sum(parts.values()))
    states = _kept(models if owned else (), workload.dtype, placement)
    return CallBytes(states, {part: size for part, size in active.items() if size}, moved)


def _kept(models: Sequence[RoleModel], dtype: Any, home: Placement) -> dict[str, float]:
    """Returns the bytes that a role keeps of all its models, by part; "base" is counted once."""
    sizes: dict[str, float] = {}
    for model in models:
        for part, size in resident(_stage(model, home), dtype, home).items():
            sizes[part] = size if part == "base" else sizes.get(part, 0.0) + size
    return sizes


def _stage(model: RoleModel, placement: Placement) -> RoleModel:
    """Returns a pipeline stage's share of a model's layers. Embedding and head are counted on every stage."""
    if placement.pipeline == 1:
        return model
    layers = ceil(model.config.layers / placement.pipeline)
    return replace(model, config=replace(model.config, layers=layers, local_layers=()))


def _active(workload: Workload, call: Call, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    """Predicts what a call adds for one model: its largest phase, and its inputs and outputs."""
    kind, devices, fsdp, tensor = call.kind, placement.devices.count, placement.fsdp, placement.tensor
    rows = workload.rows_of(call)
    if kind == "compute":  # the model only waits on the devices
        return {}
    if kind == "generate":
        return _generating(workload, rows, model, placement, backend)
    layout = "generate" if model.shared else placement.layout
    # Layouts that compute with slices give a tensor group's rows to each of its devices.
    sharing = devices // placement.pipeline // (tensor if layout in ("generate", "train_tp") else 1)
    computed = rows / workload.minibatches if kind == "train" else rows
    computed /= sharing * placement.micro_batches
    sizes = arrays(model.config, model.head, computed, workload.length, layout, tensor, workload.dtype, backend)
    if model.shared:  # the base's tables are stored as they are used, and have no gradients
        sizes = replace(sizes, table=0.0)
    # Weights gathered along their last dimension are transposed, unless they are gathered over both axes.
    transposes = layout != "generate" and tensor == 1 and fsdp > 1
    numbers = partial(_layer_numbers, model.config, model.head, fsdp, tensor)
    stored = WIDE if kind == "train" or model.trained or model.wide else sizes.itemsize
    transposed = numbers(True) * stored if transposes else 0.0
    if kind == "train":
        parts = placement.micro_batches
        gradients = _gradients(model, placement, backend, loop=workload.minibatches > 1)
        running = min(placement.pipeline, parts)
        needs = train_phase(
            model.config, model.head, sizes, workload.remat, gradients, parts, running, backend, transposed
        )
    else:
        cast = 0.0 if stored == sizes.itemsize or layout == "generate" else numbers(False) * sizes.itemsize
        needs = infer_phase(model.config, model.head, sizes, backend, transposed, cast)
    return needs | {"inputs": (TRAINED if kind == "train" else SCORED) * rows * workload.length / devices}


def _gradients(model: RoleModel, placement: Placement, backend: Backend, *, loop: bool) -> Gradients:
    """Returns the bytes of a device's gradients. loop: several updates run in a loop."""
    fsdp, tensor = placement.fsdp, placement.tensor
    whole = trained_bytes(model, fsdp, tensor)
    if model.lora is not None:
        return Gradients(whole, whole, whole)
    layers = _layer_numbers(model.config, model.head, fsdp, tensor, False) * WIDE
    if backend.platform != "tpu":
        return Gradients(layers, whole, whole)
    # Arrays that do not fill a TPU's row-major tiles arrive in another order. A loop keeps them by rows, in padded
    # tiles, and so copies the weights and both moments first.
    numbers, padded = _tiled_numbers(model.config, model.head, fsdp, tensor)
    return Gradients(layers, whole, numbers * WIDE, 3 * padded * WIDE if loop else 0.0)


def _generating(workload: Workload, rows: float, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    config, groups, tensor = model.config, placement.data * placement.fsdp, placement.tensor
    size = jnp.dtype(workload.dtype).itemsize
    computed = rows / placement.micro_batches
    slots = min(workload.slots or computed, computed) / groups
    schedule = Schedule(workload.slots, workload.chunk or workload.response, prefill=workload.prefill)
    # Prompts that are prefilled together, and their cache where they wait for slots.
    together, wave = computed / groups / workload.samples, 0.0
    if not schedule.is_one_program(ceil(computed), workload.response):
        room = max(1, int(slots) // workload.samples)
        together = max(schedule.waves(ceil(together), room, workload.prompt))
        wave = cache_bytes(config, together, workload.prompt, tensor, size)
    prompts = arrays(config, model.head, together, workload.prompt, "generate", tensor, workload.dtype, backend)
    cached = cache_bytes(config, slots, workload.length, tensor, size)
    logits = WIDE * slots / tensor * config.padded_vocab
    needs = generate_phase(config, prompts, cached, wave, logits, tensor, backend)
    return needs | {"inputs": GENERATED * rows * workload.length / placement.devices.count}


# ---- plans


@dataclass(frozen=True)
class DeviceBytes:
    """One device, or several that are alike: `count` from number `start` on.

    resident: role -> bytes that it keeps there; "base" is shared by all adapters. active: bytes of `worst`, the call
    that needs most there.
    """

    start: int
    count: int
    resident: Mapping[str, float]
    active: float
    worst: str

    @property
    def total(self) -> float:
        return sum(self.resident.values()) + self.active


@dataclass(frozen=True)
class CallPhase:
    """A running call, on the device of its slice that then has most: bytes that roles keep there now, and its own."""

    call: str
    resident: float
    active: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.resident + sum(self.active.values())


@dataclass(frozen=True)
class PlanMemory:
    """Memory of a plan. roles: role -> part -> bytes on each device of its home; "base" is a role of its own."""

    roles: Mapping[str, Mapping[str, float]]
    phases: tuple[CallPhase, ...]
    devices: tuple[DeviceBytes, ...] = field(default=())

    @property
    def peak(self) -> float:
        return max((phase.total for phase in self.phases), default=0.0)

    @property
    def largest(self) -> CallPhase:
        return max(self.phases, key=lambda phase: phase.total)


class Resident(NamedTuple):
    """Bytes of a part of a role's state on each device of a placement."""

    role: str
    part: str
    size: float
    home: Placement


def keepers(workload: Workload) -> dict[str, tuple[RoleModel, ...]]:
    """Returns role -> the models that it keeps. A learner's models belong to the roles that it trains."""
    models = dict(workload.models)
    return models | {role: (model,) for role, model in zip(LEARNED, models.pop(LEARNER, ()), strict=False)}


def plan_memory(workload: Workload, plan: Plan, backend: Backend = DEFAULT, *, away: Away | None = None) -> PlanMemory:
    """Predicts the memory of every device and every call of a plan.

    away: the parts that are not on the devices during a call; None: all parts always are. Raises a ValueError where a
        model does not divide.
    """
    away = away or {}
    calls = [call for call in workload.graph if call.name in plan.placements and call.role in workload.models]
    homes = {role: home_of(workload.graph, role, plan) for role in keepers(workload)}
    entries = [
        Resident(role, part, size, plan[home.name])
        for role, models in keepers(workload).items()
        if (home := homes[role]) is not None
        for part, size in _kept(models, workload.dtype, plan[home.name]).items()
    ]
    needs = {}
    for call in calls:
        placement = plan[call.name]
        predicted = call_bytes(workload, call, placement, backend)
        home = homes.get(call.role)
        elsewhere = predicted.moved and home is not None and not stored_alike(plan[home.name], placement)
        needs[call.name] = {**predicted.active, "moved weights": predicted.moved} if elsewhere else predicted.active
    size_of = {name: sum(parts.values()) for name, parts in needs.items()}
    devices, phases = [], {}
    for group in segments(placement.devices for placement in plan.placements.values()):
        here = [entry for entry in entries if entry.home.devices.overlaps(group)]
        roles: dict[str, float] = {}
        for entry in here:
            if entry.part != "base":
                roles[entry.role] = roles.get(entry.role, 0.0) + entry.size
            else:
                roles.setdefault(entry.role, 0.0)
        base = max((entry.size for entry in here if entry.part == "base"), default=0.0)
        roles |= {"base": base} if base else {}
        running = [call for call in calls if plan[call.name].devices.overlaps(group)]
        for call in running:
            offloaded = sum(
                entry.size
                for entry in here
                if away.get((entry.role, call.name), {}).get(entry.part, "device") != "device"
            )
            phase = CallPhase(call.name, sum(roles.values()) - offloaded, needs[call.name])
            if call.name not in phases or phase.total > phases[call.name].total:
                phases[call.name] = phase
        worst = max((call.name for call in running), key=lambda name: size_of[name], default="")
        devices.append(DeviceBytes(group.start, group.count, roles, size_of.get(worst, 0.0), worst))
    bases = [entry.size for entry in entries if entry.part == "base"]
    shown: dict[str, dict[str, float]] = {"base": {"weights": max(bases)}} if bases else {}
    shown |= {role: {} for role, home in homes.items() if home is not None}
    for entry in entries:
        if entry.part != "base":
            shown[entry.role][entry.part] = entry.size
    ordered = tuple(phases[call.name] for call in calls if call.name in phases)
    return PlanMemory(shown, ordered, tuple(devices))
