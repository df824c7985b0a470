"""Operations between devices inside one `jax.shard_map`, and at its border."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jrlhf.kernels.devices import target_platform, vary
from jrlhf.kernels.row_sums import row_sums
from jrlhf.meshes.layout import GENERATE, Layout
from jrlhf.meshes.mesh import AXES

TENSOR = AXES[-1]


def place(x: Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Array:
    """Reshards `x` to `spec`. With Explicit axes the arguments of a `shard_map` must already have their in_specs."""
    return jax.device_put(x, NamedSharding(mesh, spec))


def total(x: Array, axis: str | None) -> Array:
    """The sum of the devices' partial results along `axis`; with None, `x` is whole already."""
    return x if axis is None else lax.psum(x, axis)


def own_rows(x: Array) -> Array:
    """This device's rows, of rows that were gathered over `tensor`."""
    rows = x.shape[0] // lax.axis_size(TENSOR)
    return lax.dynamic_slice_in_dim(vary(x, TENSOR), lax.axis_index(TENSOR) * rows, rows)


def all_rows(tree: Any) -> Any:
    """The rows of all devices along `tensor`, for a tree of arrays that hold this device's rows."""
    return jax.tree.map(lambda x: lax.all_gather(x, TENSOR, tiled=True), tree)


def lookup(table: Array, tokens: Int[Array, "B T"]) -> Array:
    """This device's part of an embedding lookup: the rows that its slice of the vocabulary has, and zeros elsewhere.

    Summed over `tensor` the parts are the embeddings. No device holds the whole table, nor its gradient.
    """
    local = tokens - lax.axis_index(TENSOR) * table.shape[0]
    inside = (local >= 0) & (local < table.shape[0])
    # An index past the end is filled with zeros and has no gradient; a negative one would count from the end.
    return _rows_of(table, jnp.where(inside, local, table.shape[0]))


@jax.custom_vjp
def _rows_of(table: Array, index: Int[Array, "B T"]) -> Array:
    """Rows of a table; 0 for indices outside of it. Gradients are summed in float32: for a frequent row a bfloat16 sum
    would stop growing at 256 times the summands."""
    return table.at[index].get(mode="fill", fill_value=0)


def _rows_forward(table: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows_of(table, index), (table, index)


def _rows_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    table, index = residuals
    cotangent = cotangent.astype(jnp.float32)
    if target_platform() == "gpu":
        total = row_sums(cotangent.reshape(-1, table.shape[1]), index.reshape(-1), table.shape[0])
    else:
        total = jnp.zeros_like(table, jnp.float32).at[index].add(cotangent, mode="drop")
    return total.astype(table.dtype), None


_rows_of.defvjp(_rows_forward, _rows_backward)


def check_operands(layout: Layout, params: Any, tokens: Any, name: str = "tokens") -> None:
    """Raises TypeError for tokens that are no rows of integers, ValueError for weights stored for another layout."""
    if getattr(tokens, "ndim", 0) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{name} must be an array of integers, of rows and time")
    if isinstance(params.get("layers"), dict if layout == GENERATE else list):
        here = f"param_shardings(model, mesh, {layout.name.upper()})"
        raise ValueError(f"params are stored for another layout: reshard them to {here}")


def check_rows(rows: int, mesh: Mesh | AbstractMesh, axes: Sequence[str], what: str) -> None:
    """Raises a ValueError if the rows of a batch cannot be divided evenly over `axes`."""
    sizes = {axis: mesh.shape[axis] for axis in axes}
    count = math.prod(sizes.values())
    if rows % count:
        raise ValueError(
            f"{what}: a batch of {rows} rows cannot be divided over {count} devices "
            f"({' * '.join(f'{axis}={size}' for axis, size in sizes.items())}): use a multiple of {count}"
        )
