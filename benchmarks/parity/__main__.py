"""The parity ledger: the same model, data, rewards, lengths and seeds, trained by other systems and by ours.

    python -m benchmarks.parity [--work DIRECTORY]

makes an environment for each peer (`benchmarks.sides.environment`), trains the supervised model from which all start,
runs every side with every seed, and lets our program answer the held-out sums greedily with all the trained weights.
Writes results/parity.json and results/parity.svg, or --output and its picture, and prints the table of docs/parity.md.
With --work a call that was interrupted goes on: seeds whose results are in the directory are not trained again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare import PEERS
from benchmarks.parity import common
from benchmarks.parity.common import Job
from benchmarks.parity.statistics import CONFIDENCE, MARGIN, paired, standard_error
from benchmarks.records import RESULTS, hardware, provenance, write
from benchmarks.sides import environment

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS, HELDOUT = 3500, 1500
LAST = 10  # steps whose responses make the sampled accuracy
MEASURES = ("greedy", "sampled")
SUPERVISED = ["--config", "arithmetic-grpo", "stages=[sft]", "rewards=[]", f"data.heldout_rows={HELDOUT}"]
SUPERVISED += ["model.qk_norm=true", "model.rope_theta=1000000"]  # a Qwen3, which all the systems have


@dataclass(frozen=True)
class System:
    """Who trains. peer: of `compare.PEERS`, whose environment it runs in; None: ours."""

    title: str
    algorithm: str
    module: str
    peer: str | None = None


SYSTEMS = {
    "grpo-ours": System("jrlhf", "grpo", "ours"),
    "grpo-trl": System("TRL 1.16", "grpo", "trl_grpo", "trl-grpo"),
    "grpo-tunix-ends": System("Tunix 0.1.7, ends put back", "grpo", "tunix", "tunix"),
    "grpo-tunix": System("Tunix 0.1.7", "grpo", "tunix", "tunix"),
    "ppo-ours": System("jrlhf", "ppo", "ours"),
    "ppo-trl": System("TRL 1.12", "ppo", "trl_ppo", "trl"),
    "ppo-tunix-ends": System("Tunix 0.1.7, ends put back", "ppo", "tunix", "tunix"),
    "ppo-tunix": System("Tunix 0.1.7", "ppo", "tunix", "tunix"),
}


def make_data(work: Path, seeds: int) -> None:
    """Writes the questions, and in which order each seed asks them, which is that of our runs."""
    from jrlhf.data.order import Order
    from jrlhf.tasks.arithmetic.problems import draw_problems, question

    learned, heldout = ([*map(question, sums)] for sums in draw_problems(PROBLEMS, HELDOUT, terms=2, digits=2, seed=0))
    rows = [{"prompt": question, "answer": common.answer(question)} for question in learned]
    (work / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "heldout.json").write_text(json.dumps(heldout))
    for algorithm, prompts in {"grpo": common.ROWS // common.SAMPLES, "ppo": common.ROWS}.items():
        for seed in range(seeds):
            order = Order(len(learned), prompts, seed + 1)
            asked = [[learned[row] for row in order.draw(step)] for step in range(common.STEPS)]
            (work / f"{algorithm}-prompts-{seed}.json").write_text(json.dumps(asked))


def make_base(work: Path) -> None:
    """Trains the supervised model, if it is not there."""
    if (work / "base").is_dir():
        return
    shutil.rmtree(work / "sft", ignore_errors=True)  # of an interrupted call
    command = [sys.executable, "-m", "jrlhf.train", *SUPERVISED, "name=sft", f"run_dir={work}"]
    subprocess.run(command, check=True, cwd=ROOT)
    (work / "sft" / "model").rename(work / "base")


def run(work: Path, name: str, seeds: int, venvs: Mapping[str, Path]) -> None:
    """Trains with the seeds that have no result yet, in one process, on one thread where there is a choice."""
    start(work, Job(str(work), name, SYSTEMS[name].algorithm, range(seeds)), SYSTEMS[name], venvs)


def start(work: Path, job: Job, system: System, venvs: Mapping[str, Path]) -> None:
    """Starts the system's process for the seeds of a job that have no result yet, and waits for it."""
    missing = [seed for seed in job.seeds if not (job.model(seed) / "result.json").is_file()]
    if not missing:
        return
    python, directory = Path(sys.executable), ROOT
    if system.peer is not None:
        python = venvs.get(system.peer) or environment(system.peer, PEERS[system.peer].requirements)
        # A peer sees `benchmarks` and nothing else of the checkout: our `kernels` is also a package's name.
        directory = work / "peer"
        directory.mkdir(exist_ok=True)
        if not (directory / "benchmarks").exists():
            (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
    pinned = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), "-m", f"benchmarks.parity.{system.module}", json.dumps(asdict(job) | {"seeds": missing})]
    subprocess.run(command, check=True, cwd=directory, env=inherited | pinned)


def replay(work: Path, venvs: Mapping[str, Path]) -> dict[str, Any]:
    """Lets Tunix learn from the responses that our program drew, and compares the weights after the last update."""
    from safetensors.numpy import load_file

    outcome = {}
    for algorithm in ("grpo", "ppo"):
        path, models = work / f"{algorithm}-replayed.jsonl", []
        if not (work / f"replayed-{algorithm}-ours" / "0" / "result.json").is_file():
            path.unlink(missing_ok=True)  # of an interrupted call; our side appends
        for name in (f"{algorithm}-ours", f"{algorithm}-tunix-ends"):
            job = Job(str(work), f"replayed-{name}", algorithm, [0], str(path))
            start(work, job, SYSTEMS[name], venvs)
            models.append(load_file(job.model(0) / "model.safetensors"))
        (ours, theirs), base = models, load_file(work / "base" / "model.safetensors")
        assert ours.keys() == theirs.keys() == base.keys()
        difference = max(float(np.abs(ours[name] - theirs[name]).max()) for name in base)
        change = max(float(np.abs(ours[name] - base[name]).max()) for name in base)
        outcome[algorithm] = {"updates": common.STEPS, "largest_difference": difference, "largest_change": change}
    return outcome


def grade(work: Path, models: Sequence[Path]) -> list[float]:
    """The share of the held-out sums that each model answers rightly, drawing the most likely tokens."""
    import jax

    from jrlhf.data.batches import key_for, put_rows, row_keys
    from jrlhf.meshes import make_mesh
    from jrlhf.models import SamplingConfig, Schedule, load_hf
    from jrlhf.roles.generating import engine_of
    from jrlhf.roles.model import Architecture, Compute, Model, generation_weights

    questions, mesh, compute = json.loads((work / "heldout.json").read_text()), make_mesh(1, 1, 1), Compute()
    rows = np.array([*map(common.encode, questions)], np.int32)
    sampling, schedule = SamplingConfig(common.RESPONSE, temperature=0, stop_ids=(common.EOS,)), Schedule(chunk=4)
    shares, draw = [], None
    with jax.set_mesh(mesh):
        placed = put_rows((rows, np.full(len(rows), common.PROMPT, np.int32)), mesh)
        keys = row_keys(key_for(0, "grade"), len(rows), mesh)
        for path in models:
            description, params = load_hf(path, mesh, head="lm")
            model = Model(Architecture(description.model), params)
            draw = draw or engine_of(model.architecture, mesh, compute, sampling, schedule)
            tokens = np.asarray(draw(generation_weights(model, mesh, compute), *placed, keys).tokens)
            answers = tokens[:, common.PROMPT :].tolist()
            shares.append(float(np.mean([*map(common.reward, questions, answers)])))
    return shares


def collect(work: Path, seeds: int) -> dict[str, Any]:
    """The results of every system that has at least two, graded, and the comparisons with ours over common seeds.

    Prints which systems have fewer and are left out.
    """
    paths = {name: [work / name / f"{seed}" for seed in range(seeds)] for name in SYSTEMS}
    paths = {name: [path for path in folders if (path / "result.json").is_file()] for name, folders in paths.items()}
    for name in [name for name, folders in paths.items() if len(folders) < 2]:
        print(f"{name} has {len(paths.pop(name))} result(s) and is left out: the spread over seeds needs at least 2")
    before, *after = grade(work, [work / "base", *(path for folders in paths.values() for path in folders)])
    shares, systems = iter(after), {}
    for name, folders in paths.items():
        runs = [json.loads((path / "result.json").read_text()) for path in folders]
        versions = [run.pop("versions") for run in runs]
        for run in runs:
            run |= {"greedy": next(shares), "sampled": float(np.mean(run["curve"][-LAST:]))}
        systems[name] = asdict(SYSTEMS[name]) | {"versions": versions[0], "runs": runs}
    pairs = {name: f"{system['algorithm']}-ours" for name, system in systems.items()}
    comparisons = {
        name: {measure: compare(systems[name]["runs"], systems[ours]["runs"], measure) for measure in MEASURES}
        for name, ours in pairs.items()
        if name != ours and ours in systems
    }
    return {"before": before, "systems": systems, "comparisons": comparisons}


def compare(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], measure: str) -> dict[str, Any]:
    """The paired difference of a measure, theirs less ours, over the seeds that both have."""
    their_values, our_values = ({run["seed"]: run[measure] for run in runs} for runs in (theirs, ours))
    seeds = sorted(their_values.keys() & our_values.keys())
    result = paired([their_values[seed] for seed in seeds], [our_values[seed] for seed in seeds])
    return asdict(result) | {"seeds": len(seeds), "verdict": result.verdict}


def table(outcome: Mapping[str, Any]) -> str:
    """Markdown: a line for each system."""
    lines = [
        "| | | seeds | before | greedy | less ours | sampled | less ours | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, system in outcome["systems"].items():
        runs = system["runs"]
        columns = [system["algorithm"].upper(), system["title"], f"{len(runs)}", f"{100 * outcome['before']:.2f}"]
        for measure in MEASURES:
            values = [100 * run[measure] for run in runs]
            columns += [f"{np.mean(values):.2f} ± {standard_error(values):.2f}"]
            columns += [difference(outcome["comparisons"][name][measure]) if name in outcome["comparisons"] else ""]
        tokens = np.mean([run["tokens"] for run in runs])
        lines.append(f"| {' | '.join(columns)} | {tokens:,.0f} |")
    return "\n".join(lines)


def difference(compared: Mapping[str, Any]) -> str:
    """The cell of a comparison, in points."""
    mean, low, high = (f"{100 * compared[key]:+.2f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high}): {compared['verdict']}"


def plot(outcome: Mapping[str, Any], path: Path) -> None:
    """The mean reward of each step, over seeds, with its standard error; a panel for each algorithm."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "parity", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    systems = outcome["systems"].values()
    algorithms = list(dict.fromkeys(system["algorithm"] for system in systems))
    figure, panels = plt.subplots(
        1, len(algorithms), figsize=(4.5 * len(algorithms), 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, algorithm in zip(panels[0], algorithms, strict=True):
        for system in systems:
            if system["algorithm"] == algorithm:
                curves = np.array([run["curve"] for run in system["runs"]])
                steps, mean = np.arange(curves.shape[1]), curves.mean(axis=0)
                error = np.array([*map(standard_error, curves.T)])
                [line] = axes.plot(steps, mean, label=system["title"], linewidth=1)
                axes.fill_between(steps, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(title=algorithm.upper(), xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=8)
    panels[0][0].set_ylabel("share of right responses")
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description="The parity ledger.")
    parser.add_argument("--work", type=Path, help="where everything is written; without it a temporary directory")
    parser.add_argument("--venv", nargs="*", default=[], metavar="PEER=DIRECTORY", help="environments that are there")
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    parser.add_argument("--output", type=Path, default=RESULTS / "parity.json")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: a difference needs at least 2")
    venvs = {peer: Path(path).absolute() / "bin" / "python" for peer, path in (x.split("=") for x in options.venv)}
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        make_base(work)
        make_data(work, options.seeds)
        for name in options.systems:
            run(work, name, options.seeds, venvs)
        outcome = collect(work, options.seeds)
        if {"grpo-tunix-ends", "ppo-tunix-ends"} <= {*options.systems}:
            outcome |= {"replay": replay(work, venvs)}
    import jax

    record = {"benchmark": "parity", "hardware": hardware(jax.devices()[0]), **provenance("jax")}
    settings = {key: value for key, value in vars(common).items() if key.isupper()}
    record |= {"settings": settings, "problems": PROBLEMS, "heldout": HELDOUT, "last": LAST, "margin": MARGIN}
    write(options.output, record | {"confidence": CONFIDENCE} | outcome)
    plot(outcome, options.output.with_suffix(".svg"))
    print(table(outcome))
    for algorithm, compared in outcome.get("replay", {}).items():
        print(f"{algorithm} on the same responses: {compared}")


if __name__ == "__main__":
    main()
