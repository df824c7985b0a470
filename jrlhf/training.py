"""A run from its config to its report: opens it, builds its models and roles, runs its stages, and ends it."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import jax

from jrlhf.algorithms.factory import RoleFactory, algorithm_of
from jrlhf.algorithms.registry import dataflow_identity, dataflow_of, graph_of, optimizer_identity
from jrlhf.config.places import is_address
from jrlhf.config.schema import Config
from jrlhf.planning.resolve import resolve
from jrlhf.rewards.mixture import Rewards
from jrlhf.rewards.of_config import open_rewards
from jrlhf.roles.following import follow
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Model
from jrlhf.rollouts.source import RolloutSource
from jrlhf.rollouts.synchronous import SynchronousRollouts
from jrlhf.run.processes import from_main
from jrlhf.stages.context import Context
from jrlhf.stages.dpo import train_dpo
from jrlhf.stages.evaluate import grade_before
from jrlhf.stages.finalize import Outcome, deliver, finished, mark_finished
from jrlhf.stages.loop import check_inputs
from jrlhf.stages.mfu import utilisation_of
from jrlhf.stages.reward_model import train_reward_model
from jrlhf.stages.rl import Assembly, Take, train_rl
from jrlhf.stages.setup import open_context
from jrlhf.stages.sft import train_sft


def train(config: Config, *, resume: bool | Literal["auto"] = False, accept_rewards: bool = False) -> dict:
    """See `jrlhf.train.main`."""
    with (
        open_context(config, resolve, resume=resume, accept_rewards=accept_rewards) as context,
        jax.set_mesh(context.mesh),
    ):
        config = context.config  # with what the run has chosen
        check_inputs(context)
        if (summary := from_main(partial(finished, context))) is not None:
            context.console.line(f"{context.run.shown} has finished: nothing is left to do")
            return summary
        initial = InitialModels(config, context.mesh, context.compute, context.console)
        outcome = Outcome(initial.policy())
        context.phases.lap("start")
        if "sft" in config.stages:
            outcome.policy = train_sft(context, outcome.policy)
        if "reward_model" in config.stages:
            outcome.reward = train_reward_model(context, outcome.policy)
        if "dpo" in config.stages:
            outcome.before = grade_before(context, outcome.policy)
            outcome.policy = train_dpo(context, outcome.policy, initial.reference(outcome.policy))
        if config.algorithm is None:
            return _end(context, outcome)
        run, policy = context.run.path, outcome.policy
        with open_rewards(initial, context.task, run, context.placement, policy, outcome.reward) as (rewards, costs):
            outcome.before = grade_before(context, policy, rewards, costs)
            # Without a name for the assembly, its frozen models are freed before the policy is evaluated.
            outcome.policy = train_rl(
                context, assemble(context, initial, policy, rewards, costs), partial(_open_rollouts, context)
            )
            outcome.reward, outcome.rewards, outcome.costs = rewards.trained, rewards, costs
            return _end(context, outcome)


def assemble(
    context: Context, initial: InitialModels, policy: Model, rewards: Rewards, costs: Rewards | None
) -> Assembly:
    """Builds the models and roles of a run's algorithm. The arrays of `policy` may be moved, and are freed in training.

    policy: the actor that the stages before have trained. rewards, costs: as `open_rewards` yields them.
    """
    config, algorithm, graph = context.config, algorithm_of(context.config), graph_of(context.config)
    factory = RoleFactory(config, algorithm, context.compute, context.sampling, context.placement, rewards.clock)
    models, identities = factory.models(initial, policy, rewards, graph)
    identities |= dataflow_identity(config) | optimizer_identity(config, graph.name)
    for scoring in (rewards, costs):
        if scoring is not None:
            identities |= {f"{scoring.kind} {name}": digest for name, digest in scoring.identities.items()}
    return Assembly(
        algorithm,
        dataflow_of(config),
        [call.name for call in graph],
        partial(follow, context.task.tokenizer),
        factory.roles(graph, models, rewards, costs),
        models,
        identities,
        utilisation_of(graph, models, algorithm, context.placement, context.compute),
    )


def _open_rollouts(context: Context, assembly: Assembly, take: Take) -> AbstractContextManager[RolloutSource]:
    """Opens what gives the iterations the prompts that `take` draws, and their rollouts."""
    roles = assembly.roles
    if context.config.asynchronous is None:
        rows = context.config.compute.score_rows
        assert rows != "auto", "a run has chosen its tiles"
        mesh = roles.actor.placement["generate"].mesh
        return nullcontext(SynchronousRollouts(partial(take, mesh), rows, context.moves))
    from jrlhf.rollouts.asynchronous import AsynchronousRollouts

    scoring = [own for own in (roles.reward, roles.cost) if own is not None and f"{own.kind}.score" in assembly.calls]
    return AsynchronousRollouts(context.config, roles.actor, context.sampling, take, scoring, context.console.warn)


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
