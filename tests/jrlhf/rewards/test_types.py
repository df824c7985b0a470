"""Sums of rewards and what is logged about one."""

from collections import Counter

import numpy as np
import pytest

from jrlhf.rewards.types import Scored, weighted_sum


def test_a_weighted_sum_of_whole_scores():
    a = Scored(np.array([1.0, 2.0]), extras={"x": np.array([1.0, 2.0])}, failures=Counter(hang=1))
    b = Scored(np.array([10.0, -20.0]), failures=Counter(hang=1, nan=2))
    total = weighted_sum([(0.5, a), (0.25, b)], [3, 4])
    np.testing.assert_array_equal(total.scores, [3, -4])
    assert total.token_scores is None and total.extras == {}
    assert total.failures == {"hang": 2, "nan": 2}


def test_a_sum_with_scores_of_tokens_conserves_every_part():
    tokens = Scored(np.array([3.0, 0.0, 5.0]), token_scores=(np.array([1.0, 2.0]), np.zeros(0), np.array([5.0])))
    whole = Scored(np.array([10.0, 20.0, 30.0]))
    total = weighted_sum([(2.0, tokens), (0.5, whole)], [2, 0, 1])
    np.testing.assert_array_equal(total.scores, [11, 10, 25])
    assert total.token_scores is not None
    for found, wanted in zip(total.token_scores, [[2, 9], [], [25]], strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert tokens.token_scores is not None
    np.testing.assert_array_equal(tokens.token_scores[0], [1, 2])  # the parts are as they were


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no parts"):
        weighted_sum([], [1])
    with pytest.raises(ValueError, match="a part scored 1 samples, but there are 2"):
        weighted_sum([(1.0, Scored(np.ones(1)))], [1, 1])


def test_metrics_leave_out_what_is_not_there():
    scored = Scored(np.array([1.0, 3.0]), extras={"a": np.array([np.nan, 4.0]), "b": np.full(2, np.nan)})
    assert scored.metrics("x") == {
        "rewards/x/mean": 2,
        "rewards/x/std": 1,
        "rewards/x/a": 4,
        "rewards/x/failures": 0,
    }
    assert Scored(np.zeros(0)).metrics("x") == {"rewards/x/failures": 0}
    failed = Scored(np.zeros(2), failures=Counter(hang=2)).metrics("x")
    assert failed["rewards/x/failures"] == failed["rewards/x/failures/hang"] == 2
