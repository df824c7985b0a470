"""What the clocks let wait: docs/asynchronous.md states the results."""

import json
from pathlib import Path

from benchmarks.clocks import theory
from benchmarks.records import RESULTS

RUNS = json.loads((RESULTS / "clocks.json").read_text())["runs"]
DOCUMENT = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text(encoding="utf-8")


def test_the_document_states_the_results():
    for run in RUNS:
        seconds = f"{run['seconds']:.2f} ± {run['spread']:.2f} | {theory(run['clock'], run['slower']):.2f}"
        assert f"| {run['slower']:g} | {run['clock']} | {seconds} |\n" in DOCUMENT
