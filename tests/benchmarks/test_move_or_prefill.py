"""The move of caches against a second prefill: the break-even link in closed form, and the figures of docs/plans.md."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.move_or_prefill import H100, LINKS, MODELS, ROWS, move, predicted, slowest_link
from benchmarks.records import RESULTS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "plans.md"


def test_the_slowest_link_is_bytes_over_operations():
    """A token takes two operations per parameter of the layers, and its cache has 128 KiB."""
    prefill, size = predicted(MODELS["Llama-3.1-8B"], 512)
    assert size == ROWS * 512 * 2 * 32 * 8 * 128 * 2
    parameters = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert prefill == pytest.approx(ROWS * 512 * 2 * parameters / (H100.infer * H100.bfloat16), rel=0.25)
    slowest = slowest_link(prefill, size)
    assert move(size, slowest) == pytest.approx(prefill)
    assert move(size, 2 * slowest) < prefill < move(size, slowest / 2) and min(LINKS.values()) < slowest < H100.link


def test_the_documented_rates_are_those_of_the_results():
    results = json.loads((RESULTS / "move_or_prefill.json").read_text())["results"]
    for row in results:
        prefill, size = predicted(MODELS[row["model"]], row["length"])
        assert (row["prefill"], row["bytes"]) == (pytest.approx(prefill, abs=1e-5), size)
    for name in MODELS:
        (cells,) = re.findall(rf"^\| {re.escape(name)}[^|]*\| (.*) \|$", DOCS.read_text(), re.MULTILINE)
        rates = [row["slowest_link"] / 1e9 for row in results if row["model"] == name]
        assert [float(cell) for cell in cells.split(" | ")] == [pytest.approx(rate, rel=0.03) for rate in rates]
