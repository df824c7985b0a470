"""The table of speeds with real weights in docs/results.md has the figures of the result files."""

import json
from pathlib import Path

from benchmarks.real_speed import TASKS, row
from benchmarks.records import RESULTS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")


def test_the_document_has_the_figures_of_the_files():
    files = [
        json.loads((RESULTS / f"real-speed-{case}.json").read_text()) for case in ("generate", "train", "grpo", "ppo")
    ]
    rows = [row(record, file["products"]["jrlhf"]) for file in files for record in file["results"]]
    assert len(rows) == len(TASKS)
    assert "\n".join(rows) in DOCUMENT
    for file in files:
        assert f"`{file['command']}`" in DOCUMENT


def test_a_row_has_medians_of_all_repeats_and_the_fastest_of_the_peers_ways():
    def repeats(*seconds: float) -> dict:
        return {"seconds": seconds}

    record = {
        "case": "train",
        "batch": 4,
        "prompt": 40,
        "response": 12,
        "peer": "hf",
        "operations": 30.0,
        "void_rounds": 1,
        "peak_bytes": {"jrlhf": 1e9, "eager": 2e9, "kept": 3e9},
        "rounds": [
            {"jrlhf": repeats(2, 3), "eager": repeats(9, 9), "kept": repeats(6, 7)},
            {"kept": repeats(5, 6), "jrlhf": repeats(3, 9), "eager": repeats(1, 9)},
        ],
    }
    assert row(record, 20.0) == "| train | 4, 40 + 12 | 3.0 s | hf, kept: 6.0 s | 2.00 ~ | 50% | 1.0; 3.0 |"
