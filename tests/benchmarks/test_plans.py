import json
from pathlib import Path

from benchmarks import plans
from benchmarks.records import RESULTS


def test_pairs_whose_order_counts(monkeypatch):
    # Three plans of 7 calls: one of 7 s a call, one of 9, and one between that differs by less than three spreads.
    cases = plans.CASES[:3]
    measured = {cases[0]: (7.0, 7.1, 7.2), cases[1]: (7.02, 7.1, 7.3), cases[2]: (9.0, 9.1, 9.2)}  # a third each
    taken = {case.name: {call.name: list(times) for call in plans.CALLS} for case, times in measured.items()}
    predicted = {cases[0]: 7.7, cases[1]: 6.0, cases[2]: 6.5}

    def predict(case, measured_by):
        return {call.name: {"layers": predicted[case] - 1, "ends": 1.0} for call in plans.CALLS}

    monkeypatch.setattr(plans, "predict", predict)
    record = plans.compare(cases, taken, None)
    assert record["pairs"] == {"all": 3, "apart": 2, "wrong": [f"{cases[0].name} | {cases[2].name}"]}
    errors = (7.7 / 7 - 1, 1 - 6 / 7.02, 1 - 6.5 / 9)
    assert abs(record["mean_error"] - sum(errors) / 3) < 1e-12
    assert abs(record["plans"][0]["least"] - 49.0) < 1e-9 and abs(record["plans"][0]["predicted"] - 53.9) < 1e-9


def test_the_page_says_when_plans_pay_as_the_searches_say():
    """Seconds of colocate, split, standalone and the plan of the search."""
    text = (Path(__file__).parents[2] / "docs" / "plans.md").read_text(encoding="utf-8")
    record, named = json.loads((RESULTS / "search.json").read_text()), ("colocate", "split", "standalone")
    for name in ("scale", "slow"):
        seconds = *(record[name]["rules"][plan] for plan in named), record[name]["seconds_found"]
        assert f"GB/s between nodes | {' | '.join(f'{value:.1f}' for value in seconds)} |" in text
    for row in record["placements"]:
        if (row["actor"], row["devices"]) in (("34b", 64), ("34b", 128)):
            own, best = row["seconds"], row["seconds"]["best"]
            (winner,) = (plan for plan in named if own[plan] == best)
            seconds = " | ".join(str(own[plan]) for plan in named)
            assert f"| 34B + 34B, {row['devices']} A100 | {seconds} | {best} (`{winner}`) |" in text
