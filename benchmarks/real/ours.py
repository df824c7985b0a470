"""Our side of a run on the real model: `jrlhf.api.train` with the shipped config, as a user starts it."""

import shutil
from pathlib import Path

from benchmarks.real.common import Job, Trained, main
from jrlhf.api import train as run


def train(job: Job) -> Trained:
    runs = Path(job.folder) / "runs"
    resumed = (runs / "run").exists()
    done = run(f"smollm2-{job.algorithm}", name="run", run_dir=str(runs), seed=job.seed, resume="auto", **job.changes)
    shutil.move(done.path / "model", job.trained)
    return Trained(done.column("critic/score/mean").tolist(), done.column("timing_s/step").tolist(), resumed)


if __name__ == "__main__":
    main(train, ("jax", "flax", "optax"))
