"""Training and scoring: log-probabilities, values and scores of given tokens.

Each function is one `jax.shard_map` over all mesh axes, of a `ShardedForward`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from jrlhf.kernels.logprob import Terms
from jrlhf.kernels.logprob.api import Implementation
from jrlhf.meshes import GENERATE, Layout
from jrlhf.models.attention import AttentionImplementation
from jrlhf.models.config import ModelConfig
from jrlhf.models.lora import LoRAConfig
from jrlhf.models.params import Params
from jrlhf.models.remat import Remat
from jrlhf.models.sharded import ShardedForward


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive and finite")


def make_logprobs(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    *,
    temperature: float = 1.0,
    implementation: Implementation | None = None,
    remat: Remat = "full",
    dtype: Any = jnp.float32,
    attention: AttentionImplementation | None = None,
    lora: LoRAConfig | None = None,
    span: int | None = None,
) -> Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"]]]:
    """Builds f(params, tokens [B, T]) -> (logprobs [B, T], entropy [B, T]), both float32, in nats.

    logprobs[:, t] = log pi(tokens[:, t] | tokens[:, :t]), of the softmax at `temperature`; entropy[:, t] is that of the
    whole distribution which token t comes from; both are 0 at t = 0. Rows are right-padded with any token ids below
    vocab_size: no result before a row's end depends on them.

    params: as `init_lm`, stored as `param_shardings(config, mesh, layout)` says.
    implementation: of the log-probability op; None for the platform's default.
    remat: what the backward pass keeps of each layer, as `remat.py` lists: "full" only its input, "offload" that in the
        host's pinned memory, "attention" what attention gave as well, "products" every product, "gather" everything but
        gathered weights. What is not kept is computed again.
    dtype: of weights and activations in compute. Norms, rotary angles, the logits and what follows are float32.
    attention: None for cuDNN on a GPU and splash on a TPU where dtype and shapes allow it, else XLA.
    span: builds f(params, tokens, starts [B]) instead, which predicts so many tokens of a row at most: those from
        starts[b] on (0 counts as 1). All other results are 0, and the head is not computed there: for prompts, of which
        nobody asks. With `lora` f(adapter, tokens, starts, base).
    lora: builds f(adapter, tokens, base) instead, for `layout` GENERATE. adapter: as `init_lora`, float32, stored as
        `lora_shardings` says. base: stored as `param_shardings(config, mesh, GENERATE)` says, in any dtype or as
        `to_int8` makes it, with any head. Differentiate by the adapter.

    In GENERATE the layers are not gathered but sliced over `tensor`, and they are unrolled.
    The function is not jitted: it composes with jit and grad.

    Raises:
        ValueError: the model or, when called, the batch does not fit on the mesh; adapters or int8 weights where they
            cannot be; a span below 1.
    """
    forward = ShardedForward(config, mesh, layout, "lm", remat, dtype, attention, lora, span)
    _check_temperature(temperature)

    def local(params, tokens, starts=None):
        return forward.logprobs(params, tokens, starts, temperature=temperature, implementation=implementation)

    return forward.shard(local)


def make_token_sums(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    *,
    temperature: float = 1.0,
    implementation: Implementation | None = None,
    entropy_gradient: bool = True,
    remat: Remat = "full",
    dtype: Any = jnp.float32,
    attention: AttentionImplementation | None = None,
    lora: LoRAConfig | None = None,
    span: int | None = None,
) -> Callable[..., tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]:
    """Builds f(params, tokens [B, T], data, terms) -> (loss, {name: metric}), float32: sums over all tokens but t = 0.

    With `span` f takes `starts=` [B] besides, and sums over so many tokens of a row at most, from starts[b] on.

    The same as summing `terms(logprobs, entropy, data)` over the results of `make_logprobs`, but where the platform's
    implementation can (`kernels.logprob.token_sums`), the unembedding's gradient is made while a tile's logits exist
    and nothing of it is computed again: three quarters of the head's operations.

    data: a pytree of arrays [B, T], one entry a token.
    terms: (logprobs [n], entropy [n], data [n]) -> (loss [n], {name: metric [n]}), elementwise over any n tokens. It
        may close over no traced array.
    entropy_gradient: False where the loss does not depend on the entropy.

    Differentiable by the parameters, through the loss only. The rest, `lora` and what is raised as in `make_logprobs`;
    with `lora` it builds f(adapter, tokens, data, terms, base).
    """
    forward = ShardedForward(config, mesh, layout, "lm", remat, dtype, attention, lora, span)
    _check_temperature(temperature)
    options = {"temperature": temperature, "implementation": implementation, "entropy_gradient": entropy_gradient}

    def sums(
        params: Params, tokens: Array, data: Any, terms: Terms, *frozen: Params, starts: Array | None = None
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        def local(params, tokens, data, starts):
            return forward.token_sums(params, tokens, starts, data, terms, **options)

        return forward.shard(local, sums=True)(params, tokens, data, starts, *frozen)

    return sums


def make_logprobs_with_base(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    lora: LoRAConfig,
    *,
    temperature: float = 1.0,
    implementation: Implementation | None = None,
    dtype: Any = jnp.float32,
    attention: AttentionImplementation | None = None,
    span: int | None = None,
) -> Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]]:
    """Builds f(adapter, tokens [B, T], base) -> (logprobs, entropy, the bare base's logprobs), all [B, T] and float32.

    With `span` f(adapter, tokens, starts [B], base), as in `make_logprobs`.

    One pass over 2 B rows, of which the first half is adapted: the base's weights are read, made wide from int8 and
    compiled once. For scoring: a gradient would reach the base's half in vain. Parameters as in `make_logprobs`.
    """
    forward = ShardedForward(config, mesh, GENERATE, "lm", "full", dtype, attention, lora, span)
    _check_temperature(temperature)
    options = {"temperature": temperature, "implementation": implementation}

    def local(params, tokens, starts=None):
        count = len(tokens)
        params = {**params, "adapters": [replace(layer, rows=count) for layer in params["adapters"]]}
        tokens, starts = jax.tree.map(lambda x: jnp.concatenate([x, x]), (tokens, starts))
        logprobs, entropy = forward.logprobs(params, tokens, starts, **options)
        return logprobs[:count], entropy[:count], logprobs[count:]

    return forward.shard(local)


def make_values(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    *,
    remat: Remat = "full",
    dtype: Any = jnp.float32,
    attention: AttentionImplementation | None = None,
    lora: LoRAConfig | None = None,
) -> Callable[..., Float[Array, "B T+1"]]:
    """Builds f(params, tokens [B, T]) -> values [B, T + 1], float32.

    values[:, t] is V before token t: the head's output at t - 1. So values[:, T] is V after the last token, and
    values[:, 0] = 0, before any token.
    Parameters as `init_scalar`; the rest as in `make_logprobs`.
    """
    forward = ShardedForward(config, mesh, layout, "scalar", remat, dtype, attention, lora)

    def local(params, tokens):
        return jnp.pad(forward.scalars(params, forward.hidden(params, tokens)), ((0, 0), (1, 0)))

    return forward.shard(local)


def make_scores(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    *,
    remat: Remat = "full",
    dtype: Any = jnp.float32,
    attention: AttentionImplementation | None = None,
    lora: LoRAConfig | None = None,
) -> Callable[..., Float[Array, "B"]]:
    """Builds f(params, tokens [B, T], lengths [B]) -> scores [B], float32: the head's output at position length - 1.

    lengths: each row's real tokens, at least 1. Parameters as `init_scalar`; the rest as in `make_logprobs`.
    """
    forward = ShardedForward(config, mesh, layout, "scalar", remat, dtype, attention, lora)

    def local(params, tokens, lengths):
        last = jax.vmap(lambda row, length: row[length - 1])(forward.hidden(params, tokens), lengths)
        return forward.scalars(params, last)

    return forward.shard(local)
