"""Rollouts in processes of their own: the bits of one process, whoever draws, dies or hangs."""

import os
import pickle
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.config import config_yaml
from jrlhf.config.stages import FleetSection
from jrlhf.errors import RunFailure, UserError
from jrlhf.rollouts.processes import worker
from jrlhf.rollouts.processes.places import check_processes
from jrlhf.rollouts.processes.process import RECENT, LocalWorker, Process
from jrlhf.rollouts.processes.ray_worker import free_places, joined, total_places
from jrlhf.rollouts.processes.record import Event
from jrlhf.rollouts.processes.shared import SharedArrays, WeightUpdate, delta, patched, read
from jrlhf.rollouts.processes.workers import ProcessWorkers
from jrlhf.run.child import Worker
from jrlhf.run.files import decode, encode
from tests.jrlhf.rollouts.test_runs import ADAPTER, config, run
from tests.support.processes import alive, children, gone
from tests.support.runs import Training, timeless

pytestmark = pytest.mark.usefixtures("quick_compilation")


def bits(path: Path):
    return timeless(path), (path / "model" / "model.safetensors").read_bytes()


def test_arrays_are_read_as_they_were_written():
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.int32), np.array(True), np.uint32(7)]
    shared = SharedArrays.of(arrays)
    opened = SharedArrays.opened(shared.path)
    for written, there in zip(arrays, read(opened.path), strict=True):
        np.testing.assert_array_equal(written, there)
        assert there.dtype == written.dtype and there.shape == written.shape
    with open(shared.path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(ValueError, match="not what was written"):
        read(shared.path)


def test_an_answer_of_a_rollout_process_may_be_larger_than_that_of_a_function(monkeypatch):
    """A chunk in which all rows reach a long limit. (The renderer of templates answers with as much as is asked.)"""
    monkeypatch.setattr(Worker, "longest", 1000)
    for kind, failed in ((Worker, True), (LocalWorker, False)):
        process = kind("jrlhf.data.template", os.environ, lambda output: None)
        try:
            answer = process.request(pickle.dumps(("{{ 'x' * 2000 }}", {}, None)), 20.0)
        finally:
            process.kill()
        assert ("answered with" in answer.get("detail", "")) is failed and ("text" in answer) is not failed


def integers(arrays):
    return [np.asarray(array).reshape(-1).view(f"u{array.dtype.itemsize}") for array in arrays]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32, np.int8])
def test_200_updates_by_their_changes_have_the_same_bits(dtype, monkeypatch):
    """Also where NaNs change their payload and zeros their sign, and over gaps that no byte and no short can count."""
    monkeypatch.setattr("jrlhf.rollouts.processes.shared.BLOCK", 2**17)
    rng, size = np.random.default_rng(0), np.dtype(dtype).itemsize
    shapes = (3, 70_001), (7,), (), (0, 2)
    trained = [rng.integers(0, 256, (*shape, size), np.uint8).view(dtype)[..., 0] for shape in shapes]
    present, shares = [array.copy() for array in trained], []
    for update in range(200):
        new = [array.copy() for array in trained]
        for bits in integers(new):
            chosen = rng.random(bits.size) < rng.choice([0, 1e-5, 1e-3, 0.02, 0.9])
            bits[chosen] += rng.choice([1, -1, 2, 0], chosen.sum()).astype(bits.dtype)
            bits[rng.random(bits.size) < 1e-5] ^= bits.dtype.type(1 << (8 * size - 1))  # the sign
            bits[rng.random(bits.size) < 1e-5] = rng.integers(np.iinfo(bits.dtype).max)
        shared = SharedArrays.of(delta(trained, new))
        shares.append(shared.size / sum(array.nbytes for array in new))
        present, trained = patched(present, read(shared.path)), new
        for own, expected in zip(integers(present), integers(trained), strict=True):
            np.testing.assert_array_equal(own, expected, err_msg=f"update {update}")
        assert [(own.shape, own.dtype) for own in present] == [(own.shape, own.dtype) for own in trained]
    assert 2 * min(shares) < 0.01 and max(shares) < 2.5


def test_a_process_gets_changes_only_of_what_it_holds():
    """All weights go to a process that is new or missed an update, at each third one, and where changes are longer."""
    weights, updates = np.linspace(0, 1, 64_000, dtype=np.float32), list[WeightUpdate]()
    for number in range(8):
        weights[: 64_000 if number == 7 else number] *= -1
        updates.append(WeightUpdate.after(updates[-1] if updates else None, [weights], 3))
        np.testing.assert_array_equal(read(updates[-1].whole.path)[0], weights)
    assert [update.changes is not None for update in updates] == [False, True, True, False, True, True, False, False]
    for present, newest in [(None, 4), (2, 4), (4, 4), (5, 4), (2, 3), (3, 4)]:
        update, changes = updates[newest], (present, newest) == (3, 4)
        command, sent = Event("take", (update, None)).command([], None if present is None else updates[present])
        assert sent is (update.changes if changes else update.whole)
        expected = {"path": sent.path, "number": newest, "base": 3 if changes else None, "again": None}
        assert command == {"take": expected}
    stale: Any = SimpleNamespace(_present=(2, {}))
    with pytest.raises(ValueError, match="changes of update 3, and update 2 is here"):
        worker._Process.take(stale, Event("take", (updates[4], None)).command([], updates[3])[0]["take"])


# Stands for the process of a logical worker: answers with the number of commands so far, and fails as it is sentences.
STAND_IN = """
import os, signal
from jrlhf.run.child import channel_to_parent, receive, send
from jrlhf.run.files import decode, encode

def main(descriptor):
    channel, count = channel_to_parent(descriptor), 0
    setup = decode(receive(channel))
    answer = {"program": setup["program"]}
    while True:
        send(channel, encode({"answer": encode(answer)}).encode())
        command, count = decode(receive(channel)), count + 1
        first = command.get("once") and not os.path.exists(command["once"])
        if first:
            open(command["once"], "w").close()
        if first and "fault" in command:
            os.kill(os.getpid(), getattr(signal, command["fault"]))
        if command.get("always"):
            raise SystemExit("no memory")
        answer = count if "draws" not in command else os.getpid()
        if "arrays" in command:
            answer = "/proc/0/fd/0" if first else command["arrays"]
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    """A `Process` whose process is the stand-in, and the sentences that it tells."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    sentences: list[str] = []

    def make(repeat=lambda ask: True, **setup):
        setup = {"deadline": 20.0, "program": worker.program()} | setup
        start = partial(LocalWorker, "stand_in", os.environ)
        return Process((1, ""), setup, start, tmp_path / "worker.log", sentences.append, repeat)

    processes = []
    yield lambda *repeat, **setup: processes.append(make(*repeat, **setup)) or processes[-1], sentences
    for own in processes:
        own.close()


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_lost_process_is_replaced_and_its_successor_repeats_what_was_done(fault, process, tmp_path, monkeypatch):
    monkeypatch.setattr("jrlhf.rollouts.processes.process.LEAST", 1.0)
    make, sentences = process
    nothing, done = {"once": "", "fault": ""}, list[int]()  # done: the answers that a successor repeats
    own = make(lambda ask: [ask(nothing) for _ in done] == done, deadline=600.0)
    done += [own.ask(nothing)]
    done += [own.ask(nothing)]
    assert own.ask({"once": str(tmp_path / "failed"), "fault": fault}) == 3
    assert done == [1, 2] and own.ask({}) == 4  # nothing is repeated without a loss
    reason = "ended by SIGKILL" if fault == "SIGKILL" else "no answer within 1 s"
    assert (
        len(sentences) == 1
        and sentences[0].startswith(f"rollout process 1 was lost ({reason}")
        and "takes its place" in sentences[0]
    )
    del done[1:]
    os.kill(own._worker.pid, signal.SIGKILL)
    assert own.ask({}) == 2
    pid = own._worker.pid
    own.forget()
    with pytest.raises(RunFailure, match="does not repeat"):  # the same process does so, which has done two already
        own.ask({})
    assert own._worker.pid == pid
    assert alive(pid)
    own.close()
    assert gone(pid)


def test_on_a_full_disk_a_process_loses_its_log_alone():
    """Also in a Ray cluster, where the output comes with the answers."""
    start: Any = None
    Process((1, ""), {"deadline": 1.0}, start, Path("/dev/full"), print, bool)._write(b"a line")


@pytest.mark.parametrize("deadline", [600.0, 10.0])
def test_a_process_has_time_by_its_own_pace(deadline, tmp_path, monkeypatch):
    """The process is replaced by one that is as slow, until one has the time that a command takes."""
    clock, asked, sentences = [0.0], list[list[float]](), list[str]()

    def request(body: bytes, seconds: float, shared: object) -> dict[str, str]:
        number, needed = decode(body.decode()).get("number", 0), decode(body.decode()).get("seconds", 0.0)
        asked[number].append(seconds)
        clock[0] += min(needed, seconds)
        late = {"failure": "hang", "detail": f"no answer within {seconds:g} s"}
        return late if needed > seconds else {"answer": encode({"program": worker.program()})}

    monkeypatch.setattr("jrlhf.rollouts.processes.process.time", SimpleNamespace(monotonic=lambda: clock[0]))
    start: Any = lambda write: SimpleNamespace(request=request)  # noqa: E731
    done, repeat = list[Any](), lambda ask: all(ask(command) for command in done)
    own = Process((1, ""), {"deadline": deadline}, start, tmp_path / "log", sentences.append, repeat)
    prompts = [[(0, [5], 1, [[7]])]]
    commands = [
        ([[]], 0.25 * deadline, [600]),  # the first one compiles
        ([[]], 0.5, [600]),
        ([[]], 0.5, [10]),  # by the second one
        ([[]], 4, [10]),
        *[([[]], 0.5, [40])] * RECENT,
        ([[]], 0.5, [10]),  # 4 s are no longer recent
        (prompts, 5, [600]),  # prefill is another program
        (prompts, 0.5, [50]),
        (prompts, 0.5, [10]),
        ([prompts[0] * 2], 0.5, [600]),  # a wave of another size, too
        *([([[]], 15, [10, 20]), ([[]], 151, [150, 300]), ([[]], 400, [600])] * (deadline > 30)),
        *([(prompts, 25, [10, 20, 600]), (prompts, 25, [250])] * (deadline > 30)),
        ("forget", 0, []),
        (prompts, 0.75 * deadline, [600]),  # another share is like a new process
        (prompts, 0.5, [7.5 * deadline]),
        (prompts, 0.5, [10]),
    ]
    for number, (argument, seconds, allowances) in enumerate(commands, 1):
        asked[:] = [[] for _ in range(number + 1)]
        if argument == "forget":
            own.forget()
            done.clear()
            continue
        command = {"decode": argument, "number": number, "seconds": seconds}
        own.ask(command)
        done.append(command)
        assert asked[number] == [min(deadline, allowance) for allowance in allowances], number
    assert len(sentences) == (4 if deadline > 30 else 0)


def test_a_process_that_ends_between_its_answer_and_its_reading_is_replaced(process, tmp_path):
    make, sentences = process
    own, shared = make(), SharedArrays.of([np.arange(3)])
    opened = own.ask({"once": str(tmp_path / "failed"), "arrays": shared.path})
    np.testing.assert_array_equal(read(opened.path), [np.arange(3)])
    (sentence,) = sentences
    assert sentence.startswith("rollout process 1 was lost (ended before its arrays were read)")


def test_what_no_successor_mends_is_one_sentence(process):
    make, sentences = process
    with pytest.raises(RunFailure, match=r"3 times in a row .* 1 was lost \(left with exit code 1, .*'no memory'"):
        make().ask({"always": True})
    assert len(sentences) == 3
    with pytest.raises(UserError, match="another version of jrlhf or JAX than the trainer, .*: install one version"):
        make(program="of yesterday").ask({})
    pids = list[int]()
    other = make(lambda ask: all(ask({"draws": True}) == pid for pid in pids))
    pids.append(other.ask({"draws": True}))
    other._worker.kill()
    with pytest.raises(RunFailure, match="process 1 does not repeat what the one before it drew: nothing was learned"):
        other.ask({})


@pytest.mark.proof("runs")
def test_bits_of_ppo_do_not_depend_on_processes(tmp_path):
    options: dict[str, Any] = {"staleness": 2, "uncorrected": True, "update_steps": 3, "logical_workers": 2}
    expected = bits(run(config(tmp_path, "one", "ppo", **options)))
    for workers in (1, 2):
        path = run(config(tmp_path, f"with-{workers}", "ppo", [f"fleet.workers={workers}"], **options))
        assert bits(path) == expected


# An update this small has shorter changes than weights, in float32, too.
DELTA, SLOWLY = ("fleet.workers=2", "fleet.transfer=delta", "fleet.anchor_every=3"), ["grpo.actor.learning_rate=1e-4"]


@pytest.mark.proof("kills")
def test_bits_with_an_adapter_do_not_depend_on_processes(tmp_path, monkeypatch):
    """Nor on their kills. The base travels once, and at an update the adapter alone."""
    options = {"staleness": 2, "uncorrected": True, "update_steps": 3, "logical_workers": 2}
    one = run(config(tmp_path, "one", "grpo", ADAPTER, **options))
    sizes, put, decode, kills = [], ProcessWorkers.put, ProcessWorkers.decode, []

    def measured(self, weights):
        handle = put(self, weights)
        sizes.append(Path(handle.whole.path).stat().st_size)
        return handle

    def killing(self, prompts):
        if len(sizes) - len(kills) > 1:
            kills.append(self._processes[len(kills) % 2])
            kills[-1]._worker.interrupt()
        return decode(self, prompts)

    monkeypatch.setattr(ProcessWorkers, "put", measured)
    monkeypatch.setattr(ProcessWorkers, "decode", killing)
    path = run(config(tmp_path, "killed", "grpo", [*ADAPTER, *DELTA], **options))
    assert bits(path) == bits(one)
    adapter, whole = (one / file for file in ("adapter/adapter_model.safetensors", "model/model.safetensors"))
    assert len(kills) > 1 and max(sizes) < 1.5 * adapter.stat().st_size < whole.stat().st_size


@pytest.mark.proof("kills")
def test_bits_do_not_depend_on_kills_of_the_run(tmp_path):
    """The run is killed at random moments of its rollouts and resumed; nothing of it lives on."""
    options = {"staleness": 2, "uncorrected": True, "update_steps": 3, "logical_workers": 2}
    for name, workers in (("one", SLOWLY), ("killed", [*SLOWLY, *DELTA])):
        (tmp_path / f"{name}.yaml").write_text(config_yaml(config(tmp_path, name, "grpo", workers, **options)))
    Training("--config", tmp_path / "one.yaml", log=tmp_path / "log", programs=tmp_path / "programs").wait()
    path, rng, kills = tmp_path / "killed", random.Random(0), 0
    while True:
        arguments = ["--config", tmp_path / "killed.yaml", *(["--resume"] if path.exists() else [])]
        training = Training(*arguments, log=tmp_path / "log", programs=tmp_path / "programs")
        if kills == 6 or not training.reach(path, 3 + kills // 2):  # records: two of sft, four of grpo
            training.wait()
            break
        time.sleep(rng.random())
        workers = children(training.process.pid)
        training.stop(signal.SIGKILL)
        assert all(gone(pid) for pid in workers)
        kills += 1
    assert kills >= 3 and bits(path) == bits(tmp_path / "one")


@pytest.mark.parametrize(
    "address, latest, cause, sentence",
    [
        ("127.0.0.1:1", "", "", r"see that it runs at RAY_ADDRESS=127.0.0.1:1, which must be HOST:PORT \(.*refused"),
        ("127.0.0.1", "", "", r"see that it runs at RAY_ADDRESS=127.0.0.1, which must be HOST:PORT \("),
        ("ray://127.0.0.1:1", "", "", r"see that it runs at RAY_ADDRESS=ray://127.0.0.1:1, .* \(no cluster and more\)"),
        ("auto", "", "", r"start it with ray start --head, or .* \(no cluster and more\)"),
        ("auto", "127.0.0.1:1", "", r"start it with ray start --head, or .* another one \(.*refused"),
        (None, "127.0.0.1:1", "", r"start it with ray start --head, or .* another one \(.*refused"),
        (None, "", "AuthenticationError", r"set RAY_AUTH_MODE=token \(the cluster asks for a token\)"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence(address, latest, cause, sentence, monkeypatch, tmp_path):
    """Also if the latest cluster of this machine was killed, of which Ray still stores the address."""

    def init(*arguments, **options):
        raise ConnectionError("no cluster\nand more") from ValueError(cause)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if latest:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(latest)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"^fleet.engine=ray cannot join a Ray cluster: .*{sentence}"):
        with joined():
            pass


@pytest.mark.parametrize("gpus, free, total", [(0, 5, 8), (1, 3, 4), (2, 1, 2), (4, 0, 1)])
def test_a_cluster_has_room_for_as_many_processes_as_it_has_cpus_and_gpus(gpus, free, total, monkeypatch):
    ray = SimpleNamespace(available_resources=lambda: {"CPU": 5.0, "GPU": 3.0})
    ray.cluster_resources = lambda: {"CPU": 8.0, "GPU": 4.0}
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert (free_places(gpus), total_places(gpus)) == (free, total)


@pytest.mark.parametrize("before", [False, True])
def test_a_run_leaves_the_cluster_that_it_has_joined(before, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    calls = [*["init"] * before]
    ray = SimpleNamespace(is_initialized=lambda: bool(calls))
    ray.init, ray.shutdown = (lambda *_, name=name, **__: calls.append(name) for name in ("init", "shutdown"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RunFailure), joined():
        raise RunFailure("of the run")
    assert calls == (["init"] if before else ["init", "shutdown"])


def test_a_missing_ray_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("jrlhf.rollouts.processes.ray_worker.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package ray: pip install 'jrlhf\[ray\]'"):
        check_processes(FleetSection(workers=1, engine="ray"), "cpu", 1)


def test_of_new_processes_those_go_on_that_start(process):
    make, sentences = process
    processes = {(0, ""): make(), (1, ""): make(program="of yesterday")}
    good, other = processes.values()
    own: Any = object.__new__(ProcessWorkers)
    own._section, own._pause, own._process = FleetSection(), None, processes.__getitem__
    with ThreadPoolExecutor(2) as own._threads:
        new, reason = own._begin(list(processes))
        assert new == {(0, ""): good} and "another version of jrlhf" in reason and not sentences
        assert alive(good._worker.pid) and good.ask({}) == 1 and other._closed
        good.begin = other.begin = lambda: os.kill(os.getpid(), signal.SIGINT)
        own._pause, pid = None, good._worker.pid
        with pytest.raises(KeyboardInterrupt):
            ProcessWorkers._begin(own, list(processes))
    assert gone(pid)


def test_a_process_that_starts_while_it_is_closed_ends(process):
    make, _ = process
    own = make()
    start = own._start
    own._start = lambda write: own.close() or start(write)
    with pytest.raises(RunFailure, match="rollout process 1 was ended"):
        own.ask({})


@pytest.mark.proof("kills")
def test_an_update_that_does_not_arrive_ends_the_run(tmp_path, monkeypatch):
    put, handles = ProcessWorkers.put, []

    def stale(self, weights):
        handles.append(put(self, weights))
        return handles[0]

    monkeypatch.setattr(ProcessWorkers, "put", stale)
    with pytest.raises(RunFailure, match="the rollouts' weights of version 1 are not the trainer's"):
        run(config(tmp_path, "stale", "grpo", ["fleet.workers=1"], staleness=1, clock="wall"))
