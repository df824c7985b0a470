"""The engine on one accelerator: decode, training and scoring against what the device can do.

    python -m benchmarks.accelerator            # minutes
    python -m benchmarks.accelerator --small    # tiny shapes, for a CPU; writes nothing

First the ceilings: bytes a second of a copy, operations a second of a bfloat16 matrix product. Then the functions that
a run uses, on random weights of Qwen3's shapes on the first device. Prints one table and writes
`benchmarks/results/accelerator-DEVICE.json`, anew after every row.

Decoding is bound by memory: a step has to read every weight (not a table that it only looks up in) and the keys and
values of every position so far, on average prompt + response / 2 of them. The fractions are of these bytes; the program
itself reads the whole buffer of prompt + response positions. MFU is of the peak in `PEAKS`; counted are 2 operations a
weight and token forward and 6 with backward, and causal attention's half of the square; recomputation is not.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from benchmarks.records import hardware, path_for, provenance, write
from jrlhf.meshes import GENERATE, SCORE, TRAIN, make_mesh
from jrlhf.models import (
    PRESETS,
    Generation,
    ModelConfig,
    SamplingConfig,
    init_lm,
    init_sharded,
    make_generate,
    make_logprobs,
    param_shardings,
)
from jrlhf.models.forward import Remat

GB = 1e9
PEAKS = {  # bytes a second of memory, dense bfloat16 operations a second: the makers' figures
    "NVIDIA H200": (4.8e12, 989e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12),
}
MODELS = {name: PRESETS[f"Qwen/Qwen3-{name}"] for name in ("1.7B", "8B")}
DECODES = [(name, batch, 768, 256) for name in MODELS for batch in (64, 128, 256)]  # model, batch, prompt, response
TRAININGS: list[tuple[str, int, int, Remat]] = [  # model, batch, length, remat
    ("1.7B", 16, 1024, "full"),
    ("1.7B", 8, 2048, "full"),
    ("1.7B", 8, 1024, "gather"),
]
SCORINGS = [("1.7B", 32, 1024)]  # model, batch, length


@dataclass(frozen=True)
class Ceilings:
    """Measured bytes and operations a second."""

    copy: float
    matmul: float


@dataclass(frozen=True)
class Decode:
    """One decode step after a prefill; seconds, tokens of all rows a second, GB of 1e9 bytes.

    prefill: seconds of the prefill, without the step that follows. needed, read: GB that a step has to read, and with
    the whole buffer.
    """

    model: str
    batch: int
    prompt: int
    response: int
    step: float
    tokens_a_second: float
    needed: float
    read: float
    prefill: float
    prefill_operations: float
    temp: float
    compile: float


@dataclass(frozen=True)
class Pass:
    """One training step (forward, backward, AdamW) or one scoring; units as in Decode."""

    model: str
    batch: int
    length: int
    remat: Remat | None
    seconds: float
    tokens_a_second: float
    operations: float
    temp: float
    compile: float


def seconds_of(run: Callable[[], Any], times: int) -> float:
    """Mean of so many calls, one queued behind the other."""
    start = time.perf_counter()
    for _ in range(times - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) / times


def warm_seconds_of(run: Callable[[], Any], times: int) -> float:
    """`seconds_of`, after a call that warms up."""
    jax.block_until_ready(run())
    return seconds_of(run, times)


def compiled(function: Callable, *arguments: Any, **options: Any) -> tuple[Any, dict[str, float]]:
    """The program, with its seconds of compilation and the compiler's temporary memory."""
    start = time.perf_counter()
    program = jax.jit(function, **options).lower(*arguments).compile()
    spent = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    return program, {"temp": memory.temp_size_in_bytes / GB, "compile": spent}


def ceilings(small: bool) -> Ceilings:
    numbers, side = (2**20, 256) if small else (2**30, 8192)
    line = jnp.ones((numbers,), jnp.float32)
    double = jax.jit(lambda x: x * 2)  # a copy proper may be elided
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return Ceilings(
        copy=2 * line.nbytes / warm_seconds_of(lambda: double(line), 10),
        matmul=2 * side**3 / warm_seconds_of(lambda: multiply(square, square), 20),
    )


def table_size(config: ModelConfig) -> int:
    """Numbers in the embedding."""
    return config.padded_vocab * config.embed


def attention_operations(config: ModelConfig, batch: int, length: int) -> int:
    """Of a causal forward: half of two products of 2 operations a head, its size and a pair of positions."""
    return 2 * config.layers * config.heads * config.head_dim * batch * length**2


def cache_bytes(config: ModelConfig, batch: int, positions: float) -> float:
    """Keys and values of all layers, bfloat16."""
    return 2 * 2 * config.layers * config.kv_heads * config.head_dim * batch * positions


def generation_weights(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Random bfloat16 weights as GENERATE stores them, made leaf by leaf: float32 ones would not fit everywhere."""
    stacked = jax.eval_shape(partial(init_lm, config), jax.random.key(0))
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked["layers"])
    shapes = stacked | {"layers": [layer] * config.layers}
    normal = jax.jit(lambda shape: 0.02 * jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), static_argnums=0)

    def leaf(of: jax.ShapeDtypeStruct) -> jax.Array:
        return normal(of.shape) if len(of.shape) > 1 else jnp.ones(of.shape, of.dtype)

    return jax.device_put(jax.tree.map(leaf, shapes), param_shardings(config, mesh, GENERATE))


def decode(models: dict[str, ModelConfig], mesh: Mesh, name: str, batch: int, prompt: int, response: int) -> Decode:
    """The time of a whole generation, less that of a prefill with one step, over the steps between."""
    config = models[name]
    params = generation_weights(config, mesh)
    # Two programs, for one response token and for many, would differ in their buffers and in what the compiler makes of
    # the prefill, and the difference of their times in more than steps. So one program measures both: with a final norm
    # of NaN every row draws token 0, which stops it, and the loop ends after one step.
    stopping = params | {"final_norm": jax.tree.map(lambda scale: jnp.full_like(scale, jnp.nan), params["final_norm"])}
    rows = (
        jnp.ones((batch, prompt), jnp.int32),
        jnp.full((batch,), prompt, jnp.int32),
        jax.random.split(jax.random.key(0), batch),
    )
    sampling = SamplingConfig(max_new_tokens=response, stop_ids=(0,))
    program, costs = compiled(make_generate(config, mesh, sampling, dtype=jnp.bfloat16), params, *rows)

    def best(weights: dict[str, Any], steps: int) -> float:
        drawn: Generation = program(weights, *rows)
        if int(drawn.response_lengths.max()) != steps:
            raise RuntimeError(f"{int(drawn.response_lengths.max())} steps were drawn instead of {steps}")
        return min(seconds_of(lambda: program(weights, *rows), 1) for _ in range(2))

    one, whole = best(stopping, 1), best(params, response)
    step = (whole - one) / (response - 1)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    weights -= 0 if config.tie_embeddings else params["embedding"].nbytes
    layered = weights / 2 - table_size(config)  # the prefill scores nothing
    return Decode(
        model=name,
        batch=batch,
        prompt=prompt,
        response=response,
        step=step,
        tokens_a_second=batch / step,
        needed=(weights + cache_bytes(config, batch, prompt + response / 2)) / GB,
        read=(weights + cache_bytes(config, batch, prompt + response)) / GB,
        prefill=one - step,
        prefill_operations=2 * layered * batch * prompt + attention_operations(config, batch, prompt),
        **costs,
    )


def train(models: dict[str, ModelConfig], mesh: Mesh, name: str, batch: int, length: int, remat: Remat) -> Pass:
    """Forward, backward and AdamW on float32 weights, computed in bfloat16."""
    config, optimizer = models[name], optax.adamw(1e-6)
    params = init_sharded(config, jax.random.key(0), mesh)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    tokens = jax.random.randint(jax.random.key(2), (batch, length), 0, config.vocab_size)
    logprobs = make_logprobs(config, mesh, TRAIN, dtype=jnp.bfloat16, remat=remat)

    def update(params, state, tokens):
        gradients = jax.grad(lambda params: -jnp.mean(logprobs(params, tokens)[0]))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    carried = params, jax.jit(optimizer.init)(params)
    del params
    program, costs = compiled(update, *carried, tokens, donate_argnums=(0, 1))

    def step():
        nonlocal carried
        carried = program(*carried, tokens)
        return carried

    operations = 6 * size * batch * length + 3 * attention_operations(config, batch, length)
    return timed_pass(name, batch, length, remat, step, operations, costs)


def score(models: dict[str, ModelConfig], mesh: Mesh, name: str, batch: int, length: int) -> Pass:
    """Log-probabilities of given tokens under float32 weights, computed in bfloat16."""
    config = models[name]
    params = init_sharded(config, jax.random.key(0), mesh)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    tokens = jax.random.randint(jax.random.key(2), (batch, length), 0, config.vocab_size)
    program, costs = compiled(make_logprobs(config, mesh, SCORE, dtype=jnp.bfloat16), params, tokens)
    operations = 2 * size * batch * length + attention_operations(config, batch, length)
    return timed_pass(name, batch, length, None, lambda: program(params, tokens), operations, costs)


def timed_pass(
    name: str,
    batch: int,
    length: int,
    remat: Remat | None,
    run: Callable[[], Any],
    operations: float,
    costs: dict[str, float],
) -> Pass:
    seconds = warm_seconds_of(run, 3)
    return Pass(name, batch, length, remat, seconds, batch * length / seconds, operations, **costs)


def decode_row(result: Decode, measured: Ceilings, peaks: tuple[float, float] | None) -> dict[str, object]:
    """A result as the file has it: with its rates, and as parts of the nominal and of the measured ceilings."""
    rate = result.needed * GB / result.step
    nominal = {"of_nominal": rate / peaks[0]} if peaks else {}
    prefill = result.prefill_operations / result.prefill
    return {
        "part": "decode",
        **without(asdict(result), "prefill_operations"),
        "needed_tb_s": rate / 1e12,
        "read_tb_s": result.read * GB / result.step / 1e12,
        **nominal,
        "of_measured": rate / measured.copy,
        **({"prefill_mfu": prefill / peaks[1]} if peaks else {}),
        "prefill_of_measured": prefill / measured.matmul,
    }


def pass_row(part: str, result: Pass, measured: Ceilings, peaks: tuple[float, float] | None) -> dict[str, object]:
    """As `decode_row`."""
    rate = result.operations / result.seconds
    kept = {name: value for name, value in without(asdict(result), "operations").items() if value is not None}
    nominal = {"mfu": rate / peaks[1]} if peaks else {}
    return {"part": part, **kept, "tflops": rate / 1e12, **nominal, "of_measured": rate / measured.matmul}


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def digits(row: dict[str, object]) -> dict[str, object]:
    """Floats to five digits: what differs from run to run is not written down."""
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in row:
        shape = " x ".join(str(each) for each in row["shape"])
        return f"{row['part']:8} {shape:27} {row['error']}"
    if row["part"] == "decode":
        nominal = f"{row['of_nominal']:5.1%} of nominal, " if "of_nominal" in row else ""
        shape = f"{row['model']} x {row['batch']} x {row['prompt']} + {row['response']}"
        speed = f"{1e3 * row['step']:8.2f} ms a step {row['tokens_a_second']:9,.0f} tokens/s"
        return (
            f"{row['part']:8} {shape:27} {speed}   {row['needed_tb_s']:5.2f} TB/s: {nominal}"
            f"{row['of_measured']:5.1%} of measured   temp {row['temp']:6.2f} GB"
        )
    nominal = f"MFU {row['mfu']:5.1%}, " if "mfu" in row else ""
    shape = f"{row['model']} x {row['batch']} x {row['length']} {row.get('remat', '')}"
    speed = f"{1e3 * row['seconds']:8.2f} ms a step {row['tokens_a_second']:9,.0f} tokens/s"
    return (
        f"{row['part']:8} {shape:27} {speed}   {row['tflops']:5.1f} TFLOP/s: {nominal}"
        f"{row['of_measured']:5.1%} of measured   temp {row['temp']:6.2f} GB"
    )


def attempt(part: str, shape: tuple, measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """A row, or where the device's memory does not suffice a row that says so."""
    try:
        return digits(measure())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"part": part, "shape": list(shape), "error": "out of memory"}


def shrunk(config: ModelConfig) -> ModelConfig:
    """The same architecture, tiny."""
    return replace(config, vocab_size=512, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=128)


def main(small: bool) -> None:
    device = jax.devices()[0]
    mesh, peaks = make_mesh(1, 1, 1, devices=[device]), PEAKS.get(device.device_kind)
    models = {name: shrunk(config) for name, config in MODELS.items()} if small else MODELS
    decodes = [(name, 4, 24, 8) for name in MODELS] if small else DECODES
    tiny: list[tuple[str, int, int, Remat]] = [("1.7B", 2, 32, "full"), ("1.7B", 2, 32, "gather")]
    trainings = tiny if small else TRAININGS
    scorings = [("1.7B", 4, 32)] if small else SCORINGS
    print(f"{hardware(device)}, jax {jax.__version__}")
    measured = ceilings(small)
    print(f"ceilings: copy {measured.copy / 1e12:.3g} TB/s, matmul {measured.matmul / 1e12:.4g} TFLOP/s")

    rows: list[dict[str, object]] = []
    found = digits({"copy_tb_s": measured.copy / 1e12, "matmul_tflops": measured.matmul / 1e12})
    record = {"benchmark": "accelerator", "hardware": hardware(device), **provenance("jax", "flax"), "ceilings": found}
    if peaks:
        record["nominal"] = {"memory_tb_s": peaks[0] / 1e12, "bfloat16_tflops": peaks[1] / 1e12}
    record["results"] = rows
    path = path_for("accelerator", device)

    def add(part: str, shape: tuple, measure: Callable[[], dict[str, object]]) -> None:
        rows.append(attempt(part, shape, measure))
        print(line(rows[-1]), flush=True)
        if not small:
            write(path, record)

    with jax.set_mesh(mesh):
        for each in decodes:
            add("decode", each, lambda each=each: decode_row(decode(models, mesh, *each), measured, peaks))
        for each in trainings:
            add("train", each, lambda each=each: pass_row("train", train(models, mesh, *each), measured, peaks))
        for each in scorings:
            add("score", each, lambda each=each: pass_row("score", score(models, mesh, *each), measured, peaks))
    print("tiny shapes: nothing is written" if small else f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Decode, training and scoring against what the device can do.")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU; writes nothing")
    main(parser.parse_args().small)
