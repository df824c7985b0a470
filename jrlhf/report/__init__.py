"""The report of a run: one HTML file."""

from jrlhf.report.html import render, write_report
from jrlhf.report.read import read_run
from jrlhf.report.sections import results

__all__ = ["read_run", "render", "results", "write_report"]
