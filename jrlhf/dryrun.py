"""`--dry-run`: what a run would be. Model states exact by `eval_shape`; nothing is compiled, trained or written."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.config import Config, OptimizerConfig
from jrlhf.errors import UserError
from jrlhf.launch import load_task, select_mesh
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Layout, tree_reshard_cost
from jrlhf.models import LoRAConfig, ModelConfig, param_shardings
from jrlhf.models.hf import load_adapter
from jrlhf.models.params import HeadKind
from jrlhf.models.quantize import int8_shardings, to_int8
from jrlhf.pretrained import is_here
from jrlhf.shapes import (
    Shapes,
    adapter_weights,
    device_bytes,
    generation_copy,
    placed,
    train_state,
    whole_weights,
)
from jrlhf.sources import check_sources
from jrlhf.strict import to_yaml

MIB = 2**20

# The calls of one PPO iteration in their order, and the layout in which each sees its model.
PLAN: tuple[tuple[str, str, Layout], ...] = (
    ("generate", "actor", GENERATE),
    ("score", "reward", SCORE),
    ("logprobs", "actor", SCORE),
    ("logprobs", "reference", SCORE),
    ("values", "critic", SCORE),
    ("update", "critic", TRAIN),
    ("update", "actor", TRAIN),
)


def describe(config: Config) -> str:
    """The resolved config, the data, the memory of each role on a device, and the plan, as text.

    Weights and data that a hub would have to send are not asked for: what is known of them by name is enough.

    Raises:
        UserError: the config is wrong, or does not fit the devices.
    """
    mesh, models = select_mesh(config)
    lines = [to_yaml(config), *_sources(config, models["actor"], mesh), "", *_memory(config, mesh, models)]
    if "ppo" in config.stages:
        lines += ["", *_plan(config, mesh, models)]
    return "\n".join(lines)


def _sources(config: Config, actor: ModelConfig, mesh: Mesh) -> list[str]:
    """The data's description and what was looked at; or which models and datasets are not here."""
    wanted = {"model.path": config.model.path, "roles.critic": config.roles.critic}
    wanted |= {"roles.reference": config.roles.reference}
    wanted |= {f"rewards[{index}].model": reward.model for index, reward in enumerate(config.rewards)}
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
    roles["actor"] = _state_bytes(config.ppo.actor, trained, mesh)
    if lora is None:
        roles["actor"]["generation copy"] = device_bytes(generation_copy(actor, mesh, dtype))
    roles["actor"]["KV cache"] = _cache_bytes(config, mesh, actor)
    if "ppo" in config.stages:
        shared = lora if config.lora.critic and config.roles.critic is None else None
        critic = _trained(models["critic"], mesh, shared, "scalar")
        roles["critic"] = _state_bytes(config.ppo.critic, critic, mesh)
        if lora is not None and config.roles.reference is None:
            own = device_bytes(trained) if "sft" in config.stages or config.lora.path is not None else 0
        else:
            own = device_bytes(whole_weights(models["reference"], mesh, dtype=dtype))
        roles["reference"] = {"weights": own}
    if "reward_model" in config.stages:
        roles["reward"] = {"weights": device_bytes(_trained(models["reward"], mesh, lora, "scalar"))}
    for role, model in models.items():
        if role.startswith("reward "):
            roles[role] = {"weights": device_bytes(whole_weights(model, mesh, "scalar", dtype))}
    return roles


def _memory(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig]) -> list[str]:
    roles = role_bytes(config, mesh, models)
    width = max(map(len, (*roles, "together")))
    lines = [f"memory of one device ({mesh.devices.size} in the mesh), MiB, all at once, without activations:"]
    for role, parts in roles.items():
        described = ", ".join(f"{part} {size / MIB:.3f}" for part, size in parts.items())
        lines.append(f"  {role:<{width}} {sum(parts.values()) / MIB:>12.3f}   {described}")
    lines.append(f"  {'together':<{width}} {sum(sum(parts.values()) for parts in roles.values()) / MIB:>12.3f}")
    return lines


def _plan(config: Config, mesh: Mesh, models: Mapping[str, ModelConfig]) -> list[str]:
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    lines = [f"plan of a PPO iteration on {sizes}:"]
    shared = set() if not config.lora.on else {"actor", "reference", "critic", "reward"}
    if config.lora.on:
        shared -= {role for role in ("critic", "reference") if getattr(config.roles, role) is not None}
        shared -= set() if config.lora.critic else {"critic"}
    for call, role, layout in PLAN:
        if role == "reward" and "reward_model" not in config.stages:
            continue
        if config.compute.shared_passes and call in ("logprobs", "values") and role != "reference":
            continue  # a part of the update
        seen = GENERATE if role in shared else layout
        lines.append(f"  {role + '.' + call:<20} layout {seen.name:<9} rows over {', '.join(seen.batch)}")
    for reward in config.rewards:
        kinds = {"model": reward.model, "adapter": reward.adapter, "function": reward.function}
        what = " ".join(f"{kind} {value}" for kind, value in kinds.items() if value is not None)
        lines.append(f"  {'reward.' + reward.name:<20} {what}, weight {reward.weight:g}")
    if config.lora.on:
        return [*lines, f"  no switch: training and generation use one base, stored as {GENERATE.name} stores it"]
    actor, dtype = models["actor"], jnp.dtype(config.compute.dtype)
    cost = tree_reshard_cost(_trained(actor, mesh, None), param_shardings(actor, mesh, GENERATE), dtype=dtype)
    lines.append(
        f"  the switch to {GENERATE.name}: {max(cost.received.values()) / MIB:.3f} MiB received by a device, "
        f"{max(cost.redundant.values()) / MIB:.3f} MiB held that it does not use"
    )
    return lines


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
    batch = config.ppo.rollout_batch
    rows = min(config.rollout.slots or batch, batch) // (mesh.shape["data"] * mesh.shape["fsdp"])
    positions = config.data.max_prompt + config.data.max_response
    heads = max(model.kv_heads // mesh.shape["tensor"], 1)
    itemsize = jnp.dtype(config.compute.dtype).itemsize
    return 2 * model.layers * rows * heads * positions * model.head_dim * itemsize
