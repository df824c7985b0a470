"""Training and scoring: log-probabilities, values and scores of given tokens.

Each function is one `jax.shard_map` over all mesh axes. A weight is stored in slices and gathered layer by layer where
it is used, inside the checkpointed body of the layer scan. So at most one layer's whole weights exist at any time, in
the backward pass too, and the gather's transpose reduce-scatters the gradient back into slices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from jrlhf.kernels.logprob import token_logprobs
from jrlhf.kernels.logprob.api import Implementation
from jrlhf.meshes import AXES, GENERATE, Layout, gather
from jrlhf.models.attention import AttentionImplementation, attention, layer_rotations, of_layer
from jrlhf.models.collectives import TENSOR, check_rows, lookup, own_rows, place, total, vary
from jrlhf.models.config import ModelConfig
from jrlhf.models.lora import LoRAConfig, lora_shardings, split_arguments, with_adapter
from jrlhf.models.modules import NO_ADAPTERS, Adapters, block, final_norm, scaled_embeddings
from jrlhf.models.params import HeadKind, Params, layer_axes, model_axes, param_shardings, spec_tree
from jrlhf.models.quantize import dequantised, has_int8, int8_specs

Remat = Literal["full", "gather"]
REMATS: tuple[Remat, ...] = ("full", "gather")

# With remat="gather" the backward pass makes these anew: gathered weights, and what leads from a stored slice to one.
_REMADE = frozenset({"all_gather", "convert_element_type", "pvary"})


@dataclass(frozen=True)
class _Program:
    """What the functions of this module share: the model, where it lives, and how it computes. Static."""

    config: ModelConfig
    mesh: Mesh | AbstractMesh
    layout: Layout
    head: HeadKind
    remat: Remat
    dtype: Any
    attention: AttentionImplementation | None
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        if self.remat not in REMATS:
            raise ValueError(f"unknown remat {self.remat!r}: known are {', '.join(REMATS)}")
        model_axes(self.config, self.mesh, self.head)
        if self.lora is not None:
            if self.layout != GENERATE:
                raise ValueError(f"lora needs its base in the generate layout, but this is {self.layout.name}")
            lora_shardings(self.config, self.mesh, self.lora, self.head)

    @property
    def axes(self) -> Params:
        return model_axes(self.config, self.mesh, self.head)

    @property
    def tensor(self) -> str | None:
        """The mesh axis over which layers are computed in slices, if any."""
        return TENSOR if self.layout.tensor_parallel else None

    def shard(self, local: Callable[..., Any]) -> Callable[..., Any]:
        """`local(params, *batch)` as a function of global arrays, whose batch and results are divided by rows.

        With `lora` a function of (adapter, *batch, base), and `local` gets the two as one tree.
        """
        rows = self.layout.batch_spec()

        def on_device(params: Params, adapter: Params, *batch: Array) -> Any:
            return local(with_adapter(params, adapter, self.lora, self.dtype), *batch)

        def call(*arguments: Any) -> Any:
            params, adapter, batch = split_arguments(arguments, self.lora)
            params, stored = self.stored(params)
            count, length = batch[0].shape
            check_rows(count, self.mesh, self.layout.batch, f"{self.layout.name} layout")
            if length > self.config.max_positions:
                raise ValueError(f"{length} tokens a row exceed the model's max_positions={self.config.max_positions}")
            specs = stored, self.adapter_specs, *[rows] * len(batch)
            mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=rows)
            results = mapped(params, adapter, *(place(x, self.mesh, rows) for x in batch))
            if self.layout.batch == AXES:
                return results
            # To meet those of other layouts and of generation, rows lie over all axes: a slice, nothing travels.
            check_rows(count, self.mesh, AXES, f"{self.layout.name} layout")
            return jax.tree.map(lambda x: place(x, self.mesh, jax.P(AXES)), results)

        return call

    def stored(self, params: Params) -> tuple[Params, Params]:
        """The weights that this program reads, and their specs."""
        specs = spec_tree(param_shardings(self.config, self.mesh, self.layout, self.head))
        if self.lora is not None:
            # A base may have another head than the adapter's model, or none.
            params = {name: weights for name, weights in params.items() if name in specs}
            specs = {name: specs[name] for name in params}
        if has_int8(params):
            if self.layout != GENERATE or self.remat != "full":
                raise ValueError(
                    f"int8 weights need the generate layout and remat='full', but this is {self.layout.name} and "
                    f"{self.remat!r}: elsewhere they would be kept or gathered as floats"
                )
            specs = int8_specs(specs)
        return params, specs

    @property
    def adapter_specs(self) -> Params:
        return {} if self.lora is None else spec_tree(lora_shardings(self.config, self.mesh, self.lora, self.head))

    def load(self, weight: Array, axes: tuple[str | None, ...]) -> Array:
        """A stored slice as the block needs it: cast, then gathered (so that the cast halves the bytes that travel)."""
        # Norm scales and the scalar head stay float32, in which they are applied; they weigh nothing.
        if weight.ndim > 1:
            weight = weight.astype(self.dtype)
        # Varying before the gather: its transpose then sums over `data` what is already scattered, not whole weights.
        weight = vary(weight, self.layout.batch)
        return gather(weight, self.layout.storage.spec(axes), self.layout.compute.spec(axes))

    def gathered(self, axes: tuple[str | None, ...]) -> bool:
        """Whether a weight with these axes is stored in smaller slices than it is computed with."""
        return self.layout.storage.spec(axes) != self.layout.compute.spec(axes)

    def hidden(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """This device's rows -> their final hidden states, after the final norm."""
        axes = layer_axes(self.axes)
        rotations = layer_rotations(jnp.arange(tokens.shape[1])[None, :], self.config)
        locality = self.config.locality
        # The scan's layers share one program: where they differ in locality, each gets its flag as an input.
        flags = jnp.asarray(locality) if len(set(locality)) > 1 else None

        policy = None if self.remat == "full" else _keep

        def layer(local, x, weights, adapters: Adapters = NO_ADAPTERS):
            loaded = jax.tree.map(self.load, dequantised(weights, self.dtype, after=x), axes)
            attend = partial(self.attend, local)
            return block(self.config, loaded)(x, of_layer(rotations, local), attend, self.tensor, adapters)

        if self.layout == GENERATE:
            x, layers = self.embed(params, tokens), params["layers"]
            for local, *inputs in zip(locality, layers, params.get("adapters", [{}] * len(layers)), strict=True):
                x, _ = jax.checkpoint(partial(layer, local), policy=policy)(x, *inputs)
            return self.final_norm(params, x)

        def scanned(x, inputs):
            weights, flag = inputs
            return layer(locality[0] if flag is None else flag, x, weights)

        # In a scan nothing can be merged across iterations, so the barrier against it is not needed.
        scanned = jax.checkpoint(scanned, policy=policy, prevent_cse=False)
        # Weights that are not gathered vary from here on: their gradients are summed once, for all layers together.
        layers = jax.tree.map(
            lambda weight, leaf: weight if self.gathered(leaf) else vary(weight, self.layout.batch),
            params["layers"],
            axes,
        )
        x, _ = lax.scan(scanned, self.embed(params, tokens), (layers, flags))
        return self.final_norm(params, x)

    def final_norm(self, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return final_norm(self.config, jax.tree.map(self.load, params["final_norm"], self.axes["final_norm"]))(x)

    def attend(self, local: bool | Bool[Array, ""], query: Array, key: Array, value: Array) -> tuple[Array, None]:
        """A layer's attention; nothing is kept of it."""
        config = self.config
        out = attention(
            query,
            key,
            value,
            scale=config.query_scale,
            softcap=config.attention_softcap,
            window=config.window,
            local=local,
            implementation=self.attention,
        )
        return out, None

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings of this device's rows; each device looks up its slice of the vocabulary for all that share it."""
        table = self.load(params["embedding"], self.axes["embedding"])
        if self.layout.tensor_parallel:
            x = total(lookup(table, tokens), TENSOR)
        else:
            parts = lookup(table, lax.all_gather(tokens, TENSOR, tiled=True))
            x = lax.psum_scatter(parts, TENSOR, tiled=True)
        x = scaled_embeddings(x, self.config)
        if self.config.positions == "learned":
            x = x + self.load(params["positions"][: tokens.shape[1]], self.axes["positions"])[None]
        return x

    def logprobs(
        self, params: Params, tokens: Int[Array, "B T"], temperature: float, implementation: Implementation | None
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Vocabulary-parallel: each device scores its slice of the vocabulary, for all rows that share it."""
        hidden, targets = self.hidden(params, tokens)[:, :-1], tokens[:, 1:]
        name = "embedding" if self.config.tie_embeddings else "unembedding"
        unembedding = self.load(params[name], self.axes[name])
        if not self.layout.tensor_parallel:
            hidden, targets = (lax.all_gather(x, TENSOR, tiled=True) for x in (hidden, targets))
        scored = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            unembedding,
            targets.reshape(-1),
            temperature=temperature,
            softcap=self.config.softcap,
            vocab_size=self.config.vocab_size,
            axis_name=TENSOR,
            implementation=implementation,
        )

        def by_row(x):
            x = x.reshape(targets.shape)
            # Index 0 is predicted from nothing.
            return jnp.pad(x if self.layout.tensor_parallel else own_rows(x), ((0, 0), (1, 0)))

        logprobs, entropy = scored
        return by_row(logprobs), by_row(entropy)

    def scalars(self, params: Params, hidden: Float[Array, "B *T D"]) -> Float[Array, "B *T"]:
        """The scalar head, in float32."""
        head = jax.tree.map(self.load, params["value_head"], self.axes["value_head"])
        return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), head["kernel"]) + head["bias"]


def _keep(primitive: Any, *_: Any, **__: Any) -> bool:
    """The checkpoint policy of remat="gather"."""
    return primitive.name not in _REMADE


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
) -> Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"]]]:
    """Builds f(params, tokens [B, T]) -> (logprobs [B, T], entropy [B, T]), both float32, in nats.

    logprobs[:, t] = log pi(tokens[:, t] | tokens[:, :t]), of the softmax at `temperature`; entropy[:, t] is that of the
    whole distribution which token t comes from; both are 0 at t = 0. Rows are right-padded with any token ids below
    vocab_size: no result before a row's end depends on them.

    params: as `init_lm`, stored as `param_shardings(config, mesh, layout)` says.
    implementation: of the log-probability op; None for the platform's default.
    remat: "full" keeps only each layer's input and computes the layer again in the backward pass; "gather" keeps
        everything but gathered weights, which are gathered again.
    dtype: of weights and activations in compute. Norms, rotary angles, the logits and what follows are float32.
    attention: None for cuDNN on a GPU where dtype, head_dim and the lack of an attention_softcap allow it, else XLA.
    lora: builds f(adapter, tokens, base) instead, for `layout` GENERATE. adapter: as `init_lora`, float32, stored as
        `lora_shardings` says. base: stored as `param_shardings(config, mesh, GENERATE)` says, in any dtype or as
        `to_int8` makes it, with any head. Differentiate by the adapter.

    In GENERATE the layers are not gathered but sliced over `tensor`, and they are unrolled.
    The function is not jitted: it composes with jit and grad.

    Raises:
        ValueError: the model or, when called, the batch does not fit on the mesh; adapters or int8 weights where they
            cannot be.
    """
    program = _Program(config, mesh, layout, "lm", remat, dtype, attention, lora)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive and finite")

    def local(params, tokens):
        return program.logprobs(params, tokens, temperature, implementation)

    return program.shard(local)


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
    program = _Program(config, mesh, layout, "scalar", remat, dtype, attention, lora)

    def local(params, tokens):
        return jnp.pad(program.scalars(params, program.hidden(params, tokens)), ((0, 0), (1, 0)))

    return program.shard(local)


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
    program = _Program(config, mesh, layout, "scalar", remat, dtype, attention, lora)

    def local(params, tokens, lengths):
        last = jax.vmap(lambda row, length: row[length - 1])(program.hidden(params, tokens), lengths)
        return program.scalars(params, last)

    return program.shard(local)
