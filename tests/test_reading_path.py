"""The reading path in docs/internals.md is what one iteration runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, MOST_LINES = 54, 9400


@pytest.mark.full
def test_the_documented_files_are_those_that_an_iteration_runs():
    command = [sys.executable, "-m", "tests.support.reading_path"]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles in half the time
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    path = json.loads(run.stdout[run.stdout.index("\n{\n") :])["path"]
    section = (ROOT / "docs/internals.md").read_text().split("## The reading path")[1].split("\n## ")[0]
    assert sorted(re.findall(r"`([\w/]+\.py)`", section)) == sorted(path)
    lines, within_functions = (sum(part) for part in zip(*path.values(), strict=True))
    assert len(path) <= MOST_FILES and lines <= MOST_LINES
    documented = re.search(r"([\d,]+) lines, and the functions that run about ([\d,]+)", section)
    assert documented is not None
    numbers = [int(number.replace(",", "")) for number in documented.groups()]
    assert numbers == pytest.approx([lines, within_functions], rel=0.03)
