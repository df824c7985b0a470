"""Pipelines on the program's own loop, with sleeps in place of computation.

    python -m benchmarks.makespan        # writes benchmarks/results/makespan.json; twelve minutes

`models.pipeline.run` trains small models by 1F1B, ZB-H1 and fused tables. Every operation of a table also sleeps for
its given seconds on its device, because two cores have no parallel speed to show. So the figures say whether the loop,
its programs and its transfers take the time that is predicted of a table, and not how fast a model is.

Each group of devices is a process, so a stage waits until its receiver has a result (`synchronous_makespan`). `gains`
compare one model after the other, by 1F1B, with both together.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.records import output_path, provenance, write
from jrlhf.meshes import TRAIN, make_mesh, to_devices
from jrlhf.meshes.pipeline import (
    Pipeline,
    PipelineStep,
    Seconds,
    Table,
    as_run,
    one_forward_one_backward,
    synchronous_makespan,
    zero_bubble,
)
from jrlhf.models import ModelConfig, init_sharded, pipeline
from jrlhf.models.forward import make_logprobs
from jrlhf.models.pipeline import Stages, StageTask
from jrlhf.planning.fusion.dispatch import search_apart
from jrlhf.planning.fusion.problem import FusedModel, fuse

UNIT = 0.12  # seconds of the models' unit; copies of weights and gradients take about 0.3 s here
REPEATS = 2
# Pairs of models whose backward operations compute the forward pass again, as here.
PAIRS = {
    "4 and 2 stages": (FusedModel(4, 8, 4, 12), FusedModel(2, 4, 3, 9)),
    "4 and 4 stages": (FusedModel(4, 4, 4, 12), FusedModel(4, 4, 4, 12)),
}
SIZES = (4, 8), (4, 4)  # stages and micro-batches of one model
ROWS, LENGTH = 2, 8  # of a micro-batch


def tables() -> dict[str, tuple[Table, Callable[[PipelineStep], float]]]:
    """Returns the tables, with the sleeps of their operations in units."""
    result = {}
    for name, (actor, critic) in PAIRS.items():
        problem = fuse(actor, critic)
        result[f"fused: {name}"] = search_apart(problem), problem.seconds
        for model in dict.fromkeys((actor, critic)):
            alone = one_forward_one_backward(model.depth, model.micro_batches)
            result[f"1f1b of {model.depth} stages: {name}"] = alone, partial(_seconds, model)
    for stages, micro_batches in SIZES:
        for kind, schedule, backward in (("1f1b", one_forward_one_backward, 4), ("zb-h1", zero_bubble, 2)):
            sleeps = partial(_seconds, FusedModel(stages, micro_batches, 2, backward))
            result[f"{kind}: {stages} stages, {micro_batches}"] = schedule(stages, micro_batches), sleeps
    return result


def _seconds(model: FusedModel, step: PipelineStep) -> float:
    return {"forward": model.forward, "backward": model.backward, "weight": 2}[step.kind]


# ---- a process


class Sleeping(pipeline._Running):
    """A running task whose operations sleep."""

    seconds: Seconds
    now = 0.0

    def compute(self, step: PipelineStep) -> None:
        Sleeping.now = Sleeping.seconds(step)
        super().compute(step)


def slept(operation: Callable[..., Any], donated: Sequence[int] = ()) -> Callable[..., Any]:
    """Returns the operation, which now also sleeps on its device."""

    def slow(function: Any, seconds: float, *arguments: Any) -> Any:
        def sleep() -> Any:  # without an argument, which would wait for a device
            time.sleep(seconds)
            return np.float32(0)

        zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.float32))
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), operation.__wrapped__(function, *arguments))

    compiled = jax.jit(slow, static_argnums=(0, 1), donate_argnums=donated)
    return lambda function, *arguments: compiled(function, Sleeping.now, *arguments)


def task(number: int, pipe: Pipeline, devices: Sequence[Any]) -> StageTask:
    """The training of a small model on a table's pipeline."""
    depth = len(pipe.devices)
    config = ModelConfig(
        vocab_size=64, max_positions=LENGTH, embed=16, layers=depth, heads=2, kv_heads=1, head_dim=8, mlp=32
    )
    groups = tuple(make_mesh(1, 1, 1, devices=[devices[device]]) for device in pipe.devices)
    home = make_mesh(1, depth, 1, devices=[devices[device] for device in sorted(pipe.devices)])
    stages = Stages(config, groups, TRAIN, schedule="zb-h1" if pipe.split else "1f1b")
    logprobs = make_logprobs(stages.tail, groups[-1], TRAIN, stages.options)
    with jax.set_mesh(home):
        params = init_sharded(config, jax.random.key(number), home)
    tokens = np.random.default_rng(number).integers(0, 64, (pipe.micro_batches, ROWS, LENGTH), np.int32)

    def loss(params: Any, rows: pipeline._Rows) -> tuple[Any, dict[str, Any]]:
        value = -logprobs(params, rows.tokens)[0].sum()
        return value, {}

    return StageTask(
        stages, loss, params, pipeline._Rows(to_devices(tokens, jax.NamedSharding(groups[-1], jax.P())), ())
    )


def process(number: int, devices: int, port: int) -> None:
    """Measures the tables for this number of devices. The first process prints the seconds, by table."""
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"localhost:{port}", devices, number)
    pipeline._Running = Sleeping
    pipeline._forward = slept(pipeline._forward)
    pipeline._gradient_of_input = slept(pipeline._gradient_of_input)
    pipeline._gradients = slept(pipeline._gradients, donated=(2,))
    result: dict[str, list[float]] = {}
    for name, (table, sleeps) in tables().items():
        if table.devices != devices:
            continue
        tasks = {n: task(n, pipe, jax.devices()) for n, pipe in enumerate(table.pipelines)}
        result[name] = []
        for _ in range(1 + REPEATS):  # the first time compiles
            own = as_run(table, sleeps)
            Sleeping.seconds = lambda step, own=own: UNIT * own(step)
            multihost_utils.sync_global_devices(name)
            begun = time.monotonic()
            jax.block_until_ready([one.gradients for one in pipeline.run(table, tasks).values()])
            multihost_utils.sync_global_devices(name)
            result[name].append(time.monotonic() - begun)
            print(name, result[name][-1], file=sys.stderr, flush=True)
    if number == 0:
        print(json.dumps(result))


def measured(devices: int) -> dict[str, float]:
    """Returns the seconds of the tables for this number of devices, by name."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.makespan", "process"]
    started = [
        subprocess.Popen([*command, *map(str, (number, devices, port))], stdout=subprocess.PIPE, text=True)
        for number in range(devices)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process has failed")
    return {name: median(times[1:]) for name, times in json.loads(outputs[0].splitlines()[-1]).items()}


def gain(pair: str, seconds: Mapping[str, float]) -> float:
    """The time of one model after the other over that of both together."""
    models = PAIRS[pair]
    return sum(seconds[f"1f1b of {model.depth} stages: {pair}"] for model in models) / seconds[f"fused: {pair}"]


def main() -> None:
    output, every = output_path(__doc__, "makespan"), tables()
    predicted = {name: UNIT * synchronous_makespan(table, sleeps) for name, (table, sleeps) in every.items()}
    seconds: dict[str, float] = {}
    for devices in sorted({table.devices for table, _ in every.values()}):
        seconds |= measured(devices)
    rows = [
        {"table": name, "predicted": expected, "measured": seconds[name], "ratio": seconds[name] / expected}
        for name, expected in predicted.items()
    ]
    gains = {pair: {"predicted": gain(pair, predicted), "measured": gain(pair, seconds)} for pair in PAIRS}
    for row in rows:
        print(row)
    write(output, provenance("jax", "jaxlib") | {"unit": UNIT, "repeats": REPEATS, "results": rows, "gains": gains})


if __name__ == "__main__":
    if sys.argv[1:2] == ["process"]:
        process(*map(int, sys.argv[2:]))
    else:
        main()
