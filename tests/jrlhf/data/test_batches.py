"""The rows of a step, their padding, and the source of the randomness."""

import jax
import numpy as np
import pytest

from jrlhf.data.batches import distinct_first, key_for, pad_rows, put_rows, row_keys
from jrlhf.meshes import make_mesh


def test_rows_of_different_prompts_come_first():
    np.testing.assert_array_equal(distinct_first(6, 3), [0, 3, 1, 4, 2, 5])
    np.testing.assert_array_equal(distinct_first(3, 1), [0, 1, 2])


def test_rows_are_padded_on_the_right_and_too_long_ones_refused():
    tokens, lengths = pad_rows([(5, 6), (7,), ()], 3)
    np.testing.assert_array_equal(tokens, [[5, 6, 0], [7, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(lengths, [2, 1, 0])
    with pytest.raises(ValueError, match="a row of 4 tokens does not fit into 3"):
        pad_rows([(1, 2, 3, 4)], 3)


def test_rows_lie_over_all_devices():
    mesh = make_mesh(2, 2, 2)
    rows = put_rows(np.arange(16).reshape(8, 2), mesh)
    assert [shard.data.shape for shard in rows.addressable_shards] == [(1, 2)] * 8
    np.testing.assert_array_equal(rows, np.arange(16).reshape(8, 2))


def test_each_purpose_step_and_row_has_a_key_of_its_own():
    mesh = make_mesh(1, 8, 1)
    keys = [key_for(0, "rollout", 0), key_for(0, "rollout", 1), key_for(0, "evaluation", 0), key_for(1, "rollout", 0)]
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 4
    rows = np.asarray(jax.random.key_data(row_keys(keys[0], 8, mesh)))
    assert len({tuple(row) for row in rows}) == 8
    np.testing.assert_array_equal(rows[:4], np.asarray(jax.random.key_data(row_keys(keys[0], 16, mesh)))[:4])
