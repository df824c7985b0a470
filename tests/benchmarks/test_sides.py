"""Processes of a comparison compute in turn, and can neither hang nor fail unseen. Modules of a few lines play them."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import sides
from benchmarks.compare import OURS, SMALL, alternate
from benchmarks.peers import common
from benchmarks.peers.common import Job, Repetitions
from benchmarks.sides import CompareError, Side, environment
from tests.support.processes import gone


def job(directory: Path, **fields) -> Job:
    return replace(Job("check", str(directory), SMALL, batch=2, prompt=4, response=3, warmup=1, repeats=2), **fields)


def test_what_others_take_is_what_is_busy_less_our_own(monkeypatch: pytest.MonkeyPatch):
    # user nice system idle iowait irq softirq steal guest: idle and waiting are not busy, guest is in user already
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO("cpu 500 100 200 9000 700 10 20 70 55\ncpu0 1\n"))
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    monkeypatch.setattr(os, "times", lambda: (2.0, 0.5, 0.25, 0.25, 99.0))
    assert common.others() == pytest.approx((500 + 100 + 200 + 10 + 20 + 70) / 100 - 3.0)

    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("builtins.open", missing)  # without /proc nothing is dropped
    assert common.others() == 0


def test_repetitions_are_what_lies_between_turns_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = [0.0, 0.0]  # time, and what others computed until then
    monkeypatch.setattr(common, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(common, "others", lambda: clock[1])

    def others_compute():
        clock[:] = clock[0] + 100, clock[1] + 200

    monkeypatch.setattr(common, "wait_for_turn", others_compute)
    repetitions = Repetitions(job(tmp_path, in_turn=True))  # one does not count, two do
    for seconds, disturbed in ((9, 5), (1, 0), (2, 0.5)):
        repetitions.next()
        clock[:] = clock[0] + seconds, clock[1] + disturbed
    repetitions.next()
    assert repetitions.result() == {"seconds": [1, 2], "others": [0, 0.5]}
    assert clock == [412.0, 805.5]  # four turns were waited for


@pytest.fixture
def fake(tmp_path: Path):
    """Makes a side whose module is this source."""

    def make(source: str) -> Side:
        package = tmp_path / "benchmarks" / "peers"
        package.mkdir(parents=True, exist_ok=True)
        (package / "fake.py").write_text(source)
        return Side(Path(sys.executable), "fake", tmp_path)

    return make


def test_what_would_tune_a_process_is_not_inherited(fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "XLA_FLAGS", "NPROC", "MALLOC_ARENA_MAX", "JAX_ENABLE_X64"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UNRELATED", "1")
    tell = fake("import json, os, sys\nprint(json.dumps([json.loads(sys.argv[1])['variant'], dict(os.environ)]))")
    variants = [tell.run(job(tmp_path, variant=name)) for name in ("gc", "gc, memory kept")]
    (plain, bare), (tuned_variant, tuned) = variants
    assert bare["UNRELATED"] == "1"
    assert not [name for name in bare if name.startswith(("OMP_", "MKL_", "XLA_", "NPROC", "MALLOC_", "JAX_ENABLE"))]
    assert plain == tuned_variant == "gc"
    thresholds = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
    assert {name: tuned[name] for name in tuned if name not in bare} == thresholds


def test_a_process_that_fails_is_one_sentence(fake, tmp_path: Path):
    with pytest.raises(CompareError, match="fake ppo gc failed with exit code 1: RuntimeError: no such cache"):
        fake("raise RuntimeError('no such cache')").run(job(tmp_path, case="ppo", variant="gc"))


def test_a_process_that_hangs_is_ended_with_all_that_it_started(fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hang = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    monkeypatch.setattr(sides, "TURN_SECONDS", 0.7)
    with pytest.raises(CompareError, match="fake check took longer than 1 seconds"):
        fake(hang).run(job(tmp_path))
    assert gone(int((tmp_path / "child").read_text()))


TAKES_TURNS = """
import contextlib, io, json, os, sys, time
from pathlib import Path
from benchmarks.peers.common import Job, timed

job = Job.from_json(sys.argv[1])

def step(rows):
    with open(Path(job.directory) / "log", "a") as log:
        print(job.variant, "begins", os.getpid(), file=log, flush=True)
        time.sleep(0.02)
        print(job.variant, "ends", os.getpid(), file=log)

print("no newline", end="", flush=True)
with contextlib.redirect_stdout(io.StringIO()):
    result = timed(job, step)
print("\\n" + json.dumps(result | {"variant": job.variant, "versions": {"pid": os.getpid()}, "peak_bytes": 1}))
"""


@pytest.fixture
def takes_turns(fake, tmp_path: Path) -> Side:
    """A side that writes down when it computes."""
    side = fake(TAKES_TURNS)
    (tmp_path / "benchmarks" / "peers" / "common.py").symlink_to(common.__file__)
    return side


def test_rounds_begin_with_one_side_and_the_other(takes_turns: Side, tmp_path: Path):
    task, versions = job(tmp_path), {}
    rounds = alternate(takes_turns, takes_turns, task, ("one",), 2, True, versions)
    assert [list(round_) for round_ in rounds] == [[OURS, "one"], ["one", OURS]]
    assert all(len(repeats.kept) == task.repeats for round_ in rounds for repeats in round_.values())
    began = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()[::2]]
    assert began == ["begins", "one"] * task.steps + ["one", "begins"] * task.steps
    assert versions["ours"]["pid"] != versions["peer"]["pid"]


def test_an_environment_is_made_once_and_again_for_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands, codes = [], [0, 1, 0]

    def pip(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, codes[len(commands) - 1])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sides.venv, "create", lambda path, **options: path.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(sides.subprocess, "run", pip)
    python = tmp_path / "jrlhf" / "peers" / "some" / "bin" / "python"
    assert environment("some", ("a==1", "b==2")) == python == environment("some", ("a==1", "b==2"))
    assert [command[-2:] for command in commands] == [["a==1", "b==2"]] and commands[0][0] == str(python)
    with pytest.raises(CompareError, match="pip could not install torch==2 into"):
        environment("some", ("torch==2",))
    environment("some", ("torch==2",))  # what failed is not taken for complete
    assert len(commands) == 3
