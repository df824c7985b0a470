"""Rewards of an iteration: functions run while the devices compute, models of text in order with the roles' calls."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.algorithms.ppo import ppo
from jrlhf.config import Config, build
from jrlhf.data.batches import Batch, put_rows
from jrlhf.data.types import Example, Response
from jrlhf.errors import RewardFailure, UserError
from jrlhf.meshes import make_mesh
from jrlhf.ppo import Rollout, RunningMoments
from jrlhf.ppo.config.score import ScoreConfig
from jrlhf.ppo.shaping import shape_scores
from jrlhf.rewards.combine import combine
from jrlhf.rewards.mixture import Rewards, TextPart, joined_answers
from jrlhf.rewards.of_config import open_rewards
from jrlhf.rewards.types import Kind, Sample, Scored, joined, to_samples, weighted_sum
from jrlhf.roles.model import Compute
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.clock import Clock

MESH, ROWS = make_mesh(8, 1, 1), 8
BATCH = Batch(cast(Any, ()), [Example(prompt="p")] * ROWS, ["p"] * ROWS, step=3)
PLAIN = ScoreConfig()
TOKENIZER = cast(Any, SimpleNamespace(continuation=lambda _, ids: "x" * len(ids), marks=frozenset(), stop=None))
LENGTHS = np.arange(ROWS, dtype=np.int32) % 3 + 1


def rollout() -> Rollout:
    tokens = np.tile(np.arange(4, dtype=np.int32), (ROWS, 1))
    own = tokens, np.ones(ROWS, np.int32), LENGTHS, np.zeros((ROWS, 4), np.float32), np.ones(ROWS, bool)
    return Rollout(*put_rows(own, MESH), version=jnp.zeros((), jnp.int32))


def ahead(rewards: Rewards, step: int = 0, first: int = 0, count: int = 1) -> Any:
    """Starts the functions on some rows of a batch."""
    rows, drawn = slice(first, first + count), rollout()
    tile = replace(drawn, **{name: np.asarray(x)[rows] for name, x in vars(drawn).items() if np.ndim(x)})
    return rewards.read(replace(BATCH, step=step), rows, tile)


class Calls:
    """Roles that only note the order of their calls, and rewards of text."""

    def __init__(self, shaping: ScoreConfig = PLAIN, kind: Kind = "reward", samples: int = 1, **parts: TextPart):
        self.names: list[str] = []
        self.dispatched = threading.Event()
        own = {"placement": RolePlacement.of(MESH), "compute": Compute(), "clock": Clock(deadline=10.0)}
        own |= {"shaping": shaping, "kind": kind, "trained": None, "samples": samples, "counts": jnp.ones_like}
        self.warnings = list[str]()
        own["warn"] = self.warnings.append
        self.rewards = Rewards({}, parts, **own, tokenizer=TOKENIZER, gap=lambda: "", max_response=3)
        self.rewards.start(jax.device_put(RunningMoments.create()))

    def score(self, method: str = "score") -> Any:
        with jax.set_mesh(MESH):
            return getattr(self.rewards, method)(rollout(), BATCH).result()

    def iterate(self) -> Any:
        """The scores that an iteration makes experience of."""
        roles = SimpleNamespace(
            generate=lambda *_: rollout(),
            logprobs=lambda _: self.names.append("logprobs"),
            values=lambda _: (self.names.append("values"), self.dispatched.set()),
            update=lambda _: {},
            is_base_of=lambda _: False,
            recomputes=lambda: True,
            experience=lambda _, scores, *__: scores.result(),
        )
        any_role = cast(Any, roles)
        self.rewards.clock.start()
        with jax.set_mesh(MESH):
            return ppo(any_role, any_role, any_role, self.rewards, any_role, BATCH, 0.1)[0]


def test_scoring_is_dispatched_while_functions_are_at_work():
    def function(samples: Sequence[Sample], step: int, first: int = 0) -> Scored:
        assert calls.dispatched.wait(10), "the critic's values were not asked for before this returned"
        threads.append(threading.current_thread())
        return Scored(np.array([len(sample.response.text) for sample in samples], float))

    def model(samples: Sequence[Sample], step: int) -> Scored:
        calls.names.append("model")
        threads.append(threading.current_thread())
        return Scored(np.full(len(samples), float(step)))

    threads: list[threading.Thread] = []
    calls = Calls(
        model=TextPart(0.5, model, "model", cast(Any, "on the mesh")), function=TextPart(2.0, function, "function")
    )
    np.testing.assert_allclose(calls.iterate(), 2 * LENGTHS + 0.5 * 3)
    assert calls.names == ["logprobs", "logprobs", "values", "model"]
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()
    taken = calls.rewards.clock.take()
    assert set(taken) == {f"timing_s/{name}" for name in ("reward_functions", "reward_wait", "reward", "step")}
    assert calls.rewards.metrics()["rewards/function/mean"] == LENGTHS.mean()
    assert calls.rewards.identities == {"model": "model", "function": "function"}
    calls.rewards.close()
    assert not threads[0].is_alive()


def test_the_end_waits_for_the_call_at_work_alone():
    """Groups that were drawn ahead may wait for many calls, each as long as a function's deadline."""

    def function(samples: Sequence[Sample], step: int, first: int = 0) -> Scored:
        steps.append(step)
        started.set()
        assert ends.wait(10)
        return Scored(np.zeros(len(samples)))

    steps, started, ends = list[int](), threading.Event(), threading.Event()
    rewards = Calls(function=TextPart(1.0, function, "function")).rewards
    answers = [ahead(rewards, step) for step in range(3)]
    assert started.wait(10)
    closing = threading.Thread(target=rewards.close)
    closing.start()
    while not answers[2].cancelled():
        time.sleep(0.01)
    ends.set()
    closing.join()
    assert steps == [0] and [answer.cancelled() for answer in answers] == [False, True, True]


def test_groups_that_wait_are_scored_at_the_same_time_and_joined_in_their_order():
    def function(samples: Sequence[Sample], step: int, first: int = 0) -> Scored:
        together.wait(10)  # fails alone
        return Scored(np.full(len(samples), float(first)))

    together = threading.Barrier(2)
    rewards = Calls(function=TextPart(1.0, function, "function", calls=2)).rewards
    answers = [ahead(rewards, first=first) for first in range(4)]
    assert joined_answers(answers)[1]["function"].scores.tolist() == [0, 1, 2, 3]
    rewards.close()


def test_an_interrupted_run_does_not_wait_for_the_rows_of_a_call_at_work(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef f(solution_str):\n    print('asked')\n    time.sleep(10)\n")
    section = {"name": "slow", "function": f"{tmp_path}/slow.py:f", "workers": 1}
    config = build(Config, {"stages": ["grpo"], "rewards": [section]})
    initial: Any = SimpleNamespace(config=config, console=SimpleNamespace(line=print, warn=print), compute=Compute())
    task: Any = SimpleNamespace(tokenizer=TOKENIZER, prompts=SimpleNamespace(ids=[(1,)]))
    log = tmp_path / "reward-slow.log"
    with (
        pytest.raises(KeyboardInterrupt),
        open_rewards(initial, task, tmp_path, lambda role: RolePlacement.of(MESH), cast(Any, None), None) as (
            rewards,
            _,
        ),
    ):
        answer = ahead(rewards, count=2)
        while not log.stat().st_size:
            time.sleep(0.01)
        began = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - began < 8 and answer.exception() is not None
    assert log.read_text() == "asked\n"  # the call did not fail


def test_one_thread_asks_a_function_within_iterations_and_outside_of_them():
    """Two calls at once would take each other's answers from the function's process."""

    def function(samples: Sequence[Sample], step: int, first: int = 0) -> Scored:
        threads.add(threading.current_thread())
        return Scored(np.full(len(samples), float(step)))

    threads: set[threading.Thread] = set()
    rewards = Calls(function=TextPart(1.0, function, "function")).rewards
    response = Response((5,), "x", True)
    answer = ahead(rewards, 3)
    total, _ = rewards.score_texts(to_samples(BATCH.examples[:1], BATCH.texts[:1], [response]), 4)
    assert answer.result()[1]["function"].scores == [3.0] and total.scores == [4.0] and len(threads) == 1
    rewards.close()


def test_a_function_that_fails_stops_the_iteration_before_anything_is_trained():
    def function(samples: Sequence[Sample], step: int, first: int = 0) -> Scored:
        raise RewardFailure("the judge is out")

    calls = Calls(function=TextPart(1.0, function, "function"))
    with pytest.raises(RewardFailure, match="the judge is out"):
        calls.iterate()
    assert calls.names == ["logprobs", "logprobs", "values"]
    calls.rewards.close()


def test_a_reward_that_fails_on_most_samples_is_told_once_with_its_reason():
    def failing(count: int) -> TextPart:
        failures = {"type": count - 1, "nan": 1}
        return TextPart(1.0, lambda samples, *_, **__: Scored(np.zeros(ROWS), None, {}, failures, "returned 'a'"), "f")

    calls = Calls(broken=failing(ROWS // 2 + 1), half=failing(ROWS // 2))
    calls.score()
    (warning,) = calls.warnings
    assert warning.startswith(f"the reward broken failed on 5 of {ROWS} samples (type, nan; the last: returned 'a'), ")
    calls.score()
    calls.rewards.score_texts(to_samples(BATCH.examples, BATCH.texts, [Response((5,), "x", True)] * ROWS))
    assert len(calls.warnings) == 1
    parts = [Scored(np.zeros(1), last_failure="early"), Scored(np.zeros(1), last_failure="late"), Scored(np.zeros(1))]
    assert joined(parts, [1] * 3).last_failure == "late"
    calls.rewards.close()


def test_a_baseline_is_shaped_like_the_scores_and_counts_as_none_of_them():
    def function(samples: Sequence[Sample], step: int, first: int = 0) -> Scored:
        return Scored(np.full(len(samples), 3.0), failures={"nan": 2})

    calls = Calls(shaping=ScoreConfig(normalise=True, clip=2.0), function=TextPart(2.0, function, "function"))
    rewards = calls.rewards
    first, moments = calls.score(), rewards.moments
    baseline = calls.score("score_baseline")
    assert rewards.moments is moments and float(moments.mean) == 6.0
    for scores in (first, baseline):
        np.testing.assert_array_equal(scores, np.zeros(ROWS))
    assert [*rewards.raw] == [BATCH.step]
    np.testing.assert_array_equal(rewards.raw[BATCH.step], np.full(ROWS, 6.0))
    calls.score()
    metrics = rewards.metrics()
    assert metrics["critic/baseline/mean"] == 6.0 and metrics["rewards/function/mean"] == 3.0
    assert metrics["rewards/function/failures"] == 6.0 == metrics["rewards/function/failures/nan"]  # of all scorings
    rewards.start(rewards.moments)
    assert rewards.metrics() == rewards.raw == {}
    calls.rewards.close()


def test_costs_have_names_of_their_own():
    def function(samples: Sequence[Sample], step: int, first: int = 0) -> Scored:
        return Scored(np.arange(len(samples), dtype=float))

    calls = Calls(kind="cost", words=TextPart(0.5, function, "words"))
    np.testing.assert_allclose(calls.score(), np.arange(ROWS) / 2)
    metrics = calls.rewards.metrics()
    totals, words = ("mean", "max", "min", "nonfinite"), ("mean", "std", "failures")
    assert set(metrics) == {*(f"cost/{x}" for x in totals), *(f"costs/words/{x}" for x in words)}
    assert metrics["cost/max"] == 3.5
    calls.rewards.close()


def test_scores_of_models_are_added_to_those_of_texts():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, ROWS)).astype(np.float32)
    texts = rng.normal(size=(ROWS, 3)).astype(np.float32)
    texts = np.where(np.arange(3) < LENGTHS[:, None], texts, 0)
    shape = partial(shape_scores, config=PLAIN, max_response=3)
    rest = np.asarray(LENGTHS), np.ones(ROWS, bool), RunningMoments.create()
    weights, learned = {"a": 2.0, "b": -0.5}, {"a": first, "b": second}
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    rows, at_end = 2 * first - second / 2, np.zeros((ROWS, 3), np.float32)
    at_end[np.arange(ROWS), LENGTHS - 1] = rows
    for given, expected in ((texts, texts + at_end), (texts.sum(1), texts.sum(1) + rows)):  # of tokens, of rows
        combined = jax.jit(partial(combine, shape, "reward", weights, dict.fromkeys(weights, 0.0)))(
            learned, given, *rest
        )
        close(combined.shaped, expected)
        close(combined.raw, texts.sum(1) + rows)
        close(combined.extremes["max"], np.max(texts.sum(1) + rows))
        close(combined.learned["rewards/b/mean"], second.mean())
        close(combined.learned["rewards/a/std"], first.std())


def test_each_reward_is_normalised_over_the_responses_to_a_prompt_before_they_are_summed():
    """GDPO: whatever their scales. A row of which one reward is not finite counts in no group, and teaches nothing."""
    rng = np.random.default_rng(3)
    given = {"right": rng.integers(0, 2, ROWS).astype(float), "long": 100 * rng.normal(size=ROWS)}
    given["right"][:4], given["long"][5] = (0, 1, 1, 0), 1e39  # float32 does not hold it
    weights = {"right": 1.0, "long": -0.5}

    def part(name: str) -> TextPart:
        return TextPart(weights[name], lambda samples, step, first=0: Scored(given[name]), name)

    calls = Calls(ScoreConfig(combine="normalise_then_sum"), samples=4, right=part("right"), long=part("long"))
    scores = calls.score()
    expected = np.full(ROWS, -np.inf)
    for rows in (np.arange(4), np.array([4, 6, 7])):
        groups = {name: own[rows] for name, own in given.items()}
        expected[rows] = sum(
            w * (groups[n] - groups[n].mean()) / (groups[n].std(ddof=1) + 1e-6) for n, w in weights.items()
        )
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=1e-6)
    raw = np.where(np.arange(ROWS) == 5, -np.inf, given["right"] - 0.5 * given["long"])
    np.testing.assert_allclose(calls.rewards.raw[BATCH.step], raw, rtol=1e-5)
    assert calls.rewards.metrics()["rewards/long/mean"] != 0
    np.testing.assert_array_equal(calls.rewards.parts[BATCH.step]["long"], given["long"])
    given["long"][5] = np.inf  # a row that is invalid
    np.testing.assert_array_equal(np.isfinite(calls.score()), np.arange(ROWS) != 5)
    # A reward that does not judge a row has it in no mean, and gives it 0; `right` judges a single row of the last.
    given["long"][5] = 7.0
    given["long"][[0, 2]], given["right"][[4, 5, 6]] = np.nan, np.nan
    scores, expected = calls.score(), np.zeros(ROWS)
    for name, own in given.items():
        for group in (slice(0, 4), slice(4, 8)):
            judged = own[group][~np.isnan(own[group])]
            if len(judged) > 1:
                normalised = (own[group] - judged.mean()) / (judged.std(ddof=1) + 1e-6)
                expected[group] += weights[name] * np.nan_to_num(normalised)
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=1e-6)
    metrics = calls.rewards.metrics()
    assert (metrics["rewards/long/skipped"], metrics["rewards/right/skipped"]) == (2, 3)
    assert metrics["rewards/right/mean"] == pytest.approx(np.nanmean(given["right"]))
    calls.rewards.close()
    tokens = TextPart(1.0, lambda *_, **__: Scored(np.ones(ROWS), token_scores=(np.ones(1),) * ROWS), "steps")
    calls = Calls(ScoreConfig(combine="normalise_then_sum"), samples=4, steps=tokens)
    with pytest.raises(UserError, match="reward 'steps' scores single tokens, and scores.combine=normalise_then_sum"):
        calls.score()
    calls.rewards.close()


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_a_model_that_fails_is_measured_by_its_other_rows(weight: float):
    """A failure that excludes its row is in no mean, and with weight 0 it excludes none."""
    own = jnp.asarray([1.0, np.nan, 4.0, 3.0, 2.0, 0.0, 1.0, 5.0])
    rest: Any = None, np.asarray(LENGTHS), np.ones(ROWS, bool), RunningMoments.create()
    shape = partial(shape_scores, config=PLAIN, max_response=3)
    for samples in (None, 4):
        given: Any = {"samples": samples} if samples else {}
        combined = combine(shape, "reward", {"a": weight}, {"a": np.inf}, {"a": own}, *rest, **given)
        finite = np.asarray(own)[np.isfinite(own)]
        assert float(combined.learned["rewards/a/mean"]) == pytest.approx(finite.mean())
        assert float(combined.learned["rewards/a/std"]) == pytest.approx(finite.std())
        assert float(combined.learned["rewards/a/failures"]) == 1
        np.testing.assert_array_equal(np.isfinite(combined.raw), np.isfinite(own) | (weight == 0))
        np.testing.assert_array_equal(np.isfinite(combined.shaped), np.isfinite(own) | (weight == 0))


def test_a_score_that_is_not_finite_leaves_the_others_in_the_metrics():
    texts: Any = np.arange(ROWS, dtype=np.float32)
    texts[[0, 2]] = np.nan, np.inf
    rest: Any = np.asarray(LENGTHS), np.ones(ROWS, bool), RunningMoments.create()
    combined = combine(partial(shape_scores, config=PLAIN, max_response=3), "reward", {}, {}, {}, texts, *rest)
    finite = texts[np.isfinite(texts)]
    expected = {"mean": finite.mean(), "max": finite.max(), "min": finite.min(), "nonfinite": 2.0}
    assert {name: float(x) for name, x in combined.extremes.items()} == pytest.approx(expected)
    assert float(combined.shaping["score/raw/mean"]) == pytest.approx(finite.mean())
    np.testing.assert_array_equal(combined.raw, texts)


@pytest.mark.parametrize("combination", ["sum", "normalise_then_sum"])
def test_a_reward_of_weight_0_makes_no_row_invalid(combination: Any):
    given = {"counts": np.arange(ROWS, dtype=float), "measured": np.full(ROWS, np.inf)}

    def part(name: str, weight: float) -> TextPart:
        return TextPart(weight, lambda samples, step, first=0: Scored(given[name], abstained=ROWS), name)

    calls = Calls(
        ScoreConfig(combine=combination), samples=4, counts=part("counts", 1.0), measured=part("measured", 0.0)
    )
    assert np.isfinite(calls.score()).all()
    assert calls.rewards.metrics()["rewards/measured/abstained"] == ROWS
    calls.rewards.close()


def test_weighted_sums():
    a = Scored(np.array([1.0, 2.0]), extras={"x": np.array([1.0, 2.0])}, failures={"hang": 1})
    b = Scored(np.array([10.0, -20.0]))
    total = weighted_sum([(0.5, a), (0.25, b)], [3, 4])
    np.testing.assert_array_equal(total.scores, [3, -4])
    assert total.token_scores is None and total.extras == total.failures == {}
    partly = Scored(np.array([np.nan, 4.0]))  # the first sample is not judged
    np.testing.assert_array_equal(weighted_sum([(0.5, a), (2.0, partly)], [3, 4]).scores, [0.5, 9])
    assert [list(row) for row in partly.by_token([2, 1])] == [[0, 0], [4]]
    # With scores of tokens, every part is conserved.
    tokens = Scored(np.array([3.0, 0.0, 5.0]), token_scores=(np.array([1.0, 2.0]), np.zeros(0), np.array([5.0])))
    whole = Scored(np.array([10.0, 20.0, 30.0]))
    total = weighted_sum([(2.0, tokens), (0.5, whole)], [2, 0, 1])
    np.testing.assert_array_equal(total.scores, [11, 10, 25])
    assert total.token_scores is not None and [list(row) for row in total.token_scores] == [[2, 9], [], [25]]
    assert tokens.token_scores is not None
    np.testing.assert_array_equal(tokens.token_scores[0], [1, 2])  # the parts are as they were


def test_metrics_leave_out_what_is_not_there():
    scored = Scored(np.array([1.0, 3.0]), extras={"a": np.array([np.nan, 4.0]), "b": np.full(2, np.nan)})
    assert scored.metrics("x") == {f"rewards/x/{k}": v for k, v in (("mean", 2), ("std", 1), ("a", 4), ("failures", 0))}
    assert Scored(np.zeros(0)).metrics("x") == {"rewards/x/failures": 0}
    assert Scored(np.array([np.nan, 3.0])).metrics("x") == {
        f"rewards/x/{k}": v for k, v in (("mean", 3), ("std", 0), ("skipped", 1), ("failures", 0))
    }
    assert Scored(np.full(2, np.nan)).metrics("x") == {"rewards/x/skipped": 2, "rewards/x/failures": 0}
    failed = Scored(np.zeros(2), failures={"hang": 2}).metrics("x")
    assert failed["rewards/x/failures"] == failed["rewards/x/failures/hang"] == 2
