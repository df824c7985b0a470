"""Rollouts in chunks of decode steps: a `ContinuousBatch` that draws until all rows are done."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from jrlhf.meshes.mesh import AXES
from jrlhf.models.collectives import TENSOR, check_rows
from jrlhf.models.flash import reads_filled_positions
from jrlhf.models.generation.continuous import ContinuousBatch, Prompt, ToHosts, Weights
from jrlhf.models.generation.decoding import OWN, Decoder, Generation, Results, assemble, no_results
from jrlhf.models.generation.occupancy import LastRows, Occupancy
from jrlhf.models.generation.programs import Programs
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.generation.warm import warm, warm_move
from jrlhf.models.lora import base_on
from jrlhf.models.params import split_arguments

# Called after a chunk with the mask of finished rows, a function that assembles some of these rows on the host, and the
# mesh on which rows decode.
Watch = Callable[[Bool[np.ndarray, "N"], Callable[[slice], Generation], Mesh], None]


class ChunkedRollouts:
    """Calls of an engine whose schedule needs more than one program; see `Engine`."""

    def __init__(self, decoder: Decoder, mesh: Mesh, schedule: Schedule):
        self._schedule, self._samples, self._limit = schedule, decoder.samples, decoder.sampling.max_new_tokens
        self._programs = Programs(decoder, mesh, schedule.chunk)
        self._on_fewer: dict[int, Programs] = {}  # number of groups -> their programs
        self._warm: set[tuple[int | str | None, ...]] = set()

    def __call__(
        self, arguments: tuple[Any, ...], watch: Watch | None, last: LastRows | None, read: ToHosts, shares: bool
    ) -> Generation:
        params, adapter, (prompts, lengths, keys) = split_arguments(arguments, self._programs.decoder.lora)
        self._programs.decoder.check(params, prompts, keys)
        last = last or LastRows.of(self._schedule)
        count, width = prompts.shape
        rules, impl, fewer = self._rules(count, width), jax.random.key_impl(keys), self._fewer(last)
        # After a move, processes whose devices have no rows any more need all tokens, because they get a part of the
        # result.
        batch = ContinuousBatch(self._programs, rules, read, impl, shares=shares or fewer is not None)
        weights = params, adapter
        self._warm_up(batch, weights, fewer)
        drawn = self._drawn(batch, weights, read((prompts, lengths, jax.random.key_data(keys))), watch, last, fewer)
        return self._programs.put(drawn, OWN)

    def _drawn(
        self,
        batch: ContinuousBatch,
        weights: Weights,
        prompts: tuple[np.ndarray, np.ndarray, np.ndarray],
        watch: Watch | None,
        last: LastRows | None,
        fewer: Programs | None,
    ) -> Generation:
        """Decodes until all rows are done. prompts: tokens, their numbers, and the data of the rows' keys."""
        tokens, lengths, keys = prompts
        keys = keys.reshape(len(tokens), self._samples, *keys.shape[1:])
        waiting: Sequence[Prompt] = [Prompt(n, tokens[n], int(lengths[n]), own) for n, own in enumerate(keys)]
        starts, begun = np.repeat(lengths, self._samples), np.repeat(tokens, self._samples, axis=0)
        results = no_results(len(tokens) * self._samples, self._limit)

        def assembled(rows: slice) -> Generation:
            own = Results(results.tokens[rows], results.logprobs[rows], results.lengths[rows], results.finished[rows])
            return assemble(begun[rows], starts[rows], own, np)

        while waiting or len(batch.rows):
            waiting = batch.admit(weights, waiting)
            if not waiting:
                batch.shrink()
                if fewer is not None and last is not None and batch.programs is not fewer and batch.may_move(last):
                    weights = base_on(weights, fewer.mesh)
                    batch.move(fewer)
            for row in batch.decode(weights):
                if row.response is not None:
                    own = row.row, slice(row.end)
                    results.tokens[own], results.logprobs[own], results.finished[row.row] = row.response
                    results.lengths[row.row] = row.end
            done = results.lengths > 0
            if watch is not None and not done.all():
                watch(done, assembled, batch.mesh)
        return assembled(slice(None))

    def _rules(self, prompts: int, width: int) -> Occupancy:
        programs, rows = self._programs, prompts * self._samples
        check_rows(self._schedule.slots_of(rows), programs.mesh, AXES, "decode slots")
        sizes = {"groups": programs.groups, "tensor": programs.tensor, "width": width, "limit": self._limit}
        rules = Occupancy.of_rollout(self._schedule, prompts, self._samples, **sizes)
        schedule = with_lengths(self._schedule, programs.decoder, rules.slots, width + self._limit, programs.mesh)
        return replace(rules, schedule=schedule)

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
            self._on_fewer[last.groups] = Programs(replace(programs.decoder, mesh=mesh), mesh, programs.steps)
        return self._on_fewer[last.groups]

    def _warm_up(self, batch: ContinuousBatch, weights: Weights, fewer: Programs | None) -> None:
        """Compiles what the first call of a shape, or the first with such a move, may need."""
        rules, groups = batch.rules, None if fewer is None else fewer.groups
        shape = rules.prompts, rules.width, rules.slots, str(batch.impl)
        if shape not in self._warm:
            warm(batch, weights)
        if (*shape, groups) not in self._warm and fewer is not None:
            warm_move(batch, weights, fewer)
        self._warm |= {shape, (*shape, groups)}


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
