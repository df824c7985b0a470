"""Compiles the programs of a rollout before its first row, by running them on finished rows.

One program at a time runs, because some devices cannot run two with collectives concurrently. Each function frees its
slots before the next one has its own, and at most one layer's caches exist in two sizes, because two sets of caches may
not fit into memory.
"""

from dataclasses import replace

import jax
import numpy as np

from jrlhf.models.generation.continuous import ContinuousBatch, Weights
from jrlhf.models.generation.programs import Programs, Slots
from jrlhf.models.lora import base_on


def warm(batch: ContinuousBatch, weights: Weights) -> None:
    """Compiles every program that rows may need before they move to fewer groups of devices."""
    for wave in batch.rules.waves:
        _warm_wave(batch, weights, wave)
    counts = batch.rules.counts
    for count, next_count in zip(counts, (*counts[1:], None), strict=True):
        _warm_chunks(batch, batch.programs, weights, count, next_count)


def warm_move(batch: ContinuousBatch, weights: Weights, fewer: Programs) -> None:
    """Compiles the move of the last rows to fewer groups of devices, and the chunks after it."""
    _warm_moved_slots(batch, fewer)
    with jax.set_mesh(fewer.mesh):
        _warm_chunks(batch, fewer, base_on(weights, fewer.mesh), batch.rules.counts[-1], None)


def _warm_wave(batch: ContinuousBatch, weights: Weights, wave: int) -> None:
    """Compiles the prefill of a wave, and its entry into slots for each cache length."""
    programs, rules, nobody = batch.programs, batch.rules, batch.padding(wave)
    prefilled = programs.prefill(*weights, nobody.prompts)
    slots = programs.empty(rules.slots, rules.lengths[0], batch.impl)
    for length in rules.lengths:
        programs.grow(slots, length)
        programs.admit(slots, prefilled, nobody)
    jax.block_until_ready(slots)


def _warm_moved_slots(batch: ContinuousBatch, fewer: Programs) -> None:
    """Compiles the move of slots to fewer groups of devices for each cache length."""
    count, lengths = batch.rules.counts[-1], batch.rules.lengths
    slots = batch.programs.empty(count, lengths[0], batch.impl)
    for length in lengths:
        batch.programs.grow(slots, length)
        with jax.set_mesh(fewer.mesh):
            _warm_take(fewer, slots, count)


def _warm_chunks(
    batch: ContinuousBatch, programs: Programs, weights: Weights, count: int, next_count: int | None
) -> None:
    """Compiles chunks of `count` slots for each cache length, and the move into `next_count` slots."""
    slots = programs.empty(count, batch.rules.lengths[0], batch.impl)
    for length in batch.rules.lengths:
        programs.grow(slots, length)
        slots = programs.chunk(*weights, slots)
        if next_count is not None:
            _warm_take(programs, slots, next_count)
        jax.block_until_ready(slots)


def _warm_take(programs: Programs, slots: Slots, count: int) -> None:
    """Compiles the choice of `count` slots of each group, with the caches of one layer: all layers are alike."""
    first_layer = replace(slots, caches=slots.caches[:1])
    programs.take(first_layer, np.zeros((programs.groups, count), np.int32))
    jax.block_until_ready(first_layer)
