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


def test_a_plan_by_hand_is_priced_and_told_if_it_does_not_fit(tmp_path, capsys):
    """What a search saves is priced as the search did, with the micro-batches that the config's budgets leave."""
    saved = tmp_path / "plan.yaml"
    arguments = ["--config", "llama3-8b-ppo", "--cluster", "8xh100"]
    assert cli([*arguments, "--proposals", "300", "--save", str(saved)]) == 0
    found = capsys.readouterr().out
    assert cli([*arguments, "--plan", str(saved)]) == 0
    assert found.startswith(capsys.readouterr().out)
    assert cli([*arguments, "--proposals", "300", "--save", str(saved), "compute.score_tokens=8192"]) == 0
    capsys.readouterr()
    assert cli([*arguments, "--plan", str(saved), "compute.score_tokens=8192"]) in (0, 2)
    assert "leave one out" not in capsys.readouterr().err
    assert cli([*arguments, "--plan", "colocate", "ppo.rollout_batch=8192"]) == 2
    told = capsys.readouterr()
    assert "bottleneck: " in told.out
    assert told.err.startswith("error: plan colocate needs ") and "fewer rollout.slots" in told.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cluster", "16xh101"], "--cluster=16xh101 is of no known hardware"),
        (["--cluster", "12xh100"], "the nearest is 16xh100"),
        (["--cluster", "8xh100", "--seconds", "nan"], "--seconds nan must be more than 0 and finite"),
        (["--cluster", "8xh100", "--save", "."], "--save . is a directory: name a file in it"),
        (["--cluster", "8xh100", "--save", f"{__file__}/plan.yaml"], "choose another place"),
        (["--cluster", "8xh100", "--plan", "mine.yaml"], "plan=mine.yaml is neither colocate,"),
        (["--cluster", "8xh100", "--plan", "split", "--seconds", "1"], "--seconds 1.0 has no effect with --plan"),
        (["--cluster", "8xh100", "--plan", "split", "stages=[sft]"], "--plan split has no effect with stages=[sft]"),
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
