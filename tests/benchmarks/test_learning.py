"""What asynchronous training learns: docs/asynchronous.md says what was measured, and tokens were as old as may be."""

import json
from pathlib import Path

from benchmarks.learning import table
from benchmarks.records import RESULTS

RECORD = json.loads((RESULTS / "learning.json").read_text())
DOCUMENT = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text(encoding="utf-8")


def test_the_document_has_the_table_of_the_results():
    assert table(RECORD["results"]) in DOCUMENT


def test_tokens_are_as_old_as_the_bound_admits():
    """The first batches are drawn at once: batch n < staleness learns from tokens of age n, the others of the bound."""
    for result in RECORD["results"]:
        bound, runs = result["staleness"], result["runs"]
        updates = RECORD["EVERY"] * (len(runs[0]["curve"]) - 1)
        expected = bound - bound * (bound + 1) / 2 / updates
        assert all(run["max_age"] == bound and abs(run["mean_age"] - expected) < 1e-6 for run in runs)
