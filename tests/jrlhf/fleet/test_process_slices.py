"""Asynchronous runs of several processes, with rollouts on the devices of some and updates on those of others."""

from pathlib import Path

import pytest
import yaml

from jrlhf.errors import UserError
from jrlhf.run.files import read_jsonl
from jrlhf.stages import setup
from jrlhf.stages.setup import select_resources
from tests.jrlhf.fleet.test_runs import ADAPTER, ALGORITHMS, REWARD, SECTION, SETTINGS, config
from tests.jrlhf.stages.test_process_runs import assert_same_run, kill_second, records
from tests.support.launched import LAYOUTS, Launched, train


def start(count: int, runs: Path, name: str, algorithm: str, *more: str) -> Launched:
    """Starts an asynchronous run in `count` processes with 8 devices together: updates on 0-3, rollouts on 4-7."""
    settings = [setting for setting in SETTINGS if not setting.startswith("device.simulated")]
    asynchronous = [f"{algorithm}.asynchronous.{value}" for value in ("staleness=2", "update_steps=3")]
    section = [f"{algorithm}.{value}" for value in SECTION]
    stages = f"stages=[sft, {algorithm}]", *ALGORITHMS[algorithm]
    text = Path("configs/arithmetic-grpo.yaml").read_text().partition("\ngrpo:")[0]
    (runs / "config.yaml").write_text(text + "\nevaluation: {prompts: 8}\n")
    return train(
        count, runs, name, *settings, REWARD, *stages, *section, *asynchronous, *more, config=str(runs / "config.yaml")
    )


@pytest.mark.proof("runs")
@pytest.mark.parametrize(
    "count, algorithm, settings",
    [
        (4, "ppo", ["ppo.asynchronous.on_new_weights=keep_cache", "ppo.rollout_batch=24", "plan={uneven}"]),
        (2, "grpo", ["grpo.asynchronous.on_new_weights=prefill_again", *ADAPTER]),
        (2, "dapo", ["dapo.asynchronous.on_new_weights=finish", "dapo.asynchronous.logical_workers=2"]),
    ],
    ids=["ppo", "grpo", "dapo"],
)
def test_several_processes_do_what_one_does(count: int, algorithm: str, settings: list[str], tmp_path: Path):
    """With four processes the trainer has the devices of three, and rollouts those of the last one."""
    calls = {call: {"layout": layout, "devices": "0-5", "data": 3, "fsdp": 2} for call, layout in LAYOUTS.items()}
    calls["actor.generate"] |= {"devices": "6-7", "data": 1}
    del calls["reward.score"]
    uneven = tmp_path / "uneven.yaml"
    uneven.write_text(yaml.safe_dump({"name": "uneven", "calls": calls}))
    settings = [setting.format(uneven=uneven) for setting in settings]
    for processes, name in ((1, "one"), (count, "several")):
        start(processes, tmp_path, name, algorithm, *settings).assert_codes(900, *[0] * processes)
    assert_same_run(tmp_path / "one", tmp_path / "several", "model")
    assert records(tmp_path / "one")[-1]["async/recomputed_tokens"] > 0


@pytest.mark.proof("runs")
def test_a_killed_run_of_two_processes_goes_on_to_the_same_bits(tmp_path: Path):
    start(2, tmp_path, "whole", "ppo").assert_codes(600, 0, 0)
    heartbeat = "distributed.heartbeat=10"
    kill_second(start(2, tmp_path, "killed", "ppo", heartbeat), tmp_path / "killed", 2)
    start(2, tmp_path, "killed", "ppo", heartbeat, "--resume").assert_codes(600, 0, 0)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
    for line in read_jsonl(tmp_path / "whole" / "timeline.jsonl"):
        if line["stage"] == "ppo":
            assert {call["devices"] for call in line["calls"]} == {"0-3", "4-7"}


def test_what_several_processes_cannot_do_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "several", lambda: True)
    for settings, sentence in (
        (["fleet.workers=2"], "fleet.workers=2 is for runs of one process"),
        (["grpo.asynchronous.clock=wall"], "grpo.asynchronous.clock=wall is for runs of one process"),
    ):
        with pytest.raises(UserError, match=sentence):
            select_resources(config(tmp_path, "refused", "grpo", settings, staleness=1))
