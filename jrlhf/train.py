"""The training command: `python -m jrlhf.train --config FILE-or-NAME [key=value ...]`; `--help` lists its options.

JAX is imported once a config has been read: `--help`, and what is refused of settings alone, do not wait for it.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Literal

from jrlhf.config.load import config_names, load_config, parse_with_settings
from jrlhf.config.schema import Config
from jrlhf.errors import UserError, exit_code, exit_code_of_printing, report


def main(config: Config, *, resume: bool | Literal["auto"] = False, accept_rewards: bool = False) -> dict:
    """Runs the stages of the config, each on the weights of the one before, and returns the summary of the run.

    Files are written to `config.run_dir/config.name`. Bad input raises UserError before anything is lost. A process
    that was asked to stop saves its state and raises Preempted.

    resume: continues the run in that directory; "auto": if there is one, else begins it.
    accept_rewards: allows a resume although reward functions have changed since the checkpoint.
    """
    from jrlhf.training import train

    return train(config, resume=resume, accept_rewards=accept_rewards)


def cli(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jrlhf.train", description="RLHF in JAX.")
    shipped = ", ".join(config_names())
    parser.add_argument("--config", required=True, help=f"a YAML file, or the name of a shipped config: {shipped}")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print memory and plan, exit")
    parser.add_argument("--all", action="store_true", help="with --dry-run: print all settings, also the defaults")
    parser.add_argument("--resume", action="store_true", help="go on with the run of this name")
    automatic = "the same, or begin the run if there is none"  # a second option, because `--resume` takes no value
    parser.add_argument("--resume=auto", dest="resume", action="store_const", const="auto", help=automatic)
    parser.add_argument("--accept-rewards", action="store_true", help="with --resume: also if reward code was changed")
    options = parse_with_settings(parser, arguments)
    run = exit_code_of_printing if options.dry_run else exit_code
    return run(partial(_run, options))


def _run(options: argparse.Namespace) -> None:
    _refuse_void(options)
    config = load_config(options.config, options.overrides)
    from jrlhf.run.console import Console
    from jrlhf.run.processes import is_main
    from jrlhf.run.together import together

    with together(report):
        if options.dry_run:
            from jrlhf.planning.dryrun import describe

            text = describe(config, all_settings=options.all)
            if is_main():
                print(text)
        else:
            main(config, resume=options.resume, accept_rewards=options.accept_rewards)
            Console(enabled=is_main()).commands(config)


def _refuse_void(options: argparse.Namespace) -> None:
    for option, other, is_void in (
        ("--all", "without --dry-run", options.all and not options.dry_run),
        ("--resume", "with --dry-run", options.resume and options.dry_run),
        ("--accept-rewards", "without --resume", options.accept_rewards and not options.resume),
    ):
        if is_void:
            raise UserError(f"{option} has no effect {other}: leave it out")


if __name__ == "__main__":
    sys.exit(cli())
