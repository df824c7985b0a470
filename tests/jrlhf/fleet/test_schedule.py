"""The rules of an asynchronous run, against their definitions; `test_simulate.py` plays the others."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.fleet.schedule import Rules, first_batch, fresh
from jrlhf.ppo import Experience
from jrlhf.ppo.off_policy import without_older


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
