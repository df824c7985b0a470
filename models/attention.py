"""Rotary positions and causal attention: of whole sequences, and of one token against a key-value cache."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from jrlhf.kernels.devices import target_platform
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.config.rope import RopeScaling
from jrlhf.models.flash import LANES, AttentionImplementation, computes, reads_filled_positions, splash_attention
from jrlhf.models.remat import named

Rotation = tuple[Float[Array, "B T H//2"], Float[Array, "B T H//2"]]


def rotation(positions: Int[Array, "B T"], head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Rotation:
    """Cosines and sines of the angles p * theta^(-2i / H), float32 (Su et al. 2021, RoFormer, equation 15).

    Float32 whatever the model's dtype: bfloat16 rounds position 257 to 256, and an angle's error grows with position.

    scaling: lowers the frequencies first; see `RopeScaling`.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequencies = scaled(frequencies, scaling)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def layer_rotations(positions: Int[Array, "B T"], config: ModelConfig) -> tuple[Rotation | None, Rotation | None]:
    """The rotations of (global layers, local layers); None where positions are learned."""
    if config.positions == "learned":
        return None, None
    everywhere = rotation(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    if config.local_rope_theta is None:
        return everywhere, everywhere
    return everywhere, rotation(positions, config.head_dim, config.local_rope_theta)


def of_layer(rotations: tuple[Rotation | None, Rotation | None], local: bool | Bool[Array, ""]) -> Rotation | None:
    """One layer's rotation. `local` may be traced, where one program serves layers of both kinds."""
    everywhere, near = rotations
    if everywhere is near or isinstance(local, bool):
        return near if local is True else everywhere
    return jax.tree.map(lambda x, y: jnp.where(local, x, y), near, everywhere)


@jax.named_scope("rotate")
def rotate(x: Float[Array, "B T N H"], positions: Rotation) -> Float[Array, "B T N H"]:
    """Turns the pairs (x_i, x_{i + H/2}) by their angles, in float32. The paper's pairs are neighbours."""
    cos, sin = (part[:, :, None, :] for part in positions)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@jax.named_scope("scores")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    local: bool | Bool[Array, ""] = True,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention; query head n reads key-value head n // (N / K). Scores and softmax are float32.

    Batches are right-padded, so causality alone keeps padding out of every real token and no length mask exists.

    scale: scores are multiplied by it; None for 1 / sqrt(H).
    softcap: bounds the scaled scores to softcap * tanh(scores / softcap).
    window: position t sees only the last `window` positions up to and with t.
    local: whether the window applies. It may be traced, where one program serves layers with a window and without.
    implementation: "xla"; or, without ever storing [T, T] scores, "cudnn" on GPUs (16-bit floats, H <= 256 and a
        multiple of 8, no softcap) and "splash" on TPUs (H 64 or a multiple of 128); None as `default_attention` says.
    """
    length, head_dim = query.shape[1], query.shape[3]
    if implementation is None:
        implementation = default_attention(target_platform(), query.dtype, head_dim, softcap, length)
    if window is not None and (window >= length or local is False):
        window = None
    factor = head_dim**-0.5 if scale is None else scale
    options = {"is_causal": True, "scale": scale, "implementation": implementation}
    dense = partial(jax.nn.dot_product_attention, query, key, value, **options)
    if implementation == "xla":
        near = None
        if window is not None:
            # Scores are stored anyway, so a traced choice between two masks costs nothing, whereas a branch would.
            position = jnp.arange(length)
            near = (position[:, None] - position[None, :] < window) | jnp.logical_not(local)
        if softcap is not None:
            return named(_capped_attention(query, key, value, factor, softcap, near), "attended")
        return named(dense(mask=None if near is None else near[None, None]), "attended")

    # The mask of a kernel is static, so a traced choice is a branch.
    def kernel(window: int | None = None) -> Array:
        if implementation == "splash":
            return splash_attention(query, key, value, scale=factor, softcap=softcap, window=window)
        return dense(local_window_size=None if window is None else (window - 1, 0))

    if implementation == "cudnn" and softcap is not None:
        raise ValueError(f"cuDNN's attention has no softcap={softcap:g}: use attention='xla'")
    return kernel(window) if window is None or local is True else lax.cond(local, partial(kernel, window), kernel)


def _capped_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    scale: float,
    softcap: float,
    near: Bool[Array, "T T"] | None,
) -> Float[Array, "B T N H"]:
    """Causal attention with bounded scores, which `jax.nn.dot_product_attention` does not offer."""
    batch, length, heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, head_dim)
    # The named algorithm keeps the backward pass's products in bfloat16 too, whose cotangents are float32.
    precision = lax.DotAlgorithmPreset.BF16_BF16_F32 if query.dtype == jnp.bfloat16 else None
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, precision=precision, preferred_element_type=jnp.float32)
    scores = softcap * jnp.tanh(scores * (scale / softcap))
    seen = jnp.tril(jnp.ones((length, length), bool))
    if near is not None:
        seen = seen & near
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def default_attention(
    platform: str, dtype: jnp.dtype, head_dim: int, softcap: float | None, length: int
) -> AttentionImplementation:
    """cuDNN on a GPU and splash on a TPU where they support dtype, head dimension and softcap, else XLA.

    Splash computes blocks of 128 tokens and more, so that shorter rows are XLA's.
    """
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and computes("cudnn", head_dim, softcap):
        return "cudnn"
    if platform == "tpu" and dtype == jnp.bfloat16 and computes("splash", head_dim, softcap) and length >= LANES:
        return "splash"
    return "xla"


# ---- the key-value cache: explicit argument and result of a decode step


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Head-major, so that a decode step reads it in place; [B, S, K, H] would be transposed at every step.

    transposed: whether keys are [B, K, H, S]. A sum over the last axis is not vectorised on CPUs, where scores of keys
        [B, K, S, H] take three times as long.
    """

    key: Float[Array, "B K S H"] | Float[Array, "B K H S"]
    value: Float[Array, "B K S H"]
    transposed: bool = field(default=False, metadata={"static": True})

    @property
    def size(self) -> int:
        """Number of positions of a row."""
        return self.value.shape[2]

    def map(self, change: Callable[..., Array], *others: "LayerCache") -> "LayerCache":
        """`change(array, its axis of positions, *the others' arrays)` of keys and values."""
        key = change(self.key, 3 if self.transposed else 2, *(other.key for other in others))
        return replace(self, key=key, value=change(self.value, 2, *(other.value for other in others)))


def cached_attention(
    query: Float[Array, "B 1 N H"],
    cache: LayerCache,
    lengths: Int[Array, "B"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    local: bool = True,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B 1 N H"]:
    """One new token's attention over the first `lengths` positions of each row's cache; the softmax is in float32.

    The keywords are those of `attention`: a local layer sees only the last `window` of these positions.

    implementation: "xla" reads the whole cache. Others have a kernel on GPUs, where `reads_filled_positions` says so.
    """
    batch, _, heads, head_dim = query.shape
    kv_heads, size = cache.value.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    factor = head_dim**-0.5 if scale is None else scale
    if window is not None and (window >= size or not local):
        window = None
    if implementation != "xla" and target_platform() == "gpu" and reads_filled_positions(cache.value):
        # Pallas takes long to import: only where it is used.
        from jrlhf.kernels.decode_attention import decode_attention

        attend = partial(decode_attention, scale=factor, softcap=softcap, window=window)
        return attend(grouped, cache.key, cache.value, lengths).reshape(query.shape)
    product = "bkgh,bkhs->bkgs" if cache.transposed else "bkgh,bksh->bkgs"
    scores = jnp.einsum(product, grouped, cache.key, preferred_element_type=jnp.float32)
    position = jnp.arange(size)[None, :]
    seen = position < lengths[:, None]
    if window is not None:
        seen = seen & (position >= lengths[:, None] - window)
    scores = scores * factor
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, cache.value).reshape(query.shape)


def transposes_keys(mesh: Mesh | AbstractMesh) -> bool:
    """True if caches on this mesh are `transposed`."""
    device = mesh.abstract_mesh.abstract_device
    return (jax.default_backend() if device is None else device.platform) == "cpu"


def prefilled_cache(
    key: Float[Array, "B P K H"], value: Float[Array, "B P K H"], size: int, *, transposed: bool = False
) -> LayerCache:
    """A cache of `size` positions that begins with a prompt's keys and values.

    Padded prompt positions are cached too; a row's own tokens overwrite them before its length reaches them.
    """
    return grown_cache(_stored(key, value, transposed), size)


def grown_cache(cache: LayerCache, size: int) -> LayerCache:
    """The same cache with room for `size` positions."""

    def padded(x, axis):
        return jnp.pad(x, [(0, size - cache.size if at == axis else 0) for at in range(x.ndim)])

    return cache.map(padded)


def append(
    cache: LayerCache, key: Float[Array, "B 1 K H"], value: Float[Array, "B 1 K H"], positions: Int[Array, "B"]
) -> LayerCache:
    """Writes each row's one new key and value at that row's position."""

    def write(rows, axis, new):
        # One slice update per row, in place; an indexed scatter on sharded rows would gather the cache.
        update = jax.vmap(lambda row, x, at: lax.dynamic_update_slice_in_dim(row, x, at, axis=axis - 1))
        return update(rows, new, positions)

    return cache.map(write, _stored(key, value, cache.transposed))


def _stored(key: Float[Array, "B P K H"], value: Float[Array, "B P K H"], transposed: bool) -> LayerCache:
    key = key.transpose(0, 2, 3, 1) if transposed else key.swapaxes(1, 2)
    return LayerCache(key, value.swapaxes(1, 2), transposed)


def scaled(frequencies: Float[Array, "H//2"], scaling: RopeScaling) -> Float[Array, "H//2"]:
    """Rotary frequencies, lowered as `RopeScaling` describes."""
    lowered = frequencies / scaling.factor
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    if low is None or high is None or original is None:
        return lowered
    # The number of turns of a pair within the positions of pretraining: pairs with at most `low` are lowered, those
    # with at least `high` are not.
    turns = original * frequencies / (2 * math.pi)
    share = jnp.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * lowered + share * frequencies
