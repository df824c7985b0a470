"""What `jrlhf.ppo` computes from the same arrays, through its public functions: see `benchmarks.oracle.peers`.

A policy is a table here: its parameters are the log-probabilities and entropies themselves, so that the gradient by the
parameters, which an optimizer that applies nothing keeps, is the gradient by the log-probabilities.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrlhf.kernels.logprob import token_logprobs
from jrlhf.ppo import (
    DPOConfig,
    Experience,
    GRPOConfig,
    KLState,
    PairBatch,
    PolicyConfig,
    PPOConfig,
    ReinforcePPConfig,
    ReMaxConfig,
    Rollout,
    TrainState,
    experience_metrics,
    gae,
    kl_estimate,
    make_actor_step,
    make_critic_step,
    make_dpo_step,
    make_group_experience,
    make_return_experience,
    masked_whiten,
    update_kl,
)

Arrays = dict[str, np.ndarray]


def numpy(results: dict[str, Any]) -> Arrays:
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


def recorder() -> optax.GradientTransformation:
    """An optimizer that applies nothing; its state is the last gradient."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(init, update)


RECORDER = recorder()


TOKENS = ("hidden", "unembedding", "targets", "weights", "entropy_weights")
_whiten = jax.jit(masked_whiten, static_argnames="shift_mean")
_group_experience = jax.jit(make_group_experience, static_argnames="config")
_return_experience = jax.jit(make_return_experience, static_argnames="config")
_experience_metrics = jax.jit(experience_metrics)
_update_kl = jax.jit(update_kl, static_argnums=2, static_argnames="config")


def _policy_table(params: Any, tokens: Any, *_: Any, **__: Any) -> Any:
    return params["logprobs"], params["entropy"]


def _value_table(params: Any, tokens: Any, *_: Any, **__: Any) -> Any:
    return params["values"]


@cache
def _gae(discount: float, lam: float) -> Any:
    return jax.jit(jax.vmap(partial(gae, discount=discount, lam=lam)))


@partial(jax.jit, static_argnums=2)
def _kl(logprobs: Any, ref_logprobs: Any, kind: Any) -> Any:
    def summed(x: Any) -> Any:
        estimates = kl_estimate(x, ref_logprobs, kind)
        return jnp.sum(estimates), estimates

    (_, estimates), gradient = jax.value_and_grad(summed, has_aux=True)(logprobs)
    return estimates, gradient


@partial(jax.jit, static_argnums=5)
def _tokens(hidden: Any, unembedding: Any, targets: Any, weights: Any, entropy_weights: Any, temperature: float) -> Any:
    def loss(hidden: Any, unembedding: Any) -> Any:
        logprobs, entropy = token_logprobs(hidden, unembedding, targets, temperature=temperature)
        return jnp.sum(logprobs * weights) + jnp.sum(entropy * entropy_weights), (logprobs, entropy)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, unembedding)


@cache
def _actor_step(config: PolicyConfig) -> Any:  # compiled once a shape, not once an input
    return make_actor_step(_policy_table, RECORDER, config)


@cache
def _critic_step(config: PPOConfig) -> Any:
    return make_critic_step(_value_table, RECORDER, config)


@cache
def _dpo_step(config: DPOConfig) -> Any:
    return make_dpo_step(_policy_table, RECORDER, config)


def rollout(arrays: Arrays) -> dict[str, Any]:
    rows, time = arrays["mask"].shape
    return dict(
        tokens=jnp.zeros((rows, time), jnp.int32),
        prompt_lengths=jnp.asarray(arrays["prompt_lengths"]),
        response_lengths=jnp.asarray(arrays["response_lengths"]),
        logprobs=jnp.asarray(arrays["rollout_logprobs"]),
        finished=jnp.asarray(arrays.get("finished", np.ones(rows, np.bool_))),
        version=jnp.int32(0),
    )


def experience(arrays: Arrays, kl_coef: float = 0.0) -> Experience:
    mask = arrays["mask"]

    def read(name: str) -> Any:
        return jnp.where(mask, arrays[name], 0)

    return Experience(
        **rollout(arrays),
        scores=jnp.asarray(arrays["scores"]),
        response_mask=jnp.asarray(mask),
        old_logprobs=read("old_logprobs"),
        ref_logprobs=read("ref_logprobs"),
        values=read("old_values"),
        rewards=read("rewards"),
        advantages=read("advantages"),
        returns=read("returns"),
        importance=read("importance") if "importance" in arrays else None,
        kl_coef=jnp.float32(kl_coef) if kl_coef else None,
    )


def table_gae(arrays: Arrays, *, discount: float, gae_lambda: float) -> Arrays:
    advantages, returns = _gae(discount, gae_lambda)(arrays["rewards"], arrays["values"], arrays["mask"])
    return numpy({"advantages": _whiten(advantages, arrays["mask"], shift_mean=True), "returns": returns})


def whiten(arrays: Arrays, *, shift_mean: bool) -> Arrays:
    return numpy({"whitened": _whiten(arrays["values"], arrays["mask"], shift_mean=shift_mean)})


def group(arrays: Arrays, config: GRPOConfig, *, tokens: bool = True) -> Arrays:
    """Advantages of `make_group_experience`, of every token or of the rows; importance weights where there are any."""
    batch = _group_experience(
        Rollout(**rollout(arrays)),
        jnp.asarray(arrays["scores"]),
        jnp.asarray(arrays["old_logprobs"]),
        jnp.asarray(arrays["ref_logprobs"]) if config.needs_reference else None,
        config=config,
        kl_coef=jnp.float32(config.kl_coef),
    )
    first = arrays["mask"].argmax(1)[:, None]
    advantages = batch.advantages if tokens else np.take_along_axis(np.asarray(batch.advantages), first, 1)[:, 0]
    if batch.importance is None:
        return numpy({"advantages": advantages})
    metrics = {name.removeprefix("rollout_corr/"): x for name, x in _experience_metrics(batch).items()}
    return numpy({**metrics, "advantages": advantages, "importance": batch.importance})


def returns(arrays: Arrays, config: ReinforcePPConfig | ReMaxConfig) -> Arrays:
    batch = _return_experience(
        Rollout(**rollout(arrays)),
        jnp.asarray(arrays["scores"]),
        jnp.asarray(arrays["old_logprobs"]),
        jnp.asarray(arrays["ref_logprobs"]) if config.needs_reference else None,
        jnp.asarray(arrays["baselines"]) if isinstance(config, ReMaxConfig) else None,
        config=config,
        kl_coef=jnp.float32(config.kl_coef),
    )
    return numpy({"advantages": batch.advantages})


def policy(arrays: Arrays, config: PolicyConfig) -> Arrays:
    """The loss of `make_actor_step` on one minibatch, and its gradient by log-probabilities and entropies."""

    if "importance" in arrays:
        config = replace(config, importance="token")
    params = {"logprobs": jnp.array(arrays["logprobs"]), "entropy": jnp.array(arrays["entropy"])}
    state, metrics = _actor_step(config)(TrainState.create(params, RECORDER), experience(arrays, config.kl_coef))
    assert metrics["actor/skipped_updates"] == 0
    results = {name.removeprefix("actor/"): x for name, x in metrics.items()}
    gradients = {f"d_{name}": x for name, x in state.opt_state.items()}
    return numpy({**results, "loss": results["pg_loss"], **gradients})


def value(arrays: Arrays, *, value_clip: float | None) -> Arrays:
    params = {"values": jnp.array(arrays["values"])}
    step = _critic_step(PPOConfig(value_clip=value_clip))
    state, metrics = step(TrainState.create(params, RECORDER), experience(arrays))
    results = {"loss": metrics["critic/vf_loss"], "vf_clipfrac": metrics["critic/vf_clipfrac"]}
    return numpy({**results, "d_values": state.opt_state["values"]})


def kl(arrays: Arrays, *, kl_estimator: Any) -> Arrays:
    estimates, gradient = _kl(arrays["logprobs"], arrays["ref_logprobs"], kl_estimator)
    return numpy({"kl": estimates, "d_logprobs": gradient})


def controller(arrays: Arrays, *, kl_coef: float, kl_target: float, kl_horizon: float, episodes: int) -> Arrays:
    config = PPOConfig(kl_coef=kl_coef, kl_target=kl_target, kl_horizon=kl_horizon)
    state, coefs = KLState(jnp.float32(kl_coef)), []
    for kl in arrays["kl"]:
        state = _update_kl(state, kl, episodes, config=config)
        coefs.append(float(state.coef))
    return {"coefs": np.array(coefs)}


def tokens(arrays: Arrays, *, temperature: float) -> Arrays:
    (total, results), gradients = _tokens(*(arrays[name] for name in TOKENS), temperature)
    names = ("logprobs", "entropy", "d_hidden", "d_unembedding")
    return numpy({"loss": total, **dict(zip(names, (*results, *gradients), strict=True))})


def dpo(arrays: Arrays, *, loss: Any, beta: float, label_smoothing: float = 0.0) -> Arrays:
    """`make_dpo_step` on rows of which the first half is chosen, row i over row i + S."""
    pairs = len(arrays["mask"]) // 2
    order = np.arange(2 * pairs).reshape(2, pairs).T.reshape(-1)  # pair by pair, as the step has them
    ends = jnp.asarray(arrays["prompt_lengths"] + arrays["response_lengths"])
    ref = np.where(arrays["mask"], arrays["ref_logprobs"], 0).sum(1)
    empty = jnp.zeros((pairs, arrays["mask"].shape[1]), jnp.int32)
    batch = PairBatch(
        chosen=empty,
        chosen_lengths=ends[:pairs],
        rejected=empty,
        rejected_lengths=ends[pairs:],
        prompt_lengths=jnp.asarray(arrays["prompt_lengths"][:pairs]),
        ref_chosen=jnp.asarray(ref[:pairs]),
        ref_rejected=jnp.asarray(ref[pairs:]),
    )
    step = _dpo_step(DPOConfig(loss=loss, beta=beta, label_smoothing=label_smoothing))
    logprobs = jnp.array(arrays["logprobs"][order])
    params = {"logprobs": logprobs, "entropy": jnp.zeros_like(logprobs)}
    state, metrics = step(TrainState.create(params, RECORDER), batch)
    gradient = np.empty_like(arrays["logprobs"])
    gradient[order] = state.opt_state["logprobs"]
    return numpy({"loss": metrics["dpo/loss"], "d_logprobs": gradient})
