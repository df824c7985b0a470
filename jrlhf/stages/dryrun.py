"""`--dry-run`: what a run would be. States are exact, calls predicted; nothing is compiled, trained or written."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.algorithms.registry import graph_of, stage_graph
from jrlhf.config import Config, config_yaml
from jrlhf.config.schema import DatasetsData
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Call, Layout, tree_reshard_cost
from jrlhf.meshes.plan import Plan
from jrlhf.models import ModelConfig, param_shardings
from jrlhf.planning.fit import backend_of, capacity, check_memory, memory_of
from jrlhf.planning.workload import Workload, workload_of
from jrlhf.roles.planned_placement import LAYOUTS, place_roles
from jrlhf.roles.pretrained import abstract_weights, is_here
from jrlhf.stages.preflight import check_sources
from jrlhf.stages.setup import load_task, select_mesh, select_plan

MIB = 2**20


def describe(config: Config) -> str:
    """The resolved config, the data, the memory of each role on a device, and the plan, as text.

    Weights and data that a hub would have to send are not asked for: what is known of them by name is enough.

    Raises:
        UserError: the config is wrong, or does not fit the devices or their memory.
    """
    mesh, models = select_mesh(config)
    plan = None if config.algorithm is None else select_plan(config, models, list(mesh.devices.flat))
    check_memory(config, [stage_graph(config, stage) for stage in config.stages], mesh, models, plan)
    lines = [config_yaml(config), *_sources(config, models["actor"], mesh), "", *_memory(config, mesh, models, plan)]
    lines += ["", *_calls(config, mesh, models, plan)]
    if plan is not None:
        lines += ["", *_plan(config, mesh, models, plan)]
    if "dpo" in config.stages:
        lines += ["", *_dpo_plan(config, mesh, models)]
    return "\n".join(lines)


def _sources(config: Config, actor: ModelConfig, mesh: Mesh) -> list[str]:
    """The data's description and what was looked at; or which models and datasets are not here."""
    wanted = {"model.path": config.model.path, "roles.critic": config.roles.critic}
    wanted |= {"roles.reference": config.roles.reference}
    wanted |= {f"rewards[{index}].model": reward.model for index, reward in enumerate(config.rewards)}
    wanted |= {f"costs[{index}].model": cost.model for index, cost in enumerate(config.costs)}
    if isinstance(config.data, DatasetsData):
        parts = ("sft", "preferences", "prompts", "heldout")
        datasets = {part: getattr(config.data, part) for part in parts}
        wanted |= {f"data.{part}.path": dataset.path for part, dataset in datasets.items() if dataset is not None}
    missing = {key: path for key, path in wanted.items() if path is not None and not is_here(path)}
    if missing:
        return [f"{key}={path} is not here: not looked at" for key, path in missing.items()]
    task = load_task(config, actor)
    check_sources(config, task, actor, mesh)
    return task.description.splitlines()


def _memory(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None) -> list[str]:
    """What each role keeps in the last stage."""
    roles = memory_of(config, stage_graph(config, config.stages[-1]), mesh, models, plan).roles
    rows = [(role, f"{sum(parts.values()) / MIB:.3f}", _parts(parts)) for role, parts in roles.items()]
    return ["memory of a device where a role lives, MiB, of what it keeps there:", *_in_columns(rows)]


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {size / MIB:.3f}" for part, size in parts.items())


def _calls(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None) -> list[str]:
    """Returns a table of the calls: all that a device holds during each, and what of it the call alone needs."""
    rows, device = [("call", "in all", "roles", "the call's own")], mesh.devices.flat[0]
    graphs = [stage_graph(config, stage) for stage in config.stages]
    phases = [phase for graph in graphs for phase in memory_of(config, graph, mesh, models, plan).phases]
    for phase in phases:
        if phase.active:
            own = _parts(dict(sorted(phase.active.items(), key=lambda part: -part[1])))
            rows.append((phase.call, f"{phase.total / MIB:.3f}", f"{phase.resident / MIB:.3f}", own))
    limit = capacity(config, mesh.devices.flat)
    room = "" if limit is None else f", which has {limit / MIB:.0f}"
    compiled = {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPUs"}[backend_of(config, device).platform]
    head = f"memory of one device while a call runs, MiB{room}; predicted, as XLA compiles for {compiled}:"
    return [head, *_in_columns(rows)]


def _plan(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan) -> list[str]:
    graph = graph_of(config)
    workload = workload_of(config, graph, models)
    rows: list[tuple[str, ...]] = [_row(call, workload, plan) for call in graph]
    for kind, parts in (("reward", config.rewards), ("cost", config.costs)):
        for part in parts:
            kinds = {"model": part.model, "adapter": part.adapter, "function": part.function}
            what = " ".join(f"{name} {value}" for name, value in kinds.items() if value is not None)
            rows.append((f"{kind}.{part.name}", "", f"{what}, weight {part.weight:g}"))
    lines = [f"plan of an iteration of {config.algorithm}, {plan.name}, on {mesh.size} device(s):", *_in_columns(rows)]
    if config.lora is not None:
        return [*lines, f"  no switch: training and generation use one base, stored as {GENERATE.name} stores it"]
    actor, dtype = models["actor"], jnp.dtype(config.compute.dtype)
    places = place_roles(plan, graph, list(mesh.devices.flat))["actor"]
    generation = param_shardings(actor, places["generate"].mesh, GENERATE)
    cost = tree_reshard_cost(abstract_weights(actor, places.home.mesh), generation, dtype=dtype)
    lines.append(
        f"  the switch to {GENERATE.name}: {max(cost.received.values()) / MIB:.3f} MiB received by a device, "
        f"{max(cost.redundant.values()) / MIB:.3f} MiB held that it does not use"
    )
    return lines


def _dpo_plan(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig]) -> list[str]:
    graph = stage_graph(config, "dpo")
    workload = workload_of(config, graph, models)
    return [f"plan of a step of dpo on {_sizes(mesh)}:", *_in_columns([_row(call, workload) for call in graph])]


def _sizes(mesh: Mesh) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _row(call: Call, workload: Workload, plan: Plan | None = None) -> tuple[str, ...]:
    """A call, where it runs, and what it makes of what. Without a plan it runs on the whole mesh."""
    flow = f"{', '.join(call.inputs)} -> {', '.join(call.outputs)}".lstrip()
    if plan is None or call.name not in plan.placements:
        return call.name, *(() if plan is None else ("",)), _how(call, workload), flow
    placed = plan[call.name]
    sizes = zip(("data", "fsdp", "tensor"), placed.sizes, strict=True)
    parts = f" in {placed.micro_batches} parts" if placed.micro_batches > 1 else ""
    location = f"devices {placed.devices}: {' x '.join(f'{axis}={size}' for axis, size in sizes)}"
    return call.name, location, _layout(LAYOUTS[placed.layout]) + parts, flow


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they have to be; a row's last cell, which nothing follows, may be longer."""
    widths = [
        max((len(row[index]) for row in rows if index < len(row) - 1), default=0)
        for index in range(max(map(len, rows)))
    ]
    return [
        "  " + "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]


def _how(call: Call, workload: Workload) -> str:
    """Where a call's rows lie, and how it sees its model."""
    if call.kind == "compute":
        return "arithmetic"
    if not workload.has_model(call):
        return "functions, beside the rest"
    return _layout(GENERATE if workload.on_base(call.role) else {"infer": SCORE, "train": TRAIN}[call.kind])


def _layout(layout: Layout) -> str:
    return f"layout {layout.name:<9} rows over {', '.join(layout.batch)}"
