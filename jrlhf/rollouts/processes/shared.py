"""Arrays in memory-only files, which other processes of this machine read; differences between arrays; updates.

Other users cannot read these files, and they vanish when this process ends, however it ends. `delta` and `patched`
encode and apply only the changed elements of arrays.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt

from jrlhf.run.files import decode, encode

AVAILABLE = hasattr(os, "memfd_create")  # only Linux has it
BLOCK = 2**22  # number of elements compared at a time, which bounds the temporary memory


class SharedArrays:
    """A file in memory. It exists as long as this object, or another object that has opened it."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    @property
    def size(self) -> int:
        """The number of bytes."""
        return os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        os.close(self._descriptor)

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> "SharedArrays":
        """Writes arrays: a line of JSON with the type, shape and checksum of each, then their bytes."""
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        shapes = [(np.asarray(array).dtype.name, np.shape(array)) for array in arrays]
        header = [(*shape, zlib.crc32(part.data)) for shape, part in zip(shapes, parts, strict=True)]
        return cls.copied(f"{encode(header)}\n".encode(), *(part.data for part in parts))

    @classmethod
    def copied(cls, *parts: bytes | memoryview) -> "SharedArrays":
        """Writes the bytes of such a file, which may come from another machine."""
        shared = cls(os.memfd_create("arrays"))
        with open(shared._descriptor, "wb", closefd=False) as file:
            file.writelines(parts)
        return shared

    @classmethod
    def opened(cls, path: str) -> "SharedArrays":
        """Opens the file of another process, which may end after that."""
        return cls(os.open(path, os.O_RDONLY))


@dataclass(frozen=True)
class SharedPart:
    """`count` arrays of a file from the array `first` on. Iterating reads them, so that the file is the only copy."""

    file: SharedArrays
    first: int
    count: int

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(read(self.file.path, self.first, self.count))


def read(path: str, first: int = 0, count: int | None = None) -> list[np.ndarray]:
    """Returns `count` arrays of a file, from the array `first` on; None: all. Raises ValueError if a checksum does not
    match."""
    with Path(path).open("rb") as file:
        header = file.readline()
    described = [
        (name, shape, checksum, int(np.prod(shape)) * np.dtype(name).itemsize)
        for name, shape, checksum in decode(header)
    ]
    starts = np.cumsum([len(header), *(size for *_, size in described)]).tolist()
    chosen = slice(first, None if count is None else first + count)
    arrays = []
    for (name, shape, checksum, size), start in zip(described[chosen], starts[chosen], strict=False):
        part = np.fromfile(path, np.uint8, size, offset=start)
        if zlib.crc32(part.data) != checksum:
            raise ValueError("the arrays are not what was written")
        arrays.append(part.view(name).reshape(shape))
    return arrays


def delta(old: Sequence[np.ndarray], new: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the difference that `patched` needs to make `new` from `old`. Types and shapes must be equal.

    An element counts as changed if its bits changed, also for NaNs and signed zeros. There are two arrays per block:
    the number of unchanged elements before each changed one, and the change of its bits, read as an integer. Both are
    small: with a small learning rate few weights of a short dtype change, and mostly to the neighbouring number.
    """
    parts = []
    for before, after in zip(_blocks(old), _blocks(new), strict=True):
        places = np.flatnonzero(before != after)
        steps = (after[places] - before[places]).view(f"i{after.itemsize}")
        folded = (steps << 1) ^ (steps >> (8 * after.itemsize - 1))  # 0, -1, 1, -2, ... -> 0, 1, 2, 3, ...
        parts += [_packed(np.diff(places, prepend=-1) - 1), _packed(folded.view(after.dtype).astype(np.int64))]
    return parts


def patched(old: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the arrays `new` of the call of `delta` that made these parts, bit for bit. old: its argument `old`."""
    arrays = [np.array(array, order="C") for array in old]
    for block, gaps, folded in zip(_blocks(arrays), parts[::2], parts[1::2], strict=True):
        steps = _unpacked(folded).astype(block.dtype)
        block[np.cumsum(_unpacked(gaps) + 1) - 1] += (steps >> 1) ^ np.negative(steps & 1)
    return arrays


def _blocks(arrays: Sequence[np.ndarray]) -> Iterator[UInt[np.ndarray, "..."]]:
    """Yields the bits of the elements as integers, in blocks, which are views."""
    for array in arrays:
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        yield from (bits[first : first + BLOCK] for first in range(0, len(bits), BLOCK))


def _packed(numbers: Int[np.ndarray, "N"]) -> UInt[np.ndarray, "..."]:
    """Encodes natural numbers below 2**32 in the integer type that takes the fewest bytes.

    A number n is encoded as n // m times the type's maximum m, followed by n % m.
    """

    def size(dtype: type[np.unsignedinteger]) -> int:
        return (len(numbers) + int((numbers // np.iinfo(dtype).max).sum())) * np.dtype(dtype).itemsize

    dtype = min((np.uint8, np.uint16, np.uint32), key=size)
    times, rest = np.divmod(numbers, np.iinfo(dtype).max)
    packed = np.full(len(numbers) + int(times.sum()), np.iinfo(dtype).max, dtype)
    packed[np.cumsum(times + 1) - 1] = rest
    return packed


def _unpacked(packed: UInt[np.ndarray, "..."]) -> Int[np.ndarray, "N"]:
    """Inverts `_packed`."""
    last = packed < np.iinfo(packed.dtype).max
    return np.diff(np.cumsum(packed, dtype=np.int64)[last], prepend=0)


@dataclass(frozen=True)
class WeightUpdate:
    """Published weights. changes: the differences from the update before (number - 1); None: send all weights.

    whole: all weights. base: the frozen weights under an adapter.
    """

    number: int
    whole: SharedArrays
    changes: SharedArrays | None
    base: SharedArrays | None = None

    @classmethod
    def after(
        cls,
        last: "WeightUpdate | None",
        arrays: Sequence[np.ndarray],
        anchor_every: int,
        base: SharedArrays | None = None,
    ) -> "WeightUpdate":
        """Returns these weights as the update after `last`. Every `anchor_every`-th update has no `changes`."""
        number, whole, changes = 0 if last is None else last.number + 1, SharedArrays.of(arrays), None
        if last is not None and number % anchor_every:
            changes = SharedArrays.of(delta(read(last.whole.path), arrays))
        return cls(number, whole, changes if changes and changes.size < whole.size else None, base)

    def since(self, present: "WeightUpdate | None") -> tuple[SharedArrays, int | None]:
        """Returns what to send to where `present` draws, and the number of the update that it changes, if any."""
        if self.changes is not None and present is not None and present.number + 1 == self.number:
            return self.changes, present.number
        return self.whole, None
