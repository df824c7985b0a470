"""Fingerprints of weights, which prove that the workers draw with the trainer's weights.

A fingerprint is computed on the devices, from the bits of the arrays that the decoding programs read. It does not
depend on how they are divided over devices, nor on whether the layers are stacked.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jrlhf.models.params import Params, cast_matrices
from jrlhf.run.fingerprints import fingerprint

Identity = dict[str, UInt32[Array, "..."]]  # name of a weight -> 32 bits, of each layer for a layer's weight


@partial(jax.jit, static_argnames="dtype")
def trained_identity(params: Params, *, dtype: Any) -> Identity:
    """The identity that weights with stacked layers have after the cast to `dtype`, in which they draw."""
    params = cast_matrices(params, dtype)
    return _named(_others(params), fingerprint) | _named({"layers": params["layers"]}, jax.vmap(fingerprint))


@jax.jit
def drawing_identity(weights: Params, adapter: Params | None = None) -> Identity:
    """The identity of weights for decoding programs, whose layers are a list, and of their adapter."""
    layers = [_named({"layers": layer}, fingerprint) for layer in weights["layers"]]
    own = _named(_others(weights), fingerprint) | jax.tree.map(lambda *words: jnp.stack(words), *layers)
    return own | adapter_identity(adapter)


@jax.jit
def adapter_identity(adapter: Params | None) -> Identity:
    """The part of an identity for an adapter, which training and decoding store in the same form."""
    return _named({"adapter": adapter}, fingerprint)


def differences(drawing: Mapping[str, Any], trained: Mapping[str, Any]) -> list[str]:
    """The names of the weights that differ between two identities on the host."""
    names = sorted({*drawing, *trained})
    return [name for name in names if not np.array_equal(drawing.get(name), trained.get(name))]  # type: ignore[arg-type]


def _others(params: Params) -> Params:
    return {name: part for name, part in params.items() if name != "layers"}


def _named(tree: Any, identify: Any) -> Identity:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): identify(leaf) for path, leaf in leaves}
