"""SFT, reward models and DPO in pipeline stages: a run is the run without them, and resumes without them."""

from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.meshes import to_host
from jrlhf.models.pipeline import Stages
from jrlhf.planning import resolve as resolving
from jrlhf.planning.dryrun import describe
from jrlhf.planning.resolve import resolve
from jrlhf.roles.initial import InitialModels
from jrlhf.run.metrics import read_metrics
from jrlhf.stages import sft
from jrlhf.stages.setup import open_context
from jrlhf.train import main
from tests.support.runs import resumed, timeless

pytestmark = pytest.mark.usefixtures("quick_compilation")

STAGE = {"learning_rate": 1e-3, "warmup": 0, "steps": 3, "batch": 8, "eval_every": 2, "save_every": 2, "eps": 1e-3}
ROUNDED: Any = {"rel": 1e-4, "abs": 1e-5}


def sections(*stages: str, parts: int = 1, steps: int = 3, **pipeline: Any) -> dict[str, Any]:
    """The stages, and their sections. pipeline: their settings `pipeline`."""
    divided, own = {"micro_batches": parts}, {"pipeline": pipeline} if pipeline else {}
    section = STAGE | own | {"steps": steps}
    return {"stages": [*stages], "rewards": []} | {
        stage: section | ({"algorithm": divided} if stage == "dpo" else divided) for stage in stages
    }


def assert_close(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for record, other in zip(records, expected, strict=True):
        assert record.keys() == other.keys()
        for name, number in record.items():
            close = number if isinstance(number, str) else pytest.approx(number, **ROUNDED)
            assert other[name] == close, (record["stage"], record["step"], name)


@pytest.mark.full
def test_sft_in_stages_is_sft_without(settings, tmp_path, monkeypatch):
    """Losses, held-out losses and weights; the actor's embeddings are tied. The dry run shows the stages."""
    ends, stages, staged_calls = [], list[int](), list[str]()
    monkeypatch.setattr(resolving, "refuse_cross_process", lambda plan, _: stages.append(plan["sft.update"].pipeline))

    def run_stage(context, name, init, advance, *, meta, announced):
        state, first = advance(init(), 0)
        state, second = advance(state, 1)
        ends.append((first, second, to_host(state.params)))
        return state

    def counted(name, method):
        return lambda *arguments: staged_calls.append(name) or method(*arguments)

    monkeypatch.setattr(sft, "run_stage", run_stage)
    for name in ("gradients", "scores"):
        monkeypatch.setattr(Stages, name, counted(name, getattr(Stages, name)))
    for name, options in (("whole", {}), ("staged", {"parts": 2, "stages": 2})):
        given = settings(run_dir=str(tmp_path), name=name, **sections("sft", steps=2, **options))
        config: Config = build(Config, given)
        with open_context(config, resolve, resume=False) as context, jax.set_mesh(context.mesh):
            initial = InitialModels(context.config, context.mesh, context.compute, context.console)
            sft.train_sft(context, initial.policy())
    whole, staged = ends
    assert whole[0]["sft/loss"] - whole[1]["sft/loss"] > 0.01 and "sft/eval_loss" in whole[1]
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5), whole, staged)
    assert stages == [2] and staged_calls == ["gradients", "scores", "gradients", "scores"]
    text = describe(config)
    assert "plan of a step of sft on data=1 x fsdp=4 x tensor=2:" in text and "inputs in flight" in text
    assert "devices 0-7: data=1 x fsdp=2 x tensor=2" in text and "in 2 parts, 2 stages by 1f1b" in text


@pytest.mark.proof("runs")
@pytest.mark.parametrize("stages", ["sft reward_model", "sft dpo", "sft reward_model lora", "dpo lora"])
def test_a_run_in_stages_is_the_run_without_and_resumes_without_them(stages, settings, tmp_path):
    """With adapters, DPO's reference is their base."""
    *stages, last = stages.split()
    stages, adapter = (stages, {"lora": {"rank": 2}}) if last == "lora" else ([*stages, last], {})

    def config(name: str, **options) -> Config:
        return build(Config, settings(run_dir=str(tmp_path), name=name, **sections(*stages, **options), **adapter))

    paths = [tmp_path / name for name in ("whole", "staged")]
    main(config("whole"))
    main(config("staged", parts=2, stages=2))
    whole, staged = map(timeless, paths)
    assert_close(staged, whole)
    assert [record["perf/compilations"] for record in read_metrics(paths[1])][-1] == 0
    for name in ("model", "reward_model"):
        if (paths[0] / name).exists():
            one, two = (load_file(path / name / "model.safetensors") for path in paths)
            for weight in one:
                np.testing.assert_allclose(two[weight], one[weight], rtol=1e-3, atol=1e-4, err_msg=weight)
    resumed(config("staged", parts=2, stages=2), 3)
    assert timeless(paths[1]) == staged
    resumed(config("staged"), 3)
    assert_close(timeless(paths[1]), staged)
