"""Another number of rollout processes: what is refused, what starts and ends, and what a failure leaves."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from jrlhf.config.stages import FleetSection
from jrlhf.errors import RunFailure, UserError
from jrlhf.fleet.processes import Place, ProcessWorkers, asked_places
from jrlhf.run.directory import FLEET
from jrlhf.stages.setup import open_context, select_resources
from tests.jrlhf.fleet.test_runs import config

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
    sentences = list[str]()
    section = FleetSection(workers=2, engine="ray")
    own: Any = SimpleNamespace(_asked=asked, _section=section, _gpus=0, _refusal="", _tell=sentences.append)
    for lacks in ("Ray has 2 CPU(s)", "Ray has 2 CPU(s)", "", "Ray has 2 CPU(s)", ""):
        monkeypatch.setattr("jrlhf.fleet.processes.lacking", lambda workers, gpus, lacks=lacks: lacks)
        assert ProcessWorkers._asked_or(own, two) == (two if lacks else [*two, (2, "")])
    assert sentences == ["Ray has 2 CPU(s); 2 rollout process(es) go on"] * 2  # again after a number that works
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

    def stop(workers: int, gpus: int, tell: object):
        raise RunFailure(f"{workers} and {gpus}")

    monkeypatch.setattr("jrlhf.fleet.processes.check_package", lambda: None)
    monkeypatch.setattr("jrlhf.stages.setup.joined", stop)
    monkeypatch.setattr("jrlhf.stages.setup.check_run", lambda *_: None)  # it refuses a directory without a run
    with pytest.raises(RunFailure, match="^3 and 0$"), open_context(whole, resume=False):
        pass
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

        def begin(processes: Sequence[Any]) -> None:
            for process in processes:
                process.begin()
                if process.place in absent:
                    raise RunFailure("no such GPU")

        own: Any = SimpleNamespace(_processes=[process(place) for place in places], _process=process, _failed=())
        own._present, own._folder, own._begin = "weights", tmp_path, begin
        own._tell = lambda sentence: events.append(sentence)
        own._arrays, own._asked_or = lambda: [], lambda present: own.asked
        own._divide = partial(ProcessWorkers._divide, own)
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
    with pytest.raises(RunFailure, match=f"^no such GPU; .*{FLEET} asked for 1 rollout process"):
        ProcessWorkers.states(own)
