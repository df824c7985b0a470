"""Another number of rollout processes: what is refused, what starts and ends, and what a failure leaves."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from jrlhf.config.stages import FleetSection
from jrlhf.errors import RunFailure, UserError
from jrlhf.fleet.processes.places import Place, asked_places
from jrlhf.fleet.processes.process import NoRoom, Process
from jrlhf.fleet.processes.workers import ProcessWorkers
from jrlhf.run.directory import FLEET
from jrlhf.stages.setup import select_resources
from tests.jrlhf.fleet.test_runs import ADAPTER, config, run
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


ROOM = [  # room for more processes, the present ones, those that are there next if the file asks for three
    (0, [0, 1], [0, 1]),
    (0, [0, 1], [0, 1]),
    (1, [0, 2], [0, 1, 2]),  # Ray's places are alike, so nobody ends
    (0, [0, 1, 2], [0, 1, 2]),
    (0, [0, 1], [0, 1]),
    (1, [2], [0, 2]),
    (9, [0, 2, 5, 7], [0, 2, 5]),
]


def test_a_number_of_processes_that_cannot_work_is_one_sentence_and_the_run_goes_on(tmp_path, monkeypatch):
    whole = config(tmp_path, "run", "grpo", ["fleet.workers=2"], staleness=1, logical_workers=3)
    asked, file = partial(asked_places, whole, "cpu", 1), tmp_path / "run" / FLEET
    two = [(0, ""), (1, "")]
    assert asked() == two
    file.parent.mkdir()
    file.write_text("workers: 3")
    assert asked() == [*two, (2, "")]
    sentences = list[str]()
    section = FleetSection(workers=2, engine="ray")
    own: Any = SimpleNamespace(_asked=asked, _section=section, _gpus=0, _refusal="", _tell=sentences.append)
    own._refuse = partial(ProcessWorkers._refuse, own)
    for free, present, places in ROOM:
        monkeypatch.setattr("jrlhf.fleet.processes.workers.room", lambda gpus, free=free: free)
        assert ProcessWorkers._asked_or(own, [(n, "") for n in present]) == [(n, "") for n in places]
    lines = (0, 1, 2), (0, 1, 2), (1, 2, 2)  # again after a number that works
    assert sentences == [
        f"the Ray cluster has room for {free} of {more} more rollout process(es); {count} rollout process(es) go on"
        for free, more, count in lines
    ]
    for text, sentence in REFUSED.items():
        file.write_text(text)
        with pytest.raises(UserError, match=f"^{file}.*{sentence}") as refused:
            asked()
        own._refusal = ""
        assert ProcessWorkers._asked_or(own, two) == two and "\n" not in sentences[-1]
        assert sentences[-1] == f"{refused.value}; 2 rollout process(es) go on"
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

    monkeypatch.setattr("jrlhf.fleet.processes.places.check_package", lambda: None)
    select_resources(whole)
    assert len(asked_places(whole, "cpu", 1)) == 3
    (tmp_path / "run" / FLEET).write_text("workers: 4")
    with pytest.raises(UserError, match="workers=4 exceeds"):
        select_resources(whole)


@pytest.fixture
def division(tmp_path):
    """A function: places, those that do not start -> `ProcessWorkers` with stand-ins there, and what they do."""

    def make(places: Sequence[Place], absent: Sequence[Place] = ()) -> tuple[Any, list[Any]]:
        events = list[Any]()

        def process(place: Place) -> Any:
            note = lambda event: lambda: events.append(f"{event} {place[0]} {place[1]}")  # noqa: E731
            return SimpleNamespace(place=place, close=note("close"), begin=note("begin"), forget=note("forget"))

        def begin(processes: Sequence[Any]) -> list[Any]:
            for process in processes:
                process.begin()
                if process.place in absent:
                    raise RunFailure("no such GPU")
            return [process for process in processes if process.place not in own.without]

        own: Any = SimpleNamespace(
            _processes=[process(place) for place in places], _process=process, _failed=(), _refusal=""
        )
        own._present, own._folder, own._begin = "weights", tmp_path, begin
        own._tell = lambda sentence: events.append(sentence)
        own._arrays, own._asked_or = lambda: [], lambda present: own.asked
        own._divide, own._refuse = partial(ProcessWorkers._divide, own), partial(ProcessWorkers._refuse, own)
        own.without = ()
        own.start = lambda states: events.append("start")
        own.take = lambda weights, again: events.append((own._present, weights))
        return own, events

    return make


TAKEN = "start", (None, "weights")  # all weights, not their changes


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
        assert events == [*acts, *TAKEN, line] and [process.place for process in own._processes] == places
    assert all(present.get(process.place, process) is process for process in own._processes)


def test_processes_that_do_not_start_leave_the_present_ones_as_they_are(division):
    own, events = division([(0, "4")], absent=[(1, "9")])
    before, failure = list(own._processes), "no such GPU; 1 rollout process(es) go on"
    for own.asked in ([(0, "4"), (1, "9")],) * 2:  # it is not tried again
        ProcessWorkers.states(own)
        assert events == ["begin 1 9", failure] and own._processes == before and own._present == "weights"
    for own.asked in ([(0, "4")], [(0, "4"), (1, "9")]):
        ProcessWorkers.states(own)
    assert events.count(failure) == 2
    own.start = lambda states: own._begin(own._processes)  # only now, because the GPU was not free before
    own._processes[0].place, own.asked = (0, "9"), [(1, "9")]
    with pytest.raises(RunFailure, match=f"^no such GPU; .*{FLEET} or fleet.workers asked for 1 rollout process"):
        ProcessWorkers.states(own)


def test_of_new_processes_those_start_for_which_there_is_room(division):
    """The refusal is told once; then it is tried again at each iteration."""
    own, events = division([(0, "")])
    own.asked, own.without = [(0, ""), (1, ""), (2, "")], [(1, ""), (2, "")]
    for _ in range(2):
        ProcessWorkers.states(own)
    refusal = "the Ray cluster has room for 0 of 2 more rollout process(es); 1 rollout process(es) go on"
    assert events == ["begin 1 ", "begin 2 ", refusal, "begin 1 ", "begin 2 "] and own._present == "weights"
    events.clear()
    own.without = [(1, "")]
    ProcessWorkers.states(own)
    acts = ["begin 1 ", "begin 2 ", "forget 0 ", "forget 2 "]
    assert events == [*acts, *TAKEN, "2 rollout process(es) go on in place of 1"]


FOR_EVER = 1000
LOSSES = {  # the settings, and (command, how often it was sent) -> process -> for how many starts it finds no machine
    "between two chunks, while others repeat, then a new machine": (
        "keep_cache",
        (),
        {("decode", 4): {1: FOR_EVER}, ("start", 2): {2: FOR_EVER}, ("states", 5): {1: 0, 2: 0}},
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
    options: dict[str, Any] = {"staleness": 2, "update_steps": 3, "logical_workers": 3}
    settings = [*settings, "rollout.slots=24", "grpo.iterations=6"]
    expected = run(config(tmp_path, "one", "grpo", settings, **options, on_new_weights=on_new_weights))
    ask, send, sent = ProcessWorkers._ask, Process._send, Counter[str]()
    without, counts = dict[int, int](), list[int]()

    def asked(self, name: str, *rest: Any):
        sent[name] += 1
        without.update(losses.get((name, sent[name]), {}))
        if counts[-1:] != [len(self._processes)]:
            counts.append(len(self._processes))
        return ask(self, name, *rest)

    def refusing(self, worker, command):
        number = self.place[0]
        if without.get(number, 0) == 0:
            return send(self, worker, command)
        without[number] -= 1
        worker.kill()
        self._worker = None
        raise NoRoom("no machine has room")

    monkeypatch.setattr(ProcessWorkers, "_ask", asked)
    monkeypatch.setattr(Process, "_send", refusing)
    path = run(
        config(tmp_path, "run", "grpo", [*settings, "fleet.workers=3"], **options, on_new_weights=on_new_weights)
    )
    assert_same_run(path, expected)
    assert counts == expected_counts
