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
from jrlhf.models.generation.occupancy import EMPTY, Occupancy, empty, entered, fitting, packed, running
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


def owners(*groups: list[int]) -> Any:
    return np.array(groups, np.int32)


def test_waiting_prompts_go_to_the_groups_with_most_room():
    rules = Occupancy(Schedule(prefill=2), samples=2, prompts=8, groups=3, tensor=1, slots=8, width=4, limit=4)
    assert rules.room(empty(3, 8)).tolist() == [4, 4, 4]
    # A wave has two prompts of a group.
    assert rules.entering(empty(3, 8), 12).tolist() == [2, 2, 2]
    assert rules.entering(empty(3, 8), 4).tolist() == [2, 1, 1]
    x = EMPTY
    owner = owners([0, 1, 2, 3, 4, 5, x, x], [6, x, 7, x, x, x, x, 8], [9, 10, 11, 12, 13, 14, 15, x])
    assert rules.room(owner).tolist() == [1, 2, 0]
    # All have room: nobody waits. Otherwise a group with room for one waits for room for a wave of two.
    assert rules.entering(owner, 3).tolist() == [1, 2, 0]
    assert rules.entering(owner, 4).tolist() == [0, 2, 0]
    assert rules.entering(owners([x] * 8, [6, 7] * 3 + [x, x], [1] * 8), 99).tolist() == [2, 0, 0]
    assert rules.entering(owners([x] * 8, [x] * 4 + [6] * 4, [1] * 8), 4).tolist() == [2, 2, 0]
    narrow = Occupancy(Schedule(prefill=4), samples=4, prompts=8, groups=2, tensor=1, slots=8, width=4, limit=4)
    full = owners([x] * 8, [1] * 8)
    assert narrow.waves == (2,) and narrow.entering(full, 9).tolist() == [2, 0]
    assert narrow.wave(np.array([1, 0])) == 2  # with padding


def test_every_row_has_a_slot_exactly_once():
    generator = np.random.default_rng(0)
    cases = (1, 1, 4, 11, None), (1, 2, 7, 22, 2), (3, 2, 7, 10, 1), (3, 4, 8, 4, 9)
    for samples, groups, slots, prompts, prefill in cases:
        schedule = Schedule(prefill=prefill, buckets=3)
        rules = Occupancy(schedule, samples, prompts // groups, groups, tensor=1, slots=slots, width=4, limit=4)
        owner, waiting, seen, chunks = empty(groups, slots), list(range(prompts)), list[int](), 0
        while waiting or running(owner).any():
            while (counts := rules.entering(owner, len(waiting))).any():
                assert (counts <= np.minimum(rules.room(owner), rules.wave(counts))).all()
                owner, _ = entered(owner, [[waiting.pop(0) for _ in range(count)] for count in counts], samples)
            assert running(owner).any()
            ended = (owner != EMPTY) & (generator.random(owner.shape) < 0.3)
            seen += owner[ended].tolist()
            owner[ended] = EMPTY
            for count in () if waiting else rules.halvings(owner):
                before = sorted(owner[owner != EMPTY])
                owner, _ = packed(owner, count)
                assert sorted(owner[owner != EMPTY]) == before
            chunks += 1
        assert sorted(seen) == list(range(prompts * samples)) and chunks > 2


def test_rows_of_a_prompt_enter_the_first_free_slots():
    x = EMPTY
    owner = owners([x, 1, x, x, 5, x], [x, x, x, 7, 8, 9])
    after, slots = entered(owner, [[6, 4], []], samples=2)
    assert after.tolist() == [[12, 1, 13, 8, 5, 9], [x, x, x, 7, 8, 9]]
    assert [own.tolist() for own in slots] == [[0, 2, 3, 5], []] and owner[0, 0] == x


def test_packing_keeps_the_rows_that_run():
    x = EMPTY
    owner = owners([x, 1, x, x, 4, x], [7, x, x, 8, x, 9])
    fewer, places = packed(owner, 3)
    assert places.tolist() == [[1, 4, 0], [0, 3, 5]] and running(owner).tolist() == [2, 3]
    assert fewer.tolist() == [[1, 4, x], [7, 8, 9]]
    with pytest.raises(AssertionError, match="lost"):
        packed(owner, 2)


def test_slots_and_caches_change_step_by_step():
    sizes = {"samples": 1, "prompts": 8, "groups": 1, "tensor": 1, "slots": 8, "width": 6, "limit": 32}
    rules, owner = Occupancy(Schedule(chunk=4, buckets=3), **sizes), owners([1, 2, *[EMPTY] * 6])
    assert [rules.halvings(owner[:, :slots]) for slots in (8, 4, 2)] == [(4, 2), (2,), ()]
    assert rules.halvings(owners([1, 2, 3, *[EMPTY] * 5])) == (4,)
    assert rules.longer(17, 18) == (28,) and rules.longer(17, 99) == (28, 38) and rules.longer(28, 20) == ()


def test_numbers_out_of_range_are_refused():
    for name in ("slots", "chunk", "buckets", "lengths", "prefill"):
        for value in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer of at least 1"):
                setting: dict[str, Any] = {name: value}
                Schedule(**setting)
