"""`jrlhf COMMAND ...`, or `python -m jrlhf COMMAND ...`: the commands under one name."""

import sys
from collections.abc import Sequence
from importlib import import_module

from jrlhf import __version__
from jrlhf.errors import report

COMMANDS = {
    "init": ("jrlhf.new_config", "asks for model, data and reward, and writes a config"),
    "train": ("jrlhf.train", "trains: --config FILE-or-NAME [key=value ...]"),
    "generate": ("jrlhf.generate", "answers prompts, or talks: --model RUN-or-DIRECTORY"),
    "plan": ("jrlhf.plan", "searches the fastest plan on a cluster: --config FILE-or-NAME --cluster 16xh100"),
    "export": ("jrlhf.export", "writes the model of a checkpoint: RUN"),
    "doctor": ("jrlhf.doctor.__main__", "tells whether this machine is set up for runs"),
    "report": ("jrlhf.report.__main__", "writes the page of a run again: RUN"),
}


def cli(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. For an unknown command, prints all commands and returns 2.

    `--version` prints the version.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ("--help",)
    if name in COMMANDS:
        try:
            command = import_module(COMMANDS[name][0])  # takes seconds
        except KeyboardInterrupt as interrupt:
            return report(interrupt) or 1
        return command.cli(rest)
    if name == "--version":
        print(f"jrlhf {__version__}")
        return 0
    lines = [f"  jrlhf {command:<9} {purpose}" for command, (_, purpose) in COMMANDS.items()]
    asked = name in ("-h", "--help")
    usage = "usage: jrlhf COMMAND ..., where --help after a command explains its options"
    head = usage if asked else f"error: {name} is no command; the commands are:"
    print("\n".join([head, *lines]), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(cli())
