"""A run from its config to its report: opens it, runs its stages one after the other, and ends it."""

from functools import partial
from typing import Literal

import jax

from jrlhf.config.places import is_address
from jrlhf.config.schema import Config
from jrlhf.planning.resolve import resolve
from jrlhf.run.processes import from_main
from jrlhf.stages.context import Context
from jrlhf.stages.dpo import train_dpo
from jrlhf.stages.evaluate import grade_before
from jrlhf.stages.finalize import Outcome, deliver, finished, mark_finished
from jrlhf.stages.loop import check_inputs
from jrlhf.stages.reward_model import train_reward_model
from jrlhf.stages.rl import train_rl
from jrlhf.stages.setup import open_context
from jrlhf.stages.sft import train_sft


def train(config: Config, *, resume: bool | Literal["auto"] = False, accept_rewards: bool = False) -> dict:
    """See `jrlhf.train.main`."""
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
    from jrlhf.report.card import card_of_run  # draws, which takes long to import
    from jrlhf.report.html import write_report
    from jrlhf.report.read import read_run
    from jrlhf.report.sections import results

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
