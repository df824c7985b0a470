"""Arrays that other processes of this machine read, in files that are only in memory.

No other user can read them, and nothing is left behind when this process ends, however it ends.
"""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrlhf.run.files import decode, encode

AVAILABLE = hasattr(os, "memfd_create")  # on Linux


class SharedArrays:
    """A file in memory. It exists as long as this object, or an object that has opened it."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def __del__(self) -> None:
        os.close(self._descriptor)

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> "SharedArrays":
        """Writes arrays: a line of JSON with their types, shapes and a checksum, then the bytes of each."""
        shared = cls(os.memfd_create("arrays"))
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        types = [(np.asarray(array).dtype.name, np.shape(array)) for array in arrays]
        with open(shared._descriptor, "wb", closefd=False) as file:
            file.write(f"{encode([types, _checksum(parts)])}\n".encode())
            for part in parts:
                file.write(part.data)
        return shared

    @classmethod
    def copied(cls, content: np.ndarray) -> "SharedArrays":
        """Writes the bytes of such a file of another machine."""
        shared = cls(os.memfd_create("arrays"))
        with open(shared._descriptor, "wb", closefd=False) as file:
            file.write(content.data)
        return shared

    @classmethod
    def opened(cls, path: str) -> "SharedArrays":
        """Opens the file of another process, which may end after that."""
        return cls(os.open(path, os.O_RDONLY))


def read(path: str) -> list[np.ndarray]:
    """Returns the arrays of a file. Raises ValueError if they are not what was written."""
    with Path(path).open("rb") as file:
        header = file.readline()
        types, checksum = decode(header)
        position, parts = len(header), []
        for name, shape in types:
            size = int(np.prod(shape)) * np.dtype(name).itemsize
            parts.append(np.fromfile(path, np.uint8, size, offset=position))
            position += size
    if _checksum(parts) != checksum:
        raise ValueError("the arrays are not what was written")
    return [part.view(name).reshape(shape) for part, (name, shape) in zip(parts, types, strict=True)]


def _checksum(parts: Sequence[np.ndarray]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.data, checksum)
    return checksum
