"""A model's weights as plain nested dicts: how they are initialized, and where a mesh stores them."""

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array, PRNGKeyArray

from jrlhf.meshes import GENERATE, TRAIN, Layout
from jrlhf.models.config import ModelConfig
from jrlhf.models.weights import Axes as Axes
from jrlhf.models.weights import HeadKind, Params, WeightInfo, nested, weights
from jrlhf.models.weights import check_tensor as check_tensor


def init_lm(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """The first weights of a language model, float32.

    {embedding, positions if learned, layers (stacked along L), final_norm, unembedding if untied}
    """
    return _initial(config, "lm", key)


def init_scalar(config: ModelConfig, key: PRNGKeyArray, *, zero_head: bool = True) -> Params:
    """The first weights of a decoder with a scalar head, float32: `init_lm` without unembedding, and value_head =
    {kernel [D], bias []}.

    zero_head: every output starts at 0; otherwise the kernel is drawn with variance 1 / (D + 1).
    """
    return _initial(config, "scalar", key, zero_head=zero_head)


def _initial(config: ModelConfig, head: HeadKind, key: PRNGKeyArray, *, zero_head: bool = False) -> Params:
    """Draws every weight with a key of its own: number n of its stream, the model's or its layer's."""
    numbers, layer_numbers = count(), count()
    layer_keys = None

    def fresh(weight: WeightInfo) -> Array:
        nonlocal layer_keys
        if weight.layered and layer_keys is None:  # the layers take the number of the first of them
            layer_keys = jax.random.split(jax.random.fold_in(key, next(numbers)), config.layers)
        if weight.init[0] == "constant":
            return jnp.full(weight.shape, weight.init[1], jnp.float32)
        if weight.path == ("value_head", "kernel") and zero_head:
            weight = replace(weight, init=("normal", 0.0))
        if layer_keys is None or not weight.layered:
            return draw(weight, jax.random.fold_in(key, next(numbers)))
        number = next(layer_numbers)
        return jax.vmap(lambda layer_key: draw(weight, jax.random.fold_in(layer_key, number)))(layer_keys)

    return nested((weight.path, fresh(weight)) for weight in weights(config, head))


def draw(weight: WeightInfo, key: PRNGKeyArray) -> Array:
    """A normal weight's first numbers, one layer's where layers have it. Padding rows are zero: nothing ever gives
    them a gradient."""
    rows, *others = weight.layer_shape
    drawn = weight.init[1] * jax.random.normal(key, (rows - weight.padding, *others))
    return jnp.pad(drawn, ((0, weight.padding), *((0, 0) for _ in others))) if weight.padding else drawn


def scalar_from(params: Params, *, keep_head: bool = False) -> Params:
    """A scalar model that starts from another model's decoder; all arrays are copies.

    The other is a language model (the reward model starts from the SFT actor) or a scalar model (the critic starts from
    the reward model).

    keep_head: copy the other's scalar head, too; otherwise the head is zero.
    """
    if keep_head and "value_head" not in params:
        raise ValueError("keep_head=True needs a model with a scalar head, but these are a language model's parameters")
    backbone = {name: params[name] for name in ("embedding", "positions", "layers", "final_norm") if name in params}
    if keep_head:
        head = params["value_head"]
    else:
        kernel = jnp.zeros_like(params["final_norm"]["scale"])  # has the kernel's shape and devices
        head = {"kernel": kernel, "bias": kernel.sum()}
    return jax.tree.map(jnp.copy, {**backbone, "value_head": head})


def lm_axes(config: ModelConfig, tensor: int) -> Params:
    """The tree of `init_lm` with each weight's logical axes, for a mesh whose `tensor` axis has this size.

    Raises:
        ValueError: heads, key-value heads, mlp or vocabulary do not fit on `tensor`.
    """
    return nested((weight.path, weight.axes) for weight in weights(config, "lm", tensor))


def scalar_axes(config: ModelConfig, tensor: int) -> Params:
    """The tree of `init_scalar` with each weight's logical axes; otherwise as `lm_axes`."""
    return nested((weight.path, weight.axes) for weight in weights(config, "scalar", tensor))


def model_axes(config: ModelConfig, mesh: Mesh | AbstractMesh, head: HeadKind) -> Params:
    """`lm_axes` or `scalar_axes` for this mesh.

    Raises:
        ValueError: the model does not fit on the mesh.
    """
    if config.embed % mesh.shape["fsdp"]:
        raise ValueError(f"model embed={config.embed} cannot be divided over fsdp={mesh.shape['fsdp']}")
    return (lm_axes if head == "lm" else scalar_axes)(config, mesh.shape["tensor"])


def is_axes(x: Any) -> bool:
    """Whether `x` is one weight's logical axes, a leaf of an axes tree."""
    return isinstance(x, tuple)


def layer_axes(axes: Params) -> Params:
    """One layer's axes, from those of the stack."""
    return jax.tree.map(lambda stacked: stacked[1:], axes["layers"], is_leaf=is_axes)


def param_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, layout: Layout, head: HeadKind = "lm"
) -> dict[str, Any]:
    """Where each weight is stored, in the tree of `init_lm` or `init_scalar`.

    In GENERATE "layers" is a list with one dict a layer: slicing stacked weights inside a decode loop copies every
    weight at every step.

    Raises:
        ValueError: the model does not fit on the mesh.
    """
    axes = model_axes(config, mesh, head)
    if layout == GENERATE:
        axes = {**axes, "layers": [layer_axes(axes)] * config.layers}
    return stored(axes, mesh, layout)


def stored(axes: Params, mesh: Mesh | AbstractMesh, layout: Layout) -> Params:
    """Where `layout` stores weights with these axes: a tree of NamedShardings."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, layout.storage.spec(leaf)), axes, is_leaf=is_axes)


def spec_tree(shardings: Params) -> Params:
    """The PartitionSpecs of a tree of NamedShardings."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def init_sharded(
    config: ModelConfig, key: PRNGKeyArray, mesh: Mesh, head: HeadKind = "lm", *, zero_head: bool = True
) -> Params:
    """`init_lm` or `init_scalar` stored as TRAIN and SCORE store it; no device makes whole weights.

    The numbers do not depend on the mesh.
    """
    shardings = param_shardings(config, mesh, TRAIN, head)
    init = partial(init_lm, config) if head == "lm" else partial(init_scalar, config, zero_head=zero_head)
    with jax.set_mesh(mesh):
        if AxisType.Explicit in mesh.axis_types:
            # Under Explicit axes fresh random numbers are replicated: each device would make whole weights.
            init = jax.sharding.auto_axes(init, axes=mesh.axis_names, out_sharding=spec_tree(shardings))
        return jax.jit(init, out_shardings=shardings)(key)
