"""What asynchronous training learns: held-out accuracy by staleness, beside the synchronous run of the same seed.

    python -m benchmarks.learning [--work DIRECTORY] [--seeds 0 1 2 ...]

trains the supervised model of the config arithmetic-grpo once, and from it every case with every seed by the `grpo`
section of that config: at its learning rate, and at a third of it with twice the iterations, of 512 rows each. Cases of
a rate differ in `asynchronous` and the correction alone; the synchronous run is staleness 0, which has its bits.
Rollouts have a device of their own. An update takes so long on the virtual clock that rollouts are always ahead as far
as the bound admits: the tokens that are learned from are as old as they may be. Writes results/learning.json and
results/learning.svg, and prints the table of docs/staleness.md. With --work a call that was interrupted goes on:
runs whose results are in the directory are not done again.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from benchmarks.parity.common import answer
from benchmarks.parity.statistics import MARGIN, paired, standard_error
from benchmarks.records import RESULTS, hardware, provenance, write
from jrlhf.api import train
from jrlhf.tasks.arithmetic.problems import draw_problems, question

CONFIG = Path(__file__).parents[1] / "configs/arithmetic-grpo.yaml"
PROBLEMS, HELDOUT, ANSWERS, EVERY = 3500, 512, 4, 10  # ANSWERS: to each held-out sum, at temperature 1
UPDATE_STEPS = 16  # of the virtual clock; drawing a batch takes 4
CORRECTIONS = {"none": {}, "token": {"importance": "token"}, "rollout": {"old_logprobs": "rollout"}}
BOUNDS = (2, 4, 8)
RATES = {1e-4: 160, 3e-4: 80}  # learning rate -> iterations
SEEDS = 10


@dataclass(frozen=True)
class Case:
    """What runs of a seed differ in."""

    rate: float
    correction: str
    staleness: int

    def __str__(self) -> str:
        return f"{self.rate:.0e}-{self.correction}-{self.staleness}"


CASES = [
    Case(rate, *case)
    for rate in RATES
    for case in (("none", 0), *((name, bound) for name in ("token", "rollout", "none") for bound in BOUNDS))
]


def seeds_of(case: Case) -> int:
    """The number of seeds that are worth their time for a case."""
    uncorrected = case.correction == "none" and case.staleness > 0
    return 2 if uncorrected else 4 if case.rate == 3e-4 else SEEDS


def prepare(work: Path) -> None:
    """Trains the supervised model and writes the sums, if they are not there."""
    if (work / "base").is_dir():
        return
    learned, heldout = draw_problems(PROBLEMS, HELDOUT, terms=2, digits=2, seed=0)
    for name, sums in {"prompts": learned, "heldout": heldout * ANSWERS}.items():
        rows = [{"prompt": question(terms), "answer": answer(question(terms))} for terms in sums]
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(work / "sft", ignore_errors=True)  # of an interrupted call
    command = [sys.executable, "-m", "jrlhf.train", "--config", "arithmetic-grpo", "stages=[sft]", "rewards=[]"]
    subprocess.run([*command, "name=sft", f"run_dir={work}"], check=True)
    (work / "sft" / "model").rename(work / "base")


def measure(work: Path, case: Case, seed: int) -> dict[str, Any]:
    """One run: accuracy at the end and by the number of updates, and the ages of the tokens that it learned from."""
    config, name = yaml.safe_load(CONFIG.read_text()), f"{case}-{seed}"
    shutil.rmtree(work / "runs" / name, ignore_errors=True)  # of an interrupted call
    del config["sft"]
    config |= {"name": name, "run_dir": str(work / "runs"), "seed": seed, "stages": ["grpo"], "plan": "disaggregated"}
    config |= {"device": {"platform": "cpu", "simulated": 2}, "mesh": {"data": 2, "fsdp": 1, "tensor": 1}}
    files = {name: {"path": str(work / f"{name}.jsonl")} for name in ("prompts", "heldout")}
    lengths = {"max_prompt": 6, "max_response": 4}
    config |= {"model": {"path": str(work / "base")}, "data": {"source": "datasets", **files, **lengths}}
    config["rewards"] = [{"name": "correct", "function": "exact_match", "in_process": True}]
    config |= {"evaluation": {"prompts": HELDOUT * ANSWERS}, "validation": {"every": EVERY}}
    config["grpo"] |= {"iterations": RATES[case.rate], "save_every": RATES[case.rate]}
    config["grpo"]["actor"]["learning_rate"] = case.rate
    config["grpo"]["asynchronous"] = {"staleness": case.staleness, "update_steps": UPDATE_STEPS}
    config["grpo"]["asynchronous"] |= {"uncorrected": case.correction == "none" and case.staleness > 1}
    config["grpo"]["algorithm"] |= CORRECTIONS[case.correction]
    run = train(config)
    accuracy = run.summary["held_out"]["after"]["score"]
    mean, most = (run.column(f"training/off_policy/token_staleness/{figure}") for figure in ("mean", "max"))
    result = {"seed": seed, "accuracy": accuracy, "mean_age": mean.mean(), "max_age": most.max()}
    result["tokens"] = int(run.column("perf/total_num_tokens").sum())
    result["curve"] = [*run.column("val-core/all/score/mean@1").tolist(), accuracy]
    shutil.rmtree(run.path)
    return result


def collect(work: Path) -> list[dict[str, Any]]:
    """The cases with their runs, and with the paired difference from the synchronous run over the same seeds."""
    results, synchronous, starts = [], {}, dict[int, float]()
    for case in CASES:
        paths = (work / "measured").glob(f"{case}-*.json")
        runs = sorted((json.loads(path.read_text()) for path in paths), key=lambda run: run["seed"])
        for run in runs:
            if starts.setdefault(run["seed"], run["curve"][0]) != run["curve"][0]:
                raise SystemExit(f"runs of seed {run['seed']} start from different models: remove those of one of them")
        if case.staleness == 0:
            synchronous = {run["seed"]: run["accuracy"] for run in runs}
        result: dict[str, Any] = asdict(case) | {"runs": runs}
        if case.staleness and len(runs) > 1:
            compared = paired([run["accuracy"] for run in runs], [synchronous[run["seed"]] for run in runs])
            result |= {"mean": compared.mean, "low": compared.low, "high": compared.high}
            result |= {"within_margin": compared.low >= -MARGIN}
        results += [result] if len(runs) > 1 else []
    return results


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each case."""
    head = "| learning rate | correction | staleness | seeds | mean age | max age | right | less synchronous |"
    lines = [head, "|" + " --- |" * 8]
    for result in results:
        runs, values = result["runs"], [100 * run["accuracy"] for run in result["runs"]]
        ages = f"{np.mean([run['mean_age'] for run in runs]):.1f} | {max(run['max_age'] for run in runs):.0f}"
        cells = f"{result['staleness']} | {len(runs)} | {ages} | {np.mean(values):.1f} ± {standard_error(values):.1f} %"
        difference = ""
        if "mean" in result:
            mean, low, high = (f"{100 * result[key]:+.1f}" for key in ("mean", "low", "high"))
            difference = f"{mean} ({low} to {high})"
        lines.append(f"| {result['rate']:.0e} | {result['correction']} | {cells} | {difference} |")
    return "\n".join(lines)


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy by updates, mean over seeds and standard error: a row for each rate, a panel for each correction."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "learning", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    size = {"nrows": len(RATES), "ncols": len(CORRECTIONS), "figsize": (11, 3 * len(RATES))}
    figure, panels = plt.subplots(**size, sharey=True, sharex="row", layout="constrained")
    for axes, (rate, correction) in zip(panels.flat, itertools.product(RATES, CORRECTIONS), strict=True):
        for result in results:
            if result["rate"] == rate and (result["correction"] == correction or result["staleness"] == 0):
                curves = 100 * np.array([run["curve"] for run in result["runs"]])
                updates, mean = EVERY * np.arange(curves.shape[1]), curves.mean(axis=0)
                error = np.array([*map(standard_error, curves.T)])
                [line] = axes.plot(updates, mean, label=f"staleness {result['staleness']}", linewidth=1)
                axes.fill_between(updates, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(title=f"learning rate {rate:.0e}, correction: {correction}", xlabel="updates")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.supylabel("right held-out sums, %")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description="What asynchronous runs learn.")
    parser.add_argument("--work", type=Path, help="where all is written; without it a temporary directory")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(SEEDS)])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).absolute()
        (work / "measured").mkdir(parents=True, exist_ok=True)
        prepare(work)
        for seed in options.seeds:
            for case in [case for case in CASES if seed < seeds_of(case)]:
                path = work / "measured" / f"{case}-{seed}.json"
                if not path.exists():
                    path.with_suffix(".tmp").write_text(json.dumps(measure(work, case, seed)))
                    path.with_suffix(".tmp").rename(path)
                run = json.loads(path.read_text())
                print(f"{path.stem}  {run['accuracy']:.3f}  age {run['mean_age']:.2f}", flush=True)
        results = collect(work)
    settings = {"MARGIN": MARGIN, "PROBLEMS": PROBLEMS, "HELDOUT": HELDOUT, "ANSWERS": ANSWERS, "EVERY": EVERY}
    settings |= {"UPDATE_STEPS": UPDATE_STEPS, "CORRECTIONS": CORRECTIONS, "RATES": RATES}
    record = {"benchmark": "learning", **provenance("jax")}
    write(RESULTS / "learning.json", record | {"hardware": hardware(jax.devices()[0]), **settings, "results": results})
    plot(results, RESULTS / "learning.svg")
    print(table(results))


if __name__ == "__main__":
    main()
