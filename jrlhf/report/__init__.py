"""The report of a run: a page in one HTML file.

record.py reads what the run wrote; cards, gaming, constraint, heldout, rewards, samples, timeline, plan and curves make
a section each; page.py puts them together; charts.py draws, parts.py lays out, style.py colours.
"""

from jrlhf.report.page import render, write_report
from jrlhf.report.record import read_run

__all__ = ["read_run", "render", "write_report"]
