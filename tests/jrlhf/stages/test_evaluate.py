"""Answers are graded by the task's measure or by the rewards; statistics of validation are checked by hand."""

import io
import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from jrlhf import training
from jrlhf.config import Config, config_yaml, load_config
from jrlhf.config.schema import EvaluationConfig, ModelSection
from jrlhf.data.types import Example, Prompts, Response
from jrlhf.errors import UserError
from jrlhf.models import ModelConfig, SamplingConfig
from jrlhf.report import read_run, render, results
from jrlhf.rewards.mixture import Rewards, TextPart
from jrlhf.rewards.types import Scored, scores_of
from jrlhf.run.clock import Stopwatch
from jrlhf.run.console import Console
from jrlhf.run.directory import RunDirectory
from jrlhf.run.files import sha256, to_json
from jrlhf.stages import finalize
from jrlhf.stages.evaluate import (
    Graded,
    compare,
    doubts,
    evaluate,
    grade,
    grade_before,
    statistics,
    validate,
)
from jrlhf.stages.identity import Identity

TEXTS = ("a", "a b c", "a b")
RESPONSES = tuple(Response((1, 2), text, True) for text in TEXTS)
PROMPTS = Prompts(((3,),) * 3, ("p",) * 3, examples=(Example("p"),) * 3)


def words(samples, step, first=0) -> Scored:
    assert len(samples) <= 2 and first in (0, 2)  # as many as in training, for which deadlines are set
    return Scored(np.array([len(sample.response.text.split()) for sample in samples], float))


def failing(samples, step, first=0) -> Scored:
    return Scored(np.zeros(len(samples)), failures=Counter({"nan": 2 - first}))


def sum_of(**parts: tuple[float, Any]) -> Rewards:
    """Rewards of text alone, which need no devices."""
    rewards = object.__new__(Rewards)
    rewards.token_parts = {}
    rewards.text_parts = {name: TextPart(weight, score, name) for name, (weight, score) in parts.items()}
    rewards._threads = ThreadPoolExecutor(1)
    rewards.kind, rewards._broken, rewards._warn = "reward", set(), lambda text: None
    return rewards


def context(gold=None) -> Any:
    return cast(Any, SimpleNamespace(task=SimpleNamespace(gold=gold), config=SimpleNamespace(sampled_rows=2)))


def test_costs_are_measured_beside_the_score_and_are_no_part_of_it():
    rewards, costs = sum_of(exact=(2.0, words)), sum_of(words=(0.5, words), other=(1.0, failing))
    result = grade(context(), PROMPTS, RESPONSES, rewards, costs)
    np.testing.assert_array_equal(result.scores, [2.0, 6.0, 4.0])
    assert result.costs is not None
    np.testing.assert_array_equal(result.costs, [0.5, 1.5, 1.0])
    summary = compare(result, result)["after"]
    assert summary["score"] == 4.0 and summary["items"] == {"exact": 2.0} and summary["failures"] == {"other": 2}
    assert summary["cost"] == 1.0 and summary["cost_standard_error"] == pytest.approx(0.5 / 3**0.5)
    assert "cost" not in grade(context(), PROMPTS, RESPONSES, rewards).summary()
    assert scores_of(1, result.by_reward) == {}  # of a single reward


def test_a_reward_that_does_not_judge_an_answer_is_in_no_mean_of_it():
    def partly(samples, step, first=0) -> Scored:
        return Scored(np.array([np.nan if sample.response.text == RESPONSES[1].text else 1.0 for sample in samples]))

    never = lambda samples, *_, **__: Scored(np.full(len(samples), np.nan))  # noqa: E731
    rewards = sum_of(exact=(2.0, words), partly=(0.5, partly), never=(1.0, never))
    result = grade(context(), PROMPTS, RESPONSES, rewards)
    np.testing.assert_array_equal(result.scores, [2.5, 6.0, 4.5])
    assert result.summary()["items"] == {"exact": 2.0, "partly": 1.0}
    assert scores_of(1, result.by_reward, "scores_after") == {
        "scores_after": {"exact": 3.0, "partly": None, "never": None}
    }
    assert {key for key in statistics([result]) if "val-aux" in key} == {
        f"val-aux/all/{name}/mean@1" for name in ("exact", "partly")
    }


def test_a_measure_of_the_task_has_costs_besides():
    gold = SimpleNamespace(scores=np.array([1.0, 0.0, 1.0]), items={"short": np.ones(3)})
    result = grade(context(lambda examples, texts: gold), PROMPTS, RESPONSES, None, sum_of(words=(1.0, words)))
    assert result.measure == "gold" and result.summary()["cost"] == 2.0 and set(result.items) == {"short"}


@pytest.mark.parametrize(
    "settings, measured, validated, line",
    [
        ([], 300, 256, "answering 300 held-out prompts ..."),
        (["evaluation.prompts=7"], 7, 7, "answering 7 of 300 held-out prompts ..."),
        (["evaluation.prompts=999"], 300, 300, "answering 300 held-out prompts ..."),
        (["evaluation.prompts=290", "validation.prompts=5"], 290, 5, "answering 290 of 300 held-out prompts ..."),
    ],
)
def test_all_heldout_prompts_are_measured_and_a_validation_has_its_own_number(settings, measured, validated, line):
    """The number that is printed is the number that is measured."""
    prompts = Prompts(((3,),) * 300, ("p",) * 300, examples=(Example("p"),) * 300)
    out, asked = io.StringIO(), []
    config = load_config("quickstart", ["evaluation.prompts=null", "validation.every=1", *settings])

    def sample(policy, ids, key, sampling) -> list[Response]:
        asked.append(len(ids))
        return [Response((1,), "a", True)] * len(ids)

    gold = lambda examples, texts: SimpleNamespace(scores=np.ones(len(texts)), items={})  # noqa: E731
    services: Any = {"task": SimpleNamespace(heldout=prompts, gold=gold), "sampler": SimpleNamespace(sample=sample)}
    services |= {"console": Console(file=out), "config": config, "sampling": SamplingConfig(24)}
    run = cast(Any, SimpleNamespace(**services))
    graded = evaluate(run, cast(Any, None))
    assert graded is not None and len(graded.scores) == measured and out.getvalue() == f"{line}\n"
    run.task.gold = None
    assert evaluate(run, cast(Any, None)) is None and out.getvalue() == f"{line}\n"  # nothing is answered, or told
    run.task.gold = gold
    clock = SimpleNamespace(run=lambda name, function: function())
    metrics, samples = validate(run, cast(Any, None), cast(Any, None), 0, cast(Any, clock))
    assert asked == [measured, validated] and len(samples) == validated and metrics["val-core/all/gold/mean@1"] == 1


def test_the_policy_before_is_graded_once_and_read_back_bit_for_bit(tmp_path, monkeypatch):
    items = {"odd": np.array([0.1, np.nan, 0.3], np.float32), "words": np.array([1, 3, 2])}
    scores, learnt = np.array([0.1, 0.2, 1 / 3]), np.array([0.1, -2.5, 1e-8], np.float32)
    grades = Graded("gold", RESPONSES, ("a", "b", "a"), scores, items, learnt, {"x": 2})
    graded: list[str] = []
    monkeypatch.setattr(
        "jrlhf.stages.evaluate.evaluate", lambda context, policy, *_: graded.append(policy.word) or grades
    )
    services = {
        "run": RunDirectory(tmp_path),
        "console": Console(enabled=False),
        "task": SimpleNamespace(fingerprint="t"),
    }
    services |= {"identity": Identity({"corpus": "c", "reward exact modules": "m"}), "phases": Stopwatch()}
    run = cast(Any, SimpleNamespace(**services, config=SimpleNamespace(evaluation=SimpleNamespace(prompts=3))))

    def before(word: str, **rewards: tuple[float, Any]) -> Graded:
        policy = SimpleNamespace(word=word, fingerprint=lambda: word)
        result = grade_before(run, cast(Any, policy), sum_of(**rewards))
        assert result is not None
        return result

    run.phases.seconds["evaluation"] = 50.0  # it takes so long
    assert before("one", exact=(1.0, words)) is grades
    run.phases = Stopwatch()  # of another process
    again = before("one", exact=(1.0, words))
    assert 50 <= run.phases.seconds["evaluation"] < 60
    assert again is not grades and graded == ["one"]
    fields, expected = asdict(again), asdict(grades)
    assert flat(fields) == flat(expected) and fields.keys() == expected.keys()
    assert all(isinstance(response, Response) and isinstance(response.ids, tuple) for response in again.responses)
    before("one", other=(1.0, words))
    before("two", other=(1.0, words))
    before("two", other=(1.0, words))
    run.identity = Identity({"corpus": "c", "reward exact modules": "mended"})
    before("two", other=(1.0, words))
    before("two", other=(1.0, words))
    assert graded == ["one", "one", "two", "two"]


def flat(tree: Any) -> list[Any]:
    """Leaves by their paths; of arrays the dtype and the bytes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [(path, (x.dtype, x.tobytes()) if isinstance(x, np.ndarray) else x) for path, x in leaves]


def graded(scores: list[float], helper: list[float], sources: list[str], failures: dict[str, int] | None = None):
    responses = tuple(Response((1,), f"text {score}", True) for score in scores)
    items = {"helper": np.array(helper)}
    return Graded("score", responses, tuple(sources), np.array(scores), items, None, failures or {})


def test_mean_and_best_of_k_answers_are_taken_over_each_prompts_own_answers():
    sources = ["a", "b", "a"]
    first = graded([1.0, 0.0, 5.0], [0.5, 0.5, 0.0], sources)
    second = graded([3.0, 0.0, 1.0], [1.5, np.nan, 0.0], sources, {"helper": 1})
    result = statistics([first, second])
    assert result == {
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
    result = statistics([graded([1.0, 2.0], [0.0, 0.0], ["", ""])])
    assert set(result) == {"val-core/all/score/mean@1", "val-core/all/score/best@1/mean", "val-aux/all/helper/mean@1"}


def test_two_policies_are_compared_prompt_by_prompt():
    before = graded([0.0, 1.0, 2.0], [0.0, 0.0, 0.0], ["x", "y", "x"])
    after = graded([1.0, 1.0, 4.0], [1.0, 1.0, 1.0], ["x", "y", "x"], {"helper": 2})
    result = compare(before, after)
    assert (result["measure"], result["n"], result["difference"]) == ("score", 3, 1.0)
    np.testing.assert_allclose(result["standard_error"], 1 / np.sqrt(3))
    np.testing.assert_allclose(result["standard_errors"], np.sqrt(3))
    assert result["before"]["sources"] == {"x": {"mean": 1.0, "n": 2}, "y": {"mean": 1.0, "n": 1}}
    assert result["after"]["failures"] == {"helper": 2} and "failures" not in result["before"]
    assert result["before"]["distinct"] == 3 and result["after"]["distinct"] == 2


def test_an_export_keeps_the_token_that_begins_texts_where_the_tokenizer_names_none(monkeypatch):
    written: list[dict] = []
    origin = SimpleNamespace(bos_id=0, dtype="float32", family="qwen2", generation={})
    monkeypatch.setattr(finalize, "describe", lambda *_: origin)
    monkeypatch.setattr(finalize, "export_hf", lambda *_, **more: written.append(more))
    model: Any = SimpleNamespace(params={}, base=None, architecture=SimpleNamespace(lora=None), config=None)
    model.onloaded = lambda: model
    for named in (None, 5):
        tokenizer: Any = SimpleNamespace(directory=None, eos_ids=(), pad_id=0, bos_id=named, to_json=str)
        config = Config(model=ModelSection(path="base"))
        finalize.export(RunDirectory(Path("run"), writes=False), config, tokenizer, model, None)
    assert [more["bos_id"] for more in written] == [0, 5]


def test_a_file_of_the_user_in_the_place_of_the_model_ends_the_run_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(finalize, "_summarise", lambda *_: {})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.md").touch()
    context: Any = SimpleNamespace(
        config=Config(stages=("sft",)),
        run=RunDirectory(tmp_path, writes=False),
        task=SimpleNamespace(
            tokenizer=SimpleNamespace(directory=None, eos_ids=(), pad_id=0, bos_id=None, to_json=str),
            heldout=None,
            gold=None,
        ),
        console=Console(enabled=False),
    )
    model: Any = SimpleNamespace(
        params={}, base=None, architecture=SimpleNamespace(lora=None), config=ModelConfig(8, 8, 1, 1, 1, 8, 8, 64)
    )
    model.onloaded = lambda: model
    with pytest.raises(UserError, match="model holds 'notes.md', which .*: move it away, .*; then resume the run$"):
        finalize.deliver(context, finalize.Outcome(model), lambda *_: cast(Any, None))
    assert (tmp_path / "model" / "notes.md").exists()


SAMPLING = SamplingConfig(max_new_tokens=16)


def answers(texts: list[str], lengths: list[int] | None = None, **parts: tuple[float, list[float]]) -> Graded:
    """Answers with the scores of some rewards, each with its weight. An answer of 16 tokens has not ended."""
    items = {name: np.array(scores, float) for name, (_, scores) in parts.items()}
    weights = {name: weight for name, (weight, _) in parts.items()}
    total = sum((np.nan_to_num(weights[name] * items[name]) for name in parts), np.zeros(len(texts)))
    counts = lengths or [len(text) + 1 for text in texts]
    responses = tuple(Response(tuple(range(n)), text, n < 16) for text, n in zip(texts, counts, strict=True))
    return Graded("score", responses, ("",) * len(texts), total, items, None, weights=weights)


def test_a_policy_that_learnt_to_be_silent_is_no_gain(tmp_path):
    """The rewards of the page on TRL, on a model that answers nothing right: only brevity tells answers apart."""
    draw = np.random.default_rng(0)
    texts = ["x" * n for n in draw.integers(1, 14, 64)]
    brief = [-0.01 * len(text) / 13 for text in texts]
    before = answers(texts, correct=(1.0, [0.0] * 64), brief=(0.1, brief))
    after = answers([""] * 64, correct=(1.0, [0.0] * 64), brief=(0.1, [-1e-5] * 64))
    sentences = doubts(before, after, SAMPLING)
    assert sentences == [
        "the reward correct is 0.000 for every held-out answer, before and after: it tells none apart",
        "64 of 64 held-out answers are one and the same text: the policy answers no prompt",
        "64 of 64 held-out answers are as short as they may be: they end at token 1",
    ]
    comparison = compare(before, after)
    summary = {"held_out": comparison | {"doubts": sentences}}
    assert comparison["standard_errors"] > 10  # what the mean alone says
    (tmp_path / "config.yaml").write_text("stages: [grpo]\n")
    (tmp_path / "summary.json").write_bytes(to_json(summary))
    record = read_run(tmp_path)
    page = render(record)
    assert all(page.index(doubt) < page.index("Score, held out") for doubt in sentences)
    shown = [value for figure in results(record) for value in (*figure.values, figure.note)]
    assert not any(re.search(r"-0\.0+(?!\d)", text) for text in (page, *shown))
    assert "14.8 standard errors" in page
    summary["held_out"] = comparison | {"standard_error": comparison["standard_error"] / 2}
    (tmp_path / "summary.json").write_bytes(to_json(summary))
    assert "more than 20 standard errors" in render(read_run(tmp_path))  # 29.6 would be a false certainty
    assert "-1.0e-05" in page  # a value that is not zero has digits


def one_token(graded: Graded, length: int) -> Graded:
    return replace(graded, responses=tuple(replace(own, ids=(3,) * length) for own in graded.responses))


HALF = [0.0, 1.0] * 5
TEN = [f"text {n}" for n in range(10)]
DOUBTED = [  # before, after, words of each doubt
    (answers(TEN, a=(1.0, HALF)), answers(TEN, a=(1.0, [0.6] * 10)), []),
    (
        answers(TEN, a=(1.0, [1.0] * 10)),
        answers(TEN, a=(1.0, [1.0] * 10)),
        ["the reward a is 1.000 for every held-out answer"],
    ),
    (answers(TEN, a=(0.0, [1.0] * 10)), answers(TEN, a=(0.0, [1.0] * 10)), []),  # it is only measured
    (
        answers(TEN, a=(1.0, HALF), b=(1.0, [0.5 + n / 100 for n in range(10)])),
        answers(TEN, a=(1.0, [3.0] * 10), b=(1.0, [0.1 + n / 50 for n in range(10)])),
        ["the reward b went from 0.545 to 0.190, for the worse"],
    ),
    (
        answers(TEN, a=(1.0, HALF), b=(0.1, [1.0] * 10)),
        answers(TEN, a=(1.0, [1.0] * 10), b=(0.1, [0.0] * 10)),
        ["the reward b went from 1.000 to 0.000, for the worse"],
    ),
    (  # the same, of a penalty: falling is good
        answers(TEN, a=(1.0, HALF), b=(-1.0, [0.5 + n / 100 for n in range(10)])),
        answers(TEN, a=(1.0, [3.0] * 10), b=(-1.0, [0.1 + n / 50 for n in range(10)])),
        [],
    ),
    (  # the score fell, too, which is said already
        answers(TEN, a=(1.0, HALF), b=(1.0, [3 + n / 100 for n in range(10)])),
        answers(TEN, a=(1.0, [0.6] * 10), b=(1.0, [0.1 + n / 50 for n in range(10)])),
        [],
    ),
    (  # a function that always fails is not one that tells none apart
        answers(TEN, a=(1.0, [0.0] * 10)),
        replace(answers(TEN, a=(1.0, [0.0] * 10)), failures={"a": 10, "words": 6}),
        ["the reward a failed on 10 of 10 held-out answers", "the cost words failed on 6 of 10 held-out answers"],
    ),
    (
        answers(TEN, a=(1.0, [1.0] * 10)),
        replace(answers(TEN, a=(1.0, [1.0] * 10)), failures={"a": 5}),
        ["the reward a is 1.000 for every held-out answer"],
    ),
    (
        answers(TEN, a=(1.0, [np.nan, *HALF[1:]])),
        answers(TEN, a=(1.0, [np.nan] * 10)),
        ["the reward a judges no held-out answer (skip_none, abstain)"],
    ),
    (None, answers([*TEN[:2], *["same"] * 8], a=(1.0, HALF)), []),
    (None, answers([*TEN[:1], *["same"] * 9], a=(1.0, HALF)), ["9 of 10 held-out answers are one and the same text"]),
    (None, answers(TEN, [16] * 9 + [3], a=(1.0, HALF)), ["9 of 10 held-out answers are as long as they may be"]),
    (None, one_token(answers(TEN, a=(1.0, HALF)), 8), []),
    (None, one_token(answers(TEN, a=(1.0, HALF)), 9), ["10 of 10 held-out answers are one token again and again"]),
    (None, answers(TEN, [1] * 10, a=(1.0, HALF)), ["10 of 10 held-out answers are as short as they may be"]),
    (None, answers(["same"]), []),
    (None, answers(TEN, [16] * 8 + [1] * 2), []),
]


@pytest.mark.parametrize(("before", "after", "expected"), DOUBTED)
def test_a_doubt_is_raised_where_answers_say_other_things_than_their_mean(before, after, expected):
    sentences = doubts(before, after, SAMPLING)
    assert len(sentences) == len(expected) and all(
        words in doubt for words, doubt in zip(expected, sentences, strict=True)
    )


def test_answers_are_as_short_as_they_may_be_also_if_that_is_set():
    short = answers(TEN, [4] * 10)
    assert not doubts(None, short, SAMPLING)
    (sentence,) = doubts(None, short, SamplingConfig(max_new_tokens=16, min_new_tokens=4))
    assert sentence.endswith("they end at token 4")
    assert not doubts(None, answers(TEN, [1] * 10), SamplingConfig(max_new_tokens=1))  # no answer can be longer


def test_a_run_whose_groups_all_had_equal_scores_says_that_nothing_was_learned():
    graded = answers(TEN, [1] * 10)
    *_, sentence = doubts(None, graded, SAMPLING, [1.0, 1.0])
    assert sentence == (
        "the scores taught nothing: in all 2 iterations no prompt had counted responses with different scores"
    )
    assert sentence not in doubts(None, graded, SAMPLING, [1.0, 0.5])


def test_a_run_has_finished_if_it_ended_with_this_config_and_still_has_what_it_left(tmp_path):
    """A run that was killed at any moment before its end has not; nor one of which something was deleted."""
    config = Config(name="r", run_dir=str(tmp_path), stages=("sft", "reward_model"))
    path, context = tmp_path / "r", cast(Any, SimpleNamespace(config=config, run=RunDirectory(tmp_path / "r")))
    ended = {"finished": sha256(config_yaml(config)), "steps": {"sft": 300, "reward_model": 250}}  # one of them early
    left = ["checkpoints/sft/300", "checkpoints/reward_model/250", "report.html", "summary.json"]
    left += ["model/config.json", "reward_model/config.json"]

    def leave() -> None:
        for name in left:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(json.dumps(ended))

    leave()
    assert finalize.finished(context) == json.loads((path / "summary.json").read_text())
    for name in left:
        (path / name).unlink()
        assert finalize.finished(context) is None, name
        leave()
    (path / "summary.json").write_text("{}")  # it was killed while it wrote the model, or the report
    assert finalize.finished(context) is None
    leave()
    for other in (replace(config, evaluation=EvaluationConfig(prompts=7)), replace(config, run_dir="s3://bucket/runs")):
        assert finalize.finished(cast(Any, SimpleNamespace(config=other, run=context.run))) is None


def test_what_ends_a_run_is_written_last(tmp_path, monkeypatch):
    """Killed at any moment before, it would be ended by a resume."""
    config, events = Config(name="r", run_dir=str(tmp_path), stages=("sft",)), list[str]()
    run: Any = RunDirectory(tmp_path, writes=False)
    (tmp_path / "checkpoints" / "sft" / "500").mkdir(parents=True)
    run.write = lambda name, text: events.append(f"{name}{' finished' * (b'finished' in text)}")
    context: Any = SimpleNamespace(config=config, run=run, console=Console(enabled=False), phases=Stopwatch())
    monkeypatch.setattr(finalize, "evaluate", lambda *_: events.append("answers"))
    monkeypatch.setattr(finalize, "_export_all", lambda *_: events.append("model"))
    monkeypatch.setattr("jrlhf.report.html.write_report", lambda *_: events.append("report"))
    training._end(context, finalize.Outcome(cast(Any, None)))
    assert events == ["answers", "summary.json", "model", "report", "summary.json finished"]


def test_the_weights_of_the_rewards_are_graded_with_them():
    rewards = sum_of(exact=(2.0, words), spelt=(-0.5, words))
    assert grade(context(), PROMPTS, RESPONSES, rewards).weights == {"exact": 2.0, "spelt": -0.5}
