"""Token log-probabilities: dense logits under autodiff against the implementations of `jrlhf.kernels.logprob`.

    python -m benchmarks.logprob            # minutes
    python -m benchmarks.logprob --small    # one tiny shape, for a CPU; writes nothing

Times forward, and forward with backward, on the first device; rounds of the implementations alternate, the best one
counts. Temporary memory is the compiler's. Prints a table and writes `benchmarks/results/logprob-DEVICE.json`. On a CPU
only ratios to the dense program of the same run are kept; on an accelerator times in seconds, and TFLOP/s of the
2·N·D·V (forward) and 6·N·D·V (both) operations that the mathematics needs, what is recomputed not counted.

The loss is elementwise in log-probability and entropy. `sums` is `token_sums`, which is told that loss and therefore
computes no logits twice; the others return log-probabilities and entropies. `liger` is Liger Kernel's fused linear
cross-entropy in PyTorch, without an entropy, where torch with CUDA and liger_kernel are installed; its temporary memory
is the peak above its inputs, results included.
"""

import argparse
import importlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.records import hardware, path_for, provenance, write
from jrlhf.kernels.logprob import token_logprobs, token_sums
from jrlhf.kernels.logprob.implementations import Implementation
from jrlhf.meshes.mesh import Device

ROUNDS = 7
SHAPES = {  # tokens, embed, vocabulary
    "cpu": [(2816, 128, 1024), (704, 128, 1024), (1024, 256, 32000)],
    "accelerator": [(16384, 1024, 151936), (4096, 4096, 128256), (16384, 4096, 151936)],
}
SMALL = [(512, 64, 1024)]
ENTROPY_COEF = 0.01

Function = Callable[[Array, Array, Array], Any]


@dataclass(frozen=True)
class Program:
    """One thing to time: `run` returns when it has ended. temp: bytes."""

    run: Callable[[], object]
    temp: int


@dataclass(frozen=True)
class Contender:
    """One implementation at one shape."""

    forward: Program
    both: Program


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


def terms(logprobs: Array, entropy: Array, data: tuple[()] = ()) -> tuple[Array, dict[str, Array]]:
    """The loss of every token."""
    return logprobs + ENTROPY_COEF * entropy, {"entropy": entropy}


def sums(hidden: Array, unembedding: Array, targets: Array) -> tuple[Array, dict[str, Array]]:
    return token_sums(hidden, unembedding, targets, (), terms, implementation="xla")


def mean_of(op: Function, hidden: Array, unembedding: Array, targets: Array) -> Array:
    """The mean loss, by log-probabilities and entropies."""
    return jnp.mean(terms(*op(hidden, unembedding, targets))[0])


def mean_of_sums(hidden: Array, unembedding: Array, targets: Array) -> Array:
    return sums(hidden, unembedding, targets)[0] / hidden.shape[0]


def implementations(device: Device) -> dict[str, tuple[Function, Function]]:
    """(forward, mean loss) by name: the dense program, then all that run on this device."""
    kernels: list[Implementation] = ["xla"]
    if device.platform == "tpu":
        kernels.append("pallas_tpu")
    if device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0":
        kernels.append("pallas_gpu")
    ops: dict[str, Function] = {"dense": dense}
    ops |= {name: partial(token_logprobs, implementation=name) for name in kernels}
    return {name: (op, partial(mean_of, op)) for name, op in ops.items()} | {"sums": (sums, mean_of_sums)}


def compiled(f: Function, *arguments: Array) -> Program:
    program = jax.jit(f).lower(*arguments).compile()
    memory = program.memory_analysis()
    assert memory is not None
    return Program(lambda: jax.block_until_ready(program(*arguments)), memory.temp_size_in_bytes)


def liger(hidden: Array, unembedding: Array, targets: Array) -> Contender | str:
    """Liger Kernel's fused linear cross-entropy on the same numbers; or why it is left out."""
    try:
        torch: Any = importlib.import_module("torch")
        module: Any = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    except ImportError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"

    def tensor(x: Array) -> Any:
        exact = np.asarray(x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x)
        return torch.from_numpy(exact.copy()).to("cuda")

    dtype = getattr(torch, hidden.dtype.name)
    inputs, weight = (tensor(x).to(dtype).requires_grad_() for x in (hidden, unembedding))
    labels, loss = tensor(targets).long(), module.LigerFusedLinearCrossEntropyLoss()

    def forward() -> None:
        with torch.no_grad():
            loss(weight, inputs, labels)
        torch.cuda.synchronize()

    def both() -> None:
        inputs.grad = weight.grad = None
        loss(weight, inputs, labels).backward()
        torch.cuda.synchronize()

    def program(run: Callable[[], None]) -> Program:
        inputs.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return Program(run, torch.cuda.max_memory_allocated() - before)

    return Contender(program(forward), program(both))


def contenders(device: Device, tokens: int, embed: int, vocabulary: int, dtype: Any) -> dict[str, Contender]:
    """All implementations at one shape, compiled."""
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = (
        jax.random.normal(keys[0], (tokens, embed), dtype),
        (jax.random.normal(keys[1], (vocabulary, embed)) / math.sqrt(embed)).astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocabulary),
    )
    results = {
        name: Contender(compiled(forward, *arguments), compiled(jax.grad(loss, argnums=(0, 1)), *arguments))
        for name, (forward, loss) in implementations(device).items()
    }
    other = liger(*arguments)
    if isinstance(other, str):
        print(f"\nwithout liger: {other}")
        return results
    return results | {"liger": other}


def best_times(entries: dict[str, Contender], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of (forward, both): the best of rounds in which all take turns."""
    times = {name: (math.inf, math.inf) for name in entries}
    for round_ in range(rounds + 1):  # the first only warms up
        for name, contender in entries.items():
            now = seconds(contender.forward), seconds(contender.both)
            if round_ > 0:
                times[name] = min(times[name][0], now[0]), min(times[name][1], now[1])
    return times


def seconds(program: Program) -> float:
    start = time.perf_counter()
    program.run()
    return time.perf_counter() - start


def measure(device: Device, tokens: int, embed: int, vocabulary: int, dtype: Any, rounds: int) -> list[Result]:
    """All implementations at one shape."""
    entries = contenders(device, tokens, embed, vocabulary, dtype)
    name_of_dtype = jnp.dtype(dtype).name
    return [
        Result(
            name, tokens, embed, vocabulary, name_of_dtype, *times, entries[name].forward.temp, entries[name].both.temp
        )
        for name, times in best_times(entries, rounds).items()
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprob")
    parser.add_argument("--small", action="store_true", help="one tiny shape and one round; writes nothing")
    small = parser.parse_args(arguments).small
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    print(f"{hardware(device)}, jax {jax.__version__}")
    dtype, rounds = jnp.float32 if on_cpu else jnp.bfloat16, 1 if small else ROUNDS
    rows = []
    for shape in SMALL if small else SHAPES["cpu" if on_cpu else "accelerator"]:
        rows += report(measure(device, *shape, dtype, rounds), on_cpu)
    if small:
        return
    path = path_for("logprob", device)
    write(path, {"benchmark": "logprob", **provenance("jax"), "hardware": hardware(device), "results": rows})
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
