"""Random kills, hangs, signals, full disks, moved directories and changed files: the same bits, or a sentence."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SEED = os.environ.get("PROOF_SEED", "0")


@pytest.mark.parametrize("damages, kills", [(6, 1), pytest.param(170, 30, marks=pytest.mark.proof("failures"))])
def test_whatever_happens_to_a_run_it_resumes_to_the_same_bits_or_says_why_not(tmp_path, damages, kills):
    """tests/support/fake_runs.py: a small stage with the real directory, loop, records and checkpoints."""
    command = [sys.executable, "-m", "tests.support.fake_runs", str(tmp_path), SEED, str(damages), str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    results = Counter(case["result"].partition(":")[0] for case in cases)
    print(f"seed {SEED}: {dict(results)}")
    faults = [case for case in cases if not case["result"].startswith(("same", "refused: "))]
    assert faults == [] and len(cases) == damages + kills and results["same"] > len(cases) / 4, results
