"""Comparisons with other libraries: what counts and what is dropped.

No peer is needed. One slow test lets transformers, where it is installed, show that both sides compute the same.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import compare
from benchmarks.compare import (
    OURS,
    SHAPE,
    Repeats,
    differences,
    fastest,
    is_quiet,
    operations,
    pairs,
    ratios,
    valid,
    weights_of,
)
from benchmarks.peers import ours
from benchmarks.peers.common import Job, Shape
from benchmarks.sides import CompareError, Side
from jrlhf.models import init_lm

TINY = Shape(layers=2, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=24, vocab=128)


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


@pytest.mark.proof("families")
def test_transformers_computes_the_same_and_a_changed_weight_is_seen(tmp_path: Path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    task = Job("check", str(tmp_path), TINY, batch=2, prompt=4, response=3, warmup=1, repeats=2)
    ours.export(task)
    (tmp_path / "benchmarks").symlink_to(compare.ROOT / "benchmarks")
    sides = Side(Path(sys.executable), "ours", compare.ROOT), Side(Path(sys.executable), "hf", tmp_path)
    run = Side.run
    assert compare.show_same(*sides, task)["greedy_equal"] == 1
    file = task.model("actor") / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, file, {"format": "pt"})
    monkeypatch.setattr(Side, "run", lambda side, task: run(side, task) if side is sides[1] else {})  # ours as it was
    with pytest.raises(CompareError, match="do not compute the same"):
        compare.show_same(*sides, task)
