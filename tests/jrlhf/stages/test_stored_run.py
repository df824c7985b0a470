"""A run that the version of 2026-11-20 (commit 97cd242) left resumes, and continues as that version did."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

# 4 of 6 iterations of PPO are in the checkpoint; metrics.jsonl has 6
STORED = Path(__file__).with_name("stored_run.tar.gz")


def records(run: Path) -> dict[tuple[str, int], dict[str, float]]:
    """(stage, step) -> metrics, without times and rates."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    timed = ("timing_", "perf/")
    return {
        (line.pop("stage"), line.pop("step")): {name: x for name, x in line.items() if not name.startswith(timed)}
        for line in lines
    }


@pytest.mark.proof("runs")
def test_a_run_of_an_older_version_resumes(tmp_path: Path):
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "runs" / "stored"
    expected = records(run)
    assert len(expected) == 6
    command = [sys.executable, "-m", "jrlhf.train", "--config", "config.yaml", "--resume"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    continued = records(run)
    assert continued.keys() == expected.keys()
    for key, metrics in expected.items():
        old = {name: continued[key][name] for name in metrics}  # later versions have more metrics
        assert old == pytest.approx(metrics, rel=1e-3, abs=1e-5), key  # machines round differently
    assert (run / "model" / "model.safetensors").is_file()
