"""`python -m jrlhf.plan`: plans for clusters that are not there, and one sentence for what cannot be."""

import pytest
import yaml

from jrlhf.meshes.plan import plan_of
from jrlhf.plan import cli


def test_a_plan_is_printed_saved_and_drawn(tmp_path, capsys):
    saved, drawn = tmp_path / "plans" / "plan.yaml", tmp_path / "plan.svg"
    arguments = ["--config", "llama3-8b-ppo", "--cluster", "16xh100", "--proposals", "300", "--seed", "1"]
    assert cli([*arguments, "--save", str(saved), "--plot", str(drawn)]) == 0
    told = capsys.readouterr().out
    assert "plan for ppo on 16 x h100: " in told and "bottleneck: " in told and "heuristic" in told
    plan = plan_of(yaml.safe_load(saved.read_text()))
    calls = {"actor.generate", "reward.score", "actor.logprobs", "reference.logprobs", "critic.values"}
    assert plan.placements.keys() == calls | {"critic.update", "actor.update"}
    assert plan.devices <= 16 and drawn.read_text().startswith("<?xml")
    assert cli(arguments) == 0
    table = [
        line.split()[:3] for line in told.splitlines() if line.startswith("  actor.") or line.startswith("  critic.")
    ]
    again = capsys.readouterr().out
    assert table == [
        line.split()[:3] for line in again.splitlines() if line.startswith("  actor.") or line.startswith("  critic.")
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cluster", "16xh101"], "16xh101"),
        (["--cluster", "12xh100"], "12xh100"),
        (["--cluster", "8xh100", "--seconds", "0"], "--seconds 0.0 must be more than 0"),
        (["--cluster", "8xh100", "--proposals", "-1"], "--proposals -1 must be more than 0"),
        (["--cluster", "8xh100", "--plot", "plan.txt"], "must end in .svg, .png, .pdf"),
        (["--cluster", "8xh100", "--proposals", "10", "ppo.rollout_batch=510"], "choose 504 or 512 rows"),
        (["--cluster", "8xh100", "--proposals", "10", "ppo.rolout_batch=512"], "ppo.rolout_batch"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys):
    assert cli(["--config", "llama3-8b-ppo", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and sentence in told and told.count("\n") == 1


def test_a_model_that_fits_nowhere_is_refused(capsys):
    assert cli(["--config", "llama3-70b-ppo", "--cluster", "8xh100", "--proposals", "10"]) == 2
    told = capsys.readouterr().err
    assert "fits nowhere on 8 devices" in told and "GiB" in told and told.count("\n") == 1
