"""GRPO and PPO of a model of a billion weights on one accelerator: killed on their way, and started again.

    python -m benchmarks.killed            # minutes on an H200, with 80 GB of disk for checkpoints
    python -m benchmarks.killed --small    # tiny models, for a CPU; writes nothing

Both runs share the device. Each begins with fresh weights, imitates worked sums for a while, and then learns from a
reward, in bfloat16. They are too short to learn to add: a constant answer reaches the same score. After `KILLED`
iterations a run is killed by SIGKILL, and started again with --resume, which goes on from its newest complete
checkpoint. Iterations that are computed twice must have equal metrics, but for their seconds, or the benchmark fails.
Writes benchmarks/results/killed-DEVICE.json, and the scores of all iterations as an SVG.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import jax
import yaml

from benchmarks.records import hardware, path_for, provenance, write
from jrlhf.run.contents import read_summary
from jrlhf.run.metrics import read_metrics

ITERATIONS, KILLED, SETTLED = 36, 18, range(4, 16)  # SETTLED: nothing compiles, nothing is written
TIMES = ("perf/", "timing_")  # metrics that differ from run to run
SHARES = {"grpo": 0.38, "ppo": 0.52}  # of the device's memory
MODEL = {"vocab_size": 14, "embed": 4096, "layers": 5, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336}
TINY = {"vocab_size": 14, "embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 256}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"samples": 8, "kl_coef": 0.001}},
    "ppo": {
        "critic": {"learning_rate": 5.0e-5, "warmup": 4, "final": 1.0, "weight_decay": 0.0},
        "algorithm": {"kl_coef": 0.001, "kl_target": None, "gae_lambda": 1.0, "minibatches": 2},
    },
}


def places(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """The reward: the share of the sum's digits that stand in their places after the response's last "="."""
    return [share(completion.rpartition("=")[2], right) for completion, right in zip(completions, answer, strict=True)]


def share(written: str, right: str) -> float:
    return sum(a == b for a, b in zip(written, right, strict=False)) / max(len(written), len(right))


def config(name: str, run_dir: Path, small: bool) -> dict[str, Any]:
    """The run of an algorithm."""
    return {
        "name": name,
        "run_dir": str(run_dir),
        "device": {"platform": "cpu" if small else "gpu"},
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
        "compute": {"dtype": "float32" if small else "bfloat16", "remat": "products"},
        "model": {**(TINY if small else MODEL), "max_positions": 64, "qk_norm": True},
        "data": {
            **{"source": "arithmetic", "terms": 4, "digits": 2, "problems": 40000, "heldout_rows": 64},
            **{"units_first": True, "max_prompt": 16, "max_response": 32},
        },
        "rewards": [{"name": "places", "function": "benchmarks.killed:places"}],
        "stages": ["sft", name],
        "checkpoints": {"keep": 1},
        "sft": {"steps": 120, "batch": 64, "learning_rate": 2.0e-4, "warmup": 20, "weight_decay": 0.1}
        | {"eval_every": 120, "save_every": 120},
        name: {
            "iterations": ITERATIONS,
            "rollout_batch": 64 if small else 512,
            "save_every": 16,
            "actor": {"learning_rate": 2.0e-5, "warmup": 4, "final": 1.0, "weight_decay": 0.0},
            **ALGORITHMS[name],
        },
        "evaluation": {"prompts": 64},
    }


def start(path: Path, share_of_memory: float, *more: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(share_of_memory)}
    return subprocess.Popen([sys.executable, "-m", "jrlhf.train", "--config", str(path), *more], env=environment)


def iterations(run: Path) -> list[dict[str, Any]]:
    """The metrics of the iterations of reinforcement learning."""
    return [row for row in read_metrics(run) if "timing_s/gen" in row]


def killed_and_resumed(name: str, directory: Path, small: bool) -> dict[str, Any]:
    """Trains, kills, and trains on to the end -> the row of the results."""
    path, run = directory / f"{name}.yaml", directory / name
    path.write_text(yaml.safe_dump(config(name, directory, small)))
    process = start(path, SHARES[name])
    try:
        while process.poll() is None and len(iterations(run)) < KILLED:
            time.sleep(0.2)
    finally:
        process.kill()
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"{name} ended with exit code {process.returncode} before it was killed")
    first, process = iterations(run), start(path, SHARES[name], "--resume")
    try:
        code = process.wait()
    finally:
        process.kill()
    if code:
        raise SystemExit(f"{name} ended with exit code {code} after it was killed")
    return row(name, first, iterations(run), read_summary(run))


def row(
    name: str, first: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], summary: Mapping[str, Any]
) -> dict[str, Any]:
    """What both processes recorded. again: iterations that both computed; unequal: those of them that differ."""

    def values(metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in metrics.items() if not key.startswith(TIMES)}

    both = [(one, two) for one in first for two in rows if one["step"] == two["step"]]
    # A metric that the second process did not measure anew is the first one's, with its seconds.
    again = [(one, two) for one, two in both if one["timing_s/step"] != two["timing_s/step"]]
    settled = [metrics for metrics in first if metrics["step"] in SETTLED]
    return {
        "algorithm": name,
        "iterations": [metrics["step"] for metrics in rows],
        "killed_after": first[-1]["step"],
        "again": [one["step"] for one, _ in again],
        "unequal": [one["step"] for one, two in again if values(one) != values(two)],
        "seconds": {
            key.removeprefix("timing_s/"): round(median(metrics[key] for metrics in settled), 4)
            for key in settled[0]
            if key.startswith("timing_s/")
        },
        "most_memory_gb": max((metrics.get("perf/max_memory_allocated_gb", 0.0) for metrics in rows), default=0.0),
        "scores": [round(metrics["critic/score/mean"], 4) for metrics in rows],
        "held_out": summary["held_out"],
    }


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the score of every iteration, and where the runs were killed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "killed", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for result in rows:
        axes.plot(result["iterations"], result["scores"], label=result["algorithm"].upper(), linewidth=1.5)
    axes.axvline(rows[0]["killed_after"], color="black", linestyle="--", linewidth=1, label="killed")
    axes.set(xlabel="iteration", ylabel="mean score of 512 responses")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs of a billion weights, killed and resumed.")
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU; writes nothing")
    small = parser.parse_args().small
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor() as pool:
        jobs = [pool.submit(killed_and_resumed, name, Path(temporary), small) for name in ALGORITHMS]
        rows = [job.result() for job in jobs]
    for result in rows:
        if not result["again"] or result["unequal"]:
            raise SystemExit(f"{result['algorithm']}: of iterations {result['again']}, {result['unequal']} differ")
        print(json.dumps({key: value for key, value in result.items() if key != "iterations"}))
    if small:
        print("tiny models: nothing is written")
        return
    device = jax.devices()[0]  # not before: it would take the memory that the runs need
    record = {"benchmark": "killed", "hardware": hardware(device), **provenance("jax", "flax"), "model": MODEL}
    path = path_for("killed", device)
    write(path, {**record, "results": rows})
    plot(rows, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
