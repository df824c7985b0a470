"""Layouts: how one call partitions a model, both where weights are *stored* and where a device *computes* with them."""

from dataclasses import dataclass, fields

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axes (`None`: not sharded), one field per logical axis. Other axes are refused."""

    layers: MeshAxes = None
    embed: MeshAxes = None
    heads: MeshAxes = None
    kv_heads: MeshAxes = None
    head_dim: MeshAxes = None
    mlp: MeshAxes = None
    vocab: MeshAxes = None
    norm: MeshAxes = None

    def spec(self, logical_axes: tuple[str | None, ...]) -> P:
        """The PartitionSpec of an array whose dimensions carry these logical axes.

        Raises ValueError for an unknown logical axis, or two dimensions on one mesh axis.
        """
        axes = {field.name for field in fields(self)}
        for axis in logical_axes:
            if axis is not None and axis not in axes:
                raise ValueError(f"unknown logical axis {axis!r}: known are {', '.join(sorted(axes))}")
        entries = [None if axis is None else getattr(self, axis) for axis in logical_axes]
        used = [name for entry in entries for name in axis_names(entry)]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {logical_axes} collide: mesh axes {used} appear more than once")
        return P(*entries)


@dataclass(frozen=True)
class Layout:
    """The partitioning of a model, and of the rows, in one call.

    storage: the division of each weight between calls.
    compute: its division while a device computes with it. It is `storage` with mesh axes dropped, never moved: the
        dropped axes are all-gathered at the place of use, and their gradient is reduce-scattered back.
    batch: the mesh axes over which the batch's rows are divided.
    """

    name: str
    storage: ShardingRules
    compute: ShardingRules
    batch: tuple[str, ...]

    @property
    def tensor_parallel(self) -> bool:
        """True if a layer's heads and mlp are computed in slices, with partial sums over `tensor`."""
        return self.compute.heads is not None

    def batch_spec(self) -> P:
        """Rows over the batch axes; further dimensions are whole."""
        return P(self.batch)

    def sharding(self, mesh: Mesh | AbstractMesh, logical_axes: tuple[str | None, ...]) -> NamedSharding:
        """The storage of a weight with these logical axes on `mesh`."""
        return NamedSharding(mesh, self.storage.spec(logical_axes))


_SHARDED = ShardingRules(embed="fsdp", heads="tensor", kv_heads="tensor", mlp="tensor", vocab="tensor")
_TENSOR = ShardingRules(heads="tensor", kv_heads="tensor", mlp="tensor", vocab="tensor")
_VOCAB = ShardingRules(vocab="tensor")

TRAIN = Layout("train", storage=_SHARDED, compute=_VOCAB, batch=("data", "fsdp", "tensor"))
TRAIN_TP = Layout("train_tp", storage=_SHARDED, compute=_TENSOR, batch=("data", "fsdp"))
GENERATE = Layout("generate", storage=_TENSOR, compute=_TENSOR, batch=("data", "fsdp"))
SCORE = Layout("score", storage=_SHARDED, compute=_VOCAB, batch=("data", "fsdp", "tensor"))


def axis_names(entry: MeshAxes) -> tuple[str, ...]:
    """One dimension's entry of a PartitionSpec as a tuple of mesh axes."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def dropped_axes(storage: P, compute: P, rank: int) -> list[tuple[str, ...]]:
    """For every dimension, the mesh axes that are in `storage` and not in `compute`.

    Raises ValueError if `compute` is not `storage` with trailing axes of each dimension dropped.
    """
    dropped = []
    for dim in range(rank):
        stored = axis_names(storage[dim] if dim < len(storage) else None)
        computed = axis_names(compute[dim] if dim < len(compute) else None)
        if stored[: len(computed)] != computed:
            raise ValueError(f"compute spec {compute} moves axes of storage spec {storage}: it may only drop them")
        dropped.append(stored[len(computed) :])
    return dropped


def gather(x: jax.Array, storage: P, compute: P) -> jax.Array:
    """Gathers a stored slice into the slice to compute with, inside `shard_map`.

    The all-gather's transpose is a reduce-scatter, so the gradient comes back stored as the weight is. Cast `x` to vary
    over the batch's axes (`lax.pcast`) *before* the gather: an implicit cast would come after it, and then the cast's
    transpose, a sum over the replicas, is an all-reduce of whole gradients before the reduce-scatter.
    """
    for dim, axes in enumerate(dropped_axes(storage, compute, x.ndim)):
        divided = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
        if divided:
            x = lax.all_gather(x, divided, axis=dim, tiled=True)
    return x
