"""Comparisons with other libraries: what counts and what is dropped.

No peer is needed. One slow test lets transformers, where it is installed, show that both sides compute the same.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import compare, records
from benchmarks.compare import (
    OURS,
    PEERS,
    SHAPE,
    Comparison,
    Repeats,
    differences,
    fastest,
    is_quiet,
    operations,
    pairs,
    ratios,
    summary,
    valid,
    weights_of,
)
from benchmarks.peers import ours
from benchmarks.peers.common import Job, Shape, given_tokens, prompts
from benchmarks.sides import CompareError, Side
from jrlhf.models import init_lm

TINY = Shape(layers=2, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=24, vocab=128)


def job(directory: Path, **fields) -> Job:
    return replace(Job("check", str(directory), TINY, batch=2, prompt=4, response=3, warmup=1, repeats=2), **fields)


def alone(*seconds: float) -> Repeats:
    """Repeats that nobody disturbed."""
    return Repeats(seconds, (0.0,) * len(seconds))


def test_a_repeat_counts_unless_others_took_more_than_ticks_and_three_percent():
    assert is_quiet(1.0, 0.06) and not is_quiet(1.0, 0.061)
    assert Repeats((1.0, 2.0, 3.0, 4.0), (0.0, 1.0, 0.119, 0.0)).kept == (1.0, 3.0, 4.0)
    # Pairs are neighbours that were both alone.
    ours, theirs = Repeats((1.0, 2.0, 4.0, 1.0), (0.0, 0.0, 9.0, 0.0)), Repeats((3.0, 4.0, 4.0, 9.0), (0, 0, 0, 9.0))
    assert pairs({OURS: ours, "only": theirs}, "only") == [3.0, 2.0]


def test_ratios_are_medians_of_pairs_and_leave_void_rounds_out():
    steady = {OURS: alone(1.0, 4.0, 2.0), "slow": alone(4.0, 16.0, 6.0), "fast": alone(3.0, 8.0, 6.0)}
    drifting = {name: alone(*(3 * duration for duration in measured.seconds)) for name, measured in steady.items()}
    disturbed = {**steady, "fast": Repeats((60.0, 5.0, 60.0), (9.0, 0.0, 9.0))}
    rounds = [steady, disturbed, drifting]
    assert valid(rounds) == [steady, drifting]
    assert ratios(rounds, "slow") == pytest.approx([4.0, 4.0])
    assert ratios(rounds, "fast") == pytest.approx([3.0, 3.0])
    assert fastest(rounds, ("slow", "fast")) == "fast"


def test_a_summary_tells_the_void_rounds_and_keeps_all_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steady, loud = alone(0.5, 0.5), Repeats((0.5, 0.5), (9.0, 9.0))
    rounds = [{OURS: steady, "only": alone(1.0, 1.5)}, {OURS: loud, "only": steady}]
    record = summary(Comparison("generation", "generate", 2, ("only",)), job(tmp_path), rounds)
    assert record["ratios"] == {"only": {"least": 2.5, "median": 2.5, "most": 2.5}}
    assert record["operations_a_second"] == pytest.approx(2 * record["operations"])
    assert record["void_rounds"] == 1 and record["rounds"][1][OURS]["others"] == (9.0, 9.0)
    printed = capsys.readouterr().out
    assert "1 of 2 rounds are void" in printed and "ratio to only: 2.5 – 2.5 – 2.5 over 1 rounds" in printed
    assert "ratios" not in summary(Comparison("generation", "generate", 2, ("only",)), job(tmp_path), rounds[1:])


def test_the_work_counts_every_weight_once_a_token():
    shapes = jax.eval_shape(lambda key: init_lm(ours.model_config(SHAPE), key), jax.random.key(0))
    matrices = sum(leaf.size for leaf in jax.tree.leaves(shapes["layers"]) if leaf.ndim > 2)
    assert weights_of(SHAPE) == (matrices, shapes["embedding"].size)

    layers, head, decoded = matrices, shapes["embedding"].size, 8 * 64
    generation = 2 * (8 * 16 + decoded - 8) * layers + 2 * decoded * head
    forward, with_head = 2 * 8 * 80 * layers, 2 * (8 * 80 * layers + decoded * head)
    scoring = with_head + forward  # reference and reward
    training = 3 * with_head + 3 * forward  # actor and critic
    assert operations("generate", SHAPE, 8, 16, 64) == generation
    assert operations("ppo", SHAPE, 8, 16, 64) == generation + scoring + training
    assert operations("ppo", SHAPE, 8, 16, 64) == pytest.approx(32.5e9, rel=0.01)


def test_differences_are_the_largest_and_rows_of_greedy_tokens_are_whole():
    one = {"logprobs": np.zeros((2, 3)), "values": np.zeros((2, 3)), "greedy": np.array([[1, 2], [3, 4]])}
    other = {"logprobs": np.eye(2, 3) * -0.5, "values": np.full((2, 3), 0.25), "greedy": np.array([[1, 2], [3, 5]])}
    assert differences(one, other) == {"logprobs": 0.5, "values": 0.25, "greedy_equal": 0.5}


def test_both_sides_get_the_same_prompts_without_special_ids(tmp_path: Path):
    task = job(tmp_path, batch=64)
    again = Job.from_json(task.to_json())
    assert again == task
    np.testing.assert_array_equal(prompts(again), prompts(task))
    assert prompts(task).shape == (3, 64, 4) and given_tokens(task).shape == (64, 7)
    assert 3 <= prompts(task).min() and prompts(task).max() < TINY.vocab


def test_bad_arguments(capsys: pytest.CaptureFixture[str]):
    for arguments, message in [
        ([], "--peer"),
        (["--peer", "verl"], "invalid choice: 'verl'"),
        (["--peer", "hf", "--rounds", "0"], "--rounds"),
        (["--peer", "hf", "--repeats", "many"], "--repeats"),
        (["--peer", "hf", "--case", "ppo"], "--case ppo: with hf only generate can be compared"),
        (["--peer", "hf", "--venv", "/nowhere"], "--venv /nowhere: there is no bin/python in it"),
    ]:
        with pytest.raises(SystemExit) as stop:
            compare.main(arguments)
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_record_says_how_it_was_made_and_no_failure_is_written(tmp_path: Path, monkeypatch, capsys):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    command = ["--peer", "trl", "--venv", str(tmp_path / "venv")]

    def outcome(results: Any) -> int:
        def measure(*_, **__):
            if isinstance(results, CompareError):
                raise results
            return {"versions": {"ours": {"jax": "1"}, "peer": {"trl": "2"}}, "results": results}

        monkeypatch.setattr(compare, "compare", measure)
        return compare.main(command)

    for results, message in (
        ([{"ratios": {}}, {}], "other processes used the machine"),
        (CompareError("it broke"), "error: it broke"),
    ):
        assert outcome(results) == 1
        assert message in capsys.readouterr().err and not list(tmp_path.glob("*.json"))
    assert outcome([{"ratios": {}}]) == 0
    record = json.loads((tmp_path / "compare-trl.json").read_text())
    assert record["command"] == "python -m benchmarks.compare --peer trl"  # wherever the environment is
    assert record["versions"]["ours"] == {"jax": "1"} and record["versions"]["peer"] == {"trl": "2"}
    assert record["results"] == [{"ratios": {}}] and {"hardware", "date", "peer"} <= record.keys()


def test_every_comparison_is_one_that_our_side_can_do():
    comparisons = [comparison for peer in PEERS.values() for comparison in peer.comparisons]
    assert {comparison.case for comparison in comparisons} <= {"generate", "ppo", "grpo"}
    assert all(comparison.variants for comparison in comparisons)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose weights are there."""
    task = job(tmp_path_factory.mktemp("weights"))
    ours.export(task)
    return task


@pytest.mark.full
def test_our_side_times_and_computes_numbers_that_tell_models_apart(exported: Job):
    ours.check(exported)
    numbers = np.load(exported.model("ours.npz"))
    assert {name: numbers[name].shape for name in numbers} == {"logprobs": (2, 6), "values": (2, 6), "greedy": (2, 3)}
    assert np.std(numbers["logprobs"]) > 0.01 and np.std(numbers["values"]) > 0.01  # else any two models would agree
    for measure in (ours.generate, ours.ppo):
        assert [len(times) for times in measure(exported).values()] == [2, 2]


run = Side.run


@pytest.mark.full
def test_transformers_computes_the_same_and_a_changed_weight_is_seen(exported: Job, tmp_path: Path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    directory = tmp_path / "copy"
    shutil.copytree(exported.directory, directory)
    (directory / "benchmarks").symlink_to(compare.ROOT / "benchmarks")
    task = replace(exported, directory=str(directory))
    sides = Side(Path(sys.executable), "ours", compare.ROOT), Side(Path(sys.executable), "hf", directory)
    assert compare.show_same(*sides, task)["greedy_equal"] == 1
    file = task.model("actor") / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, file, {"format": "pt"})
    monkeypatch.setattr(Side, "run", lambda side, task: run(side, task) if side is sides[1] else {})  # ours as it was
    with pytest.raises(CompareError, match="do not compute the same"):
        compare.show_same(*sides, task)
