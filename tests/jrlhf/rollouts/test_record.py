"""The record of what logical workers did: any processes repeat it for any shares, and nobody does anything twice."""

import random
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.config.stages import FleetSection
from jrlhf.errors import RunFailure
from jrlhf.models.generation.continuous import Prompt
from jrlhf.rollouts.processes import worker
from jrlhf.rollouts.processes.ray_worker import NO_ROOM
from jrlhf.rollouts.processes.record import Event, EventRecord
from jrlhf.rollouts.processes.shared import SharedArrays, WeightUpdate, patched, read
from jrlhf.rollouts.processes.workers import ProcessWorkers
from jrlhf.run.files import decode, encode

SIZE = 4_000  # of weights of which an update changes few


class Machine:
    """Stands for a process. What its workers draw depends on all that they did, on weights, and on its `kind`."""

    def __init__(self, kind: int = 0):
        self.kind, self.commands = kind, list[str]()
        self.changed: list[int | None] = []  # updates whose changes were sent; None: whole weights were
        self.workers, self.base_weights, self.number, self.weights = list[int](), 0, -1, list[np.ndarray]()

    def ask(self, command: Mapping[str, Any], shared: SharedArrays | None = None) -> Any:
        ((name, argument),) = decode(encode(command)).items()
        assert (shared is not None) == (name in ("start", "base", "take")), "a command names one file, and brings it"
        self.commands.append(name)
        return decode(encode(getattr(self, name)(argument)))

    def start(self, path: str) -> Any:
        self.workers = [int(state) for state in read(path)]
        self.weights, self.number = [], -1
        return self._answers()

    def base(self, path: str) -> list[Any]:
        self.base_weights = _hash(read(path)[0].tobytes())
        return []

    def take(self, argument: Mapping[str, Any]) -> Any:
        assert argument["base"] in (None, self.number), "changes of other weights"
        self.changed.append(argument["base"])
        before, arrays = self._identity, read(argument["path"])
        self.weights = arrays if argument["base"] is None else patched(self.weights, arrays)
        self.number = argument["number"]
        if argument["again"]:
            self._draw([("again", len(argument["again"]))] * len(self.workers))
        return [(before, self._identity)] * len(self.workers)

    def decode(self, prompts: Any) -> Any:
        self._draw([[row[0] for row in own] for own in prompts])
        return self._answers()

    def identities(self, argument: None) -> Any:
        return [self._identity]

    def states(self, argument: None) -> str:
        self.file = SharedArrays.of([np.uint32(state) for state in self.workers])
        return self.file.path

    @property
    def _identity(self) -> int | None:
        content = [self.base_weights, *(_hash(array.tobytes()) for array in self.weights)]
        return _hash(encode(content).encode()) if self.weights else None

    def _draw(self, happened: Sequence[Any]) -> None:
        parts = zip(self.workers, happened, strict=True)
        self.workers = [_hash(encode([own, new, self._identity, self.kind]).encode()) for own, new in parts]

    def _answers(self) -> Any:
        return [{"progress": [(own, 0, own % 7, None)], "room": own % 5, "running": own % 3} for own in self.workers]


def _hash(content: bytes) -> int:
    return zlib.crc32(content)


def updates(rng: random.Random, *, adapter: bool) -> Iterator[WeightUpdate]:
    """Yields updates. Now and then one is skipped, so that the next one travels whole."""
    arrays, base = np.zeros(SIZE, np.float32), SharedArrays.of([np.ones(3)]) if adapter else None
    update: WeightUpdate | None = None
    while True:
        for _ in range(rng.choice([1, 1, 2])):
            arrays[rng.randrange(SIZE)] += 1
            update = WeightUpdate.after(update, [arrays], 4, base)
        assert update is not None
        yield update


def prompts(rng: random.Random, count: int) -> list[list[Prompt]]:
    numbers = [[rng.randrange(1000) for _ in range(rng.choice([0, 0, 1, 2]))] for _ in range(count)]
    return [[Prompt(number, np.arange(2), 2, np.zeros((1, 2), np.uint32)) for number in own] for own in numbers]


class History:
    """Random events of logical workers, which one process has done, and their record."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.count, self.process, self.record = self.rng.randint(1, 5), Machine(), EventRecord()
        adapter = self.rng.random() < 0.5
        self.updates = updates(self.rng, adapter=adapter)
        self.add(Event("start", [[np.uint32(self.rng.randrange(100))] for _ in range(self.count)]))
        first = next(self.updates)
        if adapter:
            self.add(Event("base", first.base))
        self.add(Event("take", (first, None)))

    def event(self) -> Event:
        entering = prompts(self.rng, self.count)
        if self.rng.random() < 0.6:
            return Event("decode", entering)
        again = {prompt.number: prompt for own in entering for prompt in own} if self.rng.random() < 0.5 else None
        return Event("take", (next(self.updates), again))

    def add(self, event: Event) -> list[Any]:
        answers = self.process.ask(*event.command(range(self.count), self.record.present))
        self.record.add(event, answers)
        return answers

    def record_states(self) -> None:
        self.record.begin_from([[np.array(state, np.uint32)] for state in self.process.workers])
        self.process.changed = [None]  # who repeats this gets whole weights first, and then what was sent before

    def shares(self) -> list[list[int]]:
        """A random division of the workers over processes, some of which may have no share."""
        places = [self.rng.randrange(self.count) for _ in range(self.count)]
        return [[own for own in range(self.count) if places[own] == place] for place in range(self.count)]


@pytest.mark.parametrize("seed", range(18))
def test_any_processes_with_any_shares_come_to_the_present_and_go_on(seed):
    """New ones, and those that did something else before. What is read is not repeated."""
    history, processes = History(seed), list[Machine]()
    for _ in range(12):
        if history.rng.random() < 0.3:
            history.record_states()
        for _ in range(history.rng.randint(0, 4)):
            history.add(history.event())
        shares = history.shares()
        processes = (history.rng.sample(processes, k=len(processes) // 2) + [Machine() for _ in shares])[: len(shares)]
        present, event = history.record.present, history.event()
        history.process.ask(*Event("identities").command([], present))
        history.process.ask(*Event("states").command([], present))
        for share, process in zip(shares, processes, strict=True):
            process.commands, process.changed = [], []
            assert history.record.repeat(share, process.ask)
            assert process.workers == [history.process.workers[own] for own in share] or not share
            assert not {"identities", "states"} & set(process.commands)
            assert process.commands[:1] in ((["start"], ["base"]) if share else ([],))
            assert process.changed == history.process.changed or not share
        expected = history.add(event)
        for share, process in zip(shares, processes, strict=True):
            if share:
                assert process.ask(*event.command(share, present)) == [expected[own] for own in share]


@pytest.mark.parametrize("seed", range(10))
def test_an_answer_that_differs_from_the_recorded_one_is_noticed_at_once(seed):
    history = History(seed)
    for _ in range(3):
        history.add(history.event())
    history.record_states()
    first = len([name for name in history.process.commands if name == "base"]) + 2  # these answers are not known
    for _ in range(5):
        history.add(history.event())
    share = history.rng.sample(range(history.count), history.rng.randint(1, history.count))
    for fault in range(first + 5):  # number of the command whose answer is wrong for one worker
        process = Machine()

        def ask(command: Any, shared: Any, fault: int = fault, process: Machine = process) -> Any:
            answers, own = process.ask(command, shared), history.rng.randrange(len(share))
            if len(process.commands) == fault + 1 and answers:
                answers[own] = {**answers[own], "room": -1} if isinstance(answers[own], dict) else [None, None]
            return answers

        assert history.record.repeat(share, ask) is (fault < first)
        assert len(process.commands) == (first + 5 if fault < first else fault + 1)


class Started:
    """Stands for a `LocalWorker` that has started: passes requests to a machine, unless a fault befalls it."""

    def __init__(self, fault: Any, machine: Machine):
        self._fault, self._machine, self.begun = fault, machine, False

    def request(self, body: bytes, seconds: float, shared: SharedArrays | None) -> Mapping[str, Any]:
        begun, self.begun = self.begun, True
        kind = self._fault(begun)
        if kind == "no room":
            return {"failure": NO_ROOM, "detail": "no machine has room"}
        if kind == "before":
            return {"failure": "crash", "detail": "before it did anything"}
        command = decode(body)
        answer = self._machine.ask(command, shared) if begun else {"program": worker.program()}
        if kind == "after":
            return {"failure": "hang", "detail": "after it did it"}
        return {"shared": SharedArrays.opened(answer)} if isinstance(answer, str) else {"answer": encode(answer)}

    def kill(self) -> None:
        pass


@pytest.fixture
def workers_of(tmp_path, monkeypatch):
    """A function: number of logical workers, of processes -> `ProcessWorkers` whose processes are machines.

    fault: whether a process has had a request -> what happens at the next one. machine: returns the next process's.
    """

    def make(count: int, processes: int = 1, fault: Any = lambda begun: "", machine: Any = Machine) -> Any:
        own: Any = object.__new__(ProcessWorkers)
        started = lambda module, environment, log: Started(fault, machine())  # noqa: E731
        monkeypatch.setattr("jrlhf.rollouts.processes.workers.LocalWorker", started)
        own._count, own._folder, own._gpus, own._setup = count, tmp_path, 0, {"deadline": 1e3}
        own._shardings, own._treedef = [jax.sharding.SingleDeviceSharding(jax.devices()[0])], jax.tree.structure(0)
        own._section, own._anchor_every = FleetSection(), 4
        own._record, own._wish, own._pause, own._refusal, own.told = EventRecord(), (), None, "", []
        own._tell, own._transfers, own._base, own._newest = own.told.append, [], None, None
        own._threads, own.asked = ThreadPoolExecutor(count), processes
        own._asked = lambda: [(number, "") for number in range(own.asked)]
        own._processes = [own._process(place) for place in own._asked()]
        return own

    return make


def weights(number: int, *, adapter: bool) -> Any:
    trained = {"w": jnp.zeros(SIZE).at[:number].set(number)}
    return ({"w": jnp.ones(3)}, trained) if adapter else (trained, {})


def lived(own: Any, seed: int, scaling: bool) -> list[Any]:
    """What a fleet sees of these workers in a random life. scaling: the number of processes changes, too."""
    rng = random.Random(seed)
    adapter, number, seen = rng.random() < 0.5, 0, list[Any]()
    note = lambda what: seen.append(decode(encode([what, own.rooms, own.running])))  # noqa: E731
    own.start([np.uint32(own_start) for own_start in range(own._count)])
    note(own.take(own.put(weights(0, adapter=adapter)), None))
    for _ in range(25):
        entering, kind = prompts(rng, own._count), rng.choice(["decode"] * 3 + ["take", "identities", "states"])
        asked = rng.randint(1, own._count)
        if kind == "decode":
            note([(row.row, row.start, row.end) for row in own.decode(entering)])
        elif kind == "take":
            number += rng.choice([1, 1, 2])
            for skipped in range(rng.choice([0, 0, 1])):
                own.put(weights(number - skipped, adapter=adapter))
            again = {prompt.number: prompt for rows in entering for prompt in rows}
            note(own.take(own.put(weights(number, adapter=adapter)), again if rng.random() < 0.5 else None))
        elif kind == "identities":
            note(sorted(set(own.identities())))
        else:
            own.asked, own._pause = asked if scaling else own.asked, None
            note([int(state) for state in own.states()])
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_a_fleet_sees_nothing_of_faults_nor_of_the_number_of_processes(seed, workers_of, monkeypatch):
    """Processes are lost before and after they did something, at their start, or find no machine: alone or together."""
    monkeypatch.setattr("jrlhf.rollouts.processes.process.ATTEMPTS", 50)
    count, rng = random.Random(seed).randint(1, 5), random.Random(f"faults {seed}")
    expected, faults = lived(workers_of(count), seed, scaling=False), list[str]()

    def fault(begun: bool) -> str:
        befalls = rng.random() < 0.08 or len(faults) == 9
        faults.append(rng.choice(["before", "after"] if begun else ["no room"]) if befalls else "")
        return faults[-1]

    own = workers_of(count, rng.randint(1, count), fault)
    assert lived(own, seed, scaling=True) == expected
    assert any(faults)


@pytest.mark.parametrize("lost", ["before", "no room"])
def test_processes_that_draw_otherwise_than_those_before_end_the_run(lost, workers_of):
    """A successor of another kind, or the process of another kind that goes on for one that was lost."""
    kinds, faults = iter([0, 1, 1]), list[str]()
    fault, machine = lambda begun: faults.pop() if faults else "", lambda: Machine(next(kinds))
    own = workers_of(2, 1 if lost == "before" else 2, fault, machine)
    own.start([np.uint32(0), np.uint32(0)])
    own.take(own.put(weights(0, adapter=False)), None)
    own.decode([[], []])
    faults.append(lost)
    with pytest.raises(RunFailure, match="does not repeat what the one before it drew"):
        own.decode([[], []])


def test_weights_are_held_until_the_next_recorded_state_and_no_longer(workers_of):
    """Those that draw and the newest ones are still needed then."""
    own = workers_of(2, 2)
    own.start([np.uint32(0), np.uint32(1)])
    references, paths = list[weakref.ref[WeightUpdate]](), list[Path]()
    for number in range(5):
        update = own.put(weights(number, adapter=False))
        references.append(weakref.ref(update))
        paths += [Path(shared.path) for shared in (update.whole, update.changes) if shared]
        if number < 4:
            own.take(update, None)
        del update
        own.decode([[], []])
    assert all(update() for update in references) and all(path.exists() for path in paths)
    own.states()
    assert [update() is not None for update in references] == [False, False, False, True, True]
    own._processes[0]._worker = None  # it is lost
    assert own.identities()[0] == own.identities()[1]


def test_what_is_read_is_not_repeated(workers_of):
    machines = list[Machine]()
    own = workers_of(1, 1, machine=lambda: machines.append(Machine()) or machines[-1])
    own.start([np.uint32(0)])
    own.take(own.put(weights(0, adapter=True)), None)
    own.identities()
    own._recorded()
    own.identities()
    own.decode([[]])
    own._processes[0]._worker = None
    own.identities()
    assert [machine.commands for machine in machines] == [
        ["start", "base", "take", "identities", "states", "identities", "decode"],
        ["start", "base", "take", "decode", "identities"],
    ]
