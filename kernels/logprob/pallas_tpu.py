"""The log-prob op for TPUs: Pallas kernels over blocks of tokens and vocabulary; logits never reach HBM.

*Forward*: the grid is (tokens, vocabulary, embed). A product block of [tokens, vocabulary] is accumulated in VMEM over
`embed` and reduced at once into the tokens' statistics, online over the vocabulary.

*Backward*: one kernel for dX, whose grid is (tokens, vocabulary), and one for dW, whose grid is (vocabulary, tokens). A
step recomputes a block of products over the whole of `embed`, turns it into its gradient and multiplies that with the
operand that is still in VMEM, into a float32 accumulator of the inner loop. HBM holds nothing but the results. The
price is that both kernels recompute: 8·N·D·V operations, where XLA's token tiles take 6.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jrlhf.kernels.devices import target_platform, varying
from jrlhf.kernels.logprob.blocks import absorb
from jrlhf.kernels.logprob.common import MASKED, Head, Normaliser, Statistics, cap, gradient_of_products
from jrlhf.kernels.logprob.xla import Residuals, differentiable

Interpret = bool | pltpu.InterpretParams
Ref = Any  # a reference to a block in VMEM or SMEM


@dataclass(frozen=True)
class Forward:
    """The forward kernel's block sizes: upper limits, multiples of 128.

    Blocks of n tokens and v rows of the vocabulary do n·v/(n + v) FLOP per bfloat16 byte that they read: 680 by
    default, more than the 170 to 560 at which v5e, v5p, v6e and v7x are bound by arithmetic. The default compiles for
    these four and takes 37 MiB of their VMEM; for a v4, which has 16 MiB, set tokens=512 and vocabulary=1024.
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

        limit, targets = head.in_slice(unembedding, targets)
        hidden, unembedding, targets, limit = varying(hidden, unembedding, targets[:, None], limit)

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


@dataclass(frozen=True)
class Backward:
    """The block sizes of both backward kernels: upper limits, multiples of 128.

    A step does 4·n·v·D FLOP and reads v·D (dX) or n·D (dW) new elements: at 512 that is 1024 FLOP per bfloat16 byte.
    Whole rows of `embed` are in VMEM, in bfloat16 about 8·D bytes for each token and row of the vocabulary in a block,
    so blocks shrink if D exceeds 4096. The default compiles for v5e, v5p and v6e, also in float32.
    """

    tokens: int = 512
    vocabulary: int = 512
    interpret: Interpret = False

    def __call__(
        self, residuals: Residuals, d_logprobs: Float[Array, "N"], d_entropy: Float[Array, "N"], head: Head
    ) -> tuple[Float[Array, "N D"], Float[Array, "V D"]]:
        """This vocabulary slice's partial dX and its dW, in the dtype of the inputs."""
        hidden, unembedding, targets, normaliser, entropy = residuals
        (count, embed), vocabulary = hidden.shape, unembedding.shape[0]
        largest = max(128, 2**21 // embed // 128 * 128)
        block_n = _at_most(min(self.tokens, largest), count, 128)
        block_v = _at_most(min(self.vocabulary, largest), vocabulary, 128)

        limit, targets = head.in_slice(unembedding, targets)
        arrays = varying(limit, hidden, unembedding, targets, *normaliser, entropy, d_logprobs, d_entropy)
        limit, hidden, unembedding, *numbers = arrays
        gradient = partial(_gradient, limit, numbers, head, self.interpret)
        d_hidden = gradient(hidden, unembedding, (block_n, block_v), over_tokens=False)
        return d_hidden, gradient(unembedding, hidden, (block_v, block_n), over_tokens=True)


def token_logprobs(
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "N"],
    head: Head,
    *,
    forward: Forward | None = None,
    backward: Backward | None = None,
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Log-probabilities of `targets` and entropies.

    `forward` and `backward` override block sizes, or interpret the kernels on another platform; if `forward` is given,
    the platform is not checked, so that the kernels can also be lowered for a TPU on a machine without one.

    Raises ValueError if the program is not for a TPU.
    """
    if forward is None:
        if target_platform() != "tpu":
            raise ValueError(
                f"implementation='pallas_tpu' needs a TPU, but this program is for {target_platform()}; "
                f"use implementation=None for the platform's default"
            )
        forward = Forward()
    return differentiable(forward, backward or Backward(), head, hidden, unembedding, targets)


def _kernel(*refs: Ref, head: Head) -> None:
    """One block of the grid. The outputs' blocks do not depend on v and d, so they stay in VMEM and accumulate."""
    limit, hidden, unembedding, targets, *outputs, products = refs
    v, d = pl.program_id(1), pl.program_id(2)

    @pl.when((v == 0) & (d == 0))
    def _():
        for output, value in zip(outputs, (MASKED, 0.0, 0.0, 0.0), strict=True):
            output[...] = jnp.full_like(output, value)

    @pl.when(d == 0)
    def _():
        products[...] = jnp.zeros_like(products)

    products[...] += _dot(hidden[...], unembedding[...], 1)

    @pl.when(d == pl.num_programs(2) - 1)
    def _():
        token = v * products.shape[1] + lax.broadcasted_iota(jnp.int32, products.shape, 1)
        # Beyond the array the last block may contain anything, even NaN and targets of the next slice.
        counts = token < limit[0]
        logits = jnp.where(counts, cap(products[...], head) / head.temperature, MASKED)
        before = Statistics(*(output[...] for output in outputs))
        after = absorb(before, logits, counts & (token == targets[...]))
        for output, value in zip(outputs, after, strict=True):
            output[...] = value


def _gradient(
    limit: Array,
    numbers: list[Array],
    head: Head,
    interpret: Interpret,
    outer: Array,
    inner: Array,
    blocks: tuple[int, int],
    *,
    over_tokens: bool,
) -> Array:
    """The gradient of `outer` (hidden or unembedding), as a sum over the rows of `inner`, which is the other operand.

    over_tokens: whether `inner` is hidden. Products are [outer, inner], so that no operand is transposed; then the
    `numbers` of tokens are a row, otherwise a column.
    """
    (block, inner_block), embed = blocks, outer.shape[1]
    if over_tokens:
        numbers, number = [x[None, :] for x in numbers], pl.BlockSpec((1, inner_block), lambda o, i: (0, i))
    else:
        numbers, number = [x[:, None] for x in numbers], pl.BlockSpec((block, 1), lambda o, i: (o, 0))
    of_outer = pl.BlockSpec((block, embed), lambda o, i: (o, 0))
    return pl.pallas_call(
        partial(_gradient_kernel, head=head, inner_size=inner.shape[0], over_tokens=over_tokens),
        grid=(pl.cdiv(outer.shape[0], block), pl.cdiv(inner.shape[0], inner_block)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            of_outer,
            pl.BlockSpec((inner_block, embed), lambda o, i: (i, 0)),
            *[number] * len(numbers),
        ],
        out_specs=of_outer,
        out_shape=jax.ShapeDtypeStruct(outer.shape, outer.dtype, manual_axis_type=jax.typeof(outer).manual_axis_type),
        scratch_shapes=[pltpu.VMEM((block, embed), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=64 * 2**20
        ),
        interpret=interpret,
        name="token_logprobs_" + ("d_unembedding" if over_tokens else "d_hidden"),
    )(limit, outer, inner, *numbers)


def _gradient_kernel(
    limit: Ref, outer: Ref, inner: Ref, *refs: Ref, head: Head, inner_size: int, over_tokens: bool
) -> None:
    """One block of inner rows."""
    *numbers, gradient, accumulated = refs
    target, maximum, log_total, entropy, d_logprob, d_entropy = (x[...] for x in numbers)
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        accumulated[...] = jnp.zeros_like(accumulated)

    products = _dot(outer[...], inner[...], 1)
    rows = [pl.program_id(axis) * ref.shape[0] for axis, ref in enumerate((outer, inner))]
    index = [row + lax.broadcasted_iota(jnp.int32, products.shape, axis) for axis, row in enumerate(rows)]
    token = index[0 if over_tokens else 1]
    normaliser = Normaliser(maximum, log_total)
    d_label = jnp.where(token == target, d_logprob, 0.0)
    d_products = gradient_of_products(
        cap(products, head), d_label, None, normaliser, entropy, d_logprob, d_entropy, head
    )
    # Beyond an array the last block may contain anything, even NaN, so both factors of the product are masked. Garbage
    # beyond `outer` stays in rows that are not written.
    values, counts = inner[...], token < limit[0]
    if inner_size % inner.shape[0]:
        counts &= index[1] < inner_size
        row = rows[1] + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(row < inner_size, values, jnp.zeros_like(values))
    d_products = jnp.where(counts, d_products, 0.0).astype(values.dtype)
    accumulated[...] += _dot(d_products, values, 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        gradient[...] = accumulated[...].astype(gradient.dtype)


def _dot(a: Array, b: Array, b_axis: int) -> Array:
    """Contracts the columns of `a` with axis `b_axis` of `b`, in float32."""
    return lax.dot_general(a, b, (((1,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _at_most(block: int, size: int, multiple: int) -> int:
    """Returns `block`, or the array's size rounded up to `multiple`, if that is smaller."""
    return min(block, multiple * pl.cdiv(size, multiple))


def _divisor(size: int, block: int) -> int:
    """The largest divisor of `size` that is a multiple of 128 and at most `block`, else `size` whole.

    The block must divide the contracted dimension, because elements beyond the array would be summed.
    """
    divisors = [d for d in range(128, block + 1, 128) if size % d == 0]
    return divisors[-1] if divisors else size
