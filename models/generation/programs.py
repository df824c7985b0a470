"""The compiled programs of generation: all of it in one, or in chunks of decode steps.

In chunks, rows enter, leave and move between decode slots. The rows of a group of devices (those along `tensor`) are
local to it: no row, and no cache, ever leaves its group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jrlhf.meshes import AXES, GENERATE, to_devices
from jrlhf.models.attention import (
    AttentionImplementation,
    LayerCache,
    empty_cache,
    filled_cache,
    grown_cache,
    transposes_keys,
)
from jrlhf.models.collectives import TENSOR, all_rows, check_rows, own_rows, place
from jrlhf.models.config import ModelConfig
from jrlhf.models.generation.decoding import Decoder, Rows, first_rows
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.lora import LoRAConfig, lora_shardings, split_arguments
from jrlhf.models.params import Params, param_shardings, spec_tree
from jrlhf.models.quantize import has_int8, int8_specs

OWN = P(AXES)  # rows over all devices
SHARED = GENERATE.batch_spec()  # rows over the groups: the same on the devices of one
CACHE = P(GENERATE.batch, TENSOR)  # and heads over a group's devices


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


def make_generate(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    sampling: SamplingConfig,
    *,
    samples: int = 1,
    dtype: Any = jnp.float32,
    attention: AttentionImplementation | None = None,
    lora: LoRAConfig | None = None,
) -> Callable[..., Generation]:
    """Builds f(params, prompts [U, P], prompt_lengths [U], row_keys [B]) -> Generation of B = U * samples rows.

    params: as `param_shardings(config, mesh, GENERATE)` says: layers are a list, one dict a layer.
    prompts: right-padded; prompt_lengths at least 1.
    row_keys: one PRNG key a row. Token t is drawn with fold_in(row_key, t), so that, given equal logits, a row's text
        does not depend on its neighbours, on the prompts' padding or on the mesh.
    samples: responses to each prompt, which share its prefill and are rows after one another.
    dtype: of weights, activations and cache. Norms, rotary angles, softmaxes and log-probabilities are float32.
    attention: of the prefill; as in `make_logprobs`.
    lora: builds f(adapter, prompts, prompt_lengths, row_keys, base) instead, as in `make_logprobs`. Nothing is merged:
        what is drawn is what that function scores.

    Rows come back divided over all mesh axes. The function is not jitted.

    Raises:
        ValueError: a stop id is not in the vocabulary; the model or, when called, the batch does not fit on the mesh;
            another number of keys than of rows; prompt and response together are longer than the model's
            max_positions.
    """
    decoder = decoder_of(config, mesh, sampling, dtype, attention, lora)

    def on_device(
        weights: Params, prompts: Int[Array, "u P"], prompt_lengths: Int[Array, "u"], keys: PRNGKeyArray
    ) -> Generation:
        limit, repeat = sampling.max_new_tokens, partial(jnp.repeat, repeats=samples, axis=0)
        own_prompts, own_lengths = own_rows(repeat(prompts)), own_rows(repeat(prompt_lengths))
        start = first_rows(own_prompts, own_lengths, keys)
        caches = jax.tree.map(repeat, decoder.prefill(weights, prompts, prompts.shape[1] + limit))
        end, _, tokens, logprobs = decoder.run(weights, start, caches, limit)
        return assemble(own_prompts, end.prompt_lengths, tokens, logprobs, end.lengths, end.finished)

    mapped = with_weights(decoder, mesh, on_device, (SHARED, SHARED, OWN), OWN)

    def generate(*arguments: Any) -> Generation:
        params, adapter, (prompts, prompt_lengths, row_keys) = split_arguments(arguments, lora)
        count, length = prompts.shape
        check_prompts(count, len(row_keys), samples, mesh)
        check_length(config, sampling, length)
        prompts, prompt_lengths = (place(x, mesh, SHARED) for x in (prompts, prompt_lengths))
        return mapped(params, adapter, prompts, prompt_lengths, place(row_keys, mesh, OWN))

    return generate


def decoder_of(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    sampling: SamplingConfig,
    dtype: Any,
    attention: AttentionImplementation | None,
    lora: LoRAConfig | None,
) -> Decoder:
    """The decoder of this model on this mesh.

    Raises:
        ValueError: a stop id is not in the vocabulary.
    """
    for stop in sampling.stop_ids:
        if not 0 <= stop < config.vocab_size:
            raise ValueError(f"stop id {stop} is outside the vocabulary of {config.vocab_size} tokens")
    return Decoder(config, sampling, dtype, attention, lora, transposes_keys(mesh))


def with_weights(
    decoder: Decoder, mesh: Mesh | AbstractMesh, local: Callable, in_specs: tuple, out_specs: Any
) -> Callable:
    """`local(weights, *arrays)` on each device, as a function of the global (params, adapter, *arrays)."""
    stored = spec_tree(param_shardings(decoder.config, mesh, GENERATE))
    adapted = {} if decoder.lora is None else spec_tree(lora_shardings(decoder.config, mesh, decoder.lora))

    def on_device(params: Params, adapter: Params, *arrays: Any) -> Any:
        return local(decoder.weights(params, adapter), *arrays)

    def call(params: Params, adapter: Params, *arrays: Any) -> Any:
        specs = (int8_specs(stored) if has_int8(params) else stored, adapted, *in_specs)
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=out_specs)(params, adapter, *arrays)

    call.__name__ = local.__name__  # the name of the compiled program
    return call


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


def check_prompts(prompts: int, keys: int, samples: int, mesh: Mesh | AbstractMesh) -> None:
    """Raises a ValueError if the prompts do not divide over the mesh, or the number of keys is not that of rows."""
    if keys != prompts * samples:
        raise ValueError(f"{prompts} prompts with {samples} samples each need {prompts * samples} keys, not {keys}")
    check_rows(keys, mesh, AXES, "generation")
    check_rows(prompts, mesh, GENERATE.batch, "prompts")


def check_length(config: ModelConfig, sampling: SamplingConfig, prompt: int) -> None:
    """Raises a ValueError if prompts of this number of tokens and their responses exceed the model's positions."""
    if prompt + sampling.max_new_tokens > config.max_positions:
        raise ValueError(
            f"prompts of {prompt} tokens and max_new_tokens={sampling.max_new_tokens} together exceed the model's "
            f"max_positions={config.max_positions}"
        )


# ---- in chunks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
    """All prompts of a call, U of them, with the keys of their N = U * samples rows."""

    prompts: Int[Array, "U P"]
    lengths: Int[Array, "U"]
    keys: PRNGKeyArray  # [N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Results:
    """The tokens drawn so far, of all rows: those that wait, decode or are done."""

    tokens: Int[Array, "N R"]
    logprobs: Float[Array, "N R"]
    lengths: Int[Array, "N"]
    finished: Bool[Array, "N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admitted:
    """Prompts that enter a group's slots: m = g * samples rows. A slot past the end stands for none."""

    prompts: Int[Array, "g"]
    source: Int[Array, "m"]  # which of `prompts`
    row: Int[Array, "m"]
    slot: Int[Array, "m"]


@jax.tree_util.register_dataclass
@dataclass
class Slots:
    """The rows that decode: their caches and their states.

    Mutable: `Programs` replaces the caches layer by layer, so that at any time only one layer's cache exists twice.
    """

    caches: list[LayerCache]
    rows: Rows


class Programs:
    """Compiled functions over `Slots`, one program a shape. Index arrays hold each group's own indices, in turn."""

    def __init__(self, decoder: Decoder, mesh: Mesh, *, samples: int, steps: int):
        self._decoder, self._mesh, self.samples, self.steps = decoder, mesh, samples, steps
        self.tensor = mesh.shape[TENSOR]
        self.groups = mesh.size // self.tensor
        slots = Slots(CACHE, OWN)  # type: ignore[arg-type]
        chunk = with_weights(decoder, mesh, self._run_chunk, (slots, OWN, SHARED), (slots, OWN))
        self._chunk = jax.jit(chunk, donate_argnums=(2, 3))
        self._prefill = jax.jit(with_weights(decoder, mesh, self._prefilled, (SHARED, SHARED), CACHE))
        self._fill_cache = jax.jit(self._mapped(_filled_cache, (CACHE, CACHE, SHARED), CACHE), donate_argnums=0)
        self._fill_rows = jax.jit(self._mapped(_filled_rows, (OWN, SHARED, SHARED), OWN), donate_argnums=0)
        self._take_cache = jax.jit(self._mapped(_taken, (CACHE, SHARED), CACHE))
        self._take_rows = jax.jit(self._mapped(self._taken_rows, (OWN, SHARED), OWN))
        stored = NamedSharding(mesh, CACHE)
        empty = partial(empty_cache, dtype=decoder.dtype, transposed=decoder.transposed)
        self._empty = jax.jit(empty, static_argnums=range(4), out_shardings=stored)
        self._grow = jax.jit(grown_cache, static_argnums=1, out_shardings=stored)
        self._assemble = jax.jit(self._mapped(self._assembled, (SHARED, SHARED, OWN), OWN))
        self._done_rows = jax.jit(self._all_done, static_argnums=1)

    def put(self, prompts: Array, lengths: Array, keys: Array) -> Prompts:
        """Prompts on the mesh, each group's on its devices."""
        return Prompts(*self._put((prompts, lengths, keys), SHARED))

    def per_group(self, arrays: Sequence[np.ndarray]) -> Array:
        """One array a group, on its devices."""
        return self._put(np.concatenate(arrays), SHARED)

    def empty(self, prompts: Prompts, slots: int, length: int) -> Slots:
        """This number of slots a group, whose rows are done, with caches of `length` positions."""
        config = self._decoder.config
        shape = slots * self.groups, max(config.kv_heads, self.tensor), length, config.head_dim
        caches = [self._empty(*shape) for _ in range(config.layers)]
        return Slots(caches, self._done_rows(prompts, slots // self.tensor))

    def no_results(self, rows: int) -> Results:
        """Results of rows of which no token is drawn yet."""
        limit = self._decoder.sampling.max_new_tokens
        tokens, lengths = np.zeros((rows, limit), np.int32), np.zeros(rows, np.int32)
        results = Results(tokens, tokens.astype(np.float32), lengths, lengths > 0)  # type: ignore[arg-type]
        return self._put(results, OWN)

    def prefill(self, params: Params, adapter: Params, prompts: Prompts, admitted: Admitted) -> list[LayerCache]:
        """The caches of prompts that are to be admitted, layer by layer."""
        return self._prefill(params, adapter, prompts, admitted.prompts)

    def chunk(
        self, params: Params, adapter: Params, slots: Slots, results: Results, row_of: Int[Array, "b"]
    ) -> tuple[Slots, Results]:
        """Runs a chunk of steps for all slots; the drawn tokens join the results of their rows. Donates both."""
        return self._chunk(params, adapter, slots, results, row_of)

    def admit(self, slots: Slots, prefilled: list[LayerCache], prompts: Prompts, admitted: Admitted) -> None:
        """Gives slots to all samples of prefilled prompts."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._fill_cache(cache, prefilled[layer], admitted)
        slots.rows = self._fill_rows(slots.rows, prompts, admitted)

    def take(self, slots: Slots, chosen: Int[Array, "b"]) -> None:
        """Leaves only these slots, in this order."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._take_cache(cache, chosen)
        slots.rows = self._take_rows(slots.rows, chosen)

    def grow(self, slots: Slots, length: int) -> None:
        """Gives the caches more positions."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._grow(cache, length)

    def assemble(self, prompts: Prompts, results: Results) -> Generation:
        """All rows, in the order of their prompts."""
        return self._assemble(prompts.prompts, prompts.lengths, results)

    # What runs on each device ----------------------------------------------------------------------------------------

    def _run_chunk(
        self, weights: Params, slots: Slots, results: Results, row_of: Int[Array, "b"]
    ) -> tuple[Slots, Results]:
        before = slots.rows.lengths
        rows, caches, tokens, logprobs = self._decoder.run(weights, slots.rows, slots.caches, self.steps)
        starts, lengths, finished, tokens, logprobs = all_rows((before, rows.lengths, rows.finished, tokens, logprobs))
        at = _own(row_of, results.lengths.shape[0])
        cells = at[:, None], starts[:, None] + jnp.arange(self.steps)[None, :]
        results = Results(
            tokens=results.tokens.at[cells].set(tokens, mode="drop"),
            logprobs=results.logprobs.at[cells].set(logprobs, mode="drop"),
            lengths=results.lengths.at[at].set(lengths, mode="drop"),
            finished=results.finished.at[at].set(finished, mode="drop"),
        )
        return Slots(caches, rows), results

    def _prefilled(self, weights: Params, prompts: Prompts, chosen: Int[Array, "g"]) -> list[LayerCache]:
        return self._decoder.prefill(weights, prompts.prompts[chosen], prompts.prompts.shape[1])

    def _taken_rows(self, rows: Rows, chosen: Int[Array, "b"]) -> Rows:
        return jax.tree.map(lambda x: own_rows(x[chosen]), all_rows(rows))

    def _assembled(self, prompts: Int[Array, "u P"], lengths: Int[Array, "u"], results: Results) -> Generation:
        prompts, lengths = (own_rows(jnp.repeat(x, self.samples, axis=0)) for x in (prompts, lengths))
        return assemble(prompts, lengths, results.tokens, results.logprobs, results.lengths, results.finished)

    def _all_done(self, prompts: Prompts, count: int) -> Rows:
        return self._mapped(partial(_done, count=count), SHARED, OWN)(prompts)

    def _mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(local, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs)

    def _put(self, tree: Any, spec: P) -> Any:
        return to_devices(tree, NamedSharding(self._mesh, spec))


def _filled_cache(cache: LayerCache, prefilled: LayerCache, admitted: Admitted) -> LayerCache:
    return filled_cache(cache, admitted.slot, prefilled, admitted.source)


def _filled_rows(rows: Rows, prompts: Prompts, admitted: Admitted) -> Rows:
    chosen = admitted.prompts[admitted.source]
    fresh = first_rows(prompts.prompts[chosen], prompts.lengths[chosen], prompts.keys[admitted.row])
    at = _own(admitted.slot, rows.lengths.shape[0])
    return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), rows, fresh)


def _own(rows: Int[Array, "m"], count: int) -> Int[Array, "m"]:
    """The places of a group's rows among a device's `count`; past the end for another device's row, or none."""
    mine = rows - lax.axis_index(TENSOR) * count
    return jnp.where((rows >= 0) & (mine >= 0), mine, count)


def _taken(cache: LayerCache, chosen: Int[Array, "c"]) -> LayerCache:
    return jax.tree.map(lambda x: x[chosen], cache)


def _done(prompts: Prompts, count: int) -> Rows:
    """The states of this number of rows of a device, all of them done."""
    zeros = own_rows(jnp.zeros(count * lax.axis_size(TENSOR), jnp.int32)) + 0 * prompts.lengths[:1]
    return Rows(keys=prompts.keys[zeros], prompt_lengths=zeros + 1, lengths=zeros, last=zeros, finished=zeros == 0)
