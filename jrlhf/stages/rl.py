"""The stage of reinforcement learning: trains the roles of an algorithm against the rewards."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jrlhf.algorithms.roles import Roles
from jrlhf.data.batches import (
    Batch,
    distinct_first,
    key_for,
    pad_rows,
    put_prompts,
    put_rows,
    read_responses,
    row_keys,
    sft_rows,
)
from jrlhf.data.order import UNSOLVED, Order, Solved
from jrlhf.data.types import Prompts
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.ppo.config.algorithms import SafeRLHFConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.experience import experience_metrics, update_kl
from jrlhf.ppo.safe import MultiplierState
from jrlhf.ppo.shaping import RunningMoments
from jrlhf.ppo.types import Experience, KLState, SFTBatch, TrainState
from jrlhf.rewards.types import score_or_none, scores_of
from jrlhf.roles.model import Model
from jrlhf.roles.placement import RolePlacement, ready
from jrlhf.rollouts.source import RolloutsAhead, RolloutSource
from jrlhf.run.clock import Clock, calling
from jrlhf.run.metrics import verl_figures
from jrlhf.run.processes import is_main
from jrlhf.stages.context import Context
from jrlhf.stages.evaluate import validate
from jrlhf.stages.loop import CALLS, ROWS, SAMPLES, run_stage
from jrlhf.stages.mfu import Utilisation
from jrlhf.stages.row_records import row_records, weigh

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
    fleet: Any = None  # the `FleetState` of asynchronous rollouts
    solved: Int[Array, "N"] | None = None  # epoch from which a prompt is left out; None: all are drawn


class IterationRows(NamedTuple):
    """The rows of an iteration."""

    batch: Batch
    raw: Any  # [B] the batch's scores before they were shaped; None: nothing scored it
    parts: dict[str, Any]  # each reward's scores [B]
    draws: int  # number of batches of prompts drawn so far, in all iterations


@dataclass(frozen=True)
class Assembly:
    """What an algorithm runs with, built before its first iteration.

    algorithm: its settings, completed. calls: the names of its calls, in their order. models: of the roles, by name.
    follow: (mesh, batch, rollout, turn) -> as in `Batch`.
    identities: digests of the frozen models, the dataflow and the rewards, which a resumed run must have, too.
    """

    algorithm: PolicyConfig
    dataflow: Callable[..., Any]
    calls: Sequence[str]
    follow: Callable[..., Batch]
    roles: Roles
    models: Mapping[str, Model]
    identities: Mapping[str, str]
    utilisation: Utilisation | None


Take = Callable[..., Batch]  # (mesh, number, solved prompts) -> a batch of prompts


def train_rl(
    context: Context,
    assembly: Assembly,
    open_rollouts: Callable[[Assembly, Take], AbstractContextManager[RolloutSource]],
) -> Model:
    """Runs the stage, or its remaining iterations, and returns the trained actor. The arrays of the models that it
    trains are freed.

    open_rollouts: opens what gives the iterations batches and rollouts, from the assembly and the function that
    takes prompts.
    """
    section, name, prompts = context.config.rl, context.config.algorithm, context.task.prompts
    assert name is not None and prompts is not None
    batch, seed = section.rollout_batch // section.samples, context.config.seed + 1
    order = Order(len(prompts.ids), batch, seed)
    if prompts.sources:
        from jrlhf.data.mixture import Mixture

        order = Mixture(order.count, batch, seed, sources=prompts.sources)
    # Of a choice of rows the statistics of groups would be wrong.
    samples = 1 if any(call.startswith("estimator.where") for call in assembly.calls) else section.samples
    with open_rollouts(assembly, partial(take_batch, context, assembly.follow, prompts, order)) as rollouts:
        iterations = Iterations(
            context,
            assembly,
            order,
            rollouts,
            home=context.placement("arithmetic").home.mesh,
            measure=jax.jit(partial(_measure, assembly.algorithm, section.rollout_batch, samples)),
        )
        announced = [*(["validation"] if context.config.validation else []), *assembly.calls]
        options: Any = {"meta": assembly.identities, "announced": announced, "saved": iterations.saved}
        options["measure"] = iterations.measured
        state = run_stage(context, name, iterations.init, iterations.advance, **options)
    trained = assembly.models["actor"].holding(state.trained["actor"].params)
    return RolePlacement.of(context.mesh).store(trained)


@dataclass(frozen=True)
class Iterations:
    """Runs the iterations of the stage. Each one returns the next `RLState`, which has all that a resumed run needs.

    home: the devices of the state's scalars. measure: `_measure`, jitted.
    """

    context: Context
    assembly: Assembly
    order: Order
    rollouts: RolloutSource
    home: Mesh
    measure: Callable[..., Any]

    def init(self) -> RLState:
        """Returns the state before the first iteration."""
        models, algorithm = self.assembly.models, self.assembly.algorithm
        trained = {name: role.create(models[name].params) for name, role in self.roles.trained.items()}
        actor = self.roles.actor.bind(trained["actor"])
        fleet = None if self.ahead is None else self.ahead.fresh(actor, trained["actor"])
        kl = KLState(jnp.asarray(algorithm.kl_coef, jnp.float32))
        multiplier = MultiplierState.create(algorithm) if isinstance(algorithm, SafeRLHFConfig) else None
        solved = None if self.context.config.rl.solved_score is None else np.full(self.order.count, UNSOLVED, np.int32)
        kl, draws, multiplier, solved = _replicated((kl, np.int32(0), multiplier, solved), self.home)
        moments = _replicated(RunningMoments.create(), self.roles.reward.placement["score"].mesh)
        return RLState(trained, kl, moments, draws, multiplier, fleet, solved)

    def advance(self, state: RLState, step: int) -> tuple[RLState, dict[str, Any]]:
        """Runs the dataflow once. Returns the next state, and the metrics and samples of the iteration."""
        self._clock.start()
        draws, solved, texts = int(to_host(state.draws)), to_host(state.solved), self._texts(step)
        take = partial(self.rollouts.collect, solved=solved)
        start = {"moments": state.moments, "multiplier": state.multiplier, "texts": texts}
        roles = self.roles.bind(state.trained, draws, take, self.rollouts.draw, **start)
        validated, validation_samples = self._validate(roles.actor.model, step)
        if self.ahead is not None:
            with calling("actor.generate"):
                self.ahead.start(state.fleet, roles.actor, state.trained["actor"])
        experience, metrics, drawn = self._run_dataflow(roles, draws, take, state.kl.coef)
        trained = roles.states
        if self.ahead is not None:
            self.ahead.publish(roles.actor, trained["actor"], metrics.get("actor/grad_norm", 0.0))
        with jax.set_mesh(self.home):
            measured, kl, learned = self.measure(experience, state.kl)
            measured |= {} if roles.constraint is None else roles.constraint.metrics()
            weighed = {} if experience.versions is None else weigh(experience, step, algorithm=self.assembly.algorithm)
        fleet = None if self.ahead is None else self.ahead.state()

        metrics = self._gather(roles, metrics | measured)
        metrics |= self.order.begun(draws, solved)
        seconds = self._clock.take()
        metrics |= seconds | validated | {CALLS: self._clock.calls(self.context.mesh)}
        metrics |= verl_figures(metrics, len(drawn.batch.examples), self.context.mesh.size)
        masks = {"learned": learned, "texts": None if texts is None else texts.loss_mask}
        fields = {name: getattr(experience, name) for name in READ}
        fields, raw, parts, masks, weighed = to_host((fields, drawn.raw, drawn.parts, masks, weighed))
        if roles.pool is None and len(roles.actor.asked) > 1:
            drawn = drawn._replace(batch=answered(roles.actor.asked, fields["prompt_lengths"]))
        if (bound := self.context.config.rl.solved_score) is not None:
            solved = self.order.without_solved(solved, to_host(roles.reward.raw), bound, drawn.draws - 1)
            metrics["data/solved"] = np.mean(solved < UNSOLVED)
        utilisation = self.assembly.utilisation
        if utilisation is not None and is_main():  # other processes lack the times of calls that they do not run
            work = {"rounds": drawn.draws - draws, "stopped_updates": metrics.get("actor/stopped_updates", 0.0)}
            lengths = fields["prompt_lengths"], fields["response_lengths"]
            metrics |= utilisation.metrics(seconds, *lengths, **masks, **work)
        metrics |= watch(self.context, drawn._replace(raw=raw, parts=parts), replace(experience, **fields))
        metrics[SAMPLES] += validation_samples
        if weighed:
            metrics[ROWS] = row_records(drawn.batch.origins, fields | weighed, step)

        draws, solved = _replicated((np.int32(drawn.draws), solved), self.home)
        multiplier = None if roles.constraint is None else roles.constraint.state
        return RLState(trained, kl, roles.reward.moments, draws, multiplier, fleet, solved), metrics

    def saved(self, state: RLState) -> RLState:
        """Returns what a checkpoint holds of a state."""
        return state if self.ahead is None else self.ahead.saved(state)

    def measured(self, state: RLState, step: int) -> dict[str, float]:
        """Validates the actor after `step` iterations, as the next iteration would."""
        with calling("validation"):
            actor = self.roles.actor.bind(state.trained["actor"])
            return validate(self.context, actor.model, self.roles.reward, step, self._clock)[0]

    @property
    def roles(self) -> Roles:
        return self.assembly.roles

    @property
    def ahead(self) -> RolloutsAhead | None:
        return self.rollouts.ahead

    @property
    def _clock(self) -> Clock:
        return self.roles.reward.clock

    def _texts(self, step: int) -> SFTBatch | None:
        """Returns the texts that the actor imitates in addition, one per row of the iteration; None without ptx."""
        if self.assembly.algorithm.ptx_coef == 0:
            return None
        config, data = self.context.config, self.context.task.sft
        assert data is not None
        rows = Order(data.count, config.rl.rollout_batch, config.seed + 2).draw(step)
        texts = sft_rows(data.batch(rows, step), self.context.length)
        return SFTBatch(*put_rows(texts, self.roles.actor.placement["update"].mesh))

    def _validate(self, policy: Model, step: int) -> tuple[dict[str, float], list[dict[str, object]]]:
        """Returns the metrics and samples of a validation, if one is due."""
        validation = self.context.config.validation
        if validation is None or not validation.due(step):
            return {}, []
        with calling("validation"):
            return validate(self.context, policy, self.roles.reward, step, self._clock)

    def _run_dataflow(
        self, roles: Roles, draws: int, take: Callable[[int], Batch], kl_coef: Array
    ) -> tuple[Experience, dict[str, Any], IterationRows]:
        """Returns the experience of an iteration, the metrics of its updates, and its rows."""
        dataflow, pool, values = self.assembly.dataflow, roles.pool, dict[str, Any](kl_coef=kl_coef)
        if pool is None:
            with calling("actor.generate"):  # of rollouts that are drawn ahead, it waits for a batch
                values["prompts"] = take(draws)
        data, metrics = map(ready, dataflow(**roles.arguments(dataflow, values)))
        roles.reward.finish()
        experience = data if isinstance(data, Experience) else roles.estimator.bare_experience(data)
        if pool is not None:
            return experience, metrics, IterationRows(pool.prompts, pool.raw, pool.parts, pool.draws)
        raw, parts = roles.reward.raw.get(draws), roles.reward.parts.get(draws, {})
        return experience, metrics, IterationRows(values["prompts"], raw, parts, draws + 1)

    def _gather(self, roles: Roles, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns these metrics and those of the roles, on the host. Raises RewardFailure for scores that failed."""
        for part in (roles.reward, roles.pool, roles.cost, self.ahead):
            metrics = metrics | ({} if part is None else part.metrics())
        metrics = to_host(metrics)
        for scored in (roles.reward, roles.cost):
            if scored is not None:
                scored.check(metrics)
        return metrics


def take_batch(
    context: Context,
    follow: Callable[..., Batch],
    prompts: Prompts,
    order: Order,
    mesh: Mesh,
    number: int,
    solved: Solved | None = None,
) -> Batch:
    """The prompts of batch `number`, and a random key for each response."""
    config, section, samples = context.config, context.config.rl, context.config.rl.samples
    rows = order.draw(number, solved)
    tokens, lengths = put_prompts(pad_rows([prompts.ids[row] for row in rows], config.data.max_prompt), mesh, samples)
    keys = row_keys(key_for(config.seed, "rollout", number), section.rollout_batch, mesh)
    every = np.repeat(rows, samples)
    examples, texts = [prompts.examples[row] for row in every], [prompts.texts[row] for row in every]
    return Batch((tokens, lengths, keys), examples, texts, number, follow=partial(follow, mesh))


def answered(batches: Sequence[Batch], prompt_lengths: Int[np.ndarray, "B"]) -> Batch:
    """The last of these batches whose prompts have the lengths of an experience's; else the first."""
    lengths = [np.repeat(to_host(batch.arrays[1]), batch.samples) for batch in batches]
    same = [batch for batch, own in zip(batches, lengths, strict=True) if np.array_equal(own, prompt_lengths)]
    return (same or [batches[0]])[-1]


def _measure(
    algorithm: PolicyConfig, episodes: int, samples: int, experience: Experience, kl: KLState
) -> tuple[dict[str, Array], KLState, Bool[Array, "B"]]:
    """Returns metrics of an experience, the next state of the KL controller, and the mask of rows to learn from."""
    learned = jnp.any(experience.response_mask, axis=1)
    metrics = experience_metrics(experience, samples=samples if samples > 1 else None)
    if not algorithm.needs_reference:
        return metrics, kl, learned
    metrics["objective/kl_coef"] = kl.coef
    return metrics, update_kl(kl, metrics["objective/kl"], episodes, config=algorithm), learned


def _replicated(tree: Any, mesh: Mesh) -> Any:
    """Returns `tree` with each array on all devices of the mesh."""
    return to_devices(tree, NamedSharding(mesh, P()))


def watch(context: Context, drawn: IterationRows, experience: Experience) -> dict[str, Any]:
    """Returns samples of distinct prompts, metrics of each source of prompts, and means of the task's gold scores, if
    any. Training never sees these."""
    task, config, batch = context.task, context.config, drawn.batch
    assert task.prompts is not None
    metrics: dict[str, Any] = {}
    if names := task.prompts.names:
        from jrlhf.stages.sources import by_source

        lengths = np.asarray(experience.response_lengths)
        metrics = by_source(names, batch.examples, drawn.raw, drawn.parts, lengths)
    rows = distinct_first(len(batch.examples), config.rl.samples)[: config.evaluation.samples]
    texts = zip(rows, (response.text for response in read_responses(task.tokenizer, experience, rows)), strict=True)
    shown: list[dict[str, Any]] = [{"prompt": batch.texts[row], "response": text} for row, text in texts]
    if drawn.raw is not None:
        for row, sample in zip(rows, shown, strict=True):
            sample |= {"score": score_or_none(drawn.raw[row])} | scores_of(row, drawn.parts)
    if task.gold is None:
        return metrics | {SAMPLES: shown}
    gold = task.gold(batch.examples, [response.text for response in read_responses(task.tokenizer, experience)])
    return metrics | {
        SAMPLES: [sample | {"gold": float(gold.scores[row])} for row, sample in zip(rows, shown, strict=True)],
        "gold/score": float(gold.scores.mean()),
        **{f"gold/{name}": float(values.mean()) for name, values in gold.items.items()},
    }
