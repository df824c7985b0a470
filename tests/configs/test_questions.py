"""The questions of the smollm2 configs: the same everywhere, rightly answered, and learned or held out, never both."""

import hashlib
import json
import re

import pytest

from jrlhf.config import load_config
from jrlhf.configs.questions import HELDOUT, TASKS, TRAIN, main, rows

DIGESTS = {"sums": "", "largest": ""}


def solved(prompt: str) -> tuple[tuple[int, ...], int]:
    """What a question is about, whatever its words and order, and its answer."""
    numbers = tuple(map(int, re.findall(r"\d+", prompt)))
    if "largest" in prompt:
        return tuple(sorted(numbers)), sorted(numbers)[-1]
    words = re.fullmatch(r"(?:What is|How much is) (\d+) ([+-]) (\d+)\?", prompt)
    assert words is not None, prompt
    first, second = int(words[1]), int(words[3])
    return ((first, -second), first - second) if words[2] == "-" else (tuple(sorted(numbers)), first + second)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_are_right_and_no_held_out_question_is_learned(task):
    learned, heldout = rows(task)
    assert (len(learned), len(heldout)) == (TRAIN, HELDOUT)
    about = []
    for part in (learned, heldout):
        assert len({row["prompt"] for row in part}) == len(part)
        solutions = [solved(row["prompt"]) for row in part]
        assert [int(row["answer"]) for row in part] == [answer for _, answer in solutions]
        about.append({numbers for numbers, _ in solutions})
    assert about[0].isdisjoint(about[1])
    digest = hashlib.sha256(json.dumps([learned, heldout]).encode()).hexdigest()
    assert digest[:16] == DIGESTS[task]  # the results in the documents are of these


def test_the_configs_read_the_files_that_the_command_writes(tmp_path, capsys):
    main([str(tmp_path)])
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    named = set()
    for name in ("smollm2-grpo", "smollm2-ppo"):
        data = load_config(name).data
        named |= {data.prompts.path, data.heldout.path}
        assert data.heldout.path == data.prompts.path.replace("train", "heldout")
    assert named == written.keys() and all(path.name in capsys.readouterr().out for path in [])
    assert json.loads(written["sums-train.jsonl"].splitlines()[0]) == rows("sums")[0][0]
