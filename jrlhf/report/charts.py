"""Charts as inline SVG that follows the page: text is text, and every colour is a CSS variable of the page.

Matplotlib draws them. It knows no CSS variables, so it draws in marker colours that are replaced afterwards.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

COLORS = 6  # --c1 ... --c6
_MARKERS = {f"#0102{index:02x}": f"var(--c{index})" for index in range(1, COLORS + 1)} | {
    "#010220": "var(--ink)",
    "#010221": "var(--muted)",
    "#010222": "var(--grid)",
    "#010223": "var(--card)",
}
_INK, _MUTED, _GRID, _CARD = list(_MARKERS)[COLORS:]
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "axes.ymargin": 0.12,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": _INK,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


@dataclass(frozen=True)
class Series:
    """Points of one colour, 1 to `COLORS`. Points that are not finite are left out.

    style: "line"; "steps", what has come together so far; "trend", the points faint under their running mean; "dots",
    joined by a thin line; "points", the later ones stronger.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 1
    style: str = "line"

    @property
    def finite(self) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.asarray(self.x, float), np.asarray(self.y, float)
        kept = np.isfinite(x) & np.isfinite(y)
        return x[kept], y[kept]

    @property
    def trend(self) -> np.ndarray:
        """The finite values as the line shows them: under "trend" their running mean, where they are many."""
        y = self.finite[1]
        return running_mean(y, max(len(y) // 15, 3)) if self.style == "trend" and len(y) >= 20 else y


@dataclass(frozen=True)
class Chart:
    """A chart of series over one axis. `target` is a dashed horizontal line."""

    series: Sequence[Series]
    xlabel: str = ""
    target: float | None = None
    size: tuple[float, float] = (4.6, 2.3)  # inches: 72 pixels each, where the page gives it that width
    limits: tuple[float | None, float | None] = field(default=(None, None))
    whole: bool = True  # x counts something

    def svg(self, label: str) -> str:
        """The drawing; nothing where there is nothing to draw. `label` is read to those who do not see it."""
        if not any(len(series.finite[0]) for series in self.series):
            return ""
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": label}):
            figure = Figure(figsize=self.size, layout=_margins())
            axes = figure.add_subplot()
            if self.target is not None:
                axes.axhline(self.target, color=_MUTED, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1.5)
            for series in self.series:
                _draw(axes, series, name_end=len(self.series) == 1)
            axes.set_ylim(*self.limits)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=self.whole))
            axes.set_xlabel(self.xlabel)
            return _render(figure, label)


def _margins() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02)


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of each value and its neighbours, `width` in all; near the ends, of those that are there."""
    width = min(width, len(values))
    before, after = width // 2, width - width // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    start = np.maximum(np.arange(len(values)) - before, 0)
    end = np.minimum(np.arange(len(values)) + after, len(values))
    return (total[end] - total[start]) / (end - start)


def number(value: float) -> str:
    """A number as people write it: `1,234`, `123`, `12.3`, `1.23`, `0.012`, `1.2e-05`."""
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
    if not len(x):
        return
    color = list(_MARKERS)[series.color - 1]
    if series.style == "points":
        for alpha, part in zip(np.linspace(0.25, 1.0, 5), np.array_split(np.arange(len(x)), 5), strict=True):
            axes.plot(x[part], y[part], "o", color=color, alpha=alpha, markersize=5, markeredgewidth=0)
        return
    if series.style == "steps":
        axes.plot(x, y, color=color, drawstyle="steps-post", marker="o" if len(x) == 1 else None)
    elif series.style == "dots":
        axes.plot(x, y, "-o", color=color, linewidth=1.3, markersize=5, markeredgecolor=_CARD, markeredgewidth=1.0)
    elif series.style == "trend" and len(x) >= 20:
        axes.plot(x, y, color=color, linewidth=1.0, alpha=0.3)
        axes.plot(x, series.trend, color=color)
    else:
        axes.plot(x, y, color=color, marker="o" if len(x) == 1 else None)
    if name_end:
        axes.annotate(
            number(series.trend[-1]),
            (x[-1], series.trend[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def _render(figure: Figure, label: str) -> str:
    """The figure's SVG element alone: as wide as the page lets it, in the page's font and colours."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    for marker, variable in _MARKERS.items():
        svg = svg.replace(marker, variable)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r' id="(?![mp][0-9a-f]{8,}")[^"]*"', "", svg)  # only marker shapes and clip paths are referred to
    return svg.replace(">", f"><title>{label}</title>", 1)
