"""Rewrites a run's report.html: `python -m jrlhf.report runs/quickstart`."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from jrlhf.config.places import local
from jrlhf.errors import UserError, exit_code, parse_options
from jrlhf.report.html import write_report


def cli(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jrlhf.report", description="Writes a run's report.html anew.")
    parser.add_argument("run_dir", help="the directory of a run, such as runs/quickstart")
    return exit_code(partial(_write, parse_options(parser, arguments).run_dir))


def _write(run_dir: str) -> None:
    try:
        print(write_report(local("run_dir", run_dir)))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the report of {run_dir} cannot be made ({reason}): see that it may be written") from error


if __name__ == "__main__":
    sys.exit(cli())
