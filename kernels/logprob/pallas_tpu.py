"""TPU: the forward pass as one Pallas kernel, online over vocabulary blocks; the backward pass in XLA's token tiles.

The grid is (tokens, vocabulary, embed). A product block of [tokens, vocabulary] is accumulated in VMEM over `embed` and
reduced at once into the tokens' statistics, so logits never reach HBM. Published TPU measurements (tokamax's tuning
tables, v5p and v6e) have Pallas ahead of XLA in the forward pass only; hence no backward kernel.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jrlhf.kernels.logprob.common import MASKED, Head, Statistics, cap, target_platform, varying
from jrlhf.kernels.logprob.xla import differentiable

Interpret = bool | pltpu.InterpretParams


@dataclass(frozen=True)
class Forward:
    """The kernel's block sizes: upper limits, multiples of 128.

    Blocks of n tokens and v rows of the vocabulary do n·v/(n + v) FLOP a bfloat16 byte that they read: 680 by default,
    more than the 170 to 560 at which v5e, v5p, v6e and v7x are bound by arithmetic. The default compiles for these four
    and takes 37 MiB of their VMEM; for a v4, which has 16 MiB, give tokens=512 and vocabulary=1024.
    """

    tokens: int = 1024
    vocabulary: int = 2048
    embed: int = 512
    interpret: Interpret = False

    def __call__(
        self, hidden: Float[Array, "N D"], unembedding: Float[Array, "V D"], targets: Int[Array, "N"], head: Head
    ) -> Statistics:
        """This vocabulary slice's statistics."""
        (count, embed), vocabulary = hidden.shape, unembedding.shape[0]
        block_n, block_v = _at_most(self.tokens, count, 16), _at_most(self.vocabulary, vocabulary, 128)
        block_d = _divisor(embed, self.embed)
        grid = (pl.cdiv(count, block_n), pl.cdiv(vocabulary, block_v), embed // block_d)

        # Rows of the slice from `limit` on are padding; targets become indices into the slice.
        offset = head.offset(unembedding)
        limit = jnp.full((1,), jnp.minimum(head.vocab_size - offset, vocabulary), jnp.int32)
        targets = (targets.astype(jnp.int32) - offset)[:, None]
        hidden, unembedding, targets, limit = varying(hidden, unembedding, targets, limit)

        column = pl.BlockSpec((block_n, 1), lambda n, v, d: (n, 0))
        out = jax.ShapeDtypeStruct((count, 1), jnp.float32, manual_axis_type=jax.typeof(hidden).manual_axis_type)
        statistics = pl.pallas_call(
            partial(_kernel, head=head),
            grid=grid,
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                pl.BlockSpec((block_n, block_d), lambda n, v, d: (n, d)),
                pl.BlockSpec((block_v, block_d), lambda n, v, d: (v, d)),
                column,
            ],
            out_specs=(column,) * 4,
            out_shape=(out,) * 4,
            scratch_shapes=[pltpu.VMEM((block_n, block_v), jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=64 * 2**20
            ),
            interpret=self.interpret,
            name="token_logprobs",
        )(limit, hidden, unembedding, targets)
        return Statistics(*(x[:, 0] for x in statistics))


def token_logprobs(
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "N"],
    head: Head,
    *,
    tile: int,
    forward: Forward | None = None,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Log-probabilities of `targets` and entropies; `tile` is the token tile of the backward pass.

    `forward` overrides block sizes, or interprets the kernel on another platform; given, the platform is not checked,
    so that the kernel can also be lowered for a TPU where there is none.

    Raises:
        ValueError: the program is not for a TPU.
    """
    if forward is None:
        if target_platform() != "tpu":
            raise ValueError(
                f"implementation='pallas_tpu' needs a TPU, but this program is for {target_platform()}; "
                f"use implementation=None for the platform's default"
            )
        forward = Forward()
    return differentiable(forward, head, tile, hidden, unembedding, targets)


def _kernel(limit, hidden, unembedding, targets, maximum, total, weighted, label, products, *, head: Head):
    """One block of the grid. The outputs' blocks do not depend on v and d, so they stay in VMEM and accumulate."""
    v, d = pl.program_id(1), pl.program_id(2)

    @pl.when((v == 0) & (d == 0))
    def _():
        maximum[...] = jnp.full_like(maximum, MASKED)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)
        label[...] = jnp.zeros_like(label)

    @pl.when(d == 0)
    def _():
        products[...] = jnp.zeros_like(products)

    products[...] += lax.dot_general(
        hidden[...], unembedding[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )

    @pl.when(d == pl.num_programs(2) - 1)
    def _():
        token = v * products.shape[1] + lax.broadcasted_iota(jnp.int32, products.shape, 1)
        # The mask also covers what lies beyond the array in its last block, which may be anything, NaN included.
        logits = jnp.where(token < limit[0], cap(products[...], head) / head.temperature, MASKED)
        previous = maximum[...]
        current = jnp.maximum(previous, jnp.max(logits, axis=1, keepdims=True))
        shift = previous - current
        scale = jnp.exp(shift)
        shifted = logits - current
        weights = jnp.exp(shifted)
        weighted[...] = (weighted[...] + total[...] * shift) * scale + jnp.sum(weights * shifted, axis=1, keepdims=True)
        total[...] = total[...] * scale + jnp.sum(weights, axis=1, keepdims=True)
        label[...] += jnp.sum(jnp.where(token == targets[...], logits, 0.0), axis=1, keepdims=True)
        maximum[...] = current


def _at_most(block: int, size: int, multiple: int) -> int:
    """`block`, or less where the array is smaller: its size rounded up."""
    return min(block, multiple * pl.cdiv(size, multiple))


def _divisor(size: int, block: int) -> int:
    """The largest divisor of `size` that is a multiple of 128 and at most `block`, else `size` whole.

    The contracted dimension must divide: what lies beyond the array would be summed.
    """
    divisors = [d for d in range(128, block + 1, 128) if size % d == 0]
    return divisors[-1] if divisors else size
