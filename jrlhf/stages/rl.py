"""The stage of reinforcement learning: an algorithm on roles that live where a plan has them, against the rewards."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jrlhf.algorithms.dynamic_sampling import DynamicSampler
from jrlhf.algorithms.registry import dataflow_identity, dataflow_of, graph_of
from jrlhf.config.schema import Config
from jrlhf.config.stages import PPOStageConfig
from jrlhf.data.batches import Batch, batch_indices, key_for, pad_rows, put_prompts, put_rows, row_keys
from jrlhf.data.encode import Prompts
from jrlhf.meshes import Graph, to_devices, to_host, transfer
from jrlhf.ppo import (
    DAPOConfig,
    Experience,
    KLState,
    MultiplierState,
    PolicyConfig,
    PPOConfig,
    SafeRLHFConfig,
    SFTBatch,
    TrainState,
    experience_metrics,
    update_kl,
)
from jrlhf.ppo.shaping import RunningMoments
from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.initial import scalar_model
from jrlhf.roles.model import Model
from jrlhf.roles.offloading import fetch_ahead, offloader_of
from jrlhf.roles.optimizers import adamw
from jrlhf.roles.placement import CallPlacement, RolePlacement
from jrlhf.roles.roles import Actor, Constraint, Critic, ExperienceMaker, FusedUpdate, Reference
from jrlhf.roles.sampling import read_responses
from jrlhf.stages.context import Context
from jrlhf.stages.evaluate import validate
from jrlhf.stages.loop import SAMPLES, run_stage
from jrlhf.stages.mfu import utilisation_of
from jrlhf.stages.sft import sft_rows

Algorithm = TypeVar("Algorithm", bound=PolicyConfig)
READ = "tokens", "prompt_lengths", "response_lengths", "finished"  # of an experience, on the host


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RLState:
    """All that an iteration changes: a run that is resumed goes on from just this."""

    trained: dict[str, TrainState]  # by role: the actor, and the critics that the algorithm has
    kl: KLState
    moments: RunningMoments  # of the scores so far
    draws: Int[Array, ""]  # batches of prompts drawn so far
    multiplier: MultiplierState | None = None  # of Safe RLHF


def train_rl(context: Context, policy: Model, rewards: Rewards, costs: Rewards | None = None) -> Model:
    """Runs the stage, or what of it is not done yet; returns the trained actor. The given policy is used up."""
    config, section, task, clock = context.config, context.config.rl, context.task, rewards.clock
    name, algorithm = config.algorithm, algorithm_of(config)
    assert name is not None and task.prompts is not None
    graph, dataflow = graph_of(config), dataflow_of(config)
    roles = _Roles(context, policy, rewards, costs, graph)
    prompts, actor, pool, constraint = task.prompts, roles.actor, roles.pool, roles.constraint
    arithmetic = context.placement("arithmetic").home.mesh
    utilisation = utilisation_of(policy, roles.models, algorithm, context.placement, context.compute)
    measure = jax.jit(partial(_measure, algorithm, section.rollout_batch, section.samples))
    everywhere = NamedSharding(arithmetic, P())

    def init() -> RLState:
        start = KLState(jnp.asarray(algorithm.kl_coef, jnp.float32)), RunningMoments.create(), jnp.zeros((), jnp.int32)
        multiplier = MultiplierState.create(algorithm) if isinstance(algorithm, SafeRLHFConfig) else None
        state = RLState(roles.fresh_states(), *to_devices((*start, multiplier), everywhere))
        return replace(state, moments=transfer(state.moments, rewards.placement["score"].mesh))

    meta = {"corpus": task.fingerprint} | roles.identities
    meta |= {} if (identity := dataflow_identity(config)) is None else {"dataflow": identity}
    meta |= {f"reward {reward}": word for reward, word in rewards.identities.items()}
    meta |= {} if costs is None else {f"cost {cost}": word for cost, word in costs.identities.items()}

    def advance(state: RLState, step: int):
        clock.start()
        roles.start(state, step)
        validated, samples = validate(context, actor.model, rewards, step, clock)
        draws, kl_coef = int(state.draws), state.kl.coef
        values: dict[str, Any] = {"kl_coef": kl_coef}
        if pool is None:
            values["prompts"] = take_batch(context, prompts, draws, actor.placement["generate"].mesh)
        else:
            pool.start(draws)
        experience, metrics = dataflow(**roles.of(dataflow), **values)
        if pool is None:
            batch, raw, draws = values["prompts"], rewards.raw, draws + 1
        else:
            batch, raw, draws = pool.prompts, pool.raw, pool.draws
        with jax.set_mesh(arithmetic):
            measured, kl, learned = measure(experience, state.kl)
            measured |= {} if constraint is None else {"safe/multiplier": constraint.state.value}
        metrics |= measured | rewards.metrics()
        metrics |= {"objective/kl_coef": kl_coef} if algorithm.needs_reference else {}
        metrics |= {} if pool is None else pool.metrics()
        metrics |= {} if costs is None else costs.metrics()
        metrics = jax.device_get(metrics) | clock.take() | validated
        metrics |= throughput(metrics, len(batch.examples), context.mesh.size)
        texts = None if actor.texts is None else actor.texts.loss_mask
        read, raw, rows = to_host(
            ({name: getattr(experience, name) for name in READ}, raw, {"learned": learned, "texts": texts})
        )
        metrics |= utilisation.metrics(metrics, read["prompt_lengths"], read["response_lengths"], **rows)
        metrics |= watch(context, batch, replace(experience, **read), raw)
        metrics[SAMPLES] += samples
        counted = to_devices(np.int32(draws), everywhere)
        multiplier = None if constraint is None else constraint.state
        return RLState(roles.states(), kl, rewards.moments, counted, multiplier), metrics

    state = run_stage(context, name, section.iterations, init, advance, save_every=section.save_every, meta=meta)
    trained = roles.models["actor"].holding(state.trained["actor"].params)
    return RolePlacement.of(context.mesh).store(trained)


def algorithm_of(config: Config) -> PolicyConfig:
    """The algorithm's numbers, with those that the program knows."""
    algorithm = replace(config.rl.algorithm, seed=config.seed)
    if algorithm.aggregation == "constant" and algorithm.aggregation_divisor is None:
        return replace(algorithm, aggregation_divisor=config.data.max_response)
    return algorithm


class _Roles:
    """The roles of the run's graph, each where the plan has it, and what they start from."""

    def __init__(self, context: Context, policy: Model, rewards: Rewards, costs: Rewards | None, graph: Graph):
        config, section, clock = context.config, context.config.rl, rewards.clock
        self._context, self._rewards, self._algorithm = context, rewards, algorithm_of(config)
        algorithm, where = self._algorithm, context.placement
        updates = section.iterations * algorithm.epochs * algorithm.minibatches
        self.models, self.identities = _starts(context, policy, rewards, graph)
        self._optimizers = {"actor": adamw(section.actor, updates=updates)}
        self.actor = Actor(
            self.models["actor"],
            where("actor"),
            context.compute,
            sampling=context.sampling,
            samples=section.samples,
            schedule=config.rollout,
            optimizer=self._optimizers["actor"],
            algorithm=_in_parts(algorithm, where("actor")["update"]),
            clock=clock,
        )
        self._trained: dict[str, Actor | Critic] = {"actor": self.actor}
        self._by_name: dict[str, Any] = {"reward": rewards, "cost": costs, "reference": None}
        self._by_name["estimator"] = ExperienceMaker(algorithm, clock, where("estimator"))
        if "reference" in self.models:
            limit = context.sampling.max_new_tokens
            how: Any = {"temperature": config.sampling.temperature, "responses": limit, "clock": clock}
            self._by_name["reference"] = Reference(self.models["reference"], where("reference"), context.compute, **how)
        for name in ("critic", "cost_critic"):
            if name in self.models:
                assert isinstance(section, PPOStageConfig) and isinstance(algorithm, PPOConfig)
                optimizer = adamw(section.critic, updates=updates)
                trained = {"optimizer": optimizer, "algorithm": _in_parts(algorithm, where(name)["update"])}
                self._optimizers[name] = optimizer
                self._trained[name] = Critic(
                    self.models[name], where(name), context.compute, **trained, clock=clock, name=name
                )
        self._by_name |= self._trained
        if "learner" in graph.roles:
            self._by_name["learner"] = FusedUpdate(
                self.actor,
                self._by_name.get("critic"),
                where("learner"),
                context.compute,
                optimizers=tuple(self._optimizers.values()),
                algorithm=algorithm,
                temperature=config.sampling.temperature,
                responses=context.sampling.max_new_tokens,
            )
        for name, role in self._trained.items():
            role.offloader = offloader_of(name, config.offloading, clock)
        self.constraint = None
        if isinstance(algorithm, SafeRLHFConfig):
            self.constraint = self._by_name["constraint"] = Constraint(algorithm, clock, where("constraint"))
        if config.offloading.ahead:
            fetch_ahead(graph, self._by_name)
        self.pool = None
        if isinstance(algorithm, DAPOConfig):
            assert context.task.prompts is not None
            draw = partial(take_batch, context, context.task.prompts, mesh=self.actor.placement["generate"].mesh)
            limits = {"samples": section.samples, "max_rounds": algorithm.max_rounds}
            self.pool = self._by_name["pool"] = DynamicSampler(draw, where("pool"), **limits, clock=clock)

    def of(self, dataflow) -> dict[str, Any]:
        """The roles that are parameters of a dataflow."""
        return {name: self._by_name[name] for name in inspect.signature(dataflow).parameters if name in self._by_name}

    def fresh_states(self) -> dict[str, TrainState]:
        """Those that training starts from."""
        states = {}
        for name, role in self._trained.items():
            with jax.set_mesh(role.placement.home.mesh):
                states[name] = role.offloader.offload(
                    TrainState.create(self.models[name].params, self._optimizers[name])
                )
        return states

    def start(self, state: RLState, step: int) -> None:
        """An iteration begins: hands every role its part of the state."""
        for name, role in self._trained.items():
            role.state = state.trained[name]
        self._rewards.start(state.moments)
        costs = self._by_name["cost"]
        if costs is not None:
            costs.start(RunningMoments.create())  # nothing shapes them
        if self.constraint is not None:
            assert state.multiplier is not None
            self.constraint.state = state.multiplier
        if self._algorithm.ptx_coef > 0:
            self.actor.texts = take_texts(self._context, step, self.actor.placement["update"].mesh)

    def states(self) -> dict[str, TrainState]:
        """Those that the iteration made."""
        return {name: role.state for name, role in self._trained.items()}


def _starts(context: Context, policy: Model, rewards: Rewards, graph: Graph) -> tuple[dict[str, Model], dict[str, str]]:
    """What each role that is no reward starts from, where it is to live; and one word for each that nobody trains."""
    models, identities = {}, {}
    if "reference" in graph.roles or "actor.logprobs_with_base" in (call.name for call in graph):
        reference = context.initial.reference(policy)
        identities["reference"] = reference.fingerprint()
        models["reference"] = context.placement("reference").store(reference)
    if context.config.rl.algorithm.has_critic:
        models["critic"] = context.placement("critic").store(context.initial.critic(policy, rewards.trained))
        if "cost_critic" in graph.roles:
            models["cost_critic"] = context.placement("cost_critic").store(scalar_model(policy))
    rewards.free_original()
    return {"actor": context.placement("actor").store(policy)} | models, identities


def _in_parts(algorithm: Algorithm, place: CallPlacement) -> Algorithm:
    """The algorithm's numbers, with the micro-batches that the place of an update has."""
    return algorithm if algorithm.micro_batch_tokens is not None else replace(algorithm, micro_batches=place.parts)


def take_batch(context: Context, prompts: Prompts, number: int, mesh: Mesh) -> Batch:
    """The prompts of batch `number`, and a random key for each of their responses."""
    config, section = context.config, context.config.rl
    samples = section.samples
    rows = batch_indices(len(prompts.ids), section.rollout_batch // samples, number, config.seed + 1)
    tokens, lengths = put_prompts(pad_rows([prompts.ids[row] for row in rows], config.data.max_prompt), mesh, samples)
    keys = row_keys(key_for(config.seed, "rollout", number), section.rollout_batch, mesh)
    every = np.repeat(rows, samples)
    examples, texts = [prompts.examples[row] for row in every], [prompts.texts[row] for row in every]
    return Batch((tokens, lengths, keys), examples, texts, number)


def take_texts(context: Context, step: int, mesh: Mesh) -> SFTBatch:
    """As many texts to imitate as an iteration has rows."""
    data = context.task.sft
    assert data is not None
    rows = batch_indices(data.count, context.config.rl.rollout_batch, step, context.config.seed + 2)
    return SFTBatch(*put_rows(sft_rows(data.batch(rows, step), context.length), mesh))


def _measure(
    algorithm: PolicyConfig, episodes: int, samples: int, experience: Experience, kl: KLState
) -> tuple[dict[str, Array], KLState, Bool[Array, "B"]]:
    """What an experience says of itself, the KL controller moved by it, and which rows are learnt from."""
    learned = jnp.any(experience.response_mask, axis=1)
    metrics = experience_metrics(experience, samples=samples if samples > 1 else None)
    if not algorithm.needs_reference:
        return metrics, kl, learned
    return metrics, update_kl(kl, metrics["objective/kl"], episodes, config=algorithm), learned


def throughput(metrics: Mapping[str, float], rows: int, devices: int) -> dict[str, float]:
    """Tokens of the batch that an iteration learns from, and these a second and device.

    As verl counts: neither ReMax's greedy responses nor what DAPO drew and did not keep; and a step's seconds are those
    of validation, too, where it validates.
    """
    tokens = rows * (metrics["prompt_length/mean"] + metrics["response_length/mean"])
    return {"perf/total_num_tokens": tokens, "perf/throughput": tokens / metrics["timing_s/step"] / devices}


def watch(context: Context, batch: Batch, experience: Experience, scores: Float[np.ndarray, "B"]) -> dict[str, Any]:
    """A few samples; and where the task has a measure that training never sees, what it says of all."""
    count, task = min(context.config.evaluation.samples, len(batch.examples)), context.task
    responses = read_responses(task.tokenizer, experience, count if task.gold is None else None)
    shown = [
        {"prompt": batch.texts[row], "response": responses[row].text, "score": float(scores[row])}
        for row in range(count)
    ]
    if task.gold is None:
        return {SAMPLES: shown}
    gold = task.gold(batch.examples, [response.text for response in responses])
    return {
        SAMPLES: [sample | {"gold": float(gold.scores[row])} for row, sample in enumerate(shown)],
        "gold/score": float(gold.scores.mean()),
        **{f"gold/{name}": float(values.mean()) for name, values in gold.items.items()},
    }
