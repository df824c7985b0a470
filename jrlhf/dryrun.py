"""`--dry-run`: what a run would be. Model states exact by `eval_shape`; nothing is compiled, trained or written."""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.config import Config, OptimizerConfig
from jrlhf.context import model_config, select_mesh
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Layout, tree_reshard_cost
from jrlhf.models import init_lm, init_scalar, param_shardings
from jrlhf.optimizers import adamw
from jrlhf.strict import to_yaml
from jrlhf.task import load_task

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
    """The resolved config, the memory of each role on a device, and the plan, as text.

    Raises:
        UserError: the config is wrong, or does not fit the devices.
    """
    mesh = select_mesh(config)
    task = load_task(config.data, config.model.vocab_size)
    lines = [to_yaml(config), f"data: {task.describe()}", "", *_memory(config, mesh)]
    if "ppo" in config.stages:
        lines += ["", *_plan(config, mesh)]
    return "\n".join(lines)


def role_bytes(config: Config, mesh: Mesh) -> dict[str, dict[str, int]]:
    """Role -> part -> bytes that a device holds of it between calls (generation copy and cache: while generating)."""
    model = model_config(config)
    key = jax.eval_shape(lambda: jax.random.key(0))
    lm = _placed(jax.eval_shape(partial(init_lm, model), key), param_shardings(model, mesh, TRAIN))
    scalar = _placed(jax.eval_shape(partial(init_scalar, model), key), param_shardings(model, mesh, TRAIN, "scalar"))
    dtype = jnp.dtype(config.compute.dtype)
    copy = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree), lm)
    copy = _placed(_unstacked(copy, model.layers), param_shardings(model, mesh, GENERATE))
    actor = {"weights": _bytes(lm), "optimizer": _optimizer_bytes(config.ppo.actor, lm, mesh)}
    roles = {"actor": actor | {"generation copy": _bytes(copy), "KV cache": _cache_bytes(config, mesh)}}
    if "ppo" in config.stages:
        critic = _optimizer_bytes(config.ppo.critic, scalar, mesh)
        roles["critic"] = {"weights": _bytes(scalar), "optimizer": critic}
        roles["reference"] = {"weights": _bytes(lm)}
    if "reward_model" in config.stages:
        roles["reward"] = {"weights": _bytes(scalar)}
    return roles


def _memory(config: Config, mesh: Mesh) -> list[str]:
    roles = role_bytes(config, mesh)
    lines = [f"memory of one device ({mesh.devices.size} in the mesh), MiB, without activations:"]
    for role, parts in roles.items():
        described = ", ".join(f"{part} {size / MIB:.3f}" for part, size in parts.items())
        lines.append(f"  {role:<10} {sum(parts.values()) / MIB:>12.3f}   {described}")
    lines.append(f"  {'together':<10} {sum(sum(parts.values()) for parts in roles.values()) / MIB:>12.3f}")
    return lines


def _plan(config: Config, mesh: Mesh) -> list[str]:
    model = model_config(config)
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    lines = [f"plan of a PPO iteration on {sizes}:"]
    for call, role, layout in PLAN:
        lines.append(f"  {role + '.' + call:<20} layout {layout.name:<9} rows over {', '.join(layout.batch)}")
    key = jax.eval_shape(lambda: jax.random.key(0))
    lm = _placed(jax.eval_shape(partial(init_lm, model), key), param_shardings(model, mesh, TRAIN))
    cost = tree_reshard_cost(lm, param_shardings(model, mesh, GENERATE), dtype=jnp.dtype(config.compute.dtype))
    lines.append(
        f"  the switch to {GENERATE.name}: {max(cost.received.values()) / MIB:.3f} MiB received by a device, "
        f"{max(cost.redundant.values()) / MIB:.3f} MiB held that it does not use"
    )
    return lines


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _unstacked(tree: Any, layers: int) -> Any:
    """The tree of GENERATE: "layers" as a list of one tree a layer."""
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree["layers"])
    return {**tree, "layers": [layer] * layers}


def _bytes(tree: Any) -> int:
    """Bytes of one device's shards."""
    return sum(jnp.dtype(x.dtype).itemsize * prod(_shard_shape(x)) for x in jax.tree.leaves(tree))


def _shard_shape(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


def _optimizer_bytes(config: OptimizerConfig, params: Any, mesh: Mesh) -> int:
    with jax.set_mesh(mesh):  # under Explicit axes the moments' types say where they lie
        return _bytes(jax.eval_shape(adamw(config, updates=1).init, params))


def _cache_bytes(config: Config, mesh: Mesh) -> int:
    """Keys and values of a rollout: [rows, kv-heads, positions, head_dim] a layer, rows over data and fsdp."""
    model, tensor = config.model, mesh.shape["tensor"]
    rows = config.ppo.rollout_batch // (mesh.shape["data"] * mesh.shape["fsdp"])
    positions = config.data.max_prompt + config.data.max_response
    heads = max(model.kv_heads // tensor, 1)
    itemsize = jnp.dtype(config.compute.dtype).itemsize
    return 2 * model.layers * rows * heads * positions * model.head_dim * itemsize
