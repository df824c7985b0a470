"""DAPO's dynamic sampling: what a batch is filled with, round by round."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.algorithms.pool import Pool, informative
from jrlhf.data.batches import Batch, put_rows, row_sharding
from jrlhf.meshes import make_mesh
from jrlhf.ppo import Rollout
from jrlhf.run.clock import Clock

MESH, SAMPLES, ROWS = make_mesh(2, 4, 1), 2, 8  # a prompt's two rows lie on two devices


def a_round(number: int, scores: list[float]) -> tuple[Rollout, jax.Array, Batch]:
    """A rollout whose every array tells of which round and row it is."""
    own = 100 * number + np.arange(ROWS, dtype=np.int32)
    tokens, floats = np.tile(own[:, None], (1, 4)), np.tile(own[:, None], (1, 4)).astype(np.float32)
    placed = put_rows((tokens, own, own + 1, floats, own % 2 == 0), MESH)
    texts = [str(each) for each in own]
    batch = Batch(cast(Any, ()), cast(Any, texts), texts, number)
    return Rollout(*placed, version=jnp.int32(number)), put_rows(np.array(scores, np.float32), MESH), batch


def fill(rounds: list[list[float]], *, max_rounds: int = 10) -> tuple[Pool, Rollout, jax.Array, Any]:
    """An iteration of DAPO as far as its batch."""
    rewards = SimpleNamespace(raw=None)
    rewards.restate = lambda raw: setattr(rewards, "raw", raw)
    drawn = [a_round(number, scores) for number, scores in enumerate(rounds)]
    with jax.set_mesh(MESH):
        limits = {"samples": SAMPLES, "max_rounds": max_rounds}
        pool = Pool(lambda number: drawn[number - 7][2], cast(Any, rewards), MESH, **limits, clock=Clock())
        pool.start(7)
        while pool.wants_more():
            prompts = pool.draw()
            rollout, raw, _ = drawn[prompts.step]
            rewards.raw = raw
            kept = pool.keep(rollout, raw + 0.5, prompts)  # as if scores were shaped
        rollout, scores = pool.batch(kept)
    return pool, rollout, scores, rewards


ALL = [0.0, 1.0] * 4


def test_a_batch_that_is_informative_is_taken_as_it_is():
    pool, rollout, scores, _ = fill([ALL])
    np.testing.assert_array_equal(rollout.tokens[:, 0], np.arange(ROWS))
    np.testing.assert_array_equal(scores, np.array(ALL) + 0.5)
    assert pool.metrics() == {"dapo/rounds": 1.0, "dapo/informative": 1.0, "dapo/filled": 0.0}


def test_groups_of_equal_scores_give_their_places_to_later_ones():
    rounds = [[0, 1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 0, 0], ALL]
    pool, rollout, scores, rewards = fill([list(map(float, each)) for each in rounds])
    rows = [0, 1, 102, 103, 200, 201, 6, 7]  # the second and third group were dull; round 1 had one other, then round 2
    np.testing.assert_array_equal(rollout.tokens[:, 0], rows)
    np.testing.assert_array_equal(rollout.prompt_lengths, rows)
    np.testing.assert_array_equal(rollout.finished, np.array(rows) % 2 == 0)
    np.testing.assert_array_equal(rewards.raw, [0, 1, 0, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(scores, np.asarray(rewards.raw) + 0.5)
    assert [*pool.taken.texts] == [*pool.taken.examples] == [str(row) for row in rows]
    assert pool.draws == 10 and rollout.tokens.sharding.is_equivalent_to(row_sharding(MESH), 2)
    assert pool.metrics() == {"dapo/rounds": 3.0, "dapo/informative": 7 / 12, "dapo/filled": 0.0}


def test_after_the_last_round_the_rest_stays_as_it_came():
    dull = [1.0] * ROWS
    pool, rollout, _, _ = fill([dull, [0.0, 1.0] + dull[2:], ALL], max_rounds=2)
    np.testing.assert_array_equal(rollout.tokens[:, 0], [100, 101, 2, 3, 4, 5, 6, 7])
    assert pool.metrics() == {"dapo/rounds": 2.0, "dapo/informative": 1 / 8, "dapo/filled": 0.75}


@pytest.mark.parametrize("scores", [[0.1] * 4, [0.3, 0.3, -2.0, -2.0]])
def test_equal_scores_say_nothing(scores):
    assert not informative(np.array(scores, np.float32), 2).any()
