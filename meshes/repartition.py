"""Changes how an array is divided over one set of devices, so that no device receives bytes that it does not use.

XLA changes a division well if an all-gather, a slice or an all-to-all is enough. Between meshes of different shape it
often replicates the whole array on every device. There `division_between` finds a division on the way to the target: it
has the target's parts, cut further where the target has replicas, so that devices first exchange parts, and an
all-gather completes them. Neither step sends a device what it has, or what it does not need.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import count, filterfalse, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes.layout import axis_names
from jrlhf.meshes.mesh import mesh_of

Piece = tuple[int, ...]  # the first index in each dimension; all pieces have one size


class Copy(NamedTuple):
    """A copy of one piece of an array between two devices, given by their positions; both may be the same device."""

    sender: int
    receiver: int
    piece: Piece


# ---- the division on the way


@lru_cache(maxsize=4096)
def division_between(source: Sharding, target: NamedSharding, shape: tuple[int, ...]) -> NamedSharding | None:
    """Returns the sharding that an array takes before `target`, or None if XLA reaches the target well in one step.

    It is `target`, divided further by mesh axes over which the target is replicated, as long as every device keeps all
    elements that it has of its part of the target.
    """
    if not isinstance(source, NamedSharding) or source.memory_kind != target.memory_kind:
        return None
    old, new = _boxes(source, shape), _boxes(target, shape)
    if _is_one_step(old, new):
        return None
    overlap, rank = _common(old, new), len(shape)
    entries = [axis_names(entry) for entry in (*target.spec, *[None] * (rank - len(target.spec)))]
    mesh, free = _factored(mesh_of(target), {axis for axes in entries for axis in axes})
    result = NamedSharding(mesh, P(*entries))
    for axis in free:
        for dim in range(rank):
            finer = [(*axes, axis) if at == dim else axes for at, axes in enumerate(entries)]
            divided = NamedSharding(mesh, P(*finer))
            fits = result.shard_shape(shape)[dim] % mesh.shape[axis] == 0
            if fits and np.array_equal(_common(old, _boxes(divided, shape)), overlap):
                entries, result = finer, divided
                break
    return result


def _factored(mesh: Mesh, used: set[str]) -> tuple[Mesh, list[str]]:
    """Splits each axis that is not used into axes of prime size. Returns the mesh and the names of these axes."""
    sizes, free = dict[str, int](), []
    for axis, size in mesh.shape.items():
        if axis in used:
            sizes[axis] = size
            continue
        factor = 2
        while size > 1:
            if size % factor:
                factor += 1
                continue
            free.append(f"{axis}_{len(free)}")
            sizes[free[-1]], size = factor, size // factor
    return Mesh(mesh.devices.reshape(*sizes.values()), tuple(sizes)), free


@lru_cache(maxsize=4096)
def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> np.ndarray:
    """Returns [devices, dimensions, 2]: start and stop of each device's part."""
    parts = sharding.devices_indices_map(shape).values()
    bounds = [[part.indices(size)[:2] for part, size in zip(index, shape, strict=True)] for index in parts]
    return np.asarray(bounds, int).reshape(len(bounds), len(shape), 2)


def _common(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the number of elements that each device has in both divisions."""
    size = np.minimum(old[..., 1], new[..., 1]) - np.maximum(old[..., 0], new[..., 0])
    return np.maximum(size, 0).prod(axis=1)


def _is_one_step(old: np.ndarray, new: np.ndarray) -> bool:
    """Returns whether parts only grow, only shrink, or the most minor cuts of one dimension become those of another."""
    common = _common(old, new)
    if np.array_equal(common, _common(old, old)) or np.array_equal(common, _common(new, new)):
        return True
    before, after = (boxes[0, :, 1] - boxes[0, :, 0] for boxes in (old, new))
    grown, cut = np.flatnonzero(after > before), np.flatnonzero(after < before)
    if len(grown) != 1 or len(cut) != 1 or after[grown[0]] * after[cut[0]] != before[grown[0]] * before[cut[0]]:
        return False
    offset = new[..., 0] - old[..., 0]  # of a device's new part in, or from, its old one
    i, j = grown[0], cut[0]
    others = np.delete(offset, [i, j], axis=1)
    same = -offset[:, i] * after[j] == offset[:, j] * before[i]  # the same number of parts in both dimensions
    inside = (offset[:, i] <= 0) & (-offset[:, i] < after[i]) & (offset[:, j] >= 0) & (offset[:, j] < before[j])
    return not others.any() and bool(np.all(same & inside))


# ---- the exchange of parts


def repartitioned(x: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """Returns `x`, traced and divided as `source`, divided as `target`. Both are of the same devices in one order.

    Every device gets each piece that it lacks from one device that has it, in rounds: permutations of the devices.
    """
    if _is_one_step(_boxes(source, x.shape), _boxes(target, x.shape)):
        # The barrier keeps XLA from leaving this step out, because the target of the whole way follows.
        return lax.optimization_barrier(jax.device_put(x, target))
    rounds, size = _schedule(source, target, x.shape)
    before, after = mesh_of(source), mesh_of(target)

    def exchange(part: jax.Array) -> jax.Array:
        result, device = jnp.zeros(target.shard_shape(x.shape), x.dtype), lax.axis_index(before.axis_names)
        for pairs, *tables in rounds:
            taken, placed, stays, comes = (jnp.asarray(table)[device] for table in tables)
            piece = lax.dynamic_slice(part, list(taken), size)
            if pairs:
                piece = jnp.where(stays, piece, lax.ppermute(piece, before.axis_names, pairs))
            if not tables[-1].all():
                piece = jnp.where(comes, piece, lax.dynamic_slice(result, list(placed), size))
            result = lax.dynamic_update_slice(result, piece, list(placed))
        return result[None]

    # One part for each device, along a new first dimension, is the same on both meshes.
    with jax.sharding.use_abstract_mesh(before.abstract_mesh):
        spec = P(before.axis_names)
        parts = jax.shard_map(exchange, mesh=before, in_specs=source.spec, out_specs=spec, check_vma=False)(x)
    with jax.sharding.use_abstract_mesh(after.abstract_mesh):
        spec = P(after.axis_names)
        parts = jax.device_put(parts, NamedSharding(after, spec))
        unpack = jax.shard_map(lambda one: one[0], mesh=after, in_specs=spec, out_specs=target.spec, check_vma=False)
        return unpack(parts)


class Round(NamedTuple):
    """Copies of which each device sends at most one and receives at most one.

    pairs: senders and receivers. The arrays have a row for each device:
    taken: position of the piece that it sends, in its old part. placed: position of the piece that it gets, in its new
        part. stays: whether that piece is its own. comes: whether it gets one.
    """

    pairs: list[tuple[int, int]]
    taken: np.ndarray
    placed: np.ndarray
    stays: np.ndarray
    comes: np.ndarray


@lru_cache(maxsize=1024)
def _schedule(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> tuple[list[Round], list[int]]:
    """Returns the rounds of an exchange and the size of its pieces."""
    old, new = _boxes(source, shape), _boxes(target, shape)
    size = np.gcd(*(boxes[0, :, 1] - boxes[0, :, 0] for boxes in (old, new))).tolist()
    rounds = []
    for copies in rounds_of(copies_of(*([_pieces(box, size) for box in boxes] for boxes in (old, new)))):
        taken, placed = (np.zeros(old.shape[:2], np.int32) for _ in range(2))
        stays, comes = np.zeros((2, len(old)), bool)
        for sender, receiver, piece in copies:
            taken[sender], placed[receiver] = piece - old[sender, :, 0], piece - new[receiver, :, 0]
            stays[receiver], comes[receiver] = sender == receiver, True
        pairs = [(sender, receiver) for sender, receiver, _ in copies if sender != receiver]
        rounds.append(Round(pairs, taken, placed, stays, comes))
    return rounds, size


def _pieces(box: np.ndarray, size: Sequence[int]) -> list[Piece]:
    return list(product(*(range(start, stop, step) for (start, stop), step in zip(box.tolist(), size, strict=True))))


def copies_of(have: Sequence[Sequence[Piece]], want: Sequence[Sequence[Piece]]) -> list[Copy]:
    """Returns, for each piece that a device wants, a copy from itself or from another device that has it.

    have, want: pieces by device. If several devices have a piece, the nearest sends it, unless it sends as many pieces
    already as the receiver wants.
    """
    owners, loads = defaultdict[Piece, list[int]](list), Counter[int]()
    for device, pieces in enumerate(have):
        for piece in pieces:
            owners[piece].append(device)
    wanted = [(device not in owners[piece], device, piece) for device, pieces in enumerate(want) for piece in pieces]
    copies = []
    for lacks, receiver, piece in sorted(wanted):
        senders, most = owners[piece] if lacks else [receiver], len(want[receiver])
        sender = min(senders, key=lambda device: (loads[device] // most, device ^ receiver))
        loads[sender] += 1
        copies.append(Copy(sender, receiver, piece))
    return copies


def rounds_of(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Divides copies into rounds in which a device sends at most one and receives at most one.

    There are as many as the busiest device has copies: they are the colours of the edges of a bipartite graph, and
    exchanging two colours along a path makes one free at both ends of an edge (Kőnig 1916). Near devices come first.
    """

    def unused(rounds: dict[int, Copy]) -> int:
        return next(filterfalse(rounds.__contains__, count()))

    sent, got = (defaultdict[int, dict[int, Copy]](dict) for _ in range(2))  # device -> round -> copy
    for copy in sorted(copies, key=lambda copy: copy.sender ^ copy.receiver):
        first, second = unused(sent[copy.sender]), unused(got[copy.receiver])
        path, table, end, number = [(copy, second)], got, copy.receiver, first
        while (other := table[end].get(number)) is not None:
            path.append((other, number))
            table, end = (sent, other.sender) if table is got else (got, other.receiver)
            number = first + second - number
        for other, number in path[1:]:
            del sent[other.sender][number], got[other.receiver][number]
        for other, number in path:
            exchanged = first + second - number
            sent[other.sender][exchanged] = got[other.receiver][exchanged] = other
    rounds = defaultdict[int, list[Copy]](list)
    for used in sent.values():
        for number, copy in used.items():
            rounds[number].append(copy)
    return [rounds[number] for number in sorted(rounds)]
