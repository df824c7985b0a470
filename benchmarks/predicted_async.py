"""Asynchronous runs against their predictions by `python -m jrlhf.plan`, in counts of the virtual clock and in seconds.

    python -m benchmarks.predicted_async

writes `results/predicted_async.json`: the ages of tokens, and the trainer's wait in decode steps, in GRPO runs whose
rollouts have a device of their own, and as predicted. Both depend on counts alone, and not on the machine. The
predictions get the mean and the spread of the first run's lengths, as a user would give them.

Seconds are those of a larger model whose rows all have one length, on this machine, whose speed is measured after the
runs. If its devices are simulated they share its cores, so only a run with staleness 0, in which one of them works at a
time, can take the predicted time.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.records import hardware, output_path, provenance, write
from jrlhf.config import load_config
from jrlhf.plan import Search, make_plan
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.state import Collected
from jrlhf.run.metrics import read_metrics
from jrlhf.train import main as train

ITERATIONS, FIRST = 24, 4  # of a run, and those in which programs are compiled and slots fill
LENGTH, UPDATE = 32, 40  # maximum tokens of a row; decode steps of an update
CASES = (0, "keep_cache"), (1, "keep_cache"), (4, "keep_cache"), (2, "finish")
TIMED = 0, 2  # bounds of the runs whose seconds are compared
LARGER = (
    "model.embed=256 model.layers=4 model.heads=8 model.kv_heads=4 model.head_dim=32 model.mlp=1024 "
    f"sampling.min_new_tokens={LENGTH} grpo.iterations=12"
).split()
SETTINGS = (
    "device.simulated=2 mesh.data=2 mesh.fsdp=1 mesh.tensor=1 plan=disaggregated "
    "model.embed=16 model.layers=2 model.heads=2 model.kv_heads=1 model.head_dim=8 model.mlp=32 model.max_positions=40 "
    f"data.digits=1 data.problems=60 data.heldout_rows=8 data.max_prompt=4 data.max_response={LENGTH} "
    "sft.steps=2 sft.batch=8 sft.warmup=1 "
    "sampling.min_new_tokens=1 evaluation.prompts=4 rollout.chunk=4 rollout.slots=16 "
    f"rollout.buckets=1 rollout.lengths=1 grpo.iterations={ITERATIONS} grpo.save_every=100 grpo.rollout_batch=64 "
    "grpo.actor.learning_rate=1e-6 grpo.algorithm.samples=4 grpo.algorithm.old_logprobs=rollout "
    f"grpo.algorithm.kl_coef=0 grpo.asynchronous.update_steps={UPDATE} grpo.asynchronous.logprob_check=off"
).split()


def measured(config: Any) -> tuple[dict[str, float], list[int]]:
    """Returns ages and waits of a run without its first iterations, and the lengths of its rows."""
    lengths, collect = list[int](), Fleet.collect

    def counted(self: Fleet) -> Collected:
        batch = collect(self)
        lengths.extend(batch.rows.lengths.tolist())
        return batch

    Fleet.collect = counted
    try:
        train(config)
    finally:
        Fleet.collect = collect
    path = Path(config.run_dir) / config.name
    records = [record for record in read_metrics(path) if record["stage"] == "grpo"][FIRST:]
    ages, wait = "training/off_policy/token_staleness", "async/trainer_wait"
    return {
        "mean_age": float(np.mean([record[f"{ages}/mean"] for record in records])),
        "max_age": float(np.max([record[f"{ages}/max"] for record in records])),
        "trainer_wait_steps": float(np.mean([record[wait] for record in records])),
        "seconds": float(np.median([record["timing_s/step"] for record in records])),
    }, lengths


def predicted(config: Any, mean: float, sigma: float) -> dict[str, float]:
    """Returns the same as `jrlhf.plan` predicts it; the kind of devices changes seconds only."""
    search = Search(cluster="2xh100", mean_response=mean, sigma=sigma, plan="disaggregated")
    outcome = make_plan(config, search, say=print).asynchronous
    assert outcome is not None
    one = outcome.costs
    return {
        "mean_age": one.mean_age,
        "max_age": one.max_age,
        "trainer_wait_steps": one.trainer_waits * one.step,
    }


def in_seconds(config: Any) -> dict[str, float]:
    """Returns the seconds from update to update: measured, and as predicted for this machine."""
    run, _ = measured(config)
    outcome = make_plan(config, Search(plan="disaggregated"), say=print).asynchronous
    assert outcome is not None
    return {"seconds": run["seconds"], "predicted": outcome.seconds, "trainer_waits": outcome.trainer_waits}


def main() -> None:
    output, rows, mean, sigma = output_path(__doc__, "predicted_async"), [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as directory:
        for staleness, on_new_weights in CASES:
            own = f"staleness={staleness}", f"on_new_weights={on_new_weights}"
            settings = [*SETTINGS, *(f"grpo.asynchronous.{setting}" for setting in own)]
            named = [f"run_dir={directory}", f"name={staleness}-{on_new_weights}"]
            config = load_config("arithmetic-grpo", [*settings, *named])
            run, lengths = measured(config)
            if not rows:
                mean, sigma = float(np.mean(lengths)), float(np.std(np.log(lengths)))
            plan = predicted(config, mean, sigma)
            rows.append({"staleness": staleness, "on_new_weights": on_new_weights, "run": run, "predicted": plan})
            print(rows[-1], flush=True)
        timed = []
        for staleness in TIMED:
            own = f"grpo.asynchronous.staleness={staleness}", f"run_dir={directory}", f"name=timed-{staleness}"
            timed.append(
                {"staleness": staleness, **in_seconds(load_config("arithmetic-grpo", [*SETTINGS, *LARGER, *own]))}
            )
            print(timed[-1], flush=True)
    spread = {"mean": mean, "sigma": sigma}
    packages = provenance("jax", "numpy")
    record = {"hardware": hardware(jax.devices()[0]), "lengths": spread, "runs": rows, "timed": timed}
    write(output, {**packages, **record})


if __name__ == "__main__":
    main()
