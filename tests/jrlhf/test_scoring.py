"""Rewards of an iteration: functions run beside the roles' calls, models of text in order with them."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.batches import put_rows
from jrlhf.data.types import Example
from jrlhf.meshes import make_mesh
from jrlhf.ppo import Rollout, RunningMoments
from jrlhf.ppo.shaping import ScoreConfig
from jrlhf.programs import Compute
from jrlhf.rewards.functions import RewardFailure
from jrlhf.rewards.types import Sample, Scored
from jrlhf.rl import ppo_iteration
from jrlhf.scoring import Batch, Rewards, TextPart

MESH, ROWS = make_mesh(8, 1, 1), 8
BATCH = Batch(cast(Any, ()), [Example(prompt="p")] * ROWS, ["p"] * ROWS, step=3)
LENGTHS = np.arange(ROWS, dtype=np.int32) % 3 + 1


def rollout() -> Rollout:
    tokens = np.tile(np.arange(4, dtype=np.int32), (ROWS, 1))
    prompts = np.ones(ROWS, np.int32)
    finished = np.ones(ROWS, bool)
    placed = put_rows((tokens, prompts, LENGTHS, np.zeros((ROWS, 4), np.float32), finished), MESH)
    return Rollout(*placed, version=jnp.zeros((), jnp.int32))


class Calls:
    """Roles that only note the order of their calls, and what the functions of text do meanwhile."""

    def __init__(self, **parts: TextPart):
        self.names: list[str] = []
        self.dispatched = threading.Event()
        context = SimpleNamespace(
            mesh=MESH,
            compute=Compute(),
            task=SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "x" * len(ids))),
            config=SimpleNamespace(
                deadline=10.0, data=SimpleNamespace(max_response=3), ppo=SimpleNamespace(scores=ScoreConfig())
            ),
        )
        self.rewards = Rewards(cast(Any, context), None, {}, parts)
        self.rewards.moments = jax.device_put(RunningMoments.create())

    def iterate(self) -> Any:
        """The scores that an iteration makes experience of."""
        roles = SimpleNamespace(
            generate=lambda *_: rollout(),
            logprobs=lambda _: self.names.append("logprobs"),
            values=lambda _: (self.names.append("values"), self.dispatched.set()),
            update=lambda _: {},
            is_base_of=lambda _: False,
        )
        any_role = cast(Any, roles)
        self.rewards.clock.start()
        with jax.set_mesh(MESH):
            experience = lambda _, scores, *__, **___: scores  # noqa: E731
            return ppo_iteration(any_role, any_role, any_role, self.rewards, BATCH, experience)[0]


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
