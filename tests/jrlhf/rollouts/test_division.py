"""Another number of rollout processes: what is refused, what starts and ends, and what a failure leaves."""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from jrlhf.config.stages import FleetSection
from jrlhf.errors import RunFailure, UserError
from jrlhf.planning.resolve import select_resources
from jrlhf.rollouts.processes.places import Place, asked_places
from jrlhf.rollouts.processes.process import NoRoom, Process
from jrlhf.rollouts.processes.record import Event, EventRecord
from jrlhf.rollouts.processes.workers import ProcessWorkers
from jrlhf.run.contents import FLEET
from tests.jrlhf.rollouts.test_runs import ADAPTER, config, run
from tests.support.runs import assert_same_run

NOT_GIVEN = "must have the key workers, .* and no others$"
REFUSED = {
    "": NOT_GIVEN,
    "{workers: 2, deadline: 9}": NOT_GIVEN,
    "workers: 0": "fleet.workers=0: it must be at least 1",
    "workers:": NOT_GIVEN,
    "workers: 4": "fleet.workers=4 exceeds grpo.asynchronous.logical_workers=3",
    "workers: null": NOT_GIVEN,
    "workers: 'null'": NOT_GIVEN,
    "{workers: 2, devices: ['0', '1']}": r"fleet.devices=\[0, 1\] has no effect on a CPU",
    "{workers: 2, devices: ['4,5', '5, 4']}": "fleet.devices names the GPU 4 twice",
    "{workers": "not valid YAML",
}


def test_a_number_of_processes_that_cannot_work_is_one_sentence_and_the_run_goes_on(tmp_path, monkeypatch):
    whole = config(tmp_path, "run", "grpo", ["fleet.workers=2"], staleness=1, logical_workers=3)
    asked, file = partial(asked_places, whole, "cpu", 1), tmp_path / "run" / FLEET
    two = [(0, ""), (1, "")]
    assert asked() == two
    file.parent.mkdir()
    file.write_text("workers: 3")
    assert asked() == [*two, (2, "")]
    for text, sentence in REFUSED.items():
        file.write_text(text)
        with pytest.raises(UserError, match=f"^{file}.*{sentence}") as refused:
            asked()
        assert "\n" not in str(refused.value)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=f"^{file} cannot be read .*: mend or delete it"):
        asked()
    file.rmdir()
    file.write_text("workers: 5")
    with pytest.raises(UserError, match="fleet.workers=5 exceeds grpo.asynchronous.logical_workers=2"):
        asked_places(config(tmp_path, "run", "grpo", ["fleet.workers=2"], staleness=1), "cpu", 1)


def test_a_file_that_asks_for_processes_precedes_the_config_at_a_start(tmp_path, monkeypatch):
    settings = ["fleet.workers=2", "fleet.engine=ray", "rollout.slots=24"]
    whole = config(tmp_path, "run", "grpo", settings, staleness=1, logical_workers=3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FLEET).write_text("workers: 3")

    monkeypatch.setattr("jrlhf.rollouts.processes.places.check_package", lambda: None)
    select_resources(whole)
    assert len(asked_places(whole, "cpu", 1)) == 3
    (tmp_path / "run" / FLEET).write_text("workers: 4")
    with pytest.raises(UserError, match="workers=4 exceeds"):
        select_resources(whole)


@pytest.fixture
def division(tmp_path):
    """A function: places, those that do not start -> `ProcessWorkers` with stand-ins there, and what they do."""

    def make(places: Sequence[Place], absent: Sequence[Place] = (), **settings: Any) -> tuple[Any, list[Any]]:
        events = list[Any]()
        own: Any = object.__new__(ProcessWorkers)

        def process(place: Place) -> Any:
            def begin() -> None:
                events.append(f"begin {place[0]} {place[1]}")
                if place in own.without:
                    raise NoRoom("no machine has room")
                if place in absent:
                    raise RunFailure("no such GPU")

            note = lambda event: lambda: events.append(f"{event} {place[0]} {place[1]}")  # noqa: E731
            return SimpleNamespace(place=place, close=note("close"), begin=begin, forget=note("forget"))

        own._processes, own._process = [process(place) for place in places], process
        own._threads = ThreadPoolExecutor(1)
        own._wish, own._pause, own._refusal = (), None, ""
        own._section, own._gpus, own._folder, own._tell = FleetSection(**settings), 0, tmp_path, events.append
        own._recorded, own._asked, own.without = lambda: [], lambda: own.asked, ()
        own.identities = lambda: events.append("asked")  # so that all repeat what is recorded
        return own, events

    return make


MORE, FEWER, OTHERS = [(0, "4"), (1, "7"), (2, "6")], [(0, "4")], [(0, "5"), (1, "6")]
CHANGES = [  # places, in which order processes begin, end and forget, what is told
    (
        MORE,
        ["begin 1 7", "begin 2 6", "close 1 5", "forget 0 4", "forget 1 7", "forget 2 6"],
        "3 # in place of 2 *[4, 7, 6]",
    ),
    (FEWER, ["close 1 5", "forget 0 4"], "1 # in place of 2 *[4]"),
    (OTHERS, ["close 0 4", "close 1 5", "forget 0 5", "forget 1 6"], "2 # *[5, 6]"),  # 5 must be free first
]


@pytest.mark.parametrize("places, acts, sentence", CHANGES)
def test_another_number_of_processes_starts_and_ends_only_those_that_change(places, acts, sentence, division):
    own, events = division([(0, "4"), (1, "5")])
    present = {process.place: process for process in own._processes}
    own.asked = places
    line = sentence.replace("#", "rollout process(es) go on").replace("*", "with fleet.devices=")
    for _ in range(2):
        ProcessWorkers.states(own)
        assert events == [*acts, "asked", line] and [process.place for process in own._processes] == places
    assert all(present.get(process.place, process) is process for process in own._processes)


def test_processes_that_do_not_start_leave_the_present_ones_as_they_are(division, monkeypatch):
    own, events = division([(0, "4")], absent=[(1, "9")])
    before, failure = list(own._processes), "no such GPU; 1 rollout process(es) go on"
    for own.asked in ([(0, "4"), (1, "9")],) * 2:  # it is not tried again
        ProcessWorkers.states(own)
        assert events == ["begin 1 9", "close 1 9", failure] and own._processes == before
    for own.asked in ([(0, "4")], [(0, "4"), (1, "9")]):
        ProcessWorkers.states(own)
    assert events.count(failure) == 2
    events.clear()
    own.asked = [(1, "9"), (2, "6")]  # nobody ends for a process that does not start
    for _ in range(2):
        ProcessWorkers.states(own)
        assert events == ["begin 1 9", "begin 2 6", "close 1 9", "close 2 6"] and own._processes == before
    own.identities = lambda: own._processes[0].begin()  # only now, because the GPU was not free before
    own._processes[0].place, own.asked = (0, "9"), [(1, "9")]
    with pytest.raises(RunFailure, match=f"^no such GPU; .*{FLEET} or fleet.workers asked for 1 rollout process"):
        ProcessWorkers.states(own)


def test_processes_of_a_ray_cluster_start_where_there_is_room(division, monkeypatch):
    """The others go on. Ray's places are alike, so nobody ends because another number is asked for."""
    free, all_places, later = [0], [1], [0.0]
    monkeypatch.setattr("jrlhf.rollouts.processes.workers.free_places", lambda gpus: free[0])
    monkeypatch.setattr("jrlhf.rollouts.processes.workers.total_places", lambda gpus: all_places[0])
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr("jrlhf.rollouts.processes.workers.time", clock)
    own, events = division([(1, "")], engine="ray")
    own.asked = [(number, "") for number in range(3)]

    def happened(room: int, *without: int) -> list[Any]:
        events.clear()
        free[0], own.without = room, [(number, "") for number in without]
        ProcessWorkers.states(own)
        return [event for event in events if event != "asked"]

    go_on = "{} rollout process(es) go on"
    lacking = "the Ray cluster has no room for {} more rollout process(es); " + go_on
    assert happened(0) == [lacking.format(2, 1)] and happened(0) == []  # it is told once
    acts = "begin 0 ", "forget 0 ", "forget 1 "
    assert happened(1) == [*acts, f"{go_on.format(2)} in place of 1", lacking.format(1, 2)]
    tried, refused = ["begin 2 ", "close 2 "], f"no machine has room; {go_on.format(2)}"
    assert happened(1, 2) == [*tried, refused]
    assert happened(1, 2) == happened(2, 2) == []  # it is not tried again at once
    all_places[0] = 0
    assert happened(0) == []
    all_places[0] = 1  # a machine has returned
    assert happened(1, 2) == tried and happened(1, 2) == []
    later[0] = 601.0
    assert happened(1, 2) == tried and happened(1, 2) == []
    later[0] *= 2
    acts = "begin 2 ", *(f"forget {number} " for number in range(3))
    assert happened(1) == [*acts, f"{go_on.format(3)} in place of 2"] and happened(1) == []
    own.asked = [(0, "")]
    assert happened(1) == ["close 1 ", "close 2 ", "forget 0 ", f"{go_on.format(1)} in place of 3"]
    own._processes[0].place = (7, "")
    assert happened(1) == []


FIRST_STATES = [  # the present processes, the asked ones, what happens if the new one fails at its first states
    ([(0, "")], [(0, ""), (1, "")], ["begin 1 ", "forget 0 ", "forget 1 ", "close 1 ", "forget 0 "], []),
    (
        [(0, "4"), (1, "5")],
        [(0, "4"), (1, "6")],
        ["begin 1 6", "close 1 5", "forget 0 4", "forget 1 6", "close 1 6", "forget 0 4"],
        ["1 rollout process(es) go on in place of 2 with fleet.devices=[4]"],
    ),
]


@pytest.mark.parametrize("present, asked, acts, lines", FIRST_STATES)
def test_a_new_process_that_fails_at_its_first_states_does_not_end_the_run(present, asked, acts, lines, division):
    own, events = division(present)
    own.asked, failures, first = asked, [RunFailure("out of memory")], own._processes[:1]

    def identities() -> None:
        raise failures.pop()

    own.identities = identities
    for _ in range(2):
        ProcessWorkers.states(own)
        assert events == [*acts, *lines, "out of memory; 1 rollout process(es) go on"]
        assert own._processes == first


def test_a_new_process_that_is_lost_at_its_first_states_is_not_tried_again_at_once(division):
    own, events = division([(0, "")])
    own.asked = [(0, ""), (1, "")]
    own.identities = lambda: own._processes.pop()
    for _ in range(2):
        ProcessWorkers.states(own)
        lost = "rollout process 1 was lost at its first states; 1 rollout process(es) go on"
        assert events == ["begin 1 ", "forget 0 ", "forget 1 ", lost]


@pytest.mark.parametrize("comes", [True, False])
def test_the_run_waits_for_a_machine_if_no_process_is_left(comes, monkeypatch):
    """For three deadlines since the wait began, however long the command took before."""
    clock, sentences = [0.0], list[str]()
    own: Any = object.__new__(ProcessWorkers)
    monkeypatch.setattr("jrlhf.rollouts.processes.workers.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def ask(command: object, shared: object) -> str:
        clock[0] += 100 if clock[0] == 0 else 5
        if comes and clock[0] > 120:
            return "answer"
        raise NoRoom("no machine has room")

    own._processes, own._count, own._record = [SimpleNamespace(ask=ask, place=(3, ""))], 1, EventRecord()
    own._threads, own._section, own._tell = ThreadPoolExecutor(1), FleetSection(deadline=10.0), sentences.append
    if comes:
        assert own._ask(Event("states")) == ["answer"]
    else:
        with pytest.raises(
            RunFailure, match=r"^no machine has room for rollout process\(es\) 3, for 35 s: add one and"
        ):
            own._ask(Event("states"))
    waits = "no machine has room for rollout process(es) 3: they wait for one"
    assert sentences == [waits, *["1 rollout process(es) go on"] * comes]


FOR_EVER = 1000
# The settings, and (command or "repeat", how often it was sent) -> process -> for how many starts it finds no machine.
LOSSES = {
    "between two chunks, while others repeat, then a new machine": (
        "keep_cache",
        (),
        {("decode", 4): {1: FOR_EVER}, ("repeat", 1): {2: FOR_EVER}, ("states", 5): {1: 0, 2: 0}},
        [3, 2, 1, 3],
    ),
    "two at once, with new weights and an adapter, then the last one": (
        "prefill_again",
        ADAPTER,
        {("take", 3): {0: FOR_EVER, 2: FOR_EVER}, ("decode", 9): {1: 2}, ("states", 4): {0: 0, 2: 1}},
        [3, 1, 2, 3],
    ),
    "all of them": ("finish", (), {("decode", 5): {0: 2, 1: 3, 2: FOR_EVER}, ("states", 4): {2: 0}}, [3, 1, 2, 3]),
}


MARKS = pytest.mark.full, pytest.mark.proof("processes"), pytest.mark.proof("processes")


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in zip(LOSSES, MARKS, strict=True)])
def test_the_others_repeat_the_commands_if_no_machine_has_room_for_a_successor(name, tmp_path, monkeypatch):
    """With the bits of one process."""
    on_new_weights, settings, losses, expected_counts = LOSSES[name]
    options: dict[str, Any] = {"staleness": 2, "uncorrected": True, "update_steps": 3, "logical_workers": 3}
    settings = [*settings, "rollout.slots=24", "grpo.iterations=6"]
    expected = run(config(tmp_path, "one", "grpo", settings, **options, on_new_weights=on_new_weights))
    ask, divide, repeat = ProcessWorkers._ask, ProcessWorkers._divide, EventRecord.repeat
    send, sent, without, counts = Process._send, Counter[str](), dict[int, int](), [3]

    def count(name: str) -> None:
        sent[name] += 1
        without.update(losses.get((name, sent[name]), {}))

    def asked(self, event):
        count(event.name)
        return ask(self, event)

    def divided(self, processes):
        counts.append(len(processes))
        divide(self, processes)

    def repeated(self, share, ask):
        if self.present:
            count("repeat")
        return repeat(self, share, ask)

    def refusing(self, worker, *command, **options):
        number = self.place[0]
        if without.get(number, 0) == 0:
            return send(self, worker, *command, **options)
        without[number] -= 1
        worker.kill()
        self._worker = None
        raise NoRoom("no machine has room")

    monkeypatch.setattr(ProcessWorkers, "_hold", lambda self, reason, begin: reason)  # they are tried again at once
    monkeypatch.setattr(ProcessWorkers, "_ask", asked)
    monkeypatch.setattr(ProcessWorkers, "_divide", divided)
    monkeypatch.setattr(EventRecord, "repeat", repeated)
    monkeypatch.setattr(Process, "_send", refusing)
    path = run(
        config(tmp_path, "run", "grpo", [*settings, "fleet.workers=3"], **options, on_new_weights=on_new_weights)
    )
    assert_same_run(path, expected)
    assert counts == expected_counts
