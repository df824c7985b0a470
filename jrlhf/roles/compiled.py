"""The compiled functions of a model on a mesh. Cached: roles and stages of one architecture share one program.

Where the model is an adapter, each function takes the base as one more argument at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jrlhf.kernels.logprob.api import Implementation
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Layout, reshard
from jrlhf.models import (
    Engine,
    ForwardOptions,
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
from jrlhf.models.params import Params
from jrlhf.models.remat import Remat
from jrlhf.ppo import (
    ByLength,
    GRPOConfig,
    PolicyConfig,
    PPOConfig,
    make_actor_step,
    make_critic_step,
    make_group_experience,
    make_on_policy_actor_step,
    make_on_policy_step,
    make_return_experience,
    map_by_length,
    map_parts,
)
from jrlhf.roles.model import Architecture, Model
from jrlhf.roles.pretrained import cast_matrices


@dataclass(frozen=True)
class Compute:
    """How every model of a run computes."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    remat: Remat = "full"
    logprob: Implementation | None = None  # implementation of the log-prob op; None: the platform's default
    train_layout: Layout = TRAIN
    score_layout: Layout = SCORE
    score_parts: int = 1  # a device scores its rows in so many equal parts, one after the other
    fused_loss: bool = True  # the policy's loss is computed, and differentiated, a tile of tokens at a time
    attention: AttentionImplementation | None = None  # of whole sequences; None: the platform's default
    score_tokens: int | None = None  # a device scores about so many tokens at a time; None: the whole batch as it is

    def forward(self, model: Architecture) -> ForwardOptions:
        """How the functions of this model compute."""
        return ForwardOptions(
            implementation=self.logprob, remat=self.remat, dtype=self.dtype, attention=self.attention, lora=model.lora
        )


def train_logprobs(
    model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float = 1.0, span: int | None = None
):
    """(params, tokens) -> (logprobs, entropy), to be differentiated: not jitted, a training step is.

    With `span` (params, tokens, starts), as in `make_logprobs`.
    """
    return _logprobs(model, mesh, compute.train_layout, compute, temperature, span)


def train_sums(
    model: Architecture,
    mesh: Mesh,
    compute: Compute,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = True,
    span: int | None = None,
):
    """(params, tokens, data, terms) -> sums of a loss and of metrics over all tokens, to be differentiated.

    With `span` over so many of a row at most, from the first in `data.computed` on: for responses of no more tokens.
    """
    sums = make_token_sums(
        model.config,
        mesh,
        model.layout(compute.train_layout),
        compute.forward(model),
        entropy_gradient=entropy_gradient,
        temperature=temperature,
        span=span,
    )
    if span is None:
        return sums

    def of_responses(params, tokens, data, *others):
        return sums(params, tokens, data, *others, starts=jnp.argmax(data.computed, axis=1))

    return of_responses


def actor_step(
    model: Architecture,
    mesh: Mesh,
    compute: Compute,
    optimizer: optax.GradientTransformation,
    algorithm: PolicyConfig,
    *,
    temperature: float,
    responses: int | None = None,
):
    """(state, experience) -> (state, metrics), jitted: all of the actor's updates on a batch.

    responses: no response has more tokens; None: each may have all.
    """
    logprobs = train_logprobs(model, mesh, compute, temperature=temperature)
    sums = train_sums(
        model,
        mesh,
        compute,
        temperature=temperature,
        entropy_gradient=algorithm.entropy_coef != 0,
        span=None if algorithm.ptx_coef else responses,  # texts beside them are learned from their first token on
    )
    return make_actor_step(logprobs, optimizer, algorithm, sums_fn=sums if compute.fused_loss else None)


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
    responses: int,
):
    """`ppo.make_on_policy_step` of an actor and a critic, jitted. responses: no response has more tokens."""
    logprobs = train_logprobs(actor, mesh, compute, temperature=temperature, span=responses)
    values = _scalar(make_values, critic, mesh, compute.train_layout, compute)
    return make_on_policy_step(logprobs, values, *optimizers, ppo)


def on_policy_actor_step(
    actor: Architecture,
    mesh: Mesh,
    compute: Compute,
    optimizer: optax.GradientTransformation,
    algorithm: PolicyConfig,
    *,
    temperature: float,
    responses: int,
):
    """`ppo.make_on_policy_actor_step` of an actor, jitted. responses: no response has more tokens."""
    logprobs = train_logprobs(actor, mesh, compute, temperature=temperature, span=responses)
    make = make_group_experience if isinstance(algorithm, GRPOConfig) else make_return_experience
    return make_on_policy_actor_step(logprobs, optimizer, algorithm, make)


@cache
def score_logprobs(model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float, span: int | None = None):
    """(params, tokens, lengths) -> (logprobs, entropy), jitted. Beyond a row's length they mean nothing.

    With `span` (params, tokens, lengths, starts), as in `make_logprobs`.
    """
    logprobs = _logprobs(model, mesh, compute.score_layout, compute, temperature, span)

    def score(params, tokens, lengths, *others):
        starts, base = ((), others) if span is None else (others[:1], others[1:])
        return _by_length(compute, lambda rows: logprobs(params, *rows, *base), (tokens, *starts), lengths)

    return jax.jit(score)


@cache
def score_logprobs_with_base(model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float, span: int):
    """(adapter, tokens, lengths, starts, base) -> (logprobs, entropy, the bare base's logprobs), jitted: one pass for
    both, with `span` as in `make_logprobs`."""
    assert model.lora is not None
    options = replace(compute.forward(model), temperature=temperature, span=span)
    logprobs = make_logprobs_with_base(model.config, mesh, model.lora, options)

    def score(adapter, tokens, lengths, starts, base):
        return _by_length(compute, lambda rows: logprobs(adapter, *rows, base), (tokens, starts), lengths)

    return jax.jit(score)


def _logprobs(model, mesh, layout, compute, temperature, span):
    options = replace(compute.forward(model), temperature=temperature, span=span)
    return make_logprobs(model.config, mesh, model.layout(layout), options)


def train_values(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens) -> values [B, T], V before each token, to be differentiated."""
    values = _scalar(make_values, model, mesh, compute.train_layout, compute)
    return lambda params, tokens, *base: values(params, tokens, *base)[:, :-1]


@cache
def score_values(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> (V before each token [B, T], V after each row's last token [B]), jitted."""
    values = _scalar(make_values, model, mesh, compute.score_layout, compute)

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
    scores = _scalar(make_scores, model, mesh, compute.score_layout, compute)

    def score(params, tokens, lengths, *base):
        return _by_length(compute, lambda rows: scores(params, *rows, *base), (tokens, lengths), lengths)

    return jax.jit(score)


def _by_length(compute: Compute, function: Callable[[Any], Any], rows: Any, lengths: Int[Array, "B"]) -> Any:
    """`function(rows)`, within the budget of tokens if there is one, or in parts."""
    if compute.score_tokens is not None:
        return map_by_length(function, rows, ByLength(lengths, compute.score_tokens))
    return function(rows) if compute.score_parts == 1 else map_parts(function, rows, compute.score_parts)


def _scalar(make, model, mesh, layout, compute):
    return make(model.config, mesh, model.layout(layout), compute.forward(model))


@cache
def generate(
    model: Architecture,
    mesh: Mesh,
    compute: Compute,
    sampling: SamplingConfig,
    schedule: Schedule | None,
    samples: int = 1,
):
    """(weights in GENERATE, prompts, lengths, row keys) -> Generation, of so many samples a prompt."""
    options = {"dtype": compute.dtype, "attention": compute.attention}
    return Engine(model.config, mesh, sampling, schedule, samples=samples, lora=model.lora, **options)


def generation_weights(model: Model, mesh: Mesh, compute: Compute, *, donate: bool = False) -> Params:
    """The weights as `generate` takes them: a copy in GENERATE, cast first, then one all-gather over `fsdp`.

    Shared weights that lie there already are not copied. donate: the others are freed as they are copied.
    """
    return weights_at(model, replace(model.architecture, shared=True), mesh, compute, donate=donate)


def weights_at(
    model: Model, architecture: Architecture, mesh: Mesh, compute: Compute, *, donate: bool = False
) -> Params:
    """The weights as the functions of `architecture`, which is the model's or the same as GENERATE stores it, take them
    on `mesh`: the model's own where they lie so there; else a copy, cast before it travels, which is the caller's to
    drop. donate: the model's own are freed as they are copied.
    """
    if is_stored_at(model, architecture, mesh):
        return model.params
    assert architecture.lora is None, "an adapter's roles are all in one place"
    head = "scalar" if "value_head" in model.params else "lm"
    stored = param_shardings(model.config, mesh, GENERATE if architecture.shared else SCORE, head)
    if architecture.shared:
        return reshard(model.params, stored, dtype=compute.dtype, donate=donate)
    if compute.dtype == jnp.float32:
        return reshard(model.params, stored, donate=donate)
    with jax.set_mesh(mesh_of(model)):
        cast = _cast(model.params, compute.dtype)
    return reshard(cast, stored, donate=True)


def relocate(model: Model, architecture: Architecture, mesh: Mesh, *, donate: bool) -> Model:
    """The model with its weights moved, bit for bit, to where functions of `architecture` on `mesh` store them.

    donate: whether they are gone from where they were.
    """
    if is_stored_at(model, architecture, mesh):
        return model
    assert architecture.lora is None, "an adapter's roles are all in one place"
    head = "scalar" if "value_head" in model.params else "lm"
    stored = param_shardings(model.config, mesh, GENERATE if architecture.shared else SCORE, head)
    return Model(architecture, reshard(model.params, stored, donate=donate))


def is_stored_at(model: Model, architecture: Architecture, mesh: Mesh) -> bool:
    """Whether the weights are stored on `mesh` as functions of `architecture` take them."""
    return model.architecture.shared == architecture.shared and mesh_of(model) == mesh


def mesh_of(model: Model) -> Mesh:
    """The mesh that the weights lie on."""
    return jax.tree.leaves(model.params)[0].sharding.mesh


_cast = jax.jit(cast_matrices, static_argnames="dtype")
