"""The training command: `python -m jrlhf.train --config FILE-or-NAME [key=value ...]`; `--help` lists its options."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax

from jrlhf.config.load import config_names, load_config, parse_with_settings
from jrlhf.config.places import is_address
from jrlhf.config.schema import Config
from jrlhf.errors import UserError, exit_code, exit_code_of_printing, report
from jrlhf.planning.dryrun import describe
from jrlhf.planning.resolve import resolve
from jrlhf.report.card import card_of_run
from jrlhf.report.html import write_report
from jrlhf.report.read import read_run
from jrlhf.report.sections import results
from jrlhf.run.console import Console
from jrlhf.run.processes import from_main, is_main, together
from jrlhf.stages.context import Context
from jrlhf.stages.dpo import train_dpo
from jrlhf.stages.evaluate import grade_before
from jrlhf.stages.finalize import Outcome, deliver, finished, mark_finished
from jrlhf.stages.loop import check_inputs
from jrlhf.stages.reward_model import train_reward_model
from jrlhf.stages.rl import train_rl
from jrlhf.stages.setup import open_context
from jrlhf.stages.sft import train_sft


def main(config: Config, *, resume: bool | Literal["auto"] = False, accept_rewards: bool = False) -> dict:
    """Runs the stages of the config, each on the weights of the one before, and returns the summary of the run.

    Files are written to `config.run_dir/config.name`. Bad input raises UserError before anything is lost. A process
    that was asked to stop saves its state and raises Preempted.

    resume: continues the run in that directory; "auto": if there is one, else begins it.
    accept_rewards: allows a resume although reward functions have changed since the checkpoint.
    """
    with (
        open_context(config, resolve, resume=resume, accept_rewards=accept_rewards) as context,
        jax.set_mesh(context.mesh),
    ):
        check_inputs(context)
        if (summary := from_main(partial(finished, context))) is not None:
            context.console.line(f"{context.run.shown} has finished: nothing is left to do")
            return summary
        outcome = Outcome(context.initial.policy())
        context.phases.lap("start")
        if "sft" in config.stages:
            outcome.policy = train_sft(context, outcome.policy)
        if "reward_model" in config.stages:
            outcome.reward = train_reward_model(context, outcome.policy)
        if "dpo" in config.stages:
            outcome.before = grade_before(context, outcome.policy)
            outcome.policy = train_dpo(context, outcome.policy)
        if config.algorithm is None:
            return _end(context, outcome)
        with context.open_rewards(outcome.policy, outcome.reward) as (rewards, costs):
            outcome.before = grade_before(context, outcome.policy, rewards, costs)
            outcome.policy = train_rl(context, outcome.policy, rewards, costs)
            outcome.reward, outcome.rewards, outcome.costs = rewards.trained, rewards, costs
            return _end(context, outcome)


def _end(context: Context, outcome: Outcome) -> dict:
    """Evaluates the policy, writes all that a run leaves, and returns the summary."""
    run, console = context.run, context.console
    summary = deliver(context, outcome, partial(card_of_run, run.path, context.config))
    from_main(lambda: str(write_report(run.path)))
    summary = mark_finished(context, summary)
    if run.writes:
        for doubt in summary.get("held_out", {}).get("doubts", ()):
            console.warn(doubt)
        place = None if is_address(context.config.run_dir) else run.path  # an address gets the files at the end
        console.summary(results(read_run(run.path)), summary["phases"], place)
    return summary


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
    with together(report):
        if options.dry_run:
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
