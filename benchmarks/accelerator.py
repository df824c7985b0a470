"""The engine on one accelerator, against what the device can do.

    python -m benchmarks.accelerator                        # under 9 minutes on one H200
    python -m benchmarks.accelerator --seconds 200          # the most important parts
    python -m benchmarks.accelerator --parts decode train   # some parts
    python -m benchmarks.accelerator --small                # tiny shapes, for a CPU; writes nothing

First the ceilings: bytes a second of a copy, operations a second of a bfloat16 matrix product. Then the functions that
a run uses (`benchmarks/parts.py`), on random weights of Qwen3's shapes on the first device, and one whole PPO iteration
of four models. Prints one table and writes `benchmarks/results/accelerator-DEVICE.json`, anew after every row.

The parts come in the order of their importance. One that would not end within `--seconds`, by what it takes on an H200,
is a row that says so; so is one that the device's memory does not suffice for. Rows of parts that were not chosen, or
had no time, stay in the file as an earlier run wrote them, with its date and versions: so `--parts` adds to it.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from benchmarks import parts
from benchmarks.parts import TERA, Ceilings, Row
from benchmarks.records import hardware, joined, path_for, provenance, write
from jrlhf.kernels.logprob.implementations import Implementation
from jrlhf.meshes import make_mesh
from jrlhf.meshes.hardware import peak_of
from jrlhf.meshes.mesh import Device
from jrlhf.models import PRESETS, ModelConfig
from jrlhf.models.remat import REMATS, Remat

MODELS = {name: PRESETS[f"Qwen/Qwen3-{name}"] for name in ("1.7B", "8B")}
NO_TIME = "not measured: no time"
ROW = "part", "shape"  # by which a row is known
PARTS = ("decode", "train", "iteration", "logprob", "score", "switch")


@dataclass(frozen=True)
class Part:
    """A row to be measured. shape: its name. sizes: its numbers. expected: seconds on an H200, compilation included."""

    name: str
    shape: str
    sizes: Row
    expected: float
    measure: Callable[[], Row]


@dataclass(frozen=True)
class Sizes:
    """Shapes of all parts."""

    models: dict[str, ModelConfig]
    decode: tuple[tuple[int, ...], tuple[int, int]]  # batches, (prompt, response)
    train: tuple[tuple[int, int], ...]  # (batch, length)
    score: tuple[int, int]
    logprob: tuple[int, int, int]  # tokens, embed, vocabulary
    iteration: tuple[int, int, int, int]  # batch, prompt, response, micro-batches
    ceilings: dict[str, int]


FULL = Sizes(
    models=MODELS,
    decode=((128, 256, 64), (512, 512)),
    train=((16, 1024), (8, 2048)),
    score=(32, 1024),
    logprob=(16384, 4096, 151936),
    iteration=(256, 512, 512, 16),
    ceilings={"numbers": 2**30, "side": 8192},
)


def shrunk(config: ModelConfig) -> ModelConfig:
    """The same architecture, tiny."""
    return replace(config, vocab_size=512, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=128)


SMALL = Sizes(
    models={name: shrunk(config) for name, config in MODELS.items()},
    decode=((4,), (24, 8)),
    train=((2, 32),),
    score=(4, 32),
    logprob=(64, 64, 512),
    iteration=(4, 16, 8, 2),
    ceilings={"numbers": 2**20, "side": 256},
)


def plan(sizes: Sizes, mesh: Mesh, top: Ceilings, device: Device) -> list[Part]:
    """All rows, the most important ones first."""
    small, large = sizes.models.items()

    def decode(model: tuple[str, ModelConfig], batch: int, expected: float) -> Part:
        name, config = model
        prompt, response = sizes.decode[1]
        measure = partial(parts.decode, config, mesh, top, batch, prompt, response)
        numbers = {"model": name, "batch": batch, "prompt": prompt, "response": response}
        return Part("decode", f"{name} x {batch} x {prompt} + {response}", numbers, expected, measure)

    def train(batch: int, length: int, remat: Remat) -> Part:
        measure = partial(parts.train, small[1], mesh, top, batch, length, remat)
        numbers = {"model": small[0], "batch": batch, "length": length, "remat": remat}
        return Part("train", f"{small[0]} x {batch} x {length} {remat}", numbers, 25, measure)

    def logprob(implementation: Implementation) -> Part:
        measure = partial(parts.logprob, top, implementation, *sizes.logprob)
        return Part("logprob", f"{' x '.join(map(str, sizes.logprob))} {implementation}", {}, 12, measure)

    batch, prompt, response, _ = sizes.iteration
    remat: Remat = "products"
    whole = partial(parts.iteration, small[1], mesh, top, *sizes.iteration, remat)
    numbers = {"model": small[0], "batch": batch, "prompt": prompt, "response": response, "remat": remat}
    score = partial(parts.score, small[1], mesh, top, *sizes.score)
    scored = {"model": small[0], "batch": sizes.score[0], "length": sizes.score[1]}
    middle, *others = sizes.decode[0]
    main_shape, *more_shapes = sizes.train
    policies: list[Remat] = [remat for remat in REMATS if remat != "full"]
    return [
        decode(small, middle, 25),
        train(*main_shape, "full"),
        train(*main_shape, remat),
        Part("iteration", f"{small[0]} x {batch} x {prompt} + {response} {remat}", numbers, 120, whole),
        *(logprob(name) for name in implementations(device)),
        decode(large, middle, 45),
        *(train(*shape, "full") for shape in more_shapes),
        *(decode(small, batch, 30) for batch in others),
        *(decode(large, batch, 50) for batch in others),
        Part("score", f"{small[0]} x {' x '.join(map(str, sizes.score))}", scored, 15, score),
        Part("switch", small[0], {"model": small[0]}, 10, partial(parts.switch, small[1], mesh, top)),
        *(train(*main_shape, policy) for policy in policies if policy != remat),
        *(train(*shape, policy) for shape in more_shapes for policy in policies),
    ]


def implementations(device: Device) -> list[Implementation]:
    """The implementations of the log-probability op that run on this device; the one that keeps all logits last."""
    platform = f"_{device.platform}"
    names = [name for name in get_args(Implementation) if not name.startswith("pallas_") or name.endswith(platform)]
    return sorted(names, key=lambda name: name == "reference")


def attempt(part: Part, seconds_left: float) -> Row:
    """The part's row, or one that says why there is none: every other part is still measured."""
    row = {"part": part.name, "shape": part.shape, **part.sizes}
    if part.expected > seconds_left:
        return row | {"error": NO_TIME}
    try:
        return row | digits(part.measure())
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return row | {"error": "out of memory"}
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def merged(rows: Sequence[Row], path: Path) -> list[Row]:
    """The file's rows and these in their places; one for which there was no time replaces none."""
    merged_rows = joined(path, [row for row in rows if row.get("error") != NO_TIME], ROW)
    there = [[row[name] for name in ROW] for row in merged_rows]
    return merged_rows + [row for row in rows if [row[name] for name in ROW] not in there]


def digits(value: Any) -> Any:
    """Floats to five digits: what differs from run to run is not written down."""
    if isinstance(value, dict):
        return {name: digits(entry) for name, entry in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def line(row: Row) -> str:
    """One line of the table."""
    head = f"{row['part']:9} {row['shape']:34}"
    if "error" in row:
        return f"{head} {row['error']}"
    cells = [f"{1e3 * row['seconds']:9.2f} ms"]
    cells += [f"{row[name]:8.2f} {unit}" for name, unit in (("tb_s", "TB/s"), ("tflops", "TFLOP/s")) if name in row]
    shares = (
        ("of_nominal", "of nominal"),
        ("of_measured", "of measured"),
        ("forward_of_measured", "forward"),
        ("backward_of_measured", "backward"),
    )
    cells += [f"{row[name]:6.1%} {what}" for name, what in shares if name in row]
    if "over_roofline" in row:
        cells.append(f"{row['over_roofline']:6.2f} x the roofline of {row['roofline']:.2f} s")
    if "tokens_a_second" in row:
        cells.append(f"{row['tokens_a_second']:9,.0f} tokens/s")
    if "temp" in row:
        cells.append(f"temp {row['temp']:.2f} GB")
    return "  ".join([head, *cells])


def main(sizes: Sizes, chosen: Sequence[str], seconds: float, path: Path | None) -> list[Row]:
    """Measures, prints the table, and after every row writes all of them to `path`, if there is one."""
    started, device = time.perf_counter(), jax.devices()[0]
    mesh, peak = make_mesh(1, 1, 1, devices=[device]), peak_of(device)
    print(f"{hardware(device)}, jax {jax.__version__}")
    rows: list[Row] = []
    with jax.set_mesh(mesh):
        top = parts.ceilings(peak, **sizes.ceilings)
        print(f"ceilings: copy {top.copy / TERA:.3g} TB/s, matmul {top.matmul / TERA:.4g} TFLOP/s", flush=True)
        ceilings = digits({"copy_tb_s": top.copy / TERA, "matmul_tflops": top.matmul / TERA})
        record: dict[str, object] = {"benchmark": "accelerator", "hardware": hardware(device), "ceilings": ceilings}
        if peak is not None:
            record["nominal"] = {"memory_tb_s": peak.bandwidth / TERA, "bfloat16_tflops": peak.bfloat16 / TERA}
        for part in plan(sizes, mesh, top, device):
            if part.name not in chosen:
                continue
            rows.append(attempt(part, seconds - (time.perf_counter() - started)) | provenance("jax", "flax"))
            print(line(rows[-1]), flush=True)
            if path is not None:
                record["results"] = merged(rows, path)
                write(path, {**record, "seconds": round(time.perf_counter() - started)})
    print("nothing is written" if path is None else f"wrote {path}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The engine against what the device can do.")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU; writes nothing")
    parser.add_argument("--seconds", type=float, default=500.0, help="parts that would take longer are left out")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # of a GPU's memory, before JAX takes it
    file = None if options.small else path_for("accelerator", jax.devices()[0])
    main(SMALL if options.small else FULL, options.parts, options.seconds, file)
