"""DAPO's dynamic sampling: the groups that fill a batch, round by round."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.algorithms.dynamic_sampling import DynamicSampler, informative
from jrlhf.data.batches import Batch, put_rows, row_sharding
from jrlhf.meshes import make_mesh
from jrlhf.ppo import DAPOConfig, Rollout
from jrlhf.roles.placement import Pending, RolePlacement
from jrlhf.run.clock import Clock

MESH, SAMPLES, ROWS = make_mesh(2, 4, 1), 2, 8  # a prompt's two rows are on two devices
ALL = [0.0, 1.0] * 4


def a_round(number: int, scores: list[float]) -> tuple[Rollout, jax.Array, Batch]:
    """A rollout whose arrays contain the numbers of their round and row."""
    own = 100 * number + np.arange(ROWS, dtype=np.int32)
    tokens, floats = np.tile(own[:, None], (1, 4)), np.tile(own[:, None], (1, 4)).astype(np.float32)
    placed = put_rows((tokens, own, own + 1, floats, own % 2 == 0), MESH)
    texts = [str(row) for row in own]
    batch = Batch(cast(Any, ()), cast(Any, texts), texts, number)
    rollout = Rollout(*placed, version=jnp.int32(number), versions=placed[0])
    return rollout, put_rows(np.array(scores, np.float32), MESH), batch


def fill(rounds: list[list[float]], *, max_rounds: int = 10) -> tuple[DynamicSampler, Rollout, jax.Array]:
    """An iteration of DAPO as far as its batch."""
    drawn = [a_round(number, scores) for number, scores in enumerate(rounds)]
    rewards: Any = SimpleNamespace(raw={}, parts={})
    with jax.set_mesh(MESH):
        algorithm = DAPOConfig(samples=SAMPLES, max_rounds=max_rounds)
        sampler = DynamicSampler(RolePlacement.of(MESH), algorithm, Clock(), rewards)
        sampler.start(7, lambda number: drawn[number - 7][2])
        while sampler.wants_more():
            prompts = sampler.draw()
            rollout, raw, _ = drawn[prompts.step]
            rewards.raw[prompts.step], rewards.parts[prompts.step] = raw, {"double": 2 * np.asarray(raw)}
            scores = Pending(lambda raw=raw: raw + 0.5)  # as if scores were shaped
            batch = sampler.keep(rollout, cast(Any, scores), prompts)
        rollout, scores = sampler.batch(batch)
    return sampler, rollout, scores


def of_rounds(sampler: DynamicSampler) -> dict[str, float]:
    return {name: float(x) for name, x in sampler.metrics().items() if name.startswith("dapo/")}


def test_groups_of_equal_scores_give_their_places_to_later_ones():
    sampler, rollout, scores = fill([[0, 1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 0, 0], ALL])
    rows = [0, 1, 102, 103, 200, 201, 6, 7]  # the second and third group were dull; round 1 had one other, then round 2
    np.testing.assert_array_equal(rollout.tokens[:, 0], rows)
    np.testing.assert_array_equal(rollout.versions, rollout.tokens)
    np.testing.assert_array_equal(rollout.prompt_lengths, rows)
    np.testing.assert_array_equal(rollout.finished, np.array(rows) % 2 == 0)
    np.testing.assert_array_equal(sampler.raw, [0, 1, 0, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(scores, sampler.raw + 0.5)
    np.testing.assert_array_equal(sampler.parts["double"], 2 * sampler.raw)
    assert [*sampler.prompts.texts] == [*sampler.prompts.examples] == [str(row) for row in rows]
    assert sampler.draws == 10 and rollout.tokens.sharding.is_equivalent_to(row_sharding(MESH), 2)
    assert of_rounds(sampler) == {"dapo/rounds": 3.0, "dapo/informative": 7 / 12, "dapo/filled": 0.0}
    assert float(sampler.metrics()["critic/score/mean"]) == 0.5  # of the batch, not of the last round


def test_after_the_last_round_the_rest_stays_as_it_came():
    dull = [1.0] * ROWS
    sampler, rollout, _ = fill([dull, [0.0, 1.0] + dull[2:], ALL], max_rounds=2)
    np.testing.assert_array_equal(rollout.tokens[:, 0], [100, 101, 2, 3, 4, 5, 6, 7])
    assert of_rounds(sampler) == {"dapo/rounds": 2.0, "dapo/informative": 1 / 8, "dapo/filled": 0.75}
    for scores in ([0.1] * 4, [0.3, 0.3, -2.0, -2.0]):
        assert not informative(np.array(scores, np.float32), 2).any()


def test_a_score_that_is_not_finite_makes_a_group_neither_dull_nor_informative():
    nan, inf = np.nan, np.inf
    scores = np.array([[nan, 1, 0], [nan, 1, 1], [inf, 0, 0], [inf, 0, 1], [nan, 1, inf], [nan] * 3], np.float32)
    np.testing.assert_array_equal(informative(scores.ravel(), 3), [True, False, False, True, False, False])
