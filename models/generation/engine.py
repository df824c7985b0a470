"""Generation of whole rollouts: one program that decodes until its last row is done, or chunks of decode steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from jrlhf.models.collectives import own_rows, place
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.flash import AttentionImplementation
from jrlhf.models.generation.chunks import ChunkedRollouts, Watch
from jrlhf.models.generation.continuous import ToHosts, read_rows
from jrlhf.models.generation.decoding import OWN, SHARED, Decoder, Generation, Results, assemble, first_rows
from jrlhf.models.generation.occupancy import LastRows
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.lora import LoRAConfig
from jrlhf.models.params import Params, split_arguments


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

    params: stored as `param_shardings(config, mesh, GENERATE)` says: layers are a list with one dict a layer.
    prompts: right-padded; prompt_lengths at least 1.
    row_keys: one PRNG key a row. Token t is drawn with fold_in(row_key, t), so that, given equal logits, a row's text
        does not depend on its neighbours, on the prompts' padding or on the mesh.
    samples: number of responses to each prompt, which share its prefill and are neighbouring rows.
    dtype: dtype of weights, activations and cache. Norms, rotary angles, softmaxes and log-probabilities are float32.
    attention: implementation of the prefill's attention, as in `make_logprobs`.
    lora: builds f(adapter, prompts, prompt_lengths, row_keys, base) instead, as in `make_logprobs`. Nothing is merged:
        tokens are drawn from exactly the distribution that `make_logprobs` scores.

    The rows of the result are divided over all mesh axes. The function is not jitted. It raises ValueError for a batch
    that does not divide over the mesh, or is longer than the model's positions, and for weights of another layout.
    """
    return _whole_rollouts(Decoder(config, mesh, sampling, samples, dtype, attention, lora))


def _whole_rollouts(decoder: Decoder) -> Callable[..., Generation]:
    """The function of `make_generate`."""
    limit, repeat = decoder.sampling.max_new_tokens, partial(jnp.repeat, repeats=decoder.samples, axis=0)

    def on_device(
        weights: Params, prompts: Int[Array, "u P"], prompt_lengths: Int[Array, "u"], keys: PRNGKeyArray
    ) -> Generation:
        own_prompts, own_lengths = own_rows(repeat(prompts)), own_rows(repeat(prompt_lengths))
        start = first_rows(own_prompts, own_lengths, keys, matches=decoder.sampling.stops is not None)
        caches = jax.tree.map(repeat, decoder.prefill(weights, prompts, prompts.shape[1] + limit))
        end, _, tokens, logprobs = decoder.run(weights, start, caches, limit)
        return assemble(own_prompts, end.prompt_lengths, Results(tokens, logprobs, end.lengths, end.finished))

    mapped = decoder.on_mesh(on_device, (SHARED, SHARED, OWN), OWN)

    def generate(*arguments: Any) -> Generation:
        params, adapter, (prompts, prompt_lengths, row_keys) = split_arguments(arguments, decoder.lora)
        decoder.check(params, prompts, row_keys)
        prompts, prompt_lengths = (place(x, decoder.mesh, SHARED) for x in (prompts, prompt_lengths))
        return mapped(params, adapter, prompts, prompt_lengths, place(row_keys, decoder.mesh, OWN))

    return generate


class Engine:
    """Generates the same rollouts as the function of `make_generate`, in one program or in chunks.

    A call is engine(params, prompts [U, P], prompt_lengths [U], row_keys [N]) -> Generation of N = U * samples rows;
    with `lora` it is engine(adapter, prompts, prompt_lengths, row_keys, base). The other arguments are those of
    `make_generate`. If the schedule asks for one program, a call runs that function. Otherwise a new
    `ContinuousBatch` draws them. The first call with a shape, and the first with a
    number of groups for its last rows, compiles all programs that such calls may need, and calls must be outside jit:
    after every chunk the host gets the rows that are done, by `read`, and calls `watch`. last: where the last rows
    decode; None: by the schedule. shares: whether `watch` may assemble rows in processes without a device of the mesh.
    Calls need `jax.set_mesh(mesh)`.

    Raises ValueError as the function of `make_generate`, for slots that do not divide over the devices or hold no
    prompt with all its samples, and for a number of groups of the last rows that does not divide all groups.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, sampling: SamplingConfig, schedule: Schedule | None = None, **others: Any
    ):
        decoder = Decoder(config, mesh, sampling, **others)
        self._schedule, self._samples, self._limit = schedule or Schedule(), decoder.samples, sampling.max_new_tokens
        self._whole = jax.jit(_whole_rollouts(decoder))
        self._in_chunks = ChunkedRollouts(decoder, mesh, self._schedule)

    def __call__(
        self,
        *arguments: Any,
        watch: Watch | None = None,
        last: LastRows | None = None,
        read: ToHosts = read_rows,
        shares: bool = False,
    ) -> Generation:
        in_one = self._schedule.is_one_program(len(arguments[1]) * self._samples, self._limit)
        return self._whole(*arguments) if in_one else self._in_chunks(arguments, watch, last, read, shares)
