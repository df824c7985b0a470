"""The report of a run: one HTML file that needs nothing else, made from what the run wrote.

    python -m jrlhf.report runs/quickstart

writes `report.html` anew. It shows what is there: a run that was interrupted, or that has only some of the stages, gets
a report of that. Everything that comes from files, model outputs above all, is escaped.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jrlhf.charts import Chart, Series, number
from jrlhf.console import clean, duration
from jrlhf.errors import UserError
from jrlhf.files import read_jsonl, write_atomic
from jrlhf.metrics import METRICS, read_metrics
from jrlhf.report_style import STYLE
from jrlhf.runs import CONFIG, ENVIRONMENT, SAMPLES
from jrlhf.strict import flatten, parse_yaml

SUMMARY, REPORT = "summary.json", "report.html"

# The calls of an iteration in the order in which they run, with what each does.
_CALLS = (
    ("reshard", "actor weights to the generation layout"),
    ("gen", "generate responses"),
    ("reward", "reward model scores"),
    ("old_log_prob", "actor log-probs"),
    ("ref", "reference log-probs"),
    ("values", "critic values"),
    ("adv", "rewards and advantages"),
    ("update_critic", "train the critic"),
    ("update_actor", "train the actor"),
)
_SETTLED = 2  # the first iterations compile


@dataclass(frozen=True)
class Record:
    """What a run directory holds. Files that are not there are empty."""

    name: str
    config: str
    settings: dict[str, str]
    environment: str
    metrics: dict[str, list[dict[str, Any]]]  # by stage
    samples: list[dict[str, Any]]
    summary: dict[str, Any]

    def curve(self, stage: str, metric: str) -> tuple[list[float], list[float]]:
        """Steps and values of the records that have the metric; what was not finite is NaN."""
        found = [(each["step"], each[metric]) for each in self.metrics.get(stage, []) if metric in each]
        return [float(step) for step, _ in found], [math.nan if value is None else float(value) for _, value in found]

    def setting(self, key: str) -> float | None:
        """A number of the config, None where it is not one."""
        try:
            return float(self.settings[key])
        except (KeyError, ValueError):
            return None


def write_report(run_dir: Path | str) -> Path:
    """Writes `report.html` into a run directory, atomically, and returns its path.

    Raises:
        UserError: the directory holds no run, or one of its files cannot be read.
    """
    path = Path(run_dir) / REPORT
    write_atomic(path, render(read_run(run_dir)))
    return path


def read_run(run_dir: Path | str) -> Record:
    """Reads what a run has written so far.

    Raises:
        UserError: the directory holds no run, or one of its files cannot be read.
    """
    directory = Path(run_dir)
    if not (directory / CONFIG).exists() and not (directory / METRICS).exists():
        raise UserError(f"{directory} holds no run (neither {CONFIG} nor {METRICS}): name a run's directory")

    def text(name: str) -> str:
        return (directory / name).read_text(encoding="utf-8") if (directory / name).exists() else ""

    try:
        summary = json.loads(text(SUMMARY) or "{}")
    except ValueError as error:
        raise UserError(f"{directory / SUMMARY} is not JSON ({error}): delete it and resume the run") from error
    metrics: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(directory):
        metrics.setdefault(record["stage"], []).append(record)
    return Record(
        name=directory.resolve().name,
        config=text(CONFIG),
        settings=flatten(parse_yaml(text(CONFIG), str(directory / CONFIG)) or {}),
        environment=text(ENVIRONMENT),
        metrics=metrics,
        samples=list(read_jsonl(directory / SAMPLES)),
        summary=summary,
    )


def render(run: Record) -> str:
    """The whole page."""
    sections = [
        ("outcome", "Outcome", _outcome(run)),
        ("reward", "Is the reward being gamed?", _gaming(run)),
        ("items", "What the gold score is made of", _items(run)),
        ("samples", "Before and after", _samples(run)),
        ("timeline", "An iteration, call by call", _timeline(run)),
        ("training", "PPO", _ppo(run)),
        ("pretraining", "Before PPO", _pretraining(run)),
        ("files", "Config and environment", _files(run)),
    ]
    present = [(anchor, title, body) for anchor, title, body in sections if body]
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title, _ in present)
    body = "".join(
        f'<section id="{anchor}"><h2>{escape(title)}</h2>{content}</section>' for anchor, title, content in present
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · jrlhf</title><style>{STYLE}</style></head>"
        f"<body><header><p class=brand>jrlhf</p><h1>{escape(run.name)}</h1>{_chips(run)}<nav>{links}</nav></header>"
        f"<main>{body}</main></body></html>\n"
    )


# --- Head and outcome ---


def _chips(run: Record) -> str:
    stages = [stage for stage in ("sft", "reward_model", "ppo") if run.metrics.get(stage)]
    chips = []
    if stages and not run.summary:
        last = stages[-1]
        done = run.metrics[last][-1]["step"]
        total = run.setting(f"{last}.iterations" if last == "ppo" else f"{last}.steps")
        chips.append(f"unfinished: {last} {done}" + (f" of {total:.0f}" if total else ""))
    elif run.summary:
        chips.append("finished")
    sizes = {axis: run.settings.get(f"mesh.{axis}", "1") for axis in ("data", "fsdp", "tensor")}
    split = " × ".join(f"{axis} {'auto' if size == '-1' else size}" for axis, size in sizes.items() if size != "1")
    simulated = run.settings.get("device.simulated", "null")
    if split:
        chips.append(f"mesh {split}" + (f" on {simulated} simulated devices" if simulated != "null" else ""))
    for key, name in (("compute.dtype", ""), ("seed", "seed ")):
        if key in run.settings:
            chips.append(f"{name}{run.settings[key]}")
    seconds = _seconds(run)
    if seconds:
        chips.append(duration(sum(seconds.values())))
    return "<p class=chips>" + "".join(f"<span>{escape(chip)}</span>" for chip in chips) + "</p>"


def _seconds(run: Record) -> dict[str, float]:
    """Seconds of each phase: from the summary, else the sums of the iterations."""
    if run.summary.get("phases"):
        return {str(name): float(seconds) for name, seconds in run.summary["phases"].items()}
    sums = {stage: float(np.nansum(run.curve(stage, "timing_s/step")[1])) for stage in run.metrics}
    return {stage: seconds for stage, seconds in sums.items() if seconds > 0}


def _outcome(run: Record) -> str:
    cards = [*_gold_card(run), *_accuracy_card(run), *_kl_card(run), *_distinct_card(run), *_time_card(run)]
    return f"<div class=cards>{''.join(cards)}</div>" if cards else ""


def _card(title: str, value: str, note: str) -> str:
    return f"<div class=card><h3>{escape(title)}</h3><p class=big>{value}</p><p class=note>{escape(note)}</p></div>"


def _gold_card(run: Record) -> list[str]:
    heldout = run.summary.get("held_out", {})
    before, after = heldout.get("sft"), heldout.get("ppo")
    if not before or not after or "ppo" not in run.metrics:
        return [_card("Gold score, held out", number(before["gold"]), "the SFT model")] if before else []
    note = ""
    if "difference" in heldout:
        difference, error = heldout["difference"], heldout.get("standard_error", 0.0)
        note = f"{difference:+.3f} ± {error:.3f} on {heldout.get('n', '?')} held-out prompts"
        note += f", {difference / error:.1f} standard errors" if error else ""
    value = f"{number(before['gold'])}<i>→</i>{number(after['gold'])}"
    return [_card("Gold score, SFT to PPO", value, note)]


def _accuracy_card(run: Record) -> list[str]:
    accuracy = run.summary.get("reward_model_accuracy")
    if accuracy is None:
        accuracy = (run.curve("reward_model", "reward_model/eval_accuracy")[1] or [None])[-1]
    if accuracy is None:
        return []
    pairs = (run.curve("reward_model", "reward_model/eval_pairs")[1] or [0])[-1]
    error = f" ± {math.sqrt(accuracy * (1 - accuracy) / pairs):.1%}" if pairs else ""
    of = f"{pairs:,.0f} held-out pairs" if pairs else "held-out pairs"
    return [_card("Reward model", f"{accuracy:.1%}", f"right about {accuracy:.1%}{error} of {of}")]


def _kl_card(run: Record) -> list[str]:
    values = run.curve("ppo", "objective/kl")[1]
    if not values:
        return []
    quarter = [value for value in values[-max(len(values) // 4, 1) :] if math.isfinite(value)]
    mean = sum(quarter) / len(quarter) if quarter else math.nan
    target = run.setting("ppo.algorithm.kl_target")
    note = "nats a response, mean of the last quarter"
    if target:
        note += f"; the target is {target:g} ({mean / target - 1:+.0%})"
    return [_card("KL to the reference", number(mean), note)]


def _distinct_card(run: Record) -> list[str]:
    heldout = run.summary.get("held_out", {})
    before, after = (heldout.get(name, {}).get("distinct") for name in ("sft", "ppo"))
    if not before or not after or "ppo" not in run.metrics:
        return []
    note = f"{after} distinct held-out responses, {before} before PPO"
    return [_card("Variety kept", f"{after / before:.0%}", note)]


def _time_card(run: Record) -> list[str]:
    seconds = _seconds(run)
    if not seconds:
        return []
    total = sum(seconds.values())
    shares = ", ".join(f"{name.replace('_', ' ')} {duration(each)}" for name, each in seconds.items())
    return [_card("Time", duration(total), shares)]


# --- Reward, gold and KL against each other ---


def _gaming(run: Record) -> str:
    x, reward = run.curve("ppo", "critic/score/mean")
    gold = run.curve("ppo", "gold/score")
    kl = run.curve("ppo", "objective/kl")
    if not reward or not kl[1]:
        return ""
    figures = [
        _figure(
            "What PPO sees: the learned reward",
            "The reward model's mean score; PPO maximises it.",
            Chart([Series("reward model", x, reward, 1, "trend")], xlabel="iteration"),
        ),
        _figure(
            "What it does not see: the gold score",
            "The known rubric, which only measures.",
            Chart([Series("gold", *gold, 2, "trend")], xlabel="iteration"),
        ),
        _figure(
            "What it pays: KL to the reference",
            "Nats a response; dashed, the controller's target.",
            Chart(
                [Series("KL", *kl, 3, "trend")],
                xlabel="iteration",
                target=run.setting("ppo.algorithm.kl_target"),
                limits=(0, None),
            ),
        ),
    ]
    against = _against_kl(run)
    verdict = _verdict(reward, gold[1])
    lead = f"<p class=lead>{escape(verdict)}</p>" if verdict else ""
    return f"{lead}<div class=three>{''.join(figures)}</div>{against}"


def _against_kl(run: Record) -> str:
    """Reward and gold over KL, each as a share of its own largest change: where they part, the reward is gamed."""
    records = run.metrics.get("ppo", [])
    keys = ("objective/kl", "critic/score/mean", "gold/score")
    rows = np.array([[each[k] for k in keys] for each in records if all(each.get(k) is not None for k in keys)])
    if len(rows) < 4:
        return ""
    kl = rows[:, 0].tolist()
    start = rows[: max(len(rows) // 20, 1), 1:].mean(0)
    change = rows[:, 1:] - start
    change = change / np.maximum(np.abs(change).max(0), 1e-12)
    chart = Chart(
        [
            Series("reward model", kl, change[:, 0].tolist(), 1, "points"),
            Series("gold", kl, change[:, 1].tolist(), 2, "points"),
        ],
        xlabel="KL to the reference",
        whole=False,
        target=0.0,
        size=(15.2, 3.4),
    )
    return _figure(
        "Both against the distance from the reference",
        "Change since the start as a share of the largest change; later iterations are stronger. A reward that goes on "
        "rising with the KL while gold turns down is being gamed.",
        chart,
        kind="wide",
    )


def _verdict(reward: Sequence[float], gold: Sequence[float]) -> str:
    """What the last quarter of the iterations says, compared with the first and with gold's best."""
    both = np.array([pair for pair in zip(reward, gold, strict=False) if np.isfinite(pair).all()])
    if len(both) < 8:
        return ""
    quarters = np.array_split(both, 4)
    rewards, golds = np.array([quarter.mean(0) for quarter in quarters]).T
    errors = [float(quarter[:, 1].std() / math.sqrt(len(quarter))) for quarter in quarters]
    best = int(np.argmax(golds))
    fallen, gain, risen = golds[best] - golds[3], golds[3] - golds[0], rewards[3] - rewards[0]
    if fallen > 2 * math.hypot(errors[best], errors[3]):
        if rewards[3] < rewards[best]:
            return f"The gold score fell by {fallen:.3f} from its best quarter, and the reward model's score with it."
        when = ("first", "second", "third")[best]
        return (
            f"The reward is being gamed: after the {when} quarter the reward model's score still rose, while the gold "
            f"score fell by {fallen:.3f}. Stop earlier, raise the KL coefficient, or train a better reward model."
        )
    if risen > 0 and gain > 0:
        return (
            f"From the first to the last quarter the reward model's score rose by {risen:.2f} and the gold score by "
            f"{gain:.3f}: they rise together, and nothing suggests that the reward is gamed."
        )
    return f"From the first to the last quarter the reward model's score changed by {risen:+.2f}, gold by {gain:+.3f}."


# --- Gold items ---


def _items(run: Record) -> str:
    names = dict.fromkeys(
        key.removeprefix("gold/")
        for each in run.metrics.get("ppo", [])
        for key in each
        if key.startswith("gold/") and key != "gold/score"
    )
    figures = [
        _figure(
            name.replace("_", " "),
            "",
            Chart([Series(name, *run.curve("ppo", f"gold/{name}"), 2, "trend")], size=(3.3, 1.75)),
        )
        for name in names
    ]
    return _items_table(run) + (f"<div class=four>{''.join(figures)}</div>" if figures else "")


def _items_table(run: Record) -> str:
    heldout = run.summary.get("held_out", {})
    before, after = (heldout.get(name, {}).get("items", {}) for name in ("sft", "ppo"))
    if not before or not after or "ppo" not in run.metrics:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td>"
        f"<td class=range>{_range_bar(old, after[name])}</td>"
        f"<td class=num>{old:.3f}</td><td class=num>{after[name]:.3f}</td>{_change(after[name] - old)}</tr>"
        for name, old in before.items()
        if name in after
    )
    return (
        "<div class='card scroll'><table><thead><tr><th>item, on held-out prompts</th><th></th><th class=num>SFT</th>"
        f"<th class=num>PPO</th><th class=num>change</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _range_bar(old: float, new: float) -> str:
    low, high = sorted((min(max(old, 0.0), 1.0), min(max(new, 0.0), 1.0)))
    kind = "up" if new >= old else "down"
    return (
        f"<div class=track><div class='span {kind}' style='left:{low:.1%};width:{high - low:.1%}'></div>"
        f"<div class=tick style='left:{min(max(old, 0.0), 1.0):.1%}'></div></div>"
    )


def _change(difference: float, digits: int = 3) -> str:
    kind = "up" if difference > 0.5 * 10**-digits else "down" if difference < -0.5 * 10**-digits else "same"
    return f"<td class='num {kind}'>{difference:+.{digits}f}</td>"


# --- Samples ---


def _samples(run: Record) -> str:
    graded = [each for each in run.samples if each.get("stage") == "evaluation" and "ppo" in each and "sft" in each]
    if graded and "ppo" in run.metrics:
        return _before_and_after(graded)
    shown = [each for each in run.samples if "response" in each][-12:]
    if not shown:
        return ""
    rows = "".join(
        f"<tr><td class=num>{each.get('step', '')}</td><td><code>{_text(each.get('prompt', ''))}</code></td>"
        f"<td>{_text(each['response'])}</td><td class=num>{_figures(each.get('score'))}</td>"
        f"<td class=num>{_figures(each.get('gold'))}</td></tr>"
        for each in shown
    )
    return (
        "<p class=lead>The latest samples.</p><div class='card scroll'><table><thead><tr><th class=num>step</th>"
        "<th>prompt</th><th>response</th><th class=num>reward</th><th class=num>gold</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _before_and_after(samples: list[dict[str, Any]]) -> str:
    changes = [each.get("gold_ppo", 0.0) - each.get("gold_sft", 0.0) for each in samples]
    order = sorted(range(len(samples)), key=changes.__getitem__)
    better, worse = sum(change > 1e-9 for change in changes), sum(change < -1e-9 for change in changes)
    lead = (
        f"Of {len(samples)} held-out prompts PPO answers {better} better than SFT by the gold score, {worse} worse and "
        f"{len(samples) - better - worse} alike."
    )
    groups = [("The first ones", list(range(min(10, len(samples)))), True)]
    if len(samples) > 10:
        groups += [
            ("Where the gold score fell most", [index for index in order[:6] if changes[index] < 0], False),
            ("Where it rose most", [index for index in order[::-1][:6] if changes[index] > 0], False),
        ]
    tables = "".join(
        f"<details{' open' if opened else ''}><summary>{title}</summary>"
        f"{_pairs_table([samples[index] for index in chosen])}</details>"
        for title, chosen, opened in groups
        if chosen
    )
    return f"<p class=lead>{lead}</p>{tables}"


def _pairs_table(samples: list[dict[str, Any]]) -> str:
    rewards = any("reward_ppo" in each for each in samples)
    head = "<th class=num>reward</th>" if rewards else ""
    rows = []
    for each in samples:
        old, new = each.get("gold_sft"), each.get("gold_ppo")
        change = _change(new - old, 2) if old is not None and new is not None else "<td></td>"
        reward = (
            f"<td class=num>{_figures(each.get('reward_sft'))} → {_figures(each.get('reward_ppo'))}</td>"
            if rewards
            else ""
        )
        rows.append(
            f"<tr><td><code>{_text(each.get('prompt', ''))}</code></td><td>{_text(each['sft'])}</td>"
            f"<td>{_text(each['ppo'])}</td><td class=aside>{_text(each.get('reference', ''))}</td>{reward}"
            f"<td class=num>{_figures(old)} → {_figures(new)}</td>{change}</tr>"
        )
    return (
        "<div class='card scroll'><table class=texts><thead><tr><th>prompt</th><th>SFT</th><th>PPO</th>"
        f"<th>the real line</th>{head}<th class=num>gold</th><th></th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _text(value: object) -> str:
    """Text of a model or a file, safe to show."""
    return escape(clean(str(value), 400))


def _lines(text: str) -> str:
    return "\n".join(escape(clean(line)) for line in text.splitlines())


def _figures(value: float | None) -> str:
    return "" if value is None else number(float(value))


# --- Timeline ---


def _timeline(run: Record) -> str:
    records = run.metrics.get("ppo", [])
    settled = records[_SETTLED:] if len(records) > _SETTLED else records
    seconds: dict[str, float] = {}
    for key in dict.fromkeys(key for each in settled for key in each if key.startswith("timing_s/")):
        seconds[key.removeprefix("timing_s/")] = float(np.median([each.get(key) or 0.0 for each in settled]))
    step = seconds.pop("step", 0.0)
    if not seconds:
        return ""
    known = dict(_CALLS)
    names = [name for name in known if name in seconds] + [name for name in seconds if name not in known]
    rest = step - sum(seconds.values())
    if rest > 0.005 * step:
        names.append("rest")
        seconds["rest"] = rest
    whole = sum(seconds.values())
    rows, start = [], 0.0
    for index, name in enumerate(names):
        length = seconds[name]
        place = f"left:{start / whole:.2%};width:{length / whole:.2%}"
        rows.append(
            f"<div class=call><span class=what><b>{escape(name)}</b> {escape(known.get(name, ''))}</span>"
            f"<span class=lane><span class='bar b{index % 6 + 1}' style='{place}'></span></span>"
            f"<span class=num>{_milliseconds(length)}</span><span class=num>{_share(length / whole)}</span></div>"
        )
        start += length
    first = records[0].get("timing_s/step")
    lead = f"The median of {len(settled)} iterations takes {_milliseconds(whole)}"
    lead += f"; the first one, which compiles, took {duration(first)}." if first and len(records) > _SETTLED else "."
    switch, generate = seconds.get("reshard"), seconds.get("gen")
    if switch is not None and generate:
        lead += f" Switching the actor to its generation layout costs {switch / whole:.1%} of it."
    return f"<p class=lead>{escape(lead)}</p><div class='card gantt'>{''.join(rows)}</div>"


def _share(part: float) -> str:
    return f"{part:.1%}" if part < 0.0095 else f"{part:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


# --- Curves ---


def _ppo(run: Record) -> str:
    def chart(title: str, note: str, *curves: tuple[str, str], stage: str = "ppo", **how: Any) -> str:
        series = [
            Series(label, *run.curve(stage, metric), color=color, style="trend")
            for color, (label, metric) in zip((1, 2, 3), curves, strict=False)
        ]
        return _figure(title, note, Chart(series, xlabel="iteration", **how))

    figures = [
        chart("Entropy", "Nats a token. Towards 0 the policy says always the same.", ("entropy", "actor/entropy")),
        chart("Response length", "Tokens, the end included.", ("mean", "response_length/mean")),
        chart(
            "Cut off by the length limit",
            "Share of responses.",
            ("share", "response_length/clip_ratio"),
            limits=(0, None),
        ),
        chart(
            "Explained variance",
            "How much of the returns the critic foresees; 1 is all.",
            ("critic", "critic/vf_explained_var"),
            limits=(-1.0 if min(run.curve("ppo", "critic/vf_explained_var")[1], default=0.0) < -1 else None, 1.05),
        ),
        chart(
            "KL coefficient",
            "The controller raises it while the KL is above its target.",
            ("beta", "objective/kl_coef"),
        ),
        chart("KL to the old policy", "Nats a token, within an iteration's updates.", ("KL", "actor/ppo_kl")),
        chart("Clipped ratios", "Share of tokens whose gradient PPO cuts.", ("share", "actor/pg_clipfrac")),
        chart("Gradient norms", "Before clipping.", ("actor", "actor/grad_norm"), ("critic", "critic/grad_norm")),
        chart("Throughput", "Tokens a second.", ("tokens/s", "perf/throughput"), limits=(0, None)),
    ]
    figures = [figure for figure in figures if figure]
    return f"<div class=three>{''.join(figures)}</div>" if figures else ""


def _pretraining(run: Record) -> str:
    figures = [
        _figure(
            "SFT loss",
            "Nats a response token.",
            Chart(
                [
                    Series("train", *run.curve("sft", "sft/loss"), 1, "trend"),
                    Series("held out", *run.curve("sft", "sft/eval_loss"), 2, "dots"),
                ],
                xlabel="step",
            ),
        ),
        _figure(
            "Reward model accuracy",
            "Share of pairs ranked as the annotator did; held-out pairs as the rubric does.",
            Chart(
                [
                    Series("train", *run.curve("reward_model", "reward_model/accuracy"), 1, "trend"),
                    Series("held out", *run.curve("reward_model", "reward_model/eval_accuracy"), 2, "dots"),
                ],
                xlabel="step",
                limits=(None, 1.0),
            ),
        ),
        _figure(
            "Reward model loss",
            "Bradley–Terry, nats a pair; log 2 is chance (dashed).",
            Chart(
                [Series("train", *run.curve("reward_model", "reward_model/loss"), 1, "trend")],
                xlabel="step",
                target=math.log(2) if run.curve("reward_model", "reward_model/loss")[1] else None,
            ),
        ),
    ]
    figures = [figure for figure in figures if figure]
    return f"<div class=three>{''.join(figures)}</div>" if figures else ""


def _figure(title: str, note: str, chart: Chart, kind: str = "") -> str:
    drawing = chart.svg(escape(title))
    if not drawing:
        return ""
    drawn = [series for series in chart.series if len(series.finite[0])]
    legend = "".join(
        f"<span class='key k{series.color}'>{escape(series.label)}"
        f"{'' if series.style == 'points' else f' <b>{number(series.trend[-1])}</b>'}</span>"
        for series in drawn
    )
    legend = f"<p class=legend>{legend}</p>" if len(drawn) > 1 else ""
    note = f"<p class=note>{escape(note)}</p>" if note else ""
    return f"<figure class='card {kind}'><h3>{escape(title)}</h3>{note}{legend}{drawing}</figure>"


# --- Files ---


def _files(run: Record) -> str:
    parts = [("config.yaml", run.config), ("environment.txt", run.environment)]
    return "".join(
        f"<details><summary>{name}</summary><pre class=card>{_lines(text.strip())}</pre></details>"
        for name, text in parts
        if text.strip()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jrlhf.report", description="Writes a run's report.html anew.")
    parser.add_argument("run_dir", help="the directory of a run, such as runs/quickstart")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_dir))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
