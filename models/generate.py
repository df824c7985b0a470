"""Generation: prefill, then a decode loop until every row has stopped, in one tensor-parallel `jax.shard_map`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jrlhf.meshes import AXES, GENERATE
from jrlhf.models.attention import (
    AttentionImplementation,
    Rotation,
    attention,
    cached_attention,
    layer_rotations,
    of_layer,
)
from jrlhf.models.cache import LayerCache, append, prefill
from jrlhf.models.collectives import TENSOR, check_rows, lookup, own_rows, place, total
from jrlhf.models.config import ModelConfig
from jrlhf.models.lora import LoRAConfig, lora_shardings, split_arguments, with_adapter
from jrlhf.models.modules import NO_ADAPTERS, Adapters, Attend, block, final_norm, scaled_embeddings
from jrlhf.models.params import Params, param_shardings, spec_tree
from jrlhf.models.quantize import Int8, dequantised, has_int8, int8_specs, is_int8
from jrlhf.models.sampling import SamplingConfig, sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """Prompts with their responses: right-padded with zeros, no gap between the two.

    logprobs[:, t] is the log-probability with which token t was drawn, 0 where token t was not drawn.
    response_lengths include the stop token. finished: the row drew a stop token, rather than reaching the length limit.
    """

    tokens: Int[Array, "B P+R"]
    prompt_lengths: Int[Array, "B"]
    response_lengths: Int[Array, "B"]
    logprobs: Float[Array, "B P+R"]
    finished: Bool[Array, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Decoding:
    """The decode loop's carry. `last` and `caches`: the b rows of a `tensor` group, B: a device's share of them."""

    step: Int[Array, ""]
    unfinished: Int[Array, ""]
    last: Int[Array, "b"]
    caches: list[LayerCache]
    tokens: Int[Array, "B R"]
    logprobs: Float[Array, "B R"]
    lengths: Int[Array, "B"]
    finished: Bool[Array, "B"]


def make_generate(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    sampling: SamplingConfig,
    *,
    dtype: Any = jnp.float32,
    attention: AttentionImplementation | None = None,
    lora: LoRAConfig | None = None,
) -> Callable[..., Generation]:
    """Builds f(params, prompts [B, P], prompt_lengths [B], row_keys [B]) -> Generation.

    params: as `param_shardings(config, mesh, GENERATE)` says: layers are a list, one dict a layer.
    prompts: right-padded; prompt_lengths at least 1.
    row_keys: one PRNG key a row. Token t is drawn with fold_in(row_key, t), so that, given equal logits, a row's text
        does not depend on its neighbours, on the prompts' padding or on the mesh.
    dtype: of weights, activations and cache. Norms, rotary angles, softmaxes and log-probabilities are float32.
    attention: of the prefill; as in `make_logprobs`.
    lora: builds f(adapter, prompts, prompt_lengths, row_keys, base) instead, as in `make_logprobs`. Nothing is merged:
        what is drawn is what that function scores.

    Rows come back divided over all mesh axes. The function is not jitted.

    Raises:
        ValueError: a stop id is not in the vocabulary; the model or, when called, the batch does not fit on the mesh;
            prompt and response together are longer than the model's max_positions.
    """
    for stop in sampling.stop_ids:
        if not 0 <= stop < config.vocab_size:
            raise ValueError(f"stop id {stop} is outside the vocabulary of {config.vocab_size} tokens")
    program = _Program(config, sampling, dtype, attention, lora)
    stored = spec_tree(param_shardings(config, mesh, GENERATE))
    adapted = {} if lora is None else spec_tree(lora_shardings(config, mesh, lora))
    rows, shared = jax.P(AXES), GENERATE.batch_spec()

    def generate(*arguments: Any) -> Generation:
        params, adapter, (prompts, prompt_lengths, row_keys) = split_arguments(arguments, lora)
        batch, length = prompts.shape
        check_rows(batch, mesh, AXES, "generation")
        if length + sampling.max_new_tokens > config.max_positions:
            raise ValueError(
                f"prompts of {length} tokens and max_new_tokens={sampling.max_new_tokens} together exceed the model's "
                f"max_positions={config.max_positions}"
            )
        prompts, prompt_lengths = (place(x, mesh, shared) for x in (prompts, prompt_lengths))
        specs = int8_specs(stored) if has_int8(params) else stored
        mapped = jax.shard_map(program.run, mesh=mesh, in_specs=(specs, adapted, shared, shared, rows), out_specs=rows)
        return mapped(params, adapter, prompts, prompt_lengths, place(row_keys, mesh, rows))

    return generate


@dataclass(frozen=True)
class _Program:
    """What runs on each device. Static."""

    config: ModelConfig
    sampling: SamplingConfig
    dtype: Any
    attention: AttentionImplementation | None
    lora: LoRAConfig | None = None

    def run(
        self,
        params: Params,
        adapter: Params,
        prompts: Int[Array, "b P"],
        prompt_lengths: Int[Array, "b"],
        keys: PRNGKeyArray,
    ) -> Generation:
        """One device's part: a slice of the weights, the rows of its `tensor` group, the keys of its share of them."""
        params = with_adapter(jax.tree.map(self.cast, params, is_leaf=is_int8), adapter, self.lora, self.dtype)
        own_prompts, own_lengths = own_rows(prompts), own_rows(prompt_lengths)
        count, limit = own_prompts.shape[0], self.sampling.max_new_tokens

        def unfinished(state: _Decoding) -> Array:
            return (state.step < limit) & (state.unfinished > 0)

        def advance(state: _Decoding) -> _Decoding:
            hidden, caches = self.decode(params, state.last, prompt_lengths - 1 + state.step, state.caches)
            token, logprob = self.draw(params, hidden, keys, own_lengths + state.step, state.step)
            running = ~state.finished
            token, logprob = jnp.where(running, token, 0), jnp.where(running, logprob, 0.0)
            finished = state.finished | (running & self.stops(token))
            return _Decoding(
                step=state.step + 1,
                unfinished=lax.psum(jnp.sum(~finished), AXES),
                last=lax.all_gather(token, TENSOR, tiled=True),
                caches=caches,
                tokens=lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, axis=1),
                logprobs=lax.dynamic_update_slice_in_dim(state.logprobs, logprob[:, None], state.step, axis=1),
                lengths=state.lengths + running,
                finished=finished,
            )

        # The prefill only fills the caches. The loop's first step feeds each prompt's last token again, and so draws
        # the first token of a response like any other.
        last = jax.vmap(lambda row, length: row[length - 1])(prompts, prompt_lengths)
        zeros = jnp.zeros_like(own_lengths)
        end = lax.while_loop(
            unfinished,
            advance,
            _Decoding(
                step=jnp.zeros((), jnp.int32),
                unfinished=lax.psum(count, AXES),
                last=lax.all_gather(own_rows(last), TENSOR, tiled=True),
                caches=self.prefill(params, prompts, prompts.shape[1] + limit),
                tokens=jnp.broadcast_to(zeros[:, None], (count, limit)),
                logprobs=jnp.broadcast_to(zeros[:, None].astype(jnp.float32), (count, limit)),
                lengths=zeros,
                finished=zeros > 0,
            ),
        )
        return assemble(own_prompts, own_lengths, end.tokens, end.logprobs, end.lengths, end.finished)

    def cast(self, weight: Array | Int8) -> Array | Int8:
        # Int8 stays: it is made wide layer by layer.
        return weight if isinstance(weight, Int8) or weight.ndim < 2 else weight.astype(self.dtype)

    def embed(self, params: Params, tokens: Int[Array, "b T"], positions: Int[Array, "#b T"]) -> Float[Array, "b T D"]:
        x = scaled_embeddings(total(lookup(params["embedding"], tokens), TENSOR), self.config)
        return x + params["positions"][positions] if self.config.positions == "learned" else x

    @property
    def scores(self) -> dict[str, Any]:
        """How attention's scores are scaled and bounded."""
        return {"scale": self.config.query_scale, "softcap": self.config.attention_softcap}

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
        return block(self.config, loaded)(x, rotation, attend, TENSOR, adapters)

    def prefill(self, params: Params, prompts: Int[Array, "b P"], size: int) -> list[LayerCache]:
        """Each layer's keys and values of the prompts, in caches of `size` positions."""
        positions = jnp.arange(prompts.shape[1])[None, :]
        x, caches = self.embed(params, prompts, positions), []
        for layer, rotation, local in self.layers(params, positions):

            def attend(query, key, value, local=local):
                out = attention(
                    query,
                    key,
                    value,
                    window=self.config.window,
                    local=local,
                    implementation=self.attention,
                    **self.scores,
                )
                return out, prefill(key, value, size)

            x, cache = layer(x, rotation, attend)
            caches.append(cache)
        return caches

    def decode(
        self, params: Params, tokens: Int[Array, "b"], positions: Int[Array, "b"], caches: list[LayerCache]
    ) -> tuple[Float[Array, "b D"], list[LayerCache]]:
        """Feeds one token a row at its position -> its final hidden state, and the longer caches."""
        tokens, at = tokens[:, None], positions[:, None]
        x, longer = self.embed(params, tokens, at), []
        for (layer, rotation, local), cache in zip(self.layers(params, at), caches, strict=True):

            def attend(query, key, value, cache=cache, window=self.config.window if local else None):
                appended = append(cache, key, value, positions)
                return cached_attention(query, appended, positions + 1, window=window, **self.scores), appended

            x, cache = layer(x, rotation, attend)
            longer.append(cache)
        return final_norm(self.config, params["final_norm"])(x)[:, 0], longer

    def draw(
        self,
        params: Params,
        hidden: Float[Array, "b D"],
        keys: PRNGKeyArray,
        positions: Int[Array, "B"],
        step: Int[Array, ""],
    ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
        """Tokens and log-probabilities of this device's share of the rows, over the whole vocabulary."""
        unembedding = params["embedding" if self.config.tie_embeddings else "unembedding"]
        logits = jnp.einsum("bd,vd->bv", hidden, unembedding, preferred_element_type=jnp.float32)
        if self.config.softcap is not None:
            logits = self.config.softcap * jnp.tanh(logits / self.config.softcap)
        # From all rows and a slice of the vocabulary to a share of the rows and the whole vocabulary.
        logits = lax.all_to_all(logits, TENSOR, split_axis=0, concat_axis=1, tiled=True)
        return sample(
            logits,
            jax.vmap(jax.random.fold_in)(keys, positions),
            self.sampling,
            vocab_size=self.config.vocab_size,
            may_stop=step >= self.sampling.min_new_tokens,
        )

    def stops(self, token: Int[Array, "B"]) -> Bool[Array, "B"]:
        found = jnp.zeros_like(token, dtype=bool)
        for stop in self.sampling.stop_ids:
            found = found | (token == stop)
        return found


def assemble(
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, "B"],
    response: Int[Array, "B R"],
    logprobs: Float[Array, "B R"],
    lengths: Int[Array, "B"],
    finished: Bool[Array, "B"],
) -> Generation:
    """Writes each response right after its prompt."""
    limit = response.shape[1]
    index = jnp.arange(prompts.shape[1] + limit)[None, :] - prompt_lengths[:, None]
    inside = (index >= 0) & (index < lengths[:, None])

    def shift(x):
        return jnp.where(inside, jnp.take_along_axis(x, jnp.clip(index, 0, limit - 1), axis=1), 0)

    prompt = jnp.where(index < 0, jnp.pad(prompts, ((0, 0), (0, limit))), 0)
    return Generation(prompt + shift(response), prompt_lengths, lengths, shift(logprobs), finished)
