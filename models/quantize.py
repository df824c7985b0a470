"""Int8 quantization of a base: the matrices of the layers as 8-bit integers with one scale per output channel.

Weight-only and symmetric: w ~ q s with s = max |w| / 127 over a channel's inputs, so the error is at most s / 2.
Embeddings, unembedding, norms and biases are not quantized. `modules.dequantised` converts a layer's weights to floats
when that layer is computed. Int8 weights cannot be trained; they are a base under an adapter.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr
from jaxtyping import Array, Bool, Float

from jrlhf.models.modules import Int8, dequantised, is_int8
from jrlhf.models.params import Params
from jrlhf.models.weights import INPUTS


def to_int8(params: Params, *, donate: bool = False) -> Params:
    """Returns the weights with the layers' matrices as `Int8`, stored in the same way. Other arrays are shared.

    params: arrays on devices; layers stacked or a list.
    donate: deletes each matrix once it is quantised, so that memory never exceeds `params` and one matrix (of all
        layers, if they are stacked). Otherwise `params` and the whole result exist together at the end.
    """
    return _map_matrices(partial(_quantized, donate=donate), params)


def int8_shardings(shardings: Params) -> Params:
    """Returns the shardings of weights that `to_int8` made of weights with these shardings."""
    return _map_matrices(lambda _, *matrix: _stored(*matrix), shardings)


def int8_error(params: Params, quantized: Params) -> dict[str, float]:
    """Returns matrix name, such as attention/wq -> relative error |W - q s| / |W| (Frobenius, all layers together)."""

    def squares(weight: Array, rounded: Int8) -> Float[Array, "2"]:
        wide = weight.astype(jnp.float32)
        lost = wide - dequantised(rounded, jnp.float32)
        return jnp.stack([jnp.sum(jnp.square(lost)), jnp.sum(jnp.square(wide))])

    sums: dict[str, Any] = {}

    def add(path: Any, rounded: Any, weight: Array) -> None:
        if is_int8(rounded):
            name = "/".join(path[-1 - back].key for back in (1, 0))
            sums[name] = sums.get(name, 0) + jax.device_get(jax.jit(squares)(weight, rounded))

    jax.tree_util.tree_map_with_path(add, quantized["layers"], params["layers"], is_leaf=is_int8)
    return {name: float((lost / whole) ** 0.5) for name, (lost, whole) in sums.items()}


def _map_matrices(function: Callable[[str, Any, tuple[int, ...]], Any], params: Params) -> Params:
    """Replaces the layers' matrices by `function(name, leaf, dimensions that are summed over)`; other leaves stay."""
    first = 0 if isinstance(params["layers"], list) else 1

    def change(path: Any, leaf: Any) -> Any:
        inputs = INPUTS.get(path[-1].key)
        return leaf if inputs is None else function(keystr(path), leaf, tuple(range(first, first + inputs)))

    return {**params, "layers": jax.tree_util.tree_map_with_path(change, params["layers"])}


def _quantized(name: str, weight: Array, inputs: tuple[int, ...], *, donate: bool) -> Int8:
    if isinstance(weight, Tracer):  # only its shape matters, and it has no sharding
        return _quantizer(None, inputs)(weight)[0]
    low, finite = _quantizer(weight.sharding, inputs)(weight)
    if not finite:  # waits for the result, so that only one matrix is computed at a time
        raise ValueError(f"layers{name} holds NaN or an infinity, which int8 has no number for: mend the weights")
    if donate:
        weight.delete()
    return low


@cache
def _quantizer(sharding: Any, inputs: tuple[int, ...]) -> Callable[[Array], tuple[Int8, Bool[Array, ""]]]:
    """A matrix -> its `Int8`, and whether all of it is finite. Cached, so that all layers share one program."""

    def both(weight: Array) -> tuple[Int8, Array]:
        wide = weight.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), axis=inputs, keepdims=True)
        scale = jnp.maximum(largest, 1e-30) / 127  # any scale for a channel of zeros; NaN and infinity stay
        return Int8(jnp.round(wide / scale).astype(jnp.int8), scale), jnp.all(jnp.isfinite(scale))

    if not isinstance(sharding, NamedSharding):
        return jax.jit(both)
    return jax.jit(both, out_shardings=(_stored(sharding, inputs), NamedSharding(sharding.mesh, PartitionSpec())))


def _stored(sharding: NamedSharding, inputs: tuple[int, ...]) -> Any:
    """Returns the shardings of the values and the scale of a matrix with this sharding."""
    scale = PartitionSpec(*(None if dim in inputs else axes for dim, axes in enumerate(sharding.spec)))
    return Int8(sharding, NamedSharding(sharding.mesh, scale))  # pyright: ignore
