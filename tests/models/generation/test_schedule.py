"""The bookkeeping of decode slots: every row gets one slot once, in an order that does not depend on luck."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models import SamplingConfig
from jrlhf.models.generation.chunks import with_lengths
from jrlhf.models.generation.decoding import Decoder
from jrlhf.models.generation.occupancy import EMPTY, SlotTable, fitting
from jrlhf.models.generation.schedule import Schedule
from tests.models.shared import FAMILIES


def test_slots_are_halved_as_long_as_every_device_keeps_a_share():
    assert Schedule(buckets=4).slot_counts(64, 1) == (64, 32, 16, 8)
    assert Schedule(buckets=9).slot_counts(24, 2) == (24, 12, 6)
    assert Schedule(buckets=3).slot_counts(4, 4) == (4,)
    assert Schedule(buckets=1).slot_counts(64, 1) == (64,)


def test_caches_grow_to_the_longest_row_and_always_hold_a_chunk():
    assert Schedule(chunk=64, lengths=4).cache_lengths(512, 512) == (640, 768, 896, 1024)
    assert Schedule(chunk=200, lengths=4).cache_lengths(512, 512) == (768, 896, 1024)
    assert Schedule(chunk=900, lengths=4).cache_lengths(512, 512) == (1024,)
    assert Schedule(chunk=4, lengths=3).cache_lengths(6, 32) == (17, 28, 38)
    assert fitting((17, 28, 38), 18) == 28


@pytest.mark.parametrize(
    ("platform", "dtype", "attention", "slots", "lengths"),
    [
        ("gpu", jnp.bfloat16, None, 512, (1024,)),  # down to 128 slots of one key-value head of a device
        ("gpu", jnp.bfloat16, None, 256, (683, 854, 1024)),
        ("gpu", jnp.bfloat16, None, 2**15, (683, 854, 1024)),  # 2^31 numbers
        ("gpu", jnp.bfloat16, "xla", 512, (683, 854, 1024)),
        ("gpu", jnp.float32, None, 512, (683, 854, 1024)),
        ("cpu", jnp.bfloat16, None, 512, (683, 854, 1024)),
    ],
)
def test_caches_do_not_grow_where_decoding_reads_only_filled_positions(platform, dtype, attention, slots, lengths):
    config, shape = replace(FAMILIES["llama"], head_dim=64), {"tensor": 2}
    mesh: Any = SimpleNamespace(shape=shape, devices=np.array([SimpleNamespace(platform=platform)]))
    decoder = Decoder(config, mesh, SamplingConfig(8), dtype=dtype, attention=attention)
    assert with_lengths(Schedule(), decoder, slots, 1024, mesh).cache_lengths(512, 512) == lengths


def test_prompts_are_prefilled_in_waves():
    assert Schedule().waves(prompts=64, room=64, width=16) == (64,)  # 1024 tokens
    assert Schedule().waves(prompts=64, room=64, width=64) == (8, 32)  # 2048 tokens
    assert Schedule().waves(prompts=64, room=64, width=512) == (8,)
    assert Schedule().waves(prompts=64, room=16, width=16) == (2, 16)
    assert Schedule(prefill=3).waves(prompts=64, room=64, width=16) == (3,)
    assert Schedule(prefill=9).waves(prompts=4, room=4, width=16) == (4,)
    assert Schedule(chunk=8).is_one_program(rows=64, response=8) and Schedule(64, 8).is_one_program(64, 8)
    for schedule in (Schedule(chunk=7), Schedule(slots=32, chunk=8), Schedule(chunk=8, prefill=64)):
        assert not schedule.is_one_program(rows=64, response=8)


def test_every_row_has_a_slot_exactly_once():
    prompts, generator = 11, np.random.default_rng(0)
    for samples, slots in ((1, 4), (1, 7), (3, 7)):
        table, seen = SlotTable(prompts, samples, slots), []
        while (table.waiting or table.running) and len(seen) <= prompts * samples:
            admitted, taken = table.admit(most=2)
            assert len(taken) == samples * len(admitted) <= slots
            rows = table.row[list(taken)]
            np.testing.assert_array_equal(rows // samples, np.repeat(admitted, samples))
            seen += rows.tolist()
            table.release(generator.random(slots) < 0.3)
        assert sorted(seen) == list(range(prompts * samples))


def test_shrinking_keeps_the_rows_that_run():
    table = SlotTable(6, 1, 6)
    table.admit(most=6)
    table.release(np.array([True, False, True, True, False, True]))
    indices = table.shrink(3)
    assert indices.tolist() == [1, 4, 0]
    assert table.row.tolist() == [1, 4, EMPTY]
    with pytest.raises(AssertionError, match="lost"):
        table.shrink(1)


def test_numbers_out_of_range_are_refused():
    for name in ("slots", "chunk", "buckets", "lengths", "prefill"):
        for value in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer of at least 1"):
                setting: dict[str, Any] = {name: value}
                Schedule(**setting)
