"""Attention of one new token a row over its key-value cache, on GPUs: reads only the positions that the row has filled.

There is one program for each row and key-value head. It walks over blocks of positions up to the row's length and keeps
a running softmax (Milakov and Gimelshein 2018, Online normalizer calculation for softmax, algorithm 3), so that scores
never leave the multiprocessor. XLA's products read the whole cache, filled or not, and store the scores in between.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jrlhf.kernels.devices import varying

Ref = Any  # a reference to memory of the device
# Positions of a block and warps of a program; with four stages, the fastest of eight choices on an H200.
BLOCK, WARPS = 32, 2
LEAST_HEADS = 16  # rows of a matrix product in Triton: fewer query heads are padded, which moves no more bytes


def decode_attention(
    query: Float[Array, "B K G H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S H"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B K G H"]:
    """Attention of the G query heads of each key-value head over the first `lengths` positions, which are at least one.

    Scores, softmax and sums are float32. Inputs have 16 bits; H is a power of two and at least 16.

    scale, softcap, window: as in `models.attention.attention`.
    interpret: runs the kernel on another platform.
    """
    rows, heads, group, width = query.shape
    size = key.shape[2]
    # Rows that are done are fed on, past the end of the cache. Nothing may be read there; their results are not used.
    query, key, value, lengths = varying(query, key, value, jnp.minimum(lengths, size))
    stages = 4 if width <= 128 else 2  # blocks in flight; some GPUs have 99 KiB of shared memory
    padded = max(LEAST_HEADS, pl.next_power_of_2(group))
    of_group, of_cache = (pl.BlockSpec((None, None, count, width), _of_head) for count in (padded, size))
    return pl.pallas_call(
        partial(_kernel, group=group, scale=scale, softcap=softcap, window=window),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype, manual_axis_type=jax.typeof(query).manual_axis_type),
        grid=(rows, heads),
        in_specs=[of_group, of_cache, of_cache, pl.BlockSpec((None,), lambda row, head: (row,))],
        out_specs=of_group,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=interpret,
        name="decode_attention",
    )(query, key, value, lengths)


def _of_head(row: Any, head: Any) -> tuple[Any, ...]:
    return row, head, 0, 0


def _kernel(
    query: Ref,
    key: Ref,
    value: Ref,
    lengths: Ref,
    out: Ref,
    *,
    group: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> None:
    padded, width = query.shape
    length = lengths[...]
    first = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)
    exists = (jnp.arange(padded) < group)[:, None]
    queries = plgpu.load(query.at[:, :], mask=exists, other=0)

    def step(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, weighted = carry
        position = number * BLOCK + jnp.arange(BLOCK)
        seen = (position >= first) & (position < length)
        at = pl.ds(number * BLOCK, BLOCK)
        keys = plgpu.load(key.at[at, :], mask=seen[:, None], other=0)
        scores = plgpu.dot(queries, keys.T) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        highest = jnp.maximum(maximum, jnp.max(scores, axis=1))
        rescaled = jnp.exp(maximum - highest)
        weights = jnp.exp(scores - highest[:, None])
        values = plgpu.load(value.at[at, :], mask=seen[:, None], other=0)
        total = total * rescaled + jnp.sum(weights, axis=1)
        return highest, total, weighted * rescaled[:, None] + plgpu.dot(weights.astype(values.dtype), values)

    nothing = (
        jnp.full((padded,), jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros((padded,), jnp.float32),
        jnp.zeros((padded, width), jnp.float32),
    )
    _, total, weighted = lax.fori_loop(lax.div(first, BLOCK), pl.cdiv(length, BLOCK), step, nothing)
    plgpu.store(out.at[:, :], (weighted / total[:, None]).astype(out.dtype), mask=exists)
