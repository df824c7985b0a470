"""The rules of an asynchronous run, against their definitions."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.fleet.schedule import Rules, first_batch, fresh, may_start, may_swap
from jrlhf.ppo import Experience
from jrlhf.ppo.off_policy import without_older


def test_admission_is_areals_inequality():
    for batch, staleness, started, version in itertools.product((1, 3, 8), (0, 1, 4), range(60), range(5)):
        submitted = started + 1  # the group to be admitted included: floor((N - 1) / B) <= i + eta
        assert may_start(Rules(batch, staleness, 1.0), started, version) == (
            (submitted - 1) // batch <= version + staleness
        )


def test_a_batch_is_the_groups_that_were_complete_first():
    assert first_batch([(3.0, 0), (1.0, 1)], Rules(3, 0, 1.0)) is None
    complete = [(3.0, 0), (1.0, 5), (2.0, 4), (2.0, 3), (2.0, 9)]
    assert first_batch(complete, Rules(3, 0, 1.0)) == (2.0, [3, 4, 5])
    rng = np.random.default_rng(0)
    for _ in range(50):
        complete = [(float(time), number) for number, time in enumerate(rng.integers(0, 9, 20))]
        batch = first_batch([complete[index] for index in rng.permutation(20)], Rules(7, 0, 1.0))
        assert batch is not None
        time, numbers = batch
        others = [item for item in complete if item[1] not in numbers]
        assert numbers == sorted(set(numbers)) and len(numbers) == 7
        assert time == max(complete[number][0] for number in numbers)
        assert max(complete[number] for number in numbers) < min(others)


def test_tokens_within_the_bound_are_fresh():
    versions = np.array([[5, 6, 7], [3, 4, 5]])
    np.testing.assert_array_equal(fresh(versions, 7, 2), [[True, True, True], [False, False, True]])
    np.testing.assert_array_equal(fresh(versions, np.array([[7], [5]]), 1), [[False, True, True], [False, True, True]])


@pytest.mark.parametrize("staleness", [1, 9])
def test_the_loss_learns_from_the_tokens_that_are_fresh(staleness):
    """`without_older` of the trainer and `fresh` of the simulator are one rule. Fresh tokens keep their weights."""
    rng, step = np.random.default_rng(0), 7
    versions = rng.integers(0, step + 1, (5, 6)).astype(np.int32)
    weights = rng.uniform(0.5, 2, versions.shape).astype(np.float32)
    fields = {field.name: jnp.zeros(versions.shape) for field in dataclasses.fields(Experience)}
    experience = Experience(**fields | {"versions": jnp.asarray(versions), "importance": jnp.asarray(weights)})
    masked = without_older(experience, experience.ages(jnp.int32(step)), staleness).importance
    np.testing.assert_array_equal(masked, np.where(fresh(versions, step, staleness), weights, 0))
    assert (staleness == 9) == bool(np.all(masked))


def test_only_finish_waits_for_running_rows():
    assert not may_swap("finish", 3) and may_swap("finish", 0)
    assert all(may_swap(name, rows) for name in ("keep_cache", "prefill_again") for rows in (0, 3))
