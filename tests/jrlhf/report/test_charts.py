"""Charts: points where they belong, in the page's colours."""

import itertools
import math
import re

import numpy as np
import pytest

from jrlhf.report.charts import COLORS, Chart, Series, number, running_mean


def test_a_chart_draws_its_points_in_their_colours():
    series = [
        Series("a", [1, 2, 3, 4], [0.0, 1.0, math.nan, 3.0], color=1),
        Series("b", [1, 4], [3.0, 0.0], color=2, style="dots"),
    ]
    svg = Chart("a <chart>", series, xlabel="step", target=1.5).svg()
    assert svg.startswith('<svg viewBox="0 0 ') and "<title>a &lt;chart&gt;</title>" in svg and ">step</text>" in svg
    assert "font-family" not in svg and "<style" not in svg and "<metadata" not in svg
    assert [color in svg for color in COLORS] == [True, True, False, False, False, False]
    path = re.search(
        rf'd="M ([\d. ]+?)\s+L ([\d. ]+?)\s+L ([\d. ]+?)\s+" clip-path="[^"]*" style="fill: none; stroke: {COLORS[0]}',
        svg,
    )
    assert path is not None
    points = np.array([[float(number) for number in group.split()] for group in path.groups()])
    assert (points[1, 0] - points[0, 0]) * 2 == pytest.approx(points[2, 0] - points[1, 0])  # x = 1, 2, 4
    assert (points[0, 1] - points[1, 1]) * 2 == pytest.approx(points[1, 1] - points[2, 1])  # y = 0, 1, 3, upwards
    assert svg == Chart("a <chart>", series, xlabel="step", target=1.5).svg()


def test_every_style_draws_any_number_of_points():
    for style, count in itertools.product(("trend", "dots", "points"), (1, 3, 25)):
        chart = Chart("x", [Series("a", range(count), range(count), color=len(COLORS), style=style)])
        assert COLORS[-1] in chart.svg()
    assert not Chart("x", [Series("a", [], []), Series("b", [1.0, 2.0], [math.nan, math.inf])]).drawn
    values = np.random.default_rng(0).standard_normal(30)
    for width in (1, 3, 4, 7, 100):
        before, after = min(width, 30) // 2, min(width, 30) - min(width, 30) // 2
        expected = [values[max(i - before, 0) : i + after].mean() for i in range(30)]
        np.testing.assert_allclose(running_mean(values, width), expected, atol=1e-12)


def test_numbers_are_short():
    texts = {0: "0.00", 1234.5: "1,234", 123.4: "123", 12.34: "12.3", -1.234: "-1.23", 0.1: "0.10", 0.0123: "0.012"}
    texts |= {0.000123: "0.00012", 0.0000123: "1.2e-05", math.nan: "nan", math.inf: "inf"}
    assert {value: number(value) for value in texts} == texts
