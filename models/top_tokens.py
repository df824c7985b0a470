"""Scoring: the most likely tokens at each place of given rows, such as a teacher's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from jrlhf.kernels.logprob.likeliest import top_logprobs
from jrlhf.meshes.layout import Layout
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.forward import DEFAULTS, ShardedForward
from jrlhf.models.options import ForwardOptions


def make_top_logprobs(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    options: ForwardOptions = DEFAULTS,
    *,
    k: int,
    limit: int | None = None,
    **keywords: Any,
) -> Callable[..., tuple[Int[Array, "B T k"], Float[Array, "B T k"]]]:
    """Builds f(params, tokens [B, T]) -> (ids [B, T, k] int32, logprobs [B, T, k] float32, in nats).

    ids[:, t] are the `k` tokens that are most likely after tokens[:, :t], the most likely first, of equal ones the
    lower id; so ids[:, t, 0] need not be tokens[:, t]. logprobs[:, t] are theirs, of the softmax at `temperature`. Both
    are 0 at t = 0. They have no gradient.

    params, `span` and `lora` are as in `make_logprobs`: with `span` f(params, tokens, starts [B]), whose results are 0
    elsewhere, and with `lora` f(adapter, tokens, base). No device has the logits of the whole vocabulary.

    limit: ids from here on, such as rows without a token, are never among the k; the softmax is of all.

    Raises ValueError unless 1 <= k <= vocab_size and k <= limit, and for a named `implementation` other than "xla",
    which cannot.
    """
    if not 1 <= k <= config.vocab_size:
        raise ValueError(f"k={k} must be between 1 and vocab_size={config.vocab_size}")
    forward = ShardedForward(config, mesh, layout, "lm", replace(options, **keywords))
    op = forward.logits
    if (implementation := op.pop("implementation")) not in (None, "xla"):
        raise ValueError(f"implementation={implementation!r} does not find the most likely tokens: use 'xla' or None")

    def local(params, tokens, starts=None):
        hidden = forward.hidden(params, tokens)
        with jax.named_scope("head"):
            hidden, unembedding, _ = forward.predictions(params, hidden, (), starts)
            ids, logprobs = top_logprobs(hidden, unembedding, k, limit=limit, **op)
            return forward.by_row(ids, tokens, starts), forward.by_row(logprobs, tokens, starts)

    return forward.shard(local)
