"""Moves arrays between meshes, and between devices and the hosts of all processes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes.mesh import absent_processes
from jrlhf.meshes.resharding import reshard

HOST = "pinned_host"  # the memory kind of offloaded arrays


def transfer(tree: Any, mesh: Mesh) -> Any:
    """Returns `tree` with its arrays on `mesh`, bit for bit, each divided over the same mesh axes as before.

    Rows divided over all devices of one mesh are then divided over all devices of the other, in their order; replicated
    arrays stay replicated. Nothing goes through the host. Arrays already on `mesh`, and leaves without a mesh, are
    returned as they are; the sources on other meshes are not freed.
    """
    leaves, treedef = jax.tree.flatten(tree)
    away = _away(leaves, mesh)
    for source in dict.fromkeys(leaves[index].sharding.mesh for index in away):
        indices = [index for index in away if leaves[index].sharding.mesh == source]
        for index, moved in zip(indices, _moved([leaves[index] for index in indices], source, mesh), strict=True):
            leaves[index] = moved
    return treedef.unflatten(leaves) if away else tree


def lies_elsewhere(tree: Any, mesh: Mesh) -> bool:
    """True if `transfer` would move anything."""
    return bool(_away(jax.tree.leaves(tree), mesh))


def is_on_host(tree: Any) -> bool:
    """True if an array of the tree is in pinned host memory: see `offload.py`."""
    return HOST in [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def to_devices(tree: Any, shardings: Any) -> Any:
    """Places arrays that every process holds whole and equal, or that are on devices already.

    shardings: mirrors `tree`, or one for all of its leaves.

    `jax.device_put` onto devices of several processes would first compare the values of all processes, by a
    collective for each array; here each process takes its shards and sends nothing.
    """
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(_place, tree, shardings)


def to_host(tree: Any) -> Any:
    """Returns every array as a whole NumPy array, in every process. All processes must call this in the same order."""
    return jax.device_get(gathered(tree))


def gathered(tree: Any) -> Any:
    """Returns `tree` in a form that `jax.device_get` can fetch completely in every process, and starts the copies to
    the host. Arrays that some process does not have completely are replicated to a device of each, without waiting.

    All processes must call this in the same order. The result may be fetched at any time and in any thread.
    """
    leaves, treedef = jax.tree.flatten(tree)
    remote = []
    if jax.process_count() > 1:
        remote = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _is_everywhere(leaf)]
    if remote:
        arrays = [leaves[index] for index in remote]
        whole = reshard(arrays, [NamedSharding(_to_all_processes(array.sharding.mesh), P()) for array in arrays])
        for index, array in zip(remote, whole, strict=True):
            leaves[index] = array
    # JAX lists an array's shards at the first request, and fails if two threads ask at once; so the list is made here.
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return treedef.unflatten(leaves)


def _away(leaves: Sequence[Any], mesh: Mesh) -> list[int]:
    """Returns the positions of the arrays on other meshes."""
    shardings = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
    return [i for i, one in enumerate(shardings) if isinstance(one, NamedSharding) and one.mesh != mesh]


def _moved(arrays: list[jax.Array], source: Mesh, mesh: Mesh) -> list[jax.Array]:
    """Moves arrays of the mesh `source` to `mesh`. Random keys are sent as their integers."""
    keys = [jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) for array in arrays]
    with jax.set_mesh(source):
        data: list[Any] = [jax.random.key_data(x) if is_key else x for x, is_key in zip(arrays, keys, strict=True)]
    data = reshard(data, [NamedSharding(mesh, x.sharding.spec) for x in data])
    with jax.set_mesh(mesh):
        return [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(array)) if is_key else x
            for x, array, is_key in zip(data, arrays, keys, strict=True)
        ]


def _is_everywhere(array: jax.Array) -> bool:
    """True if every process has the whole array."""
    if not isinstance(array.sharding, NamedSharding):
        return array.is_fully_addressable or array.is_fully_replicated
    return array.is_fully_replicated and not absent_processes(array.sharding.mesh)


@lru_cache(maxsize=1024)
def _to_all_processes(mesh: Mesh) -> Mesh:
    """`mesh` itself if it has devices of every process; or a mesh of its devices and one of each absent process."""
    absent = absent_processes(mesh)
    return Mesh(np.asarray([*mesh.devices.flat, *absent]), ("device",)) if absent else mesh


def _place(x: Any, sharding: Sharding) -> jax.Array:
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_place(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not _is_everywhere(x):
        return reshard(x, sharding)
    host = np.asarray(x)
    # As `jax.device_put` does: float64 becomes float32.
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__, dtype=host.dtype)
