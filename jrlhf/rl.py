"""Reinforcement learning: PPO against a learned reward, with four models on one mesh."""

from functools import partial

import jax
import jax.numpy as jnp

from jrlhf.batches import batch_indices, key_for, pad_rows, put_rows, row_keys
from jrlhf.checkpoints import fingerprint_of
from jrlhf.clock import Clock
from jrlhf.context import Context
from jrlhf.evaluate import grade
from jrlhf.models import scalar_from
from jrlhf.optimizers import adamw
from jrlhf.ppo import Experience, PPOState, TrainState, experience_metrics, make_experience, update_kl
from jrlhf.roles import Actor, Critic, Reference, Reward
from jrlhf.sampling import read_responses
from jrlhf.stage import run_stage


def ppo_iteration(actor: Actor, critic: Critic, reference: Reference, reward: Reward, prompts, experience_of):
    """One iteration of PPO as a dataflow: generate, score, train. `prompts` are (tokens, lengths, row keys)."""
    rollout = actor.generate(*prompts)
    scores = reward.score(rollout)
    old = actor.logprobs(rollout)
    ref = reference.logprobs(rollout)
    values, after = critic.values(rollout)
    experience = experience_of(rollout, scores, old, ref, values, bootstrap_values=after)
    metrics = critic.update(experience) | actor.update(experience)
    return experience, metrics


def train_ppo(context: Context, sft_params, reward_params):
    """Runs the stage, or what of it is not done yet; returns the actor's parameters.

    The actor starts from the SFT model, which stays as the reference; the critic starts from the reward model.
    """
    config, algorithm = context.config.ppo, context.config.ppo.algorithm
    updates = config.iterations * algorithm.epochs * algorithm.minibatches
    actor_optimizer = adamw(config.actor, updates=updates)
    critic_optimizer = adamw(config.critic, updates=updates)
    clock = Clock()
    shared = (context.model, context.mesh, context.compute)
    actor = Actor(*shared, sampling=context.sampling, optimizer=actor_optimizer, ppo=algorithm, clock=clock)
    critic = Critic(*shared, optimizer=critic_optimizer, ppo=algorithm, clock=clock)
    reference = Reference(*shared, sft_params, temperature=config.temperature, clock=clock)
    reward = Reward(*shared, reward_params, clock=clock)
    experience_of = jax.jit(partial(make_experience, config=algorithm))
    measure = jax.jit(experience_metrics)
    next_kl = jax.jit(partial(update_kl, episodes=config.rollout_batch, config=algorithm))

    def advance(state: PPOState, step: int):
        clock.start()
        rows = batch_indices(len(context.task.train.examples), config.rollout_batch, step, context.config.seed + 1)
        actor.state, critic.state = state.actor, state.critic
        kl_coef = state.kl.coef
        experience, metrics = ppo_iteration(
            actor,
            critic,
            reference,
            reward,
            put_prompts(context, rows, step),
            partial(clock.run, "adv", experience_of, kl_coef=kl_coef),
        )
        metrics |= measure(experience) | {"objective/kl_coef": kl_coef}
        kl = next_kl(state.kl, metrics["objective/kl"])
        metrics = jax.device_get(metrics) | clock.take()
        tokens = config.rollout_batch * (metrics["prompt_length/mean"] + metrics["response_length/mean"])
        metrics |= {
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / metrics["timing_s/step"] / context.mesh.size,
        }
        return PPOState(actor.state, critic.state, kl), metrics | watch(context, rows, step, jax.device_get(experience))

    def init() -> PPOState:
        return PPOState.create(
            TrainState.create(jax.tree.map(jnp.copy, sft_params), actor_optimizer),
            TrainState.create(scalar_from(reward_params, keep_head=True), critic_optimizer),
            kl_coef=algorithm.kl_coef,
        )

    meta = {
        "corpus": context.task.fingerprint,
        "reference": fingerprint_of(sft_params),
        "reward": fingerprint_of(reward_params),
    }
    state = run_stage(context, "ppo", config.iterations, init, advance, save_every=config.save_every, meta=meta)
    return state.actor.params


def put_prompts(context: Context, rows, step: int):
    """The prompts of an iteration on the mesh, each with its own random key: (tokens, lengths, keys)."""
    prompts = [context.task.train.tokens.prompts[row] for row in rows]
    tokens, lengths = put_rows(pad_rows(prompts, context.config.data.max_prompt), context.mesh)
    return tokens, lengths, row_keys(key_for(context.config.seed, "rollout", step), len(rows), context.mesh)


def watch(context: Context, rows, step: int, experience: Experience) -> dict[str, float]:
    """What the rubric says of a rollout: it only measures, PPO never sees it. A few samples are kept and shown."""
    examples = [context.task.train.examples[row] for row in rows]
    graded = grade(context, [example.signature for example in examples], read_responses(context, experience))
    shown = [
        {
            "stage": "ppo",
            "step": step + 1,
            "prompt": examples[row].prompt,
            "response": graded.responses[row].text,
            "score": float(experience.scores[row]),
            "gold": float(graded.gold[row]),
        }
        for row in range(min(context.config.evaluation.samples, len(examples)))
    ]
    context.run.add_samples(shown)
    context.console.samples(shown)
    items = {f"gold/{name}": float(values.mean()) for name, values in graded.items.items()}
    return {"gold/score": float(graded.gold.mean())} | items
