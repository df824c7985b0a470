"""Datasets from files, directories and `datasets`: what their rows become, and what is refused."""

import csv
import json
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from jrlhf.config.schema import ColumnsConfig as Columns
from jrlhf.data.read import Dataset, read_dataset
from jrlhf.data.types import Example
from jrlhf.errors import UserError

from .conftest import assistant, from_rows, user


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


GSM8K = [
    {"question": "2 + 2?", "answer": "It is four.\n#### 4"},
    {"question": 'é\n日本 "3, 4"?', "answer": "#### 1,000"},
    {"question": "And 3?", "answer": "#### 3"},
]


def write(kind: str, path: Path) -> Path:
    """The rows of GSM8K in a file or directory of this kind."""
    file = path / f"rows.{kind.removesuffix(' lines')}"
    if kind in ("jsonl", "json lines"):
        return lines(file, *GSM8K)
    if kind == "ndjson":
        text = "\ufeff" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in GSM8K)
        file.write_text(text, encoding="utf-8", newline="")
    elif kind == "json":
        file.write_text(json.dumps(GSM8K, indent=1), encoding="utf-8")
    elif kind == "csv":
        with open(file, "w", encoding="utf-8-sig", newline="") as stream:
            writer = csv.DictWriter(stream, ["question", "answer"])
            writer.writeheader()
            writer.writerows(GSM8K)
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read by the hf extra")
        parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet is read by the hf extra")
        parquet.write_table(pyarrow.Table.from_pylist(GSM8K), file, row_group_size=2)
    elif kind == "shards":
        file = path / "set"
        (file / "data").mkdir(parents=True)
        (file / "README.md").write_text("not data")
        (file / "dataset_infos.json").write_text('{"default": {}}')
        lines(file / "data" / "train-00000-of-00002.jsonl", *GSM8K[:2])
        lines(file / "data" / "train-00001-of-00002.jsonl", *GSM8K[2:])
        lines(file / "data" / "test-00000-of-00001.jsonl", {"question": "held out", "answer": "0"})
    else:
        datasets = pytest.importorskip("datasets", reason="what save_to_disk wrote is read by the hf extra")
        file, train = path / "disk", datasets.Dataset.from_list(GSM8K)
        splits = datasets.DatasetDict({"train": train, "test": datasets.Dataset.from_list(GSM8K[:1])})
        (splits if kind == "saved splits" else train).save_to_disk(file)
    return file


KINDS = ["jsonl ndjson json csv shards".split() + ["json lines"], ["parquet"], ["saved", "saved splits"]]


@pytest.mark.parametrize("kinds", KINDS, ids=["files", "pyarrow", "datasets"])
def test_every_kind_of_file_gives_the_same_dataset(kinds: list[str], tmp_path: Path):
    for kind in kinds:
        columns, folder = Columns(prompt="question"), tmp_path / kind
        folder.mkdir()
        dataset = read_dataset(write(kind, folder), columns=columns)
        assert dataset.shape == "prompt-only" and dataset.columns == ("question", "answer"), kind
        # The columns keep the names that they have in the file: a reward function asks for `answer`.
        assert dataset.examples == tuple(Example(prompt=row["question"], columns=row) for row in GSM8K), kind
        assert dataset.fingerprint == from_rows(GSM8K, columns=columns).fingerprint


Q, A, B = user("2 + 2?"), assistant("4"), assistant("5")
CONVERSATION = [Q, A]
VERL = {
    "data_source": "gsm8k",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0, "split": "train"},
}
SHAPES: list[tuple[str, dict[str, Any], Example]] = [
    ("prompt-only", {"prompt": "2 + 2?", "level": 1}, Example("2 + 2?", columns={"level": 1})),
    ("prompt-only", {"prompt": [Q]}, Example((Q,))),
    ("prompt-completion", {"prompt": "2?", "completion": " 4", "x": True}, Example("2?", " 4", columns={"x": True})),
    ("prompt-completion", {"prompt": [Q], "completion": [A]}, Example((Q,), (A,))),
    ("preference", {"prompt": "2?", "chosen": " 4", "rejected": " 5"}, Example("2?", chosen=" 4", rejected=" 5")),
    # An implicit prompt, also where the prompt is of another kind than the answers: what the two have in common.
    ("preference", {"chosen": [Q, A], "rejected": [Q, B]}, Example((Q,), chosen=(A,), rejected=(B,))),
    ("preference", {"prompt": "2?", "chosen": [Q, A], "rejected": [Q, B]}, Example((Q,), chosen=(A,), rejected=(B,))),
    # Equal answers: the last message is still the answer.
    ("preference", {"chosen": [Q, A], "rejected": [Q, A]}, Example((Q,), chosen=(A,), rejected=(A,))),
    ("preference", {"prompt": [Q], "chosen": "4", "rejected": "5"}, Example((Q,), chosen="4", rejected="5")),
    ("messages", {"messages": CONVERSATION}, Example(tuple(CONVERSATION))),
    ("text", {"text": "Once upon a time", "url": None}, Example("", "Once upon a time", columns={"url": None})),
    ("verl", {**VERL, "prompt": [Q]}, Example((Q,), source="gsm8k", columns=VERL)),
]


def test_shapes_are_detected():
    for shape, row, example in SHAPES:
        dataset = from_rows([row, row])
        assert (dataset.shape, dataset.examples, dataset.columns) == (shape, (example, example), tuple(row))


def test_columns_that_are_named_decide_the_shape():
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "messages": CONVERSATION, "text": "t", "from": 3}

    def read(**columns: str) -> Dataset:
        return from_rows([row], columns=Columns(**columns))

    assert read().shape == "preference"
    assert read(messages="messages").examples[0].prompt == tuple(CONVERSATION)
    assert read(text="chosen").examples[0].completion == "c"
    dataset = read(prompt="chosen", completion="rejected", source="from")
    assert dataset.shape == "prompt-completion" and dataset.examples[0].source == "3"
    assert dataset.examples[0].columns == row  # none of them was read under its own name
    assert dataset.describe() == (
        "rows: 1 prompt-completion rows (plain text) from chosen as prompt, rejected as completion, from as source; "
        "other columns: prompt, messages, text"
    )
    assert read(messages="messages").describe().startswith("rows: 1 messages rows (conversations) from messages;")


def test_two_texts_without_a_prompt_stay_whole():
    """Only a tokenizer can cut them: test_encode.py."""
    dataset = from_rows([{"chosen": "The sky is blue.", "rejected": "The sky is green."}])
    assert dataset.examples == (Example("", chosen="The sky is blue.", rejected="The sky is green."),)


def test_messages_in_parts_and_nulls_of_tables():
    parts = [{"type": "text", "text": "2 +", "image": None}, {"type": "text", "text": " 2?"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    (example,) = from_rows([{"messages": [{"role": "user", "content": parts, "name": None}, call]}]).examples
    contents = [
        {"type": "text", "text": "2 +"},
        {"type": "text", "text": " 2?"},
    ]  # each template joins them in its own way
    assert example.prompt == (
        {"role": "user", "content": contents},
        {"role": "assistant", "tool_calls": [{"name": "add"}]},
    )
    assert from_rows([{"messages": [{"role": "user", "content": parts[:1]}]}]).examples[0].prompt == (user("2 +"),)


def test_rows_may_lack_columns_that_are_not_needed():
    dataset = from_rows([{"prompt": "a", "level": 1}, {"prompt": "b", "score": float("nan")}])
    assert [example.columns["level"] for example in dataset.examples] == [1, None]
    assert str(dataset.examples[1].columns["score"]) == "nan"


def test_a_fingerprint_tells_every_change():
    row = {"prompt": "2 + 2?", "answer": 4, "meta": {"a": 1, "b": [b"\x00", None]}}
    base = from_rows([row, row]).fingerprint
    same = from_rows([{"meta": {"b": [b"\x00", None], "a": 1}, "answer": 4, "prompt": "2 + 2?"}, row])
    assert same.fingerprint == base
    changed = [
        [row],
        [row, row | {"answer": 5}],
        [row, row | {"prompt": "2 + 2? "}],
        [row, row | {"meta": {"a": 1, "b": [b"\x01", None]}}],
    ]
    assert len({base, *(from_rows(rows).fingerprint for rows in changed)}) == 5
    assert from_rows([row], columns=Columns(text="prompt")).fingerprint != from_rows([row]).fingerprint
    values = Decimal("1.5"), Decimal("2.5"), timedelta(1), timedelta(2)  # of Parquet
    assert len({from_rows([row | {"answer": value}]).fingerprint for value in values}) == 4


def test_some_of_the_rows_keep_their_places(tmp_path: Path):
    path = lines(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    dataset = read_dataset(path)
    taken = dataset.take([2, 0])
    assert [example.prompt for example in taken.examples] == ["c", "a"]
    assert taken.places == (f"{path} line 3", f"{path} line 1")
    assert taken.fingerprint == dataset.fingerprint


# What is refused.


FILES: list[tuple[str, str | bytes, str]] = [  # file, content, sentence
    ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b', "a.jsonl line 3 is not a whole JSON object .* repair it or remove"),
    ("a.jsonl", '{"prompt": "a"}\n["b"]\n', "a.jsonl line 2 is of type list, not an object"),
    ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "a.jsonl line 2 is not UTF-8 text .*: convert"),
    ("a.jsonl", "\n \n", "a.jsonl has no rows"),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": null}\n', "line 2: prompt is null: repair it or remove it"),
    ("a.jsonl", '{"prompt": "a"}\n{"Prompt": "b"}\n', "line 2 has no column 'prompt', only Prompt"),
    ("a.jsonl", '{"prompt": "\\ud800"}\n', "line 1: prompt holds half of a surrogate pair"),
    ("a.json", '[{"prompt": "a"}, {"pro', "a.json is not a whole JSON array"),
    ("a.json", '[{"prompt": "a"}, 3]', "a.json row 2 is of type int"),
    ("a.csv", "prompt,answer\na,1\nb\n", "a.csv line 3 has 1 cells for 2 columns"),
    ("a.csv", 'prompt,answer\na,1\n"b,2\n', "a.csv is not CSV after line 2 .*repair it there"),
    ("a.csv", "prompt,prompt\na,1\n", "a.csv has two columns of one name in its first line \\(prompt, prompt\\)"),
    ("a.csv", b"prompt\n\xff\n", "a.csv is not UTF-8 text"),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', "line 2: prompt is empty"),
    ("a.parquet", b"PAR1 no", "a.parquet cannot be read as Parquet"),
    ("a.txt", "a", "a.txt is none of .jsonl, .ndjson, .json, .csv, .parquet"),
]
ROWS: list[tuple[dict, str]] = [  # row, sentence
    ({"prompt": []}, "row 1: prompt has no messages"),
    ({"prompt": 3}, "row 1: prompt is of type int, neither text nor a list of messages"),
    ({"prompt": ["hi"]}, "message 1 of prompt is of type str, not an object with role and content"),
    ({"messages": "hi"}, "messages is text, not a list of messages"),
    ({"text": [user("hi")]}, "text is a list of messages, not text"),
    ({"prompt": [{"role": "human", "content": "a"}]}, "message 1 of prompt has the role 'human', which is none of"),
    ({"prompt": [user("hi"), {"role": "user"}]}, "message 2 of prompt has no content"),
    ({"prompt": [{"role": "user", "content": 3}]}, "the content of message 1 of prompt is of type int, not text"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image', and only text"),
    ({"prompt": "[{'role': 'user', 'content': 'hi'}]"}, "prompt is text that writes out a list of messages"),
    ({"text": '[{"role": "user", "content": "hi"}]'}, "text is text that writes out a list of messages"),
    (
        {"prompt": "a", "completion": "[{'role': 'assistant'}]\n"},
        "completion is text that writes out a list of messages",
    ),
    ({"prompt": "a", "completion": [Q]}, "completion begins with a message of the user, not of the assistant"),
    ({"chosen": [Q, A], "rejected": "c"}, "must be both text or both lists of messages"),
    ({"chosen": [Q, A], "rejected": [user("c"), assistant("d")]}, "no message in common"),
    ({"chosen": [Q], "rejected": [Q]}, "chosen ends with a message of the user, not with an answer of the assistant"),
    ({"chosen": [Q, A]}, "the columns of .* are chosen: rejected is missing, name its column in the dataset's key"),
]


# Keys that TRL, verl and OpenAI's fine-tuning define: a row with them, and what is wrong with it ("" if nothing is).
SAID = {"messages": [Q, A]}
CALL = {"name": "add", "arguments": "{}"}
KEYS: list[tuple[dict, str]] = [
    *(
        ({"prompt": "a", key: value}, f"the row has {key} .*only text can be read: remove the column")
        for key in ("image", "images", "video", "videos", "audio", "audios")
        for value in ([b"png"], "a.png")
    ),
    *(({"prompt": "a", "images": value}, "") for value in (None, [], "")),
    ({**VERL, "prompt": [Q], "agent_name": "tool_agent"}, "has agent_name 'tool_agent'.*a response is one turn"),
    ({**VERL, "prompt": [Q], "agent_name": "single_turn_agent"}, ""),
    ({**VERL, "prompt": [Q], "extra_info": {"need_tools_kwargs": True}}, "extra_info has need_tools_kwargs True"),
    ({**VERL, "prompt": [Q], "extra_info": {"interaction_kwargs": {"name": "x"}}}, "extra_info has interaction_kwargs"),
    ({**VERL, "prompt": [Q], "extra_info": {"need_tools_kwargs": False, "interaction_kwargs": {}}}, ""),
    ({**SAID, "functions": [CALL]}, "the row has functions .*: describe the functions in tools"),
    ({**SAID, "parallel_tool_calls": False}, ""),
    ({**SAID, "input_ids": [1, 2]}, "has input_ids .1, 2., which is not supported: the text is encoded again"),
    ({"prompt": "a", "input_ids": [1, 2]}, ""),
    ({"prompt": "a", "completion": "b", "label": False}, "label False.*not imitated: keep the rows with label true"),
    ({"prompt": "a", "completion": "b", "label": True}, ""),
    ({"prompt": "a", "completion": "b", "label": 0}, ""),
    ({"prompt": "a", "label": False}, ""),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}, "the row has margin 0.5.*losses have no margin"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.0, "score_chosen": 3}, ""),
    ({"messages": [Q, A | {"refusal": "No."}]}, "message 2 of messages has refusal 'No.'"),
    ({"messages": [Q, A | {"audio": {"id": "x"}}]}, "message 2 of messages has audio"),
    (
        {"messages": [Q, A | {"function_call": CALL}]},
        "message 2 of messages has function_call .*: write it in tool_calls",
    ),
    ({"messages": [Q, A | {"refusal": None, "weight": 0}, A | {"weight": 1, "name": "x"}]}, ""),
    ({"messages": [Q, A | {"weight": 0.5}]}, "message 2 of messages has the weight 0.5, which is neither 0"),
    (
        {"prompt": [Q], "completion": [A | {"weight": 0}]},
        "completion has a message of weight 0, but all of it is learned",
    ),
]


def test_keys_of_other_trainers_are_applied_or_refused_by_name():
    for row, sentence in KEYS:
        if sentence:
            with pytest.raises(UserError, match=sentence):
                from_rows([row])
        else:
            assert from_rows([row]).examples


def test_a_bad_file_is_one_sentence_with_its_cause(tmp_path: Path):
    for name, content, sentence in FILES:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow", reason="Parquet is read by the hf extra")
        with pytest.raises(UserError, match=sentence) as caught:
            read_dataset(path)
        assert "is not a whole" not in sentence or isinstance(caught.value.__cause__, ValueError)


def test_text_that_begins_as_a_list_of_messages_is_text():
    prompt = '[{"role": "user", "content": "x"}] is a JSON list. Is it valid?'
    assert from_rows([{"prompt": prompt}]).examples[0].prompt == prompt


def test_a_bad_row_is_named():
    for row, sentence in ROWS:
        with pytest.raises(UserError, match=sentence):
            from_rows([row])


def test_wrong_columns_are_answered_with_those_that_are_there():
    with pytest.raises(
        UserError, match="the columns of rows are question, answer: in the dataset's key columns, .* chosen and"
    ):
        from_rows(GSM8K)
    message = "prompt is to be read from a column 'qestion', but the columns of rows are .*did you mean question"
    with pytest.raises(UserError, match=message):
        from_rows(GSM8K, columns=Columns(prompt="qestion"))
    with pytest.raises(UserError, match="column 'z', but the columns of rows are question, answer: name one of these$"):
        from_rows(GSM8K, columns=Columns(prompt="z"))
    with pytest.raises(UserError, match="columns of rows are question, answer: in the"):
        from_rows(GSM8K, columns=Columns(completion="answer"))
    with pytest.raises(UserError, match="columns of rows are prompt, chosen: .*rejected"):
        from_rows([{"prompt": "a", "chosen": "b"}])


def test_directories_without_the_data_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="holds no dataset"):
        read_dataset(tmp_path)
    directory = write("shards", tmp_path)
    with pytest.raises(UserError, match="set has no split 'dev': it has test, train"):
        read_dataset(directory, split="dev")
    columns = Columns(prompt="question")
    assert read_dataset(directory, split="test", columns=columns).examples[0].prompt == "held out"
    (directory / "data" / "train.csv").write_text("question,answer\na,b\n")
    with pytest.raises(UserError, match="mixes train-00000-of-00002.jsonl, .*: name one of the files"):
        read_dataset(directory)
    with pytest.raises(UserError, match="split='train\\[:9\\]' slices, which only datasets on the hub can be"):
        read_dataset(directory, split="train[:9]")
    with pytest.raises(UserError, match="nowhere.jsonl does not exist: name a file, a directory or a dataset"):
        read_dataset("nowhere.jsonl")
    with pytest.raises(UserError, match="does not exist"):
        read_dataset(tmp_path / "nowhere")


def test_what_has_no_splits_is_not_read_as_one(tmp_path: Path):
    for path in (write("jsonl", tmp_path), write("saved", tmp_path)):
        with pytest.raises(UserError) as caught:
            read_dataset(path, split="test")
        sentence = f"{path} has no splits and is read whole, not split='test': leave split out, or name a part"
        assert str(caught.value) == sentence
    (tmp_path / "rows").mkdir()
    lines(tmp_path / "rows" / "sums.jsonl", *GSM8K)
    with pytest.raises(UserError, match="rows has no splits and is read whole, not split='test'"):
        read_dataset(tmp_path / "rows", split="test")


def test_splits_of_shards_are_what_their_names_say(tmp_path: Path):
    for number, name in enumerate(("train_sft-00000-of-00002", "train_sft-00001-of-00002", "train_gen-00000-of-00001")):
        lines(tmp_path / f"{name}.jsonl", {"prompt": f"{number}?", "completion": "yes"})
    assert [example.prompt for example in read_dataset(tmp_path, split="train_sft").examples] == ["0?", "1?"]
    assert [example.prompt for example in read_dataset(tmp_path, split="train_gen").examples] == ["2?"]
    with pytest.raises(UserError, match="has no split 'train': it has train_gen, train_sft"):
        read_dataset(tmp_path)


def test_splits_of_a_saved_dataset(tmp_path: Path):
    directory = write("saved splits", tmp_path)
    assert len(read_dataset(directory, columns=Columns(prompt="question"), split="test").examples) == 1
    with pytest.raises(UserError, match="disk has no split 'dev': it has train, test"):
        read_dataset(directory, split="dev")
    next((directory / "train").glob("*.arrow")).write_bytes(b"no")
    with pytest.raises(UserError, match="disk \\(split 'train'\\) cannot be loaded"):
        read_dataset(directory)


def test_a_hub_dataset_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets", reason="hub datasets are read by the hf extra")
    asked = []

    def load(name: str, configuration: str | None, *, split: str):
        asked.append((name, configuration, split))
        if name == "openai/gsm8k":
            return datasets.Dataset.from_list(GSM8K)
        raise ConnectionError("Couldn't reach the hub\n  because of many\n  things")

    monkeypatch.setattr(datasets, "load_dataset", load)
    dataset = read_dataset("openai/gsm8k:main", columns=Columns(prompt="question"), split="test")
    assert dataset.source == "openai/gsm8k:main" and len(dataset.examples) == 3
    with pytest.raises(UserError) as caught:
        read_dataset("someone/rows")
    assert str(caught.value) == (
        "the dataset someone/rows (split 'train') cannot be loaded: the hub cannot be reached (ConnectionError: "
        "Couldn't reach the hub because of many things): try again when it can"
    )
    assert asked == [("openai/gsm8k", "main", "test"), ("someone/rows", None, "train")]


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("pyarrow", "datasets"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match="a.parquet needs pyarrow to be read: pip install 'jrlhf\\[hf\\]'"):
        read_dataset(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="openai/gsm8k is no file: .* pip install 'jrlhf\\[hf\\]'"):
        read_dataset("openai/gsm8k")
