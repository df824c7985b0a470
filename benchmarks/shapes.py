"""The arrays of a run before there are any: `jax.ShapeDtypeStruct`s that say where each would lie on the mesh."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.config.stages import OptimizerConfig
from jrlhf.meshes import GENERATE, TRAIN
from jrlhf.models import LoRAConfig, ModelConfig, init_lm, init_lora, init_scalar, lora_shardings, param_shardings
from jrlhf.models.params import cast_matrices
from jrlhf.models.quantize import int8_shardings, to_int8
from jrlhf.models.weights import HeadKind
from jrlhf.ppo import Experience, TrainState
from jrlhf.roles.optimizers import adamw

Shapes = Any  # a tree of jax.ShapeDtypeStruct with shardings


def placed(tree: Any, shardings: Any) -> Shapes:
    """The shapes of `tree` where `shardings`, which mirrors it, says."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def whole_weights(model: ModelConfig, mesh: Mesh, head: HeadKind = "lm", dtype: Any = jnp.float32) -> Shapes:
    """All weights in TRAIN storage; matrices in `dtype`."""
    shapes = jax.eval_shape(partial(init_lm if head == "lm" else init_scalar, model), _key())
    axes = param_shardings(model, mesh, TRAIN, head)
    return placed(jax.eval_shape(partial(cast_matrices, dtype=dtype), shapes), axes)


def adapter_weights(model: ModelConfig, mesh: Mesh, lora: LoRAConfig, head: HeadKind = "lm") -> Shapes:
    """An adapter's weights, float32."""
    shapes = jax.eval_shape(partial(init_lora, model, lora, head=head), _key())
    return placed(shapes, lora_shardings(model, mesh, lora, head))


def generation_copy(model: ModelConfig, mesh: Mesh | AbstractMesh, dtype: Any) -> Shapes:
    """The tree of GENERATE: "layers" as a list of one tree a layer; matrices in `dtype`."""
    shapes = jax.eval_shape(partial(init_lm, model), _key())
    cast = jax.eval_shape(partial(cast_matrices, dtype=dtype), shapes)
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), cast["layers"])
    return placed({**cast, "layers": [layer] * model.layers}, param_shardings(model, mesh, GENERATE))


def shared_base(model: ModelConfig, mesh: Mesh, dtype: Any, int8: bool) -> Shapes:
    """The base under adapters: as generation takes it, or with the layers' matrices as int8."""
    base = generation_copy(model, mesh, dtype)
    if not int8:
        return base
    return placed(jax.eval_shape(to_int8, base), int8_shardings(param_shardings(model, mesh, GENERATE)))


def train_state(config: OptimizerConfig, params: Shapes, mesh: Mesh) -> TrainState:
    """Weights with AdamW's state; scalars on every device."""
    with jax.set_mesh(mesh):  # under Explicit axes the moments' types say where they lie
        moments = jax.eval_shape(adamw(config, updates=1).init, params)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(params, *jax.tree.map(partial(_on, mesh), (moments, step)))


def device_bytes(tree: Shapes) -> int:
    """Bytes of one device's shards."""
    return sum(jnp.dtype(x.dtype).itemsize * prod(_shard_shape(x)) for x in jax.tree.leaves(tree))


def _on(mesh: Mesh, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    spec = P() if x.sharding is None else x.sharding.spec
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _shard_shape(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


def _key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def experience(mesh: Mesh, rows: Callable[..., Any], length: int) -> Shapes:
    """Experience of PPO with rows of this length. rows: (*shape, dtype) -> an array with a rollout's rows."""
    flat, floats = rows(), rows(length, dtype=jnp.float32)
    version: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return Experience(
        tokens=rows(length),
        prompt_lengths=flat,
        response_lengths=flat,
        logprobs=floats,
        finished=rows(dtype=jnp.bool_),
        version=version,
        scores=rows(dtype=jnp.float32),
        response_mask=rows(length, dtype=jnp.bool_),
        old_logprobs=floats,
        ref_logprobs=floats,
        values=floats,
        rewards=floats,
        advantages=floats,
        returns=floats,
    )
