"""The order of rows, and of prompts of which the solved ones are left out."""

import numpy as np

from jrlhf.data.order import UNSOLVED, Order


def test_every_epoch_takes_each_row_once_in_an_order_of_its_own():
    order = Order(count=12, batch=8, seed=3)
    rows, epochs = (np.concatenate(parts) for parts in zip(*map(order.draw, range(6)), strict=True))
    np.testing.assert_array_equal(epochs, np.repeat(range(4), 12))
    assert all(sorted(epoch) == list(range(12)) for epoch in rows.reshape(4, 12))
    assert len({tuple(epoch) for epoch in rows.reshape(4, 12)}) == 4


def test_a_batch_depends_on_its_number_and_seed_alone():
    order = Order(count=10, batch=4, seed=1)
    first = [order.draw(number)[0] for number in range(5)]
    again = [order.draw(number)[0] for number in reversed(range(5))][::-1]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], Order(10, 4, seed=2).draw(0)[0])


def test_the_order_is_that_of_older_versions():
    rows = np.concatenate([Order(5, 2, seed=7).draw(number)[0] for number in range(5)])
    expected = [np.random.default_rng((7, epoch)).permutation(5) for epoch in range(2)]
    np.testing.assert_array_equal(rows, np.concatenate(expected))


def test_solved_prompts_are_left_out_of_the_epochs_that_have_not_begun():
    """A loop that lists whole epochs says the same as batches that are drawn one by one."""
    rng, order = np.random.default_rng(0), Order(count=20, batch=6, seed=5)
    able = rng.random(20)  # the mean score of each prompt's four responses
    solved, drawn = np.full(20, UNSOLVED), []
    for number in range(12):
        rows, epochs = order.draw(number, solved)
        drawn += zip(rows.tolist(), epochs.tolist(), strict=True)
        scores = np.repeat(able[rows], 4) + np.tile([0.25, -0.25, 0.125, -0.125], 6)
        solved = order.without_solved(solved, {number: scores}, 0.6)
    hard, easy = set(np.flatnonzero(able < 0.6)), set(np.flatnonzero(able >= 0.6))
    epochs = [[row for row, epoch in drawn if epoch == which] for which in range(drawn[-1][1])]
    assert sorted(epochs[0]) == list(range(20)) and len(epochs) > 3 and len(hard) >= 6
    # The last batch of an epoch has rows of the next one, so that may still have all prompts.
    assert [len(epoch) for epoch in epochs[1:3]] == [len(hard) + len(easy & set(epochs[1])), len(hard)]
    assert all(set(epoch) == hard for epoch in epochs[2:])
    for number in range(12):  # with what is known at the end, every batch is what it was
        np.testing.assert_array_equal(order.draw(number, solved)[0], [row for row, _ in drawn[6 * number :][:6]])


def test_prompts_return_where_less_than_a_batch_would_remain():
    order = Order(count=4, batch=2, seed=0)
    solved = np.array([1, 1, 1, UNSOLVED])
    assert sorted(np.concatenate([order.draw(number, solved)[0] for number in (2, 3)])) == [0, 1, 2, 3]


def test_scores_that_are_no_numbers_solve_nothing():
    order = Order(count=2, batch=2, seed=0)
    rows, _ = order.draw(0)
    solved = order.without_solved(np.full(2, UNSOLVED), {0: np.array([np.nan, 1.0, 1.0, 1.0])}, 0.9)
    assert solved[rows].tolist() == [UNSOLVED, 1]
