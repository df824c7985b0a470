"""Checks that a run fits into its devices' memory, before anything is loaded, and suggests settings that fit."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations, product, takewhile
from math import inf, prod
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.config.devices import MOST_DEVICES
from jrlhf.config.places import expanded
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.graph import Graph
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.lora import LoRAConfig
from jrlhf.models.remat import REMATS
from jrlhf.planning.activations import DEFAULT, Backend
from jrlhf.planning.memory import GIB, Away, PlanMemory, away_parts, plan_memory
from jrlhf.planning.plans import NAMES, colocated
from jrlhf.planning.workload import RoleModel, Workload, token_budgets, with_budgets, workload_of
from jrlhf.run.devices import host_memory
from jrlhf.run.files import in_units

Changes = Mapping[str, Any]
"""Changes of settings: "micro_batches" of every call that trains, "remat", "slots", "fsdp" (with data=1), "sleep"
(states on the host while they do not train), "lora" (a rank), "devices" (all for fsdp, with as large micro-batches)."""
MOST_NAMED = 4  # maximum number of suggestions in one sentence
TOGETHER = 3  # maximum number of changes in one suggestion
ADAPTER = LoRAConfig(rank=16, alpha=32.0)


def check_memory(
    config: Config, graphs: Iterable[Graph], mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None = None
) -> None:
    """Refuses stages that cannot fit into a device's known memory. The error names the nearest settings that fit.

    graphs: of the stages. plan: of the algorithm, if there is one.
    """
    for graph in graphs:
        workload = workload_of(config, graph, models)
        own, backend, away = _planned(config, workload, mesh, plan)
        limit, source = capacity(config, mesh.devices.flat), "device.memory" if config.device.memory else "a device"
        simulated = limit is None  # simulated devices share the host's memory, so more of them do not help
        if limit is None:
            limit, source = _share_of_host(config, mesh, own), "its share of this machine"
        memory = plan_memory(workload, own, backend, away=away)
        if memory.peak <= limit:
            continue
        worst, remedy = memory.largest, remedy_of(config, workload, own, limit, backend, away, larger=not simulated)
        remedy = remedy or "fewer rows, smaller models or more memory, for no other setting fits"
        raise UserError(
            f"{worst.call} needs {in_units(worst.total)} of each device, of which roles keep "
            f"{in_units(worst.resident)}, and {source} has {in_units(limit)}: choose {remedy}"
        )


def _share_of_host(config: Config, mesh: Mesh, plan: Plan) -> float:
    """Returns the bytes for each CPU device that a call uses; infinity if the run can only be described here.

    Devices that a call does not use count as empty, so that no plan is refused that may fit.
    """
    path = config.model.path
    if mesh.devices.flat[0].platform != "cpu" or (path is not None and not expanded(path).exists()):
        return inf
    devices = min([len(mesh.local_devices), *(placement.devices.count for placement in plan.placements.values())])
    return host_memory() / devices


def memory_of(
    config: Config, graph: Graph, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None = None
) -> PlanMemory:
    """Predicts the memory of a stage's calls. plan: of the algorithm; None: calls run on the config's mesh."""
    workload = workload_of(config, graph, models)
    plan, backend, away = _planned(config, workload, mesh, plan)
    return plan_memory(workload, plan, backend, away=away)


def _planned(config: Config, workload: Workload, mesh: Mesh, plan: Plan | None) -> tuple[Plan, Backend, Away]:
    """Returns a stage's plan, with the micro-batches that token budgets lead to, its backend, and what is offloaded."""
    if plan is None or workload.graph.name != config.algorithm:
        plan = colocated(config, workload, mesh.size)
    backend = backend_of(config, mesh.devices.flat[0])
    return with_budgets(config, workload, plan), backend, away_parts(config, workload)


def capacity(config: Config, devices: Iterable[Device]) -> float | None:
    """Returns the bytes that a run may use on a device: `device.memory`, or an accelerator's report; else None."""
    if config.device.memory is not None:
        return config.device.memory * GIB
    device = next(one for one in devices if one.process_index == jax.process_index())  # only local devices report
    stats = None if device.platform == "cpu" else device.memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def backend_of(config: Config, device: Device) -> Backend:
    """Returns the compiler of the calls. Simulated devices with a given memory stand for GPUs."""
    simulated = device.platform == "cpu" and config.device.memory is None
    return Backend("tpu" if device.platform == "tpu" else "cpu" if simulated else "gpu", config.compute.attention)


_WRITTEN = {  # a setting's change as a user writes it
    "remat": "compute.remat={}",
    "slots": "rollout.slots={}",
    "fsdp": "mesh.data=1 with mesh.fsdp={}",
    "sleep": "sleep.{}=host",
    "lora": "lora.rank={}",
    "devices": "{} devices",
}


def remedy_of(
    config: Config, workload: Workload, plan: Plan, limit: float, backend: Backend, away: Away, *, larger: bool = True
) -> str:
    """Returns the nearest settings with which a plan fits, as a user writes them; "" without one. larger: more devices
    are a choice."""
    asleep = away_parts(replace(config, sleep=replace(config.offloading, optimizer="host")), workload)
    settings = suggest_settings(workload, plan, limit, backend, away=away, asleep=asleep)
    written = [_written(config, changes, workload, plan) for changes in settings if larger or "devices" not in changes]
    return " or ".join(written[:MOST_NAMED])


def _written(config: Config, changes: Changes, workload: Workload, plan: Plan) -> str:
    """Returns changes as a user writes them."""
    stage = workload.graph.name
    micro_batches = workload.parts_key + "={}"
    if "micro_batches" in changes and token_budgets(config, stage)["train"] is not None:
        devices = max(plan[name].devices.count for name in _calls(workload, plan, "train"))
        devices = devices * changes.get("devices", plan.devices) // plan.devices
        tokens = workload.rows // workload.minibatches * workload.length // devices  # per minibatch and device
        section, _ = config.update_section(stage)
        micro_batches = f"{section}.micro_batch_tokens={tokens // changes['micro_batches']}"
    texts = {**_WRITTEN, "micro_batches": micro_batches}
    if plan.name not in NAMES:  # in a plan file each call has its own mesh and parts
        texts |= {"micro_batches": "micro_batches={} in its updates", "fsdp": "data=1 with fsdp={} in its calls"}
    return " with ".join(texts[name].format(value) for name, value in changes.items())


# ---- suggestions


@dataclass(frozen=True)
class Case:
    """What changes apply to. asleep: `away` with sleep.optimizer=host."""

    workload: Workload
    plan: Plan
    away: Away
    asleep: Away


def suggest_settings(
    workload: Workload,
    plan: Plan,
    capacity: float,
    backend: Backend = DEFAULT,
    *,
    away: Away | None = None,
    asleep: Away | None = None,
) -> list[Changes]:
    """Returns the nearest changes whose peak is at most `capacity` bytes; [] if the plan fits, or nothing does.

    The fewest changes come first, each as small as possible; then adapters, if they suffice alone. More devices are
    suggested only if nothing else fits. away: what is offloaded already. asleep: what is offloaded with
    sleep.optimizer=host; None: that is no choice.
    """
    case = Case(workload, plan, away or {}, asleep or {})

    def fits(case: Case) -> bool:
        try:
            return plan_memory(case.workload, case.plan, backend, away=case.away).peak <= capacity
        except ValueError:  # a model does not divide over this mesh
            return False

    def mildest(names: Sequence[str]) -> list[Changes]:
        """Returns the first values of these changes that fit, in the order of their total number of steps; or []."""
        for step in sorted(product(*(range(len(ladders[name])) for name in names)), key=sum):
            changes = {name: ladders[name][at] for name, at in zip(names, step, strict=True)}
            if fits(reduce(_changed, changes.items(), case)):
                return [changes]
        return []

    if fits(case):
        return []
    ladders = _ladders(case)
    adapters = mildest(["lora"])  # last: it changes what is trained
    others = [name for name in ladders if name != "lora"]
    for count in range(1, TOGETHER + 1):
        if fitting := [changes for names in combinations(others, count) for changes in mildest(names)]:
            return fitting + adapters
    if adapters:
        return adapters
    for devices in _doubled(plan.devices):
        if workload.rows // workload.minibatches % devices:
            break
        more = _placed(case, partial(_on_more, times=devices // plan.devices))
        if fits(more):
            parts = _micro_batches(workload, more.plan)
            changed = {} if parts == _micro_batches(workload, plan) else {"micro_batches": parts}
            return [{"devices": devices, **changed}]
    return []


def _ladders(case: Case) -> dict[str, Sequence[Any]]:
    """Returns the values of each kind of change, the mildest first."""
    workload, places = case.workload, case.plan.placements.values()
    training, generating = (
        [case.plan[name] for name in _calls(workload, case.plan, kind)] for kind in ("train", "generate")
    )
    rows, slots = workload.rows // workload.minibatches, (workload.slots or workload.rows) // 2
    least = max((workload.samples * at.data * at.fsdp for at in generating), default=inf)

    def divides(parts: int) -> bool:
        own = (at.devices.count // at.pipeline for at in training)  # the stages of a pipeline share their rows
        return bool(training) and not any(rows % (devices * parts) for devices in own)

    def holds(slots: int) -> bool:
        return slots >= least and not any(slots % at.devices.count for at in generating)

    actor = workload.models.get("actor")
    adaptable = actor and actor[0].lora is None and actor[0].config.gated_mlp and actor[0].config.positions == "rotary"
    return {
        "micro_batches": [*takewhile(divides, _doubled(_micro_batches(workload, case.plan)))],
        "remat": REMATS[: REMATS.index(workload.remat)][::-1],  # policies that keep less
        "slots": [*takewhile(holds, (slots >> halved for halved in range(slots.bit_length())))],
        "fsdp": [max(prod(at.stored[:2]) for at in places)] if any(at.data > 1 for at in places) else [],
        # Fused updates need both models' states at a time.
        "sleep": ["optimizer"] if case.asleep and not case.plan.fused else [],
        "lora": [ADAPTER.rank] if adaptable else [],
    }


def _changed(case: Case, change: tuple[str, Any]) -> Case:
    workload = case.workload
    match change:
        case "micro_batches", parts:
            calls = _calls(workload, case.plan, "train")
            if case.plan.name == "colocate":  # the calls of a stage that score in pipeline stages have as many
                calls += [name for name in _calls(workload, case.plan, "infer") if case.plan[name].pipeline > 1]
            return _placed(case, lambda at: replace(at, micro_batches=parts), calls)
        case "fsdp", _:
            return _placed(case, lambda at: replace(at, data=1, fsdp=at.data * at.fsdp))
        case "sleep", _:
            return replace(case, away=case.asleep)
        case "lora", _:
            return replace(case, workload=_adapted(workload))
    return replace(case, workload=replace(workload, **dict([change])))  # "remat" and "slots"


def _adapted(workload: Workload) -> Workload:
    """Returns the workload with adapters in place of the models that have the actor's architecture. Frozen scalar
    models stay, because they do not start from the actor."""
    config = workload.models["actor"][0].config

    def adapted(model: RoleModel) -> RoleModel:
        if model.config != config or (not model.trained and model.head == "scalar"):
            return model
        return replace(model, lora=ADAPTER if model.trained else None, is_base=not model.trained)

    return replace(workload, models={role: tuple(map(adapted, models)) for role, models in workload.models.items()})


def _placed(case: Case, change: Callable[[Placement], Placement], calls: Sequence[str] | None = None) -> Case:
    chosen = case.plan.placements if calls is None else calls
    placements = {name: change(at) if name in chosen else at for name, at in case.plan.placements.items()}
    return replace(case, plan=replace(case.plan, placements=placements))


def _micro_batches(workload: Workload, plan: Plan) -> int:
    """Returns the largest number of micro-batches of an update."""
    return max((plan[name].micro_batches for name in _calls(workload, plan, "train")), default=1)


def _calls(workload: Workload, plan: Plan, kind: str) -> list[str]:
    return [call.name for call in workload.graph if call.kind == kind and call.name in plan.placements]


def _on_more(at: Placement, times: int) -> Placement:
    """Returns the placement on `times` as many devices, all of them along fsdp, with micro-batches of the same size."""
    devices = Slice(at.devices.start * times, at.devices.count * times)
    parts = at.pipeline * max(1, at.micro_batches // (times * at.pipeline))  # enough for the stages
    return replace(at, devices=devices, fsdp=at.fsdp * times, micro_batches=parts)


def _doubled(count: int) -> Iterator[int]:
    while count < MOST_DEVICES:
        count *= 2
        yield count
