"""Functions of a model with a scalar head: values of a critic, scores of a reward model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from jrlhf.meshes.layout import Layout
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.forward import DEFAULTS, ShardedForward
from jrlhf.models.options import ForwardOptions
from jrlhf.models.params import Params


def make_values(
    config: ModelConfig, mesh: Mesh | AbstractMesh, layout: Layout, options: ForwardOptions = DEFAULTS, **keywords: Any
) -> Callable[..., Float[Array, "B T+1"]]:
    """Builds f(params, tokens [B, T]) -> values [B, T + 1], float32.

    values[:, t] is V before token t: the head's output at t - 1, and 0 at t = 0; values[:, T] is V after the last
    token. Parameters as `init_scalar`; the rest as in `make_logprobs`.
    """
    forward = _forward(config, mesh, layout, options, keywords)

    def local(params, tokens):
        return jnp.pad(_outputs(forward, params, forward.hidden(params, tokens)), ((0, 0), (1, 0)))

    return forward.shard(local)


def make_scores(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    options: ForwardOptions = DEFAULTS,
    *,
    pad_id: int | None = None,
    **keywords: Any,
) -> Callable[..., Float[Array, "B"]]:
    """Builds f(params, tokens [B, T], lengths [B]) -> scores [B], float32: the head's output at position length - 1.

    lengths: each row's real tokens, at least 1. Parameters as `init_scalar`; the rest as in `make_logprobs`.
    pad_id: scores as a classifier of transformers with this `pad_token_id` (`HFConfig.score_pad_id`): the output at the
        row's last real token that is not `pad_id`, at its first token if all are.
    """
    forward = _forward(config, mesh, layout, options, keywords)

    def local(params, tokens, lengths):
        if pad_id is not None:
            time = jnp.arange(tokens.shape[1])[None, :]
            read = (tokens != pad_id) & (time < lengths[:, None])
            lengths = jnp.max(jnp.where(read, time, 0), axis=1) + 1
        last = jax.vmap(lambda row, length: row[length - 1])(forward.hidden(params, tokens), lengths)
        return _outputs(forward, params, last)

    return forward.shard(local)


def _forward(
    config: ModelConfig, mesh: Mesh | AbstractMesh, layout: Layout, options: ForwardOptions, keywords: dict[str, Any]
) -> ShardedForward:
    """Returns the forward pass; raises TypeError for keywords that only log-probabilities use."""
    for name in keywords.keys() & {"temperature", "implementation", "span"}:
        raise TypeError(f"unexpected keyword argument {name!r}: it would have no effect here")
    return ShardedForward(config, mesh, layout, "scalar", replace(options, **keywords))


@jax.named_scope("head")
def _outputs(forward: ShardedForward, params: Params, hidden: Float[Array, "B *T D"]) -> Float[Array, "B *T"]:
    """The head's outputs, in float32."""
    head = jax.tree.map(forward.load, params["value_head"], forward.axes["value_head"])
    exact: Any = {"precision": lax.Precision.HIGHEST}  # else TPUs round to bfloat16 and GPUs to TF32
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), head["kernel"], **exact) + head["bias"]
