"""Held-out prompts: how the answers to them changed while the run went on, and what the measure is made of."""

import math

from jrlhf.report.charts import COLORS, Chart, Series, number
from jrlhf.report.parts import change_cell, figure, grid, lead, number_cell, plain, range_bar, table
from jrlhf.report.record import Record
from jrlhf.run.console import validation_key

_ALL = "all"  # the source that stands for every prompt


def validation(run: Record) -> str:
    """The section of the validations: the measure's curves for all prompts and for each source, then everything else.

    A validation takes place before the iteration that it is recorded with.
    """
    core: dict[tuple[str, str], dict[str, str]] = {}  # (source, measure) -> statistic -> metric
    for key in run.rl_names("val-core/"):
        if found := validation_key(key):
            source, measure, statistic = found
            if statistic == "best@1":  # of a single answer, which is its mean
                continue
            core.setdefault((source, measure), {})[statistic] = key
    sources = sorted(dict.fromkeys(source for source, _ in core), key=lambda source: source != _ALL)
    ordered = sorted(core.items(), key=lambda item: sources.index(item[0][0]))
    figures = [
        _curves(run, _title(source, measure, several=len(sources) > 1), measure, curves)
        for (source, measure), curves in ordered
    ]
    return lead(_told(run, core)) + grid(figures) + _others(run, sources) if any(figures) else ""


def _title(source: str, measure: str, *, several: bool) -> str:
    prompts = source if source != _ALL else "All sources together" if several else "Held-out prompts"
    return f"{prompts}: {measure}"


def _curves(run: Record, title: str, measure: str, curves: dict[str, str]) -> str:
    """Metrics of one source by their statistic."""
    known = sorted(curves.items(), key=lambda item: not item[0].startswith("mean@"))[:COLORS]
    series = [Series(statistic, *run.rl_curve(key), color, "dots") for color, (statistic, key) in enumerate(known, 1)]
    single = f"{known[0][0]}." if len(known) == 1 else ""
    return figure(title, single, Chart(series, xlabel="before iteration"))


def _others(run: Record, sources: list[str]) -> str:
    """What is measured beside: a small chart each, its sources in it."""
    found: dict[str, dict[str, str]] = {}
    for key in run.rl_names("val-aux/"):
        if parsed := validation_key(key, sources):
            source, name, statistic = parsed
            found.setdefault(f"{_words(run, name)}, {statistic}", {})[source] = key
    figures = []
    for title, keys in found.items():
        ordered = sorted(keys.items(), key=lambda item: item[0] != _ALL)[:COLORS]
        series = [Series(source, *run.rl_curve(key), color, "dots") for color, (source, key) in enumerate(ordered, 1)]
        figures.append(figure(title, "", Chart(series, size=(3.3, 1.75), xlabel="")))
    return grid(figures, "four")


def _told(run: Record, core: dict[tuple[str, str], dict[str, str]]) -> str:
    """What the mean over all prompts was at first and in the end, and how to read the statistics."""
    for (source, measure), curves in core.items():
        statistic = next((name for name in curves if name.startswith("mean@")), None)
        if source != _ALL or statistic is None:
            continue
        steps, values = run.rl_curve(curves[statistic])
        finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        count = statistic.removeprefix("mean@")
        told = "" if count == "1" else f"mean@{count}: the mean of {count} answers a prompt; best@{count}: the best. "
        told += "" if measure == "gold" else "Scored by the run's own rewards, on prompts it does not train on. "
        if len(finite) > 1:
            best = max(finite, key=lambda pair: pair[1])
            told += (
                f"Over all prompts {statistic} went from {number(finite[0][1])} before iteration {finite[0][0]:.0f} to "
                f"{number(finite[-1][1])} before iteration {finite[-1][0]:.0f}; "
                f"the best was {number(best[1])}, before iteration {best[0]:.0f}."
            )
        return told
    return ""


def made_of(run: Record) -> str:
    """The section of the measure's items and sources on held-out prompts, and of the gold items' curves in training."""
    names = [key for key in run.rl_names("gold/") if key != "gold/score"]
    figures = [
        figure(_words(run, title), "", Chart([Series(title, *run.rl_curve(key), 2, "trend")], size=(3.3, 1.75)))
        for key in names
        if (title := key.removeprefix("gold/"))
    ]
    return _items(run) + _sources(run) + grid(figures, "four")


def _items(run: Record) -> str:
    before, after = (run.graded(name).get("items") or {} for name in ("before", "after"))
    rows = [(f"<td>{plain(_words(run, name))}</td>", old, after.get(name)) for name, old in before.items()]
    return _compared("item" if run.measure == "gold" else "reward", rows)


def _sources(run: Record) -> str:
    before, after = (run.graded(name).get("sources") or {} for name in ("before", "after"))
    rows = []
    for name, found in before.items():
        size = f" <span class=aside>{found['n']:,} prompts</span>" if "n" in found else ""
        rows.append((f"<td>{plain(name or 'unnamed')}{size}</td>", found.get("mean"), after.get(name, {}).get("mean")))
    return _compared("source", rows)


def _compared(what: str, rows: list[tuple[str, float | None, float | None]]) -> str:
    """A table of (name's cell, before, after); without any `after` one of the values alone."""
    rows = [row for row in rows if row[1] is not None]
    if not rows:
        return ""
    title = (f"{what}, on held-out prompts", "")
    if all(new is None for _, _, new in rows):
        return table([title, ("mean", "num")], [(name, number_cell(old, 3)) for name, old, _ in rows])
    return table(
        [title, ("", "range"), ("before", "num"), ("after", "num"), ("change", "num")],
        [
            (
                name,
                f"<td class=range>{range_bar(old, new)}</td>",
                number_cell(old, 3),
                number_cell(new, 3),
                change_cell(new - old),
            )
            for name, old, new in rows
            if old is not None and new is not None
        ],
    )


def _words(run: Record, name: str) -> str:
    """The rubric's items in words; what a user has named is left as it is."""
    return name.replace("_", " ") if run.measure == "gold" else name
