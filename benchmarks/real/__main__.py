"""Does a pretrained chat model get better, and as much as with TRL? GRPO and PPO of SmolLM2-135M-Instruct on CPUs.

    python -m benchmarks.real --model DIRECTORY [--work DIRECTORY] [--sides jrlhf trl] [--seeds 0 1 2]

DIRECTORY is that of `python -m benchmarks.real_model`, whose weights were rounded to four bits. A side trains by the
numbers of the configs smollm2-grpo and smollm2-ppo, from the same weights, with the same questions in the same order;
TRL in an environment of its own. Then our program lets all trained models answer the 1,024 held-out questions once at
temperature 1, with the same random numbers, and measures what they lost. Each run is a file of `results/real/`, written
when the run is complete; runs that have one are not repeated, so a call that was interrupted goes on, with --work in
the midst of a run of ours. Writes the tables of docs/results.md and results/real.svg of all runs that are there, and
prints the tables. --report: only this.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare import PEERS
from benchmarks.real import report
from benchmarks.real.common import Job
from benchmarks.records import RESULTS, commit, provenance
from benchmarks.sides import KEEPING, environment
from jrlhf.config import load_config
from jrlhf.config.schema import DatasetsData
from jrlhf.configs.questions import rows
from jrlhf.data.encode import Encoding
from jrlhf.data.order import Order
from jrlhf.data.types import Example
from jrlhf.roles.pretrained import own_tokenizer

ROOT, FOLDER = Path(__file__).resolve().parents[2], RESULTS / "real"
DOCUMENT = ROOT / "docs" / "results.md"
TASK = {"grpo": "smallest", "ppo": "largest"}  # of the configs' data
PEER = {"grpo": "trl-grpo", "ppo": "trl"}  # of `compare.PEERS`
MODEL = "SmolLM2-135M-Instruct, weights rounded to four bits (python -m benchmarks.real_model)"


def settings_of(algorithm: str) -> dict[str, Any]:
    """The numbers of the config that a peer needs, after a check that the peers can do what else it says."""
    config: Any = load_config(f"smollm2-{algorithm}")
    section, choices = config.rl, config.rl.algorithm
    one = {"epochs": 1, "minibatches": 1, "truncation": "zero", "clip_low": choices.clip_high}
    own = {
        "grpo": {"aggregation": "seq-mean-token-mean", "divide_by_std": True, "kl_coef": 0.0},
        "ppo": {"aggregation": "token-mean", "whiten_advantages": True, "kl_in": "reward", "kl_estimator": "k1"},
    }
    for key, value in (one | own[algorithm]).items():
        assert getattr(choices, key) == value, (key, value)
    actor = section.actor
    assert (actor.warmup, actor.final, actor.weight_decay) == (0, 1.0, 0.0)
    if algorithm == "ppo":  # TRL's has one optimizer for both, and does not clip
        assert vars(section.critic) == vars(actor) and actor.max_grad_norm is None
    numbers = {"rows": section.rollout_batch, "samples": section.samples, "iterations": section.iterations}
    numbers |= {"response": config.data.max_response, "system": config.data.system}
    numbers |= {key: getattr(actor, key) for key in ("learning_rate", "b1", "b2", "eps", "max_grad_norm")}
    numbers |= {"kl_coef": choices.kl_coef, "clip": choices.clip_high}
    return numbers | {key: getattr(choices, key) for key in ("gae_lambda", "value_clip") if algorithm == "ppo"}


def with_ids(questions: Sequence[Mapping[str, Any]], model: Path, system: str) -> list[dict[str, Any]]:
    """Adds to each row the tokens that our program makes of it."""
    tokenizer = own_tokenizer(str(model), "model", DatasetsData(), 49152)
    examples = [Example(prompt=row["prompt"]) for row in questions]
    ids = Encoding(tokenizer, chat=True, system=system).prompts(examples, sys.maxsize).ids
    return [{**row, "ids": [*map(int, own)]} for row, own in zip(questions, ids, strict=True)]


def make_job(work: Path, model: Path, algorithm: str, side: str, seed: int) -> Job:
    """Writes what a run reads into a folder of its own."""
    folder, settings = work / f"{algorithm}-{side}-{seed}", settings_of(algorithm)
    folder.mkdir(parents=True, exist_ok=True)  # of an interrupted call, whose run of ours is resumed
    learned, _ = rows(TASK[algorithm])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in learned))
    asked = with_ids(learned, model, settings["system"])
    order = Order(len(asked), settings["rows"] // settings["samples"], seed + 1)
    steps = [[asked[row] for row in order.draw(step)] for step in range(settings["iterations"])]
    (folder / "steps.json").write_text(json.dumps(steps))
    data = {"prompts": {"path": str(folder / "rows.jsonl")}, "heldout": None, "heldout_rows": 0}
    changes = {"model": {"path": str(model)}, "data": data, "evaluation": {"prompts": None}}
    changes |= {algorithm: {"save_every": settings["iterations"] + 1}}
    return Job(algorithm, str(model), str(folder), seed, settings, changes)


def run(module: str, argument: str, threads: int, python: Path = Path(sys.executable), directory: Path = ROOT) -> None:
    """Runs a module in a process of its own on some threads, and waits for it."""
    pinned = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"} | KEEPING
    pinned |= {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), "-m", f"benchmarks.real.{module}", argument]
    subprocess.run(command, check=True, cwd=directory, env=inherited | pinned)


def train(work: Path, job: Job, side: str, threads: int) -> dict[str, Any]:
    """Lets a side train, and returns what it wrote."""
    if side == "jrlhf":
        run("ours", json.dumps(asdict(job)), threads)
    else:
        # A peer sees these two and nothing else of the checkout: our `kernels` is also a package's name.
        for name in ("benchmarks", "jrlhf"):
            link = work / "peer" / name
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)  # that of an interrupted call, maybe of another checkout
            link.symlink_to(ROOT / name)
        peer = PEER[job.algorithm]
        python = environment(peer, PEERS[peer].requirements)
        run(f"trl_{job.algorithm}", json.dumps(asdict(job)), threads, python, work / "peer")
    return json.loads((Path(job.folder) / "result.json").read_text())


def graded(work: Path, model: Path, first: Path, algorithm: str, threads: int) -> dict[str, Any]:
    """The measures of a model; the process that makes them gives its memory back."""
    settings, out = settings_of(algorithm), work / f"graded-{os.getpid()}.json"
    heldout = with_ids(rows(TASK[algorithm])[1], first, settings["system"])
    order = {"model": str(model), "first": str(first), "rows": heldout}
    path = work / f"grade-{os.getpid()}.json"
    path.write_text(json.dumps(order | {"limit": settings["response"], "out": str(out)}))
    run("grade", str(path), threads)
    return json.loads(out.read_text())


def record(algorithm: str, name: str, threads: int, **results: Any) -> None:
    """Writes the file of a run, or of the model before training."""
    about = provenance("jax") | {"benchmark": "real", "command": "python -m benchmarks.real --model DIRECTORY"}
    about |= {"hardware": f"{os.uname().machine}, {os.cpu_count()} cores, shared with others", "threads": threads}
    about |= {"model": MODEL, "task": TASK[algorithm], "settings": settings_of(algorithm)}
    FOLDER.mkdir(exist_ok=True)
    scratch = FOLDER / f"{algorithm}-{name}.tmp"
    scratch.write_text(json.dumps(about | results, indent=1) + "\n")
    scratch.rename(scratch.with_suffix(".json"))


def measure(work: Path, model: Path, algorithm: str, side: str, seed: int, threads: int) -> None:
    """Trains, grades, and records a run that has no file yet."""
    if (FOLDER / f"{algorithm}-{side}-{seed}.json").exists():
        return
    start, job = commit(), make_job(work, model, algorithm, side, seed)
    result = train(work, job, side, threads)
    after = graded(work, job.trained, model, algorithm, threads)
    record(algorithm, f"{side}-{seed}", threads, commit=start, side=side, seed=seed, **result, after=after)
    shutil.rmtree(job.folder)
    print(f"{algorithm} {side} seed {seed}: {after['accuracy']:.3f} right", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="of python -m benchmarks.real_model")
    parser.add_argument("--work", type=Path, help="where runs are written; without it a temporary directory")
    parser.add_argument("--algorithms", nargs="+", choices=("grpo", "ppo"), default=["grpo", "ppo"])
    parser.add_argument("--sides", nargs="+", choices=("jrlhf", "trl"), default=["jrlhf", "trl"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of a run")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    if not options.report and options.model is None:
        parser.error("--model: name the directory of python -m benchmarks.real_model")
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        for algorithm in [] if options.report else options.algorithms:
            model, threads = options.model.absolute(), options.threads
            for seed in options.seeds:
                for side in options.sides:
                    measure(work, model, algorithm, side, seed, threads)
            if not (FOLDER / f"{algorithm}-before.json").exists():
                before = graded(work, model, model, algorithm, threads)
                record(algorithm, "before", threads, commit=commit(), before=before)
    records = report.read(FOLDER)
    report.plot(records, RESULTS / "real.svg")
    DOCUMENT.write_text(report.with_tables(DOCUMENT.read_text(encoding="utf-8"), records), encoding="utf-8")
    print(report.table(records), report.comparisons(records), sep="\n\n")


if __name__ == "__main__":
    main()
