"""The claim of one run on an address: an object that only its holder renews, so that two runs never write to one place.

A store has no locks. It writes an object only if there is none, and that is enough: the claim is such an object. Its
holder changes it every few seconds; whoever sees it unchanged for a whole lease removes it and tries again. A holder
that was cut off finds another claim in its place and stops before it writes.
"""

import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jrlhf.errors import UserError
from jrlhf.run.files import Closing
from jrlhf.storage.store import Store, StoreError

NAME = ".mirror/claim.json"
_SIGNS = 4  # signs of life within a lease


class Claim(Closing):
    """Holds an address from `take` until `close`.

    lock: a file beside the run's scratch directory. It is locked while this process lives and names its claim, so that
    the next process on this machine needs not wait for the lease of one that was killed.
    """

    def __init__(self, store: Store, lock: Path, lease: float):
        self._store, self._lock, self._lease = store, lock, lease
        self._descriptor, self._held, self._end = -1, False, threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
        self._own: dict[str, Any] = {
            "token": uuid.uuid4().hex,
            "process": os.getpid(),
            "machine": platform.node(),
            "sign": 0,
        }
        self.failure: str | None = None  # a clause on why the claim may be lost

    def take(self, tell: Callable[[str], None]) -> None:
        """Claims the address; raises UserError if another run holds it."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._in_use("another process of this machine") from error
        ours = os.read(self._descriptor, 10_000).decode(errors="replace").split()  # of processes that have ended
        os.write(self._descriptor, f"{self._own['token']}\n".encode())
        first, since = None, time.monotonic()
        while not self._store.write(NAME, self._encoded(), new=True):
            other = self._read()
            if other is None:
                continue
            token = other.get("token")
            if token == self._own["token"]:  # the store wrote it and the answer was lost
                break
            first = first or other
            if other != first:
                raise self._in_use("process {process} of {machine}".format(**{"process": "?", "machine": "?"} | other))
            if token in ours or time.monotonic() - since > self._lease:
                self._store.delete(NAME)
                continue
            if first is other:
                tell(
                    f"{self._store.address} was in use by process {other.get('process')} of {other.get('machine')}: "
                    f"waiting up to storage.lease={self._lease:g} seconds for its signs of life"
                )
            time.sleep(self._lease / (4 * _SIGNS))
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{self._own['token']}\n".encode(), 0)
        self._held = True
        self._thread.start()

    def check(self) -> None:
        """Raises StoreError if this run does not hold the address any more. Call it before what must not be undone."""
        other = self._read()
        if other is None or other.get("token") != self._own["token"]:
            holder = "nobody" if other is None else "process {process} of {machine}".format(**other)
            self._held = False
            raise StoreError(f"this run's claim was taken over (it is held by {holder})")

    def close(self) -> None:
        """Gives the address back."""
        self._end.set()
        if self._held:
            self._thread.join(self._lease)  # a sign of life that comes late would bring the claim back
            with suppress(StoreError):
                self.check()
                self._store.delete(NAME)
        self._held = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _renew(self) -> None:
        while not self._end.wait(self._lease / _SIGNS):
            try:
                self.check()
                self._own["sign"] += 1
                if not self._end.is_set():
                    self._store.write(NAME, self._encoded())
            except StoreError as error:
                self.failure = str(error)
                return

    def _read(self) -> dict[str, Any] | None:
        data = self._store.read(NAME)
        try:
            return None if data is None else json.loads(data)
        except ValueError:
            return {"token": None}

    def _encoded(self) -> bytes:
        return json.dumps(self._own).encode()

    def _in_use(self, user: str) -> UserError:
        return UserError(
            f"{self._store.address} is in use by {user}: wait until it ends, or give this run another name="
        )
