"""The real speed-up of asynchronous rollouts in a process of their own, where a reward takes as long as decoding.

    python -m benchmarks.overlap

writes `results/overlap.json`. Decode steps, rewards and updates take the time of calibrated sleeps on the host, since
two cores have no parallel speed to show: the figures say what the program overlaps, not how fast a model is. All rows
have the same length. The baseline is staleness 0 with the same plan, the same processes and the same rewards, which are
asked group by group. `theory` is the simulator's ratio for the same settings.
"""

import os
import tempfile
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks import sleeps
from benchmarks.records import hardware, output_path, provenance, write
from jrlhf.config import load_config
from jrlhf.planning.predict_async import costs
from jrlhf.planning.simulate_async import Scenario, measured
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.processes import workers
from jrlhf.rollouts.processes.process import LocalWorker
from jrlhf.rollouts.schedule import Rules
from jrlhf.train import main as train

STEP = 0.1  # seconds of a decode step
LENGTH, CHUNK, UPDATE = 32, 4, 16  # tokens of a row; decode steps of a chunk, and of an update
GROUPS, SAMPLES = 4, 4  # of a batch, and rows of a group
ITERATIONS, FIRST = 11, 3  # of a run, and those in which programs are compiled and slots fill
SCENARIO = Scenario(
    Rules(GROUPS, 0, UPDATE, reward=float(LENGTH)), GROUPS * SAMPLES, SAMPLES, measured([LENGTH]), chunk=CHUNK
)
SETTINGS = (
    "device.simulated=1 mesh.data=1 mesh.fsdp=1 compute.remat=full fleet.workers=1 "
    "model.embed=16 model.layers=2 model.heads=2 model.kv_heads=1 model.head_dim=8 model.mlp=32 model.max_positions=48 "
    f"data.digits=1 data.problems=60 data.heldout_rows=8 data.max_prompt=4 data.max_response={LENGTH} "
    f"sampling.min_new_tokens={LENGTH} sft.steps=2 sft.batch=8 sft.warmup=1 evaluation.prompts=4 "
    f"rollout.chunk={CHUNK} rollout.buckets=1 rollout.lengths=1 grpo.iterations={ITERATIONS} grpo.save_every=100 "
    f"grpo.rollout_batch={GROUPS * SAMPLES} grpo.algorithm.samples={SAMPLES} grpo.algorithm.importance=token "
    f"grpo.asynchronous.update_steps={UPDATE} grpo.asynchronous.reward_steps={LENGTH}"
).split()


SLOW = {"name": "slow", "function": "benchmarks.sleeps:reward", "options": {"seconds": STEP * LENGTH / GROUPS}}


def seconds_of_a_step(staleness: int, directory: str, reward: dict[str, Any] = SLOW, *settings: str) -> list[float]:
    """The seconds from update to update of a run, after the first ones."""
    name = f"{reward['name']}-{staleness}"
    overrides = [f"run_dir={directory}", f"name={name}", f"grpo.asynchronous.staleness={staleness}", *settings]
    config = load_config("arithmetic-grpo", [*SETTINGS, *overrides, f"rewards=[{reward}]"])
    begins: list[float] = []
    publish = Fleet.publish

    def padded(self: Fleet, weights: Any, expected: Any, updates: Any = None, grad_norm: Any = 0.0) -> None:
        begins.append(time.monotonic())
        time.sleep(STEP * UPDATE)
        publish(self, weights, expected, updates, grad_norm)

    Fleet.publish = padded
    workers.LocalWorker = lambda module, *rest: LocalWorker("benchmarks.sleeps", *rest)
    os.environ[sleeps.SECONDS] = str(STEP * CHUNK)
    try:
        train(config)
    finally:
        Fleet.publish, workers.LocalWorker = publish, LocalWorker
    return np.diff(begins[FIRST:]).tolist()


def main() -> None:
    output = output_path(__doc__, "overlap")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for staleness in (0, 1, 2):
            seconds = seconds_of_a_step(staleness, directory)
            theory = costs(replace(SCENARIO, rules=replace(SCENARIO.rules, staleness=staleness))).step
            mean = float(np.mean(seconds))
            rows.append({"staleness": staleness, "seconds": mean, "spread": float(np.std(seconds)), "steps": theory})
            row, first = rows[-1], rows[0]
            row |= {"speed_up": first["seconds"] / mean, "theory": first["steps"] / theory}
            print(row, flush=True)
    sizes = {"step": STEP, "length": LENGTH, "chunk": CHUNK, "update": UPDATE, "groups": GROUPS, "samples": SAMPLES}
    packages = provenance("jax", "numpy")
    write(output, {**packages, "hardware": hardware(jax.devices()[0]), "sleeps": sizes, "runs": rows})


if __name__ == "__main__":
    main()
