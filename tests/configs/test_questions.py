"""The questions of the smollm2 configs: the same everywhere, rightly answered, and learned or held out, never both."""

import hashlib
import json
import re

import pytest

from jrlhf.config import load_config
from jrlhf.configs.questions import HELDOUT, TASKS, TRAIN, main, named, rows

DIGESTS = {
    "kinds": "9976fdcd599d3e48",
    "largest": "2a4e1c9d5f121718",
}  # the results in docs/results.md are of these questions
# One word of each kind, written here by hand.
KNOWN = {"wolf": "an animal", "purple": "a color", "Egypt": "a country", "lemonade": "a drink", "mango": "a fruit"}
KNOWN |= {"zinc": "a metal", "scarf": "a piece of clothing", "sofa": "a piece of furniture", "chisel": "a tool"}
KNOWN |= {"tram": "a vehicle"}


def offered(prompt: str) -> list[str]:
    matched = re.fullmatch(r"Which (?:of these )?is [a-z ]+: (\w+), (\w+) or (\w+)\?", prompt)
    assert matched is not None, prompt
    return list(matched.groups())


@pytest.mark.parametrize("task", sorted(TASKS))
def test_no_held_out_question_is_learned(task):
    parts = rows(task)
    assert [len(part) for part in parts] == [TRAIN, HELDOUT] and HELDOUT >= 1000
    prompts = [{row["prompt"] for row in part} for part in parts]
    assert [len(part) for part in prompts] == [TRAIN, HELDOUT]
    learned, heldout = ({tuple(sorted(offered(prompt))) for prompt in part} for part in prompts)
    assert learned.isdisjoint(heldout)
    assert hashlib.sha256(json.dumps([*parts]).encode()).hexdigest()[:16] == DIGESTS[task]


def test_the_largest_number_is_the_answer():
    for row in [*rows("largest")[0], *rows("largest")[1]]:
        assert int(row["answer"]) == sorted(map(int, offered(row["prompt"])))[-1]


def test_one_word_is_of_the_kind_that_is_asked_for():
    kinds: dict[str, set[str]] = {}
    learned, heldout = rows("kinds")
    for row in [*learned, *heldout]:
        kind = row["prompt"].removeprefix("Which of these is ").partition(":")[0]
        kinds.setdefault(row["answer"], set()).add(kind)
        assert row["offered"] == offered(row["prompt"]) and row["answer"] in row["offered"]
    assert all(len(of_word) == 1 for of_word in kinds.values())
    assert {word: kinds[word] for word in KNOWN} == {word: {kind} for word, kind in KNOWN.items()}
    for row in [*learned, *heldout]:  # and the two others are of other kinds
        assert len({*map(str, (kinds[word] for word in row["offered"]))}) == 3


def test_the_reward_of_a_name():
    texts = [
        "Wolf.",
        "a wolf",
        "wolf, not milk",
        "milk",
        "wolves",
        [{"role": "assistant", "content": "It is: WOLF"}],
        "",
    ]
    scores = named(texts, ["wolf"] * 7, [["milk", "wolf", "Egypt"]] * 7, prompts=[])
    assert scores == [1, 1, 0, 0, 0, 1, 0]
    assert named(["Egypt", "egypt"], ["Egypt"] * 2, [["milk", "wolf", "Egypt"]] * 2) == [1, 1]


def test_the_configs_read_the_files_that_the_command_writes(tmp_path):
    main([str(tmp_path)])
    data = {name: load_config(name).data for name in ("smollm2-grpo", "smollm2-ppo")}
    paths = {source.path for own in data.values() for source in (own.prompts, own.heldout)}
    assert paths == {path.name for path in tmp_path.iterdir()}
    for own, task in zip(data.values(), ("kinds", "largest"), strict=True):
        for path, part in zip((own.prompts.path, own.heldout.path), rows(task), strict=True):
            assert [json.loads(line) for line in (tmp_path / path).read_text().splitlines()] == part
