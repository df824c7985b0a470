"""The engine's compiled programs: a chunk of decode steps, and what moves rows into, between and out of decode slots.

The rows of a group of devices (those along `tensor`) are local to it: no row, and no cache, ever leaves its group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jrlhf.meshes import AXES, GENERATE, to_devices
from jrlhf.models.collectives import TENSOR, all_rows, own_rows
from jrlhf.models.generation.cache import LayerCache, empty, filled, grown
from jrlhf.models.generation.decoding import Decoder, Rows, first_rows
from jrlhf.models.generation.generate import Generation, assemble
from jrlhf.models.lora import lora_shardings
from jrlhf.models.params import Params, param_shardings, spec_tree
from jrlhf.models.quantize import has_int8, int8_specs

OWN = P(AXES)  # rows over all devices
SHARED = GENERATE.batch_spec()  # rows over the groups: the same on the devices of one
CACHE = P(GENERATE.batch, TENSOR)  # and heads over a group's devices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """What is to be answered: U prompts, N = U * samples rows."""

    prompts: Int[Array, "U P"]
    lengths: Int[Array, "U"]
    keys: PRNGKeyArray  # [N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Results:
    """What is drawn so far, of all rows: those that wait, decode or are done."""

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
@dataclass(frozen=True)
class Slots:
    """The rows that decode: their caches, and where each of them stands."""

    caches: list[LayerCache]
    rows: Rows


class Programs:
    """Compiled functions over `Slots`, one program a shape. Index arrays hold each group's own indices, in turn."""

    def __init__(self, decoder: Decoder, mesh: Mesh, *, samples: int, steps: int):
        self._decoder, self._mesh, self.samples, self.steps = decoder, mesh, samples, steps
        self.tensor = mesh.shape[TENSOR]
        self.groups = mesh.size // self.tensor
        self._stored = spec_tree(param_shardings(decoder.config, mesh, GENERATE))
        lora = decoder.lora
        self._adapted = {} if lora is None else spec_tree(lora_shardings(decoder.config, mesh, lora))
        slots = Slots(CACHE, OWN)  # type: ignore[arg-type]
        self._chunk = jax.jit(
            self._with_weights(self._run_chunk, (slots, OWN, SHARED), (slots, OWN)), donate_argnums=(2, 3)
        )
        self._prefill = jax.jit(self._with_weights(self._prefilled, (SHARED, SHARED), CACHE))
        self._fill_cache = jax.jit(self._mapped(_filled_cache, (CACHE, CACHE, SHARED), CACHE), donate_argnums=0)
        self._fill_rows = jax.jit(self._mapped(_filled_rows, (OWN, SHARED, SHARED), OWN), donate_argnums=0)
        self._take_cache = jax.jit(self._mapped(_taken, (CACHE, SHARED), CACHE))
        self._take_rows = jax.jit(self._mapped(self._taken_rows, (OWN, SHARED), OWN))
        stored = NamedSharding(mesh, CACHE)
        self._empty = jax.jit(
            partial(empty, dtype=decoder.dtype, transposed=decoder.transposed),
            static_argnums=range(4),
            out_shardings=stored,
        )
        self._grow = jax.jit(grown, static_argnums=1, out_shardings=stored)
        self._assemble = jax.jit(self._mapped(self._assembled, (SHARED, SHARED, OWN), OWN))
        self._done_rows = jax.jit(self._all_done, static_argnums=1)

    def pool(self, prompts: Array, lengths: Array, keys: Array) -> Pool:
        """Prompts on the mesh, each group's on its devices."""
        return Pool(*self._put((prompts, lengths, keys), SHARED))

    def per_group(self, arrays: Sequence[np.ndarray]) -> Array:
        """One array a group, on its devices."""
        return self._put(np.concatenate(arrays), SHARED)

    def empty(self, pool: Pool, slots: int, length: int) -> Slots:
        """So many slots a group, whose rows are done, with caches of `length` positions."""
        config = self._decoder.config
        shape = slots * self.groups, max(config.kv_heads, self.tensor), length, config.head_dim
        caches = [self._empty(*shape) for _ in range(config.layers)]
        return Slots(caches, self._done_rows(pool, slots // self.tensor))

    def no_results(self, rows: int) -> Results:
        """Of no row anything is drawn yet."""
        limit = self._decoder.sampling.max_new_tokens
        tokens, lengths = np.zeros((rows, limit), np.int32), np.zeros(rows, np.int32)
        results = Results(tokens, tokens.astype(np.float32), lengths, lengths > 0)  # type: ignore[arg-type]
        return self._put(results, OWN)

    def prefill(self, params: Params, adapter: Params, pool: Pool, admitted: Admitted) -> list[LayerCache]:
        """The caches of prompts that are to be admitted."""
        return self._prefill(params, adapter, pool, admitted.prompts)

    def admit(self, slots: Slots, prefilled: list[LayerCache], pool: Pool, admitted: Admitted) -> Slots:
        """Gives slots to all samples of prefilled prompts: layer by layer in the same list, as in `take`."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._fill_cache(cache, prefilled[layer], admitted)
        return Slots(slots.caches, self._fill_rows(slots.rows, pool, admitted))

    def chunk(
        self, params: Params, adapter: Params, slots: Slots, results: Results, row_of: Int[Array, "b"]
    ) -> tuple[Slots, Results]:
        """A chunk of steps for all slots, whose draws join the results of each slot's row. Donates both."""
        return self._chunk(params, adapter, slots, results, row_of)

    def take(self, slots: Slots, kept: Int[Array, "b"]) -> Slots:
        """Fewer slots: which of the old ones. Layer by layer, in the same list: one layer's cache exists twice."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._take_cache(cache, kept)
        return Slots(slots.caches, self._take_rows(slots.rows, kept))

    def grow(self, slots: Slots, length: int) -> Slots:
        """Caches of more positions, layer by layer in the same list, as in `take`."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._grow(cache, length)
        return slots

    def assemble(self, pool: Pool, results: Results) -> Generation:
        """All rows, in the order of their prompts."""
        return self._assemble(pool.prompts, pool.lengths, results)

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

    def _prefilled(self, weights: Params, pool: Pool, prompts: Int[Array, "g"]) -> list[LayerCache]:
        return self._decoder.prefill(weights, pool.prompts[prompts], pool.prompts.shape[1])

    def _taken_rows(self, rows: Rows, kept: Int[Array, "b"]) -> Rows:
        return jax.tree.map(lambda x: own_rows(x[kept]), all_rows(rows))

    def _assembled(self, prompts: Int[Array, "u P"], lengths: Int[Array, "u"], results: Results) -> Generation:
        prompts, lengths = (own_rows(jnp.repeat(x, self.samples, axis=0)) for x in (prompts, lengths))
        return assemble(prompts, lengths, results.tokens, results.logprobs, results.lengths, results.finished)

    # How it is mapped -------------------------------------------------------------------------------------------------

    def _mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(local, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs)

    def _all_done(self, pool: Pool, count: int) -> Rows:
        return self._mapped(partial(_done, count=count), SHARED, OWN)(pool)

    def _with_weights(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """`local(weights, *arrays)` as a function of (params, adapter, *arrays)."""

        def on_device(params: Params, adapter: Params, *arrays: Any) -> Any:
            return local(self._decoder.weights(params, adapter), *arrays)

        def call(params: Params, adapter: Params, *arrays: Any) -> Any:
            stored = int8_specs(self._stored) if has_int8(params) else self._stored
            return self._mapped(on_device, (stored, self._adapted, *in_specs), out_specs)(params, adapter, *arrays)

        call.__name__ = local.__name__  # for those who look at what is compiled
        return call

    def _put(self, tree: Any, spec: P) -> Any:
        return to_devices(tree, NamedSharding(self._mesh, spec))


def _filled_cache(cache: LayerCache, prefilled: LayerCache, admitted: Admitted) -> LayerCache:
    return filled(cache, admitted.slot, prefilled, admitted.source)


def _filled_rows(rows: Rows, pool: Pool, admitted: Admitted) -> Rows:
    prompts = admitted.prompts[admitted.source]
    fresh = first_rows(pool.prompts[prompts], pool.lengths[prompts], pool.keys[admitted.row])
    at = _own(admitted.slot, rows.lengths.shape[0])
    return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), rows, fresh)


def _own(rows: Int[Array, "m"], count: int) -> Int[Array, "m"]:
    """Where rows of a group are among a device's `count`; past the end for another device's row, or none."""
    mine = rows - lax.axis_index(TENSOR) * count
    return jnp.where((rows >= 0) & (mine >= 0), mine, count)


def _taken(cache: LayerCache, kept: Int[Array, "c"]) -> LayerCache:
    return jax.tree.map(lambda x: x[kept], cache)


def _done(pool: Pool, count: int) -> Rows:
    """So many rows of a device, all of them done."""
    zeros = own_rows(jnp.zeros(count * lax.axis_size(TENSOR), jnp.int32)) + 0 * pool.lengths[:1]
    return Rows(keys=pool.keys[zeros], prompt_lengths=zeros + 1, lengths=zeros, last=zeros, finished=zeros == 0)
