"""Computes the sections of the report as plain data, which `report.html.j2` shows."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from jrlhf.report.charts import COLORS, Chart, Series, number
from jrlhf.report.read import FAILURES, GOLD, KL, REWARD_KINDS, SCORE, STAGES, Curve, Named, Record, Sample
from jrlhf.run.console import validation_key
from jrlhf.run.contents import best_step
from jrlhf.run.text import decimals, duration

_UNSET = ("", "0", "null")  # values of a setting that is not used
_ALL = "all"  # the source name of a validation for all prompts together
_LATEST = 12  # number of samples shown of training and of validation
OWN_ANSWERS = "A validation draws answers of its own: it differs by chance from the result before and after training."
Row = tuple[str, int | str | None, Any, Any]  # name, number of held-out prompts or meaning, results before and after
Part = tuple[str, list[Chart], list[Chart]]  # text, charts, small charts


class Figure(NamedTuple):
    """A main result of the run. With two values, they are those before and after the algorithm."""

    title: str
    values: Sequence[str]
    note: str


def plot(run: Record, title: str, note: str, *curves: Sequence[Any], stage: str | None = None, **options: Any) -> Chart:
    """Draws metrics. curves: (label, metric, color, style); by default the color of their position, and a trend."""
    series = [
        Series(label, *run.curve(metric, stage), *(look or [position]))
        for position, (label, metric, *look) in enumerate(curves, start=1)
    ]
    return Chart(title, series, note, **{"xlabel": "iteration" if stage is None else "step", **options})


# --- Head and outcome ---


def chips(run: Record) -> list[str]:
    """Describes the run in a few words each."""

    def setting(key: str) -> str:
        return "" if run.settings.get(key) in _UNSET else run.settings.get(key, "")

    words = ["finished" if run.summary else ""]
    begun = [stage for stage in ("sft", "reward_model", run.algorithm) if run.metrics.get(stage)]
    if begun and not run.summary:
        last = begun[-1]
        total = run.setting(f"{last}.iterations" if last == run.algorithm else f"{last}.steps")
        words.append(f"unfinished: {last} {run.metrics[last][-1]['step']}" + (f" of {total:.0f}" if total else ""))
    words.append(" → ".join(STAGES.get(stage, stage) for stage in run.metrics))
    path, rank, adapter, base = map(setting, ("model.path", "lora.rank", "lora.path", "lora.base"))
    words.append(PurePosixPath(path).name or path)
    if rank:
        alpha = run.setting("lora.alpha")
        words.append(f"LoRA rank {rank}" + (f", alpha {alpha:g}" if alpha else ""))
    elif adapter:
        words.append(f"LoRA from {PurePosixPath(adapter).name or adapter}")
    words.append(f"{base} base" if (rank or adapter) and base not in ("", "auto") else "")
    words.append("wall clock: no run repeats" if setting(f"{run.algorithm}.asynchronous.clock") == "wall" else "")
    words += [f"{name.replace('_', ' ')} {duration(length)}" for name, length in run.seconds.items()]
    return [word for word in words if word]


def failures(run: Record) -> dict[str, Any] | None:
    """Returns a warning if reward or cost functions failed."""
    totals: dict[Named, Counter[str]] = {}
    steps = set[int]()
    for named, rest, key in run.named_metrics():
        if rest.startswith(FAILURES):
            for record in run.iterations:
                if count := round(record.get(key) or 0):
                    totals.setdefault(named, Counter())[rest.removeprefix(FAILURES)] += count
                    steps.add(record["step"])
    if not totals:
        return None
    total = sum(count.total() for count in totals.values())
    kinds = " and ".join(word for kind, word in REWARD_KINDS.items() if any(kind == other for other, _ in totals))
    logs = ", ".join(f"{REWARD_KINDS[kind]}-{name}.log" for kind, name in totals)
    return {
        "title": f"{kinds.capitalize()} functions failed on {total:,} sample{'s' * (total != 1)}",
        "lines": [("cost " * (kind == "costs"), name, count.most_common()) for (kind, name), count in totals.items()],
        "note": f"in {len(steps)} of {len(run.iterations)} iterations, the last time in iteration {max(steps)}. Each "
        "of these samples was given the score that the config names for failures, which says nothing about the answer. "
        f"What the functions printed is in {logs}.",
    }


def skipped(run: Record) -> dict[str, Any] | None:
    """Returns a warning if updates were skipped."""
    suffix, lines, steps = "/skipped_updates", [], Counter[str]()
    for stage, records in run.metrics.items():
        for role in dict.fromkeys(key.removesuffix(suffix) for record in records for key in record if suffix in key):
            counts = [round(record.get(role + suffix) or 0) for record in records]
            nonfinite = round(sum(record.get(f"{role}/nonfinite_updates") or 0 for record in records))
            if total := sum(counts):
                lines.append((f"{stage} ", role, [("skipped", total), ("not finite", nonfinite)]))
                steps[stage] = max(
                    steps[stage], *(r["step"] for r, count in zip(records, counts, strict=True) if count)
                )
    if not lines:
        return None
    last = ", ".join(f"{stage} {step}" for stage, step in steps.items())
    return {
        "title": "Updates were skipped",
        "lines": lines,
        "note": "They changed no weight, because a loss, a gradient or a weight was not finite, or no token "
        f"counted. The last time: step {last}.",
    }


def doubts(run: Record) -> dict[str, Any] | None:
    """Returns a warning if the answers to held-out prompts say other things than their mean score."""
    if not (texts := run.held_out.get("doubts")):
        return None
    return {
        "title": "Read the answers before you trust the score",
        "texts": texts,
        "note": "A mean can rise while the answers get worse: they are below, under samples.",
    }


def figures(run: Record) -> Iterator[Figure]:
    """Yields the main results of the run."""
    old, new = run.both(run.measure)
    prompts = f" on {run.held_out['n']} held-out prompts" if "n" in run.held_out else ""
    own = "" if run.measure == "gold" else "; the run's own rewards"
    own += f", which {run.title} optimises on other prompts" if own and run.curve(SCORE)[1] else ""
    if old is not None:
        first, last = map(with_error, (old, new or 0.0), run.both(f"{run.measure}_standard_error"))
        difference, error = run.held_out.get("difference"), run.held_out.get("standard_error") or 0.0
        change = "" if difference is None else f"; {decimals(difference, '+.3f')} ± {decimals(error)}"
        if difference is not None and error:  # beyond 20 the error itself is too uncertain
            ratio = difference / error
            change += f", {ratio:.1f} standard errors" if abs(ratio) <= 20 else ", more than 20 standard errors"
        note = first if new is None else f"{first} before, {last} after {run.title}{change}"
        yield Figure(
            f"{run.measure_name.capitalize()}, held out",
            [number(value) for value in (old, new) if value is not None],
            note + prompts + own,
        )
    losses = _finite(run.curve("sft/eval_loss", "sft"))
    if losses and not run.trained:
        best, last = number(min(losses)), number(losses[-1])
        note = f"nats per response token, {math.exp(min(losses[-1], 700.0)):.3g} in perplexity"
        yield Figure("SFT loss, held out", [last], note + (f"; it was {best} at best" if best != last else ""))
    yield from accuracy(run, "reward_model", "Reward model", "right about")
    yield from accuracy(run, "dpo", "Preferences", "the policy prefers the better of")
    if best := run.summary.get("best"):
        note = f"of {best['stage']}, which ended with them: the best by {best['metric']}={best['value']:.4g}"
        yield Figure("Weights", [f"step {best['step']}"], note)
    old, new = run.both("cost")
    limit, target = run.algorithm_setting("cost_limit"), run.algorithm_setting("kl_target")
    bound = "" if limit is None else f"; the limit is {limit:g}"
    if old is not None and new is not None:
        note = f"{with_error(new, run.both('cost_standard_error')[1])} after {run.title}"
        yield Figure("Cost, held out", [number(old), number(new)], note + bound)
    averages = [("Score in training", SCORE, ""), ("Cost in training", "cost/mean", bound)]
    for title, metric, note in averages:
        if (mean := _last_quarter(run, metric)) is not None:
            yield Figure(title, [number(mean)], f"mean of the last quarter{note}")
    if (kl := _last_quarter(run, KL)) is not None:
        note = f"; the target is {target:g} ({kl / target - 1:+.0%})" if target else ""
        yield Figure("KL to the reference", [number(kl)], f"nats per response, mean of the last quarter{note}")
    old, new = run.both("distinct")
    if old and new:
        note = f"{new} distinct held-out responses, {old} before {run.title}"
        yield Figure("Variety kept", [f"{new / old:.0%}"], note)


def results(run: Record) -> Iterator[Figure]:
    """Yields the main results, and the items of the measure."""
    yield from figures(run)
    parts = items(run)
    for name, _, *values in parts if len(parts) > 1 else ():
        yield Figure(name, [decimals(value) for value in values if value is not None], "held out")


def accuracy(run: Record, stage: str, title: str, verdict: str) -> Iterator[Figure]:
    """Yields the accuracy on held-out pairs at the end of a stage, if it was measured."""
    steps, values = run.curve(f"{stage}/eval_accuracy", stage)
    end = best_step(run.summary, stage)
    if accuracies := _finite((steps, [value for at, value in zip(steps, values, strict=True) if at <= (end or at)])):
        share, pairs = accuracies[-1], (_finite(run.curve(f"{stage}/eval_pairs", stage)) or [0.0])[-1]
        error = f" ± {math.sqrt(share * (1 - share) / pairs):.1%}" if pairs else ""
        count = f"{pairs:,.0f} " if pairs else ""
        yield Figure(title, [f"{share:.1%}"], f"{verdict} {share:.1%}{error} of {count}held-out pairs")


def _finite(curve: Curve) -> list[float]:
    return [value for value in curve[1] if math.isfinite(value)]


def with_error(value: float, error: float | None) -> str:
    """Writes `0.703 ± 0.010`, or `0.703` if the error is not known."""
    return decimals(value) if error is None else f"{decimals(value)} ± {decimals(error)}"


def _last_quarter(run: Record, metric: str) -> float | None:
    values = _finite(run.curve(metric))
    return float(np.mean(values[-max(len(values) // 4, 1) :])) if values else None


# --- The score, the KL that it costs, and whether the reward is being gamed ---


def over_kl(run: Record, title: str, note: str, curves: dict[str, str], shares: bool = False, **options: Any) -> Chart:
    """Draws metrics over the KL, for iterations that have all of them; without points if there are fewer than four.

    shares: draws changes since the start, as shares of the largest change.
    """
    keys = (KL, *curves.values())
    rows = [[record[k] for k in keys] for record in run.iterations if all(record.get(k) is not None for k in keys)]
    kl, *values = np.array(rows if len(rows) >= 4 else []).reshape(-1, len(keys)).T
    if shares and len(kl):
        changes = [curve - curve[: max(len(curve) // 20, 1)].mean() for curve in values]
        values = [change / max(np.abs(change).max(), 1e-12) for change in changes]
    series = [
        Series(label, kl.tolist(), curve.tolist(), color, "points")
        for color, (label, curve) in enumerate(zip(curves, values, strict=True), 1)
    ]
    return Chart(title, series, note, xlabel="KL to the reference", whole=False, **options)


def verdict(run: Record) -> str:
    """Compares the last quarter of the iterations with the first, and with the quarter of the best gold score."""
    pairs = zip(run.curve(SCORE)[1], run.curve(GOLD)[1], strict=False)
    both = np.array([pair for pair in pairs if np.isfinite(pair).all()])
    if len(both) < 8:
        return ""
    quarters = np.array_split(both, 4)
    rewards, golds = np.array([quarter.mean(0) for quarter in quarters]).T
    errors = [float(quarter[:, 1].std() / math.sqrt(len(quarter))) for quarter in quarters]
    best = int(np.argmax(golds))
    fall, gain, rise = golds[best] - golds[3], golds[3] - golds[0], rewards[3] - rewards[0]
    if fall > 2 * math.hypot(errors[best], errors[3]):
        if rewards[3] < rewards[best]:
            return (
                f"The gold score fell by {decimals(fall)} from its best quarter, and the reward model's score with it."
            )
        when = ("first", "second", "third")[best]
        tie = "raise the KL coefficient" if run.curve(KL)[1] else "give the policy a KL coefficient"
        return (
            f"The reward is being gamed: after the {when} quarter the reward model's score still rose, while the gold "
            f"score fell by {decimals(fall)}. Stop earlier, {tie}, or train a better reward model."
        )
    if rise > 0 and gain > 0:
        return (
            f"From the first to the last quarter the reward model's score rose by {decimals(rise, '.2f')} and the gold "
            f"score by {decimals(gain)}: they rise together, and nothing suggests that the reward is gamed."
        )
    changes = f"{decimals(rise, '+.2f')}, gold by {decimals(gain, '+.3f')}"
    return f"From the first to the last quarter the reward model's score changed by {changes}."


# --- Held-out prompts ---


def words(run: Record, name: str) -> str:
    """Returns a rubric item in words; a user's name unchanged."""
    return name.replace("_", " ") if run.measure == "gold" else name


def items(run: Record) -> list[Row]:
    """Returns the parts of the measure; those of the rubric with their weights and what they ask for."""
    old, new = (value or {} for value in run.both("items"))
    meanings = {}
    if run.measure == "gold":
        from jrlhf.tasks.docstrings.rubric import ITEMS

        meanings = {name: f"weight {weight:g}: {text}" for name, (weight, text) in ITEMS.items()}
    return _compared([(words(run, name), meanings.get(name), value, new.get(name)) for name, value in old.items()])


def sources(run: Record) -> list[Row]:
    """Returns the measure for the prompts of each source."""
    old, new = (value or {} for value in run.both("sources"))
    means = [(name or "unnamed", one, new.get(name, {})) for name, one in old.items()]
    return _compared([(name, one.get("n"), one.get("mean"), after.get("mean")) for name, one, after in means])


def _compared(rows: list[Row]) -> list[Row]:
    """Returns the rows that have both results, or else those that have the first."""
    rows = [row for row in rows if row[2] is not None]
    return [row for row in rows if row[3] is not None] or rows


def gold_items(run: Record) -> list[Chart]:
    """Returns curves of the rubric's items in training."""
    names = {key: key.removeprefix("gold/") for key in run.names("gold/") if key != GOLD}
    return [Chart(words(run, name), [Series(name, *run.curve(key), 2)]) for key, name in names.items()]


def validation(run: Record) -> Part:
    """Returns curves of the measure for all prompts and for each source, then small ones of all other measurements.

    A validation takes place before the iteration that it is recorded with.
    """
    core: dict[tuple[str, str], dict[str, str]] = {}  # (source, measure) -> statistic -> metric
    for key in run.names("val-core/"):
        parsed = validation_key(key)
        if parsed is not None and parsed[2] != "best@1":  # the best of a single answer is its mean
            core.setdefault(parsed[:2], {})[parsed[2]] = key
    sources = sorted(dict.fromkeys(source for source, _ in core), key=lambda source: source != _ALL)
    others: dict[str, dict[str, str]] = {}  # title -> source -> metric
    for key in run.names("val-aux/"):
        if parsed := validation_key(key, sources):
            others.setdefault(f"{words(run, parsed[1])}, {parsed[2]}", {})[parsed[0]] = key

    def dots(curves: dict[str, str]) -> list[Series]:
        """Orders the curves: means before other statistics, all prompts before those of one source."""
        labels = sorted(curves, key=lambda label: label != _ALL and not label.startswith("mean@"))[: len(COLORS)]
        return [Series(label, *run.curve(curves[label]), color, "dots") for color, label in enumerate(labels, 1)]

    charts = []
    for (source, measure), curves in sorted(core.items(), key=lambda item: sources.index(item[0][0])):
        prompts = source if source != _ALL else "All sources together" if len(sources) > 1 else "Held-out prompts"
        series = dots(curves)
        note = f"{series[0].label}." if len(series) == 1 else ""
        charts.append(Chart(f"{prompts}: {measure}", series, note, xlabel="before iteration"))
    counts = {name.partition("@")[2] for curves in core.values() for name in curves} - {"1"}
    text = "".join(f"mean@{n}: the mean of {n} answers per prompt; best@{n}: the best. " for n in sorted(counts))
    text += "Scored by the run's own rewards, on prompts it does not train on. " if run.measure != "gold" else ""
    return (
        text + OWN_ANSWERS if charts else "",
        charts,
        [Chart(title, dots(curves)) for title, curves in others.items()],
    )


def rewards(run: Record) -> Part:
    """Returns charts of rewards and costs by name; none if they equal the curves of score and cost."""
    names = {kind: run.reward_names(kind) for kind in REWARD_KINDS}
    extras = [
        (f"{_title(*named)}: {rest}", key)
        for named, rest, key in run.named_metrics()
        if rest not in ("mean", "std", "failures") and not rest.startswith(FAILURES)
    ]
    scores = {key: key.removeprefix("score/").replace("_", " ").replace("/", " ") for key in run.names("score/")}
    scores = {} if list(scores) == ["score/raw/mean"] else scores  # the raw score alone is the score
    few = len(names["rewards"]) < (2 if run.measure == "gold" else 1) and len(names["costs"]) < 2
    if run.algorithm == "dpo" or (few and not extras and not scores):
        return "", [], []
    charts, note = [], "Mean of an iteration's responses, and their spread around it."
    for kind, name in [(kind, name) for kind, of_kind in names.items() for name in of_kind]:
        curves = ("mean", f"{kind}/{name}/mean"), ("standard deviation", f"{kind}/{name}/std", 3)
        charts.append(plot(run, _title(kind, name), note, *curves))
    small = [plot(run, title, "", (title, key, 2), xlabel="") for title, key in extras]
    small += [plot(run, f"score: {name}", "", (name, key, 4), xlabel="") for key, name in scores.items()]
    lead = f"Each reward before weights and shaping; the score that {run.title} sees is their weighted sum, shaped."
    lead += " So it is with the costs, which are not shaped." if names["costs"] else ""
    return lead if names["rewards"] else "", charts, small


def _title(kind: str, name: str) -> str:
    return name if kind == "rewards" else f"{REWARD_KINDS[kind]} {name}"


def samples(run: Record) -> tuple[str, list[tuple[str, list[Sample]]]]:
    """Returns a text and groups (title, samples): answers to held-out prompts, the latest of training and validation.

    If there are more than ten answers, those with the largest changes form groups; without changes, those with the
    lowest and the highest scores.
    """
    answers = [sample for sample in run.samples if sample.get("stage") == "evaluation" and "before" in sample]
    compared = [sample for sample in answers if "after" in sample]
    name, old, new = run.measure_name, f"{run.measure}_before", f"{run.measure}_after"

    def gain(sample: Sample) -> float:
        after, before = sample.get(new) if compared else 0.0, sample.get(old)
        change = 0.0 if after is None or before is None else after - before
        return change if compared else -change

    ranked = sorted(compared or [sample for sample in answers if sample.get(old) is not None], key=gain)
    low, high = (ranked[:6], ranked[::-1][:6]) if len(answers) > 10 else ([], [])
    if compared:
        better, worse = sum(gain(sample) > 1e-9 for sample in ranked), sum(gain(sample) < -1e-9 for sample in ranked)
        text = (
            f"Of {len(compared)} held-out prompts {better} are answered better after {run.title} than before by the "
            f"{name}, {worse} worse and {len(compared) - better - worse} alike."
        )
        low, high = [one for one in low if gain(one) < 0], [one for one in high if gain(one) > 0]
        extremes = [(f"Where the {name} fell most", low), ("Where it rose most", high)]
    else:  # a run that compares nothing
        text = f"Answers to {len(answers)} held-out prompts." if answers else ""
        extremes = [(f"With the lowest {name}", low), ("With the highest", high)]
    groups = [("The first prompts", (compared or answers)[:10]), *extremes]
    responses = [sample for sample in run.samples if "response" in sample]
    of_validation = [sample for sample in responses if sample.get("kind") == "validation"]
    of_training = [sample for sample in responses if sample.get("kind") != "validation"]
    groups += [("Latest samples of validation", of_validation[-_LATEST:])]
    groups += [("Latest samples of training", of_training[-_LATEST:])]
    return text, [group for group in groups if group[1]]
