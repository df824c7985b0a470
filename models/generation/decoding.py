"""Decoding on one device of a mesh: prefill, then one token a row and step, until every row is done.

Everything here runs inside one tensor-parallel `jax.shard_map`: weights are this device's slices of heads, mlp and
vocabulary. The devices of a `tensor` group share b rows, whose attention each computes for its own heads; each of them
draws the tokens of its own B = b / tensor rows, over the whole vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jrlhf.meshes import AXES
from jrlhf.models.attention import (
    AttentionImplementation,
    LayerCache,
    Rotation,
    append,
    cached_attention,
    layer_attention,
    layer_rotations,
    of_layer,
    prefilled_cache,
)
from jrlhf.models.collectives import TENSOR, lookup, total
from jrlhf.models.config import ModelConfig
from jrlhf.models.generation.sampling import SamplingConfig, sample
from jrlhf.models.lora import LoRAConfig, with_adapter
from jrlhf.models.modules import NO_ADAPTERS, Adapters, Attend, Block, Norm, scaled_embeddings
from jrlhf.models.params import Params
from jrlhf.models.quantize import Int8, dequantised, is_int8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The states of a device's own rows. The host needs no more than this to decide what happens to rows."""

    keys: PRNGKeyArray  # [B]: token t of a row is drawn with fold_in(key, t)
    prompt_lengths: Int[Array, "B"]
    lengths: Int[Array, "B"]  # response tokens drawn so far
    last: Int[Array, "B"]  # the token that is fed next: the newest one, at first the prompt's last
    finished: Bool[Array, "B"]  # drew a stop token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The decode loop's carry. `last`, `positions` and `caches` belong to the b rows of a `tensor` group."""

    step: Int[Array, ""]
    running: Int[Array, ""]  # rows of all devices
    last: Int[Array, "b"]
    positions: Int[Array, "b"]
    caches: list[LayerCache]
    rows: Rows
    tokens: Int[Array, "B C"]
    logprobs: Float[Array, "B C"]


@dataclass(frozen=True)
class Decoder:
    """The part of generation that runs on each device. Static.

    dtype: of weights, activations and cache. Norms, rotary angles, softmaxes and log-probabilities are float32.
    attention: of the prefill.
    """

    config: ModelConfig
    sampling: SamplingConfig
    dtype: Any
    attention: AttentionImplementation | None = None
    lora: LoRAConfig | None = None
    transposed: bool = False  # caches, as `attention.transposes_keys` says

    def weights(self, params: Params, adapter: Params) -> Params:
        """The stored slices, cast as the layers read them, with the adapters."""
        return with_adapter(jax.tree.map(self.cast, params, is_leaf=is_int8), adapter, self.lora, self.dtype)

    def run(
        self, weights: Params, rows: Rows, caches: list[LayerCache], steps: int
    ) -> tuple[Rows, list[LayerCache], Int[Array, "B C"], Float[Array, "B C"]]:
        """Draws `steps` tokens of every row that is not done, or fewer if all are done sooner.

        Returns the rows, their caches, the drawn tokens and their log-probabilities; zeros where nothing was drawn.
        """

        def going(state: _State) -> Array:
            return (state.step < steps) & (state.running > 0)

        def advance(state: _State) -> _State:
            rows = state.rows
            hidden, caches = self.decode(weights, state.last, state.positions, state.caches)
            token, logprob = self.draw(weights, hidden, rows)
            running = self.running(rows)
            token, logprob = jnp.where(running, token, 0), jnp.where(running, logprob, 0.0)
            rows = replace(
                rows,
                lengths=rows.lengths + running,
                last=token,
                finished=rows.finished | (running & self.stops(token)),
            )
            return _State(
                step=state.step + 1,
                running=lax.psum(jnp.sum(self.running(rows)), AXES),
                last=lax.all_gather(token, TENSOR, tiled=True),
                # A row that is done is still fed, in step with the others; what it writes is never read.
                positions=state.positions + 1,
                caches=caches,
                rows=rows,
                tokens=lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, axis=1),
                logprobs=lax.dynamic_update_slice_in_dim(state.logprobs, logprob[:, None], state.step, axis=1),
            )

        zeros = jnp.zeros_like(rows.lengths)[:, None]
        end = lax.while_loop(
            going,
            advance,
            _State(
                step=jnp.zeros((), jnp.int32),
                running=lax.psum(jnp.sum(self.running(rows)), AXES),
                last=lax.all_gather(rows.last, TENSOR, tiled=True),
                positions=lax.all_gather(rows.prompt_lengths - 1 + rows.lengths, TENSOR, tiled=True),
                caches=caches,
                rows=rows,
                tokens=jnp.broadcast_to(zeros, (zeros.shape[0], steps)),
                logprobs=jnp.broadcast_to(zeros.astype(jnp.float32), (zeros.shape[0], steps)),
            ),
        )
        return end.rows, end.caches, end.tokens, end.logprobs

    def running(self, rows: Rows) -> Bool[Array, "B"]:
        """Which rows are neither finished nor at the length limit."""
        return ~rows.finished & (rows.lengths < self.sampling.max_new_tokens)

    def cast(self, weight: Array | Int8) -> Array | Int8:
        # Int8 stays: it is made wide layer by layer.
        return weight if isinstance(weight, Int8) or weight.ndim < 2 else weight.astype(self.dtype)

    @jax.named_scope("embed")
    def embed(self, params: Params, tokens: Int[Array, "b T"], positions: Int[Array, "#b T"]) -> Float[Array, "b T D"]:
        x = scaled_embeddings(total(lookup(params["embedding"], tokens), TENSOR), self.config)
        return x + params["positions"][positions] if self.config.positions == "learned" else x

    def layers(self, params: Params, positions: Int[Array, "#b T"]) -> Iterator[tuple[Callable, Rotation | None, bool]]:
        """Each layer, its rotation at these positions, and whether it is local."""
        rotations = layer_rotations(positions, self.config)
        adapters = params.get("adapters", [NO_ADAPTERS] * self.config.layers)
        for weights, local, low in zip(params["layers"], self.config.locality, adapters, strict=True):
            yield partial(self.layer, weights, low), of_layer(rotations, local), local

    def layer(
        self, weights: Params, adapters: Adapters, x: Float[Array, "b T D"], rotation: Rotation | None, attend: Attend
    ) -> tuple[Float[Array, "b T D"], LayerCache]:
        loaded = dequantised(weights, self.dtype, after=x)
        return Block(self.config, loaded)(x, rotation, attend, TENSOR, adapters)

    @jax.named_scope("prefill")
    def prefill(self, params: Params, prompts: Int[Array, "b P"], size: int) -> list[LayerCache]:
        """Each layer's keys and values of the prompts, in caches of `size` positions."""
        positions = jnp.arange(prompts.shape[1])[None, :]
        x, caches = self.embed(params, prompts, positions), []
        for layer, rotation, local in self.layers(params, positions):

            def attend(query, key, value, local=local):
                out = layer_attention(self.config, local, query, key, value, implementation=self.attention)
                return out, prefilled_cache(key, value, size, transposed=self.transposed)

            x, cache = layer(x, rotation, attend)
            caches.append(cache)
        return caches

    @jax.named_scope("decode")
    def decode(
        self, params: Params, tokens: Int[Array, "b"], positions: Int[Array, "b"], caches: list[LayerCache]
    ) -> tuple[Float[Array, "b D"], list[LayerCache]]:
        """Feeds one token a row at its position -> its final hidden state, and the longer caches."""
        tokens, at = tokens[:, None], positions[:, None]
        scores = {"scale": self.config.query_scale, "softcap": self.config.attention_softcap}
        x, longer = self.embed(params, tokens, at), []
        for (layer, rotation, local), cache in zip(self.layers(params, at), caches, strict=True):

            def attend(query, key, value, cache=cache, window=self.config.window if local else None):
                appended = append(cache, key, value, positions)
                return cached_attention(query, appended, positions + 1, window=window, **scores), appended

            x, cache = layer(x, rotation, attend)
            longer.append(cache)
        return Norm(self.config, params["final_norm"])(x)[:, 0], longer

    def draw(
        self, params: Params, hidden: Float[Array, "b D"], rows: Rows
    ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
        """Each own row's next token and its log-probability, over the whole vocabulary."""
        unembedding = params["embedding" if self.config.tie_embeddings else "unembedding"]
        with jax.named_scope("head"):
            logits = jnp.einsum("bd,vd->bv", hidden, unembedding, preferred_element_type=jnp.float32)
            if self.config.softcap is not None:
                logits = self.config.softcap * jnp.tanh(logits / self.config.softcap)
            # From all rows and a slice of the vocabulary to a share of the rows and the whole vocabulary.
            logits = lax.all_to_all(logits, TENSOR, split_axis=0, concat_axis=1, tiled=True)
        with jax.named_scope("sample"):
            return sample(
                logits,
                jax.vmap(jax.random.fold_in)(rows.keys, rows.prompt_lengths + rows.lengths),
                self.sampling,
                vocab_size=self.config.vocab_size,
                may_stop=rows.lengths >= self.sampling.min_new_tokens,
            )

    def stops(self, token: Int[Array, "B"]) -> Bool[Array, "B"]:
        stopped = jnp.zeros_like(token, dtype=bool)
        for stop in self.sampling.stop_ids:
            stopped = stopped | (token == stop)
        return stopped


def first_rows(prompts: Int[Array, "B P"], prompt_lengths: Int[Array, "B"], keys: PRNGKeyArray) -> Rows:
    """Rows of which nothing is drawn yet.

    The prefill only fills the caches. The first step feeds each prompt's last token again, and so draws the first token
    of a response like any other.
    """
    last = jax.vmap(lambda row, length: row[length - 1])(prompts, prompt_lengths)
    zeros = jnp.zeros_like(prompt_lengths)
    return Rows(keys=keys, prompt_lengths=prompt_lengths, lengths=zeros, last=last, finished=zeros > 0)
