"""Draws charts with Matplotlib, as inline SVG with real text, or as PNG."""

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
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from jrlhf.run.text import clean

COLORS = "#2f6fed", "#e07a1f", "#0f9d7a", "#8b5cf6", "#e23d6d", "#0e93b8"
_INK, _MUTED, _GRID = "#14171c", "#667085", "#e4e7ec"
_STYLE: Any = {
    **{"svg.fonttype": "none", "font.family": ["DejaVu Sans"], "font.size": 11, "text.color": _INK},
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _GRID),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _MUTED),
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top"), False),
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.xmargin": 0.02, "axes.ymargin": 0.12},
    **{"grid.linewidth": 0.8, "xtick.major.size": 3, "ytick.major.size": 0},
}


@dataclass(frozen=True)
class Series:
    """Points of one colour, 1 for the first of `COLORS`. Points that are not finite are left out.

    style: "trend": a line; with many points, their running mean over faint points. "dots": joined by a thin line.
    "points": later points are darker.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 1
    style: str = "trend"

    @property
    def css(self) -> str:
        return COLORS[(self.color - 1) % len(COLORS)]

    @property
    def finite(self) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.asarray(self.x, float), np.asarray(self.y, float)
        finite = np.isfinite(x) & np.isfinite(y)
        return x[finite], y[finite]

    @property
    def trend(self) -> np.ndarray:
        """The values of the drawn line: the finite values, or for "trend" with many points their running mean."""
        y = self.finite[1]
        return running_mean(y, max(len(y) // 15, 3)) if self.smoothed else y

    @property
    def smoothed(self) -> bool:
        return self.style == "trend" and len(self.finite[1]) >= 20


@dataclass(frozen=True)
class Chart:
    """A figure of the page: title, note and series over one axis. `target` is a dashed horizontal line."""

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

    def svg(self, small: bool = False) -> Markup:
        """Draws the SVG element; screen readers read its title."""
        label = escape(clean(self.title))
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": label}):  # the same bytes every time
            return Markup(_inline(self._figure((3.3, 1.75) if small else (4.6, 2.3)), label))

    def png(self) -> bytes:
        """Draws the chart with its title as PNG; equal charts have equal bytes."""
        file = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            figure = self._figure((6.4, 3.2))
            figure.axes[0].set_title(self.title, loc="left")
            figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
        return file.getvalue()

    def _figure(self, inches: tuple[float, float]) -> Figure:
        figure = Figure(figsize=inches, layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
        axes = figure.add_subplot()
        if self.target is not None:
            axes.axhline(self.target, color=_MUTED, linewidth=1.1, linestyle="--", zorder=1.5)
        for series in self.drawn:
            _draw(axes, series, name_end=len(self.series) == 1)
        axes.set_ylim(*self.limits)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=self.whole))
        axes.set_xlabel(self.xlabel)
        return figure


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of each value and its neighbours, `width` values in total; fewer near the ends."""
    window = np.ones(min(width, len(values)))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def number(value: float) -> str:
    """Formats a number for readers: `1,234`, `123`, `12.3`, `1.23`, `0.012`, `1.2e-05`."""
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
    color, dots = series.css, series.style == "dots"
    if series.style == "points":
        later_stronger = [to_rgba(color, alpha) for alpha in np.linspace(0.25, 1.0, len(x))]
        axes.scatter(x, y, s=25, color=later_stronger, linewidths=0)
        return
    if series.smoothed:
        axes.plot(x, y, color=color, linewidth=1.0, alpha=0.3)
    marker = "o" if dots or len(x) == 1 else None
    axes.plot(x, series.trend, color=color, marker=marker, markersize=5, linewidth=1.3 if dots else 1.9)
    if name_end:
        end = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(number(series.trend[-1]), (x[-1], series.trend[-1]), color=color, fontweight="bold", **end)


def _inline(figure: Figure, label: str) -> str:
    """Returns the figure's SVG element alone, as wide as the page allows and in the page's font."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if f"#{match[1]}" in svg else "", svg)
    return svg.replace(">", f"><title>{label}</title>", 1)
