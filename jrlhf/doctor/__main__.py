"""`python -m jrlhf.doctor [--json]`: whether this machine is set up for runs; each finding with its remedy."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from jrlhf.doctor.checks import diagnose
from jrlhf.errors import DONE, FAILED, UserError, exit_code_of_printing, parse_options, printable


def cli(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 without a problem, else 1."""
    parser = argparse.ArgumentParser(prog="python -m jrlhf.doctor", description="Is this machine set up for runs?")
    parser.add_argument("--json", action="store_true", help="print a JSON object, for programs and for bug reports")
    parser.add_argument(
        "--run-dir", default="runs", help="where runs are to be written, a path, s3:// or gs://; default: runs"
    )
    options, findings = parse_options(parser, arguments), []

    def run() -> None:
        if not options.run_dir:
            raise UserError("--run-dir is empty: name a place, or leave it out")
        findings.extend(diagnose(options.run_dir))
        if options.json:
            print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
            return
        for one in findings:
            remedy = f"; {one.remedy}" if one.remedy else ""
            print(printable(f"{one.state:<8} {one.part:<13} {one.text}{remedy}"))

    return exit_code_of_printing(run) or (FAILED if any(one.state == "problem" for one in findings) else DONE)


if __name__ == "__main__":
    sys.exit(cli())
