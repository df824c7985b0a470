"""A place in an object store, by fsspec: whole objects that are listed, read, written and deleted.

Every request has a deadline. One that fails for a reason that may pass, such as 503, is repeated for a while.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from jrlhf.config.places import StorageConfig
from jrlhf.errors import UserError

T = TypeVar("T")

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}
# Seconds before the second attempt; the longest, after repeated doubling; the one of which users are told.
_PAUSES = 0.5, 30.0, 8.0
_SLOWEST = 1e6  # bytes per second of a transfer that is not yet given up
# Words of errors that no repetition cures.
_DENIED = "credentials", "anonymous", "access denied", "accessdenied", "forbidden", "invalid_grant"
_DENIED += "invalidaccesskeyid", "signaturedoesnotmatch", "expiredtoken"
_MISSING = "nosuchbucket", "bucket does not exist", "bucket not found"


class StoreError(Exception):
    """The store does not do what it is asked: a clause that says why."""


class Store:
    """The objects whose names begin with an address, such as s3://bucket/runs/quickstart.

    Names are relative to the address. Every method raises StoreError where the store cannot be used. tell: gets a
    sentence when a request fails and is going to be repeated.
    """

    def __init__(self, address: str, section: StorageConfig, tell: Callable[[str], None] = lambda sentence: None):
        self.address, self._section, self._tell = address.rstrip("/"), section, tell
        scheme, _, self._root = self.address.partition("://")
        package = _PACKAGES[scheme]
        try:
            importlib.import_module(package)
            import fsspec
        except ImportError:
            raise UserError(f"{address} needs {package}: install it with pip install 'jrlhf[storage]'") from None
        logging.getLogger(package).setLevel(logging.CRITICAL)  # it prints a traceback for each attempt
        self._files: Any = fsspec.filesystem(
            scheme, use_listings_cache=False, **({} if scheme == "memory" else {"skip_instance_cache": True})
        )

    def sizes(self, below: str = "") -> dict[str, int]:
        """Returns name -> bytes of all objects whose names begin with `below`, a folder."""
        return {name: size for name, (size, _) in self.versions(below).items()}

    def versions(self, below: str = "") -> dict[str, tuple[int, str]]:
        """Returns name -> (bytes, what tells one content from another) of all objects below a folder."""
        path, cut = f"{self._root}/{below}".rstrip("/"), len(self._root) + 1
        entries = self._repeated(lambda: self._files.find(path, detail=True), missing={}).items()
        names = {name.lstrip("/")[cut:]: entry for name, entry in entries}
        kinds = "ETag", "md5Hash", "created"
        return {
            name: (entry["size"], str([entry.get(kind) for kind in kinds])) for name, entry in names.items() if name
        }

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object; None if there is none."""
        return self._repeated(lambda: self._files.cat_file(self._path(name)), missing=None)

    def write(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Writes an object, whole or not at all. new: only if there is none, else returns False."""
        mode = "create" if new else "overwrite"

        def write() -> bool:
            try:
                self._files.pipe_file(self._path(name), data, mode=mode)
            except Exception as error:
                if new and (isinstance(error, FileExistsError) or _says(error, "precondition")):
                    return False
                raise
            return True

        return self._repeated(write, len(data))

    def upload(self, file: Path, name: str) -> None:
        """Writes an object from a file, whole or not at all."""
        self._repeated(lambda: self._files.put_file(str(file), self._path(name)), file.stat().st_size)

    def download(self, name: str, file: Path, size: int) -> bool:
        """Writes a file from an object of about `size` bytes; returns False if there is none."""
        file.parent.mkdir(parents=True, exist_ok=True)
        return self._repeated(lambda: self._files.get_file(self._path(name), str(file)) or True, size, missing=False)

    def delete(self, name: str) -> None:
        """Deletes an object if there is one."""
        self._repeated(lambda: self._files.rm_file(self._path(name)), missing=None)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _repeated(self, request: Callable[[], T], size: int = 0, **missing: Any) -> T:
        """Calls `request` until it succeeds. missing: what to return where there is no object."""
        pause, until = _PAUSES[0], time.monotonic() + self._section.patience
        while True:
            try:
                return _within(self._section.timeout + size / _SLOWEST, request)
            except Exception as error:
                absent = isinstance(error, FileNotFoundError)
                if _says(error, *_MISSING) or (absent and not missing):
                    raise StoreError(f"there is no bucket {self._root.partition('/')[0]}") from error
                if absent:
                    return missing["missing"]
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                denied = isinstance(error, PermissionError) or getattr(error, "code", None) in (401, 403)
                if denied or _says(error, *_DENIED):
                    raise StoreError(reason) from error
                if time.monotonic() + pause > until:
                    raise StoreError(f"for storage.patience={self._section.patience:g} seconds, {reason}") from error
                if pause == _PAUSES[2]:
                    patience = f"storage.patience={self._section.patience:g} seconds"
                    self._tell(f"{self.address} does not answer as it should ({reason}): trying for {patience}")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])


def _says(error: BaseException | None, *words: str) -> bool:
    """Tests whether an error, or one that it came from, has one of these words."""
    while error is not None:
        if any(word in f"{type(error).__name__} {error}".lower() for word in words):
            return True
        error = error.__cause__
    return False


def _within(seconds: float, request: Callable[[], T]) -> T:
    """Calls `request` in a thread; raises TimeoutError if it takes longer. Libraries have deadlines only in part."""
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((request(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="request", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer within {seconds:g} seconds") from None
    if error is not None:
        raise error
    return value
