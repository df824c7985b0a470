"""The decoder's layers as Flax NNX modules. They wrap given weights and define how a block computes with them.

Weights are plain nested dicts (`weights.py` lists them). `forward.py` and `generation` put a `Block` around one layer's
weights when they compute the layer; nothing is ever mutated. The same block runs with whole weights and with one
device's slice of the heads and the mlp: the sizes come from the weights.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float
from jaxtyping import Int8 as Integers

from jrlhf.kernels.devices import vary
from jrlhf.models.attention import Rotation, rotate
from jrlhf.models.collectives import total
from jrlhf.models.config.decoder import Activation, ModelConfig
from jrlhf.models.remat import named

# (query [B, T, N, H], key and value [B, T, K, H]) -> (output [B, T, N, H], anything for the caller, such as a cache)
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapters:
    """A layer's low-rank adapters (`lora.py`).

    weights: a projection's weight by name -> (a [*inputs, r], b [r, *outputs]).
    rows: only this number of rows of a batch, the first ones, are adapted; None: all.
    """

    weights: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    rows: int | None = field(default=None, metadata={"static": True})

    def __call__(self, name: str, y: Array, x: Array, own_heads: Callable[[Array, int], Array] | None = None) -> Array:
        """The output `y` of this projection for its input `x`, plus (x a) b if it has an adapter.

        own_heads: takes the part of b's heads, its dimension 1, that this device computes.
        """
        if name not in self.weights:
            return y
        a, b = self.weights[name]
        low = jnp.tensordot(x[: self.rows], a, a.ndim - 1)
        if self.rows is not None:
            low = jnp.pad(low, ((0, len(x) - self.rows), (0, 0), (0, 0)))
        return y + jnp.tensordot(low, b if own_heads is None else own_heads(b, 1), 1)


NO_ADAPTERS = Adapters()


def project(x: Float[Array, "B T *in"], weight: Float[Array, "..."], inputs: int = 1) -> Float[Array, "B T *out"]:
    """x times a weight, over the weight's first `inputs` dimensions.

    As a product of two matrices, tokens by features: in the gradient of a product with more dimensions, XLA for CPUs
    transposes an operand element by element.
    """
    batch, length = x.shape[:2]
    rows = math.prod(weight.shape[:inputs])
    product = x.reshape(batch * length, rows) @ weight.reshape(rows, -1)
    return product.reshape(batch, length, *weight.shape[inputs:])


def biased(x: Float[Array, "B T F"], bias: Float[Array, "F"]) -> Float[Array, "B T F"]:
    """x + bias, added in float32 whatever the dtypes."""
    return (x + bias[None, None].astype(jnp.float32)).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """A matrix, values * scale. The scale has size 1 in the dimensions that are summed over."""

    values: Integers[Array, "..."]
    scale: Float[Array, "..."]


def is_int8(x: Any) -> bool:
    """True if `x` is a quantized matrix: one leaf, for `jax.tree.map`."""
    return isinstance(x, Int8)


def has_int8(params: Any) -> bool:
    """True if `to_int8` made these weights."""
    return any(is_int8(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_int8))


def dequantised(weights: Any, dtype: Any, *, after: Array | None = None) -> Any:
    """`weights` with every `Int8` as an array of `dtype`, rounded once. Other leaves are returned unchanged.

    after: the input of the layer of these weights. They are converted only after it is computed. Otherwise a compiler
        sees that every iteration of a loop computes the same floats, computes those of all layers once, before the
        loop, and keeps them. Measured on an H200: with it the temporary memory of generation grows no faster with the
        layers than that of a float base. XLA for CPU drops such barriers, and keeps the floats of all layers.
    """

    def wide(leaf: Any) -> Any:
        if not is_int8(leaf):
            return leaf
        if after is not None:
            leaf, _ = lax.optimization_barrier((leaf, lax.stop_gradient(after)))
        return (leaf.values.astype(jnp.float32) * leaf.scale).astype(dtype)

    return jax.tree.map(wide, weights, is_leaf=is_int8)


class Module(nnx.Module):
    """A module around arrays that exist already, by name; they may be one device's slices."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Array]):
        self.config = config
        for name, weight in weights.items():
            setattr(self, name, nnx.Param(weight))

    def __getitem__(self, name: str) -> Array:
        return getattr(self, name)[...]


class Norm(Module):
    """Normalizes the last dimension, in float32: RMSNorm or LayerNorm, as the config says.

    RMSNorm: x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019, equation 4). With norm_offset the factor is
    1 + scale, and scale starts at 0.
    LayerNorm: (x - mean(x)) / sqrt(var(x) + eps) * scale + bias (Ba et al. 2016).
    """

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        # Float32 whatever the model's dtype: a mean of D bfloat16 squares has two or three digits.
        wide = x.astype(jnp.float32)
        leading = tuple(range(x.ndim - 1))
        if hasattr(self, "bias"):  # LayerNorm
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.config.norm_eps)
        # The scale is float32, too: bfloat16 cannot represent most values of 1 + scale.
        scale = self["scale"].astype(jnp.float32) + (1 if self.config.norm_offset else 0)
        out = wide * inverse * jnp.expand_dims(scale, leading)
        if hasattr(self, "bias"):
            out = out + jnp.expand_dims(self["bias"].astype(jnp.float32), leading)
        return out.astype(x.dtype)


class Attention(Module):
    """Grouped-query attention's weights; `Attend` supplies what happens between `project` and `output`."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any]):
        super().__init__(config, {name: leaf for name, leaf in weights.items() if not isinstance(leaf, Mapping)})
        if config.qk_norm:
            self.query_norm, self.key_norm = Norm(config, weights["query_norm"]), Norm(config, weights["key_norm"])

    def project(
        self, x: Float[Array, "B T D"], positions: Rotation | None, adapters: Adapters = NO_ADAPTERS
    ) -> tuple[Array, Array, Array]:
        """Rotated queries [B, T, N, H], rotated keys and values [B, T, K, H], of the heads that this device holds.

        positions: None where positions are learned, and nothing is rotated.
        """
        query = project(x, self["wq"])
        key = project(x, self._own_heads(self["wk"], 1))
        value = project(x, self._own_heads(self["wv"], 1))
        query = adapters("wq", query, x)
        key = adapters("wk", key, x, self._own_heads)
        value = adapters("wv", value, x, self._own_heads)
        if self.config.qkv_bias:
            query = query + self["bq"][None, None]
            key = key + self._own_heads(self["bk"], 0)[None, None]
            value = value + self._own_heads(self["bv"], 0)[None, None]
        # Named before the norms, whose gradients need their inputs: the rest follows from these without a product.
        query, key, value = named(query, "query"), named(key, "key"), named(value, "value")
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        return query, key, value

    def output(
        self, x: Float[Array, "B T N H"], axis: str | None, adapters: Adapters = NO_ADAPTERS
    ) -> Float[Array, "B T D"]:
        """The contribution to the residual stream; if heads are sliced over `axis`, the sum of the devices' parts."""
        out = total(adapters("wo", project(x, self["wo"], 2), x), axis)
        return biased(out, self["bo"]) if self.config.output_bias else out

    def _own_heads(self, weight: Array, axis: int) -> Array:
        """The key-value heads that this device's query heads read.

        If they are fewer than the devices, each device holds them all and uses one, which serves all its queries.
        """
        local_heads, group = self["wq"].shape[1], self.config.heads // self.config.kv_heads
        if weight.shape[axis] * group == local_heads:
            return weight
        head = lax.axis_index("tensor") * local_heads // group
        return lax.dynamic_slice_in_dim(vary(weight, "tensor"), head, 1, axis)


class MLP(Module):
    """(activation(x gate) * (x up)) down (Shazeer 2020, equation 6), or ungated: activation(x up) down."""

    def __call__(
        self, x: Float[Array, "B T D"], axis: str | None, adapters: Adapters = NO_ADAPTERS
    ) -> Float[Array, "B T D"]:
        """The MLP's output; where F is sliced over `axis`, the sum of the devices' parts."""
        bias, activation = self.config.mlp_bias, self.config.activation
        gate = None
        if self.config.gated_mlp:
            gate = adapters("gate", project(x, self["gate"]), x)
            gate = named(biased(gate, self["gate_bias"]) if bias else gate, "gate")
        up = adapters("up", project(x, self["up"]), x)
        up = named(biased(up, self["up_bias"]) if bias else up, "up")
        inner = activate(up, activation) if gate is None else activate(gate, activation) * up
        out = total(adapters("down", project(inner, self["down"]), inner), axis)
        return biased(out, self["down_bias"]) if bias else out


def activate(x: Float[Array, "B T F"], activation: Activation) -> Float[Array, "B T F"]:
    """The mlp's nonlinearity."""
    if activation == "silu":
        return jax.nn.silu(x)
    # Float32: where GELU is near 0, 1 + tanh cancels all of bfloat16's digits.
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


class Block(nnx.Module):
    """One pre-norm layer; its contributions may be normalized again before they are added (`post_norms`)."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any]):
        self.post_norms = config.post_norms
        self.attention_norm = Norm(config, weights["attention_norm"])
        self.attention = Attention(config, weights["attention"])
        self.mlp_norm = Norm(config, weights["mlp_norm"])
        self.mlp = MLP(config, weights["mlp"])
        if config.post_norms:
            self.post_attention_norm = Norm(config, weights["post_attention_norm"])
            self.post_mlp_norm = Norm(config, weights["post_mlp_norm"])

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Rotation | None,
        attend: Attend,
        axis: str | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The layer's output, and what `attend` returned in addition.

        positions: this layer's rotation; None where positions are learned.
        axis: the mesh axis over which heads and mlp are sliced (Shoeybi et al. 2019, section 3), None where weights are
            whole. `x` is the same on all its devices, and so is the result.
        """
        with jax.named_scope("attention"):
            h = vary(self.attention_norm(x), axis)
            attended, extra = attend(*self.attention.project(h, positions, adapters))
            out = named(self.attention.output(attended, axis, adapters), "projected")
            x = x + (self.post_attention_norm(out) if self.post_norms else out)
        with jax.named_scope("mlp"):
            h = vary(self.mlp_norm(x), axis)
            out = named(self.mlp(h, axis, adapters), "down")
            return x + (self.post_mlp_norm(out) if self.post_norms else out), extra


def scaled_embeddings(x: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T D"]:
    """Embeddings as they enter the first layer. The factor is rounded to their dtype, as Gemma's training did."""
    return x if config.embed_scale is None else x * jnp.asarray(config.embed_scale, x.dtype)
