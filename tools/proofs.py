"""Runs and checks the longest proofs, which take too long for every change.

    python -m tools.proofs list          prints the names of the parts
    python -m tools.proofs run PART      runs a part and writes results/proofs/PART.json
    python -m tools.proofs check         exit code 1 if a part was not run or failed; prints the age of each, and
                                         how many tests it has now where that number has changed

A part is the tests marked `proof("PART")`, or a folder of tests beside them (`oracle`). The part `real` needs a model's
directory: the one that the environment variable REAL_MODEL names, else `benchmarks.real_model` makes one.
"""

import collections
import contextlib
import datetime
import io
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "proofs"
PARTS = {
    "oracle": "values and gradients against verl and TRL",
    "memory": "predicted against compiled memory, all programs of the matrix; roles and runs whose models sleep; "
    "searches where memory is scarce, against optima; remedies that plans name; the host's memory while weights load",
    "kills": "runs killed at random moments and resumed to the same bits; every file of a checkpoint damaged; "
    "runs with numbers that float32 cannot bear; faults of the weights and caches that draw, and clean updates",
    "failures": "random kills, hangs, signals, full disks and changed files: the same bits, or refused in a sentence",
    "families": "all families against transformers and PEFT, through whole runs and through pipelines; "
    "random config.json files",
    "runs": "whole runs of every algorithm, plan and option, killed and resumed to the same bits; asynchronous ones of "
    "several processes",
    "starts": "60 starts of runs of every kind whose programs are in JAX's cache; runs that hang, ended by a signal",
    "processes": "runs of two processes against runs of one; rollout processes, killed and stopped at random",
    "switches": "compiled switches between 42 of all 210 pairs of mesh shapes of 16 devices, drawn anew by each run: "
    "bytes that each device receives",
    "notebooks": "all notebooks and the tutorials on rewards and from TRL from top to bottom; the installation of "
    "notebooks beside an old and a fitting JAX",
    "inputs": "5,400 malformed inputs, read in one process, and 120 commands: one sentence and exit code 2, or a run; "
    "every combination of answers to `jrlhf init`",
    "real": "a pretrained chat model (SmolLM2-135M-Instruct, weights rounded to four bits) against transformers and "
    "PEFT: logits, gradients, greedy and drawn texts, templates, adapters, exports, layouts, stages; asynchronous runs",
}
PACKAGES = ("jax", "flax", "optax", "numpy", "orbax-checkpoint")


def run(part: str) -> int:
    """Runs the tests of a part and records the outcome; returns pytest's exit code."""
    seed = secrets.randbelow(2**31)
    (RESULTS / f"{part}.json").unlink(missing_ok=True)  # a run that is ended leaves no result of an older one
    selection = ["benchmarks/oracle"] if part == "oracle" else ["tests", "--proof", part]
    with tempfile.TemporaryDirectory() as directory:
        variables = {**os.environ, "PROOF_SEED": str(seed)}
        if part == "real" and "REAL_MODEL" not in variables:
            variables["REAL_MODEL"] = model = str(Path(directory) / "model")
            subprocess.run([sys.executable, "-m", "benchmarks.real_model", model], cwd=ROOT, check=True)
        report = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "", "--dist", "load", f"--junitxml={report}", *selection]
        code = subprocess.run(command, cwd=ROOT, env=variables).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}" for case in suite if len(case) and case[0].tag != "skipped"
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    result = {
        "part": part,
        "subject": PARTS[part],
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "seconds": round(float(suite.get("time", "0"))),
        "exit_code": code,
        **counts,
        "failed": failed,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{part}.json").write_text(json.dumps(result, indent=2) + "\n")
    return code


class Counter:
    """Counts the tests of each part while pytest collects them, before it leaves out those of parts."""

    def __init__(self) -> None:
        self.tests: collections.Counter[str] = collections.Counter()

    def pytest_itemcollected(self, item: Any) -> None:
        if mark := item.get_closest_marker("proof"):
            self.tests[mark.args[0]] += 1


def sizes() -> collections.Counter[str]:
    """Part -> number of its tests now; without the oracle's, which need packages of their own to be collected."""
    import pytest  # .ci/full asks for the names of parts before anything is installed

    counter = Counter()
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main(["--collect-only", "-m", "", "-n", "0", "tests"], plugins=[counter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest cannot collect the tests: exit code {code}")
    return counter.tests


def problems() -> list[str]:
    """One sentence for every part that is missing, failed or ran no test; prints the age of each good one."""
    today, faults, now = datetime.datetime.now(datetime.UTC), [], sizes()
    for part in PARTS:
        path = RESULTS / f"{part}.json"
        if not path.is_file():
            faults.append(f"the proofs of part {part} were never run: .ci/full {part}")
            continue
        result = json.loads(path.read_text())
        passed = result["tests"] - result["skipped"]
        if result["exit_code"] != 0 or result["failed"] or passed < 1:
            faults.append(f"the proofs of part {part} failed at {result['commit'][:9]}: {result['failed']}")
            continue
        age = today - datetime.datetime.fromisoformat(result["date"])
        size = "" if part == "oracle" or now[part] == result["tests"] else f"; it has {now[part]} tests now"
        print(f"{part}: {passed} passed at {result['commit'][:9]}, {age.days} days ago{size}")
    return faults


def main(arguments: list[str]) -> int:
    match arguments:
        case ["list"]:
            print("\n".join(PARTS))
        case ["known", part]:
            if part not in PARTS:
                print(f"{part} is no part: choose from {', '.join(PARTS)}", file=sys.stderr)
                return 2
        case ["run", part] if part in PARTS:
            return run(part)
        case ["check"]:
            faults = problems()
            print("\n".join(faults), file=sys.stderr)
            return int(bool(faults))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
