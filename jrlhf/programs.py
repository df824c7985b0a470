"""The compiled functions of a model on a mesh. Cached: roles and stages of one shape share one program."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.kernels.logprob.api import Implementation
from jrlhf.meshes import GENERATE, SCORE, TRAIN, Layout, reshard
from jrlhf.models import (
    ModelConfig,
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


def train_logprobs(config: ModelConfig, mesh: Mesh, compute: Compute, *, temperature: float = 1.0):
    """(params, tokens) -> (logprobs, entropy), to be differentiated: not jitted, a training step is."""
    return _logprobs(config, mesh, compute.train_layout, compute, temperature)


@cache
def score_logprobs(config: ModelConfig, mesh: Mesh, compute: Compute, *, temperature: float):
    """(params, tokens) -> (logprobs, entropy), jitted."""
    return jax.jit(_logprobs(config, mesh, SCORE, compute, temperature))


def _logprobs(config, mesh, layout, compute, temperature):
    return make_logprobs(
        config,
        mesh,
        layout,
        temperature=temperature,
        implementation=compute.logprob,
        remat=compute.remat,
        dtype=compute.dtype,
    )


def train_values(config: ModelConfig, mesh: Mesh, compute: Compute):
    """(params, tokens) -> values [B, T], V before each token, to be differentiated."""
    values = make_values(config, mesh, compute.train_layout, remat=compute.remat, dtype=compute.dtype)
    return lambda params, tokens: values(params, tokens)[:, :-1]


@cache
def score_values(config: ModelConfig, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> (V before each token [B, T], V after each row's last token [B]), jitted."""
    values = make_values(config, mesh, SCORE, remat=compute.remat, dtype=compute.dtype)

    def split(params, tokens, lengths):
        every = values(params, tokens)
        return every[:, :-1], jax.vmap(lambda row, length: row[length])(every, lengths)

    return jax.jit(split)


def train_scores(config: ModelConfig, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> scores [B], to be differentiated."""
    return make_scores(config, mesh, compute.train_layout, remat=compute.remat, dtype=compute.dtype)


@cache
def score_sequences(config: ModelConfig, mesh: Mesh, compute: Compute):
    """(params, tokens, lengths) -> scores [B], jitted."""
    return jax.jit(make_scores(config, mesh, SCORE, remat=compute.remat, dtype=compute.dtype))


@cache
def generate(config: ModelConfig, mesh: Mesh, compute: Compute, sampling: SamplingConfig):
    """(weights in GENERATE, prompts, lengths, row keys) -> Generation, jitted."""
    return jax.jit(make_generate(config, mesh, sampling, dtype=compute.dtype))


def generation_weights(params, config: ModelConfig, mesh: Mesh, compute: Compute):
    """Training weights -> their copy in GENERATE: cast first, then one all-gather over `fsdp`."""
    return reshard(params, param_shardings(config, mesh, GENERATE), dtype=compute.dtype)
