"""Arrays between the host and the devices of all processes. In one process these are JAX's own transfers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes.reshard import reshard


def to_devices(tree: Any, shardings: Any) -> Any:
    """Arrays that every process has whole and equal, or that lie on the devices already -> placed.

    shardings: mirrors `tree`, or one for all of its leaves.

    `jax.device_put` onto devices of several processes would first compare the values of all processes, by a
    collective for each array; here each process takes its shards and sends nothing.
    """
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return jax.tree.map(_place, tree, shardings)


def to_host(tree: Any) -> Any:
    """The whole of every array as NumPy, in every process. All processes must call this, in one order."""
    return jax.device_get(gathered(tree))


def gathered(tree: Any) -> Any:
    """`tree`, so that `jax.device_get` finds the whole of every array in this process: those whose shards lie with
    several processes are replicated by a compiled all-gather, which is handed over and not waited for. The copies to
    the host begin.

    All processes must call this, in one order; what it returns may be fetched whenever and in any thread.
    """
    leaves, treedef = jax.tree.flatten(tree)
    spread = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _here(leaf)]
    if spread:
        arrays = [leaves[index] for index in spread]
        whole = reshard(arrays, [NamedSharding(array.sharding.mesh, P()) for array in arrays])
        for index, array in zip(spread, whole, strict=True):
            leaves[index] = array
    # JAX lists an array's shards when they are first asked for, and stumbles where two threads ask at once.
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return treedef.unflatten(leaves)


def _here(array: jax.Array) -> bool:
    return array.is_fully_addressable or array.is_fully_replicated


def _place(x: Any, sharding: Sharding) -> jax.Array:
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_place(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not _here(x):
        return reshard(x, sharding)
    host = np.asarray(x)
    # As `jax.device_put` would have it: float64 is float32 here.
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__, dtype=host.dtype)
