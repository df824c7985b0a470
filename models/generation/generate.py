"""Generation: prefill, then a decode loop until every row has stopped, in one tensor-parallel `jax.shard_map`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jrlhf.meshes import AXES, GENERATE
from jrlhf.models.attention import AttentionImplementation
from jrlhf.models.collectives import check_rows, own_rows, place
from jrlhf.models.config import ModelConfig
from jrlhf.models.generation.cache import transposes_keys
from jrlhf.models.generation.decoding import Decoder, first_rows
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.lora import LoRAConfig, lora_shardings, split_arguments
from jrlhf.models.params import Params, param_shardings, spec_tree
from jrlhf.models.quantize import has_int8, int8_specs


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
    check_stops(config, sampling)
    decoder = Decoder(config, sampling, dtype, attention, lora, transposes_keys(mesh))
    stored = spec_tree(param_shardings(config, mesh, GENERATE))
    adapted = {} if lora is None else spec_tree(lora_shardings(config, mesh, lora))
    rows, shared = jax.P(AXES), GENERATE.batch_spec()

    def on_device(
        params: Params,
        adapter: Params,
        prompts: Int[Array, "u P"],
        prompt_lengths: Int[Array, "u"],
        keys: PRNGKeyArray,
    ) -> Generation:
        weights, limit = decoder.weights(params, adapter), sampling.max_new_tokens
        repeat = partial(jnp.repeat, repeats=samples, axis=0)
        own_prompts, own_lengths = own_rows(repeat(prompts)), own_rows(repeat(prompt_lengths))
        start = first_rows(own_prompts, own_lengths, keys)
        caches = jax.tree.map(repeat, decoder.prefill(weights, prompts, prompts.shape[1] + limit))
        end, _, tokens, logprobs = decoder.run(weights, start, caches, limit)
        return assemble(own_prompts, end.prompt_lengths, tokens, logprobs, end.lengths, end.finished)

    def generate(*arguments: Any) -> Generation:
        params, adapter, (prompts, prompt_lengths, row_keys) = split_arguments(arguments, lora)
        count, length = prompts.shape
        check_prompts(count, len(row_keys), samples, mesh)
        check_length(config, sampling, length)
        prompts, prompt_lengths = (place(x, mesh, shared) for x in (prompts, prompt_lengths))
        specs = int8_specs(stored) if has_int8(params) else stored
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, adapted, shared, shared, rows), out_specs=rows)
        return mapped(params, adapter, prompts, prompt_lengths, place(row_keys, mesh, rows))

    return generate


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
    """Raises a ValueError where so many prompts do not divide over the mesh, or have another number of keys."""
    if keys != prompts * samples:
        raise ValueError(f"{prompts} prompts with {samples} samples each need {prompts * samples} keys, not {keys}")
    check_rows(keys, mesh, AXES, "generation")
    check_rows(prompts, mesh, GENERATE.batch, "prompts")


def check_stops(config: ModelConfig, sampling: SamplingConfig) -> None:
    """Raises a ValueError where a stop id is not in the vocabulary."""
    for stop in sampling.stop_ids:
        if not 0 <= stop < config.vocab_size:
            raise ValueError(f"stop id {stop} is outside the vocabulary of {config.vocab_size} tokens")


def check_length(config: ModelConfig, sampling: SamplingConfig, prompt: int) -> None:
    """Raises a ValueError where prompts of so many tokens and their responses exceed the model's positions."""
    if prompt + sampling.max_new_tokens > config.max_positions:
        raise ValueError(
            f"prompts of {prompt} tokens and max_new_tokens={sampling.max_new_tokens} together exceed the model's "
            f"max_positions={config.max_positions}"
        )
