"""Low-rank adapters on a frozen base (Hu et al. 2021, LoRA).

A projection of the base computes x W; its adapted form computes x W + (x a) b alpha / r: equation 3, with a = A^T and
b = B^T. Only a and b are trained. b starts at zero, so an adapted model starts as its base.

All roles share one base, in the storage of GENERATE: `make_logprobs(..., lora=)` and its siblings build functions of an
adapter and a base, and without `lora` functions of the base alone. Only `merge` computes the sum W + a b, because in
bfloat16 it would round away most of a small a b.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, PRNGKeyArray

from jrlhf.kernels.devices import vary
from jrlhf.meshes.layout import GENERATE
from jrlhf.meshes.mesh import AXES
from jrlhf.meshes.transfers import lies_elsewhere
from jrlhf.models.config.checks import is_count, positive
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.init import draw
from jrlhf.models.modules import Adapters, Int8, dequantised
from jrlhf.models.params import Params, nested, stored
from jrlhf.models.weights import PROJECTIONS, HeadKind, Init, WeightInfo, weights


@dataclass(frozen=True)
class LoRAConfig:
    """Settings of an adapter: the projections that it adapts, and its size.

    rank: r, the inner size of every adapter.
    alpha: an adapter's output is scaled by alpha / r.
    targets: the adapted projections, of every layer, in PEFT's names; sorted as `PROJECTIONS`.
    rslora: scale by alpha / sqrt(r) (Kalajdzievski 2023, rsLoRA), so that it does not fall with a larger rank.

    Raises ValueError for numbers out of range and unknown targets.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(PROJECTIONS)
    rslora: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.rank):
            raise ValueError(f"lora rank={self.rank!r} must be a positive integer")
        if not positive(self.alpha):
            raise ValueError(f"lora alpha={self.alpha!r} must be positive and finite")
        unknown = [target for target in self.targets if target not in PROJECTIONS]
        if unknown or not self.targets:
            raise ValueError(f"lora targets={list(self.targets)} must be some of {', '.join(PROJECTIONS)}")
        object.__setattr__(self, "targets", tuple(name for name in PROJECTIONS if name in self.targets))

    @property
    def scale(self) -> float:
        """The factor of the product x a b."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def adapted(config: ModelConfig, lora: LoRAConfig, tensor: int = 1) -> list[WeightInfo]:
    """The base's weights that an adapter changes, in the order of `PROJECTIONS`."""
    table = weights(config, "lm", tensor)
    if not config.gated_mlp or config.positions == "learned":
        raise ValueError("lora does not know GPT-2's projections: PEFT adapts its fused c_attn, which we keep apart")
    return [weight for weight in table if weight.lora in lora.targets]


@cache
def adapter_weights(
    config: ModelConfig, lora: LoRAConfig, head: HeadKind = "lm", tensor: int = 1
) -> tuple[WeightInfo, ...]:
    """All weights of an adapter, described as `weights` describes a model's; with head="scalar" its own scalar head."""
    table = []
    for weight in adapted(config, lora, tensor):
        cut = 1 + weight.inputs
        fan_in = float(math.prod(weight.shape[1:cut]))
        shapes = (*weight.shape[:cut], lora.rank), (config.layers, lora.rank, *weight.shape[cut:])
        axes = (*weight.axes[:cut], None), (weight.axes[0], None, *weight.axes[cut:])
        # As PEFT draws them: Kaiming's uniform with slope sqrt(5), and zero.
        inits: tuple[Init, Init] = ("uniform", fan_in**-0.5), ("constant", 0.0)
        for name, shape, axis, init in zip("ab", shapes, axes, inits, strict=True):
            table.append(WeightInfo((*weight.path, name), shape, axis, init, lora=weight.lora))
    return (*table, *(weight for weight in weights(config, head) if weight.path[0] == "value_head"))


def init_lora(
    config: ModelConfig, lora: LoRAConfig, key: PRNGKeyArray, head: HeadKind = "lm", *, zero_head: bool = True
) -> Params:
    """Returns the initial weights of an adapter, float32, with which it changes nothing; for head="scalar" with its own
    scalar head.

    {"layers": {part: {weight: {"a": [L, *inputs, r], "b": [L, r, *outputs]}}}} and, scalar, value_head as `init_scalar`
    has it.
    """
    # One key for every possible projection, so that its numbers do not depend on which others are adapted.
    keys = dict(zip((*PROJECTIONS, None), jax.random.split(key, len(PROJECTIONS) + 1), strict=True))

    def fresh(weight: WeightInfo) -> Array:
        kind, number = weight.init
        if kind == "uniform":
            return jax.random.uniform(keys[weight.lora], weight.shape, minval=-number, maxval=number)
        if kind == "normal":
            return draw(replace(weight, init=("normal", 0.0 if zero_head else number)), keys[None])
        return jnp.full(weight.shape, number, jnp.float32)

    return nested((weight.path, fresh(weight)) for weight in adapter_weights(config, lora, head))


def lora_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, lora: LoRAConfig, head: HeadKind = "lm"
) -> dict[str, Any]:
    """Returns each leaf's sharding: over `tensor` along the heads or the mlp of its projection, else replicated."""
    table = adapter_weights(config, lora, head, mesh.shape["tensor"])
    return stored(nested((weight.path, weight.axes) for weight in table), mesh, GENERATE)


def with_adapter(params: Params, adapter: Params, lora: LoRAConfig, dtype: Any) -> Params:
    """Returns, inside `shard_map`, the base's weights with the adapter's scalar head, if any, and "adapters".

    The latter is one `Adapters` per layer, in the form that a block applies: b is scaled, and both are cast.
    """

    def ready(low: Params) -> tuple[Array, Array]:
        # Cast to vary before the layers are split, so that the gradient of all layers is summed over devices once.
        a, b = (vary(low[name], AXES) for name in ("a", "b"))
        return a.astype(dtype), (b * lora.scale).astype(dtype)

    stacked = {name: ready(low) for part in adapter["layers"].values() for name, low in part.items()}
    count = len(params["layers"])
    adapters = [Adapters(jax.tree.map(lambda leaf, index=index: leaf[index], stacked)) for index in range(count)]
    return {**params, **adapter, "layers": params["layers"], "adapters": adapters}


def base_on(base: Any, mesh: Mesh) -> Any:
    """Returns views of weights in the layout GENERATE, such as a base, on `mesh`: a part of their devices with the same
    `tensor` axis. The views share the memory of the weights."""

    def view(leaf: Array) -> Array:
        sharding, parts = NamedSharding(mesh, leaf.sharding.spec), {}  # type: ignore[attr-defined]
        for shard in leaf.addressable_shards:
            parts[shard.device] = shard.index, shard.data
        wanted = sharding.addressable_devices_indices_map(leaf.shape)
        assert all(parts[device][0] == index for device, index in wanted.items()), "a device has another part"
        own = [parts[device][1] for device in wanted]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, own, dtype=leaf.dtype)

    return jax.tree.map(view, base) if lies_elsewhere(base, mesh) else base


def merge(base: Params, adapter: Params, lora: LoRAConfig) -> Params:
    """Returns the full weights W + a b scale, stored as the base (layers stacked or a list). Other weights are shared.

    Each sum is computed in float32 and rounded once to the base's dtype; for an int8 base, to its embedding's dtype.
    The head is the adapter's scalar head, if it has one, else the base's unembedding.

    base, adapter: arrays on one set of devices.
    """
    dtype, layers = base["embedding"].dtype, base["layers"]
    if isinstance(layers, list):
        layers = [merge_layers(layer, adapter, index, lora, dtype) for index, layer in enumerate(layers)]
    else:
        layers = merge_layers(layers, adapter, slice(None), lora, dtype)
    return {**headed(base, adapter), "layers": layers}


def merge_layers(layers: Params, adapter: Params, index: int | slice, lora: LoRAConfig, dtype: Any) -> Params:
    """`merge` for the layer with this index, or for a slice of stacked layers; changed matrices get the dtype `dtype`.

    layers: those layers' weights only.
    """
    merged = {part: dict(tree) for part, tree in layers.items()}
    for part, tree in adapter["layers"].items():
        for name, low in tree.items():
            weight, a, b = merged[part][name], low["a"][index], low["b"][index]
            matrix = weight.values if isinstance(weight, Int8) else weight
            add = _adder(matrix.sharding, matrix.ndim < a.ndim + b.ndim - 2, lora.scale, dtype)
            merged[part][name] = add(weight, a, b)
    return dequantised(merged, dtype)


def headed(base: Params, adapter: Params) -> Params:
    """Returns the base with the adapter's scalar head, if it has one, else with the base's own. Layers are the base's.

    A head that the adapted model does not use is removed.
    """
    other = "unembedding" if "value_head" in adapter else "value_head"
    own = {name: leaf for name, leaf in adapter.items() if name != "layers"}
    return {name: leaf for name, leaf in base.items() if name != other} | own


@cache
def _adder(sharding: Any, stacked: bool, scale: float, dtype: Any) -> Callable[[Array | Int8, Array, Array], Array]:
    """weight + scale a b, stored as the weight is. Cached, so that all layers share one program."""
    product = partial(jnp.tensordot, axes=1)
    if stacked:
        product = jax.vmap(product)

    def add(weight: Array | Int8, a: Array, b: Array) -> Array:
        added = jax.device_put(scale * product(a, b), sharding)
        return (dequantised(weight, jnp.float32).astype(jnp.float32) + added).astype(dtype)

    return jax.jit(add, out_shardings=sharding)
