"""Whole runs whose roles sleep leave what runs leave whose roles do not, also when they are killed and resumed."""

from pathlib import Path

import pytest

from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.meshes.transfers import is_on_host
from jrlhf.roles import actor, critic
from jrlhf.roles.compiled import CompiledModel
from jrlhf.stages import finalize
from jrlhf.train import main
from tests.support.runs import resumed, stage_of, timeless

pytestmark = [pytest.mark.proof("memory"), pytest.mark.usefixtures("quick_compilation")]

ASLEEP = dict.fromkeys(("optimizer", "actor", "critic", "reference", "reward"), "host")


def cases(user: Path) -> dict[str, dict]:
    """Sections of configs, with what sleeps in each."""
    text = {"name": "preference", "model": str(user / "reward"), "batch": 8}
    every = {"stages": ["sft", "reward_model", "ppo"], "validation": {"every": 2}, "ppo": {"iterations": 3}}
    critic = {"critic": str(user / "critic")}
    return {
        "ppo": every | {"roles": critic, "rewards": [text], "sleep": ASLEEP | {"ahead": True}},
        "lora": every | {"lora": {"rank": 2}, "sleep": ASLEEP},
        "shared_passes": every | {"compute": {"shared_passes": True}, "sleep": ASLEEP | {"ahead": True}},
    }


@pytest.mark.parametrize("name", ["ppo", "lora", "shared_passes"])
def test_a_run_asleep_is_a_run_awake_also_when_it_is_resumed(name, user, settings, tmp_path, monkeypatch):
    sections, paths = cases(user)[name], []
    for asleep in (False, True):
        config = settings(**sections, name="asleep" if asleep else "awake", run_dir=str(tmp_path))
        if not asleep:
            del config["sleep"]
        paths.append(tmp_path / config["name"])
        with monkeypatch.context() as patch:
            if asleep:
                awake_only(patch)
            main(build(Config, config | {"checkpoints": {"keep": 4}}))
    awake, resting = paths
    expected = left(awake)
    assert left(resting) == expected
    stage = config["stages"][-1]
    records = stage_of(resting, stage)
    assert all(record["timing_s/sleep"] > 0 for record in records)
    assert [record["perf/compilations"] for record in records][2:] == [0]

    resumed(build(Config, config | {"checkpoints": {"keep": 4}}), 2, 3)
    assert left(resting) == expected


def awake_only(patch: pytest.MonkeyPatch) -> None:
    """Nothing that sleeps is computed with: a CPU would not mind, an accelerator does."""

    def checked(make):
        def build_checked(*builder_arguments, **options):
            program = make(*builder_arguments, **options)

            def run(*arguments, **named):
                assert not is_on_host((arguments, named))
                return program(*arguments, **named)

            return run

        return build_checked

    for name in ("score_logprobs", "score_logprobs_with_base", "score_values", "score_sequences", "generate"):
        patch.setattr(CompiledModel, name, checked(getattr(CompiledModel, name)))
    patch.setattr(CompiledModel, "actor_step", checked(CompiledModel.actor_step))
    for name in ("critic_step", "make_on_policy_step", "make_on_policy_actor_step"):
        patch.setattr(critic, name, checked(getattr(critic, name)))
    switch, export = actor.generation_weights, finalize.export_hf

    def switched(model, *others, **options):
        assert not is_on_host((model.params, model.frozen))
        return switch(model, *others, **options)

    def exported(params, *others, **options):
        assert not is_on_host((params, options.get("adapter")))
        return export(params, *others, **options)

    patch.setattr(actor, "generation_weights", switched)
    patch.setattr(finalize, "export_hf", exported)


def left(path: Path) -> tuple:
    """Metrics but for times and compilations, and the bytes of every model."""
    models = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.glob("*model/*.safetensors"))}
    assert models
    return timeless(path), models
