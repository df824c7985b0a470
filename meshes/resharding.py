"""Moves arrays from one layout to another over the devices' own links, never through the host."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath, SequenceKey, keystr
from jax.typing import DTypeLike

from jrlhf.meshes.exchange import copied, landing_of, stage_of
from jrlhf.meshes.mesh import Device, mesh_of
from jrlhf.meshes.repartition import division_between, repartitioned

GROUP_BYTES = 256 * 2**20
T = TypeVar("T")
TreePath = KeyPath[Any]


def reshard(
    tree: Any,
    shardings: Any,
    *,
    dtype: DTypeLike | None = None,
    donate: bool = False,
    group_bytes: int = GROUP_BYTES,
) -> Any:
    """Returns the arrays of `tree`, placed as `shardings` says: the same bits, or each number rounded once to `dtype`.

    An eager `jax.device_put` to another partitioning goes through host memory and ignores donation. Here the move is a
    compiled `device_put` on one set of devices; to other devices, a compiled one into the destination's partitioning
    and then copies from device to device. A transfer guard is active, so a transfer through the host would raise.

    Args:
        tree: arrays on devices.
        shardings: NamedShardings that mirror `tree`, or one for all its arrays. An additional list on the path to a
            leaf unstacks that array along axis 0: `{"w": x}` may go to `{"w": [s0, s1]}` as well as to
            `[{"w": s0}, {"w": s1}]`.
        dtype: floating arrays are cast to it *before* they are sent. Vectors keep their dtype: norm scales are small,
            and a model applies them in float32.
        donate: frees each array of `tree` once it has moved. Otherwise the result shares no memory with `tree`, so
            that either may be deleted.
        group_bytes: arrays are sent in groups of at most this many bytes per device at the destination (a larger array
            alone, a larger stacked one by layers), which bounds the temporary memory. Where devices exchange parts,
            which needs more of it, fewer are in a group.

    Returns the arrays in the structure of `shardings`. Raises ValueError if that does not mirror `tree`, if an array
    does not divide as its sharding says, or if an array that is to be freed is in the tree twice; TypeError if a leaf
    is on no device or traced. In a jitted function use `jax.device_put`.
    """
    (sources, origin), (targets, destination) = _sources(tree), _targets(tree, shardings)
    if donate:
        _check_distinct(tree)
    arrays = jax.tree.leaves(tree)
    results: list[jax.Array | None] = [None] * len(targets)
    with host_transfers_refused():
        for step in _steps(sources, origin, targets, destination, dtype, donate, group_bytes):
            for slot, array in zip(step.slots, step.run([arrays[leaf] for leaf in step.leaves]), strict=True):
                results[slot] = array
            for leaf in step.freed:
                # Explicitly, because jit's donation does not free an array whose memory no result can reuse.
                arrays[leaf].delete()
    return destination.unflatten(results)


class _Step(NamedTuple):
    """The move of one group of arrays.

    run: the arrays -> their results, flat.
    leaves: positions of the arrays among the leaves of the tree.
    slots: positions of the results among the leaves of the destination.
    freed: positions of the arrays of which no part is left to be moved, if they are donated.
    """

    run: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
    leaves: tuple[int, ...]
    slots: tuple[int, ...]
    freed: tuple[int, ...]


# A switch is planned once: its plan depends on shapes, dtypes and shardings, not on values.
@lru_cache(maxsize=1024)
def _steps(
    sources: tuple[jax.ShapeDtypeStruct, ...],
    origin: Any,
    targets: tuple[NamedSharding, ...],
    destination: Any,
    dtype: DTypeLike | None,
    donate: bool,
    group_bytes: int,
) -> tuple[_Step, ...]:
    """The steps of a `reshard`. origin, destination: the structures of the sources and of the targets."""
    moves, _ = pair(origin.unflatten(sources), destination.unflatten(targets))
    steps = []
    for group in _groups(moves, dtype, group_bytes):
        route = _within if _one_device_set(group) else _across
        slots = tuple(slot for move in group for slot in move.slots)
        last = [move for move in group if move.indices is None or move.indices.stop == move.source.shape[0]]
        freed = tuple(move.leaf for move in last) if donate else ()
        steps.append(_Step(route(group, dtype, donate), tuple(move.leaf for move in group), slots, freed))
    return tuple(steps)


# ---- which array goes to which sharding


@dataclass(frozen=True)
class Move:
    """The move of one array: to one sharding or, unstacked along axis 0, to one sharding for each index of that axis.

    name: path of the array, for errors.
    leaf: position of the array among the leaves of its tree.
    indices: the indices of axis 0 that the targets are for; None: the array is not unstacked.
    slots: positions of the results among the leaves of the destination.
    """

    name: str
    leaf: int
    source: jax.ShapeDtypeStruct
    targets: tuple[NamedSharding, ...]
    indices: range | None
    slots: tuple[int, ...]

    @property
    def source_sharding(self) -> Sharding:
        assert self.source.sharding is not None, "`_sources` admits no other"
        return self.source.sharding

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each result."""
        return self.source.shape if self.indices is None else self.source.shape[1:]

    def dtype(self, cast: DTypeLike | None) -> np.dtype:
        """The dtype of each result: `cast` for a floating array of two or more dimensions, its own for any other."""
        castable = jnp.issubdtype(self.source.dtype, jnp.floating) and len(self.shape) > 1
        return jnp.dtype(cast) if cast is not None and castable else self.source.dtype  # of keys it is no NumPy dtype

    def target_bytes(self, cast: DTypeLike | None) -> int:
        """Bytes of all results on one device."""
        return self.dtype(cast).itemsize * sum(prod(target.shard_shape(self.shape)) for target in self.targets)

    def devices(self) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
        """The devices of source and destination, in their own order."""
        source, target = self.source_sharding, self.targets[0]
        return tuple(source.devices_indices_map(self.source.shape)), tuple(target.devices_indices_map(self.shape))


def pair(tree: Any, shardings: Any) -> tuple[list[Move], Any]:
    """One `Move` for each array of `tree`, and the structure of the results, which is that of `shardings`."""
    sources = dict(zip(_paths(tree), _sources(tree)[0], strict=True))
    targets, treedef = _targets(tree, shardings)
    routes: dict[TreePath, dict[int | None, int]] = {path: {} for path in sources}
    for slot, path in enumerate(_paths(treedef.unflatten(targets))):
        origin, index = _origin(path, sources)
        routes[origin][index] = slot
    return [_move(path, i, source, routes[path], targets) for i, (path, source) in enumerate(sources.items())], treedef


def _sources(tree: Any) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
    """The shapes, dtypes and shardings of the arrays of `tree`, and its structure. Raises TypeError for other leaves.

    A plan depends on nothing else.
    """
    arrays, structure = jax.tree.flatten(tree)
    for i, array in enumerate(arrays):
        if isinstance(array, Tracer):
            what = "traced: reshard works on arrays; in a jitted function use jax.device_put"
        elif getattr(array, "sharding", None) is None:
            what = f"a {type(array).__name__} on no device: place it by jax.device_put first"
        else:
            continue
        raise TypeError(f"{_place(_paths(tree)[i], 'array')} is {what}")
    return tuple([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]), structure


def _targets(tree: Any, shardings: Any) -> tuple[tuple[NamedSharding, ...], Any]:
    """The leaves and the structure of `shardings`; if it is one sharding, one for each array of `tree`.

    Raises TypeError for leaves of another class.
    """
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    targets, structure = jax.tree.flatten(shardings)
    for i, target in enumerate(targets):
        if not isinstance(target, NamedSharding):
            place = _place(_paths(shardings)[i], "sharding")
            raise TypeError(f"{place} is of class {type(target).__name__}: give a NamedSharding")
    return tuple(targets), structure


def _paths(tree: Any) -> list[TreePath]:
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def _place(path: TreePath, kind: str) -> str:
    return f"the {kind} at {keystr(path)}" if path else f"the {kind}"


def _origin(path: TreePath, sources: dict[TreePath, Any]) -> tuple[TreePath, int | None]:
    """The array that a sharding is for, and the index of its axis 0 if one more list leads to the sharding."""
    if path in sources:
        return path, None
    for i, key in enumerate(path):
        shorter = path[:i] + path[i + 1 :]
        if isinstance(key, SequenceKey) and shorter in sources:
            return shorter, key.idx
    raise ValueError(f"{_place(path, 'sharding')} has no array: shardings must mirror the tree")


def _move(
    path: TreePath,
    leaf: int,
    source: jax.ShapeDtypeStruct,
    route: dict[int | None, int],
    targets: Sequence[NamedSharding],
) -> Move:
    name = _place(path, "array")
    if not route:
        raise ValueError(f"{name} has no sharding: shardings must mirror the tree")
    indices = None if None in route or not source.shape else range(source.shape[0])
    order = (None,) if indices is None else indices
    if route.keys() != set(order):
        raise ValueError(f"{name}, shape {source.shape}, is unstacked into {len(route)} shardings")
    slots = tuple(route[index] for index in order)
    move = Move(name, leaf, source, tuple(targets[slot] for slot in slots), indices, slots)
    for target in set(move.targets):
        try:
            target.shard_shape(move.shape)
        except (ValueError, IndexError) as error:
            message = f"{name} has shape {move.shape}, which does not divide as {target.spec} on {target.mesh}"
            raise ValueError(message) from error
    return move


def _check_distinct(tree: Any) -> None:
    paths: dict[int, TreePath] = {}
    for path, array in jax.tree.leaves_with_path(tree):
        if (other := paths.setdefault(id(array), path)) != path:
            name, twin = _place(path, "array"), _place(other, "array")
            raise ValueError(f"{name} is also {twin}: donate=True would free it twice, give one a copy")


# ---- groups of moves


def packed_by_size(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Groups of neighbours whose sizes add up to at most `limit`; a larger item is alone."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def _groups(moves: Sequence[Move], dtype: DTypeLike | None, group_bytes: int) -> Iterator[list[Move]]:
    """Groups of neighbours in the tree that move between the same devices."""
    pieces = (piece for move in moves for piece in _pieces(move, dtype, group_bytes))
    for _, alike in groupby(pieces, key=Move.devices):
        yield from packed_by_size(alike, lambda piece: _step_bytes(piece, dtype), group_bytes)


def _pieces(move: Move, dtype: DTypeLike | None, group_bytes: int) -> Iterator[Move]:
    """Splits the move of an array that is unstacked and larger than a group into moves of some layers."""
    if move.indices is None:
        yield move
        return
    layer_bytes = max(1, _step_bytes(move, dtype) // len(move.targets))
    count = max(1, group_bytes // layer_bytes)
    for i in range(0, len(move.targets), count):
        part = slice(i, i + count)
        yield replace(move, targets=move.targets[part], indices=move.indices[part], slots=move.slots[part])


def _step_bytes(move: Move, dtype: DTypeLike | None) -> int:
    """Returns the bytes that a move needs on one device: those of its results or, if they are more, those of an
    exchange of parts, which are the pieces that are sent, those that are received, and the new part."""
    targets = move.targets if _one_device_set([move]) else _stages(move)
    between = _between(move.source, move.source_sharding, targets[0], move.indices)
    parts = 0 if between is None else prod(between.shard_shape(move.source.shape)[-len(move.shape) :])
    return max(move.target_bytes(dtype), 3 * parts * len(targets) * move.dtype(dtype).itemsize)


def _one_device_set(group: Sequence[Move]) -> bool:
    source, target = group[0].devices()
    return source == target


# ---- on one set of devices: one program a group


def _within(group: Sequence[Move], dtype: DTypeLike | None, donate: bool) -> Callable[..., list[jax.Array]]:
    program, mesh = _program_of(group, dtype, donate), _mesh(group[0])

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        with jax.set_mesh(mesh):
            return jax.tree.leaves(program(*arrays))

    return run


def _program_of(group: Sequence[Move], dtype: DTypeLike | None, donate: bool) -> Any:
    return _program(
        tuple(move.source_sharding for move in group),
        tuple(move.targets for move in group),
        tuple(move.indices for move in group),
        tuple(move.dtype(dtype) for move in group),
        tuple(i for i, move in enumerate(group) if donate and _reusable(move, dtype)),
    )


@lru_cache(maxsize=4096)
def _program(
    origins: tuple[Sharding, ...],
    targets: tuple[tuple[NamedSharding, ...], ...],
    indices: tuple[range | None, ...],
    dtypes: tuple[np.dtype, ...],
    donated: tuple[int, ...],
) -> Any:
    """A jitted program, cached, so that the next switch compiles nothing."""

    def place(*sources: jax.Array) -> list[tuple[jax.Array, ...]]:
        # Cast, then unstack, then gather: half the bytes travel, and no more than the source's shards is temporary.
        cast = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(sources, dtypes, strict=True)]
        parts = list(map(_parts, cast, origins, targets, indices))
        return jax.device_put(parts, list(targets))

    return jax.jit(place, out_shardings=list(targets), donate_argnums=donated)


def _parts(
    x: jax.Array, origin: Sharding, targets: tuple[NamedSharding, ...], indices: range | None
) -> tuple[jax.Array, ...]:
    """Unstacks an array, after an exchange of its parts between devices if it needs one on the way to the targets."""
    between = _between(x, origin, targets[0], indices)
    if between is None or not isinstance(origin, NamedSharding):
        return _unstack(x, indices)
    if indices is not None and len(indices) < x.shape[0]:
        x, indices = lax.slice_in_dim(x, indices.start, indices.stop), range(len(indices))
    x = repartitioned(x, origin, between)
    with jax.sharding.use_abstract_mesh(mesh_of(between).abstract_mesh):
        return _unstack(x, indices)


def _between(
    x: jax.Array | jax.ShapeDtypeStruct, origin: Sharding, target: NamedSharding, indices: range | None
) -> NamedSharding | None:
    """Returns the division after an exchange of parts; None if the array needs no exchange. If the array is unstacked,
    it is the division of all its layers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    if indices is not None:
        target = NamedSharding(target.mesh, P(None, *target.spec), memory_kind=target.memory_kind)
    return division_between(origin, target, x.shape)


def _unstack(x: jax.Array, indices: range | None) -> tuple[jax.Array, ...]:
    return (x,) if indices is None else tuple(lax.index_in_dim(x, i, keepdims=False) for i in indices)


def _reusable(move: Move, dtype: DTypeLike | None) -> bool:
    """True if a result can reuse the memory of its source. jit warns where any other array is donated."""
    source, target = move.source_sharding, move.targets[0]
    return (
        move.indices is None
        and move.dtype(dtype) == move.source.dtype
        and prod(source.shard_shape(move.shape)) == prod(target.shard_shape(move.shape))
        and source.memory_kind == target.memory_kind
    )


def _mesh(move: Move) -> Mesh:
    """The mesh to trace under, independent of the caller's: arrays with Explicit axes accept only their own."""
    sharding = move.source_sharding
    if isinstance(sharding, NamedSharding):
        return mesh_of(sharding)
    return Mesh(np.asarray(move.devices()[0]), ("devices",))


# ---- to other devices: partition at the source, copy, slice at the destination


def _across(group: Sequence[Move], dtype: DTypeLike | None, donate: bool) -> Callable[..., list[jax.Array]]:
    stage = _within(_staged(group), dtype, donate)
    ends = [(move, *end) for move in group for end in zip(_landings(move), move.targets, strict=True)]
    landings, slices = [landing for _, landing, _ in ends], [_slice(move, dtype, *end) for move, *end in ends]

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        landed = copied(stage(arrays), landings)
        return [x if cut is None else cut([x])[0] for x, cut in zip(landed, slices, strict=True)]

    return run


def _staged(group: Sequence[Move]) -> list[Move]:
    """The part of the moves that the source's devices carry out."""
    return [replace(move, targets=_stages(move)) for move in group]


def _stages(move: Move) -> tuple[NamedSharding, ...]:
    source, rank = move.source_sharding, len(move.shape)
    if isinstance(source, NamedSharding) and move.indices is not None:
        source = NamedSharding(source.mesh, P(*source.spec[1:]))
    return tuple(stage_of(source, move.devices()[0], landing, rank) for landing in _landings(move))


def _landings(move: Move) -> tuple[NamedSharding, ...]:
    sources, _ = move.devices()
    is_local = move.source_sharding.is_fully_addressable and move.targets[0].is_fully_addressable
    if len(sources) == 1 and is_local:  # only such an array is sliced by `jax.device_put`
        return move.targets
    return tuple(landing_of(target, len(move.shape), len(sources)) for target in move.targets)


def _slice(
    move: Move, dtype: DTypeLike | None, landing: NamedSharding, target: NamedSharding
) -> Callable[..., list[jax.Array]] | None:
    """Divides an array that has landed as `target` says. None: it has landed so."""
    if landing == target:
        return None
    landed = jax.ShapeDtypeStruct(move.shape, move.dtype(dtype), sharding=landing)
    return _within([Move(move.name, 0, landed, (target,), indices=None, slots=(0,))], None, donate=True)


@contextmanager
def host_transfers_refused() -> Generator[None, None, None]:
    """Makes every transfer between device and NumPy raise."""
    with (
        jax.transfer_guard_host_to_device("disallow_explicit"),
        jax.transfer_guard_device_to_host("disallow_explicit"),
    ):
        yield
