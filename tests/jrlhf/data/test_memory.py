"""Rows of a Python program in place of files: which settings take them, and what is wrong with them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from jrlhf.config import make_config
from jrlhf.config.schema import ColumnsConfig
from jrlhf.data.memory import rows_in_memory
from jrlhf.data.read import Dataset, read_dataset
from jrlhf.errors import UserError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+1?", "answer": "3"}]
QUESTION = ColumnsConfig(prompt="question")
FILE = {"stages": ["grpo"], "data.prompts": {"path": "a.jsonl", "split": "test", "columns.prompt": "question"}}


def read(rows: Any, columns: ColumnsConfig = QUESTION) -> Dataset:
    with rows_in_memory({}, {"data": {"prompts": rows}}) as (_, settings):
        return read_dataset(settings["data"]["prompts"]["path"], columns=columns)


def refused(rows: Any, columns: ColumnsConfig = QUESTION) -> str:
    with pytest.raises(UserError) as caught:
        read(rows, columns)
    return str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"data": ROWS},
        {"data": tuple(ROWS)},
        {"data": {"prompts": ROWS}},
        {"data.prompts": ROWS},
        {"data": {"prompts": {"path": ROWS}}, "data.prompts.split": "train"},
        {"data.prompts.path": ROWS, "data": {"prompts.split": "train"}},
    ],
)
def test_rows_stand_where_a_dataset_or_its_path_does(settings):
    """They keep the columns that the config names, and replace its path and its split."""
    with rows_in_memory(FILE, settings) as given:
        data: Any = make_config(*given).data
        prompts = data.prompts
        assert data.source == "datasets"
        assert (prompts.path, prompts.split, prompts.columns) == ("<python>:prompts", "train", QUESTION)
        dataset = read_dataset(prompts.path, columns=prompts.columns, split=prompts.split)
    assert [dict(example.columns) | {"question": example.prompt} for example in dataset.examples] == ROWS


def test_every_dataset_of_a_config_may_be_rows():
    parts = {key: [{"text": key}] for key in ("sft", "preferences", "prompts", "heldout")}
    with rows_in_memory({"data": parts}, {"data": {"heldout": [{"text": "later"}]}}) as (config, settings):
        texts = {key: read_dataset(config["data"][key]["path"]).examples[0].completion for key in parts}
        assert texts == {"sft": "sft", "preferences": "preferences", "prompts": "prompts", "heldout": "later"}
        assert settings["data.source"] == "datasets"
    with rows_in_memory("a.yaml", {"data": {"chat": True}, "rewards": [{"name": "a"}]}) as unchanged:
        assert unchanged == ("a.yaml", {"data": {"chat": True}, "rewards": [{"name": "a"}]})


def test_rows_have_the_fingerprint_of_the_file_with_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "a.jsonl"
    listed = [row | {"ids": [1, 2]} for row in ROWS]
    file.write_text("".join(json.dumps(row) + "\n" for row in listed))
    there = read_dataset(file, columns=QUESTION)
    library = datasets.Dataset.from_list(listed)
    for rows in (listed, library, library.with_format("numpy"), library.to_iterable_dataset()):
        here = read(rows)
        assert here.fingerprint == there.fingerprint and here.examples == there.examples
    assert read([*listed[:1], listed[1] | {"answer": "4"}]).fingerprint != there.fingerprint
    assert here.places == ("memory row 1", "memory row 2")
    assert (
        here.describe() == "memory: 2 prompt-only rows (plain text) from question as prompt; other columns: answer, ids"
    )
    splits = datasets.DatasetDict({"train": library, "test": library})
    for settings, key in (({"data": splits}, "data"), ({"data": {"sft": splits}}, "data.sft")):
        with pytest.raises(UserError, match=f"^{key} is a DatasetDict with the splits 'train', 'test': give one"):
            rows_in_memory({}, settings).__enter__()


def test_rows_that_cannot_be_used():
    assert refused([]) == "memory has no rows: name a dataset that has some"
    assert "prompt is to be read from a column 'question', but the columns of memory are prompt" in refused(
        [{"prompt": "a"}]
    )
    assert refused([*ROWS, {"answer": "4"}]).startswith("memory row 3 has no column 'question', only answer")
    assert refused([*ROWS, "a"]).startswith("memory row 3 is of type str, not an object with columns")
    assert refused([{"question": "a", 3: "b"}]) == "memory row 1 has a column 3, which is no text: rename it"
    circle: list[Any] = []
    circle.append(circle)
    assert "memory row 1 has values that JSON cannot hold (Circular" in refused([{"question": "a", "own": circle}])
    assert "memory row 1 has values that JSON cannot hold" in refused([{"question": "a", "own": {1: 2, "b": 3}}])
    assert refused(row for row in ROWS).startswith("data.prompts is of type generator: give a list of dicts")
    with rows_in_memory({}, {"data": ROWS}) as _, pytest.raises(UserError, match="memory has no splits"):
        read_dataset("<python>:prompts", columns=QUESTION, split="test")
    for settings in ({"data": {"prompts": "a.jsonl"}}, {"data": 3}, {"data": {"validation": ROWS}}):
        with pytest.raises(UserError) as caught, rows_in_memory({"stages": ["grpo"]}, settings) as given:
            make_config(*given)
        assert str(caught.value).startswith(("data.prompts=a.jsonl: it is a section", "data=3", "data.validation"))
    assert str(caught.value).endswith("did you mean data.heldout.path?")


def test_rows_that_are_gone_are_named():
    with rows_in_memory({}, {"data": ROWS}):
        pass
    for columns in (QUESTION, ColumnsConfig()):
        with pytest.raises(UserError, match="its rows were in the memory of the program that began the run, and no"):
            read_dataset("<python>:prompts", columns=columns)


def test_the_library_of_datasets_is_not_imported_for_lists():
    """In a process of its own: other tests have imported it."""
    source = (
        "import sys; from jrlhf.data.memory import rows_in_memory; from jrlhf.data.read import read_dataset\n"
        "with rows_in_memory({}, {'data': [{'prompt': 'a'}]}): read_dataset('<python>:prompts')\n"
        "assert 'datasets' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_rows_may_be_one_of_several_sources():
    """A list whose entries have a path and other keys of a source is not rows."""
    sources = [{"path": ROWS, "columns": {"prompt": "question"}}, {"path": "b.jsonl", "name": "second", "weight": 3}]
    for settings in ({"data": sources}, {"data": {"prompts": sources}}, {"data.prompts": tuple(sources)}):
        with rows_in_memory({"stages": ["grpo"], "data.prompts.path": "a.jsonl"}, settings) as given:
            data: Any = make_config(*given).data
            first, second = data.datasets.values()
            assert [*data.datasets] == ["prompts[0]", "prompts[1]"]
            assert (first.path, first.called, first.weight) == ("<python>:prompts_0", "prompts_0", 1.0)
            assert (second.path, second.called, second.weight) == ("b.jsonl", "second", 3.0)
            assert len(read_dataset(first.path, columns=first.columns).examples) == 2
    both = [{"path": "a.wav", "prompt": "a"}, {"path": "b.wav", "prompt": "b"}]  # rows with a column of that name
    assert [example.columns for example in read(both, ColumnsConfig()).examples] == [
        {"path": "a.wav"},
        {"path": "b.wav"},
    ]
