"""Predicts the memory of each device: what roles store there between calls, and what each call adds while it runs.

What roles store is exact, from the shapes of shards. What a call adds is modelled on XLA's peaks (`activations.py`).
All of it is arithmetic, without a device or a compiler.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import ceil, lcm, prod
from typing import Literal

from jrlhf.config.schema import Config
from jrlhf.meshes.graph import Call
from jrlhf.meshes.layout import GENERATE, TRAIN, Layout
from jrlhf.meshes.pipeline import SCHEDULES, ScheduleName, peak
from jrlhf.meshes.plan import Placement, Plan, Slice, segments
from jrlhf.meshes.resharding import GROUP_BYTES
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.lora import LoRAConfig
from jrlhf.models.weights import HeadKind
from jrlhf.planning import activations
from jrlhf.planning.activations import DEFAULT, WIDE, Arrays, Backend, GradientBytes, Phase
from jrlhf.planning.moves import stored_alike
from jrlhf.planning.workload import RoleModel, Workload, weights_of
from jrlhf.roles.graph import LEARNED, LEARNER, home_of

GIB = 2**30
# Bytes: AdamW counts its updates twice, for the bias of the moments and for the schedule. Only states on devices have
# them in their sum.
COUNTERS = 8
# Bytes per token of a call's inputs and outputs.
TRAINED = 13  # a step reads token, mask and three float32 of an experience
SCORED = 12  # token, log-prob, entropy
GENERATED = 8  # token, log-prob


# ---- weights


class Shards:
    """Numbers in a device's shards of a model's weights, or of its adapter's.

    vectors, matrices: of all weights. layers: of the layers; gathered_last: of those among them whose last dimension is
    sharded over fsdp. int8: of the matrices that int8 stores, and of their scales, one for each output. tiles: of all
    matrices after padding to a TPU's tiles; padded: of those that this changes. largest: of the largest array.
    """

    def __init__(
        self, model: ModelConfig, head: HeadKind, layout: Layout, fsdp: int, tensor: int, lora: LoRAConfig | None = None
    ):
        table = weights_of(model, head, lora, tensor)
        shards = [(weight, weight.shard(layout, fsdp, tensor)) for weight in table]
        matrices = [shape for weight, shape in shards if not weight.vector]
        layers = [(weight.axes[-1], shape) for weight, shape in shards if weight.layered]
        inputs = [(weight.inputs, shape) for weight, shape in shards if weight.inputs]
        self.vectors = _size(shape for weight, shape in shards if weight.vector)
        self.matrices, self.layers = _size(matrices), _size(shape for _, shape in layers)
        self.gathered_last = _size(shape for axis, shape in layers if axis == "embed")
        scales = _size((shape[0], *shape[1 + count :]) for count, shape in inputs)
        self.int8 = _size(shape for _, shape in inputs), scales
        self.largest = float(max(prod(shape) for _, shape in shards))
        self.tiles = float(sum(map(tiled, matrices)))
        self.padded = float(sum(tiled(shape) for shape in matrices if tiled(shape) != prod(shape)))

    def stored(self, itemsize: int, pipeline: int = 1) -> float:
        """Returns the bytes of the weights. itemsize: of matrices; vectors are float32. pipeline: as fsdp, in addition:
        between calls the stages store the whole model, each a part of every matrix."""
        return WIDE * self.vectors + itemsize * self.matrices / pipeline


def _size(shapes: Iterable[tuple[int, ...]]) -> float:
    return float(sum(map(prod, shapes)))


shards_of = cache(Shards)


def tiled(shape: tuple[int, ...]) -> int:
    """Returns the size of a float32 array after padding to a TPU's row-major tiles of 8 x 128; 1, 2, 4 rows are not."""
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[-2:]
    height = rows if rows in (1, 2, 4) else 8 * ceil(rows / 8)
    return prod(shape[:-2]) * height * 128 * ceil(columns / 128)


def trained_bytes(model: RoleModel, fsdp: int, tensor: int, pipeline: int = 1) -> float:
    """Returns the float32 bytes of a role's trained weights, its own or its adapter's. Gradients need as many."""
    layout, fsdp, pipeline = (TRAIN, fsdp, pipeline) if model.lora is None else (GENERATE, 1, 1)
    return shards_of(model.config, model.head, layout, fsdp, tensor, model.lora).stored(WIDE, pipeline)


def moment_bytes(model: RoleModel, fsdp: int, tensor: int, pipeline: int = 1) -> float:
    """Returns the bytes of the state of a trained model's optimizer: of AdamW two float32 for each weight."""
    if (state := model.state) is None:
        return 2 * trained_bytes(model, fsdp, tensor, pipeline)
    layout, parts = (TRAIN, fsdp * pipeline) if model.lora is None else (GENERATE, 1)
    shards = {
        weight.path: prod(weight.shard(layout, parts, tensor))
        for weight in weights_of(model.config, model.head, model.lora, tensor)
    }
    return float(state.others + sum(shards[path] * itemsize for path, itemsize in state.like))


def checkpoint_bytes(workload: Workload) -> float:
    """Returns the bytes of weights and optimizer states in a checkpoint: of AdamW three float32 for each number."""
    trained = [model for models in keepers(workload).values() for model in models if model.trained]
    return sum(trained_bytes(model, 1, 1) + moment_bytes(model, 1, 1) for model in trained)


def saving_bytes(workload: Workload, plan: Plan) -> float:
    """Predicts the temporary bytes of a device while a checkpoint is saved: of the arrays whose fingerprints a program
    computes, which are a group or a larger single one (`run.checkpoints.fingerprints`)."""
    total = largest = 0.0
    for role, models in keepers(workload).items():
        if (call := home_of(workload.graph, role, plan)) is not None:
            home = plan[call.name]
            for model in models if call.kind == "train" else ():
                layout, fsdp = (TRAIN, home.stored[1]) if model.lora is None else (GENERATE, 1)
                shards = shards_of(model.config, model.head, layout, fsdp, home.tensor, model.lora)
                sizes = home.fsdp, home.tensor, home.pipeline
                total += trained_bytes(model, *sizes) + moment_bytes(model, *sizes)
                largest = max(largest, WIDE * shards.largest)
    return min(total, max(GROUP_BYTES, largest))


def state_bytes(models: Sequence[RoleModel], itemsize: int, home: Placement) -> dict[str, float]:
    """Returns the bytes that a role stores of all its models on each device of its home, by part.

    "base" exists once for all roles that share it. itemsize: of the compute dtype. Raises a ValueError if a model does
    not divide.
    """
    sizes = defaultdict[str, float](float)
    for model in models:
        if model.shared:
            base = shards_of(model.config, "lm", GENERATE, 1, home.tensor)
            numbers, scales = base.int8 if model.int8 else (0.0, 0.0)
            sizes["base"] = base.stored(itemsize) + (1 - itemsize) * numbers + WIDE * scales
        own = trained_bytes(model, home.fsdp, home.tensor, home.pipeline)
        if model.trained or model.lora is not None:
            sizes["weights"] += own
        elif not model.is_base:
            sizes["weights"] += _frozen_bytes(model, WIDE if model.wide else itemsize, home)
        if model.trained:
            moments = moment_bytes(model, home.fsdp, home.tensor, home.pipeline)
            sizes["optimizer"] += moments + COUNTERS * (model.state is None)
    return dict(sizes)


def _frozen_bytes(model: RoleModel, itemsize: int, placement: Placement) -> float:
    """Returns the bytes of a model's own weights on a device, if the placement stores them but does not train them."""
    layout, pipeline = TRAIN, placement.pipeline
    if placement.layout == "generate":  # no run generates in stages
        layout, pipeline, model = GENERATE, 1, _stage(model, placement)
    return shards_of(model.config, model.head, layout, placement.fsdp, placement.tensor).stored(itemsize, pipeline)


# ---- what is offloaded


Part = Literal["weights", "optimizer", "generation"]
Place = Literal["device", "pinned_host", "dropped"]
Away = Mapping[tuple[str, str], Collection[Part]]
"""(role, name of any role's call) -> the parts of the role's state that are in host memory while that call runs."""


def residency(config: Config, role: str, call: Call, following: Call | None = None) -> dict[Part, Place]:
    """Returns the place of each part of a role's model while a call of the algorithm runs.

    role: a role with weights; a fused update uses those of the actor and the critic.
    following: the next call with a model. With `sleep.ahead`, the parts that it needs may be on the devices already.

    The parts are "weights", a trained role's "optimizer", and the actor's "generation": the copy of the weights for
    generation, and the KV cache. `generate` brings offloaded weights to the devices to make that copy, and then frees
    them. With LoRA there is no copy; "weights" are then the adapter's, because the base is never offloaded.
    """
    sleep = config.offloading
    ahead = [following] if sleep.ahead and following is not None and following.role != call.role else []
    users = [user for user in (call, *ahead) if user.role == role or (user.role == LEARNER and role in LEARNED)]
    generates_with_copy = role == "actor" and config.lora is None
    needed = any(user is following or user.kind != "generate" or not generates_with_copy for user in users)
    places: dict[Part, Place] = {"weights": "pinned_host" if sleep.weights_of(role) and not needed else "device"}
    if role in ("actor", "critic", "cost_critic"):
        trained = any(user.kind == "train" for user in users)
        places["optimizer"] = "device" if trained or sleep.optimizer == "device" else "pinned_host"
    if role == "actor":
        places["generation"] = "device" if call.role == role and call.kind == "generate" else "dropped"
    return places


def away_parts(config: Config, workload: Workload) -> Away:
    """Returns what is offloaded during every call of a graph. Only RL algorithms offload anything."""
    if workload.graph.name != config.algorithm:
        return {}
    calls = [call for call in workload.graph if call.kind != "compute"]
    following = dict(pairwise(calls))

    def offloaded(role: str, call: Call) -> list[Part]:
        places = residency(config, role, call, following.get(call))
        return [part for part, place in places.items() if place == "pinned_host"]

    return {(role, call.name): offloaded(role, call) for role, call in product(keepers(workload), calls)}


# ---- calls


@dataclass(frozen=True)
class CallBytes:
    """Bytes of one device. active: parts that a call adds while it runs, by name. moved: a copy of the weights, which
    is added if the role is stored elsewhere.
    """

    active: Mapping[str, float]
    moved: float = 0.0


def call_bytes(workload: Workload, call: Call, placement: Placement, backend: Backend = DEFAULT) -> CallBytes:
    """Predicts the bytes that a call with a model adds. Raises a ValueError if a model does not divide."""
    moved = 0.0
    active: Phase = {}
    for model in workload.models.get(call.role, ()):
        needs = _active(workload, call, _stage(model, placement), placement, backend)
        # Adapters compute with the base that is already there.
        copied = 0.0 if model.shared else _frozen_bytes(model, workload.itemsize, placement)
        if call.kind == "generate":
            needs["generation weights"] = copied
        else:
            moved = max(moved, copied)
        if call.kind == "train":  # models in one program all keep residuals for their backward passes
            active = {part: active.get(part, 0.0) + needs.get(part, 0.0) for part in {**active, **needs}}
        else:  # one after the other
            active = max(active, needs, key=lambda parts: sum(parts.values()))
    return CallBytes({part: size for part, size in active.items() if size}, moved)


def _stage(model: RoleModel, placement: Placement) -> RoleModel:
    """Returns a pipeline stage's share of a model's layers. Embedding and head are counted on every stage."""
    if placement.pipeline == 1:
        return model
    layers = ceil(model.config.layers / placement.pipeline)
    return replace(model, config=replace(model.config, layers=layers, local_layers=()))


def _active(workload: Workload, call: Call, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    """Predicts what a call adds for one model: its largest phase, and its inputs and outputs."""
    if call.kind == "compute":  # the model is stored but does not compute
        return {}
    if model.shared:  # an adapter computes in the layout in which its base is stored
        placement = replace(placement, layout="generate")
    predict, token = {
        "generate": (_generating, GENERATED),
        "infer": (_scoring, SCORED),
        "train": (_training, TRAINED),
    }[call.kind]
    # In stages the bare base is scored in a pass of its own.
    rows = workload.rows if call.kind == "infer" and placement.pipeline > 1 else workload.rows_of(call)
    inputs = token * rows * workload.length / placement.devices.count
    return predict(workload, rows, model, placement, backend) | {"inputs": inputs}


def _training(workload: Workload, rows: float, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    sizes, parts = _arrays(workload, rows / workload.minibatches, model, placement, backend), placement.micro_batches
    gradients = _gradients(model, placement, backend, loop=workload.minibatches > 1)
    transposed = _transposed(model, placement, WIDE)
    needs = activations.train_phase(sizes, workload.remat, gradients, parts, transposed)
    if placement.pipeline > 1:
        # A stage keeps its inputs in flight and a copy of its weights. At the end gradients are sent back; those of an
        # adapter to every device.
        returned = 1 if model.lora is None else placement.pipeline
        needs["inputs in flight"] = _in_flight(placement.schedule, placement.pipeline, parts) * sizes.hidden
        needs["copies of stages"] = (1 + returned) * gradients.whole
    return needs


def _scoring(workload: Workload, rows: float, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    fsdp, tensor, staged = placement.fsdp, placement.tensor, placement.pipeline > 1
    stored = WIDE if (model.trained or model.wide) and not staged else workload.itemsize
    cast = 0.0
    if stored != workload.itemsize and placement.layout != "generate":
        cast = shards_of(model.config, model.head, TRAIN, fsdp, tensor).layers * workload.itemsize
    sizes = _arrays(workload, rows, model, placement, backend)
    needs = activations.infer_phase(sizes, _transposed(model, placement, stored), cast)
    if staged:
        # The first stage has the embeddings and sends an output, the last one the head and an input. A part of a base
        # is no copy.
        one_table = replace(model.config, tie_embeddings=True)
        needs["inputs in flight"] = sizes.hidden
        if model.lora is not None:
            needs["copies of stages"] = trained_bytes(model, fsdp, tensor)
        elif not model.shared:
            needs["copies of stages"] = shards_of(one_table, model.head, TRAIN, fsdp, tensor).stored(stored)
    return needs


def _arrays(workload: Workload, rows: float, model: RoleModel, placement: Placement, backend: Backend) -> Arrays:
    """Returns the arrays of a micro-batch of these rows."""
    # Devices that compute a layer in slices all have the rows of their group.
    sharing = placement.devices.count // placement.pipeline // placement.slices
    computed = rows / (sharing * placement.micro_batches)
    return Arrays(workload, model, computed, workload.length, placement, backend)


def _transposed(model: RoleModel, placement: Placement, itemsize: int) -> float:
    """Returns the stored bytes of weights that are transposed because they are gathered along their last dimension,
    unless they are gathered over both axes."""
    if placement.layout == "generate" or placement.tensor > 1 or placement.fsdp == 1:
        return 0.0
    return shards_of(model.config, model.head, TRAIN, placement.fsdp, placement.tensor).gathered_last * itemsize


@cache  # a search needs few different tables, but thousands of times
def _in_flight(schedule: ScheduleName, stages: int, micro_batches: int) -> float:
    """Returns the maximum number of stage inputs that a device of a pipeline keeps."""
    if schedule in ("1f1b", "fused"):  # a search needs large tables of them
        return min(stages, micro_batches)
    return max(peak(SCHEDULES[schedule](stages, micro_batches)))


def _gradients(model: RoleModel, placement: Placement, backend: Backend, *, loop: bool) -> GradientBytes:
    """Returns the bytes of a device's gradients. loop: several updates run in a loop."""
    fsdp, tensor = placement.fsdp, placement.tensor
    whole = trained_bytes(model, fsdp, tensor)
    if model.lora is not None:
        return GradientBytes(whole, whole, whole)
    shards = shards_of(model.config, model.head, TRAIN, fsdp, tensor)
    layers = shards.layers * WIDE
    if backend.platform != "tpu":
        return GradientBytes(layers, whole, whole)
    # Arrays that do not fill a TPU's row-major tiles arrive in another layout. A loop stores them by rows, in padded
    # tiles, so it copies the weights and both moments first.
    return GradientBytes(layers, whole, shards.tiles * WIDE, 3 * shards.padded * WIDE if loop else 0.0)


def _generating(workload: Workload, rows: float, model: RoleModel, placement: Placement, backend: Backend) -> Phase:
    config, groups, tensor = model.config, placement.data * placement.fsdp, placement.tensor
    size, computed = workload.itemsize, rows / placement.micro_batches
    slots = min(workload.slots or computed, computed) / groups
    schedule = Schedule(workload.slots, workload.chunk or workload.response, prefill=workload.prefill)
    # Prompts that are prefilled together, and their cache while they wait for slots.
    together, wave = computed / groups / workload.samples, 0.0
    if not schedule.is_one_program(ceil(computed), workload.response):
        room = max(1, int(slots) // workload.samples)
        together = max(schedule.waves(ceil(together), room, workload.prompt))
        wave = activations.cache_bytes(config, together, workload.prompt, tensor, size)
    prompts = Arrays(workload, model, together, workload.prompt, placement, backend)
    cached = activations.cache_bytes(config, slots, workload.length, tensor, size)
    return activations.generate_phase(prompts, cached, wave, WIDE * slots / tensor * config.padded_vocab, tensor)


# ---- plans


@dataclass(frozen=True)
class CallPhase:
    """A running call, on the fullest device of its slice: bytes that roles store there meanwhile, and its own."""

    call: str
    resident: float
    active: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.resident + sum(self.active.values())


@dataclass(frozen=True)
class PlanMemory:
    """Memory of a plan. roles: role -> part -> bytes on each device of its home; "base" is a separate role. saving: the
    temporary bytes while a checkpoint is saved; they are at most an update's gradients, so they are not in the peak."""

    roles: Mapping[str, Mapping[str, float]]
    phases: tuple[CallPhase, ...]
    saving: float = 0.0

    @property
    def peak(self) -> float:
        return max((phase.total for phase in self.phases), default=0.0)

    @property
    def largest(self) -> CallPhase:
        return max(self.phases, key=lambda phase: phase.total)


def keepers(workload: Workload) -> dict[str, tuple[RoleModel, ...]]:
    """Returns role -> the models that it stores. Models of a fused update belong to the roles that it trains."""
    models = dict(workload.models)
    return models | {role: (model,) for role, model in zip(LEARNED, models.pop(LEARNER, ()), strict=False)}


def fused_bytes(workload: Workload, plan: Plan, backend: Backend = DEFAULT) -> dict[str, float]:
    """Predicts the bytes that the fused updates of a plan add together, by part.

    The table's activations in flight are at most those of both calls. A role may have several pipelines, on different
    devices: the gradients of each come back whole, to be summed.
    """
    sizes = defaultdict[str, float](float)
    groups = lcm(*(plan[name].pipeline for name in plan.fused))
    for name in plan.fused:
        call, placement = workload.graph[name], plan[name]
        stages = (_stage(model, placement) for model in workload.models[call.role])
        whole = sum(trained_bytes(stage, placement.fsdp, placement.tensor) for stage in stages)
        for part, size in call_bytes(workload, call, placement, backend).active.items():
            sizes[part] += size
        sizes["gradients of further pipelines"] += (groups // placement.pipeline - 1) * whole
    return dict(sizes)


def plan_memory(workload: Workload, plan: Plan, backend: Backend = DEFAULT, *, away: Away | None = None) -> PlanMemory:
    """Predicts the memory of every call of a plan, on the fullest device of its slice.

    away: the parts that are not on the devices during a call; None: all parts always are. Raises a ValueError if a
        model does not divide.
    """
    away, fused = away or {}, fused_bytes(workload, plan, backend)
    homes, states = dict[str, Placement](), dict[str, dict[str, float]]()
    for role, models in keepers(workload).items():
        if (home := home_of(workload.graph, role, plan)) is not None:
            homes[role] = plan[home.name]
            states[role] = state_bytes(models, workload.itemsize, plan[home.name])
    bases = [parts.pop("base", 0.0) for parts in states.values()]  # one base serves all roles
    base = max(bases, default=0.0)
    groups = segments(placement.devices for placement in plan.placements.values())

    def stored(call: Call, group: Slice) -> float:
        """Returns the bytes that roles store on each of these devices while the call runs."""
        return sum(
            size
            for role, home in homes.items()
            for part, size in states[role].items()
            if home.devices.overlaps(group) and part not in away.get((role, call.name), ())
        )

    phases = []
    for call in workload.graph:
        if call.name not in plan.placements or call.role not in workload.models:
            continue
        placement, home = plan[call.name], homes.get(call.role)
        needs = call_bytes(workload, call, placement, backend)
        active = dict(fused if call.name in plan.fused else needs.active)
        if needs.moved and home is not None and not stored_alike(home, placement):
            active["moved weights"] = needs.moved
        fullest = max(stored(call, group) for group in groups if placement.devices.overlaps(group))
        phases.append(CallPhase(call.name, base + fullest, active))
    roles = ({"base": {"weights": base}} if base else {}) | states
    return PlanMemory(roles, tuple(phases), saving_bytes(workload, plan))
