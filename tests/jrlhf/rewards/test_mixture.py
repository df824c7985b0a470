"""Rewards of an iteration: functions run beside the roles' calls, models of text in order with them."""

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.algorithms.ppo import ppo
from jrlhf.data.batches import Batch, put_rows
from jrlhf.data.types import Example
from jrlhf.meshes import make_mesh
from jrlhf.ppo import Rollout, RunningMoments
from jrlhf.ppo.shaping import ScoreConfig, shape_scores
from jrlhf.rewards.functions import RewardFailure
from jrlhf.rewards.mixture import Rewards, TextPart, combine
from jrlhf.rewards.types import Sample, Scored
from jrlhf.roles.compiled import Compute
from jrlhf.run.clock import Clock

MESH, ROWS = make_mesh(8, 1, 1), 8
BATCH = Batch(cast(Any, ()), [Example(prompt="p")] * ROWS, ["p"] * ROWS, step=3)
PLAIN = ScoreConfig()
LENGTHS = np.arange(ROWS, dtype=np.int32) % 3 + 1


def rollout() -> Rollout:
    tokens = np.tile(np.arange(4, dtype=np.int32), (ROWS, 1))
    prompts = np.ones(ROWS, np.int32)
    finished = np.ones(ROWS, bool)
    placed = put_rows((tokens, prompts, LENGTHS, np.zeros((ROWS, 4), np.float32), finished), MESH)
    return Rollout(*placed, version=jnp.zeros((), jnp.int32))


class Calls:
    """Roles that only note the order of their calls, and what the functions of text do meanwhile."""

    def __init__(self, shaping: ScoreConfig = PLAIN, kind: Any = "rewards", **parts: TextPart):
        self.names: list[str] = []
        self.dispatched = threading.Event()
        context = SimpleNamespace(
            mesh=MESH,
            compute=Compute(),
            task=SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "x" * len(ids))),
            config=SimpleNamespace(deadline=10.0, data=SimpleNamespace(max_response=3)),
        )
        self.rewards = Rewards(cast(Any, context), None, {}, parts, shaping=shaping, clock=Clock(), kind=kind)
        self.rewards.start(jax.device_put(RunningMoments.create()))

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
    def function(samples: Sequence[Sample], step: int) -> Scored:
        assert calls.dispatched.wait(10), "the critic's values were not asked for before this returned"
        threads.append(threading.current_thread())
        return Scored(np.array([len(sample.response_text) for sample in samples], float))

    def model(samples: Sequence[Sample], step: int) -> Scored:
        calls.names.append("model")
        threads.append(threading.current_thread())
        return Scored(np.full(len(samples), float(step)))

    threads: list[threading.Thread] = []
    calls = Calls(model=TextPart(0.5, model, "model", on_device=True), function=TextPart(2.0, function, "function"))
    np.testing.assert_allclose(calls.iterate(), 2 * LENGTHS + 0.5 * 3)
    assert calls.names == ["logprobs", "logprobs", "values", "model"]
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()
    taken = calls.rewards.clock.take()
    assert set(taken) == {f"timing_s/{name}" for name in ("reward_functions", "reward_wait", "reward", "step")}
    assert calls.rewards.metrics()["rewards/function/mean"] == LENGTHS.mean()
    calls.rewards.close()
    assert not threads[0].is_alive()


def test_a_function_that_fails_stops_the_iteration_before_anything_is_trained():
    def function(samples: Sequence[Sample], step: int) -> Scored:
        raise RewardFailure("the judge is out")

    calls = Calls(function=TextPart(1.0, function, "function"))
    with pytest.raises(RewardFailure, match="the judge is out"):
        calls.iterate()
    assert calls.names == ["logprobs", "logprobs", "values"]
    calls.rewards.close()


def test_a_baseline_is_shaped_like_the_scores_and_counts_as_none_of_them():
    def function(samples: Sequence[Sample], step: int) -> Scored:
        return Scored(np.full(len(samples), 3.0), failures=Counter({"nan": 2}))

    calls = Calls(shaping=ScoreConfig(normalise=True, clip=2.0), function=TextPart(2.0, function, "function"))
    rewards = calls.rewards
    with jax.set_mesh(MESH):
        first, moments = rewards.score(rollout(), BATCH).result(), rewards.moments
        baseline = rewards.score_baseline(rollout(), BATCH).result()
        assert rewards.moments is moments and float(moments.mean) == 6.0
        np.testing.assert_array_equal(first, np.zeros(ROWS))
        np.testing.assert_array_equal(baseline, np.zeros(ROWS))
        rewards.score(rollout(), BATCH).result()
    said = rewards.metrics()
    assert said["critic/baseline/mean"] == 6.0 and said["rewards/function/mean"] == 3.0
    assert said["rewards/function/failures"] == 6.0 == said["rewards/function/failures/nan"]  # of all scorings
    with jax.set_mesh(MESH):
        rewards.restate(put_rows(np.arange(ROWS, dtype=np.float32), MESH))
    assert rewards.metrics()["critic/score/max"] == ROWS - 1 and np.asarray(rewards.raw)[1] == 1.0
    rewards.start(rewards.moments)
    assert rewards.metrics() == {}
    rewards.close()


@pytest.mark.parametrize("of_tokens", [False, True], ids=["of rows", "of tokens"])
def test_what_models_say_of_rows_is_added_to_what_is_said_of_texts(of_tokens):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, ROWS)).astype(np.float32)
    texts = rng.normal(size=(ROWS, 3)).astype(np.float32)
    texts = np.where(np.arange(3) < LENGTHS[:, None], texts, 0)
    given = texts if of_tokens else texts.sum(1)
    shape = partial(shape_scores, config=PLAIN, max_response=3)
    context = np.asarray(LENGTHS), np.ones(ROWS, bool), RunningMoments.create()
    weights, learned = {"a": 2.0, "b": -0.5}, {"a": first, "b": second}
    found = jax.jit(partial(combine, shape, "rewards", weights))(learned, given, *context)
    rows = 2 * first - second / 2
    np.testing.assert_allclose(found.raw, texts.sum(1) + rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.extremes["max"], np.max(texts.sum(1) + rows), rtol=1e-5)
    np.testing.assert_allclose(found.learned["rewards/b/mean"], second.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.learned["rewards/a/std"], first.std(), rtol=1e-5)
    if of_tokens:
        at_end = np.zeros((ROWS, 3), np.float32)
        at_end[np.arange(ROWS), LENGTHS - 1] = rows
        np.testing.assert_allclose(found.shaped, texts + at_end, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_allclose(found.shaped, texts.sum(1) + rows, rtol=1e-5, atol=1e-6)


def test_a_score_that_is_not_finite_leaves_the_others_in_the_metrics():
    texts: Any = np.arange(ROWS, dtype=np.float32)
    texts[[0, 2]] = np.nan, np.inf
    context: Any = np.asarray(LENGTHS), np.ones(ROWS, bool), RunningMoments.create()
    found = combine(partial(shape_scores, config=PLAIN, max_response=3), "rewards", {}, {}, texts, *context)
    finite = texts[np.isfinite(texts)]
    expected = {"mean": finite.mean(), "max": finite.max(), "min": finite.min(), "nonfinite": 2.0}
    assert {name: float(x) for name, x in found.extremes.items()} == pytest.approx(expected)
    assert float(found.shaping["score/raw/mean"]) == pytest.approx(finite.mean())
    np.testing.assert_array_equal(found.raw, texts)


def test_costs_have_names_of_their_own():
    def function(samples: Sequence[Sample], step: int) -> Scored:
        return Scored(np.arange(len(samples), dtype=float))

    calls = Calls(kind="costs", words=TextPart(0.5, function, "words"))
    with jax.set_mesh(MESH):
        np.testing.assert_allclose(calls.rewards.score(rollout(), BATCH).result(), np.arange(ROWS) / 2)
    said = calls.rewards.metrics()
    assert set(said) == {
        "cost/mean",
        "cost/max",
        "cost/min",
        "cost/nonfinite",
        *(f"costs/words/{x}" for x in ("mean", "std", "failures")),
    }
    assert said["cost/max"] == 3.5
    calls.rewards.close()
