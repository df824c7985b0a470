"""The table and the picture of docs/results.md, from the files of `results/real/`."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parity.statistics import paired, standard_error

Record = Mapping[str, Any]
TITLES = {"grpo-jrlhf": "jrlhf", "grpo-trl": "TRL 1.16", "ppo-jrlhf": "jrlhf", "ppo-trl": "TRL 1.12"}


def read(folder: Path) -> dict[str, Any]:
    """The records by name: "grpo-before", "grpo-jrlhf-0", ..."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def runs_of(records: Mapping[str, Record], system: str) -> list[Record]:
    """Those of a system, "grpo-trl", by seed."""
    algorithm, side = system.split("-")
    own = [record for name, record in records.items() if name.startswith(f"{algorithm}-{side}-")]
    return sorted(own, key=lambda run: run["seed"])


def gain(before: Record, run: Record) -> tuple[float, float]:
    """By how much more of the held-out questions are answered rightly after a run, and the standard error of that.

    The difference is paired by question: the standard error is over questions.
    """
    after, first = ([*map(int, bits)] for bits in (run["after"]["right"], before["before"]["right"]))
    difference = np.subtract(after, first)
    return float(difference.mean()), standard_error(difference)


def beside(theirs: Sequence[Record], ours: Sequence[Record]) -> str:
    """The cell of a comparison of final accuracies, in points, over the seeds that both have."""
    pairs = [{run["seed"]: run["after"]["accuracy"] for run in runs} for runs in (theirs, ours)]
    seeds = sorted(pairs[0].keys() & pairs[1].keys())
    values = [[100 * side[seed] for seed in seeds] for side in pairs]
    if len(seeds) < 2:
        return f"{values[0][0] - values[1][0]:+.1f} (one seed)" if seeds else ""
    compared = paired(*values)
    return f"{compared.mean:+.1f} ({compared.low:+.1f} to {compared.high:+.1f}), {len(seeds)} seeds"


def table(records: Mapping[str, Record]) -> str:
    """Markdown: a line for each run, then for each system."""
    head = "| | | seed | right before → after | difference (standard errors) | KL | perplexity before → after | CPU s |"
    lines = [head, "|" + "---|" * 8]
    for system, title in TITLES.items():
        algorithm = system.split("-")[0]
        for run in runs_of(records, system):
            before, after = records[f"{algorithm}-before"], run["after"]
            mean, error = gain(before, run)
            first = before["before"]
            cells = [algorithm.upper(), title, str(run["seed"])]
            cells += [f"{100 * first['accuracy']:.1f} → {100 * after['accuracy']:.1f} %"]
            cells += [f"{100 * mean:+.1f} ± {100 * error:.1f} ({mean / error:.0f})"]
            cells += [f"{after['kl']['mean']:.1f} ± {after['kl']['standard_error']:.1f}"]
            cells += [f"{first['perplexity']:.2f} → {after['perplexity']:.2f}"]
            cells += ["" if run["resumed"] else f"{run['cpu']:,.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comparisons(records: Mapping[str, Record]) -> str:
    """Markdown: TRL's final accuracy less ours, paired by seed."""
    lines = ["| | right, less ours |", "|---|---|"]
    for algorithm in ("grpo", "ppo"):
        theirs, ours = (runs_of(records, f"{algorithm}-{side}") for side in ("trl", "jrlhf"))
        lines.append(
            f"| {algorithm.upper()}, {TITLES[f'{algorithm}-trl']} | {beside(theirs, ours) or 'not measured'} |"
        )
    return "\n".join(lines)


def answers(records: Mapping[str, Record], system: str = "ppo-jrlhf", count: int = 4) -> str:
    """Markdown: the first held-out questions, with the answers before and after a system's first run."""
    runs, before = runs_of(records, system), records.get(f"{system.split('-')[0]}-before")
    lines = ["| question | before | after |", "|---|---|---|"]
    if before is None or not runs:
        return ""
    before, after = before["before"], runs[0]["after"]
    for first, last in list(zip(before["samples"], after["samples"], strict=True))[:count]:
        cells = [first["prompt"], *(" ".join(one["response"].split()) or "(nothing)" for one in (first, last))]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def with_tables(document: str, records: Mapping[str, Record]) -> str:
    """Returns the document with these tables in the place of its own, which have the same first lines."""
    for own in filter(None, (table(records), comparisons(records), answers(records))):
        head = own.partition("\n")[0]
        document, count = re.subn(
            rf"^{re.escape(head)}\n(?:\|.*\n)*", lambda _, new=own: new + "\n", document, flags=re.M
        )
        assert count == 1, head
    return document


def plot(records: Mapping[str, Record], path: Path) -> None:
    """The share of right responses of each step, a line for each run, a panel for each algorithm."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "real", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axes, algorithm in zip(panels, ("grpo", "ppo"), strict=True):
        for color, side in (("C0", "jrlhf"), ("C1", "trl")):
            for number, run in enumerate(runs_of(records, f"{algorithm}-{side}")):
                label = TITLES[f"{algorithm}-{side}"] if number == 0 else None
                axes.plot(range(1, 1 + len(run["curve"])), run["curve"], color=color, linewidth=1, label=label)
        axes.set(title=algorithm.upper(), xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", fontsize=8) if axes.lines else None
    panels[0].set_ylabel("share of right responses")
    figure.savefig(path, metadata={"Date": None})
