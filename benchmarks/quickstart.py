"""`python -m benchmarks.quickstart`: the quickstart over several seeds; its figures and its curves for the README.

Writes benchmarks/results/quickstart.json and quickstart.svg. Each seed takes the minutes of one quickstart.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jrlhf.metrics import read_metrics

RESULTS = Path(__file__).parent / "results"
PANELS = {
    "reward-model score (what PPO sees)": "critic/score/mean",
    "gold score (only measures)": "gold/score",
    "KL to the SFT model, nats a response": "objective/kl",
}


def main(seeds: list[int]) -> None:
    """Runs each seed in a process of its own, with an empty compilation cache."""
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            command = [
                sys.executable,
                "-m",
                "jrlhf.train",
                "--config",
                "quickstart",
                f"seed={seed}",
                f"name=seed-{seed}",
            ]
            began = time.perf_counter()
            subprocess.run([*command, f"run_dir={directory}"], check=True)
            seconds = time.perf_counter() - began
            path = Path(directory) / f"seed-{seed}"
            summary = json.loads((path / "summary.json").read_text())
            runs.append({"seed": seed, "seconds": seconds, **summary, "ppo": read_metrics(path)})
    curves = {run["seed"]: [each for each in run.pop("ppo") if each["stage"] == "ppo"] for run in runs}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")}
    result = {
        "command": f"python -m benchmarks.quickstart --seeds {' '.join(map(str, seeds))}",
        "date": datetime.date.today().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), **versions},
        "runs": runs,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(curves)


def draw(curves: dict[int, list[dict]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3), layout="constrained")
    for axis, (title, metric) in zip(axes, PANELS.items(), strict=True):
        for seed, records in curves.items():
            axis.plot([each["step"] for each in records], [each[metric] for each in records], label=f"seed {seed}")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("PPO iteration")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "quickstart.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The quickstart over several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    main(parser.parse_args().seeds)
