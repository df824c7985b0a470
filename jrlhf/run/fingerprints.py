"""Fingerprints of arrays: equal on any mesh, and computed where the arrays are."""

import contextlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Shaped, UInt32

from jrlhf.meshes.offload import groups, onload
from jrlhf.meshes.transfers import is_on_host, to_host
from jrlhf.run.files import sha256


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns name -> leaf, flat, so that a checkpoint does not depend on the classes of the tree."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("two leaves of the tree have the same name")
    return named


def fingerprints(leaves: dict[str, Array]) -> dict[str, int]:
    """Returns the fingerprint of every leaf. Leaves that are offloaded to the host are brought back.

    A program computes those of a group of leaves, because its temporary memory is as large as they are.
    """
    numbers: dict[str, Any] = {}
    for offloaded in (False, True):
        names = [name for name, leaf in leaves.items() if is_on_host(leaf) == offloaded]
        for group in groups([leaves[name] for name in names]):
            numbers |= _by_mesh(onload({names[i]: leaves[names[i]] for i in group}))
    return {name: int(numbers[name]) for name in leaves}


def _by_mesh(leaves: dict[str, Array]) -> dict[str, Any]:
    """Runs one program for all leaves of a mesh."""
    numbers: dict[str, Any] = {}
    for mesh in dict.fromkeys(map(mesh_of, leaves.values())):
        own = {name: leaf for name, leaf in leaves.items() if mesh_of(leaf) == mesh}
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            numbers |= to_host(_fingerprints(own))
    return numbers


def mesh_of(leaf: Any) -> Any:
    """Returns the mesh of an array; None if it is on a single device."""
    return leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None


def fingerprint_of(tree: Any) -> str:
    """Returns a short digest of a tree of arrays. Equal trees have equal digests, on any mesh."""
    return sha256(json.dumps(fingerprints(named_leaves(tree)), sort_keys=True))[:16]


@jax.jit
def _fingerprints(leaves: dict[str, Array]) -> dict[str, Array]:
    return {name: fingerprint(leaf) for name, leaf in leaves.items()}


def fingerprint(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Sums the words of an array, each mixed with its position, in 32 bits.

    At every position the mix is a bijection of the word, so a change within one word always changes the sum; other
    changes, such as two exchanged words, are missed with a probability of 2^-32. The sum wraps around and does not
    depend on the order, so it is the same on every mesh. Compare only fingerprints of equal shapes and dtypes.
    """
    words = _words(x)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(words.ndim)):
        position += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return jnp.sum(_mix(words ^ _mix(position)), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32: one word per element, two for 64 bits."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(jnp.uint32)


def _mix(h: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (Austin Appleby, public domain): a bijection; each input bit flips half the bits."""
    h ^= h >> 16
    h *= jnp.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
