"""The protocols of S3 (moto) and Google Cloud Storage (a part of it): objects, errors, and runs that are killed."""

import math
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jrlhf.config.places import StorageConfig
from jrlhf.storage.store import Store, StoreError
from tests.jrlhf.storage.test_mirror import CONFIG
from tests.support.object_stores import Faults, gcs, s3
from tests.support.processes import free_port
from tests.support.runs import Training, digest, timeless

SEED = int(os.environ.get("PROOF_SEED", "0"))
KILLS = 8
pytestmark = pytest.mark.filterwarnings("ignore")  # the clients leave sockets to the garbage collector


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture(params=["s3", "gs"])
def scheme(request, faults, monkeypatch) -> Iterator[str]:
    """A server runs and is what clients of this process and of its children talk to."""
    with s3(faults) if request.param == "s3" else gcs(faults, {}) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield request.param


@pytest.mark.full
def test_objects_are_whole_and_errors_are_sentences(scheme, faults, tmp_path):
    store = Store(f"{scheme}://bucket/runs/x", StorageConfig(timeout=20.0, patience=3.0))
    assert store.versions() == {} and store.read("a") is None
    assert store.write("a", b"1\n\r\n", new=True) and not store.write("a", b"2", new=True)
    assert store.read("a") == b"1\n\r\n" and store.write("a", b"22") and store.read("a") == b"22"
    large, empty = tmp_path / "large", tmp_path / "empty"
    large.write_bytes(random.Random(0).randbytes(12_000_000))
    empty.write_bytes(b"")
    store.upload(large, "d/e/large")
    store.upload(empty, "d/e/empty")
    sizes = {name: size for name, (size, _) in store.versions("d").items()}
    assert sizes == {"d/e/large": 12_000_000, "d/e/empty": 0} and store.versions("nothing") == {}
    before = store.versions()
    for name in ("large", "empty"):
        assert store.download(f"d/e/{name}", tmp_path / "back", 1)
        assert (tmp_path / "back").read_bytes() == (tmp_path / name).read_bytes()
    assert not store.download("d/e/none", tmp_path / "back", 1)
    store.write("a", b"33")
    assert {name for name, version in store.versions().items() if version != before[name]} == {"a"}
    store.delete("a")
    store.delete("a")
    assert store.versions().keys() == {"d/e/large", "d/e/empty"}

    nobody = Store(f"{scheme}://nobody/runs/x", StorageConfig(patience=0.1))
    with pytest.raises(StoreError, match="there is no bucket nobody"):
        nobody.write("a", b"1", new=True)
    answers = iter(["503", "503"])
    faults.choose = lambda method, path: next(answers, None)
    assert store.read("d/e/empty") == b""
    store._section = StorageConfig(timeout=1.0, patience=0.1)
    for fault in ("503", "hang"):
        faults.choose = lambda method, path, fault=fault: fault
        with pytest.raises(StoreError, match=r"for storage.patience=0.1 seconds, "):
            store.read("d/e/empty")


@pytest.mark.proof("failures")
def test_a_run_that_is_killed_goes_on_from_its_store_to_the_same_bits(scheme, faults, tmp_path):
    """At a random request, on three machines in turn, while a tenth of all requests is answered with 503."""
    config = tmp_path / "given.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in CONFIG.items()))
    steps = ["sft.steps=40", "device.simulated=1", "mesh.fsdp=1", "checkpoints.keep=3"]
    command, draw = ["--config", config, *steps], random.Random(f"{SEED} {scheme}")
    Training(*command, "name=run", f"run_dir={tmp_path}", log=tmp_path / "log", programs=tmp_path / "programs").wait()
    command += [f"run_dir={scheme}://bucket/runs", "storage.lease=2", "storage.timeout=20"]
    local, outcomes = tmp_path / "run", list[str]()
    for kill in range(KILLS + 1):
        name = f"run{outcomes.count('done')}"
        store, scratch = Store(f"{scheme}://bucket/runs/{name}", StorageConfig()), tmp_path / str(draw.randrange(3))
        options = [f"name={name}", f"storage.scratch={scratch}"]
        options += ["--resume"] * (store.read("config.yaml") is not None)
        faults.choose = lambda method, path: "503" if draw.random() < 0.1 else None
        limit = math.inf if kill == KILLS else len(faults.requests) + draw.randrange(5, 200)
        training = Training(*command, *options, log=tmp_path / f"log-{kill}", programs=tmp_path / "programs")
        while training.process.poll() is None and len(faults.requests) < limit:
            time.sleep(0.002)
        if training.process.poll() is None:
            training.stop(signal.SIGKILL)
            steps_there = sorted(int(Path(name).stem) for name in store.versions(".mirror/checkpoints"))
            outcomes.append(f"killed with {steps_there}")
        else:
            training.wait()
            outcomes.append("done")
    print(outcomes)
    scratch_run = scratch / scheme / "bucket" / "runs" / name
    assert timeless(scratch_run) == timeless(local) and digest(scratch_run / "model") == digest(local / "model")
    for name in ("metrics.jsonl", "model/model.safetensors", "report.html"):
        assert store.read(name) == (scratch_run / name).read_bytes()
    markers = {".mirror/checkpoints/sft/40.json"}
    assert markers <= store.versions(".mirror").keys() and ".mirror/claim.json" not in store.versions(".mirror")


@pytest.mark.proof("processes")
@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_two_processes_share_a_scratch_directory_and_the_first_one_copies(scheme, tmp_path, monkeypatch):
    config = tmp_path / "given.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in CONFIG.items()))

    def train(scratches: tuple[str, str], expected: int, *options: str) -> str:
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{free_port()}")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
        command, trainings = ["--config", config, "name=run", "device.simulated=4", *options], list[Training]()
        for number, scratch in enumerate(scratches):
            monkeypatch.setenv("JAX_PROCESS_ID", str(number))
            place = [f"storage.scratch={tmp_path / scratch}"] * ("run_dir=s3://bucket/runs" in options)
            log = tmp_path / f"log-{time.monotonic_ns()}"
            trainings.append(Training(*command, *place, log=log))
        return "".join(training.wait(expected) for training in trainings)

    train(("", ""), 0, f"run_dir={tmp_path}")
    local, address = tmp_path / "run", "run_dir=s3://bucket/runs"
    store = Store("s3://bucket/runs/run", StorageConfig())
    assert train(("a", "b"), 2, address).count("the processes do not see the same") == 2
    assert store.versions() == {}
    train(("a", "a"), 0, address)
    assert any("process_1" in name for name in store.versions("checkpoints"))
    for name in [name for name in store.versions() if name.startswith(("model/", ".mirror/checkpoints/sft/4"))]:
        store.delete(name)
    train(("c", "c"), 0, address, "--resume")
    run = tmp_path / "c" / "s3" / "bucket" / "runs" / "run"
    assert timeless(run) == timeless(local) and digest(run / "model") == digest(local / "model")
    assert store.read("model/model.safetensors") == (local / "model" / "model.safetensors").read_bytes()
