"""Files that a crash cannot tear: whole ones are replaced atomically, JSON lines are appended whole."""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jrlhf.errors import UserError


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


def check_writable(written: str, path: Path) -> None:
    """Whether a file may be written, or made with the directories above it: before its content is, which takes a while.

    written: the setting that names it, for the error.

    Raises:
        UserError: it cannot.
    """
    if path.is_dir():
        raise UserError(f"{written} is a directory: name a file in it")
    parent = next(each for each in path.absolute().parents if each.exists())
    if not parent.is_dir() or not all(os.access(each, os.W_OK) for each in (parent, path) if each.exists()):
        raise UserError(f"{written} cannot be written in {parent}: choose another place")


def append_jsonl(path: Path | str, records: Iterable[Mapping[str, object]]) -> None:
    """Appends one line of JSON a record and waits until they are on disk.

    Raises:
        ValueError: a record holds NaN or an infinity, which JSON has no word for.
    """
    lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    with open(path, "ab") as file:
        file.write(lines.encode("utf-8", "backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path | str) -> Iterator[dict]:
    """The records of a file of JSON lines, as `jsonl_lines` finds them."""
    return (record for _, record in jsonl_lines(path))


def jsonl_lines(path: Path | str) -> Iterator[tuple[bytes, dict]]:
    """The lines of a file and their records; none where there is no file. A torn last line is left out.

    Raises:
        UserError: an unreadable line that is not the last.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    while lines and not lines[-1].strip():
        lines.pop()
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
