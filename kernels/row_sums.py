"""The gradient of a table whose rows were looked up, summed in an order that does not change from run to run."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128


def row_sums(values: Float[Array, "N D"], index: Int[Array, "N"], rows: int) -> Float[Array, "V D"]:
    """Sums the float32 values of equal index into a table of `rows` rows; indices outside of it count nowhere.

    On GPUs a scatter that adds is a race of atomic additions: their order, and so the rounding, differs from run to
    run. XLA's flag for deterministic operations sorts every single number instead. Here tokens are sorted, and products
    with matrices of zeros and ones add up those of equal index: within blocks of tokens, then over blocks.
    """
    index = jnp.pad(index, (0, -len(index) % BLOCK), constant_values=rows)
    order = jnp.argsort(index, stable=True)
    index = index[order].reshape(-1, BLOCK)
    values = values.at[order].get(mode="fill", fill_value=0).reshape(*index.shape, -1)
    before = jnp.tril(index[:, :, None] == index[:, None, :])
    sums = jnp.einsum("bij,bjd->bid", before.astype(values.dtype), values, precision=lax.Precision.HIGHEST)
    # An index that fills several blocks is the last one of all but the last of them.
    first, last = index[:, 0], index[:, -1]
    earlier = jnp.tril(first[:, None] == last[None, :], -1)
    carried = jnp.einsum("bc,cd->bd", earlier.astype(values.dtype), sums[:, -1], precision=lax.Precision.HIGHEST)
    sums = sums + jnp.where((index == first[:, None])[:, :, None], carried[:, None, :], 0.0)
    # The sum is at the last token of an index. All others get indices past the table, no two of which are equal.
    index, sums = index.reshape(-1), sums.reshape(-1, values.shape[2])
    end = index[-1:] >= index[-1:]  # True; a constant would not vary over mesh axes as the others do
    ends = jnp.concatenate([index[1:] != index[:-1], end])
    at = jnp.where(ends & (index >= 0), index, rows + 1 + jnp.arange(len(index)))
    return jnp.zeros((rows, sums.shape[1]), sums.dtype).at[at].set(sums, mode="drop", unique_indices=True)
