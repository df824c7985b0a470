"""The figures of the explanations are those of the layouts, and the code beside them runs."""

import re
from pathlib import Path

import pytest

from benchmarks import figures

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["layouts", "switch"])
def test_a_figure_shows_what_the_layouts_say(name: str):
    assert (figures.FOLDER / f"{name}.svg").read_text() == getattr(figures, name)()


@pytest.mark.full
def test_the_timeline_is_that_of_the_plan(tmp_path: Path):
    """Its words and seconds; the lines of a picture differ between versions of Matplotlib."""
    figures.timeline(tmp_path / "plan.svg")
    drawn, shown = (
        re.findall(r"<text[^>]*>([^<]+)</text>", (folder / "plan.svg").read_text())
        for folder in (tmp_path, figures.FOLDER)
    )
    assert drawn == shown and "seconds" in drawn


def test_the_example_of_layouts_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "layouts.md").read_text(), re.DOTALL)
    exec(re.sub(r"^jax\.config\.update.*\n", "", code, flags=re.MULTILINE), {})  # this process has its devices already
