"""Attention that never stores scores: what cuDNN and splash support, and splash, JAX's Pallas kernels for TPUs.

Splash is adapted to `jax.shard_map` with type checks. The kernels do not declare over which mesh axes their results
vary, which the checks demand. So they run in an inner `shard_map` over no further axis, without checks. There the
gradient of an operand that is the same on several devices would be wrong, because nothing sums it over them. Therefore
all operands are first cast to vary over the union of their axes: the transposes of the casts are those sums.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jrlhf.kernels.devices import vary, varying

AttentionImplementation = Literal["xla", "cudnn", "splash"]
Interpret = bool | pltpu.InterpretParams
LANES = 128
_BLOCK = 512
_MULTIPROCESSORS = 128  # of a large GPU: an A100 has 108, an H100 132


def computes(implementation: AttentionImplementation, head_dim: int, softcap: float | None) -> bool:
    """True if an implementation supports heads of this size and, if there is one, the softcap."""
    if implementation == "cudnn":
        return head_dim % 8 == 0 and head_dim <= _largest_cudnn_head() and softcap is None
    return implementation == "xla" or _splash_supports(head_dim)


def reads_filled_positions(cache: Float[Array, "B K S H"]) -> bool:
    """True if GPUs have a decode kernel, which reads only the filled positions, for such keys and values of a device.

    Triton's blocks have powers of two as sizes, and its offsets 32 bits. A program reads one head of one row: fewer
    programs than a GPU has multiprocessors would leave bandwidth unused. GPUs that cuDNN's kernels support have
    bfloat16 and enough shared memory. Pallas needs "NVIDIA" in their names.
    """
    rows, heads, _, head_dim = cache.shape
    sized = head_dim >= 16 and head_dim.bit_count() == 1 and cache.size < 2**31 and rows * heads >= _MULTIPROCESSORS
    by_nvidia = jax.default_backend() != "gpu" or "NVIDIA" in jax.local_devices()[0].device_kind
    return sized and by_nvidia and cache.dtype in (jnp.bfloat16, jnp.float16) and computes("cudnn", head_dim, None)


def _largest_cudnn_head() -> int:
    """The largest head dimension of cuDNN's flash attention on the GPUs of this process: 256 from Hopper on, 128 on
    Ampere and Ada, 0 where it does not exist, as on AMD. Without a GPU here, the program is for Hopper.
    """
    if jax.default_backend() != "gpu":
        return 256
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return 0
    generation = int(device.compute_capability.partition(".")[0])
    return 256 if generation >= 9 else 128 if generation >= 8 else 0


def splash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    interpret: Interpret = False,
) -> Float[Array, "B T N H"]:
    """Causal attention as in `attention`, in blocks: scores [T, T] are never stored, and empty blocks are skipped.

    interpret: runs the kernels on another platform.
    """
    length, head_dim = query.shape[1], query.shape[3]
    if not _splash_supports(head_dim):
        raise ValueError(
            f"splash attention needs head_dim=64 or a multiple of 128, not {head_dim}: use attention='xla'"
        )
    # The kernels do not scale. In float32, because bfloat16 rounds 128^-0.5 by 0.2 %, and so all scores.
    query = (query.astype(jnp.float32) * scale).astype(query.dtype)
    # Padded keys come after every real query, so causality masks them.
    size = -(-length // LANES) * LANES
    padding = (0, 0), (0, size - length), (0, 0), (0, 0)
    operands = [jnp.pad(x, padding) for x in varying(query, key, value)]
    return _attend(partial(_kernel, query.shape[2], size, softcap, window, interpret))(*operands)[:, :length]


def _splash_supports(head_dim: int) -> bool:
    return head_dim == 64 or head_dim % LANES == 0


def _kernel(heads: int, size: int, softcap: float | None, window: int | None, interpret: Interpret) -> Callable:
    """The kernels of `heads` query heads [B, N, T, H] and keys and values [B, K, T, H]."""
    # Imported here, so that only programs that use the kernels import them.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.CausalMask((size, size)) if window is None else masks.LocalMask((size, size), (window - 1, 0), 0)
    block = next(block for block in (_BLOCK, _BLOCK // 2, LANES) if size % block == 0)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        block_sizes=kernels.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
        ),
        residual_checkpoint_name="attended",
        interpret=interpret,  # pyright: ignore[reportArgumentType]  # it takes parameters too
    )
    return jax.vmap(kernel)


def _attend(kernel: Callable[[], Callable]) -> Callable[[Array, Array, Array], Array]:
    """Returns the kernel's attention, differentiable, for operands [B, T, N, H] that vary over the same axes."""

    @jax.custom_vjp
    def attend(query: Array, key: Array, value: Array) -> Array:
        return forward(query, key, value)[0]

    def forward(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        axes = jax.typeof(query).manual_axis_type.varying
        out, pullback = _unchecked(local_forward)(*_heads_first(query, key, value))
        return vary(out.swapaxes(1, 2), sorted(axes)), (out, pullback)

    def backward(residuals: tuple[Array, Any], cotangent: Array) -> tuple[Array, ...]:
        axes = jax.typeof(cotangent).manual_axis_type.varying
        gradients = _unchecked(local_backward)(*residuals, *_heads_first(cotangent))
        return tuple(vary(x.swapaxes(1, 2), sorted(axes)) for x in gradients)

    def local_forward(*heads: Array) -> tuple[Array, Any]:
        # The kernel is built in each trace, because it contains arrays of its mask, which belong to a trace.
        out, pullback = jax.vjp(kernel(), *heads)
        # The pullback contains the output, too; a checkpoint would keep both.
        return out, jax.tree.map(lambda x: None if x is out else x, pullback)

    def local_backward(out: Array, pullback: Any, cotangent: Array) -> tuple[Array, ...]:
        whole = jax.tree.map(lambda x: out if x is None else x, pullback, is_leaf=lambda x: x is None)
        return whole(cotangent)

    attend.defvjp(forward, backward)
    return attend


def _heads_first(*arrays: Array) -> tuple[Array, ...]:
    """[B, T, N, H] -> [B, N, T, H], with types that do not say how they vary, as `_unchecked` returns them."""
    return _unchecked(lambda *arrays: tuple(x.swapaxes(1, 2) for x in arrays))(*arrays)


def _unchecked(function: Callable) -> Callable:
    """Returns `function` without the type checks of `shard_map`; outside of `shard_map`, `function` itself."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return function
    return jax.shard_map(function, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
