"""The wall clock: arrival decides, nobody waits for a slow worker, and no prompt is lost or drawn twice."""

import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.config import config_yaml
from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.models.generation.continuous import Prompt, RowProgress
from jrlhf.planning.resolve import select_resources
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.processes.workers import ProcessWorkers
from jrlhf.rollouts.schedule import Rules
from jrlhf.rollouts.state import Collected
from jrlhf.train import main
from tests.jrlhf.rollouts.test_faults import pids, signal_to
from tests.jrlhf.rollouts.test_runs import ADAPTER, config, run
from tests.support.fleets import NO_RECOMPUTE
from tests.support.processes import children, eventually, gone
from tests.support.runs import ROOT, Training, resumed, stage_of

SEED = int(os.environ.get("PROOF_SEED", "0"))
GROUPS, SAMPLES, LIMIT, CHUNK = 3, 2, 12, 4
RULES = Rules(GROUPS, 2, 1)


class Worker:
    """Stands for a process with a logical worker. As the token that it draws it gives the version that it draws with.

    gate: is called before a chunk.
    """

    own_devices = True

    def __init__(self, gate: Callable[[], object] = lambda: None):
        self.gate, self.rows, self.version, self.started = gate, dict[int, list[int]](), -1, Counter[int]()

    @property
    def rooms(self) -> list[int]:
        return [4 - len(self.rows) // SAMPLES]

    @property
    def running(self) -> int:
        return len(self.rows)

    def fresh(self):
        return [{}]

    def states(self):
        return [{str(row): np.array(tokens, np.int32) for row, tokens in self.rows.items()}]

    def drawn(self):
        return {}

    def start(self, states):
        self.rows = {int(row): np.array(tokens).tolist() for row, tokens in states[0].items()}

    def put(self, weights):
        return int(weights[0]["version"][0])

    def take(self, handle, again):
        self.version = handle
        return []

    def identities(self):
        return []

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[RowProgress]:
        self.gate()
        for prompt in prompts[0]:
            self.started[prompt.number] += 1
            self.rows |= {prompt.number * SAMPLES + sample: [] for sample in range(SAMPLES)}
        progress = []
        for row, tokens in list(self.rows.items()):
            start, length = len(tokens), 1 + 5 * row % LIMIT
            end = min(start + CHUNK, length)
            tokens += [self.version] * (end - start)
            response = (np.array(tokens, np.int32), np.zeros(end, np.float32), True) if end == length else None
            progress.append(RowProgress(row, start, end, response))
            if response:
                del self.rows[row]
        return progress

    def metrics(self):
        return {}

    def close(self):
        pass


def prompt(number: int) -> Prompt:
    return Prompt(number, np.zeros(1, np.int32), 1, np.zeros(1))


def fleet_of(*workers: Any) -> Any:
    mesh = make_mesh(devices=jax.devices()[:1])
    options: Any = {"samples": SAMPLES, "limit": LIMIT, "clock": "wall", "recompute": NO_RECOMPUTE}
    return Fleet(workers, mesh, RULES, prompt, lambda group: None, **options)


def weights(version: int) -> Any:
    return {"version": jnp.array([version])}, {}


def iterate(fleet: Any, version: int) -> Collected:
    """An iteration: the batch that version `version` learns from."""
    batch = fleet.collect()
    fleet.publish(weights(version + 1), {})
    return batch


def check(batch: Collected, version: int) -> None:
    """Each token has the version that drew it, and none is of later weights than those that learn."""
    rows = batch.rows
    assert batch.version == version and len(batch.numbers) == GROUPS
    for tokens, versions, length in zip(rows.tokens, rows.versions, rows.lengths, strict=True):
        np.testing.assert_array_equal(versions[:length], tokens[:length])
        assert (np.diff(versions[:length]) >= 0).all() and versions[:length].max() <= version


def test_the_trainer_does_not_wait_for_a_worker_that_hangs():
    """Its groups are learned from when they arrive, each once, and the versions of their tokens are those that drew."""
    opened = threading.Event()
    slow, fast = Worker(lambda: opened.wait(30)), Worker()
    fleet = fleet_of(slow, fast)
    fleet.start(fleet.fresh(weights(0), {}), weights(0), {})
    trained, closed = [], 6
    for version in range(closed):
        batch = iterate(fleet, version)
        check(batch, version)
        trained += batch.numbers.tolist()
        assert not set(trained) & set(slow.started) and not opened.is_set()
    opened.set()
    ages = set()
    for version in range(closed, 14):
        batch = iterate(fleet, version)
        check(batch, version)
        trained += batch.numbers.tolist()
        for row, length in zip(batch.rows.versions, batch.rows.lengths, strict=True):
            ages |= set((version - row[:length]).tolist())
        assert fleet._count <= GROUPS * (version + 1 + RULES.staleness + 1)  # the admission rule
    assert fleet.state() is not None  # for which all chunks end
    under_way = set(fleet._groups)
    assert max(ages) >= closed and Counter(trained) == Counter(set(range(fleet._count)) - under_way)
    assert slow.started + fast.started == Counter(range(fleet._count))
    assert 0 < slow.started.total() < fast.started.total()
    fleet.close()


def test_a_state_has_what_every_worker_drew_and_a_resumed_run_goes_on_from_it():
    workers = Worker(), Worker()
    fleet = fleet_of(*workers)
    fleet.start(fleet.fresh(weights(0), {}), weights(0), {})
    trained = [number for version in range(5) for number in iterate(fleet, version).numbers.tolist()]
    state = jax.device_get(fleet.state())
    rows = {int(row): tokens.tolist() for own in state.decoding for row, tokens in own.items()}
    assert {row // SAMPLES for row in rows} == {
        number for number, group in fleet._groups.items() if not group.complete
    } and int(state.times.version) == 5
    fleet.close()
    resumed = fleet_of(*(Worker() for _ in workers))
    resumed.start(state, weights(5), {})
    for version in range(5, 12):
        batch = iterate(resumed, version)
        check(batch, version)
        trained += batch.numbers.tolist()
    under_way = set(resumed._groups)
    assert Counter(trained) == Counter(set(range(resumed._count)) - under_way)
    resumed.close()


def test_a_worker_that_fails_ends_the_run():
    def fail():
        raise RuntimeError("lost three times")

    fleet = fleet_of(Worker(fail), Worker())
    fleet.start(fleet.fresh(weights(0), {}), weights(0), {})
    with pytest.raises(RuntimeError, match="lost three times"):
        for version in range(9):
            iterate(fleet, version)
    fleet.close()


OPTIONS: dict[str, Any] = {"staleness": 2, "uncorrected": True, "clock": "wall"}
PROCESSES = "fleet.workers=2", "grpo.iterations=6", "grpo.save_every=2", "checkpoints.keep=3"


@pytest.fixture
def batches(monkeypatch):
    """Numbers and versions of the groups that a run collects, and the newest version then."""
    collected, collect = list[Collected](), Fleet.collect
    monkeypatch.setattr(Fleet, "collect", lambda self: collected.append(collect(self)) or collected[-1])
    return collected


def check_run(path, batches: list[Collected], iterations: int) -> None:
    """Each iteration learned from a batch of its own, tokens beyond the bound apart, and drew as recorded."""
    numbers = [number for batch in batches for number in batch.numbers.tolist()]
    assert len(set(numbers)) == len(numbers) and [batch.version for batch in batches] == list(range(iterations))
    records = stage_of(path, "grpo")
    assert [record["training/global_step"] for record in records] == list(range(1, iterations + 1))
    assert sum(record["async/recomputed_tokens"] for record in records) > 0
    for record, batch in zip(records, batches, strict=True):
        lengths = batch.rows.lengths
        ages = np.concatenate([batch.version - row[:n] for row, n in zip(batch.rows.versions, lengths, strict=True)])
        assert ages.min() >= 0 and record["training/off_policy/token_staleness/max"] == ages.max()
        assert record.get("async/logprob_distance", 0) < 1e-4
        assert record["perf/trainer_wait_seconds"] >= 0 <= record["perf/rollouts_wait_seconds"]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.proof("kills")
def test_a_run_with_lost_processes_learns_from_each_group_once_and_resumes(tmp_path, monkeypatch, batches):
    decode, chunks = ProcessWorkers.decode, Counter[int]()

    def killing(self, prompts):
        chunks[self._processes[0]._number] += 1
        if chunks.total() in (7, 15):
            self._processes[0]._worker.interrupt()
        return decode(self, prompts)

    monkeypatch.setattr(ProcessWorkers, "decode", killing)
    whole = config(tmp_path, "wall", "grpo", [*PROCESSES, *ADAPTER], on_new_weights="prefill_again", **OPTIONS)
    path = run(whole)
    check_run(path, batches, 6)
    assert set(chunks) == {0, 1}
    del batches[4:]
    resumed(whole, 6)
    check_run(path, batches, 6)


@pytest.mark.usefixtures("quick_compilation", "cluster")
@pytest.mark.proof("runs")
def test_on_a_ray_cluster_nobody_waits_for_a_stopped_process_and_lost_ones_are_replaced(
    tmp_path, monkeypatch, batches, capsys
):
    """One process is stopped for two updates. The actor of the other one is killed, then the process itself."""
    decode, chunks, stops = ProcessWorkers.decode, Counter[int](), list[threading.Thread]()

    def stop(pid: int, until: int, others: int) -> None:
        signal_to(pid, signal.SIGSTOP)
        arrived = eventually(lambda: len(batches) >= until, 300)
        signal_to(pid, signal.SIGCONT)
        waited.append(not arrived or chunks[1] == others)

    def disturbed(self, prompts):
        process, waited_for = self._processes[0], len(batches) + 2
        chunks[process._number] += 1
        if process._number == 0 and not stops and 7 <= waited_for <= 8:  # between the checkpoints, which wait
            stops.append(threading.Thread(target=stop, args=(pids(process._worker)[1], waited_for, chunks[1])))
            stops[0].start()
        elif process._number == 1 and chunks[1] in (3, 6):
            os.kill(pids(process._worker)[chunks[1] == 6], signal.SIGKILL)
        return decode(self, prompts)

    monkeypatch.setattr(ProcessWorkers, "decode", disturbed)
    monkeypatch.setattr("jrlhf.rollouts.processes.process.LEAST", 300.0)  # the process that is stopped is not lost
    waited, own = list[bool](), ("fleet.engine=ray", "grpo.iterations=8", "grpo.save_every=4")
    whole = config(tmp_path, "wall", "grpo", [*PROCESSES, *own], **OPTIONS)
    path = run(whole)
    check_run(path, batches, 8)
    stops[0].join()
    assert waited == [False] and capsys.readouterr().out.count("another one takes its place") == 2
    del batches[4:]
    resumed(whole, 8)
    check_run(path, batches, 8)


# `jrlhf.train` that appends each batch to the file BATCHES, before anything learns from it.
RECORDER = """
import os, pickle, sys
from jrlhf.rollouts.fleet import Fleet
from jrlhf.train import cli
collect = Fleet.collect

def recorded(self):
    batch = collect(self)
    with open(os.environ["BATCHES"], "ab", buffering=0) as file:
        file.write(pickle.dumps(batch))
    return batch

Fleet.collect = recorded
sys.exit(cli())
"""


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.proof("runs")
def test_a_killed_run_goes_on_with_the_groups_of_its_checkpoint(tmp_path, monkeypatch, batches):
    """With all its processes, at random moments. The groups of all batches and those under way are all that started."""
    fleets, start, file = list[Fleet](), Fleet.start, tmp_path / "batches"
    whole = config(tmp_path, "wall", "grpo", PROCESSES, **OPTIONS)
    (tmp_path / "wall.yaml").write_text(config_yaml(whole))
    (tmp_path / "recorder.py").write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("BATCHES", str(file))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # as here, where the run ends
    path, rng, drawn = tmp_path / "wall", random.Random(SEED), list[Collected]()
    for step in (2, 4):
        arguments = ["--config", tmp_path / "wall.yaml", *(["--resume"] if path.exists() else [])]
        training = Training(*arguments, log=tmp_path / "log", programs=tmp_path / "programs", module="recorder")
        assert eventually((path / "checkpoints" / "grpo" / str(step)).exists, 300)
        time.sleep(0.2 * rng.random())
        workers = children(training.process.pid)
        training.stop(signal.SIGKILL)
        assert len(workers) >= 2 and all(gone(pid) for pid in workers)
    monkeypatch.setattr(Fleet, "start", lambda fleet, *state: fleets.append(fleet) or start(fleet, *state))
    main(whole, resume=True)
    with open(file, "rb") as stored:
        while stored.tell() < file.stat().st_size:
            drawn.append(pickle.load(stored))
    newest = {batch.version: batch for batch in [*drawn, *batches]}  # the older ones are of steps that were lost
    check_run(path, [newest[version] for version in sorted(newest)], 6)
    (fleet,), trained = fleets, {number for batch in newest.values() for number in batch.numbers.tolist()}
    under_way = set(fleet._groups)
    assert len(batches) < 6 and trained | under_way == set(range(fleet._count)) and not trained & under_way


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.proof("kills")
def test_a_run_on_slices_learns_from_each_group_once_and_resumes(tmp_path, batches, capsys):
    whole = config(tmp_path, "wall", **OPTIONS)
    path = run(whole)
    check_run(path, batches, 4)
    assert "warning: grpo.asynchronous.clock=wall: which rows form a batch" in capsys.readouterr().out
    assert "wall clock: no run repeats" in (path / "report.html").read_text()
    del batches[3:]
    resumed(whole, 4)
    check_run(path, batches, 4)


def test_what_the_wall_clock_cannot_do_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="clock=wall takes new weights between two chunks, and on_new_weights=finish"):
        select_resources(config(tmp_path, "refused", on_new_weights="finish", **OPTIONS))
    with pytest.raises(UserError, match="grpo.asynchronous.update_steps=9 has no effect with grpo.asynchronous.clock"):
        select_resources(config(tmp_path, "refused", update_steps=9, **OPTIONS))
