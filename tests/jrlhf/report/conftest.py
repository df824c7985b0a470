"""Reads a page as a browser would, so that tests see what a reader sees."""

from html.parser import HTMLParser

import pytest

from jrlhf.report.charts import Chart


class Page(HTMLParser):
    """Collects tags and text, and checks that every element is closed where it belongs."""

    VOID = ("meta", "br", "img", "link", "input", "wbr")

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "title"):
            self.text += f" {data}"


@pytest.fixture(scope="session")
def page_of():
    """HTML -> its tags and text."""
    return Page


@pytest.fixture(scope="session")
def text_of():
    """HTML -> the text that it shows, with single spaces."""
    return lambda html: " ".join(Page(html).text.split())


@pytest.fixture
def undrawn(monkeypatch):
    """Charts are not drawn, only decided upon: for tests that make many pages."""

    def svg(chart: Chart, label: str) -> str:
        return "<svg></svg>" if any(len(series.finite[0]) for series in chart.series) else ""

    monkeypatch.setattr(Chart, "svg", svg)
