"""The order of rows, and of prompts of which the solved ones are left out."""

from typing import Any

import numpy as np
import pytest

from jrlhf.data.mixture import Mixture
from jrlhf.data.order import UNSOLVED, Order
from jrlhf.data.types import Source


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


SOURCES = Source("a", 7, 3.0), Source("b", 5, 1.0), Source("c", 40, 2.5)


def owners(rows: Any) -> Any:
    """The number of each row's source."""
    return np.searchsorted(np.cumsum([source.count for source in SOURCES]), rows, side="right")


@pytest.mark.parametrize("batch", [1, 4, 13])
def test_sources_share_batches_by_weight_and_have_epochs_of_their_own(batch):
    """Independent of how batches cut it, the stream is that of one row at a time: the source that is most behind."""
    order, single = Mixture(52, batch, 3, sources=SOURCES), Mixture(52, 1, 3, sources=SOURCES)
    rows = np.concatenate([order.draw(number) for number in range(260 // batch)])
    np.testing.assert_array_equal(owners(rows), owners(np.concatenate([single.draw(n) for n in range(len(rows))])))
    counts, expected = np.zeros(3), []
    for _ in rows:  # Webster's method, a seat at a time
        expected.append(int(np.argmin((counts + 0.5) / [3.0, 1.0, 2.5])))
        counts[expected[-1]] += 1
    assert owners(rows).tolist() == expected
    for size in range(1, len(rows)):
        shares = np.bincount(owners(rows[:size]), minlength=3)
        assert np.abs(shares - size * np.array([3.0, 1.0, 2.5]) / 6.5).max() <= 1
    for which, source in enumerate(SOURCES):
        own = rows[owners(rows) == which]
        whole = own[: len(own) // source.count * source.count].reshape(-1, source.count)
        assert len(whole) >= 2 and all(sorted(epoch) == sorted(own[: source.count]) for epoch in whole)
        assert len({tuple(epoch) for epoch in whole}) == len(whole)
    earliest, *begun = order.begun(len(rows) // batch).values()
    assert earliest == min(begun) and [*order.begun(0)][1:] == [f"source/{name}/epoch" for name in "abc"]
    assert begun == [count // source.count for count, source in zip(np.bincount(owners(rows)), SOURCES, strict=True)]


def test_a_mixture_is_the_same_far_into_a_run_and_depends_on_the_seed():
    order = Mixture(52, 16, 3, sources=SOURCES)
    first = [order.draw(number) for number in (10**6, 3, 0)]
    np.testing.assert_array_equal(first, [Mixture(52, 16, 3, sources=SOURCES).draw(number) for number in (10**6, 3, 0)])
    assert not np.array_equal(first[2], Mixture(52, 16, 4, sources=SOURCES).draw(0))
    np.testing.assert_array_equal(
        np.bincount(owners(np.concatenate([order.draw(10**6 + n) for n in range(13)]))), [96, 32, 80]
    )


def test_solved_prompts_are_left_out_of_the_epochs_of_their_own_source():
    """Each has the epochs of an order of its own, of which later ones lack what was solved."""
    order, rng = Mixture(52, 8, 5, sources=SOURCES), np.random.default_rng(0)
    able, solved, drawn = rng.random(52) < 0.4, np.full(52, UNSOLVED), []
    able[:7] = [True, True, False, False, False, True, False]
    for number in range(60):
        rows = order.draw(number, solved)
        drawn.append(rows)
        last = [epochs[-1] for epochs in order.epochs_of_sources(number, solved)]
        before, solved = solved, order.without_solved(solved, {number: able[rows]}, 1.0, number)
        for row in np.flatnonzero(solved != before):
            assert able[row] and row in rows and solved[row] == last[owners(row)] + 1
    for number, rows in enumerate(drawn):
        np.testing.assert_array_equal(order.draw(number, solved), rows)
    rows = np.concatenate(drawn)
    own = rows[owners(rows) == 0]  # four of seven remain, and a batch has four of them
    assert sorted(own[:7]) == list(range(7)) and set(own[40:]) == {2, 3, 4, 6}
    assert set(np.bincount(own[-100:])) == {0, 25}
