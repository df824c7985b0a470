"""What one call hands to another that runs on other devices, or on the same ones as another mesh."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrlhf.meshes.reshard import reshard


def transfer(tree: Any, mesh: Mesh) -> Any:
    """`tree` with its arrays on `mesh`, each divided over the mesh axes that divide it now: the same bits.

    Rows that lie over all devices of one mesh come to lie over all devices of the other, in their order; what every
    device of one holds, every device of the other holds. Nothing goes through the host. Arrays of `mesh` are returned
    as they are, and so is what is no array of a mesh; the arrays that come from elsewhere stay there.

    Raises:
        ValueError: rows that do not divide over `mesh`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    away = [index for index, leaf in enumerate(leaves) if _is_away(leaf, mesh)]
    for source in dict.fromkeys(leaves[index].sharding.mesh for index in away):
        indices = [index for index in away if leaves[index].sharding.mesh == source]
        for index, moved in zip(indices, _moved([leaves[index] for index in indices], source, mesh), strict=True):
            leaves[index] = moved
    return treedef.unflatten(leaves) if away else tree


def lies_elsewhere(tree: Any, mesh: Mesh) -> bool:
    """Whether `transfer` would move anything."""
    return any(_is_away(leaf, mesh) for leaf in jax.tree.leaves(tree))


def _is_away(leaf: Any, mesh: Mesh) -> bool:
    return isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh != mesh


def _moved(arrays: list[jax.Array], source: Mesh, mesh: Mesh) -> list[jax.Array]:
    """Arrays of one mesh on another. Random keys travel as the numbers that they are made of."""
    keys = [jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) for array in arrays]
    with jax.set_mesh(source):
        data = [jax.random.key_data(x) if is_key else x for x, is_key in zip(arrays, keys, strict=True)]
    data = reshard(data, [NamedSharding(mesh, _spec(x)) for x in arrays])
    with jax.set_mesh(mesh):
        return [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(array)) if is_key else x
            for x, array, is_key in zip(data, arrays, keys, strict=True)
        ]


def _spec(array: jax.Array) -> PartitionSpec:
    assert isinstance(array.sharding, NamedSharding), "others are not moved"
    return array.sharding.spec
