"""Rotary positions and causal attention, for a whole sequence and for one token against a cache."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrlhf.models.cache import LayerCache

AttentionImplementation = Literal["xla", "cudnn"]
Rotation = tuple[Float[Array, "B T H//2"], Float[Array, "B T H//2"]]


def rotation(positions: Int[Array, "B T"], head_dim: int, theta: float) -> Rotation:
    """Cosines and sines of the angles p * theta^(-2i / H), float32 (Su et al. 2021, RoFormer, equation 15).

    Float32 whatever the model's dtype: bfloat16 rounds position 257 to 256, and an angle's error grows with position.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N H"], positions: Rotation) -> Float[Array, "B T N H"]:
    """Turns the pairs (x_i, x_{i + H/2}) by their angles, in float32. The paper's pairs are neighbours."""
    cos, sin = (part[:, :, None, :] for part in positions)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention scaled by 1 / sqrt(H); query head n reads key-value head n // (N / K).

    Batches are right-padded, so causality alone keeps padding out of every real token and no length mask exists.

    implementation: "xla"; "cudnn", which never stores [T, T] scores (16-bit floats, H <= 256 and a multiple of 8); None
        for cuDNN where it can run and XLA elsewhere.
    """
    if implementation is None:
        implementation = default_attention(jax.default_backend(), query.dtype, query.shape[-1])
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def default_attention(backend: str, dtype: jnp.dtype, head_dim: int) -> AttentionImplementation:
    """cuDNN on a GPU where it supports the dtype and the head dimension, else XLA."""
    supported = dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 256
    return "cudnn" if backend in ("gpu", "cuda") and supported else "xla"


def cached_attention(
    query: Float[Array, "B 1 N H"], cache: LayerCache, lengths: Int[Array, "B"]
) -> Float[Array, "B 1 N H"]:
    """One new token's attention over the first `lengths` positions of each row's cache; the softmax is in float32."""
    batch, _, heads, head_dim = query.shape
    kv_heads, size = cache.key.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, cache.key, preferred_element_type=jnp.float32)
    seen = jnp.arange(size)[None, :] < lengths[:, None]
    scores = jnp.where(seen[:, None, None, :], scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, cache.value).reshape(query.shape)
