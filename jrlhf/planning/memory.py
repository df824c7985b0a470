"""What a plan needs of each device: what roles keep there, and what each call needs while it runs.

States are exact (`states.py`); what a call needs beside them follows XLA's peaks (`activations.py`). All of it is
arithmetic: a call takes microseconds, and no device or compiler is asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, prod
from typing import Any

import jax.numpy as jnp

from jrlhf.meshes import GENERATE, TRAIN, Call, Layout
from jrlhf.meshes.graph import LEARNED, LEARNER, Kind, home_of
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.models import ModelConfig, Schedule
from jrlhf.models.remat import Remat
from jrlhf.planning.activations import (
    DEFAULT,
    WIDE,
    Arrays,
    Backend,
    Gradients,
    Phase,
    arrays,
    cache_bytes,
    generate_phase,
    infer_phase,
    train_phase,
)
from jrlhf.planning.collectives import alike
from jrlhf.planning.residency import Away
from jrlhf.planning.slices import segments
from jrlhf.planning.states import resident, stored_bytes, tiled, trained_bytes, weights
from jrlhf.planning.workload import RoleModel, Workload

GIB = 2**30
TRAINED = 13  # bytes a token that a step reads of an experience: token, mask, and three float32
SCORED = 12  # that scoring reads and makes: token, log-probability, entropy
GENERATED = 8  # token and log-probability


@dataclass(frozen=True)
class CallBytes:
    """Bytes of one device, by name.

    resident: what the call's role keeps on each device of its home. active: what the call needs besides, while it runs.
    moved: a copy of the weights, which is there besides where the role lives elsewhere.
    """

    resident: Mapping[str, float]
    active: Mapping[str, float]
    moved: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.resident.values()) + sum(self.active.values())


def call_bytes(workload: Workload, call: Call, placement: Placement, backend: Backend = DEFAULT) -> CallBytes:
    """Of a call that has a model, in a placement.

    resident: {"weights", "optimizer"}, as if this placement were the role's home; on a base that roles share also
        "base", which is there once for all of them; {} where a learner trains these weights, and keeps them.

    Raises:
        ValueError: a model cannot be divided so.
    """
    models, asked = workload.models.get(call.role, ()), _Asked.of(workload, call)
    home, moved = home_of(workload.graph, call.role), 0.0
    kept = _kept(models if home is not None and home.role == call.role else (), workload.dtype, placement)
    active: dict[str, float] = {}
    for model in models:
        staged = _stage(model, placement.pipeline)
        needs = dict(_active(asked, call.kind, staged, placement, backend))
        copied = _copied(staged, workload.dtype, placement)
        if call.kind == "generate":
            needs["generation weights"] = copied
        else:
            moved = max(moved, copied)
        if call.kind == "train":  # of several models in one program, all keep what their backward passes need
            active = {part: active.get(part, 0.0) + needs.get(part, 0.0) for part in {**active, **needs}}
        else:
            active = max(active, needs, key=lambda parts: sum(parts.values()))
    return CallBytes(kept, {part: size for part, size in active.items() if size}, moved)


@dataclass(frozen=True)
class _Asked:
    """What a call's needs depend on beside its model and placement: fields of `Workload`, rows those of the call."""

    rows: int
    prompt: int
    response: int
    samples: int
    minibatches: int
    slots: int | None
    chunk: int | None
    prefill: int | None
    dtype: Any
    remat: Remat

    @classmethod
    def of(cls, workload: Workload, call: Call) -> "_Asked":
        same = cls(*(getattr(workload, name) for name in cls.__dataclass_fields__))
        return replace(same, rows=workload.rows_of(call))

    @property
    def length(self) -> int:
        return self.prompt + self.response


@cache
def _active(asked: _Asked, kind: Kind, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    match kind:
        case "generate":
            return _generating(asked, model, placement, backend)
        case "train":
            return _training(asked, model, placement, backend)
        case "infer":
            return _inferring(asked, model, placement, backend)
    return {}


def _copied(model: RoleModel, dtype: Any, placement: Placement) -> float:
    """The weights, cast, where the call does not compute with those that its role keeps."""
    if model.shared:
        return 0.0
    size = jnp.dtype(dtype).itemsize
    return stored_bytes(model.config, model.head, _storage(placement), placement.fsdp, placement.tensor, size)


def _storage(placement: Placement) -> Layout:
    """By which a call stores the weights that are its own."""
    return GENERATE if placement.layout == "generate" else TRAIN


def _training(asked: _Asked, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    rows = asked.rows / asked.minibatches
    each, layout = _arrays(asked, model, rows, placement, backend)
    parts, gradients = placement.micro_batches, _gradients(model, placement, backend, asked.minibatches > 1)
    transposed = _transposed(model, placement, WIDE) if layout != "generate" else 0.0
    running = min(placement.pipeline, parts)
    needs = train_phase(model.config, model.head, each, asked.remat, gradients, parts, running, backend, transposed)
    return needs | {"inputs": TRAINED * asked.rows * asked.length / placement.devices.count}


def _inferring(asked: _Asked, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    each, layout = _arrays(asked, model, asked.rows, placement, backend)
    stored = WIDE if model.trained or model.wide else each.itemsize
    transposed = _transposed(model, placement, stored) if layout != "generate" else 0.0
    cast = 0.0 if stored == each.itemsize or layout == "generate" else _layered(model, placement) * each.itemsize
    needs = infer_phase(model.config, model.head, each, backend, transposed, cast)
    return needs | {"inputs": SCORED * asked.rows * asked.length / placement.devices.count}


def _generating(asked: _Asked, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    config, groups, tensor = model.config, placement.data * placement.fsdp, placement.tensor
    size = jnp.dtype(asked.dtype).itemsize
    rows = asked.rows / placement.micro_batches
    slots = min(asked.slots or rows, rows) / groups
    schedule = Schedule(asked.slots, asked.chunk or asked.response, prefill=asked.prefill)
    together, wave = rows / groups / asked.samples, 0.0  # prompts that are read together; where they wait for slots
    if not schedule.is_one_program(ceil(rows), asked.response):
        room = max(1, int(slots) // asked.samples)
        together = max(schedule.waves(ceil(together), room, asked.prompt))
        wave = cache_bytes(config, together, asked.prompt, tensor, size)
    prompts = arrays(config, model.head, together, asked.prompt, "generate", tensor, asked.dtype, backend)
    cache = cache_bytes(config, slots, asked.length, tensor, size)
    logits = WIDE * slots / tensor * config.padded_vocab
    needs = generate_phase(config, prompts, cache, wave, logits, tensor, backend)
    return needs | {"inputs": GENERATED * asked.rows * asked.length / placement.devices.count}


def _arrays(asked: _Asked, model: RoleModel, rows: float, placement: Placement, backend: Backend) -> tuple[Arrays, str]:
    layout = "generate" if model.shared else placement.layout
    sharing = placement.devices.count // placement.pipeline
    if layout in ("generate", "train_tp"):
        sharing //= placement.tensor
    rows /= sharing * placement.micro_batches
    made = arrays(model.config, model.head, rows, asked.length, layout, placement.tensor, asked.dtype, backend)
    if model.shared:  # the base's tables lie as they are used, and have no gradients
        made = replace(made, table=0.0)
    return made, layout


def _transposed(model: RoleModel, placement: Placement, itemsize: int) -> float:
    if placement.tensor > 1 or placement.fsdp == 1:  # gathered over both axes, they are not
        return 0.0
    return _sum_of(model.config, model.head, placement.fsdp, placement.tensor, True) * itemsize


def _gradients(model: RoleModel, placement: Placement, backend: Backend, several: bool) -> Gradients:
    """several: whether there are several updates, in a loop."""
    fsdp, tensor = placement.fsdp, placement.tensor
    whole = trained_bytes(model, fsdp, tensor)
    if model.lora is not None:
        return Gradients(whole, whole, whole)
    layers = _layered(model, placement) * WIDE
    if backend.platform != "tpu":
        return Gradients(layers, whole, whole)
    # What does not fill a TPU's row-major tiles arrives in another order; a loop keeps it by rows, in padded tiles.
    numbers, padded = _in_tiles(model.config, model.head, fsdp, tensor)
    return Gradients(layers, whole, numbers * WIDE, 3 * padded * WIDE if several else 0.0)


@cache
def _in_tiles(config: ModelConfig, head: str, fsdp: int, tensor: int) -> tuple[float, float]:
    """Numbers of a device's shards in tiles: of all, of those alone that do not fill them."""
    shards = [weight.shard(TRAIN, fsdp, tensor) for weight in weights(config, head, tensor) if weight.matrix]  # type: ignore[arg-type]
    sizes = [(tiled(shard), prod(shard)) for shard in shards]
    return float(sum(size for size, _ in sizes)), float(sum(size for size, real in sizes if size != real))


def _layered(model: RoleModel, placement: Placement) -> float:
    return _sum_of(model.config, model.head, placement.fsdp, placement.tensor, False)


@cache
def _sum_of(config: ModelConfig, head: str, fsdp: int, tensor: int, last_gathered: bool) -> float:
    """Numbers of a device's shards of the layers; of those alone whose last dimension lies over fsdp."""
    total = 0
    for each in weights(config, head, tensor):  # type: ignore[arg-type]
        if each.layered and (each.axes[-1] == "embed" or not last_gathered):
            shard = each.shard(TRAIN, fsdp, tensor)
            count = 1
            for size in shard:
                count *= size
            total += count
    return float(total)


@cache
def _stage(model: RoleModel, pipeline: int) -> RoleModel:
    """A stage's part of a model: a share of the layers. Embedding and head are counted on each."""
    if pipeline == 1:
        return model
    return replace(model, config=replace(model.config, layers=ceil(model.config.layers / pipeline), local_layers=()))


# ---- plans


@dataclass(frozen=True)
class Held:
    """One device, or several that are alike.

    start, count: which. resident: role -> bytes that it keeps there; "base" is what roles on adapters share.
    active: of the call that needs most there. worst: its name.
    """

    start: int
    count: int
    resident: Mapping[str, float]
    active: float
    worst: str

    @property
    def total(self) -> float:
        """What is kept, and the largest call."""
        return sum(self.resident.values()) + self.active


@dataclass(frozen=True)
class CallPhase:
    """A call while it runs, on the device of its slice that then holds most.

    resident: of all roles there, without what is elsewhere meanwhile. active: its own needs, by name.
    """

    call: str
    resident: float
    active: Mapping[str, float]

    @property
    def total(self) -> float:
        """Of that device."""
        return self.resident + sum(self.active.values())


@dataclass(frozen=True)
class PlanMemory:
    """Memory of a plan. roles: role -> part -> bytes on each device of its home; "base" is a role of its own."""

    roles: Mapping[str, Mapping[str, float]]
    phases: tuple[CallPhase, ...]
    devices: tuple[Held, ...] = field(default=())

    @property
    def peak(self) -> float:
        """Of the device that needs most, in the call that needs most."""
        return max((phase.total for phase in self.phases), default=0.0)

    @property
    def largest(self) -> CallPhase:
        """The call that sets it."""
        return max(self.phases, key=lambda phase: phase.total)


def keepers(workload: Workload) -> dict[str, tuple[RoleModel, ...]]:
    """Role -> the models that it keeps: a learner's are those of the roles that it trains."""
    models = dict(workload.models)
    return models | {role: (model,) for role, model in zip(LEARNED, models.pop(LEARNER, ()), strict=False)}


def plan_memory(workload: Workload, plan: Plan, backend: Backend = DEFAULT, *, away: Away | None = None) -> PlanMemory:
    """Of every device of a plan, and of every call.

    away: what is not on the devices while a call runs: by default everything is, always.

    Raises:
        ValueError: a model cannot be divided as a placement asks.
    """
    away = away or {}
    calls = [call for call in workload.graph if call.name in plan.placements and workload.models.get(call.role)]
    keeping = keepers(workload)
    living = {role: home_of(workload.graph, role, plan) for role in keeping}
    homes = {role: plan[call.name] for role, call in living.items() if call is not None}
    states = {role: _kept(keeping[role], workload.dtype, home) for role, home in homes.items()}
    bases = [(homes[role], kept.pop("base")) for role, kept in states.items() if "base" in kept]
    needs = {}
    for call in calls:
        said, placement = call_bytes(workload, call, plan[call.name], backend), plan[call.name]
        elsewhere = said.moved and not alike(homes.get(call.role, placement), placement)
        needs[call.name] = {**said.active, "moved weights": said.moved} if elsewhere else said.active
    stretches, phases = [], {}
    for group in segments(placement.devices for placement in plan.placements.values()):
        start = group.start
        here = {role: states[role] for role, home in homes.items() if _holds(home, start)}
        base = max((size for placed, size in bases if _holds(placed, start)), default=0.0)
        kept = {role: sum(parts.values()) for role, parts in here.items()} | ({"base": base} if base else {})
        running = [call for call in calls if _holds(plan[call.name], start)]
        for call in running:
            gone = sum(
                size
                for role, parts in here.items()
                for part, size in parts.items()
                if away.get((role, call.name), {}).get(part, "device") != "device"
            )
            phase = CallPhase(call.name, sum(kept.values()) - gone, needs[call.name])
            if call.name not in phases or phase.total > phases[call.name].total:
                phases[call.name] = phase
        worst = max(running, key=lambda call: sum(needs[call.name].values()), default=None)
        active = 0.0 if worst is None else sum(needs[worst.name].values())
        stretches.append(Held(start, group.count, kept, active, "" if worst is None else worst.name))
    shown = {"base": {"weights": max(size for _, size in bases)}} if bases else {}
    ordered = tuple(phases[call.name] for call in calls if call.name in phases)
    return PlanMemory({**shown, **states}, ordered, tuple(stretches))


def _kept(models: Sequence[RoleModel], dtype: Any, home: Placement) -> dict[str, float]:
    """What a role keeps of its models; "base" is there once."""
    kept: dict[str, float] = {}
    for model in models:
        staged = _stage(model, home.pipeline)
        for part, size in resident(staged, dtype, home.fsdp, home.tensor, _storage(home)).items():
            kept[part] = size if part == "base" else kept.get(part, 0.0) + size
    return kept


def _holds(placement: Placement, device: int) -> bool:
    return placement.devices.start <= device < placement.devices.stop
