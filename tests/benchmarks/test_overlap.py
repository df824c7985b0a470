"""What processes overlap: docs/asynchronous.md states the results, and their theory can be had again."""

import json
import math
from dataclasses import replace
from pathlib import Path

from benchmarks.overlap import SETTING, STEP
from benchmarks.records import RESULTS
from jrlhf.fleet.predict import predict

RUNS = json.loads((RESULTS / "overlap.json").read_text())["runs"]
DOCUMENT = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text(encoding="utf-8")


def test_the_document_states_the_results():
    for run in RUNS:
        seconds = f"{run['seconds']:.2f} ± {run['spread']:.2f} | {run['steps'] * STEP:.2f}"
        assert f"| {run['staleness']} | {seconds} | {run['speed_up']:.2f} | {run['theory']:.2f} |\n" in DOCUMENT
        assert math.isclose(run["speed_up"], RUNS[0]["seconds"] / run["seconds"])


def test_the_speed_up_is_nearly_that_of_the_schedule():
    for run in RUNS:
        rules = replace(SETTING.rules, staleness=run["staleness"])
        assert run["steps"] == predict(replace(SETTING, rules=rules)).step
        assert run["speed_up"] >= 0.9 * run["theory"] and run["seconds"] <= 1.1 * run["steps"] * STEP
    assert RUNS[-1]["speed_up"] > 2
