"""Directions that need more than optax: Muon, and any direction on any mesh."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jrlhf.config.stages import OptimizerConfig
from jrlhf.models.weights import INPUTS, OUTPUTS
from jrlhf.roles.optimizers import adam


def muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """The direction of Muon for the matrices of layers and adapters, and of Adam for all other weights.

    Muon orthogonalises the momentum of each layer's matrix [inputs, outputs] by five steps of Newton and Schulz (Jordan
    et al. 2024, https://kellerjordan.github.io/posts/muon). The result is scaled by 0.2 sqrt(max(inputs, outputs)), so
    that it is about as large as Adam's and takes its learning rate (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    """
    orthogonal = optax.contrib.scale_by_muon(weight_dimension_numbers=_dimensions)
    scaled = optax.chain(orthogonal, optax.stateless(_as_large_as_adam))
    return optax.partition({"muon": scaled, "adam": adam(config)}, _kinds)


def matrix_of(path: Any) -> tuple[int, int] | None:
    """Returns how many of a weight's last dimensions are inputs, and how many outputs, of the matrix of a layer or of
    its adapter. None: the weight with this path (`jax.tree_util`) is a table, a head, a norm or a bias.
    """
    *_, above, last = [getattr(key, "key", "") for key in (None, None, *path)]
    if last in INPUTS:
        return INPUTS[last], OUTPUTS[last]
    if last in ("a", "b") and above in INPUTS:  # the two matrices of an adapter, of rank r
        return (INPUTS[above], 1) if last == "a" else (1, OUTPUTS[above])
    return None


def _kinds(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if matrix_of(path) else "adam", params)


def _dimensions(params: Any) -> Any:
    """The dimensions of each weight that are inputs and outputs, from its last one; those before are of the layers."""

    def of(path: Any, _: Any) -> optax.contrib.MuonDimensionNumbers:
        sizes = matrix_of(path)
        assert sizes is not None, "others are masked"
        inputs, outputs = sizes
        return optax.contrib.MuonDimensionNumbers((*range(-inputs - outputs, -outputs),), (*range(-outputs, 0),))

    return jax.tree_util.tree_map_with_path(of, params)


def _as_large_as_adam(updates: Any, _: Any) -> Any:
    def scaled(x: Array, dimensions: Any) -> Array:
        sizes = (math.prod(x.shape[axis] for axis in axes) for axes in dimensions)
        return 0.2 * max(sizes) ** 0.5 * x

    return jax.tree.map(scaled, updates, _dimensions(updates))


def weight_like(params: Any) -> Callable[[Any, Any], Any]:
    """Returns (path, leaf) -> the path of the weight whose shape and place this leaf of an optimizer's state has, or
    None. Such leaves are stored as that weight is; others are whole on every device.
    """
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def find(path: Any, leaf: Any) -> Any:
        ends = (path[start:] for start in range(len(path) + 1))
        return next((end for end in ends if shapes.get(end) == leaf.shape), None)

    return find


def placed(direction: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a direction that any mesh can compute, though its code names no shardings: the compiler chooses those of
    temporary arrays, and `weight_like` those of the state.
    """

    def state_specs(state: Any, params: Any) -> Any:
        specs = dict(jax.tree_util.tree_leaves_with_path(_specs(params)))
        like = weight_like(params)
        return jax.tree_util.tree_map_with_path(lambda path, leaf: specs.get(like(path, leaf), P()), state)

    def init(params: Any) -> Any:
        # Copies: a state may begin as the weights, and an update donates both. Of Python's numbers they are arrays of a
        # firm type, as updates return them: another type would compile again.
        def make(params: Any) -> Any:
            state = jax.tree.map(jnp.asarray, direction.init(params))
            return jax.tree.map(lambda x: jax.lax.convert_element_type(jnp.copy(x), x.dtype), state)

        if not _is_explicit():
            return make(params)
        shapes = jax.eval_shape(make, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
        return _automatic(make, state_specs(shapes, params))(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not _is_explicit():
            return direction.update(updates, state, params)
        return _automatic(direction.update, (_specs(params), state_specs(state, params)))(updates, state, params)

    return optax.GradientTransformation(init, update)


def _is_explicit() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _automatic(function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    axes = jax.sharding.get_abstract_mesh().axis_names
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=specs)


def _specs(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, params)
