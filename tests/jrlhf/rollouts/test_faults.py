"""Random faults of rollout processes, of this machine and of a Ray cluster: the bits of a run that none befell."""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jrlhf.rollouts.processes.process import LocalWorker, Process
from jrlhf.rollouts.processes.ray_worker import RayWorker
from jrlhf.rollouts.processes.workers import ProcessWorkers
from jrlhf.run.contents import FLEET
from jrlhf.run.files import write_atomic
from jrlhf.train import main
from tests.jrlhf.rollouts.conftest import lose
from tests.jrlhf.rollouts.test_processes import DELTA, SLOWLY
from tests.jrlhf.rollouts.test_runs import ADAPTER, config, run
from tests.support.processes import gone
from tests.support.runs import assert_same_run, stage_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

SEED = int(os.environ.get("PROOF_SEED", "0"))
FAULTS = 20  # of a run
# Seconds after a fault, or after a command, until it is done: 1 to notice a process that stopped (`send` shortens the
# deadline of a command), another 1 for it to say where, with Ray 5 for the transfer, and the rest for a successor to
# import JAX, to compile the programs of a tiny model and to repeat at most the commands of an iteration. On two cores
# with a load of 20 that took 11 s, and 24 s with Ray.
GOES_ON = 30.0
ASK, SEND = Process.ask, Process._send
LOGICAL = 3
OPTIONS: dict[str, Any] = {"staleness": 2, "uncorrected": True, "update_steps": 3, "logical_workers": LOGICAL}
SETTINGS = *SLOWLY, "rollout.slots=24", "grpo.iterations=10", "checkpoints.keep=2"


class Stopped(Exception):
    """Ends a run at a random moment."""


class Faults:
    """Befalls the processes of a run at random moments while they are asked, and stops the run twice.

    It also asks for more or fewer processes in the run's directory `path`.
    """

    def __init__(self, seed: str, path: Path):
        self._rng, self._lock = random.Random(seed), threading.Lock()  # processes are asked from threads
        self._path, self.workers = path, 0  # the number of processes that is wanted now
        self._requests, self._stops = 0, sorted(self._rng.sample(range(10, 35), 2))
        self.stopped = False  # whether the present part of the run is: two threads may come to a stop at once
        self.kinds, self.befallen = Counter[str](), set[int]()
        self._since = dict[int, float]()  # number of a process -> time of its last command or fault
        self.seconds = list[float]()  # from then until the command was done

    def ask(self, process: Any, *command: Any) -> Any:
        """Does what `Process.ask` does, and records how long it took after the last fault."""
        self._since[process._number] = time.monotonic()
        answer = ASK(process, *command)
        self.seconds.append(time.monotonic() - self._since[process._number])
        return answer

    def _scale(self) -> None:
        """Asks for one process more or less."""
        self.workers += self._rng.choice([step for step in (-1, 1) if 1 <= self.workers + step <= LOGICAL])
        self._path.mkdir(exist_ok=True)
        write_atomic(self._path / FLEET, f"workers: {self.workers}\n")

    def draw(self) -> tuple[str, float, float]:
        """Returns what befalls the next request, after how many seconds, and a number in [0, 1). Raises Stopped."""
        with self._lock:
            self._requests += 1
            if not self.stopped and self._stops and self._requests >= self._stops[0]:
                self.stopped, self._stops = True, self._stops[1:]
                raise Stopped
            kind, draw = self._rng.choice(["kill", "end", "stop", "pause"]), self._rng.random
            if draw() < 0.25:
                self._scale()
            if draw() > 0.4 or self.kinds.total() >= FAULTS:
                return "none", 0, 0
            return kind, self._rng.choice([0, draw() * 0.05]), draw()

    def send(self, process: Any, worker: LocalWorker | RayWorker, *command: Any) -> Any:
        """Does what `Process._send` does, with a fault before, while or after the process is at work."""
        kind, delay, number = self.draw()
        if kind == "none" or not (processes := pids(worker)):
            return SEND(process, worker, *command)
        pid, deadline = processes[int(number * len(processes))], process._deadline

        def befall() -> None:
            self._since[process._number] = time.monotonic()
            if kind == "end":
                return worker.interrupt()
            signal_to(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "pause":
                time.sleep(0.3 * number)
                signal_to(pid, signal.SIGCONT)

        self.kinds[kind] += 1
        self.befallen.add(pid)
        fault = threading.Timer(delay, befall)
        process._deadline = 1.0 if kind == "stop" else deadline
        fault.start()
        try:
            answer = SEND(process, worker, *command)
            fault.join()
            signal_to(pid, signal.SIGCONT)  # what stopped after it had answered
            return answer
        finally:
            fault.join()
            process._deadline = deadline


def signal_to(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def pids(worker: LocalWorker | RayWorker) -> list[int]:
    """The processes of a worker: with Ray, the actor's and the one that draws; none if they are lost."""
    if isinstance(worker, LocalWorker):
        return [worker.pid]
    import ray  # an extra
    from ray.exceptions import RayError

    try:
        return ray.get(worker._host.__ray_call__.remote(lambda host: [os.getpid(), host._worker.pid]), timeout=60)
    except RayError:
        return []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function: settings, options -> the path of a run in one process, which runs once."""

    @cache
    def path(settings: tuple[str, ...], on_new_weights: str) -> Path:
        options = {**OPTIONS, "on_new_weights": on_new_weights}
        return run(config(tmp_path_factory.mktemp("one"), "run", "grpo", settings, **options))

    return path


CASES = ("local", "keep_cache", ()), ("local", "finish", ()), ("ray", "prefill_again", ADAPTER)


@pytest.mark.proof("processes")
@pytest.mark.parametrize("engine, on_new_weights, adapter", CASES)
def test_bits_do_not_depend_on_faults_stops_workers_nor_transfers(
    engine, on_new_weights, adapter, tmp_path, monkeypatch, request, undisturbed, capsys
):
    """Processes are killed, ended, stopped beyond the deadline or for a moment, and replaced; some are added and some
    removed; the run is stopped, and goes on with another number of processes. Updates travel as changes."""
    expected = undisturbed((*SETTINGS, *adapter), on_new_weights)
    if engine == "ray":
        request.getfixturevalue("cluster")
    faults, rng = Faults(f"{SEED} {engine} {on_new_weights}", tmp_path / "run"), random.Random(SEED)
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("jrlhf.rollouts.processes.process.ATTEMPTS", FAULTS)  # a successor is befallen, too
    monkeypatch.setattr(Process, "_send", lambda process, *asked: faults.send(process, *asked))
    monkeypatch.setattr(Process, "ask", lambda process, *asked: faults.ask(process, *asked))
    counts, options = list[int](), {**OPTIONS, "on_new_weights": on_new_weights}
    while True:
        counts.append(rng.choice([count for count in (1, 2, 3) if count not in counts[-1:]]))
        fleet = *DELTA, f"fleet.workers={counts[-1]}", f"fleet.engine={engine}"
        again = config(tmp_path, "run", "grpo", [*SETTINGS, *adapter, *fleet], **options)
        faults.stopped, faults.workers = False, counts[-1]
        (tmp_path / "run" / FLEET).unlink(missing_ok=True)
        with contextlib.suppress(Stopped):
            main(again, resume=len(counts) > 1)
            break
    assert_same_run(tmp_path / "run", expected)
    sizes = [record["fleet/transfer_bytes"] for record in stage_of(tmp_path / "run", "grpo")]
    output = capsys.readouterr().out
    lost, scaled = (
        output.count("another one takes its place"),
        re.findall(r"warning: (\d) rollout .* in place of (\d)", output),
    )
    print(f"{lost} processes were lost of {dict(faults.kinds)}; numbers of processes: {counts}, {scaled}")
    print(f"a command was done {max(faults.seconds):.1f} s after the last fault, or earlier")
    assert max(faults.seconds) < GOES_ON and {new > old for new, old in scaled} == {False, True}
    assert faults.kinds.total() >= FAULTS and len(counts) == 3 and lost > FAULTS / 6
    assert 0 < min(filter(None, sizes)) < 0.9 * max(sizes) or on_new_weights == "finish"  # which skips updates
    assert signal.getsignal(signal.SIGTERM) == handler
    assert all(gone(pid) for pid in faults.befallen)


@pytest.mark.proof("processes")
@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_run_goes_on_at_once_without_a_machine_that_is_lost_and_with_one_that_is_added(
    tmp_path, monkeypatch, undisturbed, cluster, capsys
):
    """There are a machine for each process, and a deadline that nobody would wait for. Two machines are lost one after
    the other, between two commands and during one."""
    import ray  # an extra

    expected, decode = undisturbed(SETTINGS, "keep_cache"), ProcessWorkers.decode
    counts, seconds = list[int](), list[float]()
    ray.init("auto", log_to_driver=False)

    def added(count: int) -> subprocess.Popen[bytes]:
        """Returns a new machine when this number is there. On a busy one Ray's start gives up after 30 seconds."""
        machine = cluster()
        while sum(node["Alive"] for node in ray.nodes()) < count:
            machine = machine if machine.poll() is None else cluster()
            time.sleep(0.2)
        return machine

    machines = [added(2), added(3)]

    def disturbed(self, prompts):
        if counts[-1:] != [len(self._processes)]:
            counts.append(len(self._processes))
        if len(seconds) == 7:
            lose(machines.pop())
        elif len(seconds) == 11:
            threading.Timer(0.05, lose, [machines.pop()]).start()
        elif counts[2:] and not machines:
            machines.append(added(2))
            time.sleep(3.0)  # Ray tries once a second
        begin = time.monotonic()
        progress = decode(self, prompts)
        seconds.append(time.monotonic() - begin)
        return progress

    monkeypatch.setattr(ProcessWorkers, "decode", disturbed)
    fleet = *DELTA[1:], f"fleet.workers={LOGICAL}", "fleet.engine=ray", "fleet.deadline=600"
    path = run(config(tmp_path, "run", "grpo", [*SETTINGS, *fleet], **OPTIONS))
    assert_same_run(path, expected)
    print(
        f"a chunk was done in {max(seconds):.1f} s, or faster",
        *re.findall("; .*(?= rollout process)", capsys.readouterr().out),
    )
    assert max(seconds) < GOES_ON and counts == [3, 2, 1, 2]


@pytest.mark.proof("processes")
def test_a_process_that_ends_at_any_moment_of_its_start_leaves_nothing_in_the_cluster(cluster, monkeypatch):
    import ray  # an extra
    from ray._private.state import actors
    from ray.util.placement_group import PlacementGroup, placement_group_table

    ray.init("auto", log_to_driver=False)
    wait, moments = PlacementGroup.wait, ["before", "after", 0.0, 0.1, 1.0, 3.0]  # of the wait, or seconds
    for moment in moments:
        worker = RayWorker({}, lambda output: None, gpus=0)

        def waiting(group: Any, seconds: float, moment=moment, worker=worker) -> bool:
            if moment == "before":
                worker.interrupt()
            reserved = wait(group, seconds)
            if moment == "after":
                worker.interrupt()
            elif isinstance(moment, float):
                threading.Timer(moment, worker.interrupt).start()
            return reserved

        monkeypatch.setattr(PlacementGroup, "wait", waiting)
        begin = time.monotonic()
        assert "failure" in worker.request(b"{}", 60.0) and time.monotonic() - begin < 30
        live = [actor["ClassName"] for actor in actors().values() if actor["State"] != "DEAD"]
        states = {group["state"] for group in placement_group_table().values()}
        assert not live and states <= {"REMOVED"}, moment
