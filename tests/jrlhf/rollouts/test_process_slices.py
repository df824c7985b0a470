"""Asynchronous runs of several processes, with rollouts on the devices of some and updates on those of others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from jrlhf.errors import UserError
from jrlhf.planning import resolve
from jrlhf.planning.resolve import select_resources
from jrlhf.run.files import read_jsonl
from tests.jrlhf.rollouts.test_runs import ADAPTER, ALGORITHMS, REWARD, SECTION, SETTINGS, config
from tests.jrlhf.stages.test_process_runs import assert_same_run, kill_second
from tests.support.launched import LAYOUTS, Launched, train
from tests.support.runs import timeless


def start(count: int, runs: Path, name: str, algorithm: str, *more: str) -> Launched:
    """Starts an asynchronous run in `count` processes with 8 devices together: updates on 0-3, rollouts on 4-7."""
    settings = [setting for setting in SETTINGS if not setting.startswith("device.simulated")]
    asynchronous = [
        f"{algorithm}.asynchronous.{value}" for value in ("staleness=2", "uncorrected=true", "update_steps=3")
    ]
    section = [f"{algorithm}.{value}" for value in SECTION]
    stages = f"stages=[sft, {algorithm}]", *ALGORITHMS[algorithm]
    text = Path("configs/arithmetic-grpo.yaml").read_text().partition("\ngrpo:")[0]
    (runs / "config.yaml").write_text(text + "\nevaluation: {prompts: 8}\n")
    return train(
        count, runs, name, *settings, REWARD, *stages, *section, *asynchronous, *more, config=str(runs / "config.yaml")
    )


def placed(runs: Path, trainer: dict[str, Any], rollouts: dict[str, Any], *unused: str) -> str:
    """Returns the setting of a plan with updates and rollouts on these devices. unused: roles that there are not."""
    calls = {
        call: {"layout": layout, **trainer} for call, layout in LAYOUTS.items() if call.split(".")[0] not in unused
    }
    (runs / "plan.yaml").write_text(yaml.safe_dump({"calls": calls | {"actor.generate": rollouts}}))
    return f"plan={runs / 'plan.yaml'}"


def assert_same_as_in_one(runs: Path, count: int, algorithm: str, *settings: str) -> None:
    for processes, name in ((1, "one"), (count, "several")):
        start(processes, runs, name, algorithm, *settings).assert_codes(900, *[0] * processes)
    assert_same_run(runs / "one", runs / "several", "model")
    assert timeless(runs / "one")[-1]["async/recomputed_tokens"] > 0


@pytest.mark.proof("runs")
def test_a_trainer_of_three_processes_and_rollouts_in_a_fourth(tmp_path: Path):
    """The trainer's 6 devices do not divide all 8."""
    trainer, rollouts = {"devices": "0-5", "data": 3, "fsdp": 2}, {"devices": "6-7", "layout": "generate", "fsdp": 2}
    plan = placed(tmp_path, trainer, rollouts, "reward")
    rate = "ppo.actor.learning_rate=0.001"  # Adam amplifies rounding where a gradient is nearly 0
    settings = "ppo.asynchronous.on_new_weights=keep_cache", "ppo.rollout_batch=24", rate, plan
    assert_same_as_in_one(tmp_path, 4, "ppo", *settings)


@pytest.mark.full
def test_rollouts_with_an_adapter_in_a_process_of_their_own(tmp_path: Path):
    assert_same_as_in_one(tmp_path, 2, "grpo", "grpo.asynchronous.on_new_weights=prefill_again", *ADAPTER)


@pytest.mark.proof("runs")
def test_both_sides_share_a_process_and_a_device_is_idle(tmp_path: Path):
    """Process 1 of four has a device of the trainer and one of the rollouts, and device 7 has nothing to do."""
    trainer, rollouts = {"devices": "0-2", "data": 3}, {"devices": "3-6", "layout": "generate", "data": 2, "fsdp": 2}
    plan = placed(tmp_path, trainer, rollouts, "reward", "reference", "critic")
    settings = "dapo.asynchronous.on_new_weights=finish", "dapo.asynchronous.logical_workers=2", "dapo.rollout_batch=48"
    assert_same_as_in_one(tmp_path, 4, "dapo", *settings, plan)


@pytest.mark.proof("runs")
def test_a_killed_run_of_two_processes_goes_on_to_the_same_bits(tmp_path: Path):
    start(2, tmp_path, "whole", "ppo").assert_codes(600, 0, 0)
    heartbeat = "distributed.heartbeat=10"
    kill_second(start(2, tmp_path, "killed", "ppo", heartbeat), tmp_path / "killed", 2)
    start(2, tmp_path, "killed", "ppo", heartbeat, "--resume").assert_codes(600, 0, 0)
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
    for line in read_jsonl(tmp_path / "whole" / "timeline.jsonl"):
        if line["stage"] == "ppo":
            assert {call["devices"] for call in line["calls"]} == {"0-3", "4-7"}


def test_what_several_processes_cannot_do_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "several", lambda: True)
    for settings, sentence in (
        (["fleet.workers=2"], "fleet.workers=2 is for runs of one process"),
        (["grpo.asynchronous.clock=wall"], "grpo.asynchronous.clock=wall is for runs of one process"),
    ):
        with pytest.raises(UserError, match=sentence):
            select_resources(config(tmp_path, "refused", "grpo", settings, staleness=1))
