"""Random kills, hangs, signals, full disks, moved directories and changed files: the same bits, or a sentence."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SEED = int(os.environ.get("PROOF_SEED", "0"))


def cases(program: str, directory: Path, *arguments: object) -> list[dict[str, str]]:
    """Runs a module of tests/support; returns what it did and what came of it."""
    command = [sys.executable, "-m", f"tests.support.{program}", str(directory), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"seed {arguments[0]}: {dict(Counter(case['result'].partition(':')[0] for case in outcomes))}")
    assert [case for case in outcomes if "FAULT" in case["what"] + case["result"]] == []
    assert sum(case["result"].startswith("same") for case in outcomes) > len(outcomes) / 4
    return outcomes


@pytest.mark.parametrize(
    "damages, kills",
    [pytest.param(6, 1, marks=pytest.mark.full), pytest.param(170, 30, marks=pytest.mark.proof("failures"))],
)
def test_whatever_happens_to_a_run_it_resumes_to_the_same_bits_or_says_why_not(tmp_path, damages, kills):
    """tests/support/fake_runs.py: a small stage with the real directory, loop, records and checkpoints."""
    assert len(cases("fake_runs", tmp_path, SEED, damages, kills)) == damages + kills


@pytest.mark.proof("failures")
@pytest.mark.parametrize("part", range(2))
def test_real_runs_too(tmp_path, part):
    """tests/support/real_runs.py: SFT and PPO by the command, with a reward file that fails and is mended."""
    assert len(cases("real_runs", tmp_path, SEED + part, 6)) == 6


@pytest.mark.proof("failures")
@pytest.mark.parametrize("part", range(2))
def test_runs_of_several_processes_of_which_one_is_lost(tmp_path, part):
    """tests/support/real_processes.py: 2 processes with 4 devices each, and 4 with 2."""
    outcomes = cases("real_processes", tmp_path, SEED + part, 10)
    assert len(outcomes) == 10
    assert sum(case["what"].startswith("too late") for case in outcomes) <= 3
