"""Whole runs of the algorithms that keep more than PPO does: what is resumed ends in the bits of what never stopped."""

import pytest

from jrlhf.config import load_config
from jrlhf.train import main
from tests.support.runs import resumed, stage_of, timeless

SIZES = [
    "device.simulated=8",
    "mesh.fsdp=2",
    "mesh.tensor=4",
    "sft.steps=30",
    "sft.batch=32",
    "sft.save_every=30",
    "model.layers=1",
    "data.heldout_rows=16",
    "evaluation.prompts=16",
    "checkpoints.keep=4",
]
# (config, stage, what is set besides): draws of DAPO, greedy baselines, texts beside rollouts, costs and multiplier.
RUNS = {
    "dapo": (
        "arithmetic-dapo",
        "dapo",
        [
            "dapo.algorithm.max_rounds=3",
            "rewards=[{function: format_regex, options: {pattern: '[12].*'}}]",  # a model that learned little meets it
            "dapo.solved_score=0.5",
            "data.problems=10",
            "dapo.algorithm.surrogate=cispo",
            "dapo.algorithm.old_logprobs=interpolate",
            "dapo.algorithm.importance=token",
            "dapo.algorithm.mask_token=[0.5, 2]",
        ],
    ),
    "remax": ("arithmetic-remax", "remax", ["remax.algorithm.old_logprobs=rollout"]),
    "ptx": ("arithmetic-rloo", "rloo", ["rloo.algorithm.ptx_coef=0.1", "rloo.algorithm.importance=sequence"]),
    "safe_rlhf": (
        "arithmetic-grpo",
        "safe_rlhf",
        [
            "stages=[sft, safe_rlhf]",
            "grpo={}",
            "costs=[{name: words, function: word_count}]",
            "safe_rlhf.algorithm={cost_limit: 0.5, multiplier: 0.5, window: 48}",
        ],
    ),
}


@pytest.mark.proof("runs")
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_in_the_same_bits(name, tmp_path):
    config, stage, own = RUNS[name]
    sizes = [f"{stage}.iterations=4", f"{stage}.rollout_batch=32", f"{stage}.save_every=1"]
    settings = load_config(config, [*SIZES, *own, *sizes, f"run_dir={tmp_path}", f"name={name}"])
    main(settings)
    path = tmp_path / name
    model, records = (path / "model" / "model.safetensors").read_bytes(), timeless(path)
    assert [record["perf/compilations"] for record in stage_of(path, stage)][2:] == [0, 0]

    resumed(settings, 3, 4)
    assert (path / "model" / "model.safetensors").read_bytes() == model
    assert timeless(path) == records
    last = [record for record in records if record["stage"] == stage][-1]
    if name == "dapo":
        assert any(record["dapo/rounds"] > 1 for record in records if record["stage"] == stage)
        assert 0 < last["data/solved"] < 1 and last["training/epoch"] > 0
        assert (
            abs(last["rollout_corr/rollout_is_mean"] - 1) < 1e-3
            and last["rollout_corr/rollout_rs_masked_fraction"] == 0
        )
    if name == "ptx":
        assert last["actor/ptx_loss"] > 0 and "rollout_corr/rollout_is_mean" in last
    if name == "safe_rlhf":
        values = {record["safe/multiplier"] for record in records if record["stage"] == stage}
        assert len(values) == 4 and last["cost_critic/grad_norm"] > 0
