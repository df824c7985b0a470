"""Requests that come late, errors that no repetition cures, and models that change, in fsspec's store in memory."""

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jrlhf.config.places import StorageConfig
from jrlhf.doctor.access import _store_error
from jrlhf.errors import UserError
from jrlhf.roles.pretrained import architecture, locate
from jrlhf.run.contents import read_prompting, read_summary
from jrlhf.storage import outward
from jrlhf.storage import store as module
from jrlhf.storage.claim import NAME, Claim
from jrlhf.storage.models import fetch, fetch_run
from jrlhf.storage.store import Store, StoreError, refused

ADDRESS, ROOT = "memory://bucket/x", "/bucket/x"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(module, "PAUSES", (0.01, 0.02))


def slow_first(method: Any, seconds: float = 0.3) -> Any:
    """Returns a method whose first call sleeps before it does its work; the others do not."""
    first = threading.Lock()

    def call(*arguments: Any, **options: Any) -> Any:
        if first.acquire(blocking=False):
            time.sleep(seconds)
        return method(*arguments, **options)

    return call


def test_a_write_that_comes_late_does_not_replace_a_newer_one(memory, tmp_path, monkeypatch):
    (tmp_path / "new").write_text("new")
    store = Store(ADDRESS, StorageConfig(timeout=0.05, patience=20.0))
    monkeypatch.setattr(store._files, "pipe_file", slow_first(store._files.pipe_file, 0.3))
    store.write("a", b"old")
    store.write("a", b"new")
    monkeypatch.setattr(store._files, "rm_file", slow_first(store._files.rm_file, 0.3))
    store.delete("b")
    store.write("b", b"new")
    monkeypatch.setattr(store._files, "put_file", slow_first(store._files.put_file, 0.3))
    (tmp_path / "old").write_text("old")
    store.upload(tmp_path / "old", "c")
    store.upload(tmp_path / "new", "c")
    time.sleep(0.5)
    assert [store.read(name) for name in "abc"] == [b"new"] * 3


def test_a_download_that_comes_late_changes_no_file(memory, tmp_path):
    memory.pipe_file(f"{ROOT}/a", b"whole")
    store, attempts = Store(ADDRESS, StorageConfig(timeout=0.05, patience=20.0)), list[str]()

    def get_file(path: str, file: str) -> None:
        attempts.append(file)
        if len(attempts) == 1:
            time.sleep(0.3)
            with open(file, "w") as late:
                late.write("half")
            return
        memory.get_file(path, file)

    store._files = SimpleNamespace(get_file=get_file)
    assert store.download("a", tmp_path / "a", 5) and (tmp_path / "a").read_bytes() == b"whole"
    time.sleep(0.4)
    assert len(attempts) == 2 and (tmp_path / "a").read_bytes() == b"whole"


def test_a_sign_of_life_that_comes_late_does_not_bring_a_claim_back(memory, tmp_path, monkeypatch):
    store = Store(ADDRESS, StorageConfig())
    claim = Claim(store, tmp_path / "lock", 0.1)
    claim.take(print)
    monkeypatch.setattr(store._files, "pipe_file", slow_first(store._files.pipe_file, 0.4))
    time.sleep(0.1)
    claim.close()
    after = memory.exists(f"{ROOT}/{NAME}")
    claim._thread.join()
    assert memory.exists(f"{ROOT}/{NAME}") == after


class NoCredentialsError(Exception):
    """The name that botocore gives to it."""


class ProfileNotFound(Exception):
    """Another one of botocore's."""


def caused(error: Exception, code: str) -> Exception:
    error.__cause__ = type("ClientError", (Exception,), {"response": {"Error": {"Code": code}}})()
    return error


def coded(code: int) -> Exception:
    error = Exception("message")
    error.code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error, repeated",
    [
        (OSError("503 of bucket/forbidden/credentials/access denied/invalid_grant/nosuchbucket/anonymous"), True),
        (caused(OSError("bucket/forbidden"), "SlowDown"), True),
        (coded(503), True),
        (caused(OSError("x"), "InvalidAccessKeyId"), False),
        (coded(401), False),
        (OSError("Forbidden: https://x"), False),
        (ProfileNotFound("x"), False),
        (caused(FileNotFoundError("x"), "NoSuchBucket"), False),
    ],
)
def test_what_no_repetition_cures_is_told_by_codes_and_types(memory, error, repeated):
    store, attempts = Store(ADDRESS, StorageConfig(patience=0.1)), list[str]()

    def cat_file(path: str) -> bytes:
        attempts.append(path)
        raise error

    store._files = SimpleNamespace(cat_file=cat_file)
    with pytest.raises(StoreError):
        store.read("a")
    assert (len(attempts) > 1) == repeated


def client(answer: Any) -> Any:
    def cat_file(path: str) -> bytes:
        if isinstance(answer, Exception):
            raise answer
        time.sleep(30)
        return b""

    return SimpleNamespace(cat_file=cat_file)


BAD_NAME = "(no bucket can have the name bucket): names have 3 to 63 lowercase letters, digits, '-' and '.': correct it"


@pytest.mark.parametrize(
    "scheme, answer, sentence",
    [
        ("s3", NoCredentialsError("x"), "(NoCredentialsError: x): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"),
        ("gs", coded(401), "(Exception: message): run gcloud auth application-default login, or set GOOGLE_APP"),
        ("gs", coded(403), "(Exception: message): see that the bucket exists, that the credentials of this machine"),
        ("s3", OSError("no route"), "(OSError: no route): see that this machine can reach it, or name your own server"),
        ("gs", None, "(TimeoutError: no answer within 0.1 seconds): see that this machine can reach it"),
        ("s3", Exception('Invalid bucket name "A b": Bucket name must match the regex "^[a-z]{3}$"'), BAD_NAME),
        ("s3", caused(OSError("The specified bucket is not valid"), "InvalidBucketName"), BAD_NAME),
        ("s3", coded(503), ""),
    ],
)
def test_a_first_request_that_nobody_answers_ends_soon_and_says_what_is_missing(monkeypatch, scheme, answer, sentence):
    pytest.importorskip("gcsfs")
    monkeypatch.setattr(module, "_FIRST", StorageConfig(timeout=0.1, patience=0.05))
    monkeypatch.setattr(outward, "NOTICE", 0.01)
    sentences = list[str]()
    store = Store(f"{scheme}://bucket/x", StorageConfig(), sentences.append)
    store._files = client(answer)
    try:
        with refused("it fails", "list"):
            store.contact()
        assert not sentence
    except UserError as error:
        assert sentence and str(error).startswith(f"it fails {sentence}")
    notices = [f"waiting for {scheme}://bucket/x to answer"] if answer is None else []
    assert [one for one in sentences if "waiting" in one] == notices


def test_a_client_that_finds_no_credentials_in_time_says_so(monkeypatch):
    pytest.importorskip("gcsfs")
    monkeypatch.setattr(module, "_FIRST", StorageConfig(timeout=0.1, patience=0.05))
    over = threading.Event()  # Python 3.11 makes all stores wait for the client that one of them makes
    monkeypatch.setattr("fsspec.filesystem", lambda *arguments, **options: over.wait(30))
    with pytest.raises(StoreError, match="no credentials within 0.1 seconds") as caught:
        Store("gs://bucket/x", StorageConfig()).contact()
    over.set()
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.remedy


def test_a_model_that_changed_is_fetched_again_and_one_that_vanishes_is_a_sentence(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory.pipe_file(f"{ROOT}/config.json", b"old")
    first = fetch(ADDRESS, "model.path", ("*.json",))
    time.sleep(0.01)
    memory.pipe_file(f"{ROOT}/config.json", b"new")
    second = fetch(ADDRESS, "model.path", ("*.json",))
    assert [(path / "config.json").read_bytes() for path in (first, second)] == [b"old", b"new"]
    memory.pipe_file(f"{ROOT}/other.json", b"")
    monkeypatch.setattr(Store, "download", lambda *arguments: False)
    with pytest.raises(UserError, match=r"model.path=memory://bucket/x cannot be fetched \(.*json was deleted"):
        fetch(ADDRESS, "model.path", ("*.json",))


def test_the_files_of_a_model_are_fetched_once_and_its_weights_when_they_are_needed(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=f"model.path={ADDRESS} holds no config.json and no model/config.json"):
        locate(ADDRESS, "model.path")
    memory.pipe_file(f"{ROOT}/config.yaml", b"")
    with pytest.raises(UserError, match=f"model.path={ADDRESS} is a run that has not finished"):
        locate(ADDRESS, "model.path")
    for name in (
        "config.json",
        "model.safetensors",
        "merges.txt",
        "code.py",
        "deep/config.json",
        "additional_chat_templates/a.jinja",
    ):
        memory.pipe_file(f"{ROOT}/model/{name}", b'{"model_type": "none"}')
    first, fetched, download = locate(ADDRESS, "model.path"), list[str](), Store.download
    files = {file.relative_to(first).as_posix() for file in first.rglob("*") if file.is_file()}
    assert files == {"config.json", "merges.txt", "additional_chat_templates/a.jinja"}
    monkeypatch.setattr(
        Store, "download", lambda self, name, *more: fetched.append(name) or download(self, name, *more)
    )
    assert locate(ADDRESS, "model.path") == first and fetched == []
    assert locate(ADDRESS, "model.path", weights=True) == first and len(fetched) == 1
    (first / "model.safetensors").write_bytes(b"")  # what a machine that lost its power may leave
    order, fsync, replace = list[str](), os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda *names: order.append("replace") or replace(*names))
    assert locate(ADDRESS, "model.path", weights=True) == first and len(fetched) == 2
    assert (first / "model.safetensors").read_bytes() == b'{"model_type": "none"}' and order == ["fsync", "replace"]
    assert (first / "model.safetensors").exists() and not (first / "code.py").exists()
    with pytest.raises(UserError, match=f"model.path={ADDRESS}"):
        architecture(ADDRESS, "model.path")
    memory.pipe_file(f"{ROOT}/summary.json", b'{"chat": true}')
    assert read_summary(fetch_run(ADDRESS, "--model")) == {"chat": True}


def test_how_a_model_is_asked_is_read_from_a_run_and_from_an_export(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory.pipe_file(f"{ROOT}/model/prompting.json", b'{"chat": true}')
    assert read_prompting(fetch_run(ADDRESS, "model")) == {"chat": True}
    memory.pipe_file(f"{ROOT}/prompting.json", b'{"chat": false}')
    assert read_prompting(fetch_run(ADDRESS, "model")) == {"chat": False}


def test_the_doctor_leaves_objects_of_the_user_alone_and_tells_the_remedy(memory, monkeypatch):
    memory.pipe_file(f"{ROOT}/jrlhf-doctor", b"mine")
    assert _store_error(ADDRESS) is None
    monkeypatch.setattr(Store, "read", lambda *arguments: (_ for _ in ()).throw(StoreError("denied", "set a variable")))
    assert _store_error(ADDRESS) == "denied: set a variable"
    assert {name: memory.cat_file(name) for name in memory.find(ROOT)} == {f"{ROOT}/jrlhf-doctor": b"mine"}
