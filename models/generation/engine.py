"""Rollouts in chunks of decode steps, between which rows that are done make room.

`make_generate` is one program that decodes until its last row is done. Where lengths differ, most of its rows are soon
idle. The engine decodes a chunk of steps at a time and then looks: waiting prompts take the slots of rows that are
done; once none waits, the rows that are left move together into half as many slots; and caches grow with the longest
row. None of this decides what is drawn: a row's token t is drawn with fold_in(row key, t). Rounding may: programs of
unlike shapes do not round logits alike. In float32 no test has seen another token; in bfloat16 near ties do differ.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jrlhf.meshes import AXES, to_host
from jrlhf.models.attention import AttentionImplementation
from jrlhf.models.collectives import check_rows
from jrlhf.models.config import ModelConfig
from jrlhf.models.generation.decoding import Rows
from jrlhf.models.generation.programs import (
    Admitted,
    Generation,
    Programs,
    Prompts,
    Slots,
    check_length,
    check_prompts,
    decoder_of,
    make_generate,
)
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.generation.schedule import EMPTY, Admission, Schedule, Table, fitting
from jrlhf.models.lora import LoRAConfig, split_arguments
from jrlhf.models.params import Params

Weights = tuple[Params, Params]  # params and adapter


class Engine:
    """Generates what `make_generate`'s function generates, as a schedule says.

    A call is engine(params, prompts [U, P], prompt_lengths [U], row_keys [N]) -> Generation of N = U * samples rows, a
    prompt's after one another; with `lora` engine(adapter, prompts, prompt_lengths, row_keys, base). The first call
    with a shape compiles all programs that any call with that shape may need. No call may be inside jit: at the end of
    every chunk the host looks at which rows are done.

    samples: responses to each prompt; they share its prefill.
    The other arguments are those of `make_generate`.

    Raises:
        ValueError: as `make_generate`; when called: rows, prompts or slots that do not divide over the mesh, slots too
            few for a prompt's samples, or another number of keys than of rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
        *,
        samples: int = 1,
        dtype: Any = jnp.float32,
        attention: AttentionImplementation | None = None,
        lora: LoRAConfig | None = None,
    ):
        self._config, self._mesh, self._sampling = config, mesh, sampling
        self._schedule, self._samples, self._lora = schedule or Schedule(), samples, lora
        generate = make_generate(config, mesh, sampling, samples=samples, dtype=dtype, attention=attention, lora=lora)
        self._whole = jax.jit(generate)
        decoder = decoder_of(config, mesh, sampling, dtype, attention, lora)
        steps = min(self._schedule.chunk, sampling.max_new_tokens)
        self._programs = Programs(decoder, mesh, samples=samples, steps=steps)
        self._warm: set[tuple[int, ...]] = set()

    def __call__(self, *arguments: Any) -> Generation:
        params, adapter, (prompts, prompt_lengths, row_keys) = split_arguments(arguments, self._lora)
        (count, width), limit = prompts.shape, self._sampling.max_new_tokens
        rows = count * self._samples
        slots = min(self._schedule.slots or rows, rows)
        if self._schedule.is_one_program(rows, limit):
            return self._whole(*arguments)
        check_prompts(count, len(row_keys), self._samples, self._mesh)
        check_rows(slots, self._mesh, AXES, "decode slots")
        check_length(self._config, self._sampling, width)
        slots //= self._programs.groups
        if slots < self._samples:
            least = math.ceil(self._samples * self._programs.groups / self._mesh.size) * self._mesh.size
            raise ValueError(
                f"{self._samples} samples of a prompt need as many decode slots, but each of {self._programs.groups} "
                f"groups of devices has {slots}: raise slots to {least} or more"
            )
        on_mesh = self._programs.put(prompts, prompt_lengths, row_keys)
        rollout = _Rollout(self._programs, self._schedule, (params, adapter), on_mesh, slots, limit)
        shape = (rows, width, slots)
        if shape not in self._warm:
            rollout.warm()
            self._warm.add(shape)
        return rollout.generate()


class _Rollout:
    """One call of an engine."""

    def __init__(
        self, programs: Programs, schedule: Schedule, weights: Weights, prompts: Prompts, slots: int, limit: int
    ):
        self._programs, self._weights, self._prompts, self._limit = programs, weights, prompts, limit
        samples = self._samples = programs.samples
        count, width = prompts.prompts.shape
        self._rows = count * samples
        self._counts = schedule.slot_counts(slots, programs.tensor)
        self._lengths = schedule.cache_lengths(width, limit)
        self._tables = [Table(count // programs.groups, samples, slots) for _ in range(programs.groups)]
        self._waves = schedule.waves(count // programs.groups, slots // samples, width)

    def generate(self) -> Generation:
        """All rows, in the order of their prompts."""
        programs, longest, length = self._programs, 0, self._lengths[0]
        slots, results = programs.empty(self._prompts, self._counts[0], length), programs.no_results(self._rows)
        while True:
            while any(self._may_admit(table) for table in self._tables):
                self._admit(slots)
                longest = max(longest, self._prompts.prompts.shape[1])
            if not any(table.running for table in self._tables):
                return programs.assemble(self._prompts, results)
            self._shrink(slots)
            needed = fitting(self._lengths, min(longest + programs.steps, self._lengths[-1]))
            for longer in [size for size in self._lengths if length < size <= needed]:
                programs.grow(slots, longer)
                length = longer
            row_of = programs.per_group([table.row for table in self._tables])
            slots, results = programs.chunk(*self._weights, slots, results, row_of)
            longest = self._release(slots.rows)

    def _release(self, rows: Rows) -> int:
        """Empties the slots of rows that are done; returns the length of the longest other row."""
        prompts, lengths, finished = to_host((rows.prompt_lengths, rows.lengths, rows.finished))
        done = np.split(finished | (lengths >= self._limit), len(self._tables))
        for table, done_of in zip(self._tables, done, strict=True):
            table.release(done_of)
        occupied = np.concatenate([table.occupied for table in self._tables])
        return int((prompts + lengths)[occupied].max(initial=0))

    def _may_admit(self, table: Table) -> bool:
        """Whether there is room for a wave, or for all that waits, or for anything where nothing would decode."""
        return table.room > 0 and (table.room >= min(self._waves[0], len(table.waiting)) or table.running == 0)

    def _admit(self, slots: Slots) -> None:
        """Admits one wave of every group, the largest that one of them fills."""
        most = max(table.room for table in self._tables)
        wave = max((size for size in self._waves if size <= most), default=self._waves[0])
        admissions = [table.admit(wave if self._may_admit(table) else 0) for table in self._tables]
        admitted = self._admitted(admissions, wave)
        prefilled = self._programs.prefill(*self._weights, self._prompts, admitted)
        self._programs.admit(slots, prefilled, self._prompts, admitted)

    def _admitted(self, admissions: Sequence[Admission], wave: int) -> Admitted:
        """The admissions as arrays of the size of a whole wave."""
        groups = zip(*(self._group_arrays(admission, wave) for admission in admissions), strict=True)
        return Admitted(*map(self._programs.per_group, groups))

    def _group_arrays(self, admission: Admission, wave: int) -> tuple[Int[np.ndarray, "_"], ...]:
        """One group's part of `Admitted`."""
        prompts = np.zeros(wave, np.int32)
        prompts[: len(admission.prompts)] = admission.prompts
        source = np.repeat(np.arange(wave, dtype=np.int32), self._samples)
        number = np.tile(np.arange(self._samples, dtype=np.int32), wave)
        slot = np.full(len(source), self._counts[0], np.int32)  # past the end: none
        slot[: len(admission.slots)] = admission.slots
        return prompts, source, prompts[source] * self._samples + number, slot

    def _shrink(self, slots: Slots) -> None:
        """Moves the rows into fewer slots, if they have room there and no prompt waits for one."""
        if any(table.waiting for table in self._tables):
            return
        needed = fitting(self._counts, max(table.running for table in self._tables))
        for count in [size for size in self._counts if needed <= size < len(self._tables[0].row)]:
            self._programs.take(slots, self._programs.per_group([table.shrink(count) for table in self._tables]))

    def warm(self) -> None:
        """Compiles every program that such a call may need, by running it where all rows are done."""
        programs = self._programs
        for wave in self._waves:
            nobody = self._admitted([Admission((), ())] * programs.groups, wave)
            prefilled = programs.prefill(*self._weights, self._prompts, nobody)
            slots = programs.empty(self._prompts, self._counts[0], self._lengths[0])
            for length in self._lengths:
                if length != self._lengths[0]:
                    programs.grow(slots, length)
                programs.admit(slots, prefilled, self._prompts, nobody)
            jax.block_until_ready(slots)
        for count, fewer in zip(self._counts, (*self._counts[1:], None), strict=True):
            self._warm_steps(count, fewer)
        jax.block_until_ready(programs.assemble(self._prompts, programs.no_results(self._rows)))

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
