"""`Store`: lists, reads, writes and deletes whole objects in an object store, through fsspec.

Every request has a deadline. A request that fails for a temporary reason, such as 503, is repeated for a while.
"""

import importlib
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from jrlhf.config.places import PACKAGES, StorageConfig
from jrlhf.errors import UserError, one_line
from jrlhf.storage.outward import within

T = TypeVar("T")

PAUSES = 0.5, 30.0  # seconds before the second attempt; the maximum after repeated doubling
_SILENT, _AGAIN = 5.0, 60.0  # seconds of failures after which users are told, and then told again
_SLOWEST = 1e6  # bytes per second; slower transfers are aborted
_AN_ERROR = object()  # in place of `missing`: there must be an object
_FIRST = StorageConfig(timeout=15.0, patience=10.0)  # for the first request, for which a user waits
# Codes of errors that repetition cannot cure: words of S3, numbers of HTTP.
_DENIED = "401", "403", "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
}


class StoreError(Exception):
    """A request failed: a clause with the reason. remedy: what may help, if that is known."""

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(reason)
        self.remedy = remedy


@contextmanager
def refused(failure: str, verbs: str) -> Iterator[None]:
    """Turns a StoreError into a UserError that begins with `failure`. verbs: operations that credentials must allow."""
    try:
        yield
    except StoreError as error:
        usual = f"see that the bucket exists, that the credentials of this machine may {verbs} there"
        raise UserError(f"{failure} ({error}): {error.remedy or f'{usual}, and that it can be reached'}") from error


class Store:
    """The objects whose names begin with an address, such as s3://bucket/runs/quickstart.

    Names are relative to the address. Every method raises StoreError if the store cannot be used. tell: called with a
    sentence when a request fails and will be repeated.
    """

    def __init__(self, address: str, section: StorageConfig, tell: Callable[[str], None] = lambda sentence: None):
        self.address, self._section, self._tell = address.rstrip("/"), section, tell
        self._scheme, _, self._root = self.address.partition("://")
        self._told, self._warned = False, -math.inf
        package = PACKAGES[self._scheme]
        try:
            importlib.import_module(package)
        except ImportError:
            raise UserError(f"{address} needs {package}: install it with pip install 'jrlhf[storage]'") from None
        logging.getLogger(package).setLevel(logging.CRITICAL)  # it prints a traceback for each attempt

    @cached_property
    def _files(self) -> Any:
        """The client. Its creation looks for credentials and counts as a part of the first request."""
        import fsspec

        return fsspec.filesystem(self._scheme, use_listings_cache=False, skip_instance_cache=True)

    def contact(self) -> None:
        """Raises StoreError if the store cannot be reached, or not with this machine's credentials, within seconds.

        A store that answers with a temporary error, such as 503, can be reached.
        """
        section, self._section = self._section, _FIRST
        try:
            self.read("config.yaml")
        except StoreError as error:
            cause = error.__cause__
            if error.remedy or cause is None or _denied(cause):
                raise
            if "_files" not in vars(self):
                reason = f"no credentials within {_FIRST.timeout:g} seconds"
                raise StoreError(reason, _CREDENTIALS[self._scheme]) from error
            if not _code(cause):
                server = ", or name your own server by AWS_ENDPOINT_URL" if self._scheme == "s3" else ""
                raise StoreError(_reason(cause), f"see that this machine can reach it{server}") from error
        finally:
            self._section = section

    def try_out(self) -> None:
        """Writes an object with a new name and deletes it; raises StoreError if that fails."""
        name = f"jrlhf-{uuid.uuid4().hex}"
        self.write(name, b"", new=True)
        self.delete(name)

    def versions(self, below: str = "") -> dict[str, tuple[int, str]]:
        """Returns name -> (bytes, an identifier of the content) of all objects below a folder."""
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
                if new and (isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412")):
                    return False
                raise
            return True

        return self._repeated(write, len(data), changes=True)

    def upload(self, file: Path, name: str) -> None:
        """Writes an object from a file, whole or not at all."""
        self._repeated(lambda: self._files.put_file(str(file), self._path(name)), file.stat().st_size, changes=True)

    def download(self, name: str, file: Path, size: int) -> bool:
        """Writes a file from an object of about `size` bytes; returns False if there is none."""
        file.parent.mkdir(parents=True, exist_ok=True)
        parts = list[Path]()  # one per attempt, because an abandoned attempt may still write

        def fetch() -> Path:
            part = file.with_name(f".{uuid.uuid4().hex}.tmp")
            parts.append(part)
            self._files.get_file(self._path(name), str(part))
            return part

        try:
            part = self._repeated(fetch, size, missing=None)
            if part is not None:
                with open(part, "rb") as whole:
                    os.fsync(whole.fileno())  # before the rename, as in `write_atomic`
                os.replace(part, file)
            return part is not None
        finally:
            for part in parts:
                part.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Deletes an object if there is one."""
        self._repeated(lambda: self._files.rm_file(self._path(name)), changes=True, missing=None)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _repeated(
        self, request: Callable[[], T], size: int = 0, *, changes: bool = False, missing: Any = _AN_ERROR
    ) -> T:
        """Calls `request` until it succeeds. missing: what to return if there is no object.

        changes: whether it changes the store. Such a request is never repeated, nor followed by another one, while it
        may still take effect, because old content could replace new. It is waited for up to `patience`.
        """
        pause, began = PAUSES[0], time.monotonic()
        until = began + self._section.patience
        while True:
            limit = self._section.timeout + size / _SLOWEST
            try:
                answer = within(max(limit, until - time.monotonic()) if changes else limit, request, self._notice)
                self._told = True
                return answer
            except Exception as error:
                absent = isinstance(error, FileNotFoundError) and _code(error) != "NoSuchBucket"
                if absent and missing is not _AN_ERROR:
                    self._told = True
                    return missing
                if (final := self._final(error)) is not None:
                    raise final from error
                if time.monotonic() + pause > until:
                    patience = f"for storage.patience={self._section.patience:g} seconds"
                    raise StoreError(f"{patience}, {_reason(error)}") from error
                self._warn(began, error)
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _final(self, error: Exception) -> StoreError | None:
        """Returns what to raise for an error that no repetition ends; None: the request may succeed later."""
        bucket, reason = self._root.partition("/")[0], _reason(error)
        if isinstance(error, FileNotFoundError) or _code(error) == "NoSuchBucket":
            return StoreError(f"there is no bucket {bucket}")
        if _code(error) == "InvalidBucketName" or "invalid bucket name" in reason.lower():
            rule = "names have 3 to 63 lowercase letters, digits, '-' and '.': correct it"
            return StoreError(f"no bucket can have the name {bucket}", rule)
        if _denied(error):
            return StoreError(reason, _CREDENTIALS.get(self._scheme, "") if _unknown(error) else "")
        return None

    def _warn(self, began: float, error: Exception) -> None:
        """Tells the user from time to time that requests have failed since `began`."""
        now = time.monotonic()
        if now - began >= _SILENT and now - self._warned >= _AGAIN:  # other threads may have warned
            self._warned = now
            self._tell(
                f"{self.address} has not answered as it should for {now - began:.0f} seconds ({_reason(error)}): "
                f"trying for storage.patience={self._section.patience:g} seconds"
            )

    def _notice(self) -> None:
        """Tells the user once that there is no first answer yet."""
        if not self._told:
            self._told = True
            self._tell(f"waiting for {self.address} to answer")


def _reason(error: BaseException) -> str:
    return one_line(error, kind=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _code(error: BaseException) -> str:
    """Returns the code of an error or one of its causes: a word of S3 or a number of HTTP; "" if there is none."""
    for one in _chain(error):
        response = getattr(one, "response", None)  # an attribute of botocore's errors
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else getattr(one, "code", None)
        if code is not None:
            return str(code)
    return ""


def _denied(error: BaseException) -> bool:
    """True if the credentials are missing, wrong or insufficient."""
    denied = _code(error) in _DENIED or _unknown(error)
    return denied or any(
        isinstance(one, PermissionError)
        # gcsfs and google.auth say it in the first word only.
        or (isinstance(one, OSError) and str(one).startswith("Forbidden: "))
        or (type(one).__name__ == "RefreshError" and "invalid_grant" in str(one))
        for one in _chain(error)
    )


def _unknown(error: BaseException) -> bool:
    """True if a request was denied because this machine has no credentials, or none for the profile."""
    names = [type(one).__name__ for one in _chain(error)]  # names in botocore and google.auth
    return _code(error) == "401" or any("Credential" in name or name == "ProfileNotFound" for name in names)
