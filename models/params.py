"""Parameter trees, the nested dicts of a model's weights: their logical axes and their shardings."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from jrlhf.meshes.layout import GENERATE, Layout
from jrlhf.meshes.mesh import AXES
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.weights import VECTORS, HeadKind, Path, weights

Params = dict[str, Any]


def nested(leaves: Iterable[tuple[Path, Any]]) -> Params:
    """A nested dict from (path, leaf) pairs."""
    tree: Params = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def leaf_at(tree: Any, path: Path) -> Any:
    """The leaf or subtree of a nested dict at this path."""
    for key in path:
        tree = tree[key]
    return tree


def model_axes(config: ModelConfig, mesh: Mesh | AbstractMesh, head: HeadKind) -> Params:
    """The tree of `init_lm` or `init_scalar` with each weight's logical axes.

    Raises a ValueError if the model does not fit on this mesh, and a TypeError if `config` is no `ModelConfig`.
    """
    if not isinstance(config, ModelConfig):
        kind = type(config).__name__
        raise TypeError(f"config is of class {kind}, but must be a ModelConfig, such as HFConfig.model")
    if not set(AXES) <= set(mesh.shape):
        axes = ", ".join(mesh.shape)
        raise ValueError(f"the mesh has axes {axes}, but a model needs {', '.join(AXES)}: use make_mesh")
    if config.embed % mesh.shape["fsdp"]:
        raise ValueError(f"model embed={config.embed} cannot be divided over fsdp={mesh.shape['fsdp']}")
    return nested((weight.path, weight.axes) for weight in weights(config, head, mesh.shape["tensor"]))


def is_axes(x: Any) -> bool:
    """True if `x` is one weight's logical axes, a leaf of an axes tree."""
    return isinstance(x, tuple)


def layer_axes(axes: Params) -> Params:
    """One layer's axes, from those of the stack."""
    return jax.tree.map(lambda stacked: stacked[1:], axes["layers"], is_leaf=is_axes)


def param_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, layout: Layout, head: HeadKind = "lm"
) -> dict[str, Any]:
    """Returns the sharding of each stored weight, in the tree of `init_lm` or `init_scalar`.

    In GENERATE "layers" is a list with one dict a layer: slicing stacked weights inside a decode loop copies every
    weight at every step.
    """
    axes = model_axes(config, mesh, head)
    if layout == GENERATE:
        axes = {**axes, "layers": [layer_axes(axes)] * config.layers}
    return stored(axes, mesh, layout)


def stored(axes: Params, mesh: Mesh | AbstractMesh, layout: Layout) -> Params:
    """Returns a tree of NamedShardings, with which `layout` stores weights of these axes."""
    return jax.tree.map(partial(layout.sharding, mesh), axes, is_leaf=is_axes)


def spec_tree(shardings: Params) -> Params:
    """The PartitionSpecs of a tree of NamedShardings."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def made_in_place(make: Callable[..., Any], shardings: Any, mesh: Mesh) -> Callable[..., Any]:
    """Jits `make` so that every device computes only the shards of the results that it stores."""
    if AxisType.Explicit in mesh.axis_types:
        # Under Explicit axes new arrays are replicated: each device would make all of them.
        make = jax.sharding.auto_axes(make, axes=mesh.axis_names, out_sharding=spec_tree(shardings))
    return jax.jit(make, out_shardings=shardings)


def matrices(params: Params) -> Any:
    """True for each weight that is none of the `VECTORS`; False for norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not (path and path[-1].key in VECTORS), params)


def cast_matrices(params: Params, dtype: jnp.dtype) -> Params:
    """Casts the matrices of weights with stacked layers to `dtype`; not vectors (norm scales, a scalar head)."""

    def cast(x: jax.Array, vector: int) -> jax.Array:
        return x.astype(dtype) if x.ndim > vector else x

    return {
        name: jax.tree.map(partial(cast, vector=2 if name == "layers" else 1), tree) for name, tree in params.items()
    }


def split_arguments(arguments: tuple[Any, ...], lora: Any) -> tuple[Params, Params, tuple[Any, ...]]:
    """Splits (weights, *batch), or with `lora` (adapter, *batch, weights), into (weights, adapter, batch)."""
    if lora is None:
        params, *batch = arguments
        return params, {}, tuple(batch)
    adapter, *batch, params = arguments
    return params, adapter, tuple(batch)
