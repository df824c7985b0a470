"""Decoding on one device of a mesh: prefill, then one token per row and step, until every row is done.

Everything here runs inside one tensor-parallel `jax.shard_map`: weights are this device's slices of heads, mlp and
vocabulary. The devices of a `tensor` group share b rows, whose attention each computes for its own heads; each of them
draws the tokens of its own B = b / tensor rows, over the whole vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jrlhf.meshes.layout import GENERATE
from jrlhf.meshes.mesh import AXES
from jrlhf.models.attention import (
    LayerCache,
    append,
    attention,
    cached_attention,
    layer_rotations,
    of_layer,
    prefilled_cache,
    transposes_keys,
)
from jrlhf.models.collectives import TENSOR, check_operands, check_rows, lookup, total
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.flash import AttentionImplementation
from jrlhf.models.generation.sampling import SamplingConfig, is_stop, sample
from jrlhf.models.lora import LoRAConfig, lora_shardings, with_adapter
from jrlhf.models.modules import (
    NO_ADAPTERS,
    Block,
    Int8,
    Norm,
    dequantised,
    has_int8,
    is_int8,
    scaled_embeddings,
)
from jrlhf.models.params import Params, param_shardings, spec_tree
from jrlhf.models.quantize import int8_shardings

OWN = P(AXES)  # rows over all devices
SHARED = GENERATE.batch_spec()  # rows over the groups: the same on the devices of one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """Prompts with their responses: right-padded with zeros, no gap between the two.

    logprobs[:, t] is the log-probability with which token t was drawn, 0 where token t was not drawn.
    response_lengths include the stop token. finished: the row drew a stop token or completed a stop string, rather
    than reaching the length limit.
    """

    tokens: Int[Array, "B P+R"]
    prompt_lengths: Int[Array, "B"]
    response_lengths: Int[Array, "B"]
    logprobs: Float[Array, "B P+R"]
    finished: Bool[Array, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Results:
    """The drawn tokens of rows, on devices or on the host."""

    tokens: Any  # [N, R]
    logprobs: Any  # [N, R]
    lengths: Any  # [N]
    finished: Any  # [N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The states of a device's own rows. The host needs only these to decide which rows continue."""

    keys: PRNGKeyArray  # [B]: token t of a row is drawn with fold_in(key, t)
    prompt_lengths: Int[Array, "B"]
    lengths: Int[Array, "B"]  # response tokens drawn so far
    last: Int[Array, "B"]  # the token that is fed next: the newest one; before the first step the prompt's last
    finished: Bool[Array, "B"]  # drew a stop token, or one that completed a stop string
    matched: Int[Array, "B"] | None = None  # its state in the table of stop strings; None: there are none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The decode loop's carry. `last`, `positions` and `caches` belong to the b rows of a `tensor` group."""

    step: Int[Array, ""]
    running: Int[Array, ""]  # number of rows that are not done, on all devices together
    last: Int[Array, "b"]
    positions: Int[Array, "b"]
    caches: list[LayerCache]
    rows: Rows
    tokens: Int[Array, "B C"]
    logprobs: Float[Array, "B C"]


@dataclass(frozen=True)
class Decoder:
    """The static settings of generation: a model, its mesh and how it samples. See `make_generate` for the fields."""

    config: ModelConfig
    mesh: Mesh | AbstractMesh
    sampling: SamplingConfig
    samples: int = 1
    dtype: Any = jnp.float32
    attention: AttentionImplementation | None = None
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        for stop in self.sampling.stop_ids:
            if not 0 <= stop < self.config.vocab_size:
                raise ValueError(f"stop id {stop} is outside the vocabulary of {self.config.vocab_size} tokens")

    # ---- at the border: global arrays

    def check(self, params: Params, prompts: Int[Array, "U P"], row_keys: PRNGKeyArray) -> None:
        """Raises as `check_operands`, and ValueError if rows do not divide over the mesh or fit keys or positions."""
        check_operands(GENERATE, params, prompts, "prompts")
        (count, length), rows, limit = prompts.shape, prompts.shape[0] * self.samples, self.sampling.max_new_tokens
        if row_keys.shape[:1] != (rows,):
            keys = row_keys.shape[0] if row_keys.ndim else "a single one: use jax.random.split"
            raise ValueError(f"{count} prompts with {self.samples} samples each need {rows} keys, not {keys}")
        check_rows(rows, self.mesh, AXES, "generation")
        check_rows(count, self.mesh, GENERATE.batch, "prompts")
        if length + limit > self.config.max_positions:
            raise ValueError(
                f"prompts of {length} tokens and max_new_tokens={limit} together exceed the model's "
                f"max_positions={self.config.max_positions}"
            )

    def on_mesh(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """`local(weights, *arrays)` on each device, as a function of the global (params, adapter, *arrays)."""
        stored = param_shardings(self.config, self.mesh, GENERATE)
        adapted = {} if self.lora is None else spec_tree(lora_shardings(self.config, self.mesh, self.lora))

        def on_device(params: Params, adapter: Params, *arrays: Any) -> Any:
            weights = jax.tree.map(self.cast, params, is_leaf=is_int8)
            weights = weights if self.lora is None else with_adapter(weights, adapter, self.lora, self.dtype)
            return local(weights, *arrays)

        def call(params: Params, adapter: Params, *arrays: Any) -> Any:
            specs = spec_tree(int8_shardings(stored) if has_int8(params) else stored), adapted, *in_specs
            mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=out_specs)
            return mapped(params, adapter, *arrays)

        call.__name__ = local.__name__  # the name of the compiled program
        return call

    # ---- on each device

    def cast(self, weight: Array | Int8) -> Array | Int8:
        # Int8 weights are dequantised later, layer by layer.
        return weight if isinstance(weight, Int8) or weight.ndim < 2 else weight.astype(self.dtype)

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
            lengths, (stops, matched) = rows.lengths + running, self.stops(rows, token)
            finished = rows.finished | (running & stops)
            rows = replace(rows, lengths=lengths, last=token, finished=finished, matched=matched)
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
        first = _State(
            step=jnp.zeros((), jnp.int32),
            running=lax.psum(jnp.sum(self.running(rows)), AXES),
            last=lax.all_gather(rows.last, TENSOR, tiled=True),
            positions=lax.all_gather(rows.prompt_lengths - 1 + rows.lengths, TENSOR, tiled=True),
            caches=caches,
            rows=rows,
            tokens=jnp.broadcast_to(zeros, (zeros.shape[0], steps)),
            logprobs=jnp.broadcast_to(zeros.astype(jnp.float32), (zeros.shape[0], steps)),
        )
        end = lax.while_loop(going, advance, first)
        return end.rows, end.caches, end.tokens, end.logprobs

    def stops(self, rows: Rows, token: Int[Array, "B"]) -> tuple[Bool[Array, "B"], Int[Array, "B"] | None]:
        """Returns which tokens end their rows, and the rows' next states in the table of stop strings."""
        ends = is_stop(token, self.sampling)
        if self.sampling.stops is None or rows.matched is None:
            return ends, None
        matched, completed = self.sampling.stops.advance(rows.matched, token)
        return ends | (completed & (rows.lengths >= self.sampling.min_new_tokens)), matched

    def running(self, rows: Rows) -> Bool[Array, "B"]:
        """Returns a mask of the rows that are neither finished nor at the length limit."""
        return ~rows.finished & (rows.lengths < self.sampling.max_new_tokens)

    @jax.named_scope("embed")
    def embed(self, params: Params, tokens: Int[Array, "b T"], positions: Int[Array, "#b T"]) -> Float[Array, "b T D"]:
        x = scaled_embeddings(total(lookup(params["embedding"], tokens), TENSOR), self.config)
        return x + params["positions"][positions] if self.config.positions == "learned" else x

    def hidden(
        self, params: Params, tokens: Int[Array, "b T"], positions: Int[Array, "#b T"], attend: Callable
    ) -> tuple[Float[Array, "b T D"], list[LayerCache]]:
        """The last layer's output, and each layer's cache.

        attend: (number of the layer, query, key, value, keywords of `attention`) -> (output, cache).
        """
        x, caches = self.embed(params, tokens, positions), []
        rotations = layer_rotations(positions, self.config)
        adapters = params.get("adapters", [NO_ADAPTERS] * self.config.layers)
        layers = zip(params["layers"], self.config.locality, adapters, strict=True)
        for number, (weights, local, low) in enumerate(layers):
            block = Block(self.config, dequantised(weights, self.dtype, after=x))
            attends = partial(attend, number, **self.config.scores, local=local, implementation=self.attention)
            x, cache = block(x, of_layer(rotations, local), attends, TENSOR, low)
            caches.append(cache)
        return x, caches

    @jax.named_scope("prefill")
    def prefill(self, params: Params, prompts: Int[Array, "b P"], size: int) -> list[LayerCache]:
        """Each layer's keys and values of the prompts, in caches of `size` positions."""
        transposed = transposes_keys(self.mesh)

        def attend(number, query, key, value, **scores):
            out = attention(query, key, value, **scores)
            return out, prefilled_cache(key, value, size, transposed=transposed)

        return self.hidden(params, prompts, jnp.arange(prompts.shape[1])[None, :], attend)[1]

    @jax.named_scope("decode")
    def decode(
        self, params: Params, tokens: Int[Array, "b"], positions: Int[Array, "b"], caches: list[LayerCache]
    ) -> tuple[Float[Array, "b D"], list[LayerCache]]:
        """Feeds one token a row at its position -> its final hidden state, and the longer caches."""

        def attend(number, query, key, value, **scores):
            cache = append(caches[number], key, value, positions)
            return cached_attention(query, cache, positions + 1, **scores), cache

        x, longer = self.hidden(params, tokens[:, None], positions[:, None], attend)
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


def first_rows(
    prompts: Int[Array, "B P"], prompt_lengths: Int[Array, "B"], keys: PRNGKeyArray, *, matches: bool
) -> Rows:
    """Returns the states of rows before their first token is drawn. matches: there are stop strings.

    The prefill only fills the caches. The first step feeds each prompt's last token again, so the first token of a
    response is drawn like any other.
    """
    last = jax.vmap(lambda row, length: row[length - 1])(prompts, prompt_lengths)
    zeros = jnp.zeros_like(prompt_lengths)
    return Rows(keys, prompt_lengths, lengths=zeros, last=last, finished=zeros > 0, matched=zeros if matches else None)


def no_results(rows: int, limit: int) -> Results:
    """Returns the results of rows before their first token, on the host, to be filled in place."""
    tokens, lengths = np.zeros((rows, limit), np.int32), np.zeros(rows, np.int32)
    return Results(tokens, tokens.astype(np.float32), lengths, lengths > 0)


def assemble(prompts: Any, prompt_lengths: Any, results: Results, xp: Any = jnp) -> Generation:
    """Writes each response right after its prompt. prompts: [N, P]. xp: `np` for arrays on the host."""
    limit, width = results.tokens.shape[1], prompts.shape[1]

    def shift(x):
        return after_prompts(x, prompt_lengths, results.lengths, width, xp)

    is_prompt = xp.arange(width + limit)[None, :] < prompt_lengths[:, None]
    prompt = xp.where(is_prompt, xp.pad(prompts, ((0, 0), (0, limit))), xp.zeros((), prompts.dtype))
    tokens, logprobs = prompt + shift(results.tokens), shift(results.logprobs)
    return Generation(tokens, prompt_lengths, results.lengths, logprobs, results.finished)


def after_prompts(x: Any, prompt_lengths: Any, lengths: Any, width: int, xp: Any = jnp) -> Any:
    """Returns [N, width + R]: the first `lengths` entries of each row of x [N, R] after its prompt, zeros elsewhere."""
    index = xp.arange(width + x.shape[1])[None, :] - prompt_lengths[:, None]
    moved = xp.take_along_axis(x, xp.clip(index, 0, x.shape[1] - 1), axis=1)
    return xp.where((index >= 0) & (index < lengths[:, None]), moved, xp.zeros((), x.dtype))
