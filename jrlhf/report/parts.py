"""The parts that the rooms of the report are furnished with: cards, figures, tables, texts. All of them escape."""

import re
from collections.abc import Sequence
from html import escape

from jrlhf.report.charts import Chart, number
from jrlhf.run.console import clean

_SHOWN = 1500  # characters of a text; of a longer one both ends, for what answers end with is often what counts


def plain(value: str) -> str:
    """Text for any place of the page, on one line: escaped, and without what could command a terminal."""
    return escape(clean(value))


def card(title: str, value: str, note: str) -> str:
    return f"<div class=card><h3>{plain(title)}</h3><p class=big>{value}</p><p class=note>{plain(note)}</p></div>"


def figure(title: str, note: str, chart: Chart, kind: str = "") -> str:
    """A chart with its title and, where several series are drawn, a legend; nothing where there is nothing to draw."""
    drawing = chart.svg(plain(title))
    if not drawing:
        return ""
    drawn = [series for series in chart.series if len(series.finite[0])]
    legend = "".join(
        f"<span class='key k{series.color}'>{plain(series.label)}"
        f"{'' if series.style in ('points', 'steps') else f' <b>{number(series.trend[-1])}</b>'}</span>"
        for series in drawn
    )
    legend = f"<p class=legend>{legend}</p>" if len(drawn) > 1 else ""
    return f"<figure class='card {kind}'><h3>{plain(title)}</h3>{_note(note)}{legend}{drawing}</figure>"


def grid(figures: Sequence[str], columns: str = "three") -> str:
    """Figures side by side; nothing where all are empty."""
    drawn = "".join(figures)
    return f"<div class={columns}>{drawn}</div>" if drawn else ""


def lead(sentence: str) -> str:
    return f"<p class=lead>{plain(sentence)}</p>" if sentence else ""


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """columns: (heading, class) each. rows: cells, complete with their `<td>`."""
    head = "".join(f"<th{f' class={name}' if name else ''}>{plain(title)}</th>" for title, name in columns)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    opening = f"<table class={kind}>" if kind else "<table>"
    return f"<div class='card scroll'>{opening}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def number_cell(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "<td class=num></td>"
    return f"<td class=num>{number(float(value)) if digits is None else f'{value:.{digits}f}'}</td>"


def change_cell(difference: float, digits: int = 3) -> str:
    kind = "up" if difference > 0.5 * 10**-digits else "down" if difference < -0.5 * 10**-digits else "same"
    return f"<td class='num {kind}'>{difference:+.{digits}f}</td>"


def range_bar(old: float, new: float) -> str:
    """A bar from the old value to the new one, a tick at the old; from 0 to 1, or as far as the values go."""
    low, high = min(0.0, old, new), max(1.0, old, new)
    old, new = (old - low) / (high - low), (new - low) / (high - low)
    kind = "up" if new >= old else "down"
    return (
        f"<div class=track><div class='span {kind}' style='left:{min(old, new):.1%};width:{abs(new - old):.1%}'></div>"
        f"<div class=tick style='left:{old:.1%}'></div></div>"
    )


def lane(name: str, what: str, start: float, width: float, color: int, *figures: str) -> str:
    """A row of bars one below the other: its name, what it is, the bar, and two figures.

    start, width: of the bar, as shares of the lane.
    """
    place = f"left:{start:.2%};width:{width:.2%}"
    return (
        f"<div class=call><span class=what><b>{plain(name)}</b> {plain(what)}</span>"
        f"<span class=lane><span class='bar b{color}' style='{place}'></span></span>"
        f"{''.join(f'<span class=num>{figure}</span>' for figure in figures)}</div>"
    )


def text_cell(value: object, kind: str = "") -> str:
    """Text of a model or a file, safe to show, with its line breaks; the middle of a very long one is left out.

    kind: "" or a class, "code" or "aside".
    """
    shown = str(value).strip("\r\n")
    if len(shown) > _SHOWN:
        left_out = f" […{len(shown) - _SHOWN:,} characters…] "
        shown = shown[: _SHOWN // 2] + left_out + shown[-_SHOWN // 2 :]
    return f"<td{f' class={kind}' if kind else ''}><div class=text>{lines(shown)}</div></td>"


def lines(value: str) -> str:
    return "\n".join(plain(line) for line in re.split(r"\r\n|\r|\n", value))


def _note(note: str) -> str:
    return f"<p class=note>{plain(note)}</p>" if note else ""
