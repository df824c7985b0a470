"""The compiled functions of a model on a mesh. Cached: roles and stages of one architecture share one program.

Where the model is an adapter, each function takes the base as one more argument at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jrlhf.kernels.logprob.api import Implementation
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Layout, reshard
from jrlhf.model import Architecture, Model
from jrlhf.models import (
    Engine,
    SamplingConfig,
    Schedule,
    make_logprobs,
    make_logprobs_with_base,
    make_scores,
    make_token_sums,
    make_values,
    param_shardings,
)
from jrlhf.models.attention import AttentionImplementation
from jrlhf.models.remat import Remat
from jrlhf.ppo import ByLength, PPOConfig, make_actor_step, make_critic_step, make_on_policy_step, map_by_length


@dataclass(frozen=True)
class Compute:
    """How every model of a run computes."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    remat: Remat = "full"
    logprob: Implementation | None = None  # implementation of the log-prob op; None: the platform's default
    train_layout: Layout = TRAIN
    fused_loss: bool = True  # the policy's loss is computed, and differentiated, a tile of tokens at a time
    attention: AttentionImplementation | None = None  # of whole sequences; None: the platform's default
    score_tokens: int | None = None  # a device scores about so many tokens at a time; None: the whole batch as it is


def train_logprobs(model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float = 1.0):
    """(params, tokens) -> (logprobs, entropy), to be differentiated: not jitted, a training step is."""
    return _logprobs(model, mesh, compute.train_layout, compute, temperature)


def train_sums(
    model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float = 1.0, entropy_gradient: bool = True
):
    """(params, tokens, data, terms) -> sums of a loss and of metrics over all tokens, to be differentiated."""
    return make_token_sums(
        model.config,
        mesh,
        model.layout(compute.train_layout),
        lora=model.lora,
        temperature=temperature,
        implementation=compute.logprob,
        entropy_gradient=entropy_gradient,
        remat=compute.remat,
        dtype=compute.dtype,
        attention=compute.attention,
    )


def actor_step(
    model: Architecture,
    mesh: Mesh,
    compute: Compute,
    optimizer: optax.GradientTransformation,
    ppo: PPOConfig,
    *,
    temperature: float,
):
    """(state, experience) -> (state, metrics), jitted: all of the actor's updates on a batch."""
    logprobs = train_logprobs(model, mesh, compute, temperature=temperature)
    entropy_gradient = ppo.entropy_coef != 0
    sums = train_sums(model, mesh, compute, temperature=temperature, entropy_gradient=entropy_gradient)
    return make_actor_step(logprobs, optimizer, ppo, sums_fn=sums if compute.fused_loss else None)


def critic_step(
    model: Architecture, mesh: Mesh, compute: Compute, optimizer: optax.GradientTransformation, ppo: PPOConfig
):
    """(state, experience) -> (state, metrics), jitted: all of the critic's updates on a batch."""
    return make_critic_step(train_values(model, mesh, compute), optimizer, ppo)


def on_policy_step(
    actor: Architecture,
    critic: Architecture,
    mesh: Mesh,
    compute: Compute,
    optimizers: tuple[optax.GradientTransformation, optax.GradientTransformation],
    ppo: PPOConfig,
    *,
    temperature: float,
):
    """`ppo.make_on_policy_step` of an actor and a critic, jitted."""
    logprobs = train_logprobs(actor, mesh, compute, temperature=temperature)
    values = _scalar(make_values, critic, mesh, compute.train_layout, compute)
    return make_on_policy_step(logprobs, values, *optimizers, ppo)


@cache
def score_logprobs(model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float):
    """(params, tokens, lengths) -> (logprobs, entropy), jitted. Beyond a row's length they mean nothing."""
    logprobs = _logprobs(model, mesh, SCORE, compute, temperature)

    def score(params, tokens, lengths, *base):
        return _by_length(compute, lambda tokens: logprobs(params, tokens, *base), tokens, lengths)

    return jax.jit(score)


@cache
def score_logprobs_with_base(model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float):
    """(adapter, tokens, lengths, base) -> (logprobs, entropy, the bare base's logprobs), jitted: one pass for both."""
    assert model.lora is not None
    logprobs = make_logprobs_with_base(
        model.config,
        mesh,
        model.lora,
        temperature=temperature,
        implementation=compute.logprob,
        dtype=compute.dtype,
        attention=compute.attention,
    )

    def score(adapter, tokens, lengths, base):
        return _by_length(compute, lambda tokens: logprobs(adapter, tokens, base), tokens, lengths)

    return jax.jit(score)


def _logprobs(model, mesh, layout, compute, temperature):
    return make_logprobs(
        model.config,
        mesh,
        model.layout(layout),
        lora=model.lora,
        temperature=temperature,
        implementation=compute.logprob,
        remat=compute.remat,
        dtype=compute.dtype,
        attention=compute.attention,
    )


def train_values(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens) -> values [B, T], V before each token, to be differentiated."""
    values = _scalar(make_values, model, mesh, compute.train_layout, compute)
    return lambda params, tokens, *base: values(params, tokens, *base)[:, :-1]


@cache
def score_values(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> (V before each token [B, T], V after each row's last token [B]), jitted."""
    values = _scalar(make_values, model, mesh, SCORE, compute)

    def score(params, tokens, lengths, *base):
        def split(rows):
            tokens, lengths = rows
            every = values(params, tokens, *base)
            return every[:, :-1], jax.vmap(lambda row, length: row[length])(every, lengths)

        return _by_length(compute, split, (tokens, lengths), lengths)

    return jax.jit(score)


def train_scores(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> scores [B], to be differentiated."""
    return _scalar(make_scores, model, mesh, compute.train_layout, compute)


@cache
def score_sequences(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> scores [B], jitted."""
    scores = _scalar(make_scores, model, mesh, SCORE, compute)

    def score(params, tokens, lengths, *base):
        return _by_length(compute, lambda rows: scores(params, *rows, *base), (tokens, lengths), lengths)

    return jax.jit(score)


def _by_length(compute: Compute, function: Callable[[Any], Any], rows: Any, lengths: Int[Array, "B"]) -> Any:
    """`function(rows)`, within the budget of tokens if there is one."""
    tokens = compute.score_tokens
    return function(rows) if tokens is None else map_by_length(function, rows, ByLength(lengths, tokens))


def _scalar(make, model, mesh, layout, compute):
    layout = model.layout(layout)
    return make(
        model.config,
        mesh,
        layout,
        lora=model.lora,
        remat=compute.remat,
        dtype=compute.dtype,
        attention=compute.attention,
    )


@cache
def generate(model: Architecture, mesh: Mesh, compute: Compute, sampling: SamplingConfig, schedule: Schedule | None):
    """(weights in GENERATE, prompts, lengths, row keys) -> Generation."""
    options = {"dtype": compute.dtype, "attention": compute.attention}
    return Engine(model.config, mesh, sampling, schedule, lora=model.lora, **options)


def generation_weights(model: Model, mesh: Mesh, compute: Compute):
    """The weights as `generate` takes them: a copy in GENERATE, cast first, then one all-gather over `fsdp`.

    Shared weights lie there already and are not copied.
    """
    if model.architecture.shared:
        return model.params
    return reshard(model.params, param_shardings(model.config, mesh, GENERATE), dtype=compute.dtype)
