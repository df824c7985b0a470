"""The best weights of a stage, `checkpoints.best`, through the real loop and checkpoints."""

import json
import shutil
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jrlhf.config.schema import ValidationConfig
from jrlhf.config.stages import CheckpointConfig, SFTConfig, StopConfig
from jrlhf.errors import UserError
from jrlhf.export import export_checkpoint
from jrlhf.run.checkpoints import read_meta
from jrlhf.run.files import saved_steps
from jrlhf.run.metrics import read_metrics
from jrlhf.stages import watching
from jrlhf.stages.loop import run_stage
from jrlhf.stages.watching import BEST, WATCH, Iteration, Watch
from jrlhf.train import main
from tests.jrlhf.rollouts.test_runs import ADAPTER, config
from tests.jrlhf.stages.test_loop import MESH, add, context, init
from tests.support.runs import resumed, timeless

METRIC, VALIDATION = "sft/eval_score", "val-core/all/score/mean@1"


def start() -> dict[str, Any]:
    """A state whose weights are the number of steps, beside another leaf."""
    return {"params": init(), "more": init()}


def ppo_start() -> dict[str, Any]:
    return {"trained": {"actor": {"params": init()}}, "more": init()}


def step_on(state):
    return jax.tree.map(lambda leaf: add({"x": leaf}, 1.0)["x"], state)


def weights(state) -> float:
    """The number of steps that the weights have taken."""
    own = state["params"] if "params" in state else state["trained"]["actor"]["params"]
    values = np.asarray(own["x"])
    assert (values == values[0]).all()
    return float(values[0])


def pairs_stage(path, values, *, best: str | None = METRIC, keep=2, every=100, killed_at=None, name="sft", **options):
    """Runs a stage whose step number i measures values[i - 1] (None: nothing); returns the state, and what it told."""
    finish = options.pop("finish", None)
    here: Any = context(path, steps=options.pop("steps", len(values)), stages=(name,), **options)
    own = {"checkpoints": CheckpointConfig(keep, best), "sections": {name: SFTConfig(warmup=0, save_every=every)}}
    vars(here.config).update(own)

    def advance(state, step):
        if step == killed_at:
            raise RuntimeError("killed")
        measured = {} if values[step] is None else {f"{name}/eval_score": values[step]}
        return step_on(state), {"loss": float(step)} | measured

    with jax.set_mesh(MESH):
        state = run_stage(here, name, start, advance, meta={}, announced=(), finish=finish)
    return state, here.console.warnings


def ppo_stage(
    path, values, *, every=1, save_every=100, keep=1, killed_at=None, best: str | None = VALIDATION, stop=None
):
    """Runs a stage of reinforcement learning. values[i]: of the weights after i steps. Returns the state, what it told,
    and the steps whose weights were measured at the end."""
    here: Any = context(path, steps=len(values) - 1, stages=("ppo",), stop=stop)
    own = {"checkpoints": CheckpointConfig(keep, best), "validation": ValidationConfig(every)}
    own["sections"] = {"ppo": SFTConfig(warmup=0, save_every=save_every)}
    vars(here.config).update(own)
    ends: list[int] = []

    def advance(state, step):
        if step == killed_at:
            raise RuntimeError("killed")
        assert weights(state) == step
        return step_on(state), {"loss": 1.0} | ({} if step % every else {VALIDATION: values[step]})

    def measure(state, step):
        ends.append(step)
        assert weights(state) == step
        return {VALIDATION: values[step]}

    with jax.set_mesh(MESH):
        state = run_stage(here, "ppo", ppo_start, advance, meta={}, announced=(), measure=measure)
    return state, here.console.warnings, ends


def kept(path, name="sft") -> list[int]:
    return saved_steps(path / "checkpoints" / name)


@pytest.mark.parametrize(
    ("values", "best", "step"),
    [
        ((1.0, 3.0, 2.0, 3.0, 0.0), METRIC, 2),  # of equal values the first
        ((1.0, 3.0, 2.0, 3.0, 0.0), f"-{METRIC}", 5),
        ((2.0, 0.5, 2.0, 0.5, 1.0), f"-{METRIC}", 2),
        ((nan, 1.0, nan, inf, 0.0), METRIC, 2),
        ((nan, nan, -2.0, None, -inf), METRIC, 3),
        ((1.0, None, 2.0, None, 3.0), METRIC, 5),
    ],
)
def test_a_stage_ends_with_the_weights_of_its_best_value(values, best, step, tmp_path):
    for keep, every in ((1, 100), (1, 1), (2, 2)):
        path = tmp_path / f"{keep}-{every}"
        state, lines = pairs_stage(path, values, best=best, keep=keep, every=every)
        assert weights(state) == step
        assert float(np.asarray(state["more"]["x"])[0]) == 5  # only the weights are exchanged
        assert step in kept(path) and kept(path)[-1] == 5 and len(kept(path)) <= keep + 1
        assert any(
            line.startswith(f"sft ends with the weights of step {step}, the best by {METRIC}=") for line in lines
        )
    again, _ = pairs_stage(path, values, best=best, keep=keep, every=every, killed_at=0)  # only restored
    assert weights(again) == step


def test_a_killed_stage_goes_on_to_the_same_best_weights_and_metrics(tmp_path):
    values = 1.0, 4.0, 2.0, 3.0, 4.0, 0.0
    whole, _ = pairs_stage(tmp_path / "whole", values, keep=1, every=4)
    for killed_at in range(1, 6):
        path = tmp_path / str(killed_at)
        with pytest.raises(RuntimeError, match="killed"):
            pairs_stage(path, values, keep=1, every=4, killed_at=killed_at)
        state, _ = pairs_stage(path, values, keep=1, every=4)
        jax.tree.map(np.testing.assert_array_equal, state, whole)
        assert kept(path) == [2, 6]
        assert [row[METRIC] for row in read_metrics(path)] == list(values)
        metas = [read_meta(run / "checkpoints" / "sft", 6)[WATCH] for run in (path, tmp_path / "whole")]
        assert metas == [{BEST: [METRIC, 4.0, 2]}] * 2


def test_validations_measure_the_weights_before_an_iteration_and_the_last_ones_too(tmp_path):
    for number, (values, every, step) in enumerate(
        (
            ((0.0, 5.0, 1.0, 2.0, 3.0), 1, 1),
            ((0.0, 5.0, 1.0, 2.0, 3.0), 2, 4),  # 5 is not measured, and no validation is due at the end of 3
            ((9.0, 5.0, 1.0, 2.0, 3.0), 1, 0),  # training made it worse
            ((0.0, 5.0, 6.0, 6.0, 6.0), 1, 2),
        )
    ):
        path = tmp_path / str(number)
        state, lines, ends = ppo_stage(path, values, every=every)
        assert (weights(state), ends) == (step, [4])
        assert kept(path, "ppo") == sorted({step, 4})
        assert f"ppo ends with the weights of step {step}, the best by {VALIDATION}={values[step]:.4g}" in lines
        again, _, ends = ppo_stage(path, values, every=every, killed_at=0)
        assert (weights(again), ends) == (step, [])


def test_a_killed_run_validates_the_same_weights_again(tmp_path):
    values = 0.0, 5.0, 1.0, 5.0, 2.0
    for killed_at in range(4):  # before the metrics of the validation are logged
        path = tmp_path / str(killed_at)
        with pytest.raises(RuntimeError, match="killed"):
            ppo_stage(path, values, killed_at=killed_at)
        assert kept(path, "ppo")[-1] == killed_at or killed_at == 0
        state, _, _ = ppo_stage(path, values)
        assert weights(state) == 1 and kept(path, "ppo") == [1, 4]


def test_a_stage_that_stops_early_ends_with_its_best_weights(tmp_path):
    values = 0.0, 5.0, 1.0, 2.0, 9.0, 9.0
    state, lines, ends = ppo_stage(tmp_path, values, stop=StopConfig(VALIDATION, 1))
    assert (weights(state), ends, kept(tmp_path, "ppo")) == (1, [3], [1, 3])
    assert any("ppo ends at step 3 of 5" in line for line in lines)
    state, _, _ = ppo_stage(tmp_path, values, stop=StopConfig(VALIDATION, 9))  # it goes on from the last weights
    assert weights(state) == 4


def test_a_metric_that_never_appears_is_told_and_the_last_weights_stay(tmp_path):
    for number, (values, best) in enumerate((((None,) * 3, METRIC), ((nan,) * 3, METRIC), ((1.0,) * 3, METRIC + "s"))):
        state, lines = pairs_stage(tmp_path / str(number), values, best=best)
        assert weights(state) == 3
        assert any(line.startswith(f"checkpoints.best={best} had no effect: it was no finite number") for line in lines)
        mistyped = f"checkpoints.best={best} is no metric here: did you mean {METRIC}?"
        assert lines.count(mistyped) == (best != METRIC)
    state, lines = pairs_stage(tmp_path / "other", (3.0, 1.0), best="dpo/eval_loss")  # of another stage
    assert weights(state) == 2 and "checkpoints.best" not in str(lines)


def test_a_resume_may_choose_by_another_metric_which_begins_anew(tmp_path):
    values = 3.0, 1.0, 2.0, 0.5, 1.0
    with pytest.raises(RuntimeError, match="killed"):
        pairs_stage(tmp_path, values, killed_at=3, every=1)
    state, _ = pairs_stage(tmp_path, values, best=f"-{METRIC}")
    assert weights(state) == 4
    for best, step in ((METRIC, 5), (None, 5), (f"-{METRIC}", 4)):  # the run has ended: nothing else was measured
        assert weights(pairs_stage(tmp_path, values, best=best)[0]) == step
    longer = *values, 0.1, 0.2
    assert weights(pairs_stage(tmp_path, longer, best=f"-{METRIC}")[0]) == 6


def test_the_best_state_of_a_reward_model_is_finished_and_saved_as_its_last(tmp_path):
    def finish(state):
        return state | {"params": add(state["params"], 100.0)}

    for _ in range(2):  # the second time it is only restored
        options: Any = {"name": "reward_model", "best": "reward_model/eval_score", "finish": finish, "keep": 1}
        state, _ = pairs_stage(tmp_path, (1.0, 3.0, 2.0), **options)
        assert weights(state) == 102 and kept(tmp_path, "reward_model") == [2, 3]


def test_a_best_checkpoint_that_is_lost_or_damaged_is_told(tmp_path):
    values = 1.0, 3.0, 2.0, 2.5
    pairs_stage(tmp_path / "whole", values, every=1)
    shutil.copytree(tmp_path / "whole", tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "checkpoints" / "sft" / "2")
    state, lines = pairs_stage(tmp_path / "gone", (*values, 2.0, 1.0), every=1)
    assert weights(state) == 5 and any("that of step 2, is gone" in line for line in lines)
    for file in (tmp_path / "whole" / "checkpoints" / "sft" / "2" / "state").rglob("d/*"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="step 2 .* is damaged .*checkpoints.best=null"):
        pairs_stage(tmp_path / "whole", values, every=1)
    assert weights(pairs_stage(tmp_path / "whole", values, best=None)[0]) == 4


def test_other_processes_take_over_the_best_step_of_process_0(monkeypatch):
    config: Any = SimpleNamespace(hooks=[], stop=None)
    first, second = (Watch.of(config, (), {}, best=VALIDATION) for _ in range(2))
    iteration = Iteration("ppo", 1, 9, {}, (), Path())
    calls = (
        lambda watch: watch.after(replace(iteration, metrics={VALIDATION: 1.0}), seconds=1.0),
        lambda watch: watch.after(replace(iteration, step=2, metrics={VALIDATION: 2.0}), seconds=1.0),
        lambda watch: watch.measured({VALIDATION: 3.0}, 2, seconds=1.0),
    )
    for call, step in zip(calls, (0, 1, 2), strict=True):
        sent: list[str] = []

        def noted(ask, *, seconds, sent=sent):
            sent.append(json.dumps(ask()))
            return json.loads(sent[-1])

        monkeypatch.setattr(watching, "from_main", noted)
        call(first)
        monkeypatch.setattr(watching, "from_main", lambda ask, *, seconds, sent=sent: json.loads(sent[0]))
        call(second)
        assert second.state == first.state and (first.best_step, second.best_step) == (step, step)


def test_without_the_setting_nothing_is_saved_or_measured(tmp_path):
    state, lines, ends = ppo_stage(tmp_path, (0.0, 5.0, 1.0), best=None)
    assert (weights(state), ends, kept(tmp_path, "ppo")) == (2, [], [2])
    assert "checkpoints.best" not in str(lines)


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [{}, {"staleness": 1, "update_steps": 3}], ids=["synchronous", "asynchronous"])
def test_a_run_exports_the_weights_that_were_validated_and_has_the_metrics_of_one_without(asynchronous, tmp_path):
    """With the minus the weights before the first iteration are the best: learning raises the score."""
    settings = ["checkpoints.keep=1", "grpo.save_every=3", "validation.every=1", "validation.k=4"]
    settings += ["plan=disaggregated", *ADAPTER] if asynchronous else ["plan=colocate"]
    for sign, step in (("", 3), ("-", 0)):
        name = f"best{sign}"
        chosen = f"checkpoints.best={sign}val-core/all/score/mean@4"
        run = config(tmp_path, name, settings=[*settings, chosen], **asynchronous)
        main(run)
        path = tmp_path / name
        model = (path / "model" / "model.safetensors").read_bytes()
        best = json.loads((path / "summary.json").read_text())["best"]
        assert kept(path, "grpo") == sorted({best["step"], 4})
        if not asynchronous:
            assert best["step"] == step
        export_checkpoint(path, best["step"], tmp_path / f"out{sign}")
        assert (tmp_path / f"out{sign}" / "model" / "model.safetensors").read_bytes() == model
        whole = timeless(path)
        resumed(run, 4)
        assert (path / "model" / "model.safetensors").read_bytes() == model and timeless(path) == whole
    main(config(tmp_path, "without", settings=settings, **asynchronous))
    assert timeless(tmp_path / "without") == whole
    assert kept(tmp_path / "without", "grpo") == [4]
