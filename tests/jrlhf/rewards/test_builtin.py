"""The built-in rewards, against tables of what a reader would say, and through a worker."""

import sys
import types
from fractions import Fraction

import numpy as np
import pytest

from jrlhf.errors import UserError
from jrlhf.rewards import builtin
from jrlhf.rewards.builtin import exact_match, format_regex, numeric_answer, read_number, word_count
from jrlhf.rewards.functions import FunctionReward

from .conftest import make_sample


@pytest.mark.parametrize(
    ("said", "answer", "options", "score"),
    [
        ("Paris", "Paris", {}, 1),
        ("  Paris\n", "Paris ", {}, 1),
        ("paris", "Paris", {}, 0),
        ("STRASSE", "straße", {"ignore_case": True}, 1),
        ("It is: Paris!", "it is Paris", {"ignore_case": True, "ignore_punctuation": True}, 1),
        ("a\n  b", "a b", {}, 0),
        ("a\n  b", "a b", {"ignore_space": True}, 1),
        ("é", "e\N{COMBINING ACUTE ACCENT}", {}, 1),
        ("London", ["Paris", "London"], {}, 1),
        ("Rome", ("Paris", "London"), {}, 0),
        ("42", 42, {}, 1),
        ("", "", {}, 1),
        ("So <answer>B</answer>, no, <answer> C\n</answer>", "C", {"pattern": "<answer>(.*?)</answer>"}, 1),
        ("So <answer>B</answer>, no, <answer>C</answer>", "B", {"pattern": "<answer>(.*?)</answer>"}, 0),
        ("no tag", "", {"pattern": "<answer>(.*?)</answer>"}, 0),
        ("A then B", "B", {"pattern": "[A-D]"}, 1),
        ("x", None, {}, None),
    ],
)
def test_exact_match(said, answer, options, score):
    assert exact_match([said], [answer], **options) == [score]


@pytest.mark.parametrize(
    ("said", "options", "score"),
    [
        ("<think>a\nb</think>c", {"pattern": "<think>.*</think>.+"}, 1),
        ("<think>a\nb</think>", {"pattern": "<think>.*</think>.+"}, 0),
        (" <think>a</think>c", {"pattern": "<think>.*</think>.+"}, 0),
        ("say <think>a</think>c", {"pattern": "<think>.*</think>.+", "whole": False}, 1),
        ("say", {"pattern": "x", "whole": False}, 0),
    ],
)
def test_format_regex(said, options, score):
    assert format_regex([said], **options) == [score]
    assert format_regex([said], **options, right=0.5, wrong=-0.5) == [0.5 if score else -0.5]


@pytest.mark.parametrize(
    ("text", "extract", "number"),
    [
        ("It is 42.", "auto", 42),
        ("first 3, then 4", "auto", 4),
        ("1,234,567.5 dollars", "auto", 1234567.5),
        ("$1,000", "auto", 1000),
        ("\\$1,000 or so", "auto", 1000),
        ("50%", "auto", 50),
        ("50 \\%", "auto", 50),
        ("-7", "auto", -7),
        ("\N{MINUS SIGN}7", "auto", -7),
        ("$-7", "auto", -7),
        ("between 5-3", "auto", 3),
        ("1,2,3", "auto", 3),
        (".5", "auto", 0.5),
        ("+.5e2", "auto", 50),
        ("3e-2", "auto", 0.03),
        ("1/4", "auto", 0.25),
        ("x = -\\frac{3}{4}", "auto", -0.75),
        ("\\dfrac{1}{2}", "auto", 0.5),
        ("1/0", "auto", None),
        ("reaction H2O", "auto", None),
        ("none", "auto", None),
        ("", "auto", None),
        ("1e999999999", "auto", None),
        ("1e-999999999", "auto", None),
        ("9" * 5000, "auto", None),
        ("work 1 + 1\n#### 2", "auto", 2),
        ("#### 2\nreally 3", "auto", 2),
        ("#### 2 #### 3", "auto", 3),
        ("####", "auto", None),
        ("so \\boxed{12} of 13", "auto", 12),
        ("so \\boxed{1} or \\boxed{\\text{about {x}} 2} #### 5", "auto", 2),
        ("so \\boxed{12", "auto", 12),
        ("12", "boxed", None),
        ("\\boxed{12", "boxed", None),
        ("\\boxed{1{,}000}", "boxed", 1000),
        ("12", "hash", None),
        ("#### 1 \\boxed{2} 3", "hash", 1),
        ("#### 1 \\boxed{2} 3", "last", 3),
    ],
)
def test_reading_a_number(text, extract, number):
    found = read_number(text, extract)
    assert (None if found is None else float(found)) == number


def test_numeric_answers_are_compared_exactly_within_the_tolerance():
    said = ["#### 0.3333333", "#### 0.33333", "12345678901", "12345678901", "it is 7", "it is 7", "no", "7"]
    truth = ["1/3", "1/3", 12345678902, 12345678901.0, "2 + 5 = 7\n#### 7", 8, 7, "unknown"]
    assert numeric_answer(said, truth) == [1, 0, 0, 1, 1, 0, 0, None]
    assert numeric_answer(said[:3], truth[:3], tolerance=1) == [1, 1, 1]
    assert numeric_answer(["0.1"], ["1/10"], tolerance=0) == [1]
    assert read_number("0.1", "auto") == Fraction(1, 10)
    with pytest.raises(ValueError, match="extract='first'"):
        numeric_answer(["1"], ["1"], extract="first")


def test_conversations_are_judged_by_what_was_said():
    said = [[{"role": "assistant", "content": "It is 42"}]]
    assert numeric_answer(said, ["42"]) == [1]
    assert format_regex(said, pattern="It is \\d+") == [1]
    assert exact_match(said, ["It is 42"]) == [1]


def test_in_a_worker_with_the_answers_of_verls_rows():
    rows = [make_sample(0, "#### 4", reward_model={"ground_truth": "4"}), make_sample(1, "5", ground_truth="x")]
    with FunctionReward("gsm8k", "numeric_answer", columns={"answer": "ground_truth"}, on_failure=-1.0) as reward:
        scored = reward.score(rows)
    np.testing.assert_array_equal(scored.scores, [1, -1])
    assert scored.failures == {"none": 1}
    options = {"pattern": "[0-9]+", "right": 2}
    with FunctionReward("form", "format_regex", options=options) as reward:
        np.testing.assert_array_equal(reward.score([make_sample(0, "12"), make_sample(1, "x")]).scores, [2, 0])
    with pytest.raises(UserError, match="parameters completions, pattern, whole, right, wrong"):
        FunctionReward("form", "format_regex", options={"regex": "x"}).__enter__()


def test_a_pattern_that_backtracks_without_end_is_a_hang():
    options = {"pattern": "(a*)*b"}
    with FunctionReward("form", "format_regex", options=options, deadline=0.5, on_failure=0.0) as reward:
        assert reward.score([make_sample(0, "a" * 60)]).failures == {"hang": 1}


def test_every_name_is_a_function():
    assert all(callable(getattr(builtin, name)) for name in builtin.NAMES)


def test_math_verify_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("jrlhf.rewards.functions.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"math_verify needs its extra, pip install 'jrlhf\[math\]'"):
        FunctionReward("math", "math_verify")


def test_math_verify_asks_its_package(monkeypatch):
    """The calls, by a stand-in: what the package itself says is tested below, where it is installed."""

    def parse(text):
        asked.append(text)
        return [text.strip("$")] if any(c.isdigit() for c in text) else []

    asked = []
    module = types.SimpleNamespace(parse=parse, verify=lambda gold, said: gold == said)
    monkeypatch.setitem(sys.modules, "math_verify", module)
    said, truth = ["12", "12", "x1", "none", "3"], [12, "$13$", "\\boxed{x1}", "4", "?"]
    assert builtin.math_verify(said, truth) == [1, 0, 0, 0, None]
    assert asked == ["$12$", "12", "$13$", "12", "\\boxed{x1}", "x1", "$4$", "none", "$?$"]


def test_math_verify_itself():
    pytest.importorskip("math_verify", reason="the math extra is not installed: pip install 'jrlhf[math]'")
    said = [
        "so $\\boxed{\\frac{2}{4}}$",
        "so $x = 3$",
        "The answer is 7",
        "nothing",
        "$\\{2, 1\\}$",
        "$\\sqrt{2}$",
        "3",
    ]
    truth = ["\\frac{1}{2}", "4", 7, "5", "\\{1, 2\\}", "it is $2^{1/2}$", ""]
    assert builtin.math_verify(said, truth) == [1, 0, 1, 0, 1, 1, None]


def test_word_count():
    said = ["Return the  sum.\n", "", [{"role": "assistant", "content": "one two"}]]
    assert word_count(said) == [3.0, 0.0, 2.0]
