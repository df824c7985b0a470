"""Reads and writes safetensors files. Headers are checked, tensors are views of the file, and files are written one
tensor at a time.

The format: eight bytes with the header's length (little endian), the header (a JSON object that gives each tensor's
dtype, shape and bytes), the tensors' bytes one after another. https://github.com/huggingface/safetensors
"""

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jrlhf.meshes.resharding import packed_by_size
from jrlhf.meshes.transfers import to_host
from jrlhf.models.hf.directories import INDEX, SINGLE

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
NOT_FINITE = "numbers that are not finite: fetch the weights again, or take others"  # the end of a refusal
# Bytes per element of all dtypes in headers, to check offsets. A dtype that is not in DTYPES is refused when needed.
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8}
_BYTES |= {"F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1}
_HEADER_LIMIT = 100_000_000  # safetensors' own
_LARGEST = 1 << 28  # maximum bytes of a JSON file; the largest ones are tokenizers
_AGAIN = "fetch the file again"
_DEPTH = 100  # maximum levels of a JSON text, because later code may walk it by recursion


@dataclass(frozen=True)
class Tensor:
    """The position of a tensor: its first byte in the file, and its dtype as the header names it."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _BYTES[self.dtype]

    def view(self) -> np.ndarray:
        """The numbers in the file's layout, memory-mapped: pages are read when they are accessed, and released when the
        view is dropped."""
        flat = np.memmap(self.file, np.uint8, mode="r", offset=self.start, shape=(self.nbytes,))
        return flat.view(DTYPES[self.dtype]).reshape(self.shape)


# ---- reading


def find_tensors(directory: Path) -> dict[str, Tensor]:
    """Name -> place of every tensor of the model in `directory`, from one file or, by their index, from several."""
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(_no_weights(directory))
    places = _read_index(directory / INDEX)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if not (directory / file).is_file():
            raise FileNotFoundError(f"{directory / INDEX} names {file}, which is not there: fetch it")
        own = read_header(directory / file)
        for name in own.keys() & tensors.keys():
            raise ValueError(f"{directory / file} and {tensors[name].file.name} both hold {name!r}: {_AGAIN}")
        tensors |= own
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{directory / file} does not hold {name!r}, which {INDEX} places there: {_AGAIN}")
    return tensors


def _no_weights(directory: Path) -> str:
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if pickles:
        return (
            f"{directory} holds weights only as {pickles[0]}, a pickle, which may run code as it is read: "
            "load it with transformers and save it again with save_pretrained, which writes safetensors"
        )
    return f"{directory} holds neither {SINGLE} nor {INDEX} (found: {', '.join(others) or 'no safetensors'}): fetch it"


def _read_index(path: Path) -> dict[str, str]:
    try:
        check_file(path)
        places = parse_json(path.read_bytes())["weight_map"]
        files = dict(places.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index with a weight_map ({error!r}): {_AGAIN}") from error
    if not files:
        raise ValueError(f"{path} names no tensor: {_AGAIN}")
    for name, file in files.items():
        # The index may have been written by anyone: it must not lead out of its directory.
        if not isinstance(file, str) or not file or {"/", "\\", "\0"} & set(file) or file in (".", ".."):
            raise ValueError(f"{path} places {name!r} in {file!r}, which is no name of a file beside it: {_AGAIN}")
    return files


def check_file(path: Path, most: float = _LARGEST) -> None:
    """Raises ValueError unless the path is a file of at most `most` bytes. A pipe or a device may have no end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file: {_AGAIN}")
    if status.st_size > most:
        raise ValueError(f"{path} has {status.st_size} bytes, more than {most:.0f}: {_AGAIN}")


def parse_json(text: bytes | str, **options: Any) -> Any:
    """Parses an untrusted JSON text. Raises ValueError if it is invalid, or nested too deeply."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    inner = [value] if text.count("[") + text.count("{") > _DEPTH else []
    for _ in range(_DEPTH):
        values = (item for one in inner for item in (one.values() if isinstance(one, dict) else one))
        inner = [item for item in values if isinstance(item, dict | list)]
    if inner:
        raise ValueError(f"it is nested more than {_DEPTH} levels deep")
    return value


def read_object(path: Path, remedy: str, wanted: str) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError with the remedy, or with `wanted` for another value."""
    check_file(path)
    try:
        content = parse_json(path.read_bytes())
        json.dumps(content, ensure_ascii=False).encode()  # fails on halves of surrogate pairs
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where {wanted}")
    return content


def read_header(path: Path) -> dict[str, Tensor]:
    """Name -> place of every tensor in one file. Every byte of it must belong to exactly one tensor."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"{path} {what}: {_AGAIN}")

    check_file(path, inf)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > _HEADER_LIMIT:
            raise wrong(f"is no whole safetensors file: its {size} bytes cannot hold the header of {length}")
        text = file.read(length)
    try:
        header = parse_json(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise wrong(f"has a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise wrong("has a header that is not an object")
    header.pop("__metadata__", None)
    data = size - 8 - length
    places: list[tuple[int, int, str]] = []
    tensors = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise wrong(f"has no dtype, shape and data_offsets for {name!r}") from error
        if not isinstance(dtype, str) or dtype not in _BYTES:
            raise wrong(f"holds {name!r} in dtype {dtype!r}, which is unknown")
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise wrong(f"gives {name!r} the shape {shape} and the bytes {begin} to {end}, which cannot be")
        if end > data:
            raise wrong(f"is cut short: {name!r} ends at byte {end} of its data, which has {data}")
        if end - begin != prod(shape) * _BYTES[dtype]:
            raise wrong(f"gives {name!r}, {dtype} of shape {shape}, {end - begin} bytes")
        places.append((begin, end, name))
        tensors[name] = Tensor(path, 8 + length + begin, dtype, shape)
    last = 0
    for begin, end, name in sorted(places):
        if begin != last:
            raise wrong(f"begins {name!r} at byte {begin} of its data, where the tensor before it ends at {last}")
        last = end
    if last != data:
        raise wrong(f"has {data - last} bytes that belong to no tensor")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name twice in one object")
    return unique


# ---- writing


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is to be written. `fetch` returns its numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[], np.ndarray]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise ValueError(f"{self.name} is {self.dtype.name}: export float32, bfloat16 or float16")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(directory: Path, tensors: Sequence[PlannedTensor], file_bytes: int) -> None:
    """Writes model.safetensors, or several files and their index. Only one tensor is in memory at a time."""
    files = list(packed_by_size(tensors, lambda tensor: tensor.nbytes, file_bytes))
    names = [SINGLE]
    if len(files) > 1:
        names = [f"model-{index + 1:05d}-of-{len(files):05d}.safetensors" for index in range(len(files))]
    for name, group in zip(names, files, strict=True):
        _write_file(directory / name, group)
    if len(files) > 1:
        places = {tensor.name: name for name, group in zip(names, files, strict=True) for tensor in group}
        total = sum(tensor.nbytes for tensor in tensors)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: Sequence[PlannedTensor]) -> None:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    # Wide elements first: torch reads no tensor whose first byte is not a multiple of its element's size.
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        offsets = [begin, begin + tensor.nbytes]
        header[tensor.name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        begin += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            array = tensor.fetch()
            assert array.shape == tensor.shape and array.dtype == tensor.dtype, (tensor, array.shape, array.dtype)
            file.seek(8 + len(text) + header[tensor.name]["data_offsets"][0])
            # In the order of the shape, whatever order the numbers have in memory.
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def on_host(array: Any, dtype: DTypeLike | None = None) -> np.ndarray:
    """Returns the whole array on this host, also if its shards belong to other processes."""
    array = np.asarray(to_host(array))
    return array if dtype is None else array.astype(dtype, copy=False)
