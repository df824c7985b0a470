"""The decoder as Flax NNX modules: a thin shell that names and initialises weights and says how a block computes.

Modules are split into plain arrays once, right after they are made. `forward.py` and `generate.py` merge a `Block`
again with one layer's weights; nothing is ever mutated. The same block runs with whole weights and with one device's
slice of the heads and the mlp: the sizes come from the weights.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jrlhf.models.attention import Rotation, rotate
from jrlhf.models.collectives import total, vary
from jrlhf.models.config import ModelConfig

# (query [B, T, N, H], key and value [B, T, K, H]) -> (output [B, T, N, H], what the caller keeps, such as a cache)
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> nnx.Param:
    """A weight drawn from N(0, scale^2), float32."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        # Float32 whatever the model's dtype: a mean of D bfloat16 squares has two or three digits.
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        return (wide * inverse * scale).astype(x.dtype)


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
        self.normalised = config.qk_norm
        if self.normalised:
            self.query_norm = RMSNorm(H, config.norm_eps)
            self.key_norm = RMSNorm(H, config.norm_eps)

    def project(self, x: Float[Array, "B T D"], positions: Rotation) -> tuple[Array, Array, Array]:
        """Rotated queries [B, T, N, H], rotated keys and values [B, T, K, H], of the heads that this device holds."""
        query = jnp.einsum("btd,dnh->btnh", x, self.wq[...])
        key = jnp.einsum("btd,dkh->btkh", x, self._needed(self.wk[...], 1))
        value = jnp.einsum("btd,dkh->btkh", x, self._needed(self.wv[...], 1))
        if self.bias:
            query = query + self.bq[...][None, None]
            key = key + self._needed(self.bk[...], 0)[None, None]
            value = value + self._needed(self.bv[...], 0)[None, None]
        if self.normalised:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, positions), rotate(key, positions), value

    def output(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Back to the residual stream; a partial sum where this device holds some of the heads."""
        return jnp.einsum("btnh,nhd->btd", x, self.wo[...])

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
    """SwiGLU: (silu(x gate) * (x up)) down (Shazeer 2020, equation 6)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F, scale = config.embed, config.mlp, config.initializer_range
        self.gate = normal(rngs, (D, F), scale)
        self.up = normal(rngs, (D, F), scale)
        self.down = normal(rngs, (F, D), scale / (2 * config.layers) ** 0.5)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = jnp.einsum("btd,df->btf", x, self.gate[...])
        up = jnp.einsum("btd,df->btf", x, self.up[...])
        return jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, self.down[...])


class Block(nnx.Module):
    """One pre-norm layer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Rotation, attend: Attend, axis: str | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The layer's output and what `attend` keeps.

        axis: the mesh axis over which heads and mlp are sliced (Shoeybi et al. 2019, section 3), None where weights are
            whole. `x` is the same on all its devices, and so is the result.
        """
        h = vary(self.attention_norm(x), axis)
        attended, kept = attend(*self.attention.project(h, positions))
        x = x + total(self.attention.output(attended), axis)
        h = vary(self.mlp_norm(x), axis)
        return x + total(self.mlp(h), axis), kept


class Decoder(nnx.Module):
    """Everything up to the final hidden states. Layers are stacked: each of their weights has a leading dimension L."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.embedding = table(config, rngs)
        build = nnx.vmap(lambda layer_rngs: Block(config, rngs=layer_rngs), in_axes=0, out_axes=0)
        self.layers = build(rngs.split(config.layers))
        self.final_norm = RMSNorm(config.embed, config.norm_eps)


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


def pure(module: nnx.Module) -> dict[str, Any]:
    """A module's weights as a plain nested dict of arrays."""
    return nnx.to_pure_dict(nnx.split(module, nnx.Param)[1])


@cache
def _structures(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.GraphDef]:
    def structure(build: Callable[[], nnx.Module]) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(build), nnx.Param)[0]

    block = structure(lambda: Block(config, rngs=nnx.Rngs(0)))
    return block, structure(lambda: RMSNorm(config.embed, config.norm_eps))


def block(config: ModelConfig, weights: dict[str, Any]) -> Block:
    """One layer around these weights, which may be one device's slices."""
    return nnx.merge(_structures(config)[0], weights)


def final_norm(config: ModelConfig, weights: dict[str, Any]) -> RMSNorm:
    """The norm before the head around this weight."""
    return nnx.merge(_structures(config)[1], weights)
