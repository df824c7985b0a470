"""Training and scoring: log-probabilities, values and scores of given tokens.

Each function is one `jax.shard_map` over all mesh axes, of a `ShardedForward`. It is not jitted: it composes with jit
and grad. Every factory takes `ForwardOptions`, or their fields as keywords, or both.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from jrlhf.kernels.logprob import Terms
from jrlhf.meshes import GENERATE, Layout
from jrlhf.models.config import ModelConfig
from jrlhf.models.lora import LoRAConfig
from jrlhf.models.sharded import ForwardOptions, ShardedForward
from jrlhf.models.weights import Params

DEFAULTS = ForwardOptions()
_OF_TOKENS = ("temperature", "implementation", "span")


def make_logprobs(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    options: ForwardOptions = DEFAULTS,
    **keywords: Any,
) -> Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"]]]:
    """Builds f(params, tokens [B, T]) -> (logprobs [B, T], entropy [B, T]), both float32, in nats.

    logprobs[:, t] = log pi(tokens[:, t] | tokens[:, :t]), of the softmax at `temperature`; entropy[:, t] is that of the
    whole distribution which token t comes from; both are 0 at t = 0. Rows are right-padded with any token ids below
    vocab_size: no result before a row's end depends on them.

    params: as `init_lm`, stored as `param_shardings(config, mesh, layout)` says.
    span: builds f(params, tokens, starts [B]) instead, which predicts at most this number of tokens of a row: those
        from starts[b] on (0 counts as 1). All other results are 0, and the head is not computed there: for prompts,
        whose log-probabilities nobody needs. With `lora` f(adapter, tokens, starts, base).
    lora: builds f(adapter, tokens, base) instead, for `layout` GENERATE. adapter: as `init_lora`, float32, stored as
        `lora_shardings` says. base: stored as `param_shardings(config, mesh, GENERATE)` says, in any dtype or as
        `to_int8` makes it, with any head. Differentiate by the adapter.

    In GENERATE the layers are not gathered but sliced over `tensor`, and they are unrolled.

    Raises:
        ValueError: the model or, when called, the batch does not fit on the mesh; adapters or int8 weights where they
            cannot be.
    """
    forward = ShardedForward(config, mesh, layout, "lm", replace(options, **keywords))
    return forward.shard(lambda params, tokens, starts=None: forward.logprobs(params, tokens, starts))


def make_token_sums(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    options: ForwardOptions = DEFAULTS,
    *,
    entropy_gradient: bool = True,
    **keywords: Any,
) -> Callable[..., tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]:
    """Builds f(params, tokens [B, T], data, terms) -> (loss, {name: metric}), float32: sums over all tokens but t = 0.

    With `span` f takes `starts=` [B] as well, and sums over at most this number of tokens of a row, from starts[b] on.

    The same as summing `terms(logprobs, entropy, data)` over the results of `make_logprobs`, but where the platform's
    implementation can (`kernels.logprob.token_sums`), the unembedding's gradient is made while a tile's logits exist
    and nothing of it is computed again: three quarters of the head's operations.

    data: a pytree of arrays [B, T], one entry for each token.
    terms: (logprobs [n], entropy [n], data [n]) -> (loss [n], {name: metric [n]}), elementwise over any n tokens. It
        may close over no traced array.
    entropy_gradient: False where the loss does not depend on the entropy.

    Differentiable by the parameters, through the loss only. The rest is as in `make_logprobs`; with `lora` it builds
    f(adapter, tokens, data, terms, base).
    """
    forward = ShardedForward(config, mesh, layout, "lm", replace(options, **keywords))

    def sums(
        params: Params, tokens: Array, data: Any, terms: Terms, *frozen: Params, starts: Array | None = None
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        def local(params, tokens, data, starts):
            return forward.token_sums(params, tokens, starts, data, terms, entropy_gradient=entropy_gradient)

        return forward.shard(local, sums=True)(params, tokens, data, starts, *frozen)

    return sums


def make_logprobs_with_base(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    lora: LoRAConfig,
    options: ForwardOptions = DEFAULTS,
    **keywords: Any,
) -> Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]]:
    """Builds f(adapter, tokens [B, T], base) -> (logprobs, entropy, the bare base's logprobs), all [B, T] and float32.

    With `span` f(adapter, tokens, starts [B], base), as in `make_logprobs`.

    One pass over 2 B rows, of which the first half is adapted: the base's weights are read, dequantized from int8 and
    compiled once. For scoring only: a gradient would reach the base's half in vain, so `remat` is not used.
    """
    options = replace(_accepted(options, keywords, "remat"), lora=lora, remat="full")
    forward = ShardedForward(config, mesh, GENERATE, "lm", options)

    def local(params, tokens, starts=None):
        count = len(tokens)
        params = {**params, "adapters": [replace(layer, rows=count) for layer in params["adapters"]]}
        tokens, starts = jax.tree.map(lambda x: jnp.concatenate([x, x]), (tokens, starts))
        logprobs, entropy = forward.logprobs(params, tokens, starts)
        return logprobs[:count], entropy[:count], logprobs[count:]

    return forward.shard(local)


def make_values(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    options: ForwardOptions = DEFAULTS,
    **keywords: Any,
) -> Callable[..., Float[Array, "B T+1"]]:
    """Builds f(params, tokens [B, T]) -> values [B, T + 1], float32.

    values[:, t] is V before token t: the head's output at t - 1. So values[:, T] is V after the last token, and
    values[:, 0] = 0, before any token.
    Parameters as `init_scalar`; the rest as in `make_logprobs`.
    """
    forward = ShardedForward(config, mesh, layout, "scalar", _accepted(options, keywords, *_OF_TOKENS))

    def local(params, tokens):
        return jnp.pad(forward.scalars(params, forward.hidden(params, tokens)), ((0, 0), (1, 0)))

    return forward.shard(local)


def make_scores(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    layout: Layout,
    options: ForwardOptions = DEFAULTS,
    **keywords: Any,
) -> Callable[..., Float[Array, "B"]]:
    """Builds f(params, tokens [B, T], lengths [B]) -> scores [B], float32: the head's output at position length - 1.

    lengths: each row's real tokens, at least 1. Parameters as `init_scalar`; the rest as in `make_logprobs`.
    """
    forward = ShardedForward(config, mesh, layout, "scalar", _accepted(options, keywords, *_OF_TOKENS))

    def local(params, tokens, lengths):
        last = jax.vmap(lambda row, length: row[length - 1])(forward.hidden(params, tokens), lengths)
        return forward.scalars(params, last)

    return forward.shard(local)


def _accepted(options: ForwardOptions, keywords: dict[str, Any], *unused: str) -> ForwardOptions:
    """The options with these keywords, none of which may be one that the function does not use."""
    for name in unused:
        if name in keywords:
            raise TypeError(f"unexpected keyword argument {name!r}: it would have no effect here")
    return replace(options, **keywords)
