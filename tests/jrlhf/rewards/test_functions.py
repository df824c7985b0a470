"""Reward functions: how they are called, what they may return, and what their columns and options must be."""

import json
import math
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jrlhf.data.types import Example, Response
from jrlhf.errors import RewardFailure, UserError
from jrlhf.rewards.text_model import TextReward
from jrlhf.rewards.types import Sample, joined, weighted_sum
from tests.jrlhf.data.conftest import FAMILY

from .conftest import make_reward, make_sample, pids


def test_trl_functions_score_rows_in_order_whatever_the_number_of_workers(start):
    source = """
    def f(prompts, completions, completion_ids, answer, weight=10, **columns):
        assert sorted(columns) == ["data_source", "log_extra", "log_metric", "trainer_state"], columns
        assert columns["data_source"] == ["here"] * len(prompts)
        return [
            ids[0] + len(ids) / weight + (completion == "response " + prompt.split()[1]) * float(a)
            for prompt, completion, ids, a in zip(prompts, completions, completion_ids, answer, strict=True)
        ]
    """
    samples = [make_sample(row, tokens=row + 1, answer=str(row / 8)) for row in range(7)]
    for workers in (1, 3):
        reward = start(source, workers=workers)
        scored = reward.score(samples)
        np.testing.assert_array_equal(scored.scores, [10 * row + (row + 1) / 10 + row / 8 for row in range(7)])
        assert scored.scores.dtype == np.float64 and scored.token_scores is None
        assert scored.extras == {} and not scored.failures
        assert len(set(pids(reward))) == workers
        assert reward.score([]).scores.shape == (0,)
    source = "def f(completions, **own): return [{'data_source', 'extra_info', 'ground_truth'} <= {*own}]"
    of_verl = {"reward_model": {"ground_truth": 0}, "extra_info": None}
    assert start(source).score([make_sample(**of_verl)]).scores == [1]
    # Conversations are lists of messages.
    source = """
    def f(prompts, completions):
        assert type(prompts[0]) is list and type(completions[0]) is list and type(completions[0][0]) is dict
        return [len(p) + len(c[0]["content"]) for p, c in zip(prompts, completions)]
    """
    talk = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    sample = Sample(Example(prompt=talk), "", Response((1, 2, 3), "abc", True))
    assert start(source).score([sample]).scores == [5]


RANKS = """
import itertools, os
def f(prompts, completions, log_extra):
    log_extra("process", [os.getpid()] * len(prompts))
    scores = []
    for _, rows in itertools.groupby(zip(prompts, completions), key=lambda row: row[0]):
        texts = [text for _, text in rows]
        scores += [sum(other < text for other in texts) for text in texts]
    return scores
"""


def test_a_call_has_all_responses_to_a_prompt(start):
    """So a function that ranks them gives the same scores, however many workers there are, and tile by tile."""
    order = np.random.default_rng(0).permutation(12)
    prompts = [make_sample(group) for group in range(3) for _ in range(4)]
    samples = [
        replace(sample, response=Response((1, 2), f"{place:02}", True))
        for sample, place in zip(prompts, order, strict=True)
    ]
    groups = order.reshape(3, 4)
    expected = (groups[:, None, :] < groups[:, :, None]).sum(axis=2).ravel()
    for workers, processes in ((1, 1), (2, 2), (5, 3)):
        reward = start(RANKS, workers=workers)
        scored = reward.score(samples)
        np.testing.assert_array_equal(scored.scores, expected)
        assert len(set(scored.extras["process"])) == processes  # of three prompts
        for rows in (slice(0, 8), slice(8, 12), slice(4, 8)):  # tiles, and a group that was drawn ahead
            np.testing.assert_array_equal(reward.score(samples[rows], first=rows.start).scores, expected[rows])
    # A function that gets single responses is called by all workers.
    source = "import os\ndef f(solution_str): return {'score': float(solution_str), 'process': os.getpid()}"
    scored = start(source, workers=2).score(samples[:4])
    np.testing.assert_array_equal(scored.scores, order[:4])
    assert len(set(scored.extras["process"])) == 2


def test_calls_of_two_threads_run_on_two_workers(start, tmp_path):
    source = f"""
    import pathlib, time
    def f(prompts, completions):
        folder = pathlib.Path({str(tmp_path)!r})
        (folder / prompts[0]).touch()
        while len(list(folder.glob("prompt*"))) < 2:  # until the other one is called
            time.sleep(0.01)
        return [len(prompts)] * len(prompts)
    """
    reward = start(source, workers=2)
    groups = [[make_sample(group)] * 3 for group in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        scores = [scored.scores.tolist() for scored in threads.map(reward.score, groups)]
    assert scores == [[3, 3, 3]] * 2


MARKED = [Response((1, 2), "so 4", True, "<think>so</think> 4"), Response((3,), "4", True)]
ASKED = "2?", ({"role": "user", "content": "2?"},)
MARKED_SAMPLES = [Sample(Example(prompt), "", response) for prompt in ASKED for response in MARKED]


def test_special_tokens_reach_a_function_that_asks_for_them(start):
    trl = "def f(completions): return [len(c if type(c) is str else c[0]['content']) for c in completions]"
    verl = "def f(solution_str): return len(solution_str)"
    for source in (trl, verl):
        plain, own = start(source), start(source, special_tokens=True, kind="cost", workers=2)
        assert plain.score(MARKED_SAMPLES).scores.tolist() == [4, 1] * 2
        assert own.score(MARKED_SAMPLES).scores.tolist() == [19, 1] * 2


def test_special_tokens_reach_a_model_that_asks_for_them():
    model = object.__new__(TextReward)
    vars(model).update(_tokenizer=FAMILY["qwen"], _key="rewards[0].model", _cut=False, _most=99)
    texts = []
    for special in (False, True):
        model._special = special
        texts.append([FAMILY["qwen"].decode(model._encode(sample), special=True) for sample in MARKED_SAMPLES])
    before = "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"
    for row, (without, with_marks) in enumerate(zip(*texts, strict=True)):
        response = MARKED[row % 2]
        assert without.partition(before)[2].startswith(f"{response.text}<|im_end|>")
        assert with_marks.partition(before)[2].startswith(f"{response.marked or response.text}<|im_end|>")


@pytest.mark.parametrize("arguments", ["completions, trainer_state", "completions, **rest"])
@pytest.mark.parametrize("in_process", [False, True])
def test_a_function_knows_how_far_the_run_is(arguments, in_process, start, tmp_path):
    """It gets TRL's `trainer_state`, which no column of this name replaces."""
    source = f"""
    def f({arguments}):
        state = {arguments.split()[-1].strip("*")}
        state = state["trainer_state"] if isinstance(state, dict) else state
        return [state.global_step + state.max_steps / 1000 + state.epoch / 1_000_000 for _ in completions]
    """
    reward = start(source, in_process=in_process, steps=40, epochs=0.25)
    samples = [make_sample(row, trainer_state="a column") for row in range(3)]
    np.testing.assert_allclose(reward.score(samples, 6).scores, [6.0400015] * 3, rtol=1e-12)
    np.testing.assert_allclose(reward.score(samples).scores, [0.04] * 3, rtol=1e-12)


def test_a_function_is_the_same_wherever_its_file_is(tmp_path):
    """So a run resumes in another directory or on another machine."""
    words = []
    for folder, body in (("here", "[1.0]"), ("there", "[1.0]"), ("else", "[2.0]")):
        path = tmp_path / folder / "rewards.py"
        path.parent.mkdir()
        path.write_text(f"def f(completions): return {body} * len(completions)\n")
        with make_reward(f"{path}:f") as reward:
            words.append(reward.facts.identity["reward judge"])
    here, there, other = words
    assert here == there != other


def test_verl_functions_get_a_sample_at_a_time_and_both_kinds_report_extras(start):
    source = """
    def f(data_source, solution_str, ground_truth, extra_info=None, factor=1):
        right = solution_str.endswith(ground_truth)
        if extra_info.get("plain"):
            return right * factor
        return {"score": factor * right, "acc": right, "length": len(solution_str), "pred": "text",
                "infinite": float("inf"), data_source: 1.0}
    """
    rows = [
        make_sample(0, reward_model={"style": "rule", "ground_truth": "0"}, extra_info={"split": "test"}),
        make_sample(1, reward_model={"style": "rule", "ground_truth": "2"}, extra_info=None),
        make_sample(2, reward_model={"style": "rule", "ground_truth": "2"}, extra_info={"plain": True}),
        make_sample(3, ground_truth="3"),
    ]
    scored = start(source, options={"factor": 2}, workers=2).score(rows)
    np.testing.assert_array_equal(scored.scores, [2, 0, 2, 2])
    np.testing.assert_array_equal(scored.extras["acc"], [1, 0, np.nan, 1])
    means = {"mean": 1.5, "std": math.sqrt(0.75), "acc": 2 / 3, "length": 10, "here": 1, "failures": 0}
    assert scored.metrics("judge") == pytest.approx({f"rewards/judge/{key}": x for key, x in means.items()})
    # TRL's logging hooks become extras, too.
    source = """
    def f(completions, log_extra, log_metric):
        log_extra("words", (len(c.split()) for c in completions))
        log_extra("text", completions)
        log_metric("batch", len(completions))
        return [0.5] * len(completions)
    """
    scored = start(source).score([make_sample(0, "a b"), make_sample(1, "a"), make_sample(2, "")])
    assert {name: list(x) for name, x in scored.extras.items()} == {"words": [2, 1, 0], "batch": [3, 3, 3]}


def test_coroutines_of_both_kinds_and_verl_ones_run_together(start):
    trl = """
    import asyncio
    async def one(text):
        await asyncio.sleep(0.01)
        return len(text)
    async def f(completions, **columns):
        return await asyncio.gather(*map(one, completions))
    """
    np.testing.assert_array_equal(start(trl).score([make_sample(0), make_sample(10)]).scores, [10, 11])
    verl = """
    import asyncio
    waiting = set()
    async def f(solution_str, ground_truth):
        waiting.add(ground_truth)
        while len(waiting) < 20:  # ends only if all of them are under way together
            await asyncio.sleep(0.001)
        if ground_truth == 3:
            raise ValueError("no three")
        if ground_truth == 4:
            await asyncio.sleep(1000)
        if ground_truth == 5:
            raise SystemExit
        return ground_truth
    """
    reward = start(verl, deadline=1.0, on_failure=-1.0)
    rows = [make_sample(row, ground_truth=row) for row in range(20)]
    scored = reward.score(rows)
    np.testing.assert_array_equal(scored.scores, [0, 1, 2, -1, -1, -1, *range(6, 20)])
    assert scored.failures == {"exception": 2, "hang": 1}
    np.testing.assert_array_equal(reward.score(rows[:3]).scores, [0, 1, 2])


def test_scores_of_tokens(start):
    source = """
    import numpy as np
    def f(completion_ids, completions, how):
        table = {
            "list": lambda ids: [0.25] * len(ids),
            "array": lambda ids: np.arange(len(ids), dtype=np.float32),
            "whole": lambda ids: 0.5,
            "short": lambda ids: [1.0],
            "hole": lambda ids: [1.0, None, 1.0],
            "nan": lambda ids: [1.0, float("nan"), 1.0],
            "empty": lambda ids: [],
        }
        return [table[h](ids) for h, ids in zip(how, completion_ids)]
    """
    kinds = ["list", "array", "whole", "short", "hole", "nan"]
    samples = [make_sample(row, how=kind) for row, kind in enumerate(kinds)]
    samples += [make_sample(6, tokens=0, how="empty"), make_sample(7, tokens=0, how="whole")]
    scored = start(source, on_failure=-2.0).score(samples)
    expected = [[0.25] * 3, [0, 1, 2], [0, 0, 0.5], [0, 0, -2], [0, 0, -2], [0, 0, -2], [], []]
    assert scored.token_scores is not None and [list(row) for row in scored.token_scores] == expected
    np.testing.assert_array_equal(scored.scores, [0.75, 3, 0.5, -2, -2, -2, 0, 0.5])
    assert scored.failures == {"length": 1, "none": 1, "nan": 1}


VALUES = """
import numpy as np
from fractions import Fraction
class Bad:
    def __repr__(self):
        raise RuntimeError
GOOD = {
    "int": (3, 3), "true": (True, 1), "float32": (np.float32(0.1), float(np.float32(0.1))), "int64": (np.int64(7), 7),
    "bool_": (np.bool_(True), 1), "array0": (np.array(2.5), 2.5), "tiny": (5e-324, 5e-324), "third": (1 / 3, 1 / 3),
    "dict": ({"score": np.float32(2), "x": "y"}, 2),
}
BAD = {
    "none": [None, {"score": None}], "nan": [float("nan"), np.float32("nan")],
    "infinite": [float("inf"), -np.inf, 10**400, -(10**5000)], "length": [(1.0, 2.0)],
    "type": ["1.0", b"1", 1j, Bad(), lambda: 1, {1.0}, {"reward": 1.0}, Fraction(1, 2), np.zeros((3, 2)),
             (x for x in [1.0, 1.0, 1.0])],
}
FLAT = {f"{kind} {n}": x for kind, values in BAD.items() for n, x in enumerate(values)}
def f(completions, key):
    return [{**FLAT, **{k: v for k, (v, _) in GOOD.items()}}[k] for k in key]
"""


def test_every_value_is_a_number_or_a_counted_failure(start):
    table: dict = {}
    exec(VALUES, table)
    reward = start(VALUES, on_failure=-7.0)
    good = reward.score([make_sample(key=key) for key in table["GOOD"]])
    np.testing.assert_array_equal(good.scores, [value for _, value in table["GOOD"].values()])
    assert not good.failures
    for key in table["FLAT"]:
        scored = reward.score([make_sample(0, key="int"), make_sample(1, key=key), make_sample(2, key="true")])
        assert (scored.failures, list(scored.scores)) == ({key.split()[0]: 1}, [3, -7, 1]), key


def test_none_for_a_sample_means_that_it_is_not_judged_where_the_config_says_so(start):
    trl = "def f(completions, value): return value"
    verl = "def f(solution_str, value): return value"
    for source, skipping in ((trl, [None, {"score": None, "x": 1}]), (verl, [None, {"score": None, "x": 1}])):
        samples = [make_sample(row, value=value) for row, value in enumerate([0.5, *skipping, [1, 2, 3]])]
        scored = start(source, skip_none=True).score(samples)
        np.testing.assert_array_equal(scored.scores, [0.5, np.nan, np.nan, 6])
        assert scored.token_scores is not None and [sum(row) for row in scored.token_scores] == [0.5, 0, 0, 6]
        assert not scored.failures and scored.extras["x"][2] == 1
        hint = r"\(none: returned None\) .*: mend the function, set skip_none=true or abstain=true of reward"
        with pytest.raises(RewardFailure, match=hint):
            start(source).score(samples)
        with pytest.raises(RewardFailure, match=r"none: returned None.*: mend the function, or set on_failure"):
            start(source, skip_none=True).score([make_sample(value=[1.0, None, 1.0])])  # of a token
    with pytest.raises(RewardFailure, match=r"has it a return\?"):
        start("def f(completions): ...", skip_none=True).score(samples)


def test_rows_of_which_a_function_knows_nothing_count_nowhere_and_are_counted(start):
    """Thirty samples, of which some fail in a way that has a name, and some are abstained from."""
    verl = "def f(solution_str, value): return 1 / 0 if value == 'raise' else float(value) if value else value"
    values = [None, "raise", "nan", "inf", "1e300", "x"] * 5
    samples = [make_sample(row, value=value) for row, value in enumerate(values)]
    scored = start(verl, abstain=True, on_failure="exclude").score([*samples, make_sample(30, value=2.5)])
    np.testing.assert_array_equal(scored.scores, [np.inf] * 30 + [2.5])
    assert scored.failures == {"exception": 10, "nan": 5, "infinite": 10} and scored.abstained == 5
    metrics = scored.metrics("judge")
    named = sum(count for name, count in metrics.items() if "failures/" in name or name.endswith("abstained"))
    assert (metrics["rewards/judge/mean"], metrics["rewards/judge/abstained"], named) == (2.5, 5, 30)
    assert "rewards/judge/skipped" not in metrics
    halves = [scored, start(verl, abstain=True).score([make_sample(value=None), make_sample(value=1.0)])]
    assert joined(halves, [3] * 33).abstained == 6
    np.testing.assert_array_equal(np.isfinite(weighted_sum([(-2.0, scored)], [3] * 31).scores), [False] * 30 + [True])
    np.testing.assert_array_equal(scored.only_measured.addends, [0] * 30 + [2.5])


def test_what_a_batch_may_return(start):
    returned = {
        "none": ["None"],
        "type": ["'3.0'", "{'score': 1.0}", "{1.0, 2.0, 3.0}", "1.0"],
        "length": ["[1.0, 2.0]", "[]", "itertools.count()", "np.zeros((2, 2, 2))"],
        "exception": ["(1 / (2 - row) for row in range(3))"],
        None: ["(float(row) for row in range(3))", "np.arange(3, dtype=np.float32)", "(0, 1, 2)"],
    }
    source = "import itertools, numpy as np\ndef f(completions, code):\n    return eval(code[0])\n"
    reward = start(source, on_failure=-7.0)
    for kind, codes in returned.items():
        for code in codes:
            scored = reward.score([make_sample(row, code=code) for row in range(3)])
            np.testing.assert_array_equal(scored.scores, [0, 1, 2] if kind is None else [-7] * 3)
            assert scored.failures == ({} if kind is None else {kind: 3}), code
            assert bool(scored.last_failure) == (kind is not None), code


def test_what_a_function_raises_is_an_exception_of_its_own_samples(start):
    source = """
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError
    def f(solution_str):
        if solution_str != "good":
            raise eval(solution_str)
        return 1.0
    """
    reward = start(source, on_failure=0.25)
    processes = pids(reward)
    raised = ["ValueError('no \\n way')", "SystemExit(3)", "KeyboardInterrupt", "Odd()"]
    scored = reward.score([make_sample(row, text) for row, text in enumerate(["good", *raised, "good"])])
    np.testing.assert_array_equal(scored.scores, [1, *[0.25] * 4, 1])
    assert scored.failures == {"exception": 4}
    assert pids(reward) == processes


def test_without_a_replacement_a_failure_stops_with_the_sample(start, tmp_path):
    reward = start("def f(completions, answer):\n    return [1.0 if a == 'right' else None for a in answer]\n")
    long = "\x1b[31mred\n" + "x" * 5000
    samples = [make_sample(0, answer="right"), make_sample(1, long, answer="wrong"), make_sample(2, answer="wrong")]
    with pytest.raises(RewardFailure) as caught:
        reward.score(samples)
    text = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert "'judge' failed (none: returned None) on the sample prompt='<user>prompt 1', response='\\x1b[31mred" in text
    assert "answer='wrong'" in text and "set on_failure" in text
    assert text.endswith(f"resume the run; what it printed is in {tmp_path / 'log'}")
    assert "\n" not in text and "\x1b" not in text and len(text) < 1500
    np.testing.assert_array_equal(reward.score(samples[:1]).scores, [1])  # and it still works
    chat = Example(prompt=({"role": "user", "content": "2?"},), source="here", columns={"answer": "wrong"})
    passed = re.escape("completion=[{'role': 'assistant', 'content': 'response 3'}]")
    with pytest.raises(RewardFailure, match=passed):  # a conversation is shown as the function gets it
        reward.score([replace(make_sample(3), example=chat)])
    assert "returned None" in (tmp_path / "log").read_text()


def test_a_failed_call_names_its_place_and_a_users_error_always_stops(start):
    source = "def f(completions):\n    return [1 / 0 for _ in completions]\n"
    with pytest.raises(RewardFailure, match=r"exception: ZeroDivisionError.*function0.py:2\) on a call with 4 samples"):
        start(source).score([make_sample(row) for row in range(4)])
    source = "from jrlhf.errors import UserError\ndef f(completions):\n    raise UserError('the key has expired')\n"
    with pytest.raises(UserError, match="'judge': the key has expired"):
        start(source, on_failure=0.0).score([make_sample()])


def test_columns_are_compared_and_may_be_renamed(start):
    source = "def f(completions, answer, hint='none', **others):\n    return [float(a) for a in answer]\n"
    reward = start(source)
    with pytest.raises(UserError, match="needs the column 'answer' for .*, and the dataset has final, question: name"):
        reward.facts.check_columns(["question", "final"])
    with pytest.raises(
        UserError, match="dataset has answers, name: rename the parameter to answers, or name one of th"
    ):
        reward.facts.check_columns(["answers", "name"])
    reward.facts.check_columns(["answer"])
    mapped = start(source, columns={"answer": "final"})
    with pytest.raises(UserError, match="needs the column 'final'"):
        mapped.facts.check_columns(["answer"])
    assert mapped.score([make_sample(final="3")]).scores == [3]
    verl = "def f(solution_str, ground_truth):\n    return float(ground_truth)\n"
    reward = start(verl)
    with pytest.raises(UserError, match="'ground_truth'.* the dataset has none"):
        reward.facts.check_columns([])
    reward.facts.check_columns(["reward_model"])
    assert start(verl, columns={"ground_truth": "answer"}).score([make_sample(answer="4")]).scores == [4]
    # A row without a column that others have gives None.
    source = "def f(completions, answer, hint): return [(a is None) + 2 * (h is None) for a, h in zip(answer, hint)]"
    rows = [make_sample(answer=1, hint=1), make_sample(answer=1), make_sample(hint=1), make_sample()]
    np.testing.assert_array_equal(start(source).score(rows).scores, [0, 2, 1, 3])


STARTS = [  # source, arguments, sentence
    ("def f(completions, a): ...", {"options": {"b": 1}}, r"options.b: .*f' has the parameters completions, a$"),
    ("def f(completions, **c): ...", {"options": {"prompts": 1}}, "options.prompts .* remove"),
    ("def f(completions, a): ...", {"columns": {"b": "x"}}, "columns.b .* are a$"),
    ("def f(completions, **c): ...", {"columns": {"prompts": "x"}}, "columns.prompts"),
    ("def f(texts): ...", {}, r"has the signature \(texts\): it must take"),
    ("def f(completions, a): ...", {"columns": {"a": "x"}, "options": {"a": 1}}, "columns.a .* are none"),
    ("def f(completions, /): ...", {}, r"has the signature \(completions, /\)"),
    ("f = print", {}, "has the signature"),
    ("raise SystemExit", {}, "cannot be imported: SystemExit"),
    ("f = 3", {}, "is of type int: name a function"),
    ("g = 3", {}, "there is no 'f' in .*: it has g"),
    ("import no_such_module", {}, r"cannot be imported: ModuleNotFoundError.* at .*function\d+.py:1"),
    (
        "def f(completions):\n    return [\n",
        {},
        r"cannot be imported: .*function\d+.py, line 2: '\[' was never closed$",
    ),
    ("print('going', flush=True)\nimport os; os.abort()", {}, r"ended while importing .*ended by SIGABRT, at .*:2"),
    ("def f(completions): ...", {"options": {"x": lambda: 1}}, "its options cannot be sent"),
]
SPECS = [  # spec, arguments, sentence
    ("exact", {}, "'exact' is none of the built-in rewards .exact_match, "),
    ("nowhere/file.py:f", {}, "there is no file .*nowhere/file.py"),
    ("a b:f", {}, "neither a module's name nor a file that ends in .py"),
    ("os:path join", {}, "must be package.module:function"),
]


def test_a_wrong_function_is_refused_when_it_starts(start):
    for source, arguments, sentence in STARTS:
        with pytest.raises(UserError, match=f"'judge': .*{sentence}|{sentence}"):
            start(source, **arguments)


def test_bad_arguments_are_refused_before_anything_runs(tmp_path):
    for spec, arguments, sentence in SPECS:
        with pytest.raises(UserError, match=f"'judge'.*{sentence}|{sentence}.*'judge'"):
            make_reward(spec, **arguments)
    with pytest.raises(UserError, match="^cost 'toxic': 'exact' is none of the built-in rewards"):
        make_reward("exact", "toxic", kind="cost")
    with make_reward("exact_match", "toxic", kind="cost") as cost:
        assert cost.facts.describe().startswith("cost toxic: ")
    with pytest.raises(UserError, match="log=.*no/log .*cannot be opened"):
        make_reward("exact_match", log=tmp_path / "no" / "log").__enter__()
    with pytest.raises(ValueError, match="on_failure=nan: it must be finite"):
        make_reward("exact_match", on_failure=math.nan)


def test_functions_of_modules_of_neighbours_and_of_objects(start, tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "judges.py").write_text(
        "class Judge:\n    def __call__(self, completions): return [4.0] * len(completions)\n"
        "    async def later(self, completions): return [5.0] * len(completions)\njudge = Judge()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for function, score in (("judge", 4), ("judge.later", 5)):
        with make_reward(f"my_package.judges:{function}") as reward:
            assert reward.score([make_sample()]).scores == [score]
    (tmp_path / "neighbour.py").write_text("VALUE = 6\n")
    source = """
    from dataclasses import dataclass
    import neighbour
    @dataclass
    class Late:
        value: "int"
    def f(completions): return [neighbour.VALUE] * len(completions)
    """
    reward = start(source)
    assert reward.score([make_sample()]).scores == [6]
    # The log and a refused resume name the function by the same digest.
    assert (
        f"function0.py, digest {reward.facts.fingerprint})" in reward.facts.describe()
        and "a failure stops the run" in reward.facts.describe()
    )


def test_a_worker_has_no_jax_and_not_the_parents_main_module(start, tmp_path):
    source = """
    import sys, os, json
    def f(completions):
        loaded = [name for name in ("jax", "numpy", "flax", "pytest") if name in sys.modules]
        print(json.dumps([loaded, os.environ["JAX_PLATFORMS"], hasattr(sys.modules["__main__"], "__file__"), sys.argv]))
        return [1.0]
    """
    reward = start(source)
    reward.score([make_sample()])
    reward.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line) == [[], "cpu", False, ["-c"]]


def test_randomness_depends_on_seed_step_and_row_alone(start):
    source = """
    import random, numpy as np
    def f(solution_str, ground_truth):
        random.random()
        words = list({"a", "b", "c", "d"})
        return random.random() + 10 * float(np.random.rand()) + 100 * words.index("a")
    """
    samples = [make_sample(row, ground_truth=1) for row in range(5)]
    one, two = start(source), start(source, workers=2)
    first = one.score(samples, step=1).scores
    np.testing.assert_array_equal(two.score(samples, step=1).scores, first)
    assert not np.any(one.score(samples, step=2).scores == first)
    np.testing.assert_array_equal(one.score(samples, step=1).scores, first)
    assert len(set(first)) == 5
    assert not np.any(start(source, seed=1).score(samples, step=1).scores == first)


def test_arguments_that_cannot_be_sent_are_refused_and_large_ones_arrive(start, monkeypatch):
    reward = start("def f(completions, answer): return [1.0]", on_failure=0.0)
    with pytest.raises(UserError, match="the dataset's columns cannot be sent"):
        reward.score([make_sample(answer=lambda: 1)])
    assert reward.score([make_sample(answer={"any": [np.arange(3), b"x", SimpleNamespace(a=1)]})]).scores == [1]
    module = type(sys)("only_here")  # a class that the worker cannot read
    exec("class Value: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    assert reward.score([make_sample(answer=module.Value())]).failures == {"exception": 1}
    source = "def f(completions, completion_ids): return [[0.5] * len(ids) for ids in completion_ids]"
    samples = [make_sample(row, "x" * 200_000, tokens=20_000) for row in range(10)]  # 2 MB there, 1 MB back
    np.testing.assert_array_equal(start(source, workers=2).score(samples).scores, [10_000] * 10)


def test_calls_of_a_coroutine_function_are_at_work_together(start):
    """Three calls that wait for each other, in any order; each keeps its samples and its random numbers."""
    source = """
import asyncio, random
begun = set()
async def f(data_source, solution_str, ground_truth, extra_info):
    drawn = random.random()
    begun.add(solution_str[0])
    while len(begun) < 3:
        await asyncio.sleep(0.01)
    return {"score": int(solution_str[1:]), "drawn": drawn}
"""
    samples = [[make_sample(row, f"{call}{row}") for row in range(4)] for call in "abc"]
    alone = []
    for call, own in zip("abc", samples, strict=True):
        reward = start(source.replace("< 3", "< 1"))
        alone.append(reward.score(own, first=4 * "abc".index(call)))
        reward.close()
    reward = start(source)
    assert reward.calls >= 3
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(reward.score, own, 0, 4 * number) for number, own in enumerate(samples)]
        together = [call.result(20) for call in calls]
    for one, other in zip(together, alone, strict=True):
        assert one.scores.tolist() == other.scores.tolist() == [0, 1, 2, 3]
        np.testing.assert_array_equal(one.extras["drawn"], other.extras["drawn"])


def test_a_coroutine_function_that_hangs_or_ends_fails_the_calls_at_work_and_is_replaced(start):
    source = """
import asyncio, os, time
async def f(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "exit": os._exit(3)
    if solution_str == "block": time.sleep(60)
    if solution_str == "wait": await asyncio.sleep(60)
    return 1
"""
    reward = start(source, deadline=2.0, on_failure=-1.0)
    for text, kinds in (("exit", {"crash"}), ("block", {"hang"}), ("wait", {"hang"})):
        begin = time.monotonic()
        assert {*reward.score([make_sample(0, text)]).failures} == kinds, text
        assert time.monotonic() - begin < 5
        assert reward.score([make_sample(0, "fine")]).scores.tolist() == [1]
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(reward.score, [make_sample(0, "wait")])
        time.sleep(0.3)
        assert reward.score([make_sample(0, "exit")]).failures == {"crash": 1}
        assert {*waiting.result(5).failures} == {"crash"}
    assert reward.score([make_sample(0, "fine")]).scores.tolist() == [1]


def test_a_batch_that_hangs_costs_no_other_call_its_scores(start):
    source = """
import asyncio
async def f(completions):
    await asyncio.sleep(60 if "hang" in completions else 0.1)
    return [1.0] * len(completions)
"""
    reward = start(source, deadline=1.5, on_failure=-1.0)
    with ThreadPoolExecutor(4) as threads:
        late = threads.submit(reward.score, [make_sample(0, "hang")])
        others = [threads.submit(reward.score, [make_sample(1, "fine")]) for _ in range(3)]
        assert all(call.result(10).scores.tolist() == [1] for call in others)
        assert late.result(10).failures == {"hang": 1}
