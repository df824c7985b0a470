"""The compiled functions of a model on a mesh. Cached: roles and stages of one architecture share one program.

Where the model is an adapter, each function takes the base as one more argument at the end.
"""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.kernels.logprob.api import Implementation
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Layout, reshard
from jrlhf.model import Architecture, Model
from jrlhf.models import (
    SamplingConfig,
    make_generate,
    make_logprobs,
    make_scores,
    make_values,
    param_shardings,
)
from jrlhf.models.forward import Remat


@dataclass(frozen=True)
class Compute:
    """How every model of a run computes."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    remat: Remat = "full"
    logprob: Implementation | None = None  # implementation of the log-prob op; None: the platform's default
    train_layout: Layout = TRAIN


def train_logprobs(model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float = 1.0):
    """(params, tokens) -> (logprobs, entropy), to be differentiated: not jitted, a training step is."""
    return _logprobs(model, mesh, compute.train_layout, compute, temperature)


@cache
def score_logprobs(model: Architecture, mesh: Mesh, compute: Compute, *, temperature: float):
    """(params, tokens) -> (logprobs, entropy), jitted."""
    return jax.jit(_logprobs(model, mesh, SCORE, compute, temperature))


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
    )


def train_values(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens) -> values [B, T], V before each token, to be differentiated."""
    values = _scalar(make_values, model, mesh, compute.train_layout, compute)
    return lambda params, tokens, *base: values(params, tokens, *base)[:, :-1]


@cache
def score_values(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> (V before each token [B, T], V after each row's last token [B]), jitted."""
    values = _scalar(make_values, model, mesh, SCORE, compute)

    def split(params, tokens, lengths, *base):
        every = values(params, tokens, *base)
        return every[:, :-1], jax.vmap(lambda row, length: row[length])(every, lengths)

    return jax.jit(split)


def train_scores(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> scores [B], to be differentiated."""
    return _scalar(make_scores, model, mesh, compute.train_layout, compute)


@cache
def score_sequences(model: Architecture, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> scores [B], jitted."""
    return jax.jit(_scalar(make_scores, model, mesh, SCORE, compute))


def _scalar(make, model, mesh, layout, compute):
    layout = model.layout(layout)
    return make(model.config, mesh, layout, lora=model.lora, remat=compute.remat, dtype=compute.dtype)


@cache
def generate(model: Architecture, mesh: Mesh, compute: Compute, sampling: SamplingConfig):
    """(weights in GENERATE, prompts, lengths, row keys) -> Generation, jitted."""
    return jax.jit(make_generate(model.config, mesh, sampling, lora=model.lora, dtype=compute.dtype))


def generation_weights(model: Model, mesh: Mesh, compute: Compute):
    """The weights as `generate` takes them: a copy in GENERATE, cast first, then one all-gather over `fsdp`.

    Shared weights lie there already and are not copied.
    """
    if model.architecture.shared:
        return model.params
    return reshard(model.params, param_shardings(model.config, mesh, GENERATE), dtype=compute.dtype)
