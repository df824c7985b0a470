"""Hooks and the early stop of a stage, through the real loop and checkpoints."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jrlhf import api
from jrlhf.config import Config, load_config
from jrlhf.config.stages import SFTConfig, StopConfig
from jrlhf.errors import UserError
from jrlhf.run.files import saved_steps
from jrlhf.stages import watching
from jrlhf.stages.hooks import load_hooks
from jrlhf.stages.loop import run_stage
from jrlhf.stages.watching import Iteration, Patience, Watch
from tests.jrlhf.stages.test_loop import MESH, add, context, init, run

SCORES = 1.0, 3.0, 2.0, 3.0, 2.5, 4.0, 1.0, 3.9, 2.0, 0.0
STATES = np.cumsum(np.arange(len(SCORES)))  # the state after each step


def scored(state, step):
    """A step whose metric is there every second time only, as those of a validation are."""
    return add(state, float(step)), {"loss": SCORES[step]} | ({"score": SCORES[step]} if step % 2 else {})


def in_time(here, step=scored):
    """The value of the state that the stage returns."""
    return float(np.asarray(run(here, step)["x"])[0])


def section(every: int) -> SFTConfig:
    return SFTConfig(warmup=0, save_every=every)


def test_a_value_that_is_not_finite_is_never_better_and_an_absent_one_does_not_count():
    own, counts = Patience("score", 3), list[int]()
    for value in (float("nan"), 1.0, 1.0, None, float("inf"), 1.5):
        own.observe({"loss": 0.0} if value is None else {"score": value})
        counts.append(own.missed)
    assert (counts, own.best) == ([1, 0, 1, 1, 2, 0], 1.5)


def test_a_stage_ends_once_a_metric_gets_no_better_and_its_patience_outlives_a_kill(tmp_path):
    """The scores are 3, 3, 4, 3.9 and 0: with a threshold of 1.5 none of them is better than the first."""
    options = {"steps": 10, "section": section(1)}
    for number, (stop, end) in enumerate(
        (
            (StopConfig("score", 1), 4),
            (StopConfig("score", 2), 10),
            (StopConfig("score", 3, 1.5), 8),
            (StopConfig("-loss", 4), 5),
            (StopConfig("none", 1), 10),
        )
    ):
        here = context(tmp_path / str(number), stop=stop, **options)
        assert in_time(here) == STATES[end - 1], stop
        folder = tmp_path / str(number) / "checkpoints" / "sft"
        assert saved_steps(folder)[-1] == end
        sentence = f"sft ends at step {end} of 10, because {stop.metric} was not better"
        assert (sentence in str(here.console.warnings)) == (end < 10)
    here = context(tmp_path / "2", stop=StopConfig("score", 3, 1.5), **options)
    assert in_time(here) == STATES[7] and "sft ended at step 8" in here.console.warnings
    here = context(tmp_path / "2", stop=StopConfig("score", 4, 1.5), **options)  # more patience: it goes on
    assert in_time(here) == STATES[9]

    def killed(state, number):
        if number == 5:  # one value was no better already
            raise RuntimeError("killed")
        return scored(state, number)

    stop = StopConfig("score", 3, 1.5)
    with pytest.raises(RuntimeError, match="killed"):
        in_time(context(tmp_path / "killed", stop=stop, **options), killed)
    assert in_time(context(tmp_path / "killed", stop=stop, **options)) == STATES[7]


def test_hooks_see_each_step_and_end_the_stage(tmp_path):
    seen: list[Iteration] = []

    def watch(iteration):
        seen.append(iteration)
        return "stop" if iteration.metrics["loss"] == 4.0 else None

    options = {"steps": 10, "section": section(3)}
    here = context(tmp_path, hooks=[("a:first", lambda iteration: None), ("a:watch", watch)], **options)
    assert in_time(here) == STATES[5]
    assert "sft ends at step 6 of 10, because hooks[1]=a:watch returned 'stop'" in here.console.warnings
    assert [(own.stage, own.step, own.steps, own.path) for own in seen] == [
        ("sft", step, 10, tmp_path) for step in range(1, 7)
    ]
    assert all(one.metrics["training/global_step"] == one.step for one in seen)
    seen.clear()
    assert in_time(context(tmp_path, hooks=[("a:first", print), ("a:watch", watch)], **options)) == STATES[5]
    assert not seen  # it is only restored
    assert in_time(context(tmp_path, hooks=[("a:first", lambda iteration: None)], **options)) == STATES[9]


@pytest.mark.parametrize("answer", ["raises", "answers", "exits"])
def test_a_hook_that_fails_loses_nothing(answer, tmp_path):
    def watch(iteration):
        if iteration.step == 4:
            if answer == "answers":
                return 7
            raise SystemExit(3) if answer == "exits" else KeyError("text")
        return None

    messages = {
        "raises": "KeyError: 'text' at .*test_watching.py",
        "answers": "a value of type int",
        "exits": "SystemExit: 3",
    }
    options = {"steps": 10, "section": section(3)}
    match = rf"hooks\[0\]=a:watch:? .*{messages[answer]}.*; the state of sft step 4 is saved: mend the hook"
    with pytest.raises(UserError, match=match):
        in_time(context(tmp_path, hooks=[("a:watch", watch)], **options))
    assert saved_steps(tmp_path / "checkpoints" / "sft")[-1] == 4
    steps: list[int] = []

    def counted(state, number):
        steps.append(number)
        return scored(state, number)

    assert in_time(context(tmp_path, **options), counted) == STATES[9]
    assert steps == [*range(4, 10)]


def test_hooks_are_loaded_from_files_and_bad_ones_are_one_sentence(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def watch(iteration):\n    return 'stop'\n\nnumber = 3\n")

    def hooks(*specs: str) -> list:
        return load_hooks(load_config("arithmetic-grpo", [f"hooks=[{', '.join(specs)}]"]))

    ((called, hook),) = hooks(f"{file}:watch")
    assert called == f"hooks[0]={file}:watch" and hook(None) == "stop"
    for spec, sentence in (
        (f"{file}:wach", "did you mean watch?"),
        (f"{file}:number", "is of type int: name a function"),
        (f"{Path('absent.py')}:watch", "there is no file"),
        ("watch", "must be package.module:function or path/file.py:function"),
    ):
        with pytest.raises(UserError, match=sentence):
            hooks(spec)
    for setting, sentence in (
        ("stop.metric=two words", "stop.metric='two words': it must be the name of a metric"),
        ("stop.patience=2", "stop.patience=2 has no effect with stop.metric=null"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_config("arithmetic-grpo", [setting])


def test_a_stage_that_has_ended_stays_so_once_a_later_one_has_begun_with_its_weights(tmp_path):
    options = {"steps": 10, "section": section(1), "stages": ("sft", "grpo")}
    assert in_time(context(tmp_path, stop=StopConfig("score", 1), **options)) == STATES[3]
    (tmp_path / "checkpoints" / "grpo" / "2").mkdir(parents=True)
    for stop in (StopConfig("score", 9), None):
        assert in_time(context(tmp_path, stop=stop, **options)) == STATES[3]
    assert saved_steps(tmp_path / "checkpoints" / "sft")[-1] == 4
    options |= {"stages": ("sft", "reward_model")}
    section_of = {"sections": {"reward_model": section(1)}}
    for patience in (1, 9):  # its last state is normalised
        here: Any = context(tmp_path, stop=StopConfig("score", patience), **options)
        vars(here.config).update(section_of)
        with jax.set_mesh(MESH):
            state = run_stage(here, "reward_model", init, scored, meta={}, announced=())
        assert float(np.asarray(state["x"])[0]) == STATES[3]


def test_a_stage_that_is_ended_at_its_last_step_goes_on_if_it_is_made_longer(tmp_path):
    hooks = [("a:watch", lambda iteration: "stop" if iteration.step == 6 else None)]
    assert in_time(context(tmp_path, steps=6, section=section(1), hooks=hooks)) == STATES[5]
    assert in_time(context(tmp_path, steps=10, section=section(1), hooks=hooks)) == STATES[9]


def test_other_processes_take_over_what_process_0_decided(monkeypatch):
    config: Any = SimpleNamespace(hooks=["a:watch"], stop=StopConfig("score", 1))
    first, second = (Watch.of(config, (), {}) for _ in range(2))
    iteration = Iteration("sft", 1, 9, {"score": 1.0}, (), Path())
    for watch, metrics in ((first, {"score": 1.0}), (first, {"score": 0.5})):
        sent = watch.after(replace(iteration, metrics=metrics), seconds=1.0), watch.state
        monkeypatch.setattr(watching, "from_main", lambda ask, *, seconds, sent=sent: json.loads(json.dumps(sent)))
        assert second.after(iteration, seconds=1.0) == "" and second.state == first.state
        monkeypatch.undo()
    assert (first.ended, second.ended, second.reason) == ("stop", "stop", first.reason)


def test_the_last_state_is_finished_once_wherever_the_stage_ends(tmp_path):
    finish = partial(add, amount=100.0)
    for name, stop, end in (("whole", None, 10), ("early", StopConfig("score", 1), 4)):
        for _ in range(2):  # the second time it is only restored
            here: Any = context(tmp_path / name, steps=10, section=section(1), stop=stop)
            with jax.set_mesh(MESH):
                state = run_stage(here, "sft", init, scored, meta={}, announced=(), finish=finish)
            assert float(np.asarray(state["x"])[0]) == STATES[end - 1] + 100


def test_a_hook_of_python_is_called_beside_those_of_the_config(tmp_path, monkeypatch):
    configs: list[Config] = []
    monkeypatch.setattr(api, "main", lambda config, **_: configs.append(config))
    monkeypatch.setattr(api.Run, "open", lambda path: path)
    api.train({"stages": ["sft"], "hooks": ["mine.py:watch"]}, on_iteration=print)
    api.train({"stages": ["sft"]}, hooks=print)
    api.train({"stages": ["sft"], "hooks": ["<python>:print", "<python>:gone"]}, on_iteration=print)  # a run's own
    names = [("mine.py:watch", "<python>:print"), ("<python>:print",), ("<python>:print",)]
    assert [config.hooks for config in configs] == names
