"""Files that a crash cannot tear: whole files are replaced atomically, JSON lines are appended whole."""

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

from jrlhf.errors import UserError


class Closing:
    """A base of classes with a method `close`, which ends a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


def write_atomic(path: Path | str, data: str | bytes) -> None:
    """Writes a whole file: after a crash at any moment the path holds all of the old content or all of the new."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync a directory
            raise
    finally:
        os.close(directory)


def check_writable(setting: str, path: Path) -> None:
    """Refuses a file that cannot be written, before the work that makes its content. setting: for the error."""
    if path.is_dir():
        raise UserError(f"{setting} is a directory: name a file in it")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not all(os.access(place, os.W_OK) for place in (parent, path) if place.exists()):
        raise UserError(f"{setting} cannot be written in {parent}: choose another place")


def to_json(record: Mapping[str, object], indent: int | None = None) -> bytes:
    """Returns a record as a line of JSON; over several lines with `indent`.

    JSON has no NaN and infinities: such a number is null, and the record's `"nonfinite"` says by its name which it was;
    a number inside of others is named by all their keys, with dots between them.
    """
    nonfinite: dict[str, str] = {}

    def finite(value: object, *keys: object) -> object:
        if isinstance(value, Mapping):
            return {key: finite(x, *keys, key) for key, x in value.items()}
        if isinstance(value, list | tuple):
            return [finite(x, *keys, index) for index, x in enumerate(value)]
        if not isinstance(value, float) or math.isfinite(value):
            return value
        nonfinite[".".join(map(str, keys))] = str(float(value))
        return None

    numbers = {key: finite(value, key) for key, value in record.items()}
    text = json.dumps(
        numbers | ({"nonfinite": nonfinite} if nonfinite else {}), ensure_ascii=False, allow_nan=False, indent=indent
    )
    return f"{text}\n".encode("utf-8", "backslashreplace")


def append_jsonl(path: Path | str, records: Iterable[Mapping[str, object]]) -> None:
    """Appends one line of JSON (`to_json`) for each record and waits until they are on disk."""
    lines = b"".join(map(to_json, records))
    with open(path, "ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path | str) -> Iterator[dict]:
    """Yields the records of a file of JSON lines; see `jsonl_lines`."""
    return (record for _, record in jsonl_lines(path))


def jsonl_lines(path: Path | str) -> Iterator[tuple[bytes, dict]]:
    """Yields the lines of a file and their records; nothing without a file. A torn last line is left out."""
    lines = Path(path).read_bytes().rstrip().split(b"\n") if Path(path).exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):
                return
            raise UserError(f"{path} line {number} is not a JSON object: repair it or remove the line") from error
        yield line, record
