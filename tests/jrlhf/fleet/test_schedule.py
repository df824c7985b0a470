"""The rules of an asynchronous run, against their definitions."""

import itertools

import numpy as np

from jrlhf.fleet.schedule import Rules, first_batch, fresh, may_start, may_swap


def test_admission_is_areals_inequality():
    for batch, staleness, started, version in itertools.product((1, 3, 8), (0, 1, 4), range(60), range(5)):
        submitted = started + 1  # the group to be admitted included: floor((N - 1) / B) <= i + eta
        assert may_start(Rules(batch, staleness, 1.0), started, version) == (
            (submitted - 1) // batch <= version + staleness
        )


def test_a_batch_is_the_groups_that_were_complete_first():
    assert first_batch([(3.0, 0), (1.0, 1)], Rules(3, 0, 1.0)) is None
    complete = [(3.0, 0), (1.0, 5), (2.0, 4), (2.0, 3), (2.0, 9)]
    assert first_batch(complete, Rules(3, 0, 1.0)) == (2.0, [3, 4, 5])
    rng = np.random.default_rng(0)
    for _ in range(50):
        complete = [(float(time), number) for number, time in enumerate(rng.integers(0, 9, 20))]
        batch = first_batch([complete[index] for index in rng.permutation(20)], Rules(7, 0, 1.0))
        assert batch is not None
        time, numbers = batch
        others = [item for item in complete if item[1] not in numbers]
        assert numbers == sorted(set(numbers)) and len(numbers) == 7
        assert time == max(complete[number][0] for number in numbers)
        assert max(complete[number] for number in numbers) < min(others)


def test_tokens_within_the_bound_are_fresh():
    versions = np.array([[5, 6, 7], [3, 4, 5]])
    np.testing.assert_array_equal(fresh(versions, 7, 2), [[True, True, True], [False, False, True]])
    np.testing.assert_array_equal(fresh(versions, np.array([[7], [5]]), 1), [[False, True, True], [False, True, True]])


def test_only_finish_waits_for_running_rows():
    assert not may_swap("finish", 3) and may_swap("finish", 0)
    assert all(may_swap(name, rows) for name in ("keep_cache", "prefill_again") for rows in (0, 3))
