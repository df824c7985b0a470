"""The cost of asynchronous training, by simulation: its rules, its settings, and a published system.

    python -m benchmarks.staleness

writes `results/staleness.json`, which holds everything that docs/staleness.md states, and two charts.

closed_form: the simulator against the formula of Applied Compute for the mean staleness, at the parameters of its six
    runs ("Staleness in fully asynchronous RL", 2026, figures from a third party's notes).
rules: the rule of a run and others, for a heavy tail of lengths.
orders: the order of the queue, where the trainer is slower than the rollouts.
settings: the trade-off over `staleness`, for each way to take new weights.
verl: step times that verl published for a 7B model on 128 H20 (docs/advance/fully_async.md of its repository).
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import RESULTS, provenance, write
from benchmarks.rules import Cost, Scenario, cost, simulate
from jrlhf.planning.predict_async import token_versions
from jrlhf.planning.simulate_async import lognormal
from jrlhf.rollouts.schedule import OnNewWeights, Rules

VERSIONS = 1000
BOUNDS = (0, 1, 2, 4, 8, 16)
SIGMAS = (0.25, 1.0)
# 16 groups of 8 rows in a batch, as many slots as rows, and an update that takes as long as a batch in full slots.
RUN = Scenario(Rules(16, 4, 1000.0), slots=128, samples=8, lengths=lognormal(1000, 1.0))


# ---- the mean staleness in closed form


@dataclass(frozen=True)
class Published:
    """A run of Qwen3-8B. rho: rate of rollouts over rate of training. ratio: E[longest row of a group] / E[length].

    measured: its mean staleness.
    """

    slots: int
    rows: int
    queue: int
    rho: float
    ratio: float
    measured: float

    @property
    def formula(self) -> float:
        flight = self.slots * self.ratio / (self.rows * max(self.rho, 1))
        waiting = self.rho if self.rho < 1 else (2 * self.queue + self.rho - 1) / (2 * self.rho)
        return flight + waiting

    @property
    def scenario(self) -> Scenario:
        """The run with 8 lognormal rows in a group; each row takes a slot by itself, as in the formula."""
        mean, samples = 500, 8
        rules = Rules(self.rows // samples, 0, self.rho * self.rows * mean / self.slots)
        lengths = lognormal(mean, sigma_for(self.ratio, samples))
        return Scenario(rules, self.slots, samples, lengths, rule="drop_oldest", queue=self.queue, together=False)


PUBLISHED = (
    Published(120, 240, 2, 0.63, 1.42, 1.26),
    Published(240, 120, 2, 0.92, 1.43, 3.59),
    Published(128, 128, 2, 1.07, 1.44, 3.09),
    Published(240, 120, 1, 0.86, 1.42, 3.40),
    Published(120, 120, 1, 0.67, 1.42, 1.92),
    Published(128, 128, 1, 1.14, 1.45, 2.01),
)


def longest_over_mean(sigma: float, samples: int) -> float:
    """E[longest of the samples] / E[length] of lognormal lengths, by integration."""
    z = np.linspace(-9, 12, 20001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.cumsum(density) * (z[1] - z[0])
    return float(np.sum(np.exp(sigma * z - sigma**2 / 2) * samples * below ** (samples - 1) * density) * (z[1] - z[0]))


def sigma_for(ratio: float, samples: int) -> float:
    low, high = 0.0, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if longest_over_mean(middle, samples) < ratio else (low, middle)
    return low


def closed_form() -> list[dict[str, Any]]:
    return [
        {**asdict(run), "formula": run.formula, "simulated": cost(run.scenario, VERSIONS).group_age}
        for run in PUBLISHED
    ]


# ---- rules and settings


RULES: Mapping[str, Scenario] = {
    "discard groups staler than 1": replace(RUN, rule="discard_stale", rules=replace(RUN.rules, staleness=1)),
    "discard groups staler than 3": replace(RUN, rule="discard_stale", rules=replace(RUN.rules, staleness=3)),
    "drop the oldest, queue of 1 batch": replace(RUN, rule="drop_oldest"),
    **{
        f"{title}, staleness {bound}": replace(RUN, rule=rule, rules=replace(RUN.rules, staleness=bound))
        for rule, title in (
            ("in_order", "wait for the groups that started first"),
            ("capacity", "admission by capacity alone"),
            ("token_bound", "**admission and a bound per token**"),
        )
        for bound in (1, 2, 4, 8)
    },
    "the same, staleness 2, lengths cut at twice the mean": replace(
        RUN, rules=replace(RUN.rules, staleness=2), lengths=lognormal(1000, 1.0, 2000)
    ),
}


# 256 rows in a batch and as many slots. An update takes 400 decode steps, and drawing a batch about 350.
SLOWER = Scenario(Rules(256, 4, 400.0), slots=256, samples=1, lengths=lognormal(300, 0.8, 1024))
ORDERS = {"completed_first": "completed first", "token_bound": "**started first**"}


def orders() -> list[dict[str, Any]]:
    """What the order of the queue costs where the trainer is the slower side."""
    rows = []
    for rule in ORDERS:
        for bound in (1, 2, 4, 8):
            scenario = replace(SLOWER, rule=rule, rules=replace(SLOWER.rules, staleness=bound))
            rows.append({"order": rule, "staleness": bound, **record_of(scenario, cost(scenario, VERSIONS))})
    return rows


def record_of(scenario: Scenario, result: Cost) -> dict[str, Any]:
    """A cost as a record, with times in times of an update: 1 if the trainer never waits."""
    update = scenario.rules.update
    return asdict(replace(result, step=result.step / update, time_per_batch=result.time_per_batch / update))


def rules() -> list[dict[str, Any]]:
    return [{"rule": title, **record_of(scenario, cost(scenario, VERSIONS))} for title, scenario in RULES.items()]


def prefill_price() -> float:
    """Decode steps that the prefill of one token takes: 8B, 128 rows, as measured on an H200."""
    record = json.loads((RESULTS / "accelerator-nvidia-h200.json").read_text())
    (row,) = (row for row in record["results"] if PRICED.items() <= row.items())
    return row["prefill"] / (row["batch"] * row["prompt"]) / row["seconds"]


PRICED = {"part": "decode", "model": "8B", "batch": 128, "prompt": 768}


WAYS: tuple[OnNewWeights, ...] = "keep_cache", "prefill_again", "finish"


def settings(sigmas: Sequence[float] = SIGMAS, bounds: Sequence[int] = BOUNDS) -> list[dict[str, Any]]:
    rows = []
    for sigma in sigmas:
        scenario = replace(RUN, lengths=lognormal(1000, sigma), prefill=prefill_price())
        for way in WAYS:
            for bound in bounds:
                bounded = replace(scenario, rules=replace(scenario.rules, staleness=bound, on_new_weights=way))
                name = {"sigma": sigma, "on_new_weights": way, "staleness": bound}
                rows.append({**name, **record_of(scenario, cost(bounded, VERSIONS))})
    return rows


# ---- verl: Qwen2.5-Math-7B, 128 H20, 512 prompts of 16 rows in a step, up to 28K tokens

VERL_ROWS, VERL_LONGEST = 512 * 16, 28 * 1024
VERL_STEP = {"colocated": 356.30, "streaming": 231.34, "0.1": 171.30, "0.3": 146.11, "0.5": 150.63}
VERL_GENERATION = 177.85  # of the colocated step
VERL_UPDATE = (98.77 + 109.12 + 103.22 + 113.16) / 4  # on 64 H20; mean of the four asynchronous rows
VERL_OTHER = 4.1  # step - wait for rows - update of the same four rows: 4.0 to 4.3
VERL_LENGTHS = (2500, 1.0)  # mean and sigma: assumed, not published
VERL_VERSIONS = 160


def verl_step(name: str, mean: float, sigma: float) -> float:
    """Predicted seconds of a step.

    A decode step takes a + b * rows of a device. a and b follow from the generation of the colocated step, on 128
    devices, and from the streaming step: its 64 devices decode all rows, then the last of four updates runs. So these
    two rows are no predictions.
    """
    lengths = lognormal(mean, sigma, VERL_LONGEST)
    draws = lengths(np.random.default_rng(0), (64, VERL_ROWS))
    longest, tokens = draws.max(1).mean(), draws.sum(1).mean()
    generations = [VERL_GENERATION, VERL_STEP["streaming"] - VERL_UPDATE / 4 - VERL_OTHER]
    a, b = np.linalg.solve([[longest, tokens / 128], [longest, tokens / 64]], generations)
    colocated = name == "colocated"
    share = 0.0 if name in ("colocated", "streaming") else float(name)
    # All groups that may start have a slot. A step is 4 updates of 128 prompts; then the weights are published.
    publish, devices = (1, 128) if colocated else (4, 64)
    slots = int(512 * (1 + share)) * 16
    second = 1 / (a + b * slots / devices)  # in decode steps of full slots
    update, other = (VERL_STEP[name] - VERL_GENERATION, 0.0) if colocated else (VERL_UPDATE, VERL_OTHER)
    scenario = Scenario(
        Rules(512 // publish, publish - 1 + publish * share, update / publish * second, "prefill_again"),
        slots,
        samples=16,
        lengths=lengths,
        chunk=16,
        transfer=other * second,
        empty=a * second,
        publish=publish,
        rule="capacity",
    )
    return cost(scenario, VERL_VERSIONS * publish // 4).step * publish / second


def verl() -> dict[str, Any]:
    mean, sigma = VERL_LENGTHS
    others = [(other, spread) for spread in (0.75, 1.0, 1.25) for other in (1500, 2500, 4000)]
    return {
        "published": VERL_STEP,
        "predicted": {name: verl_step(name, mean, sigma) for name in VERL_STEP},
        "mean": mean,
        "sigma": sigma,
        "with_other_lengths": [
            {"mean": mean, "sigma": sigma, **{name: verl_step(name, mean, sigma) for name in VERL_STEP}}
            for mean, sigma in others
        ],
    }


# ---- tables and charts


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """The tables of docs/staleness.md, in Markdown."""
    published = [
        (row["slots"], row["rows"], row["queue"], f"{row['rho']:.2f}", f"{row['ratio']:.2f}", f"{row['measured']:.2f}")
        + (f"{row['formula']:.2f}", f"{row['simulated']:.2f}")
        for row in record["closed_form"]
    ]
    names = ("slots", "rows", "queue", "rho", "M", "measured", "formula", "simulated")
    rules = [
        (row["rule"], f"{row['step']:.2f}", f"{row['mean_age']:.1f}", row["max_age"])
        + (f"{row['discarded']:.0%}", f"{row['zero_weight']:.0%}", _quartiles(row))
        + (f"{row['length_ratio']:.2f}", f"{row['time_per_batch']:.2f}")
        for row in record["rules"]
    ]
    costs = ("step", "mean age", "max age", "rows dropped", "tokens of weight 0", "full weight by quartile of length")
    settings = [
        (row["sigma"], row["on_new_weights"], row["staleness"], f"{row['step']:.2f}")
        + (f"{row['trainer_waits']:.0%}", f"{row['mean_age']:.1f}", row["max_age"], f"{row['discarded']:.0%}")
        + (f"{row['older']:.1%}", _quartiles(row), f"{row['time_per_batch']:.2f}")
        for row in record["settings"]
    ]
    older = ("rows dropped", "older tokens", "full weight by quartile of length", "time per batch")
    orders = [
        (ORDERS[row["order"]], row["staleness"], f"{row['step']:.2f}", f"{row['mean_age']:.1f}", row["max_age"])
        + (f"{row['older']:.1%}", _quartiles(row), f"{row['time_per_batch']:.2f}")
        for row in record["orders"]
    ]
    verl = record["verl"]
    ranges = {name: [row[name] for row in verl["with_other_lengths"]] for name in verl["published"]}
    seconds = [
        (name if name[0] != "0" else f"staleness {name}", f"{value:.0f}", f"{verl['predicted'][name]:.0f}")
        + (f"{min(ranges[name]):.0f} – {max(ranges[name]):.0f}",)
        for name, value in verl["published"].items()
    ]
    return {
        "closed_form": _table(names, published),
        "rules": _table(("rule", *costs, "length ratio", "time per batch"), rules),
        "settings": _table(
            ("sigma", "on_new_weights", "staleness", "step", "trainer waits", "mean age", "max age", *older), settings
        ),
        "orders": _table(
            ("groups that", "staleness", "step", "mean age", "max age", "older tokens", *older[2:]), orders
        ),
        "verl": _table(("", "published, s", "simulated, s", "with other lengths, s"), seconds),
    }


def _quartiles(row: Mapping[str, Any]) -> str:
    return " ".join(f"{share:.2f}" for share in row["full_weight"])


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "staleness", "svg.fonttype": "none"}
    from matplotlib import pyplot

    return pyplot


PICTURE = Scenario(Rules(2, 2, 26.0), slots=16, samples=4, lengths=lognormal(40, 0.5))
COLORS = ("#1b6ca8", "#e0a030", "#3a7d44", "#c8553d", "#7a5195")


def picture(path: Path) -> None:
    """Draws the slots, the queue and the trainer of a small simulated run; colours are versions of the weights."""
    plt = _pyplot()
    trace = simulate(PICTURE, versions=24, seed=3)
    begin, end = trace.begins[6], trace.begins[13]
    samples, size, update = PICTURE.samples, PICTURE.rules.batch, PICTURE.rules.update
    every = np.ones(len(trace.drawn), bool)
    rows, versions, tokens = token_versions(trace, every)
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    free = np.zeros(PICTURE.slots, int)  # the step until which a slot is taken
    starts = trace.starts.ravel()
    for row in np.argsort(starts, kind="stable"):
        at, slot = starts[row], np.flatnonzero(free <= starts[row])[0]
        for version, count in zip(versions[rows == row], tokens[rows == row], strict=True):
            if begin < at + count and at < end:
                color = COLORS[version % len(COLORS)]
                axes.barh(-slot, count, left=at, height=0.8, color=color, edgecolor="white", linewidth=0.5)
            at += count
        free[slot] = at
    done = (trace.starts + trace.lengths).max(1)
    taken = np.append(trace.begins, np.inf)[trace.trained]
    moments = np.arange(begin, end)
    waiting = [((done <= moment) & (taken > moment)).sum() for moment in moments]
    queue, trainer = -PICTURE.slots - 3.0, -PICTURE.slots - 5.5
    axes.fill_between(moments, queue, queue + np.array(waiting) / size, step="post", color="0.6")
    for version, moment in enumerate(trace.begins):
        if begin < moment + update / 2 < end:
            color = COLORS[(version + 1) % len(COLORS)]
            axes.barh(trainer, update, left=moment, height=1.4, color=color, edgecolor="white", linewidth=0.5)
            axes.text(moment + update / 2, trainer, str(version + 1), ha="center", va="center", color="white")
    for version, moment in enumerate(trace.swaps):
        if begin <= moment <= end and version:
            axes.axvline(moment, color="0.3", linewidth=0.6, linestyle=":")
    middle = -(PICTURE.slots - 1) / 2
    axes.set_yticks([middle, queue + 0.5, trainer], ["decode slots", "complete groups", "trainer"])
    axes.tick_params(left=False)
    axes.set(xlim=(begin, end), ylim=(trainer - 1, 1), xlabel="virtual time, decode steps")
    axes.set_title(
        f"{PICTURE.slots} slots, groups of {samples} rows, {size} groups in a batch, staleness 2", fontsize=10
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def chart(record: Mapping[str, Any], path: Path) -> None:
    """Draws time and lost tokens over the bound."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for name, color in zip(WAYS, COLORS, strict=False):
        for sigma, style in zip(SIGMAS, ("--", "-"), strict=True):
            chosen = [row for row in record["settings"] if (row["sigma"], row["on_new_weights"]) == (sigma, name)]
            places = range(len(chosen))
            left.plot(places, [row["step"] for row in chosen], style, color=color, label=f"{name}, sigma {sigma}")
            right.plot(places, [100 * row["zero_weight"] for row in chosen], style, color=color)
            for axes in (left, right):
                axes.set_xticks(places, [str(row["staleness"]) for row in chosen])
    left.set(yscale="log", yticks=(1, 2, 4, 8), yticklabels=("1", "2", "4", "8"), xlabel="staleness")
    left.set_title("time of a step, in times of an update", fontsize=10)
    left.minorticks_off()
    right.set(xlabel="staleness", ylim=(0, None))
    right.set_title("sampled tokens of weight 0, %", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "staleness.json")
    options = parser.parse_args()
    began = time.process_time()
    cost(RUN, VERSIONS)
    seconds = time.process_time() - began
    record = {
        "benchmark": "staleness",
        **provenance("numpy"),
        "versions_simulated": VERSIONS,
        "cpu_seconds_of_1000_versions": round(seconds, 2),
        "prefill_of_a_token_in_decode_steps": prefill_price(),
        "closed_form": closed_form(),
        "rules": rules(),
        "settings": settings(),
        "orders": orders(),
        "verl": verl(),
    }
    write(options.out, record)
    picture(options.out.with_name("asynchronous.svg"))
    chart(record, options.out.with_suffix(".svg"))
    for title, table in tables(record).items():
        print(f"\n{title}\n{table}")


if __name__ == "__main__":
    main()
