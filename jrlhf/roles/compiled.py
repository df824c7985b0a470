"""The compiled functions of a model on a mesh.

Functions that score or generate are cached, so that all roles and stages of one architecture share one program. If the
model is an adapter, each function takes the base as one more argument at the end.
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

Function = Callable[..., Any]  # its docstring tells the arguments and results


@dataclass(frozen=True)
class Compute:
    """Settings that all models of a run share."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    remat: Remat = "full"
    logprob: Implementation | None = None  # implementation of the log-prob op; None: the platform's default
    train_layout: Layout = TRAIN
    score_layout: Layout = SCORE
    score_parts: int = 1  # number of equal parts in which a device scores its rows, one after the other
    fused_loss: bool = True  # computes and differentiates the policy's loss one tile of tokens at a time
    attention: AttentionImplementation | None = None  # of whole sequences; None: the platform's default
    score_tokens: int | None = None  # number of tokens that a device scores at a time; None: the whole batch

    def forward(self, model: Architecture) -> ForwardOptions:
        """The options of the forward passes of a model."""
        return ForwardOptions(
            implementation=self.logprob, remat=self.remat, dtype=self.dtype, attention=self.attention, lora=model.lora
        )


def train_logprobs(
    model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float = 1.0, span: int | None = None
) -> Function:
    """(params, tokens) -> (logprobs, entropy), to be differentiated. Not jitted, because the training step is.

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
) -> Function:
    """(params, tokens, data, terms) -> sums of a loss and of metrics over all tokens, to be differentiated.

    span: sums only over this number of tokens per row, from the first one in `data.computed`. No response is longer.
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
) -> Function:
    """(state, experience) -> (state, metrics), jitted: all of the actor's updates on a batch.

    responses: maximum number of tokens of a response; None: that of the row.
    """
    logprobs = train_logprobs(model, mesh, compute, temperature=temperature)
    sums = train_sums(
        model,
        mesh,
        compute,
        temperature=temperature,
        entropy_gradient=algorithm.entropy_coef != 0,
        # Texts that are imitated in addition are trained on from their first token.
        span=None if algorithm.ptx_coef else responses,
    )
    return make_actor_step(logprobs, optimizer, algorithm, sums_fn=sums if compute.fused_loss else None)


def critic_step(
    model: Architecture, mesh: Mesh, compute: Compute, optimizer: optax.GradientTransformation, ppo: PPOConfig
) -> Function:
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
) -> Function:
    """`ppo.make_on_policy_step` of an actor and a critic, jitted. responses: maximum number of tokens of a response."""
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
) -> Function:
    """`ppo.make_on_policy_actor_step` of an actor, jitted. responses: maximum number of tokens of a response."""
    logprobs = train_logprobs(actor, mesh, compute, temperature=temperature, span=responses)
    make = make_group_experience if isinstance(algorithm, GRPOConfig) else make_return_experience
    return make_on_policy_actor_step(logprobs, optimizer, algorithm, make)


@cache
def score_logprobs(
    model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float, span: int | None = None
) -> Function:
    """(params, tokens, lengths) -> (logprobs, entropy), jitted. Beyond a row's length they are undefined.

    With `span` (params, tokens, lengths, starts), as in `make_logprobs`.
    """
    logprobs = _logprobs(model, mesh, compute.score_layout, compute, temperature, span)

    def score(params, tokens, lengths, *others):
        starts, base = ((), others) if span is None else (others[:1], others[1:])
        return _by_length(compute, lambda rows: logprobs(params, *rows, *base), (tokens, *starts), lengths)

    return jax.jit(score)


@cache
def score_logprobs_with_base(
    model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float, span: int
) -> Function:
    """(adapter, tokens, lengths, starts, base) -> (logprobs, entropy, logprobs of the bare base), jitted.

    One pass computes both. span: as in `make_logprobs`.
    """
    assert model.lora is not None
    options = replace(compute.forward(model), temperature=temperature, span=span)
    logprobs = make_logprobs_with_base(model.config, mesh, model.lora, options)

    def score(adapter, tokens, lengths, starts, base):
        return _by_length(compute, lambda rows: logprobs(adapter, *rows, base), (tokens, starts), lengths)

    return jax.jit(score)


def _logprobs(
    model: Architecture, mesh: Mesh, layout: Layout, compute: Compute, temperature: float, span: int | None
) -> Function:
    options = replace(compute.forward(model), temperature=temperature, span=span)
    return make_logprobs(model.config, mesh, model.layout(layout), options)


def train_values(model: Architecture, mesh: Mesh, compute: Compute) -> Function:
    """(params, tokens) -> values [B, T], V before each token, to be differentiated."""
    values = _scalar(make_values, model, mesh, compute.train_layout, compute)
    return lambda params, tokens, *base: values(params, tokens, *base)[:, :-1]


@cache
def score_values(model: Architecture, mesh: Mesh, compute: Compute) -> Function:
    """(params, tokens, lengths) -> (V before each token [B, T], V after each row's last token [B]), jitted."""
    values = _scalar(make_values, model, mesh, compute.score_layout, compute)

    def score(params, tokens, lengths, *base):
        def split(rows):
            tokens, lengths = rows
            states = values(params, tokens, *base)  # [B, T + 1]: of the states before each token and after the last
            return states[:, :-1], jax.vmap(lambda row, length: row[length])(states, lengths)

        return _by_length(compute, split, (tokens, lengths), lengths)

    return jax.jit(score)


def train_scores(model: Architecture, mesh: Mesh, compute: Compute) -> Function:
    """(params, tokens, lengths) -> scores [B], to be differentiated."""
    return _scalar(make_scores, model, mesh, compute.train_layout, compute)


@cache
def score_sequences(model: Architecture, mesh: Mesh, compute: Compute) -> Function:
    """(params, tokens, lengths) -> scores [B], jitted."""
    scores = _scalar(make_scores, model, mesh, compute.score_layout, compute)

    def score(params, tokens, lengths, *base):
        return _by_length(compute, lambda rows: scores(params, *rows, *base), (tokens, lengths), lengths)

    return jax.jit(score)


def _by_length(compute: Compute, function: Callable[[Any], Any], rows: Any, lengths: Int[Array, "B"]) -> Any:
    """`function(rows)`, computed within the budget of tokens if there is one, or else in parts: both save memory."""
    if compute.score_tokens is not None:
        return map_by_length(function, rows, ByLength(lengths, compute.score_tokens))
    return function(rows) if compute.score_parts == 1 else map_parts(function, rows, compute.score_parts)


def _scalar(make: Function, model: Architecture, mesh: Mesh, layout: Layout, compute: Compute) -> Function:
    return make(model.config, mesh, model.layout(layout), compute.forward(model))


@cache
def generate(
    model: Architecture,
    mesh: Mesh,
    compute: Compute,
    sampling: SamplingConfig,
    schedule: Schedule | None,
    samples: int = 1,
) -> Engine:
    """(weights in GENERATE, prompts, lengths, row keys) -> Generation. samples: responses per prompt."""
    options = {"dtype": compute.dtype, "attention": compute.attention}
    return Engine(model.config, mesh, sampling, schedule, samples=samples, lora=model.lora, **options)


def generation_weights(model: Model, mesh: Mesh, compute: Compute, *, donate: bool = False) -> Params:
    """The weights as `generate` takes them: stored in GENERATE. See `weights_at`."""
    return weights_at(model, replace(model.architecture, shared=True), mesh, compute, donate=donate)


def weights_at(
    model: Model, architecture: Architecture, mesh: Mesh, compute: Compute, *, donate: bool = False
) -> Params:
    """The weights as functions of `architecture` on `mesh` take them: the model's own, or else a copy of them.

    architecture: the model's, or the same stored in GENERATE. donate: frees the model's own while they are copied. A
    copy is cast to the compute dtype first: then half as many bytes travel.
    """
    if is_stored_at(model, architecture, mesh):
        return model.params
    shardings = _shardings(model, architecture, mesh)
    if architecture.shared:
        return reshard(model.params, shardings, dtype=compute.dtype, donate=donate)
    if compute.dtype == jnp.float32:
        return reshard(model.params, shardings, donate=donate)
    # Layers are stacked here: `reshard` would take their vectors for matrices and cast them, too.
    with jax.set_mesh(mesh_of(model)):
        cast = _cast(model.params, compute.dtype)
    return reshard(cast, shardings, donate=True)


def relocate(model: Model, architecture: Architecture, mesh: Mesh, *, donate: bool) -> Model:
    """Moves a model's weights, bit for bit, to where functions of `architecture` on `mesh` store them.

    donate: frees the source buffers.
    """
    if is_stored_at(model, architecture, mesh):
        return model
    return Model(architecture, reshard(model.params, _shardings(model, architecture, mesh), donate=donate))


def _shardings(model: Model, architecture: Architecture, mesh: Mesh) -> Any:
    assert architecture.lora is None, "an adapter's roles are all in one place"
    head = "scalar" if "value_head" in model.params else "lm"
    return param_shardings(model.config, mesh, GENERATE if architecture.shared else SCORE, head)


def is_stored_at(model: Model, architecture: Architecture, mesh: Mesh) -> bool:
    """Whether the weights are stored on `mesh` as functions of `architecture` take them."""
    return model.architecture.shared == architecture.shared and mesh_of(model) == mesh


def mesh_of(model: Model) -> Mesh:
    """The mesh on which the weights are stored."""
    return jax.tree.leaves(model.params)[0].sharding.mesh


_cast = jax.jit(cast_matrices, static_argnames="dtype")
