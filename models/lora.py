"""Low-rank adapters on a frozen base (Hu et al. 2021, LoRA).

Where a projection of the base computes x W, its adapted form computes x W + (x a) b alpha / r: equation 3, with
a = A^T and b = B^T. Only a and b are trained. b begins at zero, so an adapted model begins as its base.

One base, in the GENERATE storage, serves every role: `make_logprobs(..., lora=)` and its siblings build functions of an
adapter and a base, and without `lora` functions of the base alone. The sum is never formed but by `merge`: a bfloat16
W + a b would round away most of a small a b.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, PRNGKeyArray

from jrlhf.meshes import AXES, GENERATE
from jrlhf.models.collectives import vary
from jrlhf.models.config import ModelConfig, positive
from jrlhf.models.modules import Adapters
from jrlhf.models.params import Axes, HeadKind, Params, check_tensor, is_axes
from jrlhf.models.quantize import Int8, dequantised


class Projection(NamedTuple):
    """Where a projection's weight is, and the logical axes of its input and output. A ModelConfig has their sizes."""

    part: str
    weight: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


PROJECTIONS = {
    "q_proj": Projection("attention", "wq", ("embed",), ("heads", "head_dim")),
    "k_proj": Projection("attention", "wk", ("embed",), ("kv_heads", "head_dim")),
    "v_proj": Projection("attention", "wv", ("embed",), ("kv_heads", "head_dim")),
    "o_proj": Projection("attention", "wo", ("heads", "head_dim"), ("embed",)),
    "gate_proj": Projection("mlp", "gate", ("embed",), ("mlp",)),
    "up_proj": Projection("mlp", "up", ("embed",), ("mlp",)),
    "down_proj": Projection("mlp", "down", ("mlp",), ("embed",)),
}


@dataclass(frozen=True)
class LoRAConfig:
    """Which projections are adapted, and how.

    rank: r, the inner size of every adapter.
    alpha: scales what an adapter adds, by alpha / r.
    targets: the adapted projections, of every layer, in PEFT's names. Kept in the order of `PROJECTIONS`.
    rslora: scale by alpha / sqrt(r) (Kalajdzievski 2023, rsLoRA), so that it does not fall with a larger rank.

    Raises:
        ValueError: a number out of its range, an unknown target, or none.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(PROJECTIONS)
    rslora: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"lora rank={self.rank!r} must be a positive integer")
        if not positive(self.alpha):
            raise ValueError(f"lora alpha={self.alpha!r} must be positive and finite")
        unknown = [target for target in self.targets if target not in PROJECTIONS]
        if unknown or not self.targets:
            raise ValueError(f"lora targets={list(self.targets)} must be some of {', '.join(PROJECTIONS)}")
        object.__setattr__(self, "targets", tuple(name for name in PROJECTIONS if name in self.targets))

    @property
    def scale(self) -> float:
        """What the product x a b is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def init_lora(
    config: ModelConfig, lora: LoRAConfig, key: PRNGKeyArray, head: HeadKind = "lm", *, zero_head: bool = True
) -> Params:
    """An adapter that changes nothing yet, float32, with a scalar head of its own for head="scalar".

    {"layers": {part: {weight: {"a": [L, *inputs, r], "b": [L, r, *outputs]}}}} and, scalar, value_head as `init_scalar`
    has it. The numbers in `a` are uniform within 1 / sqrt(inputs), as PEFT draws them (Kaiming with slope sqrt(5));
    `b` is zero.

    Raises:
        ValueError: the model has projections that adapters do not know.
    """
    _check_family(config)
    keys = jax.random.split(key, len(PROJECTIONS) + 1)

    def draw(key: PRNGKeyArray, projection: Projection) -> Params:
        a, b = lora_shape(config, lora, projection)
        bound = math.prod(a[:-1]) ** -0.5
        drawn = jax.random.uniform(key, (config.layers, *a), minval=-bound, maxval=bound)
        return {"a": drawn, "b": jnp.zeros((config.layers, *b))}

    own = dict(zip(PROJECTIONS, keys, strict=False))  # the same for a projection whichever others are adapted
    adapter = {"layers": _tree(lora, lambda name, projection: draw(own[name], projection))}
    if head == "lm":
        return adapter
    deviation = 0.0 if zero_head else (config.embed + 1) ** -0.5
    kernel = deviation * jax.random.normal(keys[-1], (config.embed,))
    return adapter | {"value_head": {"kernel": kernel, "bias": jnp.zeros(())}}


def lora_shape(
    config: ModelConfig, lora: LoRAConfig, projection: Projection
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one layer's a [*inputs, r] and b [r, *outputs]."""
    inputs, outputs = (
        tuple(getattr(config, axis) for axis in axes) for axes in (projection.inputs, projection.outputs)
    )
    return (*inputs, lora.rank), (lora.rank, *outputs)


def lora_axes(config: ModelConfig, lora: LoRAConfig, tensor: int, head: HeadKind = "lm") -> Params:
    """The tree of `init_lora` with each leaf's logical axes, for a mesh whose `tensor` axis has this size."""
    check_tensor(config, tensor)
    _check_family(config)

    def known(names: tuple[str, ...]) -> Axes:
        whole = ("kv_heads",) if config.kv_heads < tensor else ()
        return tuple(None if name in whole else name for name in names)

    def axes(_: str, projection: Projection) -> Params:
        return {
            "a": ("layers", *known(projection.inputs), None),
            "b": ("layers", None, *known(projection.outputs)),
        }

    adapter = {"layers": _tree(lora, axes)}
    return adapter if head == "lm" else adapter | {"value_head": {"kernel": ("norm",), "bias": ()}}


def lora_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, lora: LoRAConfig, head: HeadKind = "lm"
) -> dict[str, Any]:
    """Where each leaf of an adapter is stored: over `tensor` with the projection's heads or mlp, else on every device.

    Raises:
        ValueError: the model does not fit on the mesh.
    """
    axes = lora_axes(config, lora, mesh.shape["tensor"], head)
    return jax.tree.map(lambda leaf: NamedSharding(mesh, GENERATE.storage.spec(leaf)), axes, is_leaf=is_axes)


def split_arguments(arguments: tuple[Any, ...], lora: LoRAConfig | None) -> tuple[Params, Params, tuple[Any, ...]]:
    """(weights, adapter, batch) of a call as (weights, *batch), or with `lora` as (adapter, *batch, weights)."""
    if lora is None:
        weights, *batch = arguments
        return weights, {}, tuple(batch)
    adapter, *batch, weights = arguments
    return weights, adapter, tuple(batch)


def with_adapter(weights: Params, adapter: Params, lora: LoRAConfig | None, dtype: Any) -> Params:
    """Inside `shard_map`: the base's weights with the adapter's scalar head, if any, and `adapters`.

    These are one `Adapters` a layer, as a block applies them: b scaled and both cast.
    """
    if lora is None:
        return weights

    def ready(low: Params) -> tuple[Array, Array]:
        # Made varying in one piece, so that the gradient is summed over devices once, for all layers together.
        a, b = (vary(low[name], AXES) for name in ("a", "b"))
        return a.astype(dtype), (b * lora.scale).astype(dtype)

    stacked = {name: ready(low) for part in adapter["layers"].values() for name, low in part.items()}
    count = len(weights["layers"])
    adapters = [Adapters(jax.tree.map(lambda leaf, index=index: leaf[index], stacked)) for index in range(count)]
    return {**weights, **adapter, "layers": weights["layers"], "adapters": adapters}


def merge(base: Params, adapter: Params, lora: LoRAConfig) -> Params:
    """The full weights W + a b scale, where the base has them: layers stacked or a list. Other weights are shared.

    Each sum is made in float32 and rounded once to the base's dtype; an int8 base becomes one of its embedding's dtype.
    The head is that of the adapter's kind of model: its own scalar one, or the base's unembedding.

    base, adapter: arrays on one set of devices.
    """
    dtype, layers = base["embedding"].dtype, base["layers"]
    if isinstance(layers, list):
        layers = [merge_layers(weights, adapter, index, lora, dtype) for index, weights in enumerate(layers)]
    else:
        layers = merge_layers(layers, adapter, slice(None), lora, dtype)
    return {**headed(base, adapter), "layers": layers}


def merge_layers(weights: Params, adapter: Params, index: int | slice, lora: LoRAConfig, dtype: Any) -> Params:
    """`merge` for the one layer with this index, or for a slice of stacked ones; matrices that change become `dtype`.

    weights: those layers' only.
    """
    weights = {part: dict(tree) for part, tree in weights.items()}
    for name in lora.targets:
        part, weight = PROJECTIONS[name][:2]
        low = adapter["layers"][part][weight]
        weights[part][weight] = _sum(weights[part][weight], low["a"][index], low["b"][index], lora.scale, dtype)
    return dequantised(weights, dtype)


def headed(base: Params, adapter: Params) -> Params:
    """The base with the head of the adapter's kind of model: a scalar one is the adapter's own. Layers are the base's.

    A base may come with the other kind's head, which nothing would read.
    """
    other = "unembedding" if "value_head" in adapter else "value_head"
    own = {name: weights for name, weights in adapter.items() if name != "layers"}
    return {name: weights for name, weights in base.items() if name != other} | own


def _sum(weight: Array | Int8, a: Array, b: Array, scale: float, dtype: Any) -> Array:
    stored = weight.values if isinstance(weight, Int8) else weight
    return _adder(stored.sharding, stored.ndim < a.ndim + b.ndim - 2, scale, dtype)(weight, a, b)


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


def _check_family(config: ModelConfig) -> None:
    if not config.gated_mlp or config.positions == "learned":
        raise ValueError("lora does not know GPT-2's projections: PEFT adapts its fused c_attn, which we keep apart")


def _tree(lora: LoRAConfig, leaf: Any) -> Params:
    """{part: {weight: leaf(name, projection)}} of the targets."""
    tree: Params = {}
    for name in lora.targets:
        projection = PROJECTIONS[name]
        tree.setdefault(projection.part, {})[projection.weight] = leaf(name, projection)
    return tree
