"""Optimizers: a learning rate, and the directions of AdamW and Muon, on any mesh."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jrlhf.config.stages import OptimizerConfig
from jrlhf.models.params import matrices, matrix_of


def learning_rate(config: OptimizerConfig, *, updates: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of finished updates, for a run of `updates` updates.

    It rises linearly over `config.warmup` updates, then falls as `config.schedule` says to `config.final` times its
    maximum. wsd (warm-up, stable, decay): Hu et al. 2024, arXiv:2404.06395, section 4, with a linear decay.
    """
    most, (warmup, fall_updates) = config.learning_rate, config.duration(updates)
    rise, stable = optax.linear_schedule(most / max(warmup, 1), most, max(warmup - 1, 1)), optax.constant_schedule(most)
    if fall_updates is None:
        return optax.join_schedules([rise, stable], [warmup])
    fall = optax.linear_schedule(most, most * config.final, fall_updates)
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(most, fall_updates, alpha=config.final)
    return optax.join_schedules([rise, stable, fall], [warmup, max(updates - fall_updates, warmup)])


def learning_rates(config: OptimizerConfig, *, updates: int) -> Float[np.ndarray, "updates"]:
    """Returns the `learning_rate` of each update as a NumPy array."""
    return np.asarray(jax.vmap(learning_rate(config, updates=updates))(np.arange(updates)))


def adamw(config: OptimizerConfig, *, updates: int) -> optax.GradientTransformation:
    """AdamW: `chained` with Adam's direction."""
    return chained(config, _adam(config), updates=updates)


def chained(
    config: OptimizerConfig, direction: optax.GradientTransformation, *, updates: int
) -> optax.GradientTransformation:
    """Returns the optimizer that moves by the `learning_rate`, in a run of `updates` updates, times a direction.

    Gradients are clipped by their global norm before; weight decay is added to the direction, as AdamW does
    (Loshchilov & Hutter 2019). Matrices decay, with tables, heads and adapters; norms and biases do not, as in
    transformers' Trainer. direction: such as `optax.scale_by_adam`; its state is the first part of the second part.
    """
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    decay = optax.add_decayed_weights(config.weight_decay, matrices)
    rate = optax.scale_by_learning_rate(learning_rate(config, updates=updates))
    return optax.chain(clip, optax.chain(direction, decay, rate))  # nested as optax.adamw, for states of earlier runs


def updates_of(opt_state: Any) -> Int[Array, ""]:
    """Returns the number of updates that an optimizer of `chained` has applied: that of its schedule."""
    return opt_state[1][-1].count


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """The direction of Muon for the matrices of layers and adapters, and of Adam for all other weights.

    Muon orthogonalises the momentum of each layer's matrix [inputs, outputs] by five steps of Newton and Schulz (Jordan
    et al. 2024, https://kellerjordan.github.io/posts/muon). The result is scaled by 0.2 sqrt(max(inputs, outputs)), so
    that it is about as large as Adam's and takes its learning rate (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    """
    orthogonal = optax.contrib.scale_by_muon(weight_dimension_numbers=_dimensions)
    scaled = optax.chain(orthogonal, optax.stateless(_as_large_as_adam))
    return optax.partition({"muon": scaled, "adam": _adam(config)}, _kinds)


def _kinds(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if matrix_of(path) else "adam", params)


def _dimensions(params: Any) -> Any:
    """The dimensions of each weight that are inputs and outputs, from its last one; those before are of the layers."""

    def of(path: Any, _: Any) -> optax.contrib.MuonDimensionNumbers:
        inputs, outputs = matrix_of(path) or (1, 1)
        return optax.contrib.MuonDimensionNumbers((*range(-inputs - outputs, -outputs),), (*range(-outputs, 0),))

    return jax.tree_util.tree_map_with_path(of, params)


def _as_large_as_adam(updates: Any, _: Any) -> Any:
    def scaled(x: Array, dimensions: optax.contrib.MuonDimensionNumbers) -> Array:
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
        # Copies: a state may begin as the weights, and an update donates both.
        make = lambda params: jax.tree.map(jnp.copy, direction.init(params))  # noqa: E731
        if not _is_explicit():
            return make(params)
        shapes = jax.eval_shape(make, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
        return _automatic(make, state_specs(shapes, params))(params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not _is_explicit():
            return direction.update(grads, state, params)
        return _automatic(direction.update, (_specs(params), state_specs(state, params)))(grads, state, params)

    return optax.GradientTransformation(init, update)


def _is_explicit() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _automatic(function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    axes = jax.sharding.get_abstract_mesh().axis_names
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=specs)


def _specs(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, params)
