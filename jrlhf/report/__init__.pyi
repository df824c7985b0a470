from jrlhf.report.html import render as render
from jrlhf.report.html import write_report as write_report
from jrlhf.report.read import read_run as read_run
from jrlhf.report.sections import results as results
