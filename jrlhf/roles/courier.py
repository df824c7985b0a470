"""What calls hand to each other, on its way between their devices."""

import weakref
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.meshes import lies_elsewhere, transfer
from jrlhf.run.clock import Clock


class Courier:
    """Brings arrays to the meshes of the calls that read them, each array once: a copy lives as long as its original.

    Devices work in the order in which they are given work. So what a call makes is sent on at once, lest it wait behind
    the next call on the same devices.
    """

    def __init__(self):
        self._copies: dict[tuple[int, Mesh], jax.Array] = {}  # by the original's id, which is its own while it lives

    def bring(self, tree: Any, mesh: Mesh, clock: Clock) -> Any:
        """`tree` with all its arrays on `mesh`; what is there is not touched."""
        if not lies_elsewhere(tree, mesh):
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        wanted = [leaf for leaf in leaves if lies_elsewhere(leaf, mesh) and (id(leaf), mesh) not in self._copies]
        if wanted:
            for original, copy in zip(wanted, clock.run("transfer", transfer, wanted, mesh), strict=True):
                key = id(original), mesh
                self._copies[key] = copy
                weakref.finalize(original, self._copies.pop, key, None).atexit = False
        return treedef.unflatten([self._copies.get((id(leaf), mesh), leaf) for leaf in leaves])
