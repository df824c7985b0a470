"""Result files say how their figures are measured again, and with which program they were measured."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from benchmarks.records import RESULTS, command, provenance

FILES = sorted([*RESULTS.glob("*.json"), *(RESULTS / "real").glob("*.json")])


def origins(part: Any) -> Iterator[Mapping[str, Any]]:
    """All records with a date in a result: one of the whole file, or one of each row that was measured by itself."""
    if isinstance(part, list):
        for one in part:
            yield from origins(one)
    elif isinstance(part, dict):
        if "date" in part:
            yield part
        for one in part.values():
            yield from origins(one)


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_result_names_a_command_and_a_commit(file):
    records = list(origins(json.loads(file.read_text())))
    assert records
    for record in records:
        python, option, module, *_ = shlex.split(record["command"])
        assert (python, option) == ("python", "-m") and importlib.util.find_spec(module) is not None
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"])


def test_provenance_is_of_this_process(monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=RESULTS, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(sys, "argv", ["pytest", "--seeds", "3"])
    record = provenance("jax")
    assert record["commit"].removesuffix("-dirty") == head
    assert record["command"].endswith("--seeds 3")


def test_commands_name_no_place_of_a_machine():
    arguments = ["--seeds", "3", "--venv", "trl=/x", "tunix=/y", "--rounds=2", "--work=/z", "--small"]
    assert command(arguments).endswith(" --seeds 3 --rounds=2 --small")
