"""Steps for algorithms with one update per batch: experience and update share their forward passes.

With one epoch of one minibatch, old log-probs and values come from the weights that the update starts from, so its
forward passes would repeat theirs. Here each model runs forward once and backward once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jrlhf.ppo.config import PolicyConfig, PPOConfig
from jrlhf.ppo.experience import make_experience
from jrlhf.ppo.steps import LogprobFn, actor_update, critic_update
from jrlhf.ppo.types import Coefficient, Experience, Logprobs, Rollout, Scores, TrainState
from jrlhf.ppo.updates import Metrics

PyTree = Any
ResponseLogprobFn = Callable[[PyTree, Array, Array], tuple[Float[Array, "B T"], Float[Array, "B T"]]]


def make_on_policy_step(
    logprob_fn: ResponseLogprobFn,
    value_fn: Callable[..., Float[Array, "B T+1"]],
    actor_optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation,
    config: PPOConfig,
) -> Callable[..., tuple[TrainState, TrainState, Experience, Metrics]]:
    """Builds f(actor, critic, rollout, scores, ref_logprobs, kl_coef) -> (actor, critic, experience, metrics), jitted.

    The result equals that of `make_experience` with recomputed log-probs and values, then `make_actor_step` and
    `make_critic_step`; with recomputed log-probs the metrics of the ratio are trivial. Donates the states. The
    residuals of both models' backward passes exist at the same time, for the whole batch.

    logprob_fn: (params, tokens, starts [B]) -> the outputs of a `LogprobFn`, read in responses only: from `starts` on.
    value_fn: (params, tokens) -> V before each token, and after a row's last one at index T.
    scores, ref_logprobs, kl_coef: as in `make_experience`.

    Raises ValueError if `config` asks for several updates, for a batch in parts, or for texts (`ptx_coef`).
    """
    _check_single(config)

    def step(
        actor: TrainState,
        critic: TrainState,
        rollout: Rollout,
        scores: Scores,
        ref_logprobs: Logprobs | None,
        kl_coef: Coefficient,
    ) -> tuple[TrainState, TrainState, Experience, Metrics]:
        old_logprobs, computed_logprobs = _run_actor(logprob_fn, actor.params, rollout, config)
        values, pull = jax.vjp(lambda params: value_fn(params, rollout.tokens), critic.params)
        last = jax.vmap(lambda row, length: row[length])(values, rollout.lengths)
        before = values[:, :-1]
        experience = make_experience(
            rollout, scores, old_logprobs, ref_logprobs, before, config=config, kl_coef=kl_coef, bootstrap_values=last
        )
        computed_values = _computed(before, lambda cotangent: pull(jnp.pad(cotangent, ((0, 0), (0, 1)))))
        update_actor = actor_update(computed_logprobs, actor_optimizer, config, None)
        update_critic = critic_update(computed_values, critic_optimizer, config)
        actor, actor_metrics = update_actor(actor, experience)
        critic, critic_metrics = update_critic(critic, experience)
        return actor, critic, experience, actor_metrics | critic_metrics

    return jax.jit(step, donate_argnums=(0, 1))


def make_on_policy_actor_step(
    logprob_fn: ResponseLogprobFn,
    optimizer: optax.GradientTransformation,
    config: PolicyConfig,
    make_experience: Callable[..., Experience],
) -> Callable[..., tuple[TrainState, Experience, Metrics]]:
    """Builds f(actor, rollout, scores, ref_logprobs, kl_coef) -> (actor, experience, metrics), jitted: no critic.

    make_experience: `make_group_experience` or `make_return_experience`. Otherwise like `make_on_policy_step`.
    """
    _check_single(config)

    def step(
        actor: TrainState, rollout: Rollout, scores: Scores, ref_logprobs: Logprobs | None, kl_coef: Coefficient
    ) -> tuple[TrainState, Experience, Metrics]:
        old_logprobs, computed_logprobs = _run_actor(logprob_fn, actor.params, rollout, config)
        experience = make_experience(rollout, scores, old_logprobs, ref_logprobs, config=config, kl_coef=kl_coef)
        actor, metrics = actor_update(computed_logprobs, optimizer, config, None)(actor, experience)
        return actor, experience, metrics

    return jax.jit(step, donate_argnums=0)


def _check_single(config: PolicyConfig) -> None:
    if config.ptx_coef:
        raise ValueError(f"ptx_coef={config.ptx_coef:g}: texts need passes of their own: use make_actor_step")
    if (config.epochs, config.minibatches, config.micro_batches, config.micro_batch_tokens) != (1, 1, 1, None):
        raise ValueError(
            f"epochs={config.epochs}, minibatches={config.minibatches}, micro_batches={config.micro_batches}, "
            f"micro_batch_tokens={config.micro_batch_tokens}: a single update on a whole batch needs 1, 1, 1 and null"
        )


def _run_actor(
    logprob_fn: ResponseLogprobFn, params: PyTree, rollout: Rollout, config: PolicyConfig
) -> tuple[Logprobs, LogprobFn]:
    """Log-probs under `params`, and a `LogprobFn` that returns this pass's outputs and knows their gradient."""

    def outputs(params: PyTree) -> tuple[Array, Array]:
        return logprob_fn(params, rollout.tokens, rollout.prompt_lengths)

    if config.entropy_coef:
        (logprobs, entropy), pull = jax.vjp(outputs, params)
    else:  # a derivative of the entropy that is not finite would become NaN even with a cotangent of 0
        logprobs, pull_logprobs, entropy = jax.vjp(outputs, params, has_aux=True)
        pull = lambda cotangents: pull_logprobs(cotangents[0])  # noqa: E731
    return logprobs, _computed((logprobs, entropy), pull)


def _computed(outputs: PyTree, pull: Callable[[PyTree], tuple[PyTree]]) -> Callable[..., PyTree]:
    """Outputs that are computed already, as a function of (params, tokens) with their vector-Jacobian product."""

    @jax.custom_vjp
    def run(params: PyTree) -> PyTree:
        return outputs

    run.defvjp(lambda params: (outputs, None), lambda _, cotangents: pull(cotangents))
    return lambda params, tokens: run(params)
