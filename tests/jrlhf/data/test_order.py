"""The order of rows, and of prompts of which the solved ones are left out."""

import numpy as np
import pytest

from jrlhf.data.order import UNSOLVED, Order


def test_every_epoch_takes_each_row_once_in_an_order_of_its_own():
    order = Order(count=12, batch=8, seed=3)
    epochs = np.concatenate([order.draw(number) for number in range(6)]).reshape(4, 12)
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [order.epochs(number) for number in range(6)] == [[0], [0, 1], [1], [2], [2, 3], [3]]


def test_a_batch_depends_on_its_number_and_seed_alone():
    order = Order(count=10, batch=4, seed=1)
    first = [order.draw(number) for number in range(5)]
    again = [order.draw(number) for number in reversed(range(5))][::-1]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], Order(10, 4, seed=2).draw(0))


def test_the_order_is_that_of_older_versions():
    rows = np.concatenate([Order(5, 2, seed=7).draw(number) for number in range(5)])
    expected = [np.random.default_rng((7, epoch)).permutation(5) for epoch in range(2)]
    np.testing.assert_array_equal(rows, np.concatenate(expected))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_solved_prompts_are_left_out_of_the_epochs_that_have_not_begun(rounds):
    """Each complete epoch has the prompts that were unsolved before it began, as lists of the draws say."""
    rng, order = np.random.default_rng(rounds), Order(count=20, batch=6, seed=5)
    able = rng.random(20)  # the mean score of each prompt's four responses
    solved, drawn = np.full(20, UNSOLVED), []
    left = {0: set[int]()}  # epoch -> prompts that were solved before it
    for number in range(0, 24, rounds):
        batches = range(number, number + rounds)
        rows = {batch: order.draw(batch, solved) for batch in batches}
        drawn += [row for batch in batches for row in rows[batch]]
        scores = {
            batch: np.repeat(able[own], 4) + np.tile([0.25, -0.25, 0.125, -0.125], 6) for batch, own in rows.items()
        }
        last = order.epochs(batches[-1], solved)[-1]
        solved = order.without_solved(solved, scores, 0.6, batches[-1])
        left[last + 1] = {row for row in drawn if able[row] >= 0.6}  # the last to write it is the last of its epoch
    epoch, start = 0, 0
    for epoch in range(4):
        before = set().union(*(rows for which, rows in left.items() if which <= epoch))
        size = 20 - len(before)
        assert size >= 6 and set(drawn[start : start + size]) == set(range(20)) - before
        start += size
    assert 0 < len(left[2]) < 20
    for number in range(24):  # with what is known at the end, every batch is what it was
        np.testing.assert_array_equal(order.draw(number, solved), drawn[6 * number :][:6])


def test_prompts_return_where_less_than_a_batch_would_remain():
    order = Order(count=4, batch=2, seed=0)
    solved = np.array([1, 1, 1, UNSOLVED])
    assert sorted(np.concatenate([order.draw(number, solved) for number in (2, 3)])) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "scores, expected",
    [([np.nan, 1], UNSOLVED), ([np.inf, 0], UNSOLVED), ([0.9] * 7, 1), ([0.9] * 6 + [0.89], UNSOLVED)],
)
def test_a_prompt_is_solved_by_a_finite_mean_that_reaches_the_bound(scores, expected):
    order = Order(count=1, batch=1, seed=0)
    given = {0: np.array(scores, np.float32)}
    assert order.without_solved(np.full(1, UNSOLVED), given, 0.9, 0).tolist() == [expected]
