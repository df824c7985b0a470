"""The questions of the smollm2 configs: the same everywhere, rightly answered, and learned or held out, never both."""

import hashlib
import json
import re
from typing import Any

import pytest

from jrlhf.config import load_config
from jrlhf.configs.questions import HELDOUT, TASKS, TRAIN, main, rows

# The figures of docs/results.md are of these questions.
DIGESTS = {"smallest": "a0f4445c12580b8d", "largest": "2a4e1c9d5f121718"}
PLACES = {"smallest": 0, "largest": -1}  # of the answer among the sorted numbers


def offered(task: str, prompt: str) -> list[int]:
    matched = re.fullmatch(rf"Which is the {task}: (\d\d), (\d\d) or (\d\d)\?", prompt)
    assert matched is not None, prompt
    return sorted(map(int, matched.groups()))


@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_are_right_and_no_held_out_question_is_learned(task):
    parts = rows(task)
    assert [len(part) for part in parts] == [TRAIN, HELDOUT] and HELDOUT >= 1000
    for part in parts:
        assert len({row["prompt"] for row in part}) == len(part)
        assert all(int(row["answer"]) == offered(task, row["prompt"])[PLACES[task]] for row in part)
    learned, heldout = ({tuple(offered(task, row["prompt"])) for row in part} for part in parts)
    assert learned.isdisjoint(heldout)
    assert hashlib.sha256(json.dumps([*parts]).encode()).hexdigest()[:16] == DIGESTS[task]


def test_the_configs_read_the_files_that_the_command_writes(tmp_path):
    main([str(tmp_path)])
    data: Any = {name: load_config(name).data for name in ("smollm2-grpo", "smollm2-ppo")}
    paths = {source.path for own in data.values() for source in (own.prompts, own.heldout)}
    assert paths == {path.name for path in tmp_path.iterdir()}
    for own, task in zip(data.values(), ("smallest", "largest"), strict=True):
        for path, part in zip((own.prompts.path, own.heldout.path), rows(task), strict=True):
            assert [json.loads(line) for line in (tmp_path / path).read_text().splitlines()] == part


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "file" / "x")])
    assert str(tmp_path / "file") in capsys.readouterr().err.splitlines()[-1]
