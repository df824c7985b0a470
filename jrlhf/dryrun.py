"""`--dry-run`: what a run would be. States are exact, calls predicted; nothing is compiled, trained or written."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.algorithms import graph_of, reference_is_base
from jrlhf.config import Config, config_yaml
from jrlhf.dataflow import trace
from jrlhf.dpo import PairActor, dpo
from jrlhf.errors import UserError
from jrlhf.launch import load_task, select_mesh, select_plan
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Call, Layout, tree_reshard_cost
from jrlhf.meshes.plan import Plan
from jrlhf.models import LoRAConfig, ModelConfig, param_shardings
from jrlhf.models.hf import load_adapter
from jrlhf.models.params import HeadKind
from jrlhf.models.quantize import int8_shardings, to_int8
from jrlhf.places import LAYOUTS, places_of
from jrlhf.planning.fits import backend_of, capacity, check_memory, memory_of
from jrlhf.planning.runnable import on_base, only_functions
from jrlhf.pretrained import is_here
from jrlhf.roles import Reference
from jrlhf.shapes import (
    Shapes,
    adapter_weights,
    device_bytes,
    generation_copy,
    placed,
    train_state,
    whole_weights,
)
from jrlhf.sources import check_reward_adapter, check_sources
from jrlhf.stage_config import OptimizerConfig, PPOStageConfig

MIB = 2**20


def describe(config: Config) -> str:
    """The resolved config, the data, the memory of each role on a device, and the plan, as text.

    Weights and data that a hub would have to send are not asked for: what is known of them by name is enough.

    Raises:
        UserError: the config is wrong, or does not fit the devices or their memory.
    """
    mesh, models = select_mesh(config)
    plan = None if config.algorithm is None else select_plan(config, models, list(mesh.devices.flat))
    check_memory(config, mesh, models, plan)
    lines = [config_yaml(config), *_sources(config, models["actor"], mesh), "", *_memory(config, mesh, models, plan)]
    if config.algorithm is not None or "dpo" in config.stages:
        lines += ["", *_calls(config, mesh, models, plan)]
    if plan is not None:
        lines += ["", *_plan(config, mesh, models, plan)]
    if "dpo" in config.stages:
        lines += ["", *_dpo_plan(config, mesh)]
    return "\n".join(lines)


def _sources(config: Config, actor: ModelConfig, mesh: Mesh) -> list[str]:
    """The data's description and what was looked at; or which models and datasets are not here."""
    wanted = {"model.path": config.model.path, "roles.critic": config.roles.critic}
    wanted |= {"roles.reference": config.roles.reference}
    wanted |= {f"rewards[{index}].model": reward.model for index, reward in enumerate(config.rewards)}
    wanted |= {f"costs[{index}].model": cost.model for index, cost in enumerate(config.costs)}
    if config.data.source == "datasets":
        parts = ("sft", "preferences", "prompts", "heldout")
        wanted |= {f"data.{part}.path": getattr(config.data, part).path for part in parts}
    missing = {key: path for key, path in wanted.items() if path is not None and not is_here(path)}
    if missing:
        return [f"{key}={path} is not here: not looked at" for key, path in missing.items()]
    task = load_task(config, actor)
    check_sources(config, task, actor, mesh)
    return task.description.splitlines()


def role_bytes(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig]) -> dict[str, dict[str, int]]:
    """Role -> part -> bytes on a device. Generation copy and cache live while generating, gradients while updating."""
    dtype, actor = jnp.dtype(config.compute.dtype), models["actor"]
    lora = _lora(config, actor, mesh)
    roles: dict[str, dict[str, int]] = {}
    if lora is not None:
        base = generation_copy(actor, mesh, dtype)
        if config.lora.base == "int8":
            stored = int8_shardings(param_shardings(actor, mesh, GENERATE))
            base = placed(jax.eval_shape(to_int8, base), stored)
        roles["base"] = {"weights": device_bytes(base)}
    trained = _trained(actor, mesh, lora)
    roles["actor"] = _state_bytes(config.dpo if "dpo" in config.stages else config.rl.actor, trained, mesh)
    if lora is None:
        roles["actor"]["generation copy"] = device_bytes(generation_copy(actor, mesh, dtype))
    roles["actor"]["KV cache"] = _cache_bytes(config, mesh, actor)
    for name in ("critic", "cost_critic"):
        if name in models:
            assert isinstance(config.rl, PPOStageConfig)
            own = name == "critic" and (config.roles.critic is not None or not config.lora.critic)
            critic = _trained(models[name], mesh, None if own else lora, "scalar")
            roles[name] = _state_bytes(config.rl.critic, critic, mesh)
    if "reference" in models:
        if lora is not None and config.roles.reference is None:
            own = 0 if reference_is_base(config) else device_bytes(trained)
        else:
            own = device_bytes(whole_weights(models["reference"], mesh, dtype=dtype))
        roles["reference"] = {"weights": own}
    if "reward_model" in config.stages:
        roles["reward"] = {"weights": device_bytes(_trained(models["reward"], mesh, lora, "scalar"))}
    for role, model in models.items():
        if role.startswith(("reward ", "cost ")):
            roles[role] = {"weights": device_bytes(whole_weights(model, mesh, "scalar", dtype))}
    for kind, parts in (("reward", config.rewards), ("cost", config.costs)):
        for index, part in enumerate(parts):
            if part.adapter is not None:  # small, as the policy's own
                key = f"{kind}s[{index}].adapter"
                _, adapter = check_reward_adapter(config, part.adapter, key, actor, mesh)
                roles[f"{kind} {part.name}"] = {"weights": device_bytes(adapter)}
    return roles


def _memory(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None) -> list[str]:
    if plan is not None and config.plan != "colocate":
        kept = memory_of(config, mesh, models, plan).roles
        head = "memory of a device where a role lives, MiB, of what it keeps there:"
        rows = [(role, f"{sum(parts.values()) / MIB:.3f}", _parts(parts)) for role, parts in kept.items()]
        return [head, *_in_columns(rows)]
    roles = role_bytes(config, mesh, models)
    width = max(map(len, (*roles, "together")))
    lines = [f"memory of one device ({mesh.devices.size} in the mesh), MiB, all at once, without activations:"]
    for role, parts in roles.items():
        lines.append(f"  {role:<{width}} {sum(parts.values()) / MIB:>12.3f}   {_parts(parts)}")
    lines.append(f"  {'together':<{width}} {sum(sum(parts.values()) for parts in roles.values()) / MIB:>12.3f}")
    return lines


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {size / MIB:.3f}" for part, size in parts.items())


def _calls(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan | None) -> list[str]:
    """Of each call: all that a device then holds, and of it what the call alone needs."""
    memory, backend = memory_of(config, mesh, models, plan), backend_of(config, mesh)
    rows = [("call", "in all", "roles", "the call's own")]
    for phase in memory.phases:
        own = _parts(dict(sorted(phase.active.items(), key=lambda part: -part[1])))
        rows.append((phase.call, f"{phase.total / MIB:.3f}", f"{phase.resident / MIB:.3f}", own))
    limit = capacity(config, mesh)
    room = "" if limit is None else f", which has {limit / MIB:.0f}"
    compiled = {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPUs"}[backend.platform]
    head = f"memory of one device while a call runs, MiB{room}; predicted, as XLA compiles for {compiled}:"
    return [head, *_in_columns(rows)]


def _plan(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig], plan: Plan) -> list[str]:
    graph = graph_of(config)
    rows: list[tuple[str, ...]] = [_row(call, config, plan) for call in graph]
    for kind, parts in (("reward", config.rewards), ("cost", config.costs)):
        for part in parts:
            kinds = {"model": part.model, "adapter": part.adapter, "function": part.function}
            what = " ".join(f"{name} {value}" for name, value in kinds.items() if value is not None)
            rows.append((f"{kind}.{part.name}", "", f"{what}, weight {part.weight:g}"))
    lines = [f"plan of an iteration of {config.algorithm}, {plan.name}, on {mesh.size} device(s):", *_in_columns(rows)]
    if config.lora.on:
        return [*lines, f"  no switch: training and generation use one base, stored as {GENERATE.name} stores it"]
    actor, dtype = models["actor"], jnp.dtype(config.compute.dtype)
    places = places_of(plan, graph, list(mesh.devices.flat))["actor"]
    generation = param_shardings(actor, places["generate"].mesh, GENERATE)
    cost = tree_reshard_cost(_trained(actor, places.home.mesh, None), generation, dtype=dtype)
    lines.append(
        f"  the switch to {GENERATE.name}: {max(cost.received.values()) / MIB:.3f} MiB received by a device, "
        f"{max(cost.redundant.values()) / MIB:.3f} MiB held that it does not use"
    )
    return lines


def _dpo_plan(config: Config, mesh: Mesh) -> list[str]:
    graph = trace(dpo, {"actor": PairActor, "reference": Reference})
    return [f"plan of a step of dpo on {_sizes(mesh)}:", *_in_columns([_row(call, config) for call in graph])]


def _sizes(mesh: Mesh) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _row(call: Call, config: Config, plan: Plan | None = None) -> tuple[str, ...]:
    """A call, where it runs, and what it makes of what. Without a plan it runs on the whole mesh."""
    flow = f"{', '.join(call.inputs)} -> {', '.join(call.outputs)}".lstrip()
    if plan is None or call.name not in plan.placements:
        return call.name, *(() if plan is None else ("",)), _how(call, config), flow
    placed = plan[call.name]
    sizes = zip(("data", "fsdp", "tensor"), placed.sizes, strict=True)
    parts = f" in {placed.micro_batches} parts" if placed.micro_batches > 1 else ""
    where = f"devices {placed.devices}: {' x '.join(f'{axis}={size}' for axis, size in sizes)}"
    return call.name, where, _layout(LAYOUTS[placed.layout]) + parts, flow


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


def _how(call: Call, config: Config) -> str:
    """Where a call's rows lie, and how it sees its model."""
    if call.kind == "compute":
        return "arithmetic"
    if only_functions(call.role, config):
        return "functions, beside the rest"
    return _layout(GENERATE if call.role in on_base(config) else {"infer": SCORE, "train": TRAIN}[call.kind])


def _layout(layout: Layout) -> str:
    return f"layout {layout.name:<9} rows over {', '.join(layout.batch)}"


def _lora(config: Config, actor: ModelConfig, mesh: Mesh) -> LoRAConfig | None:
    section = config.lora
    if not section.on:
        return None
    if section.path is not None:
        try:
            return load_adapter(section.path, actor, mesh)[0]  # small, and it says whether it fits
        except (ValueError, OSError) as error:
            raise UserError(f"lora.path={section.path}: {error}") from error
    assert section.rank is not None
    return LoRAConfig(rank=section.rank, alpha=section.alpha, targets=section.targets, rslora=section.rslora)


def _trained(model: ModelConfig, mesh: Mesh, lora: LoRAConfig | None, head: HeadKind = "lm") -> Shapes:
    """What a role trains, float32: all weights, or an adapter."""
    if lora is None:
        return whole_weights(model, mesh, head)
    return adapter_weights(model, mesh, lora, head)


def _state_bytes(config: OptimizerConfig, params: Shapes, mesh: Mesh) -> dict[str, int]:
    """Of a role that is trained. The gradients are there during its update only."""
    weights, moments = device_bytes(params), device_bytes(train_state(config, params, mesh).opt_state)
    return {"weights": weights, "optimizer": moments, "gradients": weights}


def _cache_bytes(config: Config, mesh: Mesh, model: ModelConfig) -> int:
    """Keys and values, [rows, kv-heads, positions, head_dim] a layer, of the rows that decode at a time."""
    batch = config.rl.rollout_batch
    rows = min(config.rollout.slots or batch, batch) // (mesh.shape["data"] * mesh.shape["fsdp"])
    positions = config.data.max_prompt + config.data.max_response
    heads = max(model.kv_heads // mesh.shape["tensor"], 1)
    itemsize = jnp.dtype(config.compute.dtype).itemsize
    return 2 * model.layers * rows * heads * positions * model.head_dim * itemsize
