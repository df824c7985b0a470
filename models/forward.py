"""Training and scoring: log-probabilities of given tokens. `scalars.py` has values and scores.

Each function is one `jax.shard_map` over all mesh axes, of a `ShardedForward`. It is not jitted: it composes with jit
and grad. Every factory takes `ForwardOptions`, or their fields as keywords, or both.

A weight is stored in slices and gathered layer by layer where it is used, inside the checkpointed body of the layer
scan. So at most one layer's whole weights exist at any time, in the backward pass too, and the gather's transpose
reduce-scatters the gradient back into slices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from jrlhf.kernels.devices import vary
from jrlhf.kernels.logprob.api import token_logprobs, token_sums
from jrlhf.kernels.logprob.common import Terms
from jrlhf.meshes.layout import GENERATE, Layout, gather
from jrlhf.meshes.mesh import AXES
from jrlhf.models.attention import attention, layer_rotations, of_layer
from jrlhf.models.collectives import TENSOR, check_operands, check_rows, lookup, own_rows, place, total
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.lora import LoRAConfig, lora_shardings, with_adapter
from jrlhf.models.modules import NO_ADAPTERS, Adapters, Block, Norm, dequantised, has_int8, scaled_embeddings
from jrlhf.models.options import ForwardOptions
from jrlhf.models.params import Params, layer_axes, model_axes, param_shardings, spec_tree, split_arguments
from jrlhf.models.quantize import int8_shardings
from jrlhf.models.remat import named, policy
from jrlhf.models.weights import HeadKind


@dataclass(frozen=True)
class ShardedForward:
    """The forward pass of a model with a layout and options. All methods but `shard` and `stored` run on each device.

    It is vocabulary-parallel: each device scores its slice of the vocabulary, for all rows that share it.
    """

    config: ModelConfig
    mesh: Mesh | AbstractMesh
    layout: Layout
    head: HeadKind
    options: ForwardOptions

    def __post_init__(self) -> None:
        if self.options.lora is not None and self.layout != GENERATE:
            raise ValueError(f"lora needs its base in the generate layout, but this is {self.layout.name}")
        model_axes(self.config, self.mesh, self.head)  # raises where the model does not fit on the mesh

    @property
    def axes(self) -> Params:
        return model_axes(self.config, self.mesh, self.head)

    @property
    def tensor(self) -> str | None:
        """The mesh axis over which layers are computed in slices, if any."""
        return TENSOR if self.layout.tensor_parallel else None

    def shard(self, local: Callable[..., Any], *, sums: bool = False) -> Callable[..., Any]:
        """Turns `local(params, *batch)` into a function of global arrays, whose batch and results are divided by rows.

        With `lora` its arguments are (adapter, *batch, base), and `local` gets adapter and base as one tree. With
        `sums` the results are the same on all devices.
        """
        rows, lora = self.layout.batch_spec(), self.options.lora
        adapter_specs = {} if lora is None else spec_tree(lora_shardings(self.config, self.mesh, lora, self.head))

        def on_device(params: Params, adapter: Params, inputs: Params, *batch: Array) -> Any:
            params = params if lora is None else with_adapter(params, adapter, lora, self.options.dtype)
            return local({**params, **inputs}, *batch)

        def call(*arguments: Any) -> Any:
            params, adapter, batch = split_arguments(arguments, lora)
            # A later pipeline stage is also differentiated with respect to its input, so that is among its weights.
            trained = params if lora is None else adapter
            inputs = {"hidden": trained["hidden"]} if "hidden" in trained else {}
            adapter = {name: adapter[name] for name in adapter_specs if name in adapter}
            params, stored = self.stored(params)
            check_operands(self.layout, params, batch[0])
            count, length = batch[0].shape
            check_rows(count, self.mesh, self.layout.batch, f"{self.layout.name} layout")
            if length > self.config.max_positions:
                raise ValueError(f"{length} tokens a row exceed the model's max_positions={self.config.max_positions}")
            specs = stored, {name: adapter_specs[name] for name in adapter}, *[rows] * (1 + len(batch))
            mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=jax.P() if sums else rows)
            results = mapped(params, adapter, *jax.tree.map(lambda x: place(x, self.mesh, rows), (inputs, *batch)))
            if sums or self.layout.batch == AXES:
                return results
            # Divide results over all axes, like those of other layouts and of generation. This only slices locally.
            check_rows(count, self.mesh, AXES, f"{self.layout.name} layout")
            return jax.tree.map(lambda x: place(x, self.mesh, jax.P(AXES)), results)

        return call

    def stored(self, params: Params) -> tuple[Params, Params]:
        """The weights that this program reads, and their specs."""
        shardings = param_shardings(self.config, self.mesh, self.layout, self.head)
        # A stage of a pipeline has a part of the weights; a base may have another head than the adapter's model.
        params = {name: weights for name, weights in params.items() if name in shardings}
        shardings = {name: shardings[name] for name in params}
        if has_int8(params):
            if self.layout != GENERATE or self.options.remat == "gather":
                raise ValueError(
                    f"int8 weights need the generate layout and a remat other than 'gather', but this is "
                    f"{self.layout.name} and {self.options.remat!r}: there they would be kept or gathered as floats"
                )
            shardings = int8_shardings(shardings)
        return params, spec_tree(shardings)

    def load(self, weight: Array, axes: tuple[str | None, ...]) -> Array:
        """Casts a stored slice, then gathers it as the block needs it. The cast halves the bytes that are sent."""
        # Norm scales and the scalar head stay float32, in which they are applied; they are small.
        if weight.ndim > 1:
            weight = weight.astype(self.options.dtype)
        # Vary before the gather: the transpose then sums scattered gradients over `data`, not whole ones.
        weight = vary(weight, self.layout.batch)
        return gather(weight, self.layout.storage.spec(axes), self.layout.compute.spec(axes))

    def hidden(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The final hidden states of this device's rows, after the final norm.

        A pipeline stage begins with the hidden states that it receives, and only the last stage has the norm.
        """
        config, locality, axes = self.config, self.config.locality, layer_axes(self.axes)
        rotations = layer_rotations(jnp.arange(tokens.shape[1])[None, :], config)
        # The scan's layers share one program: where they differ in locality, each gets its flag as an input.
        flags = jnp.asarray(locality) if len(set(locality)) > 1 else None
        checkpoint = partial(jax.checkpoint, policy=policy(self.options.remat))

        def layer(local, x, weights, adapters: Adapters = NO_ADAPTERS):
            x = named(x, "layer")
            loaded = jax.tree.map(self.load, dequantised(weights, self.options.dtype, after=x), axes)

            def attend(*heads):  # keeps nothing
                return attention(*heads, **config.scores, local=local, implementation=self.options.attention), None

            return Block(config, loaded)(x, of_layer(rotations, local), attend, self.tensor, adapters)

        def final_norm(x):
            if "final_norm" not in params:
                return x
            return Norm(config, jax.tree.map(self.load, params["final_norm"], self.axes["final_norm"]))(x)

        x = params["hidden"] if "hidden" in params else self.embed(params, tokens)
        if self.layout == GENERATE:
            layers = params["layers"]
            adapters = params.get("adapters", [NO_ADAPTERS] * len(layers))
            for local, *inputs in zip(locality, layers, adapters, strict=True):
                x, _ = checkpoint(partial(layer, local))(x, *inputs)
            return final_norm(x)

        def scanned(x, inputs):
            weights, flag = inputs
            return layer(locality[0] if flag is None else flag, x, weights)

        # In a scan nothing can be merged across iterations, so the barrier against it is not needed.
        scanned = checkpoint(scanned, prevent_cse=False)

        def varying(weight, leaf):
            gathered = self.layout.storage.spec(leaf) != self.layout.compute.spec(leaf)
            return weight if gathered else vary(weight, self.layout.batch)

        # Weights that are not gathered vary from here on: their gradients are summed once, for all layers together.
        layers = jax.tree.map(varying, params["layers"], axes)
        x, _ = lax.scan(scanned, x, (layers, flags))
        return final_norm(x)

    @jax.named_scope("embed")
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
        self, params: Params, tokens: Int[Array, "B T"], starts: Int[Array, "B"] | None
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        hidden = self.hidden(params, tokens)
        with jax.named_scope("head"):
            hidden, unembedding, targets = self.predictions(params, hidden, tokens, starts)
            logprobs, entropy = token_logprobs(hidden, unembedding, targets, **self.logits)
            return self.by_row(logprobs, tokens, starts), self.by_row(entropy, tokens, starts)

    @property
    def logits(self) -> dict[str, Any]:
        """The log-probability op's keywords: of the model, the mesh and the options."""
        model = {"softcap": self.config.softcap, "vocab_size": self.config.vocab_size, "axis_name": TENSOR}
        return {"temperature": self.options.temperature, "implementation": self.options.implementation, **model}

    def predictions(
        self, params: Params, hidden: Float[Array, "B T D"], of_tokens: Any, starts: Int[Array, "B"] | None
    ) -> tuple[Float[Array, "n D"], Float[Array, "V D"], Any]:
        """Returns (hidden states [n, D], this device's slice of the unembedding, arrays of `of_tokens` [n, ...]) for
        the n predicted tokens of all rows that share that slice."""
        # Arguments are gathered before they are cut, so that these gathers depend on nothing. Otherwise they would run
        # amid the layers' collectives, and simulated devices could wait for each other forever.
        name = "embedding" if self.config.tie_embeddings else "unembedding"
        unembedding = self.load(params[name], self.axes[name])
        hidden = self.sharing(self.predicted(hidden, starts, ahead=1))
        of_tokens, starts = jax.tree.map(self.sharing, (of_tokens, starts))
        of_tokens = jax.tree.map(lambda x: lax.collapse(self.predicted(x, starts), 0, 2), of_tokens)
        return hidden.reshape(-1, hidden.shape[-1]), unembedding, of_tokens

    def by_row(self, x: Array, tokens: Int[Array, "B T"], starts: Int[Array, "B"] | None) -> Array:
        """This device's rows [B, T, ...] of `x` [n, ...]: the predicted tokens of all rows that share a slice."""
        x = (x if self.layout.tensor_parallel else own_rows(x)).reshape(tokens.shape[0], -1, *x.shape[1:])
        if starts is None:
            return jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)))  # index 0 is predicted from nothing
        return _at(x, jnp.arange(tokens.shape[1])[None, :] - jnp.maximum(starts, 1)[:, None])

    def predicted(self, x: Array, starts: Int[Array, "B"] | None, *, ahead: int = 0) -> Array:
        """`x` [B, T, ...] at the tokens that are predicted, or `ahead` positions before them; 0 past a row's end."""
        length = x.shape[1]
        if (starts is None) != (self.options.span is None):
            raise TypeError("where responses begin (`starts`) must be given with a span, and only then")
        if starts is None or self.options.span is None:
            return x[:, 1 - ahead : length - ahead]
        return _at(x, jnp.maximum(starts, 1)[:, None] - ahead + jnp.arange(min(self.options.span, length - 1))[None, :])

    def sharing(self, rows: Array) -> Array:
        """This device's rows -> all rows that share its slice of the vocabulary."""
        return rows if self.layout.tensor_parallel else lax.all_gather(rows, TENSOR, tiled=True)


def _at(x: Float[Array, "B T *D"], index: Int[Array, "B S"]) -> Float[Array, "B S *D"]:
    """Each row at its own positions, which must differ from each other; 0 where there is no such position."""
    rows = jnp.arange(x.shape[0])[:, None]
    index = jnp.where(index < 0, x.shape[1], index)  # a negative one would count from the end
    return x.at[rows, index].get(mode="fill", fill_value=0, unique_indices=True)


DEFAULTS = ForwardOptions()


def make_logprobs(
    config: ModelConfig, mesh: Mesh | AbstractMesh, layout: Layout, options: ForwardOptions = DEFAULTS, **keywords: Any
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

    The result is the sum of `terms(logprobs, entropy, data)` over the results of `make_logprobs`. Where the platform's
    implementation can (`kernels.logprob.token_sums`), the unembedding's gradient is computed while a tile's logits
    exist, with three quarters of the head's operations. Differentiable by the parameters, through the loss only. The
    rest is as in `make_logprobs`.

    data: a pytree of arrays [B, T, ...], one entry for each token.
    terms: (logprobs [n], entropy [n], data [n, ...]) -> (loss [n], {name: metric [n]}), elementwise over any n tokens.
        It may close over no traced array.
    ids: f takes `ids=` [B, T, K] as well: K candidates for each token, given the same tokens before it. `terms` then
        gets logprobs [n, 1 + K], the token's own first. Raises ValueError for another shape.
    entropy_gradient: False where the loss does not depend on the entropy.
    span: f takes `starts=` [B] as well, and sums over at most this number of tokens of a row, from starts[b] on.
    lora: builds f(adapter, tokens, data, terms, base).
    """
    forward = ShardedForward(config, mesh, layout, "lm", replace(options, **keywords))

    def sums(
        params: Params, tokens: Array, data: Any, terms: Terms, *frozen: Params, starts: Any = None, ids: Any = None
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        if ids is not None and ids.shape[:-1] != tokens.shape:
            raise ValueError(f"ids must be [B, T, K] for tokens {tokens.shape}, got shape {ids.shape}")

        def local(params, tokens, data, starts, ids):
            hidden = forward.hidden(params, tokens)
            with jax.named_scope("head"):
                targets = tokens if ids is None else jnp.concatenate([tokens[..., None], ids], axis=-1)
                hidden, unembedding, (targets, data) = forward.predictions(params, hidden, (targets, data), starts)
                op = {**forward.logits, "entropy_gradient": entropy_gradient}
                sums = token_sums(hidden, unembedding, targets, data, terms, **op)
            return lax.psum(sums, tuple(axis for axis in layout.batch if axis != TENSOR))

        return forward.shard(local, sums=True)(params, tokens, data, starts, ids, *frozen)

    return sums


def make_logprobs_with_base(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    lora: LoRAConfig,
    options: ForwardOptions = DEFAULTS,
    **keywords: Any,
) -> Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]]:
    """Builds f(adapter, tokens [B, T], base) -> (logprobs, entropy, the bare base's logprobs), all [B, T] and float32.

    With `span` f(adapter, tokens, starts [B], base), as in `make_logprobs`. One pass over 2 B rows, of which the first
    half is adapted: the base's weights are read, dequantized from int8 and compiled once. For scoring only: a gradient
    would also go through the base's half for nothing, so `remat` is not used.

    Raises TypeError for options without effect here.
    """
    if "remat" in keywords:
        raise TypeError("unexpected keyword argument 'remat': it would have no effect here")
    options = replace(options, **keywords, lora=lora, remat="full")
    forward = ShardedForward(config, mesh, GENERATE, "lm", options)

    def local(params, tokens, starts=None):
        count = len(tokens)
        params = {**params, "adapters": [replace(layer, rows=count) for layer in params["adapters"]]}
        logprobs, entropy = forward.logprobs(params, *jax.tree.map(lambda x: jnp.concatenate([x, x]), (tokens, starts)))
        return logprobs[:count], entropy[:count], logprobs[count:]

    return forward.shard(local)
