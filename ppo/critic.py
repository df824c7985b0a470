"""Steps that train the critic, and steps that train the actor, and a critic if there is one, by one program.

The on-policy steps are for algorithms with one update per batch: experience and update share their forward passes. With
one epoch of one minibatch, old log-probs and values come from the weights before the update, so the update would repeat
these forward passes. Here each model runs forward once and backward once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jrlhf.ppo.config.algorithms import PPOConfig
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.ppo.experience import sequence_kl, update_kl
from jrlhf.ppo.masked import masked_sum, masked_variance
from jrlhf.ppo.steps import LogprobFn, SumsFn, actor_updates
from jrlhf.ppo.token_advantages import make_experience
from jrlhf.ppo.types import (
    Coefficient,
    Experience,
    KLState,
    Logprobs,
    Rollout,
    Scores,
    TrainState,
    before_tokens,
    check_class,
    on_mesh_of,
)
from jrlhf.ppo.updates import (
    Metrics,
    Objective,
    Pipeline,
    Step,
    UpdateResults,
    Updates,
    check_output,
    make_step,
    repeated,
    run,
)

PyTree = Any
ResponseLogprobFn = Callable[[PyTree, Array, Array], tuple[Float[Array, "B T"], Float[Array, "B T"]]]
ValueFn = Callable[..., Float[Array, "B T"] | Float[Array, "B T+1"]]
"""(params, tokens [B, T]) or (params, tokens, frozen) -> values, `[:, t]` *before* token t; index T is not read."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PPOState:
    actor: TrainState
    critic: TrainState
    kl: KLState

    @classmethod
    def create(cls, actor: TrainState, critic: TrainState, *, kl_coef: float) -> Self:
        """Returns a fresh state whose KL coefficient starts at `kl_coef`.

        Raises ValueError if actor and critic hold the same arrays: a step would free them twice.
        """
        arrays = [{id(leaf) for leaf in jax.tree.leaves(state)} for state in (actor, critic)]
        if arrays[0] & arrays[1]:
            raise ValueError("actor and critic hold the same arrays: give one a copy, jax.tree.map(jnp.copy, params)")
        return cls(actor, critic, KLState(on_mesh_of(actor.params, jnp.asarray(kl_coef, jnp.float32))))


class CriticRows(NamedTuple):
    """The arrays of an experience that the value loss reads."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    old_values: Float[Array, "B T"]
    returns: Float[Array, "B T"]

    @property
    def computed(self) -> Bool[Array, "B T"]:
        """The tokens that the loss reads."""
        return self.mask


class ValueLoss(NamedTuple):
    """Elementwise parts of the clipped value loss."""

    loss: Float[Array, "*S"]
    clipped: Bool[Array, "*S"]


def value_loss(
    values: Float[Array, "*S"], old_values: Float[Array, "*S"], returns: Float[Array, "*S"], *, clip: float | None = 0.2
) -> ValueLoss:
    """Half the squared error of the critic, for each token; with `clip` in the pessimistic form of PPO's first code.

        L = 1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)

    (https://github.com/openai/baselines, ppo2; arXiv:1707.06347 has no such clip.)
    """
    error = jnp.square(values - returns)
    if clip is None:
        return ValueLoss(error / 2, jnp.zeros_like(error, jnp.bool_))
    bounded = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    clipped = bounded > error
    return ValueLoss(jnp.where(clipped, bounded, error) / 2, clipped)


def make_critic_step(
    value_fn: ValueFn, optimizer: optax.GradientTransformation, config: PPOConfig, *, pipeline: Pipeline | None = None
) -> Step[TrainState, Experience]:
    """A jitted step that trains the critic on one batch of experience: epochs x minibatches updates. Donates the state.

    An update's loss is the mean of `value_loss` over the minibatch's response tokens. pipeline: see `make_actor_step`.

    docs/metrics.md explains the metrics, which are means as in `make_actor_step`. critic/vf_explained_var is
    1 - Var(returns - values) / (Var(returns) + 1e-5) of the values before the update (verl's), NaN of no token.
    """
    return make_step(critic_updates(value_fn, optimizer, config), pipeline)


def make_ppo_step(
    logprob_fn: LogprobFn,
    value_fn: ValueFn,
    actor_optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation,
    config: PPOConfig,
    *,
    sums_fn: SumsFn | None = None,
) -> Step[PPOState, Experience]:
    """Makes one jitted step that trains actor and critic and updates the KL controller: (state, experience[, frozen]).

    logprob_fn: (params, tokens [B, T], *frozen) -> (log-probabilities, entropies), [B, T] each; `[:, t]` is of token t
        given those before it. value_fn: (params, tokens[, frozen]) -> values [B, T], or [B, T+1] as `make_values`
        returns them; `[:, t]` is V before token t.
    actor_optimizer, critic_optimizer: of optax, with clipping and schedules. config: the algorithm's settings. sums_fn:
        the actor's, as in `make_actor_step`.

    `frozen` are weights that are not trained, such as the base under an adapter; both functions get the same ones.

    The step donates its state, a `PPOState`. Inside of `jax.jit`, `lax.scan` or `jax.vmap` it donates nothing.
    `target_kl` stops the actor only. `sums_fn` and the texts of `config.ptx_coef` are the actor's, as in
    `make_actor_step`. Metrics are those of both steps and, if the experience has a reference, objective/kl (the
    controller's input) and objective/kl_coef (the coefficient before the update).

    Raises TypeError for arguments of another class, and ValueError when first called with rows that do not divide, with
    another config's experience, or if a function returns another shape.
    """
    update_actor = actor_updates(logprob_fn, actor_optimizer, config, sums_fn)
    update_critic = critic_updates(value_fn, critic_optimizer, config)

    def step(state: PPOState, experience: Experience, *others: PyTree) -> tuple[PPOState, Metrics]:
        check_class("state", state, PPOState)
        frozen = others[1:] if config.ptx_coef else others
        actor, actor_metrics = run(update_actor(state.actor, experience, *others))
        critic, critic_metrics = run(update_critic(state.critic, experience, *frozen))
        metrics = {**actor_metrics, **critic_metrics}
        if experience.ref_logprobs is None:
            return PPOState(actor, critic, state.kl), metrics
        kl = sequence_kl(experience)
        controller = update_kl(state.kl, kl, experience.tokens.shape[0], config=config)
        return PPOState(actor, critic, controller), metrics | {"objective/kl": kl, "objective/kl_coef": state.kl.coef}

    return jax.jit(step, donate_argnums=0)


def critic_updates(
    value_fn: ValueFn, optimizer: optax.GradientTransformation, config: PPOConfig
) -> Callable[..., Updates]:
    """(state, experience, *frozen) -> the critic's updates."""
    check_class("config", config, PPOConfig)

    def loss_fn(params: PyTree, rows: CriticRows, count: Array, *frozen: PyTree) -> tuple[Array, Metrics]:
        output = before_tokens(rows.tokens, value_fn(params, rows.tokens, *frozen))
        values = check_output("value_fn", rows.tokens, output, "values")
        values = jnp.where(rows.mask, values, 0)
        with jax.named_scope("value_loss"):
            parts = value_loss(values, rows.old_values, rows.returns, clip=config.value_clip)
        loss = masked_sum(parts.loss, rows.mask) / count
        return loss, {
            "vf_loss": loss,
            "vf_clipfrac": masked_sum(parts.clipped.astype(jnp.float32), rows.mask) / count,
            "vpred_mean": masked_sum(values, rows.mask) / count,
        }

    objective = Objective(loss_fn, optimizer, ("vf_loss", "vf_clipfrac", "vpred_mean"))

    def update(state: TrainState, experience: Experience, *frozen: PyTree) -> Updates:
        check_class("experience", experience, Experience)
        mask, values, returns = experience.response_mask, experience.values, experience.returns
        if values is None or returns is None:
            raise ValueError("values=None: a critic's step needs values and returns in the experience")
        unexplained = masked_variance(returns - values, mask)

        def end(state: TrainState, results: UpdateResults) -> tuple[TrainState, Metrics]:
            metrics = {f"critic/{name}": value for name, value in results.means.items()}
            explained = 1 - unexplained / (masked_variance(returns, mask) + 1e-5)
            metrics["critic/vf_explained_var"] = jnp.where(jnp.sum(mask) > 0, explained, jnp.nan)
            counts = {f"critic/{name}": results.counts[name] for name in ("skipped_updates", "nonfinite_updates")}
            return state, metrics | counts

        batch = experience.tokens, mask, values, returns
        return repeated(objective, config, state, batch, Partial(CriticRows), frozen, end)

    return update


def make_on_policy_step(
    logprob_fn: ResponseLogprobFn,
    value_fn: Callable[..., Float[Array, "B T+1"]],
    actor_optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation,
    config: PPOConfig,
) -> Callable[
    [TrainState, TrainState, Rollout, Scores, Logprobs | None, Coefficient],
    tuple[TrainState, TrainState, Experience, Metrics],
]:
    """Builds f(actor, critic, rollout, scores, ref_logprobs, kl_coef) -> (actor, critic, experience, metrics), jitted.

    The result equals that of `make_experience` with recomputed log-probs and values, then `make_actor_step` and
    `make_critic_step`; with recomputed log-probs the metrics of the ratio are trivial. It donates the states. The
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
        experience = make_experience(
            rollout, scores, old_logprobs, ref_logprobs, values, config=config, kl_coef=kl_coef
        )
        computed_values = _computed(values, pull)
        update_actor = actor_updates(computed_logprobs, actor_optimizer, config, None)
        update_critic = critic_updates(computed_values, critic_optimizer, config)
        actor, actor_metrics = run(update_actor(actor, experience))
        critic, critic_metrics = run(update_critic(critic, experience))
        return actor, critic, experience, actor_metrics | critic_metrics

    return jax.jit(step, donate_argnums=(0, 1))


def make_on_policy_actor_step(
    logprob_fn: ResponseLogprobFn,
    optimizer: optax.GradientTransformation,
    config: PolicyConfig,
    make_experience: Callable[..., Experience],
) -> Callable[[TrainState, Rollout, Scores, Logprobs | None, Coefficient], tuple[TrainState, Experience, Metrics]]:
    """Builds f(actor, rollout, scores, ref_logprobs, kl_coef) -> (actor, experience, metrics), jitted: no critic.

    make_experience: `make_group_experience` or `make_return_experience`. Otherwise like `make_on_policy_step`.
    """
    _check_single(config)

    def step(
        actor: TrainState, rollout: Rollout, scores: Scores, ref_logprobs: Logprobs | None, kl_coef: Coefficient
    ) -> tuple[TrainState, Experience, Metrics]:
        old_logprobs, computed_logprobs = _run_actor(logprob_fn, actor.params, rollout, config)
        experience = make_experience(rollout, scores, old_logprobs, ref_logprobs, config=config, kl_coef=kl_coef)
        actor, metrics = run(actor_updates(computed_logprobs, optimizer, config, None)(actor, experience))
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
    """Returns log-probs under `params`, and a `LogprobFn` that returns the outputs of this pass, differentiably."""

    def outputs(params: PyTree) -> tuple[Array, Array]:
        return logprob_fn(params, rollout.tokens, rollout.prompt_lengths)

    if config.entropy_coef:
        (logprobs, entropy), pull = jax.vjp(outputs, params)
    else:  # a derivative of the entropy that is not finite would become NaN even with a cotangent of 0
        logprobs, pull_logprobs, entropy = jax.vjp(outputs, params, has_aux=True)
        pull = lambda cotangents: pull_logprobs(cotangents[0])  # noqa: E731
    return logprobs, _computed((logprobs, entropy), pull)


def _computed(outputs: PyTree, pull: Callable[[PyTree], tuple[PyTree]]) -> Callable[..., PyTree]:
    """Makes a differentiable function of (params, tokens) from outputs that are computed already, and their VJP."""

    @jax.custom_vjp
    def again(params: PyTree) -> PyTree:
        return outputs

    again.defvjp(lambda params: (outputs, None), lambda _, cotangents: pull(cotangents))
    return lambda params, tokens: again(params)
