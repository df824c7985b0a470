"""The report of a run: one HTML file that needs nothing else, made from what the run wrote.

    python -m jrlhf.report runs/quickstart

writes `report.html` anew. It shows what is there: a run that was interrupted, or that has only some of the stages, gets
a report of that. Everything that comes from files, model outputs above all, is escaped.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jrlhf.errors import UserError, exit_code
from jrlhf.report import cards, constraint, curves, gaming, heldout, plan, rewards, samples, timeline
from jrlhf.report.parts import lines, plain
from jrlhf.report.record import Record, read_run
from jrlhf.report.style import STYLE
from jrlhf.run.files import write_atomic

REPORT = "report.html"


def write_report(run_dir: Path | str) -> Path:
    """Writes `report.html` into a run directory, atomically, and returns its path.

    Raises:
        UserError: the directory holds no run, or one of its files cannot be read.
        OSError: it cannot be written.
    """
    path = Path(run_dir) / REPORT
    write_atomic(path, render(read_run(run_dir)))
    return path


def render(run: Record) -> str:
    """The whole page."""
    gold = run.measure == "gold"
    compared = bool(run.graded("after"))
    score = "Score and KL" if gaming.has_kl(run) else "Score"
    sections = [
        ("outcome", "Outcome", cards.outcome(run)),
        ("reward", "Is the reward being gamed?" if gold else score, gaming.score_and_kl(run)),
        ("constraint", "Reward under a limit on cost", constraint.constraint(run)),
        ("items", f"What the {run.measure_name} is made of", heldout.made_of(run)),
        ("validation", "Validation", heldout.validation(run)),
        ("rewards", "Rewards by name", "" if run.algorithm == "dpo" else rewards.by_name(run)),
        ("samples", "Before and after" if compared else "Samples", samples.samples(run)),
        ("timeline", f"{'A step' if run.algorithm == 'dpo' else 'An iteration'}, call by call", timeline.timeline(run)),
        ("plan", "Where the calls run", plan.plan(run)),
        ("training", run.title, curves.dpo(run) if run.algorithm == "dpo" else curves.reinforcement(run)),
        ("pretraining", f"Before {run.title}" if run.algorithm in run.metrics else "Training", curves.pretraining(run)),
        ("files", "Config and environment", _files(run)),
    ]
    present = [(anchor, title, body) for anchor, title, body in sections if body]
    links = "".join(f'<a href="#{anchor}">{plain(title)}</a>' for anchor, title, _ in present)
    body = "".join(
        f'<section id="{anchor}"><h2>{plain(title)}</h2>{content}</section>' for anchor, title, content in present
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{plain(run.name)} · jrlhf</title><style>{STYLE}</style></head>"
        f"<body><header><p class=brand>jrlhf</p><h1>{plain(run.name)}</h1>{cards.chips(run)}<nav>{links}</nav>"
        f"</header><main>{body}</main></body></html>\n"
    )


def _files(run: Record) -> str:
    parts = [("config.yaml", run.config), ("environment.txt", run.environment)]
    return "".join(
        f"<details><summary>{name}</summary><pre class=card>{lines(content.strip())}</pre></details>"
        for name, content in parts
        if content.strip()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m jrlhf.report", description="Writes a run's report.html anew.")
    parser.add_argument("run_dir", help="the directory of a run, such as runs/quickstart")
    return exit_code(partial(_run, parser.parse_args(arguments).run_dir))


def _run(run_dir: str) -> None:
    try:
        print(write_report(run_dir))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the report of {run_dir} cannot be made ({reason}): see that it may be written") from error
