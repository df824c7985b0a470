"""Rollouts whose lengths differ: the engine's schedules against one program that decodes until the last row is done.

    python -m benchmarks.rollout [--small]

Stop tokens are so common that random weights draw one after 48 tokens in the mean, of 256 that a response may have.
Schedules alternate, and every one must draw the same tokens. Ratios of times that were taken one after the other go to
`benchmarks/results/rollout-DEVICE.json`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from benchmarks.records import hardware, path_for, provenance, write
from jrlhf.meshes import GENERATE, make_mesh, reshard
from jrlhf.models import (
    Engine,
    Generation,
    ModelConfig,
    SamplingConfig,
    Schedule,
    init_sharded,
    make_generate,
    param_shardings,
)

CONFIG = ModelConfig(
    vocab_size=4096,
    embed=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp=512,
    max_positions=512,
    qk_norm=True,
    rope_theta=1e6,
)
ROWS, PROMPT, RESPONSE, MEAN = 64, 16, 256, 48
WHOLE = "one program"
SCHEDULES = {
    "default": Schedule(),
    "compaction": Schedule(chunk=16, buckets=6, lengths=1),
    "growing caches": Schedule(chunk=16, buckets=1, lengths=4),
    "both": Schedule(chunk=16, buckets=6, lengths=4),
    "both, 16 slots": Schedule(slots=16, chunk=16, buckets=4, lengths=4),
}


def main(small: bool, repeats: int) -> None:
    device = jax.devices()[0]
    mesh = make_mesh(1, 1, 1, devices=[device])
    config = replace(CONFIG, vocab_size=512, embed=32, layers=1) if small else CONFIG
    rows, response = (8, 32) if small else (ROWS, RESPONSE)
    stops = tuple(range(0, config.vocab_size, 8 if small else MEAN))
    sampling = SamplingConfig(response, stop_ids=stops)
    with jax.set_mesh(mesh):
        weights = reshard(init_sharded(config, jax.random.key(0), mesh), param_shardings(config, mesh, GENERATE))
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, PROMPT)).astype(np.int32)
        prompts = tokens, np.full(rows, PROMPT, np.int32), jax.random.split(jax.random.key(1), rows)
        schedules = {
            name: replace(schedule, slots=schedule.slots and rows // 4) for name, schedule in SCHEDULES.items()
        }
        programs: dict[str, Callable[..., Generation]] = {WHOLE: jax.jit(make_generate(config, mesh, sampling))}
        programs |= {name: Engine(config, mesh, sampling, schedule) for name, schedule in schedules.items()}
        drawn = {name: jax.device_get(program(weights, *prompts)) for name, program in programs.items()}
        for name, generation in drawn.items():
            np.testing.assert_array_equal(generation.tokens, drawn[WHOLE].tokens, err_msg=name)
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(repeats):
            for name, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(weights, *prompts))
                seconds[name].append(time.perf_counter() - start)

    lengths = drawn[WHOLE].response_lengths
    print(f"{rows} rows of {PROMPT} + at most {response}: {lengths.mean():.0f} in the mean, {lengths.max()} at most")
    results: list[dict[str, Any]] = []
    for name, schedule in schedules.items():
        ratios = sorted(whole / duration for whole, duration in zip(seconds[WHOLE], seconds[name], strict=True))
        spread = {"min": ratios[0], "median": statistics.median(ratios), "max": ratios[-1]}
        spread = {key: float(f"{value:.3g}") for key, value in spread.items()}
        results.append({"schedule": name, **asdict(schedule), "speed": spread})
        print(f"{name:16} {spread['min']:.2f} - {spread['median']:.2f} - {spread['max']:.2f} times as fast")
    if small:
        return print("tiny shapes: nothing is written, and the figures mean nothing")
    record = {"benchmark": "rollout", "hardware": hardware(device), **provenance("jax")}
    record |= {"mean_length": float(lengths.mean()), "longest": int(lengths.max()), "limit": response}
    path = path_for("rollout", device)
    write(path, record | {"repeats": repeats, "results": results})
    print(f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rollouts whose lengths differ, scheduled in several ways.")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that it runs, writes nothing")
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    main(options.small, options.repeats)
