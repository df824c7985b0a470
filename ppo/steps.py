"""The jitted PPO steps: (state, experience) -> (state, metrics). They see functions and arrays, never a model.

Everything that a step divides by is a count over the whole minibatch, so losses, gradients and metrics do not depend on
micro-batches, padding, mesh or layout. The arrays may be unsharded, or have their rows sharded on a mesh with Auto or
Explicit axes (run inside `with jax.set_mesh(mesh)`); parameters may be sharded as the given function likes.

A step donates its state: the arrays in it are gone afterwards, so whoever starts from the same weights (the reference,
a critic made from the reward model) needs a copy of them.

A step is called as (state, experience) or as (state, experience, frozen). `frozen` goes on to the given functions as
their last argument: weights that they read and nobody trains, such as the base under an adapter. It is never donated,
so any number of roles may share it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jrlhf.ppo.budget import ByLength, row_ends
from jrlhf.ppo.config import PPOConfig
from jrlhf.ppo.experience import sequence_kl
from jrlhf.ppo.kl import update_kl
from jrlhf.ppo.losses import policy_loss, value_loss
from jrlhf.ppo.masked import masked_sum, masked_variance, token_count
from jrlhf.ppo.minibatches import check_divisible, draw_minibatch
from jrlhf.ppo.types import Experience, PPOState, TrainState
from jrlhf.ppo.updates import Metrics, apply_update

PyTree = Any
Terms = Callable[[Array, Array, Any], tuple[Array, dict[str, Array]]]


class LogprobFn(Protocol):
    """(params, tokens) -> log-probabilities and entropies, `[:, t]` of token t given the tokens before it.

    (params, tokens, frozen) where the step is called with `frozen`; to a type checker any further argument is well.
    """

    def __call__(
        self, params: PyTree, tokens: Int[Array, "B T"], /, *frozen: Any, **_: Any
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]: ...


class SumsFn(Protocol):
    """(params, tokens, data, terms) or (params, tokens, data, terms, frozen) -> sums of `terms` over the tokens.

    `data` is a pytree of [B, T] arrays, and terms(logprobs, entropy, data) -> (loss, {name: metric}) is elementwise: of
    any tokens' log-probabilities and entropies, in any shape, with the same tokens' data. The sums are over all tokens,
    of which those at t = 0 may be left out. Differentiated through the loss only.
    """

    def __call__(
        self, params: PyTree, tokens: Int[Array, "B T"], data: PyTree, terms: Terms, /, *frozen: Any, **_: Any
    ) -> tuple[Float[Array, ""], Metrics]: ...


class ValueFn(Protocol):
    """(params, tokens) or (params, tokens, frozen) -> values, `[:, t]` *before* token t."""

    def __call__(self, params: PyTree, tokens: Int[Array, "B T"], /, *frozen: Any, **_: Any) -> Float[Array, "B T"]: ...


class ActorRows(NamedTuple):
    """What the policy loss reads of an experience."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    old_logprobs: Float[Array, "B T"]
    advantages: Float[Array, "B T"]


class CriticRows(NamedTuple):
    """What the value loss reads of an experience."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    old_values: Float[Array, "B T"]
    returns: Float[Array, "B T"]


def make_actor_step(
    logprob_fn: LogprobFn,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    *,
    sums_fn: SumsFn | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted step that trains the actor on one batch of experience: epochs x minibatches updates. Donates the state.

    An update's loss is the mean over the minibatch's response tokens of `losses.policy_loss`, minus `entropy_coef`
    times the mean entropy. `sums_fn` is for models that can sum a loss faster than they can return log-probabilities to
    be differentiated: given, it computes the loss, to the same result, and `logprob_fn` is not called.

    With `config.target_kl`, an update is applied only while the minibatch's KL(old, new), measured in its own forward
    pass by the k3 estimator mean(rho - 1 - log rho), does not exceed it. The first that does ends the call: it is not
    applied, and no later one is computed.

    Metrics are means over the updates that were computed and finite (NaN if there was none):
        actor/pg_loss, actor/entropy, actor/ppo_kl (k1: mean of -log rho), actor/approx_kl (k3), actor/ratio,
        actor/pg_clipfrac, actor/pg_clipfrac_lower (dual clip), actor/grad_norm; and
        actor/initial_ratio_gap: mean |rho - 1| in the first minibatch, 0 up to rounding with recomputed log-probs;
        actor/skipped_updates: not applied because something was not finite;
        actor/stopped_updates: not applied because of `target_kl`.

    Raises (when first called with a shape):
        ValueError: the rows do not divide into minibatches x micro_batches.
    """
    return jax.jit(actor_update(logprob_fn, optimizer, config, sums_fn), donate_argnums=0)


def make_critic_step(
    value_fn: ValueFn, optimizer: optax.GradientTransformation, config: PPOConfig
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted step that trains the critic on one batch of experience: epochs x minibatches updates. Donates the state.

    An update's loss is the mean over the minibatch's response tokens of `losses.value_loss`.

    Metrics: critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean, critic/grad_norm as means over the finite updates;
    critic/skipped_updates; and critic/vf_explained_var = 1 - Var(returns - values) / (Var(returns) + 1e-5) of the
    values in the experience, i.e. before the update (verl's definition).

    Raises (when first called with a shape):
        ValueError: the rows do not divide into minibatches x micro_batches.
    """
    return jax.jit(critic_update(value_fn, optimizer, config), donate_argnums=0)


def make_ppo_step(
    logprob_fn: LogprobFn,
    value_fn: ValueFn,
    actor_optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation,
    config: PPOConfig,
    *,
    sums_fn: SumsFn | None = None,
) -> Callable[..., tuple[PPOState, Metrics]]:
    """One jitted step that trains actor and critic and moves the KL controller. Donates the state.

    Both functions read the same `frozen`, if there is any. The two do not read each other's result, so their order is
    of no matter; `target_kl` stops the actor only. `sums_fn` is the actor's, as in `make_actor_step`.
    Metrics are those of `make_actor_step` and `make_critic_step`, objective/kl (the controller's input) and
    objective/kl_coef (the coefficient that penalised this experience, before the controller moves it).
    """
    update_actor = actor_update(logprob_fn, actor_optimizer, config, sums_fn)
    update_critic = critic_update(value_fn, critic_optimizer, config)

    def step(state: PPOState, experience: Experience, *frozen: PyTree) -> tuple[PPOState, Metrics]:
        actor, actor_metrics = update_actor(state.actor, experience, *frozen)
        critic, critic_metrics = update_critic(state.critic, experience, *frozen)
        kl = sequence_kl(experience)
        controller = update_kl(state.kl, kl, experience.tokens.shape[0], config=config)
        metrics = {**actor_metrics, **critic_metrics, "objective/kl": kl, "objective/kl_coef": state.kl.coef}
        return PPOState(actor, critic, controller), metrics

    return jax.jit(step, donate_argnums=0)


def actor_update(
    logprob_fn: LogprobFn, optimizer: optax.GradientTransformation, config: PPOConfig, sums_fn: SumsFn | None
) -> Callable[..., tuple[TrainState, Metrics]]:
    terms = partial(_policy_terms, config)

    def summed(params: PyTree, tokens: Array, data: ActorRows, terms: Terms, *frozen: PyTree) -> tuple[Array, Metrics]:
        logprobs, entropy = logprob_fn(params, tokens, *frozen)
        _check_output("logprob_fn", tokens, logprobs, entropy)
        return jax.tree.map(jnp.sum, terms(logprobs, entropy, data))

    sums = sums_fn or summed

    def loss_fn(params: PyTree, rows: ActorRows, count: Array, *frozen: PyTree) -> tuple[Array, Metrics]:
        return jax.tree.map(lambda x: x / count, sums(params, rows.tokens, rows, terms, *frozen))

    names = ("pg_loss", "entropy", "ppo_kl", "approx_kl", "ratio", "ratio_gap", "pg_clipfrac", "pg_clipfrac_lower")
    target_kl = config.target_kl
    veto = None if target_kl is None else lambda metrics: metrics["approx_kl"] > target_kl

    def update(state: TrainState, experience: Experience, *frozen: PyTree) -> tuple[TrainState, Metrics]:
        rows = ActorRows(experience.tokens, experience.response_mask, experience.old_logprobs, experience.advantages)
        state, run = _run_updates(loss_fn, optimizer, config, state, rows, frozen, names, veto)
        metrics = {f"actor/{name}": value for name, value in run.means.items() if name != "ratio_gap"}
        metrics["actor/initial_ratio_gap"] = run.first["ratio_gap"]
        metrics["actor/skipped_updates"] = run.skipped.astype(jnp.float32)
        metrics["actor/stopped_updates"] = run.stopped.astype(jnp.float32)
        return state, metrics

    return update


def critic_update(
    value_fn: ValueFn, optimizer: optax.GradientTransformation, config: PPOConfig
) -> Callable[..., tuple[TrainState, Metrics]]:
    def loss_fn(params: PyTree, rows: CriticRows, count: Array, *frozen: PyTree) -> tuple[Array, Metrics]:
        values = value_fn(params, rows.tokens, *frozen)
        _check_output("value_fn", rows.tokens, values)
        values = jnp.where(rows.mask, values, 0)
        parts = value_loss(values, rows.old_values, rows.returns, clip=config.value_clip)
        loss = masked_sum(parts.loss, rows.mask) / count
        return loss, {
            "vf_loss": loss,
            "vf_clipfrac": masked_sum(parts.clipped.astype(jnp.float32), rows.mask) / count,
            "vpred_mean": masked_sum(values, rows.mask) / count,
        }

    names = ("vf_loss", "vf_clipfrac", "vpred_mean")

    def update(state: TrainState, experience: Experience, *frozen: PyTree) -> tuple[TrainState, Metrics]:
        mask, returns = experience.response_mask, experience.returns
        unexplained = masked_variance(returns - experience.values, mask)
        rows = CriticRows(experience.tokens, mask, experience.values, returns)
        state, run = _run_updates(loss_fn, optimizer, config, state, rows, frozen, names)
        metrics = {f"critic/{name}": value for name, value in run.means.items()}
        metrics["critic/vf_explained_var"] = 1 - unexplained / (masked_variance(returns, mask) + 1e-5)
        metrics["critic/skipped_updates"] = run.skipped.astype(jnp.float32)
        return state, metrics

    return update


def _policy_terms(
    config: PPOConfig, logprobs: Array, entropy: Array, rows: ActorRows
) -> tuple[Array, dict[str, Array]]:
    """Every token's loss and metrics; 0 where the mask is False."""
    # Selected before the mathematics, not after: a NaN in the padding would come back through the gradient.
    logprobs = jnp.where(rows.mask, logprobs, 0)
    old_logprobs = jnp.where(rows.mask, rows.old_logprobs, 0)
    parts = policy_loss(
        logprobs,
        old_logprobs,
        rows.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    metrics = {
        "pg_loss": parts.loss,
        "entropy": entropy,
        "ppo_kl": -parts.log_ratio,
        "approx_kl": parts.ratio - 1 - parts.log_ratio,
        "ratio": parts.ratio,
        "ratio_gap": jnp.abs(parts.ratio - 1),
        "pg_clipfrac": parts.clipped.astype(jnp.float32),
        "pg_clipfrac_lower": parts.clipped_lower.astype(jnp.float32),
    }
    metrics = {name: jnp.where(rows.mask, x, 0) for name, x in metrics.items()}
    loss = metrics["pg_loss"]
    if config.entropy_coef:  # else the entropy's gradient is not even asked for
        loss -= config.entropy_coef * metrics["entropy"]
    return loss, metrics


class _Run(NamedTuple):
    """What became of all updates on one batch."""

    means: Metrics
    first: Metrics
    skipped: Int[Array, ""]
    stopped: Int[Array, ""]


class _Carry(NamedTuple):
    index: Int[Array, ""]  # updates computed so far
    params: PyTree
    opt_state: PyTree
    stop: Bool[Array, ""]
    finite: Int[Array, ""]  # how many of them had finite gradients
    sums: Metrics  # over those
    first: Metrics


def _run_updates(
    loss_fn: Callable[..., tuple[Array, Metrics]],
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    state: TrainState,
    rows: Any,
    frozen: tuple[PyTree, ...],
    names: tuple[str, ...],
    veto: Callable[[Metrics], Bool[Array, ""]] | None = None,
) -> tuple[TrainState, _Run]:
    """epochs x minibatches updates in one loop, which ends early once `veto` holds.

    loss_fn: (params, rows, count, *frozen) -> (loss, metrics).
    """
    check_divisible(rows.tokens, config.minibatches, config.micro_batches)
    total = config.epochs * config.minibatches
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)

    def one(carry: _Carry) -> _Carry:
        epoch, minibatch = carry.index // config.minibatches, carry.index % config.minibatches
        batch = draw_minibatch(rows, jax.random.fold_in(key, epoch), minibatch, config.minibatches)
        count, tokens = token_count(batch.mask), config.micro_batch_tokens
        update = apply_update(
            lambda params, micro: loss_fn(params, micro, count, *frozen),
            optimizer,
            carry.params,
            carry.opt_state,
            batch,
            micro_batches=config.micro_batches if tokens is None else ByLength(row_ends(batch.mask), tokens),
            metric_names=names,
            veto=veto,
        )
        return _Carry(
            index=carry.index + 1,
            params=update.params,
            opt_state=update.opt_state,
            stop=carry.stop if veto is None else veto(update.metrics),
            finite=carry.finite + update.finite.astype(jnp.int32),
            sums=jax.tree.map(lambda s, x: s + jnp.where(update.finite, x, 0), carry.sums, update.metrics),
            first=jax.tree.map(lambda f, x: jnp.where(carry.index == 0, x, f), carry.first, update.metrics),
        )

    none = jnp.zeros((), jnp.int32)
    zeros = dict.fromkeys((*names, "grad_norm"), jnp.zeros((), jnp.float32))
    start = _Carry(none, state.params, state.opt_state, jnp.zeros((), jnp.bool_), none, zeros, zeros)
    end = lax.while_loop(lambda carry: (carry.index < total) & ~carry.stop, one, start)
    run = _Run(
        means=jax.tree.map(lambda s: s / end.finite.astype(jnp.float32), end.sums),
        first=end.first,
        skipped=end.index - end.finite,
        stopped=jnp.where(end.stop, total - end.index + 1, 0),
    )
    return TrainState(end.params, end.opt_state, state.step + 1), run


def _check_output(name: str, tokens: Array, *outputs: Array) -> None:
    for x in outputs:
        if x.shape != tokens.shape:
            raise ValueError(f"{name} returned an array of shape {x.shape} for tokens of shape {tokens.shape}")
