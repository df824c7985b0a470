"""The runs on a pretrained model: what the report makes of them, and that both sides are asked the same."""

import json
from pathlib import Path

import pytest

from benchmarks.real.__main__ import FOLDER, TASK, settings_of
from benchmarks.real.common import Job, Watch, check_ids
from benchmarks.real.report import beside, gain, read, table, with_tables
from jrlhf.config import load_config

RESULTS = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")


def run(seed, right):
    return {"seed": seed, "after": {"right": right, "accuracy": right.count("1") / len(right)}}


def test_a_gain_is_paired_by_question():
    # Of eight questions three are newly right and one is newly wrong: differences 1, 1, 1, -1 and four times 0.
    mean, error = gain({"before": {"right": "11000000"}}, run(0, "10111000"))
    squares = 3 * (1 - 1 / 4) ** 2 + (-1 - 1 / 4) ** 2 + 4 * (1 / 4) ** 2
    assert mean == pytest.approx(1 / 4) and error == pytest.approx((squares / 7 / 8) ** 0.5)


def test_two_sides_are_compared_over_the_seeds_that_both_have():
    ours = [run(0, "1100"), run(1, "1000"), run(2, "0000")]
    assert beside([run(1, "1100")], ours) == "+25.0 (one seed)"
    assert beside([], ours) == ""
    # Differences of 0 and 50 points: their mean 25 with a standard error of 25, whose t quantile for 1 degree is 6.314.
    assert beside([run(1, "1110"), run(0, "1100")], ours) == "+25.0 (-132.8 to +182.8), 2 seeds"


def test_the_peers_get_the_numbers_of_the_configs():
    for algorithm, task in TASK.items():
        settings, config = settings_of(algorithm), load_config(f"smollm2-{algorithm}")
        assert config.data.prompts.path == f"{task}-train.jsonl"  # pyright: ignore
        assert settings["rows"] % settings["samples"] == 0 and settings["iterations"] == config.rl.iterations
        assert settings["learning_rate"] == config.rl.actor.learning_rate


def test_a_watch_scores_each_row_as_often_as_it_is_answered(tmp_path):
    row = {"prompt": "?", "answer": "7", "ids": [1]}
    (tmp_path / "steps.json").write_text(json.dumps([[row, row | {"answer": "8"}]]))
    watch = Watch(Job("grpo", "", str(tmp_path), 0, {"samples": 2}, {}))
    rows = watch.rows()
    assert [row["answer"] for row in rows] == ["7", "7", "8", "8"]
    assert watch.score(["It is 7.", "8", [{"role": "assistant", "content": "7 or 8"}], "none"], rows) == [1, 0, 1, 0]
    assert watch.result().curve == [0.5]


def test_another_tokenizer_is_refused(tmp_path):
    class Other:
        def apply_chat_template(self, messages, **_):
            return {"input_ids": [len(messages), 5]}

    job = Job("grpo", "", str(tmp_path), 0, {"system": "Be brief."}, {})
    for ids, refused in (([2, 5], False), ([2, 6], True)):
        (tmp_path / "steps.json").write_text(json.dumps([[{"prompt": "?", "answer": "7", "ids": ids}]]))
        if refused:
            with pytest.raises(SystemExit, match=r"has the tokens \[2, 5\], with ours \[2, 6\]"):
                check_ids(Other(), job)
        else:
            check_ids(Other(), job)


def test_the_document_states_the_results():
    records = read(FOLDER)
    assert with_tables(RESULTS, records) == RESULTS and table(records) in RESULTS
    for name, record in records.items():
        assert record["commit"] and record["command"] and "four bits" in record["model"], name
        assert record["settings"] == settings_of(name.split("-")[0]), name
