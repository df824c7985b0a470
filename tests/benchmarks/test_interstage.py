"""What scoring while rows decode gains: docs/plans.md states the results, and their prediction can be had again."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.interstage import (
    CALL,
    CALLS,
    FIRST,
    FUNCTION,
    ITERATIONS,
    ROLLOUTS,
    ROWS,
    STEP,
    TILE,
    lengths_of,
    simulate,
)
from benchmarks.records import RESULTS
from jrlhf.models.generation.occupancy import LastRows
from jrlhf.planning.fusion.last_rows import RECENT, choose, decode, finish

RESULT = json.loads((RESULTS / "interstage.json").read_text())
RUNS, MOVES = RESULT["runs"], RESULT["moves"]
NAMES = "after the last row", "while others decode", "stay in their groups", "move to one group once at most 8 are left"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "plans.md").read_text(encoding="utf-8")


def test_the_document_states_the_results():
    for run, name in zip(RUNS + MOVES, NAMES, strict=True):
        numbers = f"{run['mean']:.2f} | {run['predicted_mean']:.2f} | {run['speed_up']:.2f}"
        assert f"| {name} | {numbers} |\n" in DOCUMENT
        assert np.isclose(run["speed_up"], (RUNS if run in RUNS else MOVES)[0]["mean"] / run["mean"])


def test_the_speed_up_is_nearly_the_predicted_one():
    for run in RUNS:
        lengths = [lengths_of(iteration) for iteration in range(FIRST, ITERATIONS)]
        predicted = [simulate(own, while_decoding=run["while_decoding"]) for own in lengths]
        assert run["predicted"] == pytest.approx(predicted)
        assert run["mean"] == pytest.approx(run["predicted_mean"], rel=0.1)
    assert RUNS[1]["speed_up"] > 1.15


def chosen(iteration: int) -> LastRows | None:
    """Where the last rows of an iteration decode, by the lengths of those before."""
    before = range(max(0, iteration - RECENT), iteration)
    return choose(ROLLOUTS, [decode(ROLLOUTS, lengths_of(number)) for number in before]).last


def test_the_move_of_the_last_rows_gains_what_the_planner_predicts():
    for run, move in zip(MOVES, (False, True), strict=True):
        iterations = range(FIRST, ITERATIONS)
        lasts = [chosen(number) if move else None for number in iterations]
        predicted = [
            finish(ROLLOUTS, decode(ROLLOUTS, lengths_of(n)), last) for n, last in zip(iterations, lasts, strict=True)
        ]
        assert lasts == [LastRows(1, 8) if move else None] * len(iterations)
        assert run["predicted"] == pytest.approx(predicted)
        assert run["mean"] == pytest.approx(run["predicted_mean"], rel=0.1)
    assert MOVES[1]["speed_up"] > 1.15


def test_rows_of_one_length_leave_nothing_to_hide():
    equal, tiles = np.full(ROWS, 20), ROWS // TILE
    after = 20 * STEP + tiles * max(CALLS * CALL, FUNCTION)
    assert simulate(equal, while_decoding=True) == simulate(equal, while_decoding=False) == pytest.approx(after)
    lone = np.where(np.arange(ROWS) == 0, 64, 4)  # all but one tile are scored while one row decodes
    assert simulate(lone, while_decoding=True) == pytest.approx(64 * STEP + max(CALLS * CALL, FUNCTION))
