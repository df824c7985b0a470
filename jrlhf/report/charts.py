"""Charts as inline SVG: their text is text, and their colours are CSS variables of the page.

Matplotlib draws them. It knows no CSS variables, so it draws in marker colours that are replaced afterwards.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from jrlhf.run.console import clean

COLORS = 6  # --c1 ... --c6
_MARKERS = {f"#0102{index:02x}": f"var(--c{index})" for index in range(1, COLORS + 1)} | {
    "#010220": "var(--ink)",
    "#010221": "var(--muted)",
    "#010222": "var(--grid)",
    "#010223": "var(--card)",
}
_INK, _MUTED, _GRID, _CARD = list(_MARKERS)[COLORS:]
_STYLE: Any = {
    **{"svg.fonttype": "none", "font.size": 11, "text.color": _INK},
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _GRID),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _MUTED),
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top"), False),
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.xmargin": 0.02, "axes.ymargin": 0.12},
    **{"grid.linewidth": 0.8, "xtick.major.size": 3, "ytick.major.size": 0},
    **{"lines.linewidth": 1.9, "lines.solid_capstyle": "round", "lines.solid_joinstyle": "round"},
}
_SIZES = {"three": (4.6, 2.3), "four": (3.3, 1.75), "wide": (15.2, 3.4)}  # inches of 72 pixels, by place in the page


@dataclass(frozen=True)
class Series:
    """Points of one colour, 1 to `COLORS`. Points that are not finite are left out.

    style: "line"; "steps", for running totals; "trend", faint points under their running mean; "dots", joined by a thin
    line; "points", with later ones stronger.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 1
    style: str = "line"

    @property
    def finite(self) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.asarray(self.x, float), np.asarray(self.y, float)
        finite = np.isfinite(x) & np.isfinite(y)
        return x[finite], y[finite]

    @property
    def trend(self) -> np.ndarray:
        """The finite values as the line shows them: for "trend" with many points, their running mean."""
        y = self.finite[1]
        return running_mean(y, max(len(y) // 15, 3)) if self.style == "trend" and len(y) >= 20 else y


@dataclass(frozen=True)
class Chart:
    """A figure of the page: title, note and a drawing of series over one axis. `target` is a dashed horizontal line."""

    title: str
    series: Sequence[Series]
    note: str = ""
    xlabel: str = ""
    target: float | None = None
    limits: tuple[float | None, float | None] = (None, None)
    whole: bool = True  # x is a count

    @property
    def drawn(self) -> list[Series]:
        """The series that have points; a chart without any is left out of the page."""
        return [series for series in self.series if len(series.finite[0])]

    def svg(self, place: str = "three") -> Markup:
        """Draws the SVG element for a place of `_SIZES`; screen readers read its title."""
        label = escape(clean(self.title))
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": label}):  # the same bytes every time
            figure = Figure(figsize=_SIZES[place], layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
            axes = figure.add_subplot()
            if self.target is not None:
                axes.axhline(self.target, color=_MUTED, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1.5)
            for series in self.drawn:
                _draw(axes, series, name_end=len(self.series) == 1)
            axes.set_ylim(*self.limits)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=self.whole))
            axes.set_xlabel(self.xlabel)
            return Markup(_render(figure, label))


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of each value with its neighbours, `width` in all; fewer near the ends."""
    window = np.ones(min(width, len(values)))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def number(value: float) -> str:
    """Writes a number as people do: `1,234`, `123`, `12.3`, `1.23`, `0.012`, `1.2e-05`."""
    size = abs(value)
    if not np.isfinite(value) or 0 < size < 1e-4:
        return f"{value:.1e}" if np.isfinite(value) else str(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.2g}"


def _draw(axes: Axes, series: Series, *, name_end: bool) -> None:
    x, y = series.finite
    color = list(_MARKERS)[series.color - 1]
    marker: dict[str, Any] = {"marker": "o"} if len(x) == 1 else {}
    if series.style == "points":
        for alpha, part in zip(np.linspace(0.25, 1.0, 5), np.array_split(np.arange(len(x)), 5), strict=True):
            axes.plot(x[part], y[part], "o", color=color, alpha=alpha, markersize=5, markeredgewidth=0)
        return
    if series.style == "steps":
        axes.plot(x, y, color=color, drawstyle="steps-post", **marker)
    elif series.style == "dots":
        axes.plot(x, y, "-o", color=color, linewidth=1.3, markersize=5, markeredgecolor=_CARD, markeredgewidth=1.0)
    else:
        if series.style == "trend" and len(x) >= 20:
            axes.plot(x, y, color=color, linewidth=1.0, alpha=0.3)
        axes.plot(x, series.trend, color=color, **marker)
    if name_end:
        end = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(number(series.trend[-1]), (x[-1], series.trend[-1]), color=color, fontweight="bold", **end)


def _render(figure: Figure, label: str) -> str:
    """Returns the figure's SVG element alone, as wide as the page allows, in the page's font and colours."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    for marker, variable in _MARKERS.items():
        svg = svg.replace(marker, variable)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r' id="(?![mp][0-9a-f]{8,}")[^"]*"', "", svg)  # only marker shapes and clip paths are referenced
    return svg.replace(">", f"><title>{label}</title>", 1)
