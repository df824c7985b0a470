"""What clocks and processes let wait, and what is learnt: the docs state the results, as in theory."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.clocks import theory
from benchmarks.learning import table
from benchmarks.overlap import SCENARIO, STEP
from benchmarks.records import RESULTS
from jrlhf.planning.predict_async import costs

CLOCKS, OVERLAP, LEARNING = (json.loads((RESULTS / f"{x}.json").read_text()) for x in ("clocks", "overlap", "learning"))
DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("asynchronous.md", "staleness.md"))


def test_the_document_states_the_results():
    for run in CLOCKS["runs"]:
        seconds = f"{run['seconds']:.2f} ± {run['spread']:.2f} | {theory(run['clock'], run['slower']):.2f}"
        assert f"| {run['slower']:g} | {run['clock']} | {seconds} |\n" in DOCUMENT
    for run in (runs := OVERLAP["runs"]):
        seconds = f"{run['seconds']:.2f} ± {run['spread']:.2f} | {run['steps'] * STEP:.2f}"
        assert f"| {run['staleness']} | {seconds} | {run['speed_up']:.2f} | {run['theory']:.2f} |\n" in DOCUMENT
        assert math.isclose(run["speed_up"], runs[0]["seconds"] / run["seconds"])
    assert table(LEARNING["results"]) in DOCUMENT


def test_the_speed_up_is_nearly_that_of_the_schedule():
    for run in OVERLAP["runs"]:
        rules = replace(SCENARIO.rules, staleness=run["staleness"])
        assert run["steps"] == costs(replace(SCENARIO, rules=rules)).step
        assert run["speed_up"] >= 0.9 * run["theory"] and run["seconds"] <= 1.1 * run["steps"] * STEP


def test_tokens_are_as_old_as_the_bound_admits():
    """While version v draws, batches up to v + bound may start, and four are drawn in the time of an update."""
    for result in LEARNING["results"]:
        bound, runs = result["staleness"], result["runs"]
        version, ages = 0, []
        for batch in range(LEARNING["EVERY"] * (len(runs[0]["curve"]) - 1)):
            version += batch > min(version + bound, version * 4 + 4)
            ages.append(batch - version)
        assert all(run["max_age"] == max(ages) == bound for run in runs)
        assert all(abs(run["mean_age"] - np.mean(ages)) < 1e-6 for run in runs)
