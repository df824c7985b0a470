"""The results on asynchronous training: docs/staleness.md states them, and they can be had again."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import staleness
from benchmarks.records import RESULTS
from benchmarks.rules import cost

RECORD = json.loads((RESULTS / "staleness.json").read_text())
DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("asynchronous.md", "staleness.md"))


def test_the_document_has_the_tables_of_the_results():
    for title, table in staleness.tables(RECORD).items():
        assert table in DOCUMENT, title


def test_the_document_concludes_from_the_results():
    """The figures in the sentences."""
    text = " ".join(DOCUMENT.split())
    rows = {(row["sigma"], row["on_new_weights"], row["staleness"]): row for row in RECORD["settings"]}
    halves = [rows[sigma, "keep_cache", 0]["step"] / 2 for sigma in staleness.SIGMAS]
    assert f"{halves[0]:.2f} at sigma 0.25 and {halves[1]:.2f} at sigma 1." in text
    slower, faster = (rows[0.25, "keep_cache", bound]["time_per_batch"] for bound in (1, 4))
    assert slower > halves[0] and f"slower than that ({slower:.2f})" in text
    assert f"with 4 it is {halves[0] / faster:.1f} times as fast" in text
    ages = [rows[sigma, "keep_cache", 16]["group_age"] for sigma in staleness.SIGMAS]
    assert f"{ages[0]:.1f} at sigma 0.25" in text and max(abs(ages[0] - 2.4), abs(ages[1] - 4.1)) < 0.2
    assert [round(rows[1.0, "keep_cache", bound]["zero_weight"], 2) for bound in (1, 2, 8)] == [0.22, 0.25, 0.05]
    oldest = next(row for row in RECORD["rules"] if row["rule"] == "admission by capacity alone, staleness 4")
    assert f"is {oldest['max_age']} versions old at `staleness` 4" in text
    assert f"a bound of 2 masks {RECORD['rules'][-1]['zero_weight']:.0%}" in text
    assert f"{RECORD['prefill_of_a_token_in_decode_steps']:.4f} decode steps per token" in text
    assert f"takes {RECORD['cpu_seconds_of_1000_versions']:.1f} s for 1,000 versions" in text
    assert all(abs(row["simulated"] - row["formula"]) < 0.1 for row in RECORD["closed_form"])


def test_results_are_reproduced():
    (stored,) = (row for row in RECORD["rules"] if row["rule"] == "admission by capacity alone, staleness 2")
    scenario = staleness.RULES[stored["rule"]]
    for name, value in staleness.record_of(scenario, cost(scenario, staleness.VERSIONS)).items():
        np.testing.assert_allclose(stored[name], value, rtol=1e-6, err_msg=name)


def test_longest_row_of_a_group():
    draws = np.random.default_rng(0).lognormal(0, 0.8, (400_000, 8))
    assert abs(staleness.longest_over_mean(0.8, 8) - draws.max(1).mean() / draws.mean()) < 0.01
    assert abs(staleness.longest_over_mean(staleness.sigma_for(1.42, 8), 8) - 1.42) < 1e-6


@pytest.mark.full
def test_verls_order_of_step_times_is_kept():
    predicted = RECORD["verl"]["predicted"]
    assert abs(staleness.verl_step("0.5", *staleness.VERL_LENGTHS) / predicted["0.5"] - 1) < 1e-6
    for row in (predicted, *RECORD["verl"]["with_other_lengths"]):
        steps = [row[name] for name in ("colocated", "streaming", "0.1", "0.3", "0.5")]
        assert steps == sorted(steps, reverse=True)
    for name, published in staleness.VERL_STEP.items():
        assert abs(predicted[name] / published - 1) < 0.07, name


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    exec(code, {})
    steps = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(steps) == 4 and steps == sorted(steps, reverse=True)


@pytest.mark.full
def test_charts(tmp_path):
    staleness.picture(tmp_path / "picture.svg")
    staleness.chart(RECORD, tmp_path / "chart.svg")
    assert "decode slots" in (tmp_path / "picture.svg").read_text()
    assert "prefill_again, sigma 1.0" in (tmp_path / "chart.svg").read_text()
