"""What asynchronous training learns: docs/asynchronous.md says what was measured, and tokens were as old as may be."""

import json
from pathlib import Path

import numpy as np

from benchmarks.learning import table
from benchmarks.records import RESULTS

RECORD = json.loads((RESULTS / "learning.json").read_text())
DOCUMENT = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text(encoding="utf-8")


def test_the_document_has_the_table_of_the_results():
    assert table(RECORD["results"]) in DOCUMENT


def test_tokens_are_as_old_as_the_bound_admits():
    """While version v draws, batches up to v + bound may start, and four are drawn in the time of an update."""
    for result in RECORD["results"]:
        bound, runs = result["staleness"], result["runs"]
        version, ages = 0, []
        for batch in range(RECORD["EVERY"] * (len(runs[0]["curve"]) - 1)):
            version += batch > min(version + bound, version * 4 + 4)
            ages.append(batch - version)
        assert all(run["max_age"] == max(ages) == bound for run in runs)
        assert all(abs(run["mean_age"] - np.mean(ages)) < 1e-6 for run in runs)
