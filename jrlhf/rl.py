"""Reinforcement learning: PPO against the run's rewards, with its models on one mesh."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jrlhf.batches import batch_indices, key_for, pad_rows, put_rows, row_keys
from jrlhf.context import Context
from jrlhf.data.encode import Prompts
from jrlhf.model import Model
from jrlhf.optimizers import adamw
from jrlhf.ppo import Experience, PPOState, Rollout, TrainState, experience_metrics, make_experience, update_kl
from jrlhf.ppo.shaping import RunningMoments, align_scores
from jrlhf.roles import Actor, Critic, Learner, Reference
from jrlhf.sampling import read_responses
from jrlhf.scoring import Batch, Rewards
from jrlhf.stage import SAMPLES, run_stage
from jrlhf.starts import frozen_policy, start_critic, start_reference
from jrlhf.utilisation import workload_of
from jrlhf.validation import validate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RLState:
    """All that an iteration changes: a run that is resumed goes on from just this."""

    ppo: PPOState
    moments: RunningMoments  # of the scores so far


def ppo_iteration(actor: Actor, critic: Critic, reference: Reference, rewards: Rewards, batch: Batch, experience_of):
    """One iteration of PPO as a dataflow: generate, score, train."""
    rollout = actor.generate(*batch.arrays)
    scores = rewards.begin(rollout, batch)
    old, ref = score_policies(actor, reference, rollout)
    values, after = critic.values(rollout)
    experience = experience_of(rollout, scores(), old, ref, values, bootstrap_values=after)
    metrics = critic.update(experience) | actor.update(experience)
    return experience, metrics


def on_policy_iteration(
    actor: Actor, learner: Learner, reference: Reference, rewards: Rewards, batch: Batch, kl_coef: float | Array
):
    """The same where a batch gets a single update: the passes that make the experience are those that are trained."""
    rollout = actor.generate(*batch.arrays)
    scores = rewards.begin(rollout, batch)
    ref = reference.logprobs(rollout)
    return learner.update(rollout, placed(rollout, scores()), ref, kl_coef)


def score_policies(actor: Actor, reference: Reference, rollout: Rollout) -> tuple[Array, Array]:
    """The rollout's log-probs [B, T] under the actor and under the reference: in one pass where they share weights."""
    if reference.is_base_of(actor):
        return actor.logprobs_with_base(rollout)
    return actor.logprobs(rollout), reference.logprobs(rollout)


def train_ppo(context: Context, policy: Model, rewards: Rewards) -> tuple[Model, Model]:
    """Runs the stage, or what of it is not done yet; returns the policy as it was, frozen, and the trained actor.

    The given policy is used up: its weights become the actor's.
    """
    config, algorithm, task = context.config.ppo, context.config.ppo.algorithm, context.task
    assert task.prompts is not None
    prompts = task.prompts
    updates = config.iterations * algorithm.epochs * algorithm.minibatches
    actor_optimizer = adamw(config.actor, updates=updates)
    critic_optimizer = adamw(config.critic, updates=updates)
    clock = rewards.clock
    before = frozen_policy(context, policy)
    reference_model = start_reference(context, before)
    critic_model = start_critic(context, policy, rewards.learnt)
    on_mesh = (context.mesh, context.compute)
    actor = Actor(
        policy,
        *on_mesh,
        sampling=context.sampling,
        schedule=context.config.rollout,
        optimizer=actor_optimizer,
        ppo=algorithm,
        clock=clock,
    )
    critic = Critic(critic_model, *on_mesh, optimizer=critic_optimizer, ppo=algorithm, clock=clock)
    reference = Reference(reference_model, *on_mesh, temperature=config.temperature, clock=clock)
    learner = None
    if context.config.compute.shared_passes:
        optimizers = actor_optimizer, critic_optimizer
        learner = Learner(actor, critic, *on_mesh, optimizers=optimizers, ppo=algorithm, temperature=config.temperature)
    workload = workload_of(policy, critic_model, reference_model, algorithm, *on_mesh)
    experience_of = jax.jit(partial(_experience, config=algorithm))
    measure = jax.jit(experience_metrics)
    next_kl = jax.jit(partial(update_kl, episodes=config.rollout_batch, config=algorithm))

    def init() -> RLState:
        ppo = PPOState.create(
            TrainState.create(policy.params, actor_optimizer),
            TrainState.create(critic_model.params, critic_optimizer),
            kl_coef=algorithm.kl_coef,
        )
        return RLState(ppo, jax.device_put(RunningMoments.create(), NamedSharding(context.mesh, P())))

    meta = {"corpus": task.fingerprint, "reference": reference_model.fingerprint()}
    meta |= {f"reward {name}": word for name, word in rewards.identities.items()}

    def advance(state: RLState, step: int):
        clock.start()
        actor.state, critic.state, rewards.moments = state.ppo.actor, state.ppo.critic, state.moments
        validated, samples = validate(context, actor.model, rewards, step, clock)
        batch, kl_coef = take_batch(context, prompts, step), state.ppo.kl.coef
        if learner is None:
            timed_experience = partial(clock.run, "adv", experience_of, kl_coef=kl_coef)
            experience, metrics = ppo_iteration(actor, critic, reference, rewards, batch, timed_experience)
        else:
            experience, metrics = on_policy_iteration(actor, learner, reference, rewards, batch, kl_coef)
        metrics |= measure(experience) | {"objective/kl_coef": kl_coef} | rewards.metrics()
        kl = next_kl(state.ppo.kl, metrics["objective/kl"])
        metrics = jax.device_get(metrics) | clock.take() | validated
        metrics |= throughput(metrics, len(batch.examples), context.mesh.size)
        experience, raw = jax.device_get((experience, rewards.raw))
        metrics |= workload.metrics(metrics, experience.prompt_lengths, experience.response_lengths)
        metrics |= watch(context, batch, experience, raw)
        metrics[SAMPLES] += samples
        return RLState(PPOState(actor.state, critic.state, kl), rewards.moments), metrics

    state = run_stage(context, "ppo", config.iterations, init, advance, save_every=config.save_every, meta=meta)
    return before, policy.holding(state.ppo.actor.params)


def _experience(rollout, scores, *others, **options) -> Experience:
    """`make_experience` of scores as the rewards give them."""
    return make_experience(rollout, placed(rollout, scores), *others, **options)


@jax.jit
def placed(rollout: Rollout, scores: Array) -> Array:
    """Scores of tokens, `[B, R]` from the first response token on, where they stand in `[B, T]`; of rows as is."""
    if scores.ndim == 1:
        return scores
    return align_scores(scores, rollout.prompt_lengths, rollout.tokens.shape[1])


def take_batch(context: Context, prompts: Prompts, step: int) -> Batch:
    """The prompts of an iteration, each with its own random key."""
    config = context.config
    rows = batch_indices(len(prompts.ids), config.ppo.rollout_batch, step, config.seed + 1)
    tokens, lengths = put_rows(pad_rows([prompts.ids[row] for row in rows], config.data.max_prompt), context.mesh)
    keys = row_keys(key_for(config.seed, "rollout", step), len(rows), context.mesh)
    examples, texts = [prompts.examples[row] for row in rows], [prompts.texts[row] for row in rows]
    return Batch((tokens, lengths, keys), examples, texts, step)


def throughput(metrics: Mapping[str, float], rows: int, devices: int) -> dict[str, float]:
    """Tokens of an iteration, and tokens a second and device."""
    tokens = rows * (metrics["prompt_length/mean"] + metrics["response_length/mean"])
    return {"perf/total_num_tokens": tokens, "perf/throughput": tokens / metrics["timing_s/step"] / devices}


def watch(context: Context, batch: Batch, experience: Experience, scores: Float[np.ndarray, "B"]) -> dict[str, Any]:
    """A few samples; and where the task has a measure that training never sees, what it says of all."""
    responses = read_responses(context.task.tokenizer, experience)
    count = min(context.config.evaluation.samples, len(responses))
    shown = [
        {"prompt": batch.texts[row], "response": responses[row].text, "score": float(scores[row])}
        for row in range(count)
    ]
    if context.task.gold is None:
        return {SAMPLES: shown}
    gold = context.task.gold(batch.examples, [response.text for response in responses])
    return {
        SAMPLES: [sample | {"gold": float(gold.scores[row])} for row, sample in enumerate(shown)],
        "gold/score": float(gold.scores.mean()),
        **{f"gold/{name}": float(values.mean()) for name, values in gold.items.items()},
    }
