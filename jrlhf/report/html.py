"""Renders a run's report: one self-contained HTML file, from the template `report.html.j2`.

An interrupted run, or one with only some of the stages, gets a report of what it has written.
"""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from jrlhf import __version__
from jrlhf.report import sections, timeline
from jrlhf.report.charts import number
from jrlhf.report.read import GOLD, KL, SCORE, Record, Sample, read_run
from jrlhf.run.contents import REPORT
from jrlhf.run.files import write_atomic
from jrlhf.run.text import clean, clean_lines, decimals

_LONGEST = 1500  # characters of a text that are shown; for a longer one both ends, because the end often matters


def write_report(run_dir: Path | str) -> Path:
    """Writes `report.html` into a run directory, atomically, and returns its path."""
    path = Path(run_dir) / REPORT
    write_atomic(path, render(read_run(run_dir)))
    return path


def render(run: Record) -> str:
    values = {"run": run, "plot": partial(sections.plot, run), "over_kl": partial(sections.over_kl, run)}
    values |= {"sections": sections, "timelines": timeline, "from_0": (0, None), "log2": math.log(2)}
    values |= {"version": __version__, "SCORE": SCORE, "GOLD": GOLD, "KL": KL}
    return _environment().get_template("report.html.j2").render(values).lstrip() + "\n"


@cache
def _environment() -> jinja2.Environment:
    # This page contains texts of models and users. Autoescape prevents that they become HTML; `finalize` removes
    # control characters from every text that is not the template's own markup.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters |= {"filled": _filled, "shorten": _shorten, "decimals": decimals}
    environment.filters["lines"] = lambda text: escape(clean_lines(text))  # keeps line breaks
    environment.filters["number"] = lambda value: "" if value is None else number(float(value))
    return environment


def _filled(samples: list[Sample], keys: list[str]) -> list[str]:
    """Returns the keys for which at least one sample has a value."""
    return [key for key in keys if any(sample.get(key) not in (None, "") for sample in samples)]


def _shorten(value: Any) -> str:
    """Removes the middle of a very long text."""
    text = str(value).strip("\r\n")
    if len(text) <= _LONGEST:
        return text
    left_out = f" […{len(text) - _LONGEST:,} characters…] "
    return text[: _LONGEST // 2] + left_out + text[-_LONGEST // 2 :]
