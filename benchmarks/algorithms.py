"""`python -m benchmarks.algorithms`: every algorithm on the built-in sums, accuracy before and after, and its pace.

Writes benchmarks/results/algorithms-cpu.json. The runs differ in their algorithm alone: configs/arithmetic-NAME.yaml.
"""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.records import FIRST_RUN, RESULTS, provenance, write
from jrlhf.run.contents import read_summary
from jrlhf.run.metrics import read_metrics

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax")


def main(algorithms: list[str], seeds: list[int]) -> None:
    """Runs each algorithm and seed in a process of its own, which compiles all its programs."""
    with tempfile.TemporaryDirectory() as directory:
        runs = [measure(Path(directory), name, seed) for name in algorithms for seed in seeds]
    result = {
        **provenance("jax", "flax", "optax", "orbax-checkpoint"),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "load": "1-minute load average when a run began, in `load`; cpu_seconds count this run's processes alone",
        "runs": runs,
    }
    RESULTS.mkdir(exist_ok=True)
    write(RESULTS / "algorithms-cpu.json", result)
    print(table(runs))


def measure(directory: Path, algorithm: str, seed: int) -> dict[str, Any]:
    """One run from nothing: held-out accuracy around the algorithm, and its times."""
    config, name = f"arithmetic-{algorithm}", f"{algorithm}-{seed}"
    load, began, used = os.getloadavg()[0], time.perf_counter(), _cpu_seconds()
    command = [sys.executable, "-m", "jrlhf.train", "--config", config, f"seed={seed}", f"name={name}"]
    subprocess.run([*command, f"run_dir={directory}"], check=True, env=FIRST_RUN)
    seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - used
    heldout = read_summary(directory / name)["held_out"]
    records = [record for record in read_metrics(directory / name) if record["stage"] == algorithm]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "before": heldout["before"]["score"],
        "after": heldout["after"]["score"],
        "difference": heldout["difference"],
        "standard_error": heldout["standard_error"],
        "n": heldout["n"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "load": load,
        "iterations": len(records),
        "seconds_per_iteration": statistics.median(record["timing_s/step"] for record in records[1:]),
        "training_accuracy": [record["critic/score/mean"] for record in records],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: a line for each run."""
    lines = ["| algorithm | seed | before | after | seconds an iteration |", "|---|---|---|---|---|"]
    for run in runs:
        accuracies = f"{run['before']:.1%} | {run['after']:.1%}"
        lines.append(f"| {run['algorithm']} | {run['seed']} | {accuracies} | {run['seconds_per_iteration']:.2f} |")
    return "\n".join(lines)


def _cpu_seconds() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Every algorithm on the built-in sums.")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    main(options.algorithms, options.seeds)
