"""The log-prob op for Hopper: the forward pass is one Mosaic GPU kernel; the backward pass uses XLA's token tiles.

A CTA of one warpgroup owns 64 tokens and walks over the vocabulary. For each block of 128 rows of the unembedding it
accumulates the products over `embed` with WGMMA, fed by a pipeline of TMA copies, and reduces them in registers into
the tokens' statistics; logits never leave registers. The kernel is simple rather than fast: one warpgroup both copies
and computes, and each CTA reads the whole unembedding.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jrlhf.kernels.devices import target_platform, varying
from jrlhf.kernels.logprob.blocks import absorb
from jrlhf.kernels.logprob.common import MASKED, Head, Statistics, cap
from jrlhf.kernels.logprob.xla import differentiable, tiled_gradients

Ref = Any  # a reference to memory of the device, or to shared memory
# WGMMA tiles are 64 rows high; 64 elements of 16 bits fill the widest swizzle, 128 bytes; 64 x 128 float32 accumulators
# and their temporaries fit into a warpgroup's registers.
TOKENS, VOCABULARY, EMBED = 64, 128, 64


@dataclass(frozen=True)
class GpuForward:
    """The kernel. `stages` blocks of each operand are in flight; `interpret` is an `InterpretGPUParams`, or None."""

    stages: int = 4
    interpret: object | None = None

    def __call__(
        self, hidden: Float[Array, "N D"], unembedding: Float[Array, "V D"], targets: Int[Array, "N"], head: Head
    ) -> Statistics:
        """This vocabulary slice's statistics."""
        count, vocabulary = hidden.shape[0], unembedding.shape[0]
        limit, targets = head.in_slice(unembedding, targets)
        hidden, unembedding, targets, limit = varying(hidden, unembedding, targets, limit)

        # TMA moves whole 8-row tiles, and every block must be inside its array. Only ragged arrays are padded (copied),
        # never a vocabulary slice of at least 128 rows whose size is a multiple of 8.
        hidden, targets = _pad_rows(hidden, -count % TOKENS), _pad_rows(targets, -count % TOKENS)
        unembedding = _pad_rows(unembedding, max(VOCABULARY - vocabulary, -vocabulary % 8))

        rows = hidden.shape[0]
        out = jax.ShapeDtypeStruct((rows,), jnp.float32, manual_axis_type=jax.typeof(hidden).manual_axis_type)
        statistics = plgpu.kernel(
            partial(_kernel, head=head, stages=self.stages),
            out_type=(out,) * 4,
            scratch_types=[plgpu.SMEM((TOKENS,), jnp.int32), plgpu.SMEM((4, TOKENS), jnp.float32), plgpu.Barrier()],
            grid=(rows // TOKENS,),
            grid_names=("tokens",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            interpret=self.interpret,
            kernel_name="token_logprobs",
        )(limit, hidden, unembedding, targets)
        return Statistics(*(x[:count] for x in statistics))


def token_logprobs(
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "N"],
    head: Head,
    *,
    tile: int,
    forward: GpuForward | None = None,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Log-probabilities of `targets` and entropies; `tile` is the token tile of the backward pass.

    `forward` may interpret the kernel on another platform; if it is given, the platform is not checked, so that the
    kernel can also be lowered for a GPU on a machine without one.

    Raises ValueError unless the inputs have 16 bits, D is a multiple of 64, and the program is for a Hopper GPU.
    """
    if hidden.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"implementation='pallas_gpu' takes bfloat16 or float16 inputs, got {hidden.dtype}")
    if hidden.shape[1] % EMBED:
        raise ValueError(f"implementation='pallas_gpu' needs D to be a multiple of {EMBED}, got {hidden.shape[1]}")
    if forward is None:
        _check_hopper()
        forward = GpuForward()
    return differentiable(forward, partial(tiled_gradients, tile=tile), head, hidden, unembedding, targets)


def _check_hopper() -> None:
    platform = target_platform()
    if platform == "gpu" and jax.default_backend() == "gpu":
        capability = jax.devices()[0].compute_capability
        if capability == "9.0":
            return
        platform = f"gpu with compute capability {capability}"
    elif platform == "gpu":
        return
    raise ValueError(
        f"implementation='pallas_gpu' needs a Hopper GPU (compute capability 9.0), but this program is for {platform}; "
        f"use implementation=None for the platform's default"
    )


def _pad_rows(x: Array, rows: int) -> Array:
    return jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1)) if rows else x


def _kernel(limit: Ref, hidden: Ref, unembedding: Ref, targets: Ref, *refs: Ref, head: Head, stages: int) -> None:
    *outputs, targets_smem, statistics_smem, barrier = refs
    rows = pl.ds(lax.axis_index("tokens") * TOKENS, TOKENS)
    vocabulary, embed = unembedding.shape
    end = limit[0]
    plgpu.copy_gmem_to_smem(targets.at[rows], targets_smem, barrier)
    plgpu.barrier_wait(barrier)
    target = targets_smem[...]

    def block(v: Array, statistics: Statistics) -> Statistics:
        # The last block starts early, so that it ends with the array; its overlap with the previous block is masked.
        start = jnp.minimum(v * VOCABULARY, vocabulary - VOCABULARY)
        products = pl.run_scoped(
            partial(_multiply, hidden.at[rows], unembedding.at[pl.ds(start, VOCABULARY)], embed // EMBED, stages),
            plgpu.ACC((TOKENS, VOCABULARY), jnp.float32),
        )
        token = start + lax.broadcasted_iota(jnp.int32, products.shape, 1)
        counts = (token >= v * VOCABULARY) & (token < end)
        logits = jnp.where(counts, cap(products, head) / head.temperature, MASKED)
        return absorb(statistics, logits, counts & (token == _columns(target)), columns=_columns)

    initial = Statistics(*(jnp.full((TOKENS,), value, jnp.float32) for value in (MASKED, 0.0, 0.0, 0.0)))
    statistics = lax.fori_loop(0, pl.cdiv(vocabulary, VOCABULARY), block, initial)
    for i, value in enumerate(statistics):
        statistics_smem[i] = value
    plgpu.commit_smem()
    for i, output in enumerate(outputs):
        plgpu.copy_smem_to_gmem(statistics_smem.at[i], output.at[rows])
    plgpu.wait_smem_to_gmem(0)


def _multiply(hidden: Ref, unembedding: Ref, steps: int, stages: int, products: Ref) -> Array:
    """hidden [TOKENS, D] · unembeddingᵀ [D, VOCABULARY], accumulated in `products`."""

    def step(_: Any, hidden_smem: Ref, unembedding_smem: Ref) -> None:
        plgpu.wgmma(products, hidden_smem, unembedding_smem.transpose((1, 0)))
        # One WGMMA stays in flight, so blocks are released one step later.
        plgpu.wgmma_wait(1)

    transforms = (plgpu.TilingTransform((8, EMBED)), plgpu.SwizzleTransform(128))
    specs = [
        plgpu.BlockSpec((rows, EMBED), lambda d: (0, d), transforms=transforms, delay_release=1)
        for rows in (TOKENS, VOCABULARY)
    ]
    plgpu.emit_pipeline(step, grid=(steps,), in_specs=specs, max_concurrent_steps=stages)(hidden, unembedding)
    return products[...]


def _columns(x: Array) -> Array:
    """Broadcasts a value of each token to all of its columns."""
    return lax.broadcast_in_dim(x, (TOKENS, VOCABULARY), [0])
