"""Speed with a pretrained chat model's weights, beside transformers and TRL, on this machine's CPU.

    python -m benchmarks.real_speed --model DIRECTORY [--case generate|train|grpo|ppo] [--rounds 2] [--repeats 4]

DIRECTORY is that of `python -m benchmarks.real_model`. Processes take turns as in `benchmarks.compare`, and the same
repeats are dropped; prompts are random words, and all responses are as long as the limit. Rates are shares of that of a
float32 product [4096, 576] x [576, 1536] on the same threads, which both sides measure. Operations are those of
`compare.operations`; bytes are those that a generation must read: all weights and the filled cache at each token.
`phases` are the medians of the seconds of our calls within a GRPO iteration. PPO's critic and reward model are the same
model with random heads. Writes benchmarks/results/real-speed.json, or real-speed-CASE.json, after each comparison; one
whose process died has a `failure`, and the others go on.
"""

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import OURS, PEERS, ROOT, SMALL, Comparison, Spread, alternate, positive, summary, weights_of
from benchmarks.peers.common import Job, Shape
from benchmarks.records import RESULTS, hardware, provenance, write
from benchmarks.sides import MEMORY_KEPT, CompareError, Side, environment

SHAPE = Shape(30, 576, 9, 3, 64, 1536, 49152, max_positions=8192, rope_theta=100_000, norm_eps=1e-5)
CACHES = ("dynamic", "dynamic compiled", "static compiled")


@dataclass(frozen=True)
class Task:
    """One thing that both sides do, with rows of `prompt` + `response` tokens."""

    peer: str
    comparison: Comparison
    prompt: int
    response: int


TASKS = (
    *(Task("hf", Comparison("generation", "generate", rows, CACHES), 40, 64) for rows in (8, 64)),
    Task("hf", Comparison("training step", "train", 64, ("eager", f"eager{MEMORY_KEPT}")), 40, 12),
    *(  # TRL needs 26 GB for 64 rows of 40 + 64 tokens
        Task("trl-grpo", Comparison("GRPO iteration", "grpo", rows, (f"as shipped{MEMORY_KEPT}",)), 40, response)
        for rows, response in ((64, 12), (32, 64))
    ),
    Task("trl", Comparison("PPO iteration", "ppo", 32, (f"gc.freeze(){MEMORY_KEPT}",)), 40, 12),
)


def bytes_read(shape: Shape, batch: int, prompt: int, response: int) -> int:
    """Bytes that the decode steps of a generation must read, in float32: weights, and each row's keys and values."""
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * batch
    return 4 * (response * sum(weights_of(shape)) + cache * sum(range(prompt, prompt + response)))


def measure(task: Task, directory: str, pythons: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """A task as the file has it: seconds, ratios, memory, and the share of the products' rate.

    Raises:
        CompareError: a process failed.
    """
    comparison, shape = task.comparison, SMALL if options.small else SHAPE
    ours = Side(Path(sys.executable), "ours", ROOT)
    theirs = Side(pythons[task.peer], task.peer.replace("-", "_"), Path(directory))
    sizes = {"warmup": options.warmup, "repeats": options.repeats}
    job = Job(comparison.case, directory, shape, comparison.batch, task.prompt, task.response, **sizes)
    print(f"{comparison.title}, {job.batch} rows of {job.prompt} + {job.response} tokens", flush=True)
    versions: dict[str, Any] = {}
    rounds = alternate(ours, theirs, job, comparison.variants, options.rounds, options.small, versions)
    record = summary(comparison, job, rounds)
    peaks = {name: max(round_[name].peak for round_ in rounds) for name in rounds[0]}
    print("  peak memory: " + ", ".join(f"{name} {peak / 1e9:.2f} GB" for name, peak in peaks.items()))
    if comparison.case == "generate":
        record["bytes_read"] = bytes_read(shape, job.batch, job.prompt, job.response)
    medians = {}
    for name in rounds[0]:
        seconds = [duration for round_ in rounds for duration in round_[name].kept]
        medians[name] = Spread.of(seconds).median if seconds else None
    return record | {"peer": task.peer, "peak_bytes": peaks, "median_seconds": medians, "versions": versions}


def row(record: dict[str, Any], rate: float) -> str:
    """A comparison as a row of docs/results.md, with medians of all repeats. rate: that of our products.

    A ~ marks a comparison with a void round.
    """
    names = list(record["rounds"][0])
    middle = {
        name: statistics.median(second for round_ in record["rounds"] for second in round_[name]["seconds"])
        for name in names
    }
    fastest = min(names[1:], key=middle.__getitem__)
    void, share = " ~" * (record["void_rounds"] > 0), record["operations"] / middle[OURS] / rate
    peaks = "; ".join(f"{record['peak_bytes'][name] / 1e9:.1f}" for name in (OURS, fastest))
    return (
        f"| {record['case']} | {record['batch']}, {record['prompt']} + {record['response']} | {middle[OURS]:.1f} s | "
        f"{record['peer']}, {fastest}: {middle[fastest]:.1f} s | {middle[fastest] / middle[OURS]:.2f}{void} | "
        f"{share:.0%} | {peaks} |"
    )


def rates(directory: str, pythons: dict[str, Path], shape: Shape) -> dict[str, float]:
    """Operations a second of the product, by us and by torch."""
    job = Job("product", directory, shape, 1, 1, 1)
    sides = {OURS: Side(Path(sys.executable), "ours", ROOT), "torch": Side(pythons["hf"], "hf", Path(directory))}
    work = 2 * 4096 * shape.embed * shape.mlp
    return {name: work / side.run(job)["product"] for name, side in sides.items()}


def compare(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the contents of the file after each task, or after each one of a case."""
    tasks = [task for task in TASKS if options.case in (None, task.comparison.case)]
    venvs = dict(pair.split("=", 1) for pair in options.venv)
    pythons = {
        peer: Path(venvs[peer]).absolute() / "bin/python"
        if peer in venvs
        else environment(peer, PEERS[peer].requirements)
        for peer in {"hf", *(task.peer for task in tasks)}
    }
    with tempfile.TemporaryDirectory() as directory:
        # A peer sees `benchmarks` and nothing else of the checkout: our `kernels` is also a package's name.
        (Path(directory) / "benchmarks").symlink_to(ROOT / "benchmarks")
        if options.small:
            Side(Path(sys.executable), "ours", ROOT).run(Job("export", directory, SMALL, 8, 40, 12))
        else:
            (Path(directory) / "actor").symlink_to(options.model.absolute())
            if any(task.comparison.case == "ppo" for task in tasks):
                Side(Path(sys.executable), "ours", ROOT).run(Job("heads", directory, SHAPE, 1, 40, 12))
        speeds = rates(directory, pythons, SMALL if options.small else SHAPE)
        print("products: " + ", ".join(f"{name} {rate / 1e9:.1f} GFLOP/s" for name, rate in speeds.items()), flush=True)
        results = []
        for task in tasks:
            try:
                record = measure(task, directory, pythons, options)
            except CompareError as error:
                print(f"error: {error}", file=sys.stderr)
                record = {**asdict(task.comparison), "prompt": task.prompt, "response": task.response}
                record |= {"peer": task.peer, "failure": str(error).partition(":")[0]}
            if "operations_a_second" in record:
                record["share_of_products"] = record["operations_a_second"] / speeds[OURS]
                print(f"  {record['share_of_products']:.0%} of the rate of products")
            results.append(record)
            yield {"shape": asdict(SHAPE), "threads": os.cpu_count(), "products": speeds, "results": results}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_speed", description="Speed with real weights.")
    parser.add_argument("--model", type=Path, help="the directory that `python -m benchmarks.real_model` makes")
    parser.add_argument("--venv", action="append", default=[], metavar="PEER=DIR", help="a peer's environment")
    parser.add_argument("--case", choices=sorted({task.comparison.case for task in TASKS}), help="only these")
    parser.add_argument("--small", action="store_true", help="a tiny model, every repeat kept; writes nothing")
    parser.add_argument("--rounds", type=positive, default=2, help="of new processes")
    parser.add_argument("--repeats", type=positive, default=4, help="of each process, after it has warmed up")
    parser.add_argument("--warmup", type=positive, default=2, help="repeats that do not count")
    options = parser.parse_args()
    if not options.small and (options.model is None or not (options.model / "config.json").is_file()):
        parser.error(f"--model {options.model}: there is no config.json in it")
    return options


def main() -> int:
    options = parse()
    chosen = [] if options.case is None else ["--case", options.case]
    counts = [f"--{name}={getattr(options, name)}" for name in ("rounds", "repeats", "warmup")]
    command = shlex.join(["python", "-m", "benchmarks.real_speed", "--model", "DIRECTORY", *chosen, *counts])
    path = RESULTS / ("real-speed.json" if options.case is None else f"real-speed-{options.case}.json")
    about = provenance() | {"benchmark": "real_speed", "command": command, "hardware": hardware()}
    outcome: dict[str, Any] = {"results": []}
    try:
        for outcome in compare(options):
            if not options.small:
                write(path, about | outcome)
    except CompareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.small:
        print("a tiny model, and no repeat was dropped: that it runs is all that this says")
    else:
        print(f"wrote {path}")
    return int(any("failure" in record for record in outcome["results"]))


if __name__ == "__main__":
    sys.exit(main())
