"""Fingerprints of weights: proof that the weights that draw are those that the trainer made.

A fingerprint is made on the devices, from the bits of the arrays that go into the decoding programs. It does not depend
on how they are divided over devices, nor on whether the layers are stacked.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jrlhf.models.params import Params
from jrlhf.roles.pretrained import cast_matrices
from jrlhf.run.checkpoints import fingerprint

Identity = dict[str, UInt32[Array, "..."]]  # name of a weight -> 32 bits; of a weight of all layers, 32 bits a layer


@partial(jax.jit, static_argnames="dtype")
def trained_identity(params: Params, *, dtype: Any) -> Identity:
    """The identity of weights with stacked layers, cast to the dtype in which they draw."""
    params = cast_matrices(params, dtype)
    return _named(_others(params), fingerprint) | _named({"layers": params["layers"]}, jax.vmap(fingerprint))


@jax.jit
def drawing_identity(weights: Params, adapter: Params | None = None) -> Identity:
    """The identity of weights as decoding programs take them, where the layers are a list, and of their adapter."""
    layers = [_named({"layers": layer}, fingerprint) for layer in weights["layers"]]
    own = _named(_others(weights), fingerprint) | jax.tree.map(lambda *words: jnp.stack(words), *layers)
    return own | adapter_identity(adapter)


@jax.jit
def adapter_identity(adapter: Params | None) -> Identity:
    """The part of an identity that speaks of an adapter. Neither training nor decoding stores it otherwise."""
    return _named({"adapter": adapter}, fingerprint)


def differences(drawing: Mapping[str, Any], trained: Mapping[str, Any]) -> list[str]:
    """The names of the weights that two identities, both on the host, do not have in common."""
    names = sorted({*drawing, *trained})
    return [name for name in names if not np.array_equal(drawing.get(name), trained.get(name))]  # type: ignore[arg-type]


def _others(params: Params) -> Params:
    return {name: part for name, part in params.items() if name != "layers"}


def _named(tree: Any, identify: Any) -> Identity:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): identify(leaf) for path, leaf in leaves}
