"""A table of logits as policy, trained by `jrlhf.ppo` on the problems of `enumeration` in one compiled loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jrlhf.ppo import (
    DPOConfig,
    Experience,
    GRPOConfig,
    MultiplierState,
    PairBatch,
    PPOConfig,
    PPOState,
    ReinforcePPConfig,
    ReMaxConfig,
    Rollout,
    SafeRLHFConfig,
    TrainState,
    make_actor_step,
    make_critic_step,
    make_dpo_step,
    make_experience,
    make_group_experience,
    make_ppo_step,
    make_return_experience,
    make_safe_experience,
    update_multiplier,
    with_reference,
)
from tests.support.enumeration import Floats, Problem


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """jit with the machine code that is made fastest, for programs that run shorter than they compile."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


class Tables(NamedTuple):
    """A `Problem` for a policy that samples. A row is a prompt of one token, then the response, then zeros."""

    problem: Problem

    @property
    def reference(self) -> jax.Array:
        return jnp.asarray(self.problem.reference, jnp.float32)

    def nodes(self, tokens: jax.Array) -> jax.Array:
        """[B, L]: the node in which each token is chosen."""
        vocab, code, nodes = self.problem.vocab, jnp.zeros_like(tokens[:, 0]), []
        for t in range(self.problem.limit):
            nodes.append(sum(vocab**i for i in range(t)) + code)
            code = code * vocab + tokens[:, t + 1]
        return jnp.stack(nodes, axis=1)

    def logprobs(self, params: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp = jax.nn.log_softmax(params)[tokens[:, :1], self.nodes(tokens)]
        chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
        entropy = -jnp.sum(jnp.exp(logp) * logp, 2)
        return _after_prompt(chosen), _after_prompt(entropy)

    def values(self, params: jax.Array, tokens: jax.Array) -> jax.Array:
        return _after_prompt(params[tokens[:, :1], self.nodes(tokens)])

    def lookup(self, table: Floats, tokens: jax.Array) -> jax.Array:
        """Returns the entry of a table [C, S] for each row's response."""
        place = self.problem.vocab ** np.arange(self.problem.limit)[::-1]
        of_code = np.zeros((self.problem.prompts, self.problem.vocab**self.problem.limit), np.float32)
        of_code[:, self.problem.responses @ place] = table
        return jnp.asarray(of_code)[tokens[:, 0], tokens[:, 1:] @ jnp.asarray(place, jnp.int32)]

    def sample(self, params: jax.Array, prompts: jax.Array, key: jax.Array | None) -> Rollout:
        """Responses drawn from the policy; without a key the greedy ones."""
        limit = self.problem.limit
        tokens = jnp.pad(prompts[:, None], ((0, 0), (0, limit)))
        lengths = jnp.zeros_like(prompts)
        done = jnp.zeros_like(prompts, jnp.bool_)
        for t in range(limit):
            logits = params[prompts, self.nodes(tokens)[:, t]]
            drawn = jnp.argmax(logits, 1) if key is None else jax.random.categorical(jax.random.fold_in(key, t), logits)
            tokens = tokens.at[:, t + 1].set(jnp.where(done, 0, drawn.astype(jnp.int32)))
            lengths += ~done
            done |= (drawn == 0) & self.problem.ends
        finished = done if self.problem.ends else ~done
        return self.rollout(params, tokens, lengths, finished)

    def rollout(self, params: jax.Array, tokens: jax.Array, lengths: jax.Array, finished: jax.Array) -> Rollout:
        return Rollout(
            tokens=tokens,
            prompt_lengths=jnp.ones_like(lengths),
            response_lengths=lengths,
            logprobs=self.logprobs(params, tokens)[0],
            finished=finished,
            version=jnp.zeros((), jnp.int32),
        )

    def experience(
        self, params: jax.Array, rollout: Rollout, config: GRPOConfig | ReinforcePPConfig | ReMaxConfig
    ) -> Experience:
        """The experience of an algorithm without a critic."""
        old, _ = self.logprobs(params, rollout.tokens)
        ref, _ = self.logprobs(self.reference, rollout.tokens)
        scores = self.lookup(self.problem.rewards, rollout.tokens)
        if isinstance(config, GRPOConfig):
            return make_group_experience(rollout, scores, old, ref, config=config, kl_coef=config.kl_coef)
        baselines = None
        if isinstance(config, ReMaxConfig):
            greedy = self.sample(params, rollout.tokens[:, 0], None)
            baselines = self.lookup(self.problem.rewards, greedy.tokens)
        return make_return_experience(rollout, scores, old, ref, baselines, config=config, kl_coef=config.kl_coef)


@dataclass(frozen=True)
class Trained:
    policy: Floats  # [C, S]
    metrics: dict[str, Floats]  # of each iteration


def train(
    problem: Problem,
    config: GRPOConfig | ReinforcePPConfig | ReMaxConfig | PPOConfig | DPOConfig,
    *,
    rows: int = 2048,
    iterations: int = 200,
    rate: float = 0.1,
    seed: int = 0,
) -> Trained:
    """Trains the reference's table, by Adam whose rate falls to 0, on rows drawn anew in every iteration."""
    tables, updates = Tables(problem), iterations * getattr(config, "minibatches", 1)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, updates), b1=0.5)
    samples = config.samples if isinstance(config, GRPOConfig) else 1
    prompts = (jnp.arange(rows, dtype=jnp.int32) // samples) % problem.prompts
    if isinstance(config, DPOConfig):
        start, iteration = _dpo(tables, config, optimizer, prompts)
    elif isinstance(config, SafeRLHFConfig):
        start, iteration = _safe(tables, config, optimizer, prompts)
    elif isinstance(config, PPOConfig):
        start, iteration = _ppo(tables, config, optimizer, prompts)
    else:
        start, iteration = _without_critic(tables, config, optimizer, prompts)

    @compiled
    def run(state: Any, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        return lax.scan(iteration, state, jax.random.split(key, iterations))

    end, metrics = run(start, jax.random.key(seed))
    actor = end if isinstance(end, TrainState) else end.actor
    policy = problem.probabilities(np.asarray(actor.params, np.float64))
    return Trained(policy, {name: np.asarray(x, np.float64) for name, x in metrics.items()})


Iteration = Callable[[Any, jax.Array], tuple[Any, dict[str, jax.Array]]]


def _without_critic(tables: Tables, config: Any, optimizer: Any, prompts: jax.Array) -> tuple[Any, Iteration]:
    step = make_actor_step(tables.logprobs, optimizer, config)

    def iteration(state: TrainState, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        rollout = tables.sample(state.params, prompts, key)
        return step(state, tables.experience(state.params, rollout, config))

    return TrainState.create(tables.reference, optimizer), iteration


def _ppo(tables: Tables, config: PPOConfig, optimizer: Any, prompts: jax.Array) -> tuple[Any, Iteration]:
    step = make_ppo_step(tables.logprobs, tables.values, optimizer, optimizer, config)

    def iteration(state: PPOState, key: jax.Array) -> tuple[PPOState, dict[str, jax.Array]]:
        rollout = tables.sample(state.actor.params, prompts, key)
        experience = make_experience(
            rollout,
            tables.lookup(tables.problem.rewards, rollout.tokens),
            tables.logprobs(state.actor.params, rollout.tokens)[0],
            tables.logprobs(tables.reference, rollout.tokens)[0],
            tables.values(state.critic.params, rollout.tokens),
            config=config,
            kl_coef=state.kl.coef,
        )
        return step(state, experience)

    actor, critic = TrainState.create(tables.reference, optimizer), _critic(tables, optimizer)
    return PPOState.create(actor, critic, kl_coef=config.kl_coef), iteration


class SafeState(NamedTuple):
    actor: TrainState
    critic: TrainState
    cost_critic: TrainState
    multiplier: MultiplierState


def _safe(tables: Tables, config: SafeRLHFConfig, optimizer: Any, prompts: jax.Array) -> tuple[Any, Iteration]:
    actor_step = make_actor_step(tables.logprobs, optimizer, config)
    critic_step = make_critic_step(tables.values, optimizer, config)

    def iteration(state: SafeState, key: jax.Array) -> tuple[SafeState, dict[str, jax.Array]]:
        rollout = tables.sample(state.actor.params, prompts, key)
        costs = tables.lookup(tables.problem.costs, rollout.tokens)
        multiplier = update_multiplier(state.multiplier, costs, config=config)
        reward, cost = make_safe_experience(
            rollout,
            tables.lookup(tables.problem.rewards, rollout.tokens),
            costs,
            tables.logprobs(state.actor.params, rollout.tokens)[0],
            tables.logprobs(tables.reference, rollout.tokens)[0],
            tables.values(state.critic.params, rollout.tokens),
            tables.values(state.cost_critic.params, rollout.tokens),
            config=config,
            kl_coef=config.kl_coef,
            multiplier=multiplier.value,
        )
        actor, _ = actor_step(state.actor, reward)
        critic, _ = critic_step(state.critic, reward)
        cost_critic, _ = critic_step(state.cost_critic, cost)
        return SafeState(actor, critic, cost_critic, multiplier), {"multiplier": multiplier.value}

    actor, critic = TrainState.create(tables.reference, optimizer), _critic(tables, optimizer)
    return SafeState(actor, critic, _critic(tables, optimizer), MultiplierState.create(config)), iteration


def _dpo(tables: Tables, config: DPOConfig, optimizer: Any, prompts: jax.Array) -> tuple[Any, Iteration]:
    """Pairs drawn from the reference; the first is preferred with probability sigmoid(its reward - the other's)."""
    step = make_dpo_step(tables.logprobs, optimizer, config)

    def iteration(state: TrainState, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        keys = jax.random.split(key, 3)
        first, second = (tables.sample(tables.reference, prompts, k) for k in keys[:2])
        gap = jnp.subtract(*(tables.lookup(tables.problem.rewards, r.tokens) for r in (first, second)))
        better = jax.random.bernoulli(keys[2], jax.nn.sigmoid(gap))

        def choose(condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

        batch = PairBatch(
            chosen=choose(better, first.tokens, second.tokens),
            chosen_lengths=choose(better, first.lengths, second.lengths),
            rejected=choose(~better, first.tokens, second.tokens),
            rejected_lengths=choose(~better, first.lengths, second.lengths),
            prompt_lengths=first.prompt_lengths,
        )
        batch = with_reference(batch, tables.logprobs(tables.reference, batch.tokens)[0])
        return step(state, batch)

    return TrainState.create(tables.reference, optimizer), iteration


def _critic(tables: Tables, optimizer: Any) -> TrainState:
    return TrainState.create(jnp.zeros(tables.reference.shape[:2]), optimizer)


def _after_prompt(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (1, 0)))
