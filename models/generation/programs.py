"""Compiled functions over decode slots: prefill into slots, a chunk of decode steps, and changes of their sizes.

The rows of a group of devices (those along `tensor`) are local to it: only `Programs.take` of other groups' slots moves
rows and caches to other devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jrlhf.meshes.layout import GENERATE
from jrlhf.meshes.transfers import to_devices, transfer
from jrlhf.models.attention import LayerCache, grown_cache, transposes_keys
from jrlhf.models.collectives import TENSOR, all_rows, own_rows
from jrlhf.models.generation.decoding import OWN, SHARED, Decoder, Rows, first_rows, no_results
from jrlhf.models.params import Params

CACHE = P(GENERATE.batch, TENSOR)  # rows are divided over the groups, heads over the devices of a group


@jax.tree_util.register_dataclass
@dataclass
class Slots:
    """The decode slots: caches and states of the rows in them, and what these have drawn.

    Mutable: `Programs` replaces the caches layer by layer, so that at any time only one layer's cache exists twice.
    """

    caches: list[LayerCache]
    rows: Rows
    tokens: Int[Array, "B R"]
    logprobs: Float[Array, "B R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entering:
    """Prompts that enter a group's slots: m = g * samples rows, those of a prompt in turn."""

    prompts: Int[Array, "g P"]
    lengths: Int[Array, "g"]
    keys: PRNGKeyArray  # [m]
    slot: Int[Array, "m"]  # a row with a slot past the end is padding


def empty_cache(
    rows: int, kv_heads: int, size: int, head_dim: int, dtype: Any, *, transposed: bool = False
) -> LayerCache:
    """A cache of `size` positions, all zeros."""
    length, dimension = (head_dim, size) if transposed else (size, head_dim)
    key = jnp.zeros((rows, kv_heads, length, dimension), dtype)
    return LayerCache(key, jnp.zeros((rows, kv_heads, size, head_dim), dtype), transposed)


def filled_cache(cache: LayerCache, other: LayerCache, slots: Int[Array, "m"]) -> LayerCache:
    """Copies the rows of the cache `other` into `slots`, padded with zeros; each fills equally many slots in turn.

    Slots past the end are ignored. Later positions have attention weight 0, but without the zeros 0 times a NaN of a
    slot's former row would be NaN.
    """

    def fill(x, axis, y):
        rest = [(0, x.shape[axis] - y.shape[axis] if at == axis else 0) for at in range(x.ndim)]
        rows = jnp.repeat(y, len(slots) // len(y), axis=0)
        return x.at[slots].set(jnp.pad(rows, rest), mode="drop")

    return cache.map(fill, other)


def no_keys(*shape: int, impl: Any = None) -> np.ndarray:
    """Returns zeros as data of PRNG keys."""
    one: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return np.zeros((*shape, *one.shape), one.dtype)


class Programs:
    """Compiled functions over `Slots`, one program per shape. Index arrays have the indices of each group in turn.

    steps: decode steps of a chunk; at most as many as a response has tokens.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh, steps: int):
        self.decoder, self.mesh, self.samples = decoder, mesh, decoder.samples
        self.steps = min(steps, decoder.sampling.max_new_tokens)
        self.tensor = mesh.shape[TENSOR]
        self.groups = mesh.size // self.tensor
        slots = Slots(CACHE, OWN, OWN, OWN)  # type: ignore[arg-type]
        # (params, adapter, slots) -> slots after a chunk.
        self.chunk = jax.jit(decoder.on_mesh(self._run_chunk, (slots,), slots), donate_argnums=2)
        # (params, adapter, prompts) -> their caches, layer by layer.
        self.prefill = jax.jit(decoder.on_mesh(self._prefilled, (SHARED,), CACHE))
        fill = self._mapped(filled_cache, (CACHE, CACHE, SHARED), CACHE)
        self._fill_cache = jax.jit(fill, donate_argnums=0)
        entering = Entering(SHARED, SHARED, SHARED, SHARED)  # type: ignore[arg-type]
        self._fill_rows = jax.jit(self._mapped(_filled_rows, (OWN, entering), OWN), donate_argnums=0)
        self._take_cache = jax.jit(self._mapped(_taken, (CACHE, SHARED), CACHE))
        self._take_rows = jax.jit(self._mapped(_taken_rows, (OWN, SHARED), OWN))
        stored = NamedSharding(mesh, CACHE)
        empty = partial(empty_cache, dtype=decoder.dtype, transposed=transposes_keys(mesh))
        self._empty = jax.jit(empty, static_argnums=range(4), out_shardings=stored)
        self._grow = jax.jit(grown_cache, static_argnums=1, out_shardings=stored)

    def put(self, tree: Any, spec: P = SHARED) -> Any:
        """Puts arrays on the mesh, by default each group's part on its devices."""
        return to_devices(tree, NamedSharding(self.mesh, spec))

    def empty(self, slots: int, length: int, impl: Any = None) -> Slots:
        """Returns `slots` slots per group, whose rows are done, with caches of `length` positions.

        impl: of the rows' PRNG keys.
        """
        config, count, limit = self.decoder.config, slots * self.groups, self.decoder.sampling.max_new_tokens
        shape = count, max(config.kv_heads, self.tensor), length, config.head_dim
        zeros, blank = np.zeros(count, np.int32), no_results(count, limit)
        state = zeros + 1, zeros, zeros, zeros == 0, blank.tokens, blank.logprobs
        prompt_lengths, lengths, last, finished, *drawn = self.put(state, OWN)
        matched = None if self.decoder.sampling.stops is None else self.put(zeros, OWN)
        rows = Rows(self.keys(no_keys(count, impl=impl), OWN, impl), prompt_lengths, lengths, last, finished, matched)
        return Slots([self._empty(*shape) for _ in range(config.layers)], rows, *drawn)

    def keys(self, data: np.ndarray, spec: P, impl: Any = None) -> PRNGKeyArray:
        """Puts PRNG keys with this data on the mesh."""
        return jax.random.wrap_key_data(self.put(data, spec), impl=impl)

    def admit(self, slots: Slots, prefilled: list[LayerCache], entering: Entering) -> None:
        """Puts all samples of prefilled prompts into slots."""
        self.fill_caches(slots, prefilled, entering)
        slots.rows = self._fill_rows(slots.rows, entering)

    def fill_caches(self, slots: Slots, prefilled: list[LayerCache], entering: Entering) -> None:
        """Replaces the caches of slots by prefilled ones."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._fill_cache(cache, prefilled[layer], entering.slot)

    def take(self, slots: Slots, places: Int[np.ndarray, "groups new"]) -> None:
        """Keeps only these slots of each group, in this order. Those on other devices are moved to these devices."""
        own = self.put(places.ravel())
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._take_cache(transfer(cache, self.mesh), own)
        rows = transfer((slots.rows, slots.tokens, slots.logprobs), self.mesh)
        slots.rows, slots.tokens, slots.logprobs = self._take_rows(rows, own)

    def grow(self, slots: Slots, length: int) -> None:
        """Gives the caches `length` positions, if they have fewer."""
        for layer, cache in enumerate(slots.caches):
            if cache.size < length:
                slots.caches[layer] = self._grow(cache, length)

    # Functions that run on each device -------------------------------------------------------------------------------

    def _run_chunk(self, weights: Params, slots: Slots) -> Slots:
        starts = slots.rows.lengths[:, None]
        rows, caches, tokens, logprobs = self.decoder.run(weights, slots.rows, slots.caches, self.steps)
        # A row that is done gets zeros after its last token. What lies past the limit is dropped.
        at = jnp.arange(len(starts))[:, None], starts + jnp.arange(self.steps)[None, :]
        drawn = slots.tokens.at[at].set(tokens, mode="drop"), slots.logprobs.at[at].set(logprobs, mode="drop")
        return Slots(caches, rows, *drawn)

    def _prefilled(self, weights: Params, prompts: Int[Array, "g P"]) -> list[LayerCache]:
        return self.decoder.prefill(weights, prompts, prompts.shape[1])

    def _mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


def _filled_rows(rows: Rows, entering: Entering) -> Rows:
    repeat = partial(jnp.repeat, repeats=len(entering.slot) // len(entering.prompts), axis=0)
    matches = rows.matched is not None
    fresh = first_rows(repeat(entering.prompts), repeat(entering.lengths), entering.keys, matches=matches)
    at = _own(entering.slot, len(rows.lengths))
    return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), rows, fresh)


def _own(slots: Int[Array, "m"], count: int) -> Int[Array, "m"]:
    """Returns the indices of a group's slots among a device's `count` slots; past the end for those of others."""
    mine = slots - lax.axis_index(TENSOR) * count
    return jnp.where(mine >= 0, mine, count)


def _taken(cache: LayerCache, chosen: Int[Array, "c"]) -> LayerCache:
    return jax.tree.map(lambda x: x[chosen], cache)


def _taken_rows(rows: Any, chosen: Int[Array, "b"]) -> Any:
    return jax.tree.map(lambda x: own_rows(x[chosen]), all_rows(rows))
