"""`python -m benchmarks.quickstart`: the quickstart over several seeds; its figures and its curves for the README.

Writes benchmarks/results/quickstart.json and quickstart.svg; with `--config quickstart-safe` or `quickstart-dpo` those
of that name. Each seed takes the minutes of one quickstart.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.records import FIRST_RUN, RESULTS, provenance, write
from jrlhf.config import load_config
from jrlhf.run.contents import read_summary
from jrlhf.run.metrics import read_metrics

PANELS = {
    "quickstart": {
        "reward-model score (what PPO sees)": "critic/score/mean",
        "gold score (only measures)": "gold/score",
        "KL to the SFT model, nats a response": "objective/kl",
    },
    "quickstart-safe": {
        "reward-model score (maximised)": "critic/score/mean",
        "cost: words a line (limit: 5)": "cost/mean",
        "Lagrange multiplier": "safe/multiplier",
    },
    "quickstart-dpo": {
        "loss": "dpo/loss",
        "accuracy on a batch of pairs": "rewards/accuracies",
        "margin of implicit rewards": "rewards/margins",
    },
}  # config -> title -> metric of its last stage
LIMITS = {"cost/mean": 5.0}  # drawn dashed


def main(config: str, seeds: list[int]) -> None:
    """Runs each seed in a process of its own, which compiles all its programs."""
    stage = load_config(config).stages[-1]
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            command = [
                sys.executable,
                "-m",
                "jrlhf.train",
                "--config",
                config,
                f"seed={seed}",
                f"name=seed-{seed}",
            ]
            began = time.perf_counter()
            subprocess.run([*command, f"run_dir={directory}"], check=True, env=FIRST_RUN)
            seconds = time.perf_counter() - began
            path = Path(directory) / f"seed-{seed}"
            summary = read_summary(path)
            records = [record for record in read_metrics(path) if record["stage"] == stage]
            step = statistics.median(record["timing_s/step"] for record in records[1:])
            times = {"seconds": seconds, "seconds_per_iteration": step}
            curves = {name: [record[name] for record in records] for name in ("step", *PANELS[config].values())}
            runs.append({"seed": seed, **times, **summary, "curves": curves})
    result = {
        **provenance("jax", "flax", "optax", "orbax-checkpoint"),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "runs": runs,
    }
    write(RESULTS / f"{config}.json", result)
    draw(config, runs)


def draw(config: str, runs: list[dict]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    panels = PANELS[config]
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3), layout="constrained")
    for axis, (title, metric) in zip(axes, panels.items(), strict=True):
        for run in runs:
            axis.plot(run["curves"]["step"], run["curves"][metric], label=f"seed {run['seed']}")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step" if config == "quickstart-dpo" else "iteration")
        if metric in LIMITS:
            axis.axhline(LIMITS[metric], color="grey", linestyle="--", linewidth=1)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / f"{config}.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The quickstart over several seeds.")
    parser.add_argument("--config", choices=tuple(PANELS), default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    main(options.config, options.seeds)
