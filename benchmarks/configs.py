"""A shipped config at its true shapes: random weights, made-up rows, a few PPO iterations.

    python -m benchmarks.configs gsm8k-ppo
    python -m benchmarks.configs qwen3-8b-lora ppo.rollout_batch=64 name=fewer-rows
    python -m benchmarks.configs gsm8k-ppo --small    # a tiny model and few rows, for a CPU; writes nothing

The model is written to a temporary directory with the suite's tokenizer, which has its family's template and a small
vocabulary; the rows have GSM8K's columns. `jrlhf.train` then runs in a process of its own and is asked to stop after
`--iterations`, so that neither validation nor export is measured. From its metrics: medians of the seconds of each call
after the first two iterations, the most memory that the device held, tokens a second; and by how much the first
iteration's calls took longer than these medians, which is tracing and compiling. Random weights learn nothing and end
few responses early: the figures are of the shapes. Merges the config, by its `name`, into
`benchmarks/results/configs-DEVICE.json`.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.records import FIRST_RUN, hardware, path_for, provenance, write
from jrlhf.config import load_config
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.errors import DONE, PREEMPTED
from jrlhf.meshes import make_mesh
from jrlhf.models import PRESETS, ModelConfig, export_hf, init_sharded
from jrlhf.run.metrics import read_metrics

TOKENIZER = Path(__file__).parents[1] / "tests" / "jrlhf" / "tokenizers" / "qwen"
SETTLING = 2  # iterations after which nothing compiles
ROWS = 4000
SMALL = [
    "device.platform=cpu",
    "ppo.rollout_batch=8",
    "ppo.algorithm.minibatches=2",
    "ppo.algorithm.micro_batches=1",
    "data.max_prompt=128",
    "data.max_response=8",
    "data.heldout_rows=8",
]


def made_up_rows(count: int) -> str:
    """Lines with GSM8K's columns; with the config's system message prompts of about 107 tokens of the tokenizer."""
    draw = random.Random(0)
    lines = []
    for _ in range(count):
        had, bought, hunger = (draw.randrange(2, 60) for _ in range(3))
        ate = hunger % had
        left = had + bought - ate
        question = f"Ann has {had} eggs. She buys {bought} and eats {ate}. How many has she?"
        lines.append(json.dumps({"question": question, "answer": f"{had}+{bought}-{ate}={left} #### {left}"}) + "\n")
    return "".join(lines)


def write_model(config: ModelConfig, directory: Path) -> None:
    """Random bfloat16 weights as a Hugging Face directory."""
    tokenizer = load_tokenizer(str(TOKENIZER))
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    params = init_sharded(config, jax.random.key(0), mesh)
    special: dict[str, Any] = {"eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    export_hf(params, config, directory, dtype=jnp.bfloat16, tokenizer_dir=TOKENIZER, **special)


def shrunk(config: ModelConfig) -> ModelConfig:
    """The same architecture, tiny."""
    return replace(config, vocab_size=1024, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=128)


def without_hub(model: Path, rows: Path, run_dir: Path | str) -> list[str]:
    """Settings of a run on this model and these rows, which is not validated."""
    paths = [f"model.path={model}", f"data.prompts.path={rows}", f"run_dir={run_dir}"]
    return [*paths, "validation.every=null", "validation.temperature=null"]


def train(name: str, overrides: Sequence[str], run: Path, iterations: int) -> None:
    """`jrlhf.train` until its metrics hold so many iterations: then it is asked to stop, saves and leaves."""
    process = subprocess.Popen([sys.executable, "-m", "jrlhf.train", "--config", name, *overrides], env=FIRST_RUN)
    try:
        while process.poll() is None and len(read_metrics(run)) < iterations:
            time.sleep(0.5)
        process.terminate()
        code = process.wait()
    finally:
        process.kill()
    if code not in (DONE, PREEMPTED):
        raise SystemExit(f"jrlhf.train ended with exit code {code}")


def summary(metrics: Sequence[dict[str, Any]]) -> dict[str, object]:
    """What the iterations say: seconds, GB of 1e9 bytes, tokens a second."""
    first, settled = metrics[0], metrics[SETTLING:]
    calls = [name for name in first if name.startswith("timing_s/")]
    seconds = {name.removeprefix("timing_s/"): median(record[name] for record in settled) for name in calls}
    beyond = sum(first[name] for name in calls if name != "timing_s/step") - sum(seconds.values()) + seconds["step"]
    memory = [record["perf/max_memory_allocated_gb"] for record in metrics if "perf/max_memory_allocated_gb" in record]
    return {
        "iterations": [record["step"] for record in settled],
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "tokens": median(record["perf/total_num_tokens"] for record in settled),
        "tokens_a_second": round(median(record["perf/throughput"] for record in settled), 1),
        **({"most_memory_gb": round(max(memory), 2)} if memory else {}),  # a CPU does not tell
        "first_iteration": round(first["timing_s/step"], 1),
        "first_iteration_compiling": round(beyond, 1),
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['name']}: {result['seconds']['step']:.2f} s an iteration of {result['tokens']:,.0f} tokens")
    for name, seconds in result["seconds"].items():
        print(f"  {name:18} {seconds:9.4f} s")
    print(f"  {result['tokens_a_second']:,.0f} tokens/s, {result.get('most_memory_gb', 'unknown')} GB at most")
    print(
        f"  first iteration {result['first_iteration']} s, of which compiling {result['first_iteration_compiling']} s"
    )


def merge(path: Path, device: str, result: dict[str, Any]) -> None:
    """Puts the result among the file's, in the place of one of the same name."""
    others = json.loads(path.read_text())["results"] if path.exists() else []
    results = sorted(
        [other for other in others if other["name"] != result["name"]] + [result], key=lambda record: record["name"]
    )
    write(path, {"benchmark": "configs", "hardware": device, "results": results})


def main(name: str, given: Sequence[str], iterations: int, small: bool) -> None:
    if iterations <= SETTLING:
        raise SystemExit(f"--iterations {iterations} must exceed {SETTLING}: nothing is left to take the median of")
    shipped = load_config(name)
    if shipped.model.path is None:
        raise SystemExit(f"{name} has no model.path: its shapes are measured by running it")
    model = shrunk(PRESETS[shipped.model.path]) if small else PRESETS[shipped.model.path]
    own = [*(SMALL if small else []), *given]
    if small:  # for the processes that write the model and train it
        os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        directory, rows = Path(temporary) / "model", Path(temporary) / "rows.jsonl"
        rows.write_text(made_up_rows(100 if small else ROWS))
        # In a process of its own, which gives the device's memory back.
        writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(model, directory))
        writer.start()
        writer.join()
        if writer.exitcode != 0:
            raise SystemExit(f"writing the model ended with exit code {writer.exitcode}")
        run = Path(temporary) / load_config(name, own).name
        train(name, [*own, *without_hub(directory, rows, temporary)], run, iterations)
        metrics = read_metrics(run)[:iterations]
    result = {
        "name": run.name,
        **provenance("jax", "flax"),
        "model": shipped.model.path,
        **summary(metrics),
    }
    show(result)
    if small:
        print("\na tiny model: nothing is written")
    else:
        device = jax.devices()[0]  # not before: it would hold the memory that the run needs
        path = path_for("configs", device)
        merge(path, hardware(device), result)
        print(f"\nwrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A shipped config at its true shapes.")
    parser.add_argument("name", help="of a shipped config: gsm8k-ppo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the config's")
    parser.add_argument("--iterations", type=int, default=6, help="of which the first two only warm up")
    parser.add_argument("--small", action="store_true", help="a tiny model and few rows, for a CPU; writes nothing")
    options = parser.parse_intermixed_args()
    main(options.name, options.overrides, options.iterations, options.small)
