"""Log-probabilities of rows that several versions of the weights drew, each continuing from earlier versions' caches.

It runs forward passes over whole rows, as scoring does, and shares no program with decoding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jrlhf.kernels.logprob.api import token_logprobs
from jrlhf.meshes.layout import GENERATE
from jrlhf.models.attention import attention, layer_rotations, of_layer
from jrlhf.models.collectives import TENSOR
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.forward import ShardedForward
from jrlhf.models.generation.redraws import Redraws, differ
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.lora import lora_shardings, with_adapter
from jrlhf.models.modules import NO_ADAPTERS, Block, Norm, dequantised
from jrlhf.models.options import ForwardOptions
from jrlhf.models.params import Params, layer_axes, spec_tree

CACHES = P(GENERATE.batch, None, TENSOR)  # rows are divided over the groups, heads over the devices of a group

Caches = Sequence[tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]]  # each layer's rotated keys, and values


def make_mixture(
    config: ModelConfig,
    mesh: Mesh,
    options: ForwardOptions,
    *,
    by_head: bool = False,
    sampling: SamplingConfig | None = None,
) -> Callable[..., tuple[Float[Array, "B T"], Caches | None, Any]]:
    """Builds f(weights, adapter, tokens [B, T], since [B], caches, redraws) -> (logprobs [B, T], caches, redrawn).

    logprobs[:, t] = log pi(tokens[:, t] | tokens[:, :t]). Positions from `since` on are computed with these weights;
    keys and values of earlier positions come from `caches`. Only results with t > since are meaningful, because other
    weights drew the tokens before.

    weights, adapter: as for decoding; the adapter is {} without `options.lora`.
    caches: keys and values of the positions before `since`; other positions are not read. The returned caches have
        those of all positions, for the next version. None if all `since` are 0.
    by_head: computes attention for one row and key-value head at a time, so only one set of scores is in memory.
    sampling: how the tokens were drawn. With it, `redrawn` [B, K] is True where the score of the token falls short of
        that of the token drawn again by more than rounding; without it, `redrawn` are the logits [B, K, V] of this
        pass. None without redraws.
    """
    forward, lora = ShardedForward(config, mesh, GENERATE, "lm", options), options.lora
    rows, adapted = GENERATE.batch_spec(), {}
    if lora is not None:
        adapted = spec_tree(lora_shardings(config, mesh, lora))

    def on_device(
        params: Params, adapter: Params, tokens: Int[Array, "b T"], since: Int[Array, "b"], caches: Any, redraws: Any
    ) -> Any:
        if lora is not None:
            params = with_adapter(params, adapter, lora, options.dtype)
        positions = jnp.arange(tokens.shape[1])[None, :]
        old = (positions < since[:, None])[:, :, None, None]

        def attend(cache, local, query, key, value):
            pair = key, value
            if cache is not None:
                pair = tuple(jnp.where(old, x.astype(key.dtype), new) for x, new in zip(cache, pair, strict=True))
            attends = partial(attention, **config.scores, local=local, implementation=options.attention)
            return (_by_head(attends, query, *pair) if by_head else attends(query, *pair)), pair

        rotations, x, now = layer_rotations(positions, config), forward.embed(params, tokens), []
        adapters, blank = params.get("adapters", [NO_ADAPTERS] * config.layers), [None] * config.layers
        for layer, low, local, cache in zip(params["layers"], adapters, config.locality, caches or blank, strict=True):
            loaded = jax.tree.map(forward.load, dequantised(layer, options.dtype, after=x), layer_axes(forward.axes))
            x, pair = Block(config, loaded)(x, of_layer(rotations, local), partial(attend, cache, local), TENSOR, low)
            now.append(pair)
        hidden = Norm(config, params["final_norm"])(x)
        hidden, unembedding, targets = forward.predictions(params, hidden, tokens, None)
        logprobs, _ = token_logprobs(hidden, unembedding, targets, **forward.logits)
        redrawn = None
        if redraws is not None:
            # Its collectives wait for those of the log-probabilities, none of which is above 0.
            hidden += (jnp.max(logprobs) > 1).astype(hidden.dtype)
            redrawn = _logits(config, hidden, unembedding, tokens.shape[0], redraws)
            if sampling is not None:
                redrawn = differ(config, sampling, redrawn, tokens, redraws)
        return forward.by_row(logprobs, tokens, None), None if caches is None else now, redrawn

    def call(
        params: Params, adapter: Params, tokens: Array, since: Array, caches: Caches | None, redraws: Any = None
    ) -> Any:
        params, stored = forward.stored(params)
        sliced = P(GENERATE.batch, None, TENSOR)  # the vocabulary is divided over the devices of a group
        rounded = None if redraws is None or redraws.rounded is None else sliced
        drawn_again = None if redraws is None else Redraws(rows, rows, rows, P(), rounded)
        specs, results = (stored, adapted, rows, rows, CACHES, drawn_again), (rows, CACHES, sliced)
        results = results if sampling is None else (rows, CACHES, rows)
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=results)
        return mapped(params, adapter, tokens, since, caches, redraws)

    return call


def _logits(
    config: ModelConfig, hidden: Float[Array, "n D"], unembedding: Float[Array, "v D"], rows: int, redraws: Redraws
) -> Float[Array, "b K v"]:
    """The logits at the places of redraws, of this device's slice of the vocabulary. hidden: of b (T - 1) tokens."""
    hidden = hidden.reshape(rows, -1, hidden.shape[-1])[jnp.arange(rows)[:, None], redraws.at - 1]
    logits = jnp.einsum("bkd,vd->bkv", hidden, unembedding, preferred_element_type=jnp.float32)
    return logits if config.softcap is None else config.softcap * jnp.tanh(logits / config.softcap)


def _by_head(
    attends: Callable[..., Array], query: Float[Array, "B T N H"], key: Float[Array, "B T K H"], value: Array
) -> Float[Array, "B T N H"]:
    batch, length, heads, size = key.shape
    grouped = query.reshape(batch, length, heads, -1, size), key[:, :, :, None], value[:, :, :, None]
    flat = [jnp.moveaxis(x, 2, 1).reshape(batch * heads, 1, length, -1, size) for x in grouped]
    attended = lax.map(lambda own: attends(*own), flat).reshape(batch, heads, length, -1, size)
    return jnp.moveaxis(attended, 1, 2).reshape(query.shape)
