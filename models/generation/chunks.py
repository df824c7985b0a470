"""Rollouts in chunks of decode steps, between which rows that are done make room.

Where lengths differ, most rows of a single program are soon idle. Here a chunk of steps is decoded at a time; then
waiting prompts take the slots of rows that are done; once none waits, the rows that are left move together into half as
many slots, and at last to fewer groups of devices, if `last_groups` says so; and caches grow with the longest row. None
of this decides what is drawn: a row's token t is drawn with fold_in(row key, t). Rounding may: programs of unlike
shapes do not round logits alike. In float32 no test has seen another token; in bfloat16 near ties do differ. The move
to fewer groups changes no bit: caches travel with their rows, and a device's program keeps its shape.

The rows of a group of devices (those along `tensor`) are local to it: apart from that move, no row and no cache ever
leaves its group.
"""

import math
from collections import deque
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

from jrlhf.meshes import AXES, GENERATE, to_devices, to_host, transfer
from jrlhf.models.attention import LayerCache, empty_cache, filled_cache, grown_cache, transposes_keys
from jrlhf.models.collectives import TENSOR, all_rows, check_rows, own_rows
from jrlhf.models.generation.decoding import OWN, SHARED, Decoder, Generation, Results, Rows, assemble, first_rows
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.lora import base_on
from jrlhf.models.params import Params, split_arguments

EMPTY = -1  # a slot without a row
CACHE = P(GENERATE.batch, TENSOR)  # rows over the groups, and heads over a group's devices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
    """All prompts of a call, U of them, with the keys of their N = U * samples rows."""

    prompts: Int[Array, "U P"]
    lengths: Int[Array, "U"]
    keys: PRNGKeyArray  # [N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admitted:
    """Prompts that enter a group's slots: m = g * samples rows. A slot past the end stands for none."""

    prompts: Int[Array, "g"]
    source: Int[Array, "m"]  # which of `prompts`
    row: Int[Array, "m"]
    slot: Int[Array, "m"]


# Is told after a chunk which of all rows are done, and gets a function that assembles them, on the mesh on which rows
# decode: to be called at once, since the next chunk uses up what it reads.
Watch = Callable[[Bool[np.ndarray, "N"], Callable[[], Generation], Mesh], None]

# Prompts that enter one group's slots, and the slots that their samples take, a prompt's after one another.
Admission = tuple[Sequence[int], Sequence[int]]


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

    def __init__(self, decoder: Decoder, mesh: Mesh, steps: int):
        self.decoder, self.mesh, self.steps, self.samples = decoder, mesh, steps, decoder.samples
        self.tensor = mesh.shape[TENSOR]
        self.groups = mesh.size // self.tensor
        slots = Slots(CACHE, OWN)  # type: ignore[arg-type]
        # (params, adapter, slots, results, the row in each slot) -> slots and results after a chunk of steps.
        chunk = decoder.on_mesh(self._run_chunk, (slots, OWN, SHARED), (slots, OWN))
        self.chunk = jax.jit(chunk, donate_argnums=(2, 3))
        # (params, adapter, prompts, which of them) -> their caches, layer by layer.
        self.prefill = jax.jit(decoder.on_mesh(self._prefilled, (SHARED, SHARED), CACHE))
        self._fill_cache = jax.jit(self._mapped(_filled_cache, (CACHE, CACHE, SHARED), CACHE), donate_argnums=0)
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
        """Arrays on the mesh, by default each group's on its devices."""
        return to_devices(tree, NamedSharding(self.mesh, spec))

    def per_group(self, arrays: Sequence[np.ndarray]) -> Array:
        """One array a group, on its devices."""
        return self.put(np.concatenate(arrays))

    def empty(self, prompts: Prompts, slots: int, length: int) -> Slots:
        """This number of slots a group, whose rows are done, with caches of `length` positions."""
        config = self.decoder.config
        shape = slots * self.groups, max(config.kv_heads, self.tensor), length, config.head_dim
        caches = [self._empty(*shape) for _ in range(config.layers)]
        return Slots(caches, self._done_rows(prompts, slots // self.tensor))

    def no_results(self, rows: int) -> Results:
        """Results of rows of which no token is drawn yet."""
        limit = self.decoder.sampling.max_new_tokens
        tokens, lengths = np.zeros((rows, limit), np.int32), np.zeros(rows, np.int32)
        results = Results(tokens, tokens.astype(np.float32), lengths, lengths > 0)  # type: ignore[arg-type]
        return self.put(results, OWN)

    def admitted(self, admissions: Sequence[Admission], size: int, samples: int, slots: int) -> Admitted:
        """Each group's admission as arrays of `size` prompts with `samples` rows each. slots: of a group."""
        source = np.repeat(np.arange(size, dtype=np.int32), samples)
        number = np.tile(np.arange(samples, dtype=np.int32), size)

        def of_group(admission: Admission) -> tuple[Int[np.ndarray, "_"], ...]:
            entering, taken = admission
            prompts = np.array([*entering, *[0] * (size - len(entering))], np.int32)
            slot = np.array([*taken, *[slots] * (len(source) - len(taken))], np.int32)  # past the end: none
            return prompts, source, prompts[source] * samples + number, slot

        return Admitted(*map(self.per_group, zip(*map(of_group, admissions), strict=True)))

    def admit(self, slots: Slots, prefilled: list[LayerCache], prompts: Prompts, admitted: Admitted) -> None:
        """Gives slots to all samples of prefilled prompts."""
        self.fill_caches(slots, prefilled, admitted)
        slots.rows = self._fill_rows(slots.rows, prompts, admitted)

    def fill_caches(self, slots: Slots, prefilled: list[LayerCache], admitted: Admitted) -> None:
        """Replaces the caches of slots by prefilled ones."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._fill_cache(cache, prefilled[layer], admitted)

    def take(self, slots: Slots, chosen: Int[Array, "b"]) -> None:
        """Leaves only these slots, in this order. Slots of other groups of devices are brought here."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._take_cache(transfer(cache, self.mesh), chosen)
        slots.rows = self._take_rows(transfer(slots.rows, self.mesh), chosen)

    def grow(self, slots: Slots, length: int) -> None:
        """Gives the caches more positions."""
        for layer, cache in enumerate(slots.caches):
            slots.caches[layer] = self._grow(cache, length)

    # What runs on each device ----------------------------------------------------------------------------------------

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

    def _prefilled(self, weights: Params, prompts: Prompts, chosen: Int[Array, "g"]) -> list[LayerCache]:
        return self.decoder.prefill(weights, prompts.prompts[chosen], prompts.prompts.shape[1])

    def _assembled(self, prompts: Int[Array, "u P"], lengths: Int[Array, "u"], results: Results) -> Generation:
        prompts, lengths = (own_rows(jnp.repeat(x, self.samples, axis=0)) for x in (prompts, lengths))
        return assemble(prompts, lengths, results)

    def _all_done(self, prompts: Prompts, count: int) -> Rows:
        return self._mapped(partial(_done, count=count), SHARED, OWN)(prompts)

    def _mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


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


def _taken_rows(rows: Rows, chosen: Int[Array, "b"]) -> Rows:
    return jax.tree.map(lambda x: own_rows(x[chosen]), all_rows(rows))


def _done(prompts: Prompts, count: int) -> Rows:
    """The states of this number of rows of a device, all of them done."""
    zeros = own_rows(jnp.zeros(count * lax.axis_size(TENSOR), jnp.int32)) + 0 * prompts.lengths[:1]
    return Rows(keys=prompts.keys[zeros], prompt_lengths=zeros + 1, lengths=zeros, last=zeros, finished=zeros == 0)


class Table:
    """Records which row of a group of devices is in which slot, and which prompts wait.

    A row is a sample of a prompt: row prompt * samples + number.
    """

    def __init__(self, prompts: int, samples: int, slots: int):
        self.prompts, self.samples = prompts, samples
        self.waiting = deque(range(prompts))
        self.row = np.full(slots, EMPTY, np.int32)

    @property
    def occupied(self) -> Bool[np.ndarray, "slots"]:
        return self.row != EMPTY

    @property
    def running(self) -> int:
        return int(self.occupied.sum())

    @property
    def done(self) -> Bool[np.ndarray, "rows"]:
        """The rows that neither wait nor decode."""
        done = np.ones(self.prompts * self.samples, bool)
        done[self.row[self.occupied]] = False
        done.reshape(self.prompts, self.samples)[list(self.waiting)] = False
        return done

    @property
    def room(self) -> int:
        """Waiting prompts for all of whose samples there are free slots."""
        return min((len(self.row) - self.running) // self.samples, len(self.waiting))

    def admit(self, most: int) -> Admission:
        """Gives free slots to at most `most` waiting prompts, all samples of a prompt together."""
        free = np.flatnonzero(~self.occupied)
        count = min(most, self.room)
        prompts = tuple(self.waiting.popleft() for _ in range(count))
        slots = free[: count * self.samples]
        self.row[slots] = [prompt * self.samples + number for prompt in prompts for number in range(self.samples)]
        return prompts, slots.tolist()

    def release(self, done: Bool[np.ndarray, "slots"]) -> None:
        """Empties the slots of rows that are done."""
        self.row[done] = EMPTY

    @classmethod
    def of_groups(cls, tables: Sequence["Table"]) -> "Table":
        """The table of one group that has the prompts and slots of all these, one after the other. None may wait."""
        samples, prompts = tables[0].samples, [table.prompts for table in tables]
        merged = cls(sum(prompts), samples, 0)
        merged.waiting.clear()
        firsts = np.cumsum([0, *prompts[:-1]]) * samples
        rows = [np.where(table.occupied, table.row + first, EMPTY) for table, first in zip(tables, firsts, strict=True)]
        merged.row = np.concatenate(rows).astype(np.int32)
        return merged

    def shrink(self, slots: int) -> Int[np.ndarray, "new"]:
        """Keeps this number of slots; returns the old indices of the kept ones. Every row must have a place."""
        order = np.argsort(~self.occupied, kind="stable")[:slots]
        assert self.running <= slots, "a row would be lost"
        self.row = self.row[order]
        return order.astype(np.int32)


def fitting(sizes: Sequence[int], needed: int) -> int:
    """The least of `sizes` that is at least `needed`."""
    return min(size for size in sizes if size >= needed)


class ChunkedRollouts:
    """Calls of an engine whose schedule needs more than one program."""

    def __init__(self, decoder: Decoder, mesh: Mesh, schedule: Schedule):
        self._programs = Programs(decoder, mesh, min(schedule.chunk, decoder.sampling.max_new_tokens))
        self._last = None if schedule.last_groups is None else _on_groups(self._programs, schedule.last_groups)
        self._schedule = schedule
        self._warm: set[tuple[int, ...]] = set()

    def __call__(self, *arguments: Any, watch: Watch | None = None) -> Generation:
        programs, decoder = self._programs, self._programs.decoder
        params, adapter, (prompts, prompt_lengths, row_keys) = split_arguments(arguments, decoder.lora)
        decoder.check(prompts, len(row_keys))
        slots = min(self._schedule.slots or len(row_keys), len(row_keys))
        check_rows(slots, programs.mesh, AXES, "decode slots")
        slots //= programs.groups
        if slots < programs.samples:
            least = math.ceil(programs.samples * programs.groups / programs.mesh.size) * programs.mesh.size
            raise ValueError(
                f"{programs.samples} samples of a prompt need as many decode slots, but each of {programs.groups} "
                f"groups of devices has {slots}: raise slots to {least} or more"
            )
        on_mesh = Prompts(*programs.put((prompts, prompt_lengths, row_keys)))
        rollout = _Rollout(programs, self._schedule, (params, adapter), on_mesh, slots, self._last)
        shape = (*prompts.shape, slots)
        if shape not in self._warm:
            rollout.warm()
            self._warm.add(shape)
        return rollout.generate(watch)


class _Rollout:
    """One call. last: the programs of the groups to which its last rows move, if they do."""

    def __init__(
        self,
        programs: Programs,
        schedule: Schedule,
        weights: tuple[Params, Params],
        prompts: Prompts,
        slots: int,
        last: Programs | None = None,
    ):
        self._programs, self._schedule, self._weights, self._prompts = programs, schedule, weights, prompts
        (count, width), limit = prompts.prompts.shape, programs.decoder.sampling.max_new_tokens
        self._rows, self._samples, self._limit = count * programs.samples, programs.samples, limit
        self._counts = schedule.slot_counts(slots, programs.tensor)
        self._lengths = schedule.cache_lengths(width, limit)
        self._tables = [Table(count // programs.groups, self._samples, slots) for _ in range(programs.groups)]
        self._waves = schedule.waves(count // programs.groups, slots // self._samples, width)
        self._last = last

    def generate(self, watch: Watch | None = None) -> Generation:
        programs = self._programs
        slots = programs.empty(self._prompts, self._counts[0], self._lengths[0])
        return self._decode(slots, programs.no_results(self._rows), 0, self._lengths[0], watch)

    def _decode(self, slots: Slots, results: Results, longest: int, length: int, watch: Watch | None) -> Generation:
        """Decodes until all rows are done. longest: tokens of the longest row; length: positions of the caches."""
        programs = self._programs
        assembled = partial(programs.assemble, self._prompts.prompts, self._prompts.lengths)
        while True:
            while any(self._may_admit(table) for table in self._tables):
                self._admit(slots)
                longest = max(longest, self._prompts.prompts.shape[1])
            if not any(table.running for table in self._tables):
                return assembled(results)
            self._shrink(slots)
            if self._last is not None and self._fit(self._last):
                with jax.set_mesh(self._last.mesh):
                    moved = self._moved(self._last, slots, self._tables)
                    generation = moved._decode(slots, transfer(results, self._last.mesh), longest, length, watch)
                return transfer(generation, programs.mesh)
            needed = fitting(self._lengths, min(longest + programs.steps, self._lengths[-1]))
            for longer in [size for size in self._lengths if length < size <= needed]:
                programs.grow(slots, longer)
                length = longer
            row_of = programs.per_group([table.row for table in self._tables])
            slots, results = programs.chunk(*self._weights, slots, results, row_of)
            longest = self._release(slots.rows)
            done = np.concatenate([table.done for table in self._tables])
            if watch is not None and not done.all():
                watch(done, partial(assembled, results), programs.mesh)

    def _release(self, rows: Rows) -> int:
        """Empties the slots of rows that are done; returns the length of the longest other row."""
        prompts, lengths, finished = to_host((rows.prompt_lengths, rows.lengths, rows.finished))
        done = np.split(finished | (lengths >= self._limit), len(self._tables))
        for table, done_of in zip(self._tables, done, strict=True):
            table.release(done_of)
        occupied = np.concatenate([table.occupied for table in self._tables])
        return int((prompts + lengths)[occupied].max(initial=0))

    def _may_admit(self, table: Table) -> bool:
        """True if a wave or all waiting prompts have room, or any prompt where no row would decode."""
        return table.room > 0 and (table.room >= min(self._waves[0], len(table.waiting)) or table.running == 0)

    def _admit(self, slots: Slots) -> None:
        """Admits one wave of every group, the largest that one of them fills."""
        most = max(table.room for table in self._tables)
        wave = max((size for size in self._waves if size <= most), default=self._waves[0])
        admissions = [table.admit(wave if self._may_admit(table) else 0) for table in self._tables]
        admitted = self._programs.admitted(admissions, wave, self._samples, self._counts[0])
        prefilled = self._programs.prefill(*self._weights, self._prompts, admitted.prompts)
        self._programs.admit(slots, prefilled, self._prompts, admitted)

    def _shrink(self, slots: Slots) -> None:
        """Moves the rows into fewer slots, if they have room there and no prompt waits for one."""
        if any(table.waiting for table in self._tables):
            return
        needed = fitting(self._counts, max(table.running for table in self._tables))
        for count in [size for size in self._counts if needed <= size < len(self._tables[0].row)]:
            self._programs.take(slots, self._programs.per_group([table.shrink(count) for table in self._tables]))

    def _fit(self, last: Programs) -> bool:
        """True if no prompt waits, and these groups have slots for the rows of all groups whose place they take."""
        running = np.reshape([table.running for table in self._tables], (last.groups, -1)).sum(axis=1)
        return not any(table.waiting for table in self._tables) and running.max() <= self._counts[-1]

    def _moved(self, last: Programs, slots: Slots, tables: Sequence[Table]) -> "_Rollout":
        """This call on these groups: the rows of as many neighbours each, in as many slots as one of them has."""
        params, adapter = (base_on(own, last.mesh) for own in self._weights)
        schedule, prompts = replace(self._schedule, buckets=1), transfer(self._prompts, last.mesh)
        moved = _Rollout(last, schedule, (params, adapter), prompts, self._counts[-1])
        share = len(tables) // last.groups
        moved._tables = [Table.of_groups(tables[first : first + share]) for first in range(0, len(tables), share)]
        last.take(slots, last.per_group([table.shrink(self._counts[-1]) for table in moved._tables]))
        return moved

    def warm(self) -> None:
        """Compiles every program that such a call may need, by running it where all rows are done."""
        programs = self._programs
        for wave in self._waves:
            nobody = programs.admitted([((), ())] * programs.groups, wave, self._samples, self._counts[0])
            prefilled = programs.prefill(*self._weights, self._prompts, nobody.prompts)
            slots = programs.empty(self._prompts, self._counts[0], self._lengths[0])
            for length in self._lengths:
                if length != self._lengths[0]:
                    programs.grow(slots, length)
                programs.admit(slots, prefilled, self._prompts, nobody)
            jax.block_until_ready(slots)
        for count, fewer in zip(self._counts, (*self._counts[1:], None), strict=True):
            self._warm_steps(count, fewer)
        if self._last is not None:
            self._warm_last(self._last)
        no_results = programs.no_results(self._rows)
        jax.block_until_ready(programs.assemble(self._prompts.prompts, self._prompts.lengths, no_results))

    def _warm_steps(self, count: int, fewer: int | None) -> None:
        """Compiles a chunk of this number of slots with caches of each length, and the move into fewer."""
        programs, results = self._programs, self._programs.no_results(self._rows)
        row_of = programs.per_group([np.full(count, EMPTY, np.int32)] * programs.groups)
        slots = programs.empty(self._prompts, count, self._lengths[0])
        for length in self._lengths:
            if length != self._lengths[0]:
                programs.grow(slots, length)
            slots, results = programs.chunk(*self._weights, slots, results, row_of)
            if fewer is not None:
                first_layer = Slots(slots.caches[:1], slots.rows)
                programs.take(first_layer, programs.per_group([np.arange(fewer, dtype=np.int32)] * programs.groups))
                jax.block_until_ready(first_layer)
            # One program at a time: some devices may not run two with collectives at once.
            jax.block_until_ready((slots, results))

    def _warm_last(self, last: Programs) -> None:
        """Compiles the move to these groups, and the chunks there."""
        programs, count = self._programs, self._counts[-1]
        tables = [Table(table.prompts, self._samples, count) for table in self._tables]
        slots = programs.empty(self._prompts, count, self._lengths[0])
        for length in self._lengths:
            if length != self._lengths[0]:
                programs.grow(slots, length)
            with jax.set_mesh(last.mesh):
                moved = self._moved(last, Slots([*slots.caches], slots.rows), tables)
                jax.block_until_ready(moved._prompts)
        with jax.set_mesh(last.mesh):
            moved._warm_steps(count, None)


def _on_groups(programs: Programs, groups: int) -> Programs | None:
    """The same programs on the first groups of devices; None: there are no others."""
    if groups >= programs.groups:
        return None
    if programs.groups % groups:
        raise ValueError(f"last_groups={groups} does not divide the {programs.groups} groups of devices")
    devices = programs.mesh.devices.reshape(programs.groups, programs.tensor)[:groups]
    mesh = Mesh(devices.reshape(groups, 1, programs.tensor), AXES, axis_types=programs.mesh.axis_types)
    return Programs(replace(programs.decoder, mesh=mesh), mesh, programs.steps)
