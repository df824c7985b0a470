"""Validation's statistics, by hand."""

import numpy as np

from jrlhf.roles.sampling import Response
from jrlhf.stages.evaluate import Graded, compare
from jrlhf.stages.validation import statistics


def graded(scores: list[float], helper: list[float], sources: list[str], failures: dict[str, int] | None = None):
    responses = tuple(Response((1,), f"text {score}", True) for score in scores)
    items = {"helper": np.array(helper)}
    return Graded("score", responses, tuple(sources), np.array(scores), items, None, failures or {})


def test_mean_and_best_of_k_answers_are_taken_over_each_prompts_own_answers():
    sources = ["a", "b", "a"]
    first = graded([1.0, 0.0, 5.0], [0.5, 0.5, 0.0], sources)
    second = graded([3.0, 0.0, 1.0], [1.5, np.nan, 0.0], sources, {"helper": 1})
    found = statistics([first, second])
    assert found == {
        "val-core/all/score/mean@2": 10 / 6,
        "val-core/all/score/best@2/mean": (3 + 0 + 5) / 3,
        "val-core/a/score/mean@2": 10 / 4,
        "val-core/a/score/best@2/mean": (3 + 5) / 2,
        "val-core/b/score/mean@2": 0.0,
        "val-core/b/score/best@2/mean": 0.0,
        "val-aux/all/helper/mean@2": 2.5 / 5,
        "val-aux/a/helper/mean@2": 2.0 / 4,
        "val-aux/b/helper/mean@2": 0.5,
        "val-aux/all/helper/failures": 1.0,
    }


def test_one_source_is_not_named_beside_all():
    found = statistics([graded([1.0, 2.0], [0.0, 0.0], ["", ""])])
    assert set(found) == {"val-core/all/score/mean@1", "val-core/all/score/best@1/mean", "val-aux/all/helper/mean@1"}


def test_two_policies_are_compared_prompt_by_prompt():
    before = graded([0.0, 1.0, 2.0], [0.0, 0.0, 0.0], ["x", "y", "x"])
    after = graded([1.0, 1.0, 4.0], [1.0, 1.0, 1.0], ["x", "y", "x"], {"helper": 2})
    found = compare(before, after)
    assert (found["measure"], found["n"], found["difference"]) == ("score", 3, 1.0)
    np.testing.assert_allclose(found["standard_error"], 1 / np.sqrt(3))
    np.testing.assert_allclose(found["standard_errors"], np.sqrt(3))
    assert found["before"]["sources"] == {"x": {"mean": 1.0, "n": 2}, "y": {"mean": 1.0, "n": 1}}
    assert found["after"]["failures"] == {"helper": 2} and "failures" not in found["before"]
    assert found["before"]["distinct"] == 3 and found["after"]["distinct"] == 2
