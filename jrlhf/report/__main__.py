"""Rewrites a run's report.html: `python -m jrlhf.report runs/quickstart`. With --audit it recounts metrics instead."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from jrlhf.config.places import local
from jrlhf.errors import UserError, exit_code, exit_code_of_printing, parse_options
from jrlhf.report.audit import audit
from jrlhf.report.html import write_report


def cli(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jrlhf.report", description="Writes a run's report.html anew.")
    parser.add_argument("run_dir", help="the directory of a run, such as runs/quickstart")
    parser.add_argument(
        "--audit",
        action="store_true",
        help="write nothing, but recount the metrics of an asynchronous run from the records of its rows",
    )
    options = parse_options(parser, arguments)
    if options.audit:
        return exit_code_of_printing(partial(_audit, options.run_dir))
    return exit_code(partial(_write, options.run_dir))


def _audit(run_dir: str) -> None:
    print(*audit(local("run_dir", run_dir)).lines(), sep="\n")


def _write(run_dir: str) -> None:
    try:
        print(write_report(local("run_dir", run_dir)))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the report of {run_dir} cannot be made ({reason}): see that it may be written") from error


if __name__ == "__main__":
    sys.exit(cli())
