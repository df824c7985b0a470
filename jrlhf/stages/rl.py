"""The stage of reinforcement learning: trains the roles of an algorithm against the rewards."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jrlhf.algorithms.factory import RoleFactory, algorithm_of
from jrlhf.algorithms.registry import dataflow_identity, dataflow_of, graph_of
from jrlhf.data.batches import (
    Batch,
    distinct_first,
    key_for,
    pad_rows,
    put_prompts,
    put_rows,
    read_responses,
    row_keys,
)
from jrlhf.data.encode import Prompts
from jrlhf.data.order import UNSOLVED, Order, Solved
from jrlhf.fleet.asynchronous import AsynchronousRollouts
from jrlhf.fleet.state import FleetState
from jrlhf.meshes import to_devices, to_host, transfer
from jrlhf.ppo import (
    Experience,
    KLState,
    MultiplierState,
    PolicyConfig,
    SafeRLHFConfig,
    SFTBatch,
    TrainState,
    experience_metrics,
    update_kl,
)
from jrlhf.ppo.shaping import RunningMoments
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.model import Model
from jrlhf.roles.placement import RolePlacement, ready
from jrlhf.run.metrics import verl_figures
from jrlhf.run.processes import is_main
from jrlhf.stages.context import Context
from jrlhf.stages.evaluate import validate
from jrlhf.stages.loop import CALLS, SAMPLES, run_stage
from jrlhf.stages.mfu import utilisation_of
from jrlhf.stages.sft import sft_rows

READ = "tokens", "prompt_lengths", "response_lengths", "finished"  # fields of an experience that the host reads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RLState:
    """The state between two iterations. A resumed run needs nothing else."""

    trained: dict[str, TrainState]  # by role: the actor, and the critics that the algorithm has
    kl: KLState
    moments: RunningMoments  # running mean and variance of all scores so far
    draws: Int[Array, ""]  # number of prompt batches drawn so far
    multiplier: MultiplierState | None = None  # the Lagrange multiplier of Safe RLHF
    fleet: FleetState | None = None  # the state of asynchronous rollouts
    solved: Int[Array, "N"] | None = None  # epoch from which a prompt is left out; None: all are drawn


def train_rl(context: Context, policy: Model, rewards: Rewards, costs: Rewards | None = None) -> Model:
    """Runs the stage, or its remaining iterations, and returns the trained actor. The arrays of `policy` are freed."""
    config, section, task, clock = context.config, context.config.rl, context.task, rewards.clock
    name, algorithm, validation = config.algorithm, algorithm_of(config), config.validation
    assert name is not None and task.prompts is not None
    graph, dataflow, prompts = graph_of(config), dataflow_of(config), task.prompts
    factory = RoleFactory(config, algorithm, context.compute, context.sampling, context.placement, clock, context.moves)
    models, identities = factory.models(context.initial, policy, rewards, graph)
    order = Order(len(prompts.ids), section.rollout_batch // section.samples, config.seed + 1)
    take, fleet = partial(take_batch, context, prompts, order), None
    built = factory.roles(graph, models, rewards, costs)
    generating, updating = built.actor.placement["generate"].mesh, built.actor.placement["update"].mesh
    arithmetic = context.placement("arithmetic").home.mesh
    everywhere = NamedSharding(arithmetic, P())
    if config.asynchronous is not None:
        tell, scoring = context.console.warn, (rewards, costs)
        fleet = AsynchronousRollouts(config, built.actor, context.sampling, task.tokenizer, take, scoring, tell)
    utilisation = utilisation_of(graph, models, algorithm, context.placement, context.compute)
    measure = jax.jit(partial(_measure, algorithm, section.rollout_batch, section.samples))

    def init() -> RLState:
        start = KLState(jnp.asarray(algorithm.kl_coef, jnp.float32)), RunningMoments.create(), jnp.zeros((), jnp.int32)
        multiplier = MultiplierState.create(algorithm) if isinstance(algorithm, SafeRLHFConfig) else None
        trained = {role: built.trained[role].create(models[role].params) for role in built.trained}
        drawing = None if fleet is None else fleet.fresh(built.actor.bind(trained["actor"]))
        solved = None if section.solved_score is None else np.full(order.count, UNSOLVED, np.int32)
        start, multiplier, solved = to_devices((start, multiplier, solved), everywhere)
        state = RLState(trained, *start, multiplier=multiplier, fleet=drawing, solved=solved)
        return replace(state, moments=transfer(state.moments, rewards.placement["score"].mesh))

    def advance(state: RLState, step: int) -> tuple[RLState, dict[str, Any]]:
        clock.start()
        draws, solved, kl_coef = int(to_host(state.draws)), to_host(state.solved), state.kl.coef
        draw = partial(take, generating, solved=solved) if fleet is None else fleet.collect
        texts = take_texts(context, step, updating) if algorithm.ptx_coef > 0 else None
        roles = built.bind(state.trained, draws, draw, moments=state.moments, multiplier=state.multiplier, texts=texts)
        validated, samples = {}, []
        if validation is not None and validation.every is not None and step % validation.every == 0:
            validated, samples = validate(context, roles.actor.model, rewards, step, clock)
        values: dict[str, Any] = {"kl_coef": kl_coef}
        if fleet is not None:
            fleet.start(state.fleet, roles.actor)
        if roles.pool is None:
            values["prompts"] = draw(draws)
        experience, metrics = map(ready, dataflow(**roles.arguments(dataflow), **values))
        if roles.pool is None:
            batch, raw, rounds = values["prompts"], rewards.raw, 1
        else:
            batch, raw, rounds = roles.pool.prompts, roles.pool.raw, roles.pool.draws - draws
        if fleet is not None:
            fleet.publish(roles.actor)
        multiplier = None if roles.constraint is None else roles.constraint.state
        with jax.set_mesh(arithmetic):
            measured, kl, learned = measure(experience, state.kl)
            measured |= {} if multiplier is None else {"safe/multiplier": multiplier.value}
        metrics |= measured | ({"objective/kl_coef": kl_coef} if algorithm.needs_reference else {})
        drawing = fleet and fleet.state
        for part in (rewards, roles.pool, costs, fleet):
            metrics |= {} if part is None else part.metrics()
        metrics = to_host(metrics)
        for scored in (rewards, costs):
            if scored is not None:
                scored.check(metrics)
        metrics["training/epoch"] = order.epochs(draws, solved)[0]
        seconds = clock.take()
        metrics |= seconds | validated | {CALLS: clock.calls(context.mesh)}
        metrics |= verl_figures(metrics, len(batch.examples), context.mesh.size)
        masks = {"learned": learned, "texts": None if texts is None else texts.loss_mask}
        read, raw, masks = to_host(({field: getattr(experience, field) for field in READ}, raw, masks))
        if section.solved_score is not None:
            scores = {draws: raw} if roles.pool is None else roles.pool.scored
            solved = order.without_solved(solved, scores, section.solved_score, draws + rounds - 1)
            metrics["data/solved"] = np.mean(solved < UNSOLVED)
        if utilisation is not None and is_main():  # other processes lack the times of calls that they do not run
            work = {**masks, "rounds": rounds, "stopped_updates": metrics.get("actor/stopped_updates", 0.0)}
            metrics |= utilisation.metrics(seconds, read["prompt_lengths"], read["response_lengths"], **work)
        metrics |= watch(context, batch, replace(experience, **read), raw)
        metrics[SAMPLES] += samples
        drawn, solved = to_devices((np.int32(draws + rounds), solved), everywhere)
        return RLState(roles.states, kl, rewards.moments, drawn, multiplier, drawing, solved), metrics

    meta = {"corpus": task.fingerprint} | identities | dataflow_identity(config)
    meta |= {f"reward {reward}": digest for reward, digest in rewards.identities.items()}
    meta |= {} if costs is None else {f"cost {cost}": digest for cost, digest in costs.identities.items()}
    with fleet or nullcontext():
        options = {} if fleet is None else {"saved": fleet.saved}
        state = run_stage(context, name, init, advance, meta=meta, **options)
    return RolePlacement.of(context.mesh).store(models["actor"].holding(state.trained["actor"].params))


def take_batch(
    context: Context, prompts: Prompts, order: Order, mesh: Mesh, number: int, solved: Solved | None = None
) -> Batch:
    """The prompts of batch `number`, and a random key for each response."""
    config, section, samples = context.config, context.config.rl, context.config.rl.samples
    rows = order.draw(number, solved)
    tokens, lengths = put_prompts(pad_rows([prompts.ids[row] for row in rows], config.data.max_prompt), mesh, samples)
    keys = row_keys(key_for(config.seed, "rollout", number), section.rollout_batch, mesh)
    every = np.repeat(rows, samples)
    examples, texts = [prompts.examples[row] for row in every], [prompts.texts[row] for row in every]
    return Batch((tokens, lengths, keys), examples, texts, number)


def take_texts(context: Context, step: int, mesh: Mesh) -> SFTBatch:
    """Texts to imitate, one per row of an iteration."""
    data = context.task.sft
    assert data is not None
    rows = Order(data.count, context.config.rl.rollout_batch, context.config.seed + 2).draw(step)
    return SFTBatch(*put_rows(sft_rows(data.batch(rows, step), context.length), mesh))


def _measure(
    algorithm: PolicyConfig, episodes: int, samples: int, experience: Experience, kl: KLState
) -> tuple[dict[str, Array], KLState, Bool[Array, "B"]]:
    """The metrics of an experience, the next state of the KL controller, and the mask of the rows to learn from."""
    learned = jnp.any(experience.response_mask, axis=1)
    metrics = experience_metrics(experience, samples=samples if samples > 1 else None)
    if not algorithm.needs_reference:
        return metrics, kl, learned
    return metrics, update_kl(kl, metrics["objective/kl"], episodes, config=algorithm), learned


def watch(context: Context, batch: Batch, experience: Experience, scores: Float[np.ndarray, "B"]) -> dict[str, Any]:
    """Returns samples of distinct prompts, and means of the task's gold scores, if any. Training never sees these."""
    task, config = context.task, context.config
    rows = distinct_first(len(batch.examples), config.rl.samples)[: config.evaluation.samples]
    texts = zip(rows, (response.text for response in read_responses(task.tokenizer, experience, rows)), strict=True)
    shown = [{"prompt": batch.texts[row], "response": text, "score": float(scores[row])} for row, text in texts]
    if task.gold is None:
        return {SAMPLES: shown}
    gold = task.gold(batch.examples, [response.text for response in read_responses(task.tokenizer, experience)])
    return {
        SAMPLES: [sample | {"gold": float(gold.scores[row])} for row, sample in zip(rows, shown, strict=True)],
        "gold/score": float(gold.scores.mean()),
        **{f"gold/{name}": float(values.mean()) for name, values in gold.items.items()},
    }
