"""Token log-probabilities: dense logits under autodiff against the implementations of `jrlhf.kernels.logprob`.

    python -m benchmarks.logprob

Times forward, and forward with backward, on the first device; rounds of the implementations alternate, the best one
counts. Temporary memory is the compiler's. Prints a table and writes `benchmarks/results/logprob-DEVICE.json`. On a CPU
only ratios to the dense program of the same run are kept; on an accelerator times in seconds, and TFLOP/s of the
2·N·D·V (forward) and 6·N·D·V (both) operations that the mathematics needs, what is recomputed not counted.
"""

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from jrlhf.kernels.logprob import token_logprobs

ROUNDS = 7
SHAPES = {  # tokens, embed, vocabulary
    "cpu": [(2816, 128, 1024), (704, 128, 1024), (1024, 256, 32000)],
    "accelerator": [(16384, 1024, 151936), (4096, 4096, 128256), (16384, 4096, 151936)],
}

Op = Callable[[Array, Array, Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Result:
    """One implementation at one shape; times in seconds, memory in bytes."""

    implementation: str
    tokens: int
    embed: int
    vocabulary: int
    dtype: str
    forward: float
    both: float
    forward_temp: int
    both_temp: int


def dense(hidden: Array, unembedding: Array, targets: Array) -> tuple[Array, Array]:
    """What one writes first: all logits at once."""
    logits = jnp.dot(hidden, unembedding.T, preferred_element_type=jnp.float32)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    label = jnp.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0]
    return label, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def implementations(device) -> dict[str, Op]:
    """By name: the dense program, then all that run on this device."""
    ops: dict[str, Op] = {"dense": dense, "xla": partial(token_logprobs, implementation="xla")}
    if device.platform == "tpu":
        ops["pallas_tpu"] = partial(token_logprobs, implementation="pallas_tpu")
    if device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0":
        ops["pallas_gpu"] = partial(token_logprobs, implementation="pallas_gpu")
    return ops


def loss(op: Op, hidden: Array, unembedding: Array, targets: Array) -> Array:
    logprobs, entropy = op(hidden, unembedding, targets)
    return jnp.mean(logprobs) + 0.01 * jnp.mean(entropy)


def measure(ops: dict[str, Op], tokens: int, embed: int, vocabulary: int, dtype) -> list[Result]:
    """All implementations at one shape."""
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = (
        jax.random.normal(keys[0], (tokens, embed), dtype),
        (jax.random.normal(keys[1], (vocabulary, embed)) / math.sqrt(embed)).astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocabulary),
    )
    programs = {}
    for name, op in ops.items():
        programs[name, "forward"] = jax.jit(op).lower(*arguments).compile()
        programs[name, "both"] = jax.jit(jax.grad(partial(loss, op), argnums=(0, 1))).lower(*arguments).compile()
    best = dict.fromkeys(programs, math.inf)
    for round_ in range(ROUNDS + 1):  # the first only warms up
        for key, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            if round_ > 0:
                best[key] = min(best[key], time.perf_counter() - start)
    temp = {key: program.memory_analysis().temp_size_in_bytes for key, program in programs.items()}
    return [
        Result(
            implementation=name,
            tokens=tokens,
            embed=embed,
            vocabulary=vocabulary,
            dtype=jnp.dtype(dtype).name,
            forward=best[name, "forward"],
            both=best[name, "both"],
            forward_temp=temp[name, "forward"],
            both_temp=temp[name, "both"],
        )
        for name in ops
    ]


def report(results: list[Result], on_cpu: bool) -> list[dict[str, object]]:
    """Prints the shape's table, and returns its rows for the file."""
    first = results[0]
    print(f"\n{first.tokens} tokens, embed {first.embed}, vocabulary {first.vocabulary}, {first.dtype}")
    rows = []
    for result in results:
        row: dict[str, object] = asdict(result)
        if on_cpu:
            row["forward"] = row["both"] = None
            row["forward_ratio"] = round(result.forward / first.forward, 3)
            row["both_ratio"] = round(result.both / first.both, 3)
            speed = f"forward {row['forward_ratio']:6.2f} x dense   both {row['both_ratio']:6.2f} x dense"
        else:
            work = 2e-12 * result.tokens * result.embed * result.vocabulary
            row["forward_tflops"] = round(work / result.forward, 1)
            row["both_tflops"] = round(3 * work / result.both, 1)
            speed = (
                f"forward {1e3 * result.forward:8.2f} ms {row['forward_tflops']:6} TFLOP/s   "
                f"both {1e3 * result.both:8.2f} ms {row['both_tflops']:6} TFLOP/s"
            )
        memory = f"temp {result.forward_temp / 2**20:8.1f} / {result.both_temp / 2**20:8.1f} MiB"
        print(f"  {result.implementation:11} {speed}   {memory}")
        rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def main() -> None:
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    hardware = f"{platform.machine()}, {os.cpu_count()} cores" if on_cpu else device.device_kind
    print(f"{hardware}, jax {jax.__version__}")
    rows = []
    for shape in SHAPES["cpu" if on_cpu else "accelerator"]:
        rows += report(measure(implementations(device), *shape, jnp.float32 if on_cpu else jnp.bfloat16), on_cpu)
    record = {
        "benchmark": "logprob",
        "date": date.today().isoformat(),
        "hardware": hardware,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "results": rows,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    path = Path(__file__).parent / "results" / f"logprob-{slug}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
