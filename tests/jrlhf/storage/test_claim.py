"""Who holds an address: one run at a time, in fsspec's store in memory."""

import errno
import fcntl
import json
import os
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from jrlhf.config.places import StorageConfig
from jrlhf.errors import UserError
from jrlhf.storage import claim as claim_module
from jrlhf.storage.claim import Claim
from jrlhf.storage.store import Store, StoreError

STORAGE = StorageConfig(lease=0.2, patience=0.01)


def test_one_run_holds_an_address_until_it_gives_no_sign_of_life(memory, tmp_path):
    def claim(lock: str) -> Claim:
        return Claim(Store("memory://bucket/runs/run", STORAGE), tmp_path / lock, 0.2)

    first, second, sentences = claim("a"), claim("b"), list[str]()
    first.take(sentences.append)
    with pytest.raises(UserError, match="run is in use by process .*: wait until it ends, or give this run another"):
        second.take(sentences.append)
    with pytest.raises(UserError, match="another process of this machine"):
        claim("a").take(sentences.append)
    second.close()
    first._end.set()  # it is killed
    first._thread.join()
    third = claim("b")
    third.take(sentences.append)
    assert "waiting up to storage.lease=0.2 seconds" in sentences[-1]
    with pytest.raises(StoreError, match="this run's claim was taken over"):
        first.check()
    first.close()
    third.check()  # the first one removed only its own
    third._end.set()
    third._thread.join()
    os.close(third._descriptor)
    sentences.clear()
    claim("b").take(sentences.append)  # on the same machine nothing needs to be waited for
    assert sentences == []


def test_a_claim_lasts_for_the_longer_lease_and_locks_of_other_machines_say_nothing(memory, tmp_path, monkeypatch):
    """The lease of the holder, a lock file of a shared disk, a disk without locks, a process that surely has ended."""

    def claim(lock: str, lease: float) -> Claim:
        return Claim(Store("memory://bucket/runs/run", STORAGE), tmp_path / lock, lease)

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    with claim("a", 1.0) as holder:
        holder.take(print)
        (tmp_path / "b").write_text((tmp_path / "a").read_text())  # as another machine sees it, whose flock is its own
        with monkeypatch.context() as patch:
            patch.setattr(claim_module.platform, "node", lambda: "elsewhere")
            with pytest.raises(UserError, match="in use by process"), claim("b", 0.1) as other:
                other.take(print)
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", no_locks)
            with pytest.raises(UserError, match="in use by process"), claim("a", 0.1) as other:
                other.take(print)
        holder.check()
    memory.pipe_file("/bucket/runs/run/.mirror/claim.json", b"[]")
    with claim("c", 0.1) as other:
        other.take(print)
        other.check()


def test_a_claim_that_is_renewed_stays_however_slow_the_store_is(memory, tmp_path):
    """The first request of the second one takes longer than a lease."""
    holder, other = (Claim(Store("memory://bucket/runs/run", STORAGE), tmp_path / lock, 0.2) for lock in "ab")
    write = other._store.write

    def slow(*arguments: Any, **options: Any) -> bool:
        other._store.write = write
        time.sleep(0.5)
        return write(*arguments, **options)

    other._store.write = slow
    with holder:
        holder.take(print)
        with pytest.raises(UserError, match="in use by process"), other:
            other.take(print)
        holder.check()


def test_a_claim_that_is_read_late_is_not_asked_for_without_a_pause(memory, tmp_path, monkeypatch):
    first, second = (Claim(Store("memory://bucket/runs/run", STORAGE), tmp_path / lock, 60.0) for lock in "ab")
    first.take(print)
    pauses, read = list[float](), second._read
    monkeypatch.setattr(claim_module.time, "sleep", pauses.append)
    monkeypatch.setattr(second, "_read", lambda: None if len(pauses) < 8 else {**(read() or {}), "sign": len(pauses)})
    with pytest.raises(UserError, match="in use by process"):
        second.take(print)
    assert pauses[:8] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    for claim in (first, second):
        claim.close()


def test_of_two_that_wait_for_one_claim_only_one_gets_it(memory, tmp_path):
    """The slower one deletes the claim of the faster one, which it takes for the old one."""
    old = {"token": "0", "process": 1, "machine": claim_module.platform.node(), "sign": 0}
    memory.pipe_file("/bucket/runs/run/.mirror/claim.json", json.dumps(old).encode())
    claims = list[Claim]()
    for name in "ab":
        (tmp_path / name).write_text("0\n")  # of a process that has ended
        claims.append(Claim(Store("memory://bucket/runs/run", STORAGE), tmp_path / name, 4.0))
    faster, slower = claims
    outcomes = list[str]()

    def take() -> None:
        try:
            faster.take(print)
            outcomes.append("taken")
        except UserError as error:
            outcomes.append(str(error))

    thread, delete = threading.Thread(target=take), slower._store.delete

    def late(name: str) -> None:
        slower._store.delete = delete
        thread.start()
        content = b""
        while content in (b"", json.dumps(old).encode()):  # until the faster one's is there
            time.sleep(0.001)
            with suppress(FileNotFoundError):  # for a moment there is none
                content = memory.cat_file(f"/bucket/runs/run/{name}")
        delete(name)

    slower._store.delete = late
    slower.take(print)
    thread.join()
    (outcome,) = outcomes
    assert "is in use by process" in outcome
    slower.check()
    for claim in claims:
        claim.close()
