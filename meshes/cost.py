"""Computes the cost of a reshard in bytes per device, from shardings alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import Sharding
from jax.typing import DTypeLike

from jrlhf.meshes.resharding import pair

Box = tuple[tuple[int, int], ...]  # [start, stop) of each dimension


@dataclass(frozen=True)
class ReshardCost:
    """Bytes by device id.

    received: bytes sent to the device: in its new shard and not in its old one, |new| - |old and new|.
    redundant: bytes of the old shard that the new one does not use: |old| - |old and new|. While both arrays live, a
        device holds at least |new| + redundant bytes; it is 0 where a shard only grows (HybridFlow, arXiv 2409.19256,
        table 2).
    """

    received: dict[int, int]
    redundant: dict[int, int]

    def __add__(self, other: "ReshardCost") -> "ReshardCost":
        return ReshardCost(_sum(self.received, other.received), _sum(self.redundant, other.redundant))


def reshard_cost(shape: tuple[int, ...], itemsize: int, src: Sharding, dst: Sharding) -> ReshardCost:
    """The cost of moving one array with `itemsize` bytes per element from `src` to `dst`, on the devices of both."""
    return _cost(itemsize, _boxes(src, shape), [_boxes(dst, shape)])


def tree_reshard_cost(tree: Any, shardings: Any, *, dtype: DTypeLike | None = None) -> ReshardCost:
    """The cost of `reshard(tree, shardings, dtype=dtype)`: the sum over its arrays, in the dtype that travels.

    `tree` may hold `jax.ShapeDtypeStruct`s with shardings.
    """
    total = ReshardCost({}, {})
    for move in pair(tree, shardings)[0]:
        targets = [_boxes(target, move.shape) for target in move.targets]
        if move.indices is not None:
            layers = zip(move.indices, targets, strict=True)
            targets = [{d: ((i, i + 1), *box) for d, box in boxes.items()} for i, boxes in layers]
        source = _boxes(move.source_sharding, move.source.shape)
        total += _cost(move.dtype(dtype).itemsize, source, targets)
    return total


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[int, Box]:
    def box(index: Iterable[slice]) -> Box:
        return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))

    return {device.id: box(index) for device, index in sharding.devices_indices_map(shape).items()}


def _cost(itemsize: int, source: dict[int, Box], targets: list[dict[int, Box]]) -> ReshardCost:
    received, redundant = {}, {}
    for device in sorted(source.keys() | targets[0].keys()):
        old = source.get(device)
        new = [boxes[device] for boxes in targets if device in boxes]
        common = sum(_overlap(old, box) for box in new) if old is not None else 0
        received[device] = itemsize * (sum(map(_volume, new)) - common)
        redundant[device] = itemsize * ((0 if old is None else _volume(old)) - common)
    return ReshardCost(received, redundant)


def _volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _overlap(a: Box, b: Box) -> int:
    return prod(max(0, min(a1, b1) - max(a0, b0)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))


def _sum(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    return {device: a.get(device, 0) + b.get(device, 0) for device in sorted(a.keys() | b.keys())}
