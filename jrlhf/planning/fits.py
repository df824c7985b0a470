"""Whether a run fits into its devices' memory, before anything is loaded; and what to set where it does not."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Graph
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import Plan
from jrlhf.models import ModelConfig
from jrlhf.planning.activations import Backend
from jrlhf.planning.choose import colocated
from jrlhf.planning.from_config import divided, token_budgets, updates_of, workload_of
from jrlhf.planning.memory import GIB, PlanMemory, keepers, plan_memory
from jrlhf.planning.nearest import Setting, nearest
from jrlhf.planning.prices import Prices
from jrlhf.planning.residency import away_parts
from jrlhf.planning.simulator import simulate
from jrlhf.planning.workload import Workload

MOST_NAMED = 4  # settings in one sentence


def check_memory(
    config: Config, graphs: Iterable[Graph], mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None = None
) -> None:
    """Refuses what cannot fit, where the memory of a device is known. plan: of the algorithm, where there is one.

    Raises:
        UserError: one sentence: the call that needs most, what there is, and the nearest settings that fit.
    """
    limit = capacity(config, mesh.devices.flat)
    if limit is not None:
        for graph in graphs:
            _check_stage(config, workload_of(config, graph, models), mesh, plan, limit)


def _check_stage(config: Config, workload: Workload, mesh: Mesh, plan: Plan | None, limit: float) -> None:
    backend = backend_of(config, mesh.devices.flat[0])
    plan, away = _planned(config, workload, mesh, plan), away_parts(config, workload.graph, keepers(workload))
    memory = plan_memory(workload, plan, backend, away=away)
    if memory.peak <= limit:
        return
    worst, source = memory.largest, "device.memory" if config.device.memory is not None else "a device"
    settings = nearest(workload, plan, limit, backend, away=away)
    remedy = " or ".join(_keys(config, each, workload, plan) for each in settings[:MOST_NAMED])
    raise UserError(
        f"{worst.call} needs {worst.total / GIB:.4g} GiB of each device, of which roles keep "
        f"{worst.resident / GIB:.4g}, and {source} has {limit / GIB:.4g}: "
        + (f"choose {remedy}" if remedy else "no setting makes it fit, choose smaller models or more memory")
    )


def check_fits(workload: Workload, plan: Plan, prices: Prices) -> None:
    """Refuses a plan whose calls do not fit a device's memory together, at any time of an iteration.

    Raises:
        UserError: the fullest devices, what they lack, and the nearest settings of the plan.
    """
    result = simulate(workload.graph, plan, prices, iterations=2)
    if result.peak <= prices.capacity:
        return
    fullest = max(result.memory, key=lambda each: each.peak)
    here = [name for name, placement in plan.placements.items() if placement.devices.overlaps(fullest.devices)]
    largest = max(here, key=lambda name: prices.call(workload.graph[name], plan[name]).active)
    parts = "fewer rollout.slots" if workload.graph[largest].kind == "generate" else "more micro_batches"
    raise UserError(
        f"plan {plan.name} needs {result.peak / GIB:.1f} GiB on each of devices {fullest.devices}, which have "
        f"{prices.capacity / GIB:.1f}, {fullest.resident / GIB:.1f} of it for what stays and the rest for {largest}: "
        f"give {largest} {parts}, or its role more devices or fsdp"
    )


def memory_of(
    config: Config, graph: Graph, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None = None
) -> PlanMemory:
    """Predicts the memory of a stage's calls: the algorithm's by `plan` if given, others' on the config's mesh."""
    workload = workload_of(config, graph, models)
    plan = _planned(config, workload, mesh, plan)
    away = away_parts(config, graph, keepers(workload))
    return plan_memory(workload, plan, backend_of(config, mesh.devices.flat[0]), away=away)


def capacity(config: Config, devices: Iterable[Device]) -> float | None:
    """Bytes of a device that a run may use: `device.memory`, or what an accelerator says; None where neither is."""
    if config.device.memory is not None:
        return config.device.memory * GIB
    device = next(each for each in devices if each.process_index == jax.process_index())  # others cannot be asked
    said = None if device.platform == "cpu" else device.memory_stats()
    return None if said is None else said.get("bytes_limit")


def backend_of(config: Config, device: Device) -> Backend:
    """What compiles the calls. Simulated devices whose memory is given stand for GPUs."""
    simulated = device.platform == "cpu" and config.device.memory is None
    return Backend("tpu" if device.platform == "tpu" else "cpu" if simulated else "gpu", config.compute.attention)


def _planned(config: Config, workload: Workload, mesh: Mesh, plan: Plan | None) -> Plan:
    """The plan, if the stage has it, with the parts into which budgets of tokens divide rows."""
    if plan is None or workload.graph.name != config.algorithm:
        plan = colocated(config, workload, mesh.size)
    return divided(config, workload, plan)


def _keys(config: Config, setting: Setting, workload: Workload, plan: Plan) -> str:
    """A setting's changes as a user would write them."""
    stage = workload.graph.name
    key, budget = f"{updates_of(config, stage)[0]}.micro_batch", token_budgets(config, stage)["train"]
    training = [plan[call.name].devices.count for call in workload.graph if call.kind == "train"]
    count = max(training) * setting.changes.get("devices", plan.devices) // plan.devices
    tokens = workload.rows // workload.minibatches * workload.length // count  # of a minibatch on a device
    written = {
        "micro_batches": lambda parts: f"{key}es={parts}" if budget is None else f"{key}_tokens={tokens // parts}",
        "remat": lambda remat: f"compute.remat={remat}",
        "slots": lambda slots: f"rollout.slots={slots}",
        "fsdp": lambda fsdp: f"mesh.data=1 with mesh.fsdp={fsdp}",
        "sleep": lambda part: f"sleep.{part}=host",
        "lora": lambda rank: f"lora.rank={rank}",
        "devices": lambda count: f"{count} devices",
    }
    return " with ".join(_written(written, name, value) for name, value in setting.changes.items())


def _written(written: Mapping[str, Any], name: str, value: Any) -> str:
    return written[name](value)
