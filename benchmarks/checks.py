"""The cost of the checks and the bookkeeping of asynchronous rollouts, as shares of an iteration, on a CPU.

    python -m benchmarks.checks

writes `results/checks.json`: of GRPO runs whose rollouts have a device of their own, the share of the time that goes to
fingerprints, to log-probabilities that are computed again, and to versions, queue and clock. What is timed is waited
for before and after, so it hides behind nothing: an upper bound.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.records import RESULTS, hardware, provenance, write
from jrlhf.config import load_config
from jrlhf.models.generation.continuous import ContinuousBatch, Prompt, Weights
from jrlhf.rollouts import asynchronous, slices
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.identity import Identity
from jrlhf.rollouts.prompts import PromptStream
from jrlhf.rollouts.recompute import Recompute
from jrlhf.rollouts.slices import SliceWorkers
from jrlhf.train import main as train

ROWS = 128, 256  # of a batch
LENGTH, ITERATIONS, FIRST = 32, 10, 4  # FIRST: iterations in which programs are compiled and slots fill
SETTINGS = (
    "device.simulated=2 mesh.data=2 mesh.fsdp=1 mesh.tensor=1 plan=disaggregated "
    "model.embed=256 model.layers=4 model.heads=8 model.kv_heads=4 model.head_dim=32 model.mlp=1024 "
    f"model.max_positions={LENGTH + 8} data.digits=1 data.problems=60 data.heldout_rows=8 data.max_prompt=4 "
    f"data.max_response={LENGTH} sampling.min_new_tokens={LENGTH // 2} sft.steps=2 sft.batch=8 sft.warmup=1 "
    f"evaluation.prompts=4 rollout.chunk=8 rollout.buckets=1 rollout.lengths=1 grpo.iterations={ITERATIONS} "
    f"grpo.save_every=100 grpo.algorithm.samples=8 grpo.algorithm.importance=token "
    "grpo.asynchronous.staleness=2 grpo.asynchronous.update_steps=16"
).split()


class Stopwatch:
    """Seconds of the calls of functions by name, without those of the timed functions that they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any], *, waits: bool = False) -> Callable[..., Any]:
        """The function, timed. waits: also what it has computed is waited for, and before what it is given."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            if waits:
                jax.block_until_ready((arguments, keywords))
            begin = time.monotonic()
            self._inner.append(0.0)
            result = function(*arguments, **keywords)
            if waits:
                jax.block_until_ready(result)
            elapsed = time.monotonic() - begin
            self.seconds[name] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed
            return result

        return call


def shares(on_new_weights: str, rows: int, directory: str) -> dict[str, float]:
    """The share of the time between updates that goes to each part; the seconds between updates."""
    options = [f"run_dir={directory}", f"name={on_new_weights}-{rows}", f"grpo.rollout_batch={rows}"]
    options.append(f"grpo.asynchronous.on_new_weights={on_new_weights}")
    config, watch, begins = load_config("arithmetic-grpo", [*SETTINGS, *options]), Stopwatch(), list[float]()
    publish, prefill_again = Fleet.publish, ContinuousBatch.prefill_again

    def waited(
        self: ContinuousBatch, weights: Weights, prompt_of: Callable[[int], Prompt]
    ) -> None:  # fingerprints would wait for it
        prefill_again(self, weights, prompt_of)
        jax.block_until_ready(self.state)

    def counted(self: Fleet, weights: Weights, expected: Identity, updates: Any = None, grad_norm: Any = 0.0) -> None:
        begins.append(time.monotonic())
        if len(begins) == FIRST:
            watch.seconds.clear()
        publish(self, weights, expected, updates, grad_norm)

    patched = [
        (asynchronous, "trained_identity", "fingerprints", True),
        (slices, "drawing_identity", "fingerprints", True),
        (Fleet, "_check", "fingerprints", False),
        (Recompute, "compare", "log-probabilities", True),
        (SliceWorkers, "decode", "rollouts", False),
        (SliceWorkers, "take", "rollouts", False),
        (Fleet, "_decode", "rollouts", False),
        (PromptStream, "prompt", "prompts", False),
        (Fleet, "collect", "queue", False),
        (Fleet, "publish", "queue", False),
        (Fleet, "_state", "queue", False),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, *_ in patched]
    originals.append((ContinuousBatch, "prefill_again", prefill_again))
    Fleet.publish, ContinuousBatch.prefill_again = counted, waited
    for owner, name, part, waits in patched:
        setattr(owner, name, watch.timed(part, getattr(owner, name), waits=waits))
    try:
        train(config)
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    whole = begins[-1] - begins[FIRST - 1]
    parts = {name: watch.seconds[name] / whole for name in ("fingerprints", "log-probabilities", "queue")}
    return {**parts, "sum": sum(parts.values()), "seconds": whole / (len(begins) - FIRST)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = {
            f"{mode}, {rows} rows": shares(mode, rows, directory)
            for rows in ROWS
            for mode in ("keep_cache", "prefill_again", "finish")
        }
    for name, own in results.items():
        print(name, {part: round(value, 4) for part, value in own.items()})
    device = hardware(jax.devices()[0])
    write(RESULTS / "checks.json", {**provenance("jax"), "hardware": device, "settings": SETTINGS, "shares": results})


if __name__ == "__main__":
    main()
