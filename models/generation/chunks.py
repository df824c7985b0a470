"""Rollouts in chunks of decode steps: between two chunks finished rows are replaced, and fewer rows get fewer slots.

If lengths differ, most rows of a single program are soon idle. Here a chunk of steps is decoded at a time. Then waiting
prompts take the slots of finished rows. Once no prompt waits, the remaining rows move into half as many slots, and at
last to fewer groups of devices, if `last_groups` is set. Caches grow with the longest row. This does not affect the
random numbers: a row's token t is drawn with fold_in(row key, t). But programs of different shapes round logits
differently: no test has seen another token in float32, while near ties do differ in bfloat16. The move to fewer groups
changes no bit: caches move with their rows, and a device's program keeps its shape.

The rows of a group of devices (those along `tensor`) are local to it: apart from that move, no row and no cache ever
leaves its group.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jrlhf.meshes.layout import GENERATE
from jrlhf.meshes.mesh import AXES
from jrlhf.meshes.transfers import to_devices, transfer
from jrlhf.models.attention import LayerCache, grown_cache, transposes_keys
from jrlhf.models.collectives import TENSOR, all_rows, check_rows, own_rows
from jrlhf.models.flash import reads_filled_positions
from jrlhf.models.generation.decoding import OWN, SHARED, Decoder, Generation, Results, Rows, assemble, first_rows
from jrlhf.models.generation.occupancy import EMPTY, Admission, LastRows, Occupancy
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.lora import base_on
from jrlhf.models.params import Params, split_arguments

CACHE = P(GENERATE.batch, TENSOR)  # rows are divided over the groups, heads over the devices of a group


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptSlots:
    """All prompts of a call, U of them, with the keys of their N = U * samples rows."""

    prompts: Int[Array, "U P"]
    lengths: Int[Array, "U"]
    keys: PRNGKeyArray  # [N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admitted:
    """Prompts that enter a group's slots: m = g * samples rows. A row with a slot past the end is padding."""

    prompts: Int[Array, "g"]
    source: Int[Array, "m"]  # index of the row's prompt in `prompts`
    row: Int[Array, "m"]
    slot: Int[Array, "m"]


# Called after a chunk with the mask of finished rows, a function that assembles all rows, and the mesh on which rows
# decode. The function must be called at once, because the next chunk donates the arrays that it reads.
Watch = Callable[[Bool[np.ndarray, "N"], Callable[[], Generation], Mesh], None]
# (arrays, rows=None) -> the arrays on the host of every process, while the devices of other meshes may be busy. Given a
# mask of rows, the others may be zeros.
ToHosts = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass
class Slots:
    """The decode slots: caches and states of the rows in them.

    Mutable: `Programs` replaces the caches layer by layer, so that at any time only one layer's cache exists twice.
    """

    caches: list[LayerCache]
    rows: Rows


def empty_cache(
    rows: int, kv_heads: int, size: int, head_dim: int, dtype: Any, *, transposed: bool = False
) -> LayerCache:
    """A cache of `size` positions, all zeros."""
    length, dimension = (head_dim, size) if transposed else (size, head_dim)
    key = jnp.zeros((rows, kv_heads, length, dimension), dtype)
    return LayerCache(key, jnp.zeros((rows, kv_heads, size, head_dim), dtype), transposed)


def filled_cache(cache: LayerCache, other: LayerCache, rows: Int[Array, "m"], slots: Int[Array, "m"]) -> LayerCache:
    """Copies `rows` of the cache `other` into `slots`, padded with zeros. Slots past the end are ignored.

    Later positions have attention weight 0, but without the zeros 0 times a NaN of a slot's former row would be NaN.
    """

    def fill(x, axis, y):
        rest = [(0, x.shape[axis] - y.shape[axis] if at == axis else 0) for at in range(x.ndim)]
        return x.at[slots].set(jnp.pad(y[rows], rest), mode="drop")

    return cache.map(fill, other)


class Programs:
    """Compiled functions over `Slots`, one program per shape. Index arrays have the indices of each group in turn."""

    def __init__(self, decoder: Decoder, mesh: Mesh, steps: int):
        self.decoder, self.mesh, self.steps, self.samples = decoder, mesh, steps, decoder.samples
        self.tensor = mesh.shape[TENSOR]
        self.groups = mesh.size // self.tensor
        slots = Slots(CACHE, OWN)  # type: ignore[arg-type]
        # (params, adapter, slots, results, number of the row in each slot) -> slots and results after a chunk.
        chunk = decoder.on_mesh(self._run_chunk, (slots, OWN, SHARED), (slots, OWN))
        self.chunk = jax.jit(chunk, donate_argnums=(2, 3))
        # (params, adapter, prompts, indices of some of them) -> their caches, layer by layer.
        self.prefill = jax.jit(decoder.on_mesh(self._prefilled, (SHARED, SHARED), CACHE))
        fill = self._mapped(filled_cache, (CACHE, CACHE, SHARED, SHARED), CACHE)
        self._fill_cache = jax.jit(fill, donate_argnums=0)
        self._fill_rows = jax.jit(self._mapped(_filled_rows, (OWN, SHARED, SHARED), OWN), donate_argnums=0)
        self._take_cache = jax.jit(self._mapped(_taken, (CACHE, SHARED), CACHE))
        self._take_rows = jax.jit(self._mapped(_taken_rows, (OWN, SHARED), OWN))
        stored = NamedSharding(mesh, CACHE)
        empty = partial(empty_cache, dtype=decoder.dtype, transposed=transposes_keys(mesh))
        self._empty = jax.jit(empty, static_argnums=range(4), out_shardings=stored)
        self._grow = jax.jit(grown_cache, static_argnums=1, out_shardings=stored)
        self.assemble = jax.jit(self._mapped(self._assembled, (SHARED, SHARED, OWN), OWN))
        self._done_rows = jax.jit(self._all_done, static_argnums=1)

    def put(self, tree: Any, spec: P = SHARED) -> Any:
        """Puts arrays on the mesh, by default each group's part on its devices."""
        return to_devices(tree, NamedSharding(self.mesh, spec))

    def per_group(self, arrays: Sequence[np.ndarray]) -> Array:
        """Puts one array per group on the group's devices."""
        return self.put(np.concatenate(arrays))

    def empty(self, prompts: PromptSlots, slots: int, length: int) -> Slots:
        """Returns `slots` slots per group, whose rows are done, with caches of `length` positions."""
        config = self.decoder.config
        shape = slots * self.groups, max(config.kv_heads, self.tensor), length, config.head_dim
        caches = [self._empty(*shape) for _ in range(config.layers)]
        return Slots(caches, self._done_rows(prompts, slots // self.tensor))

    def no_results(self, rows: int) -> Results:
        """Returns the results of rows before their first token."""
        limit = self.decoder.sampling.max_new_tokens
        tokens, lengths = np.zeros((rows, limit), np.int32), np.zeros(rows, np.int32)
        results = Results(tokens, tokens.astype(np.float32), lengths, lengths > 0)  # type: ignore[arg-type]
        return self.put(results, OWN)

    def admitted(self, admissions: Sequence[Admission], size: int, samples: int, slots: int) -> Admitted:
        """Converts each group's admission to arrays of `size` prompts with `samples` rows each. slots: per group."""
        source = np.repeat(np.arange(size, dtype=np.int32), samples)
        number = np.tile(np.arange(samples, dtype=np.int32), size)

        def of_group(admission: Admission) -> tuple[Int[np.ndarray, "_"], ...]:
            entering, taken = admission
            prompts = np.array([*entering, *[0] * (size - len(entering))], np.int32)
            slot = np.array([*taken, *[slots] * (len(source) - len(taken))], np.int32)  # past the end: padding
            return prompts, source, prompts[source] * samples + number, slot

        return Admitted(*map(self.per_group, zip(*map(of_group, admissions), strict=True)))

    def admit(self, slots: Slots, prefilled: list[LayerCache], prompts: PromptSlots, admitted: Admitted) -> None:
        """Puts all samples of prefilled prompts into slots."""
        self.fill_caches(slots, prefilled, admitted)
        slots.rows = self._fill_rows(slots.rows, prompts, admitted)

    def fill_caches(self, slots: Slots, prefilled: list[LayerCache], admitted: Admitted) -> None:
        """Replaces the caches of slots by prefilled ones."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._fill_cache(cache, prefilled[layer], admitted.source, admitted.slot)

    def take(self, slots: Slots, chosen: Int[Array, "b"]) -> None:
        """Keeps only these slots, in this order. Slots of other groups of devices are moved to these devices."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._take_cache(transfer(cache, self.mesh), chosen)
        slots.rows = self._take_rows(transfer(slots.rows, self.mesh), chosen)

    def grow(self, slots: Slots, length: int) -> None:
        """Gives the caches `length` positions, if they have fewer."""
        for layer, cache in enumerate(slots.caches):
            if cache.size < length:
                slots.caches[layer] = self._grow(cache, length)

    # Functions that run on each device -------------------------------------------------------------------------------

    def _run_chunk(
        self, weights: Params, slots: Slots, results: Results, row_of: Int[Array, "b"]
    ) -> tuple[Slots, Results]:
        before = slots.rows.lengths
        rows, caches, tokens, logprobs = self.decoder.run(weights, slots.rows, slots.caches, self.steps)
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

    def _prefilled(self, weights: Params, prompts: PromptSlots, chosen: Int[Array, "g"]) -> list[LayerCache]:
        return self.decoder.prefill(weights, prompts.prompts[chosen], prompts.prompts.shape[1])

    def _assembled(self, prompts: Int[Array, "u P"], lengths: Int[Array, "u"], results: Results) -> Generation:
        prompts, lengths = (own_rows(jnp.repeat(x, self.samples, axis=0)) for x in (prompts, lengths))
        return assemble(prompts, lengths, results)

    def _all_done(self, prompts: PromptSlots, count: int) -> Rows:
        return self._mapped(partial(_done, count=count), SHARED, OWN)(prompts)

    def _mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


def _filled_rows(rows: Rows, prompts: PromptSlots, admitted: Admitted) -> Rows:
    chosen = admitted.prompts[admitted.source]
    fresh = first_rows(prompts.prompts[chosen], prompts.lengths[chosen], prompts.keys[admitted.row])
    at = _own(admitted.slot, rows.lengths.shape[0])
    return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), rows, fresh)


def _own(rows: Int[Array, "m"], count: int) -> Int[Array, "m"]:
    """Returns the indices of a group's rows among a device's `count` rows; past the end for rows of other devices."""
    mine = rows - lax.axis_index(TENSOR) * count
    return jnp.where((rows >= 0) & (mine >= 0), mine, count)


def _taken(cache: LayerCache, chosen: Int[Array, "c"]) -> LayerCache:
    return jax.tree.map(lambda x: x[chosen], cache)


def _taken_rows(rows: Rows, chosen: Int[Array, "b"]) -> Rows:
    return jax.tree.map(lambda x: own_rows(x[chosen]), all_rows(rows))


def _done(prompts: PromptSlots, count: int) -> Rows:
    """Returns the states of `count` finished rows on a device."""
    zeros = own_rows(jnp.zeros(count * lax.axis_size(TENSOR), jnp.int32)) + 0 * prompts.lengths[:1]
    return Rows(keys=prompts.keys[zeros], prompt_lengths=zeros + 1, lengths=zeros, last=zeros, finished=zeros == 0)


def with_lengths(schedule: Schedule, decoder: Decoder, slots: int, positions: int, mesh: Any) -> Schedule:
    """Returns the schedule with one cache length, if decoding reads only filled positions.

    Then longer caches cost no time, and every length less is a program less to compile for each number of slots.

    slots: of a group of devices, before they are halved. positions: of the longest possible row.
    """
    tensor, config = mesh.shape[TENSOR], decoder.config
    heads = max(config.kv_heads, tensor) // tensor
    fewest = schedule.slot_counts(slots, tensor)[-1], heads, positions, config.head_dim
    cache: Any = jax.ShapeDtypeStruct(fewest, decoder.dtype)
    largest: Any = jax.ShapeDtypeStruct((slots, *fewest[1:]), decoder.dtype)
    on_gpu = mesh.devices.flat[0].platform == "gpu" and decoder.attention != "xla"
    filled = on_gpu and reads_filled_positions(cache) and reads_filled_positions(largest)
    return replace(schedule, lengths=1) if filled else schedule


class ChunkedRollouts:
    """Calls of an engine whose schedule needs more than one program."""

    def __init__(self, decoder: Decoder, mesh: Mesh, schedule: Schedule):
        self._programs = Programs(decoder, mesh, min(schedule.chunk, decoder.sampling.max_new_tokens))
        self._schedule = schedule
        self._on_fewer: dict[int, Programs] = {}  # number of groups -> their programs
        self._warm: set[tuple[int | None, ...]] = set()

    def __call__(
        self, arguments: tuple[Any, ...], watch: Watch | None, last: LastRows | None, read: ToHosts
    ) -> Generation:
        programs, decoder = self._programs, self._programs.decoder
        params, adapter, (prompts, prompt_lengths, row_keys) = split_arguments(arguments, decoder.lora)
        decoder.check(params, prompts, row_keys)
        (count, width), limit = prompts.shape, decoder.sampling.max_new_tokens
        sizes = {"groups": programs.groups, "tensor": programs.tensor, "width": width, "limit": limit}
        slots = min(self._schedule.slots or len(row_keys), len(row_keys))
        check_rows(slots, programs.mesh, AXES, "decode slots")
        schedule = with_lengths(self._schedule, decoder, slots // programs.groups, width + limit, programs.mesh)
        occupancy = Occupancy.empty(schedule, count, programs.samples, **sizes)
        slots = occupancy.counts[0]
        if slots < programs.samples:
            least = math.ceil(programs.samples * programs.groups / programs.mesh.size) * programs.mesh.size
            raise ValueError(
                f"{programs.samples} samples of a prompt need as many decode slots, but each of {programs.groups} "
                f"groups of devices has {slots}: raise slots to {least} or more"
            )
        on_mesh = PromptSlots(*programs.put((prompts, prompt_lengths, row_keys)))
        last = last or LastRows.of(self._schedule)
        fewer = self._fewer(last)
        rollout = _Rollout(programs, (params, adapter), on_mesh, occupancy, read, last, fewer)
        shape, groups = (*prompts.shape, slots), None if fewer is None else fewer.groups
        for key, warm in ((shape, rollout.warm), ((*shape, groups), rollout.warm_move)):
            if key not in self._warm:
                warm()
                self._warm.add(key)
        return rollout.generate(watch)

    def _fewer(self, last: LastRows | None) -> Programs | None:
        """Returns the same programs on the groups of devices to which the last rows move; None if they stay."""
        programs = self._programs
        if last is None or last.groups >= programs.groups:
            return None
        if programs.groups % last.groups:
            raise ValueError(f"last_groups={last.groups} does not divide the {programs.groups} groups of devices")
        if last.groups not in self._on_fewer:
            devices = programs.mesh.devices.reshape(programs.groups, programs.tensor)[: last.groups]
            shape = last.groups, 1, programs.tensor
            mesh = Mesh(devices.reshape(shape), AXES, axis_types=programs.mesh.axis_types)
            decoder = replace(programs.decoder, mesh=mesh)
            self._on_fewer[last.groups] = Programs(decoder, mesh, programs.steps)
        return self._on_fewer[last.groups]


@dataclass(frozen=True)
class _Rollout:
    """One call.

    last: when its last rows move to fewer groups of devices. fewer: programs on those; None: the rows stay.
    """

    programs: Programs
    weights: tuple[Params, Params]
    prompts: PromptSlots
    occupancy: Occupancy
    read: ToHosts
    last: LastRows | None = None
    fewer: Programs | None = None

    def generate(self, watch: Watch | None = None) -> Generation:
        slots = self.programs.empty(self.prompts, self.occupancy.counts[0], self.occupancy.length)
        return self._decode(slots, self._no_results(), 0, watch)

    def _decode(self, slots: Slots, results: Results, longest: int, watch: Watch | None) -> Generation:
        """Decodes until all rows are done. longest: number of tokens of the longest row."""
        programs, occupancy = self.programs, self.occupancy
        assembled = partial(programs.assemble, self.prompts.prompts, self.prompts.lengths)
        while True:
            while (entering := occupancy.admit()) is not None:
                self._admit(slots, *entering)
                longest = max(longest, self.prompts.prompts.shape[1])
            if not any(occupancy.running):
                return assembled(results)
            for places in occupancy.shrink():
                programs.take(slots, programs.per_group(places))
            if (fewer := self.fewer) is not None and occupancy.moves(self.last):
                with jax.set_mesh(fewer.mesh):
                    generation = self._moved(fewer, slots)._decode(slots, transfer(results, fewer.mesh), longest, watch)
                return transfer(generation, programs.mesh)
            for longer in occupancy.grow(longest + programs.steps):
                programs.grow(slots, longer)
            row_of = programs.per_group([table.row for table in occupancy.tables])
            slots, results = programs.chunk(*self.weights, slots, results, row_of)
            longest = self._release(slots.rows)
            done = occupancy.done
            if watch is not None and not done.all():
                watch(done, partial(assembled, results), programs.mesh)

    def _release(self, rows: Rows) -> int:
        """Empties the slots of rows that are done; returns the length of the longest other row."""
        tables, limit = self.occupancy.tables, self.programs.decoder.sampling.max_new_tokens
        prompts, lengths, finished = self.read((rows.prompt_lengths, rows.lengths, rows.finished))
        for table, done in zip(tables, np.split(finished | (lengths >= limit), len(tables)), strict=True):
            table.release(done)
        occupied = np.concatenate([table.occupied for table in tables])
        return int((prompts + lengths)[occupied].max(initial=0))

    def _admit(self, slots: Slots, wave: int, admissions: Sequence[Admission]) -> None:
        programs, occupancy = self.programs, self.occupancy
        admitted = programs.admitted(admissions, wave, occupancy.samples, occupancy.counts[0])
        prefilled = programs.prefill(*self.weights, self.prompts, admitted.prompts)
        programs.admit(slots, prefilled, self.prompts, admitted)

    def _no_results(self) -> Results:
        return self.programs.no_results(len(self.prompts.keys))

    def _moved(self, fewer: Programs, slots: Slots) -> "_Rollout":
        """Returns this call on fewer groups. Each gets the rows of equally many neighbours, in one group's slots."""
        params, adapter = (base_on(own, fewer.mesh) for own in self.weights)
        occupancy, places = self.occupancy.merged(fewer.groups)
        fewer.take(slots, fewer.per_group(places))
        return _Rollout(fewer, (params, adapter), transfer(self.prompts, fewer.mesh), occupancy, self.read)

    def warm(self) -> None:
        """Compiles every program that a call of this shape may need on all groups, by running it on finished rows."""
        programs, occupancy = self.programs, self.occupancy
        counts, lengths = occupancy.counts, occupancy.lengths
        for wave in occupancy.waves:
            nobody = programs.admitted([((), ())] * programs.groups, wave, occupancy.samples, counts[0])
            prefilled = programs.prefill(*self.weights, self.prompts, nobody.prompts)
            slots = programs.empty(self.prompts, counts[0], lengths[0])
            for length in lengths:
                programs.grow(slots, length)
                programs.admit(slots, prefilled, self.prompts, nobody)
            jax.block_until_ready(slots)
        for count, fewer in zip(counts, (*counts[1:], None), strict=True):
            self._warm_steps(count, fewer)
        generation = programs.assemble(self.prompts.prompts, self.prompts.lengths, self._no_results())
        jax.block_until_ready(generation)

    def _warm_steps(self, count: int, fewer: int | None) -> None:
        """Compiles chunks of `count` slots for each cache length, and the move into fewer slots."""
        programs, lengths, results = self.programs, self.occupancy.lengths, self._no_results()
        row_of = programs.per_group([np.full(count, EMPTY, np.int32)] * programs.groups)
        slots = programs.empty(self.prompts, count, lengths[0])
        for length in lengths:
            programs.grow(slots, length)
            slots, results = programs.chunk(*self.weights, slots, results, row_of)
            if fewer is not None:
                first_layer = Slots(slots.caches[:1], slots.rows)
                programs.take(first_layer, programs.per_group([np.arange(fewer, dtype=np.int32)] * programs.groups))
                jax.block_until_ready(first_layer)
            # One program at a time, because some devices cannot run two with collectives concurrently.
            jax.block_until_ready((slots, results))

    def warm_move(self) -> None:
        """Compiles the move of the last rows, if they move, and the chunks after it."""
        programs, occupancy, fewer = self.programs, self.occupancy, self.fewer
        if fewer is None:
            return
        slots = programs.empty(self.prompts, occupancy.counts[-1], occupancy.lengths[0])
        for length in occupancy.lengths:
            programs.grow(slots, length)
            with jax.set_mesh(fewer.mesh):
                moved = self._moved(fewer, Slots([*slots.caches], slots.rows))
                jax.block_until_ready(moved.prompts)
        results = self._no_results()
        with jax.set_mesh(fewer.mesh):
            moved._warm_steps(occupancy.counts[-1], None)
            generation = fewer.assemble(moved.prompts.prompts, moved.prompts.lengths, transfer(results, fewer.mesh))
        jax.block_until_ready(transfer(generation, programs.mesh))
