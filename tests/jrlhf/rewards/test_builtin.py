"""The built-in rewards, against tables of what a reader would say, and through a worker."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from jrlhf.config.schema import RewardConfig
from jrlhf.errors import UserError
from jrlhf.rewards import builtin
from jrlhf.rewards.builtin import exact_match, format_regex, numeric_answer, read_number, word_count
from jrlhf.rewards.facts import Facts

from .conftest import make_reward, make_sample

TAG = {"pattern": "<answer>(.*?)</answer>"}
MATCHES = [  # response, answer, options, score
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
    ("So <answer>B</answer>, no, <answer> C\n</answer>", "C", TAG, 1),
    ("So <answer>B</answer>, no, <answer>C</answer>", "B", TAG, 0),
    ("no tag", "", TAG, 0),
    ("A then B", "B", {"pattern": "[A-D]"}, 1),
    ("x", None, {}, None),
]
THINK = {"pattern": "<think>.*</think>.+"}
FORMS = [  # response, options, score
    ("<think>a\nb</think>c", THINK, 1),
    ("<think>a\nb</think>", THINK, 0),
    (" <think>a</think>c", THINK, 0),
    ("say <think>a</think>c", THINK | {"whole": False}, 1),
    ("say", {"pattern": "x", "whole": False}, 0),
]
NUMBERS = {  # extract -> text -> number
    "auto": {
        "It is 42.": 42,
        "first 3, then 4": 4,
        "1,234,567.5 dollars": 1234567.5,
        "$1,000": 1000,
        "\\$1,000 or so": 1000,
        "50%": 50,
        "50 \\%": 50,
        "-7": -7,
        "\N{MINUS SIGN}7": -7,
        "$-7": -7,
        "between 5-3": None,
        "1,2,3": None,
        ".5": 0.5,
        "+.5e2": 50,
        "3e-2": 0.03,
        "1/4": 0.25,
        "x = -\\frac{3}{4}": -0.75,
        "\\dfrac{1}{2}": 0.5,
        **dict.fromkeys(["1/0", "reaction H2O", "none", "", "1e999999999", "1e-999999999", "9" * 5000, "####"]),
        "work 1 + 1\n#### 2": 2,
        "#### 2\nreally 3": 2,
        "#### 2 #### 3": 3,
        "so \\boxed{12} of 13": 12,
        "so \\boxed{1} or \\boxed{\\text{about {x}} 2} #### 5": 2,
        "so \\boxed{12": 12,
        # No part of an expression is the number of a text.
        **dict.fromkeys(
            ["2^{10}", "10 - 3", "work 1 + 1", "x^2", "the point (1,2)", "so 5\\pi", "\\sqrt{2}", "2\\sqrt3"]
        ),
        **dict.fromkeys(
            ["12/25/2020", "3:45", "COVID-19", "costs 5k", "5*3", "5 million people", "v1.2.3", "\\frac{x}{2}"]
        ),
        "2^10 = 1024": 1024,
        "5 + 3 = 8.": 8,
        "x_1 = 5 and x_2": 5,
        "**42**": 42,
        "*42* is \\(right\\)": 42,
        "<answer>42</answer>": 42,
        "(42)": 42,
        "10km.": 10,
        "the 3rd": 3,
        "- 3 apples": 3,
        "1 000 people": 1000,
        "10 20 300": 300,
        "1\\,000": 1000,
        "2 3/4 cups": 2.75,
        "1.5 \\times 10^{3} m": 1500,
        "He ran 5 times.": 5,
    },
    "boxed": {"12": None, "\\boxed{12": None, "\\boxed{1{,}000}": 1000},
    "hash": {
        "12": None,
        "#### 1 \\boxed{2} 3": None,
        "#### **$1,234.50**\nso 3": 1234.5,
        "####\n18 dollars per day.": 18,
        "#### about 18": None,
    },
    "last": {"#### 1 \\boxed{2} 3": 3},
}
BOXED = {  # content of a box -> its number; None: it is wrong, whatever the answer
    **dict.fromkeys(
        ["2^{10}", "(1,2)", "x^2+1", "5\\pi", "5 pi", "\\sqrt{2}", "\\sqrt2", "x=5", "5x", "2 xy", "5!", "1,2"]
    ),
    **dict.fromkeys(
        ["5 million", "5\\text{ million}", "2 dozen", "5 or 6", "5 + 3", "12,34", "\\frac{1}{2}\\pi", "", "-"]
    ),
    **dict.fromkeys(
        ["\\frac123", "\\frac{1}{2}3", "1\\frac{3}{2}", "\\frac{\\pi}{2}", "\\frac{1}{0}", "5 half", "\\{1\\}"]
    ),
    "1\\frac{1}{2}": Fraction(3, 2),
    "-2\\tfrac13": Fraction(-7, 3),
    "\\frac12": Fraction(1, 2),
    "\\dfrac{-1}{2}": Fraction(-1, 2),
    "-\\frac{ 3 }{4}": Fraction(-3, 4),
    "10^{-3}": Fraction(1, 1000),
    "1.5\\times 10^{3}": 1500,
    "-2 \\cdot 10^2": -200,
    "1.5 x 10^3": 1500,
    "7.5e-2": Fraction(3, 40),
    "1\\,000": 1000,
    "1 000": 1000,
    "1{,}000\\ 000": None,
    "1,000.5": Fraction(2001, 2),
    "50\\%": 50,
    "\\$5": 5,
    "5\\text{ cm}^2": 5,
    "3\\text{ m/s}": 3,
    "\\text{about {x}} 2": 2,
    "\\text{42 apples}": 42,
    "\\mathbf{42}": 42,
    "10km/h": 10,
    "10 km": 10,
    "5cm^2": 5,
    "90^\\circ": 90,
    "90^{\\circ}\\text{C}": 90,
    "5 apples": 5,
    "5/hour": 5,
    "1.": 1,
}


def test_answers_and_forms():
    for response, answer, options, score in MATCHES:
        assert exact_match([response], [answer], **options) == [score], (response, answer)
    for response, options, score in FORMS:
        assert format_regex([response], **options) == [score], response
        assert format_regex([response], **options, right=0.5, wrong=-0.5) == [0.5 if score else -0.5]


def test_numbers_are_read_and_compared_exactly_within_the_tolerance():
    for extract, table in NUMBERS.items():
        for text, number in table.items():
            result = read_number(text, extract)
            assert (None if result is None else float(result)) == number, (text, extract)
    for content, number in BOXED.items():
        assert read_number(f"so \\boxed{{{content}}}", "auto") == number, content
    texts = ["#### 0.3333333", "#### 0.33333", "12345678901", "12345678901", "it is 7", "it is 7", "no", "7"]
    truth = ["1/3", "1/3", 12345678902, 12345678901.0, "2 + 5 = 7\n#### 7", 8, 7, "unknown"]
    assert numeric_answer(texts, truth) == [1, 0, 0, 1, 1, 0, 0, None]
    assert numeric_answer(texts[:3], truth[:3], tolerance=1) == [1, 1, 1]
    assert numeric_answer(["0.1"], ["1/10"], tolerance=0) == [1]
    assert read_number("0.1", "auto") == Fraction(1, 10)
    with pytest.raises(UserError, match="options.extract='first': it must be auto"):
        numeric_answer(["1"], ["1"], extract="first")
    for call in (format_regex, partial(exact_match, answer=["1"])):
        with pytest.raises(UserError, match=r"options.pattern='\(' is no regular expression \(missing \)"):
            call(["1"], pattern="(")


def test_conversations_are_judged_by_their_contents():
    talk = [[{"role": "assistant", "content": "It is 42"}]]
    assert numeric_answer(talk, ["42"]) == format_regex(talk, pattern="It is \\d+") == [1]
    assert exact_match(talk, ["It is 42"]) == [1]
    assert word_count(["Return the  sum.\n", "", *talk]) == [3.0, 0.0, 3.0]


def test_in_a_worker_with_the_answers_of_verls_rows():
    rows = [make_sample(0, "#### 4", reward_model={"ground_truth": "4"}), make_sample(1, "5", ground_truth="x")]
    with make_reward("numeric_answer", "gsm8k", columns={"answer": "ground_truth"}, on_failure=-1.0) as reward:
        scored = reward.score(rows)
    np.testing.assert_array_equal(scored.scores, [1, -1])
    assert scored.failures == {"none": 1}
    # A dataset may have columns with the names of options.
    rows = [make_sample(0, "4", answer="4", wrong="5", whole="x"), make_sample(1, "5", answer="4", wrong="5")]
    with make_reward("numeric_answer", options={"right": 2}) as reward:
        assert reward.score(rows).scores.tolist() == [2, 0]
    # A pattern that backtracks without end is a hang.
    options = {"pattern": "(a*)*b"}
    with make_reward("format_regex", "form", options=options, deadline=0.5, on_failure=0.0) as reward:
        assert reward.score([make_sample(0, "b")]).scores == [1]
        assert reward.score([make_sample(0, "a" * 60)]).failures == {"hang": 1}
    assert all(callable(getattr(builtin, name)) for name in builtin.NAMES)


def test_only_a_builtin_function_that_scores_otherwise_gets_another_identity_in_checkpoints():
    """Neither another place of its file nor another text there changes these digests, which checkpoints hold."""
    digests = {}
    for name in builtin.NAMES:
        config, spec = RewardConfig(name="correct", function=name), f"jrlhf.rewards.builtin:{name}"
        facts = Facts(config, "reward", spec, "trl", False, (), False, (), (), None, "hash of the file", {})
        digests[name] = facts.fingerprint
    assert digests == {
        "exact_match": "e6d47eb73612053f",
        "format_regex": "715d00c532410a1d",
        "numeric_answer": "40f8c516dafd0146",
        "math_verify": "3808ee0ffa431b5c",
        "word_count": "4a0b768aa89db1fc",
    }


def test_math_verify(monkeypatch):
    pytest.importorskip("math_verify", reason="the math extra is not installed: pip install 'jrlhf[math]'")
    answers = [
        "so $\\boxed{\\frac{2}{4}}$",
        "so $x = 3$",
        "The answer is 7",
        "nothing",
        "$\\{2, 1\\}$",
        "$\\sqrt{2}$",
        "3",
    ]
    truth = ["\\frac{1}{2}", "4", 7, "5", "\\{1, 2\\}", "it is $2^{1/2}$", ""]
    assert builtin.math_verify(answers, truth) == [1, 0, 1, 0, 1, 1, None]
    monkeypatch.setattr("jrlhf.rewards.builtin.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"math_verify needs its extra, pip install 'jrlhf\[math\]'"):
        make_reward("math_verify", "math")
