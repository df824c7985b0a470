"""Crash-safe files: whole files are replaced atomically, JSON lines are appended as a whole.

A sealed text contains its checksum, so that a changed bit is noticed.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jrlhf.errors import UserError

_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL  # errors of some network and FUSE file systems
_UNITS = "B", "KiB", "MiB", "GiB", "TiB", "PiB"
_SEAL = re.compile(r'\{"sha256": "(\w{64})", |# sha256 (\w{64})\n')


class Closing(ABC):
    """Base class of context managers whose block ends with a call of `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Ends processes and threads of the object, and frees its resources."""


def in_units(count: float) -> str:
    """Writes a number of bytes in the largest unit of which there is at least one, as `1.53 TiB`, `80 GiB` or `12 B`.

    It has at most two decimals.
    """
    power = 0
    while round(count, 2) >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.2f}".rstrip("0").rstrip(".") + f" {_UNITS[power]}"


def cache_directory() -> Path:
    """Returns the cache directory (measured times, compiled programs), whose files may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jrlhf"  # an empty variable is none


def write_atomic(path: Path | str, data: str | bytes | Iterable[bytes]) -> None:
    """Writes a whole file: after a crash at any moment the path holds all of the old content or all of the new.

    data: all of it, or its parts in order.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as file:
            data = data.encode("utf-8") if isinstance(data, str) else data
            file.writelines([data] if isinstance(data, bytes) else data)
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
        if error.errno != errno.EINVAL:  # EINVAL: the file system cannot sync a directory
            raise
    finally:
        os.close(directory)


def lock_file(path: Path) -> tuple[int, bool | None]:
    """Opens a file and locks it for as long as it is open; returns (its descriptor, whether we got the lock).

    The second is None if the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
        return descriptor, None
    return descriptor, True


def encode(value: Any) -> str:
    """Returns JSON from which `decode` restores an equal value, also arrays of numbers, bit for bit."""
    return json.dumps(value, default=lambda array: {"ndarray": array.dtype.name, "values": array.tolist()})


def decode(text: str | bytes) -> Any:
    import numpy as np  # only here: the doctor uses this module where NumPy may be broken

    def array(saved: dict[str, Any]) -> Any:
        return np.array(saved["values"], saved["ndarray"]) if saved.keys() == {"ndarray", "values"} else saved

    return json.loads(text, object_hook=array)


def sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_of(texts: Iterable[str]) -> str:
    """Returns a digest of these texts; a run that was started with others is not resumed."""
    return sha256("\0".join(texts))[:16]


def seal(text: str) -> str:
    """Adds a checksum to a JSON object, as its first key, or to a YAML text, as a comment. `unsealed` reads it."""
    digest = sha256(text)
    return f'{{"sha256": "{digest}", {text[1:]}' if text.startswith("{") else f"# sha256 {digest}\n{text}"


def unsealed(path: Path) -> str | None:
    """Returns the text of a sealed file; None if there is no file, or if the checksum is missing or does not match."""
    try:
        content = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    match = _SEAL.match(content)
    if match is None:
        return None
    text = "{" * content.startswith("{") + content[match.end() :]
    return text if sha256(text) in match.groups() else None


def write_error(directory: Path) -> str | None:
    """Returns why a directory cannot be created or written; None if it can. Leaves nothing behind."""
    return file_error(next(folder for folder in (directory, *directory.absolute().parents) if os.path.lexists(folder)))


def file_error(place: Path) -> str | None:
    """Returns why no file can be written in an existing directory; None if it can. Leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            file.write(bytes(4096))  # a full disk may still take an empty file
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_writable(setting: str, path: Path) -> None:
    """Refuses a file that cannot be written, before its content is computed. setting: for the error."""
    if path.is_dir():
        raise UserError(f"{setting} is a directory: name a file in it")
    reason = write_error(path.absolute().parent)
    if reason is None and path.exists() and not os.access(path, os.W_OK):
        reason = "Permission denied"
    if reason is not None:
        raise UserError(f"{setting} cannot be written ({reason}): choose another place")


def to_json(record: Mapping[str, object], indent: int | None = None) -> bytes:
    """Returns a record as a line of JSON; over several lines with `indent`.

    JSON has no NaN and infinities: such a number is null, and the record's `"nonfinite"` maps its key to the text of
    its value; a nested number is named by all its keys, joined by dots.
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
    numbers |= {"nonfinite": nonfinite} if nonfinite else {}
    text = json.dumps(numbers, ensure_ascii=False, allow_nan=False, indent=indent)
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
    if not Path(path).exists():
        return
    with open(path, "rb") as file:  # line by line: a long run's file takes hundreds of MB
        left = os.fstat(file.fileno()).st_size  # what a running program appends meanwhile is left out
        for number, line in enumerate(file, start=1):
            left -= len(line)
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                if not file.read(max(left, 0)).strip():
                    return
                raise UserError(f"{path} line {number} is not a JSON object: repair it or remove the line") from error
            yield line.removesuffix(b"\n"), record
            if left <= 0:
                return


def saved_steps(directory: Path) -> list[int]:
    """Returns the steps that have a complete checkpoint, ascending. Only reads: another process may be writing."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())
