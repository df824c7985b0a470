"""The decoder as Flax NNX modules: a thin shell that names and initialises weights and says how a block computes.

Modules are split into plain arrays once, right after they are made. `sharded.py` and `decoding.py` merge a `Block`
again with one layer's weights; nothing is ever mutated. The same block runs with whole weights and with one device's
slice of the heads and the mlp: the sizes come from the weights.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jrlhf.models.attention import Rotation, rotate
from jrlhf.models.collectives import total, vary
from jrlhf.models.config import Activation, ModelConfig
from jrlhf.models.remat import named

# (query [B, T, N, H], key and value [B, T, K, H]) -> (output [B, T, N, H], what the caller keeps, such as a cache)
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> nnx.Param:
    """A weight drawn from N(0, scale^2), float32."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapters:
    """A layer's low-rank adapters (`lora.py`).

    weights: a projection's weight by name -> (a [*inputs, r], b [r, *outputs]).
    rows: they apply to so many rows of a batch, the first ones, and the others are the base's; None: to all.
    """

    weights: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    rows: int | None = field(default=None, metadata={"static": True})

    def __call__(self, name: str, y: Array, x: Array, held: Callable[[Array, int], Array] | None = None) -> Array:
        """The output `y` of this projection for its input `x`, plus (x a) b where it has an adapter.

        held: the part of b's heads, its dimension 1, that this device computes.
        """
        if name not in self.weights:
            return y
        a, b = self.weights[name]
        low = jnp.tensordot(x[: self.rows], a, a.ndim - 1)
        if self.rows is not None:
            low = jnp.pad(low, ((0, len(x) - self.rows), (0, 0), (0, 0)))
        return y + jnp.tensordot(low, b if held is None else held(b, 1), 1)


NO_ADAPTERS = Adapters()


def project(x: Float[Array, "B T *in"], weight: Float[Array, "..."], inputs: int = 1) -> Float[Array, "B T *out"]:
    """x times a weight, over the weight's first `inputs` dimensions.

    As a product of two matrices, tokens by features: the gradient of a product with more dimensions is one that XLA for
    CPUs transposes an operand of, element by element.
    """
    batch, length = x.shape[:2]
    rows = math.prod(weight.shape[:inputs])
    product = x.reshape(batch * length, rows) @ weight.reshape(rows, -1)
    return product.reshape(batch, length, *weight.shape[inputs:])


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension (Zhang and Sennrich 2019, equation 4).

    offset: the factor is 1 + scale, and scale begins at 0.
    """

    def __init__(self, size: int, eps: float, *, offset: bool = False):
        self.eps = eps
        self.offset = offset
        self.scale = nnx.Param(jnp.zeros(size) if offset else jnp.ones(size))

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        # Float32 whatever the model's dtype: a mean of D bfloat16 squares has two or three digits.
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        # The scale too, however it is stored: most 1 + scale are no bfloat16.
        scale = self.scale[...].astype(jnp.float32) + (1 if self.offset else 0)
        scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
        return (wide * inverse * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last dimension (Ba et al. 2016), in float32."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size))
        self.bias = nnx.Param(jnp.zeros(size))

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        leading = tuple(range(x.ndim - 1))
        scale, bias = (jnp.expand_dims(w[...].astype(jnp.float32), leading) for w in (self.scale, self.bias))
        return (centred * inverse * scale + bias).astype(x.dtype)


def residual_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, or of what is added to it."""
    if config.norm == "layer":
        return LayerNorm(config.embed, config.norm_eps)
    return RMSNorm(config.embed, config.norm_eps, offset=config.norm_offset)


def biased(x: Float[Array, "B T F"], bias: Float[Array, "F"]) -> Float[Array, "B T F"]:
    """x + bias, added in float32 whatever the dtypes."""
    return (x + bias[None, None].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention's weights; `Attend` supplies what happens between `project` and `output`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, N, K, H = config.embed, config.heads, config.kv_heads, config.head_dim
        scale = config.initializer_range
        self.group = N // K
        self.wq = normal(rngs, (D, N, H), scale)
        self.wk = normal(rngs, (D, K, H), scale)
        self.wv = normal(rngs, (D, K, H), scale)
        # The 2L projections that add to the residual stream start smaller, so that its variance does not grow with
        # depth (Radford et al. 2019, section 2.3).
        self.wo = normal(rngs, (N, H, D), scale / (2 * config.layers) ** 0.5)
        self.bias = config.qkv_bias
        if self.bias:
            self.bq, self.bk, self.bv = (nnx.Param(jnp.zeros((heads, H))) for heads in (N, K, K))
        self.output_bias = config.output_bias
        if self.output_bias:
            self.bo = nnx.Param(jnp.zeros(D))
        self.normalised = config.qk_norm
        if self.normalised:
            self.query_norm = RMSNorm(H, config.norm_eps, offset=config.norm_offset)
            self.key_norm = RMSNorm(H, config.norm_eps, offset=config.norm_offset)

    def project(
        self, x: Float[Array, "B T D"], positions: Rotation | None, adapters: Adapters = NO_ADAPTERS
    ) -> tuple[Array, Array, Array]:
        """Rotated queries [B, T, N, H], rotated keys and values [B, T, K, H], of the heads that this device holds.

        positions: None where positions are learned, and nothing is rotated.
        """
        query = project(x, self.wq[...])
        key = project(x, self._needed(self.wk[...], 1))
        value = project(x, self._needed(self.wv[...], 1))
        query = adapters("wq", query, x)
        key = adapters("wk", key, x, self._needed)
        value = adapters("wv", value, x, self._needed)
        if self.bias:
            query = query + self.bq[...][None, None]
            key = key + self._needed(self.bk[...], 0)[None, None]
            value = value + self._needed(self.bv[...], 0)[None, None]
        # Before the norms, whose gradients need their inputs: from these what follows is made without a product.
        query, key, value = named(query, "query"), named(key, "key"), named(value, "value")
        if self.normalised:
            query, key = self.query_norm(query), self.key_norm(key)
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        return query, key, value

    def output(
        self, x: Float[Array, "B T N H"], axis: str | None, adapters: Adapters = NO_ADAPTERS
    ) -> Float[Array, "B T D"]:
        """Back to the residual stream; where heads are sliced over `axis`, the sum of the devices' parts."""
        out = total(adapters("wo", project(x, self.wo[...], 2), x), axis)
        return biased(out, self.bo[...]) if self.output_bias else out

    def _needed(self, weight: Array, axis: int) -> Array:
        """The key-value heads that this device's query heads read.

        Where they are fewer than the devices, each device holds them all and uses one, which serves all its queries.
        """
        local_heads = self.wq.shape[1]
        if weight.shape[axis] * self.group == local_heads:
            return weight
        head = lax.axis_index("tensor") * local_heads // self.group
        return lax.dynamic_slice_in_dim(vary(weight, "tensor"), head, 1, axis)


class MLP(nnx.Module):
    """(activation(x gate) * (x up)) down (Shazeer 2020, equation 6), or ungated: activation(x up) down."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F, scale = config.embed, config.mlp, config.initializer_range
        self.activation: Activation = config.activation
        self.gated = config.gated_mlp
        if self.gated:
            self.gate = normal(rngs, (D, F), scale)
        self.up = normal(rngs, (D, F), scale)
        self.down = normal(rngs, (F, D), scale / (2 * config.layers) ** 0.5)
        self.bias = config.mlp_bias
        if self.bias:
            if self.gated:
                self.gate_bias = nnx.Param(jnp.zeros(F))
            self.up_bias = nnx.Param(jnp.zeros(F))
            self.down_bias = nnx.Param(jnp.zeros(D))

    def __call__(
        self, x: Float[Array, "B T D"], axis: str | None, adapters: Adapters = NO_ADAPTERS
    ) -> Float[Array, "B T D"]:
        """Where F is sliced over `axis`, the sum of the devices' parts."""
        if self.gated:
            gate = adapters("gate", project(x, self.gate[...]), x)
            gate = named(biased(gate, self.gate_bias[...]) if self.bias else gate, "gate")
        up = adapters("up", project(x, self.up[...]), x)
        up = named(biased(up, self.up_bias[...]) if self.bias else up, "up")
        inner = activate(gate, self.activation) * up if self.gated else activate(up, self.activation)
        out = total(adapters("down", project(inner, self.down[...]), inner), axis)
        return biased(out, self.down_bias[...]) if self.bias else out


def activate(x: Float[Array, "B T F"], activation: Activation) -> Float[Array, "B T F"]:
    """The mlp's nonlinearity."""
    if activation == "silu":
        return jax.nn.silu(x)
    # Float32: where GELU is near 0, 1 + tanh cancels all of bfloat16's digits.
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


class Block(nnx.Module):
    """One pre-norm layer, whose contributions may be normed again before they are added."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.post_norms = config.post_norms
        self.attention_norm = residual_norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = residual_norm(config)
        self.mlp = MLP(config, rngs=rngs)
        if self.post_norms:
            self.post_attention_norm = residual_norm(config)
            self.post_mlp_norm = residual_norm(config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Rotation | None,
        attend: Attend,
        axis: str | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The layer's output and what `attend` keeps.

        positions: this layer's rotation; None where positions are learned.
        axis: the mesh axis over which heads and mlp are sliced (Shoeybi et al. 2019, section 3), None where weights are
            whole. `x` is the same on all its devices, and so is the result.
        """
        with jax.named_scope("attention"):
            h = vary(self.attention_norm(x), axis)
            attended, kept = attend(*self.attention.project(h, positions, adapters))
            out = named(self.attention.output(attended, axis, adapters), "projected")
            x = x + (self.post_attention_norm(out) if self.post_norms else out)
        with jax.named_scope("mlp"):
            h = vary(self.mlp_norm(x), axis)
            out = named(self.mlp(h, axis, adapters), "down")
            return x + (self.post_mlp_norm(out) if self.post_norms else out), kept


class Decoder(nnx.Module):
    """Everything up to the final hidden states. Layers are stacked: each of their weights has a leading dimension L."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.embedding = table(config, rngs)
        if config.positions == "learned":
            self.positions = normal(rngs, (config.max_positions, config.embed), config.initializer_range)
        build = nnx.vmap(lambda layer_rngs: Block(config, rngs=layer_rngs), in_axes=0, out_axes=0)
        self.layers = build(rngs.split(config.layers))
        self.final_norm = residual_norm(config)


class LanguageModel(Decoder):
    """A decoder whose head scores tokens: the embedding table itself, or an unembedding of its own."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if not config.tie_embeddings:
            self.unembedding = table(config, rngs)


class ValueHead(nnx.Module):
    """One number from a hidden state: hidden . kernel + bias."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, zero: bool):
        # Variance 1 / (D + 1), as Stiennon et al. 2020 initialise the reward model's head.
        scale = 0.0 if zero else (config.embed + 1) ** -0.5
        self.kernel = normal(rngs, (config.embed,), scale)
        self.bias = nnx.Param(jnp.zeros(()))


class ScalarModel(Decoder):
    """A decoder whose head gives one number a position: a reward model or a critic."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, zero_head: bool):
        super().__init__(config, rngs=rngs)
        self.value_head = ValueHead(config, rngs=rngs, zero=zero_head)


def table(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """A [padded_vocab, D] table; the padding rows are zero, and nothing ever gives them a gradient."""
    rows = config.initializer_range * jax.random.normal(rngs.params(), (config.vocab_size, config.embed))
    return nnx.Param(jnp.pad(rows, ((0, config.padded_vocab - config.vocab_size), (0, 0))))


def scaled_embeddings(x: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T D"]:
    """Embeddings as they enter the first layer. The factor is rounded to their dtype, as Gemma's training did."""
    return x if config.embed_scale is None else x * jnp.asarray(config.embed_scale, x.dtype)


def pure(module: nnx.Module) -> dict[str, Any]:
    """A module's weights as a plain nested dict of arrays."""
    return nnx.to_pure_dict(nnx.split(module, nnx.Param)[1])


@cache
def _structures(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.GraphDef]:
    def structure(build: Callable[[], nnx.Module]) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(build), nnx.Param)[0]

    block = structure(lambda: Block(config, rngs=nnx.Rngs(0)))
    return block, structure(lambda: residual_norm(config))


def block(config: ModelConfig, weights: dict[str, Any]) -> Block:
    """One layer around these weights, which may be one device's slices."""
    return nnx.merge(_structures(config)[0], weights)


def final_norm(config: ModelConfig, weights: dict[str, Any]) -> RMSNorm | LayerNorm:
    """The norm before the head around these weights."""
    return nnx.merge(_structures(config)[1], weights)
