"""`Claim`: the lock of a run on an address in a store, so that two runs never write to the same address.

A store has no locks, but it can create an object only if there is none: the claim is such an object. Its holder changes
it every few seconds. A run that sees it unchanged for a whole lease (its own or the holder's, whichever is longer)
deletes it and tries again. A holder that was disconnected finds another claim in its place and stops before it writes.
"""

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
from jrlhf.run.files import Closing, lock_file
from jrlhf.storage.store import PAUSES, Store, StoreError

NAME = ".mirror/claim.json"
_SIGNS = 4  # number of renewals within a lease


class Claim(Closing):
    """Holds an address from `take` until `close`.

    lock: a file next to the run's scratch directory. It is locked while this process lives and names its claim, so that
    the next process on this machine does not wait for the lease of a killed one. On a disk that machines share, a lock
    may be visible on one machine only, so it tells nothing about the others.
    """

    def __init__(self, store: Store, lock: Path, lease: float):
        self._store, self._lock, self._lease = store, lock, lease
        self._descriptor, self.held, self._end = -1, False, threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
        self._own: dict[str, Any] = {
            "token": uuid.uuid4().hex,
            "process": os.getpid(),
            "machine": platform.node(),
            "lease": lease,
            "sign": 0,
        }
        self.failure: str | None = None  # a clause that says why the claim may be lost

    def take(self, tell: Callable[[str], None]) -> None:
        """Claims the address; raises UserError if another run holds it."""
        ended, seen, since, taken_over, pause = self._lock_here(), None, 0.0, False, PAUSES[0]
        while not self._store.write(NAME, self._encoded(), new=True):
            holder = self._read()
            if holder is None:  # released in between, or the store reads late
                time.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
                continue
            if holder.get("token") == self._own["token"]:  # the store wrote it, but the answer was lost
                break
            if seen not in (None, holder):
                raise self._in_use(_process(holder))
            lease = max(self._lease, holder.get("lease", 0.0))  # it renews by its own lease
            if holder.get("machine") == platform.node() and holder.get("token") in ended:
                lease = 0.0
            if seen is None:
                seen, since = holder, time.monotonic()
                if lease > 0:
                    tell(
                        f"{self._store.address} was in use by {_process(holder)}: waiting up to "
                        f"storage.lease={lease:g} seconds for its signs of life"
                    )
            if time.monotonic() - since >= lease:
                self._store.delete(NAME)
                taken_over = True
            else:
                time.sleep(self._lease / (4 * _SIGNS))
        if taken_over:  # another waiting run may have deleted our claim, which it took for the old one
            time.sleep(self._lease / (4 * _SIGNS))
            if (holder := self._read()) is None or holder.get("token") != self._own["token"]:
                raise self._in_use(_process(holder))
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{self._own['token']}\n".encode(), 0)
        self.held = True
        self._thread.start()

    def _lock_here(self) -> list[str]:
        """Locks the lock file and adds the token to it; returns the tokens of processes that have certainly ended."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor, ours = lock_file(self._lock)
        if ours is False:
            raise self._in_use("another process of this machine")
        tokens = os.read(self._descriptor, 10_000).decode(errors="replace").split()
        os.write(self._descriptor, f"{self._own['token']}\n".encode())
        return tokens if ours else []

    def check(self) -> None:
        """Raises StoreError if this run no longer holds the address. Call it before irreversible operations."""
        holder = self._read()
        if holder is None or holder.get("token") != self._own["token"]:
            self.held = False
            raise StoreError(f"this run's claim was taken over (it is held by {_process(holder)})")

    def close(self) -> None:
        """Releases the address."""
        self._end.set()
        if self.held:
            self._thread.join(self._lease)
            if not self._thread.is_alive():  # otherwise a late renewal would restore the claim
                with suppress(StoreError):
                    self.check()
                    self._store.delete(NAME)
        self.held = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _renew(self) -> None:
        while not self._end.wait(self._lease / _SIGNS):
            try:
                self.check()
                self._own["sign"] += 1
                # The check and the write are two requests. If this process stands still for a lease in between, it
                # replaces the claim of a run that took over, and that run stops instead of this one. fsspec can create
                # an object on condition that there is none, but gcsfs cannot replace one on condition of its content.
                if not self._end.is_set():
                    self._store.write(NAME, self._encoded())
            except StoreError as error:
                self.failure = str(error)
                return

    def _read(self) -> dict[str, Any] | None:
        data = self._store.read(NAME)
        try:
            holder = None if data is None else json.loads(data)
        except ValueError:
            return {}
        return holder if holder is None or isinstance(holder, dict) else {}

    def _encoded(self) -> bytes:
        return json.dumps(self._own).encode()

    def _in_use(self, user: str) -> UserError:
        return UserError(
            f"{self._store.address} is in use by {user}: wait until it ends, or give this run another name="
        )


def _process(holder: dict[str, Any] | None) -> str:
    return "nobody" if holder is None else f"process {holder.get('process', '?')} of {holder.get('machine', '?')}"
