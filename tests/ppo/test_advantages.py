"""Advantages by GAE, by groups and by returns. Goldens compare them with other libraries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo import gae, group_advantages, returns_to_go
from jrlhf.ppo.advantages import group_spread

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def test_hand_computed_golden():
    # discount 0.5, lambda 0.5, by hand, from the right: delta_3 = 4 + 0.5*2 - 1 = 4 and A_3 = 4; position 2 is a gap;
    # delta_1 = 1 + 0.5*1 - 2 = -0.5 and A_1 = -0.5 + 0.25*4 = 0.5; delta_0 = 0 + 0.5*2 - 0 = 1 and A_0 = 1.125.
    advantages, returns = gae(
        jnp.array([0.0, 1.0, jnp.nan, 4.0]),
        jnp.array([0.0, 2.0, jnp.inf, 1.0]),
        jnp.array([True, True, False, True]),
        discount=0.5,
        lam=0.5,
        bootstrap_value=jnp.float32(2),
    )
    np.testing.assert_array_equal(advantages, [1.125, 0.5, 0, 4])
    np.testing.assert_array_equal(returns, [1.125, 2.5, 0, 5])


def test_refuses_a_batch_and_takes_whole_numbers():
    with pytest.raises(ValueError, match=r"shape \(2, 3\), but one sequence \[T\] is expected: use jax.vmap"):
        gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3), bool), discount=1.0, lam=1.0)
    whole = np.array([3, 5, 1, 1])
    for dtype in (np.int32, np.int64, np.uint8):
        np.testing.assert_array_equal(
            grouped(whole.astype(dtype), samples=2, divide_by_std=True),
            grouped(whole.astype(np.float32), samples=2, divide_by_std=True),
        )


grouped = jax.jit(group_advantages, static_argnames=("samples", "baseline", "divide_by_std"))


def numpy_group(scores, samples, baseline, divide_by_std, mask):
    advantages = np.zeros(len(scores))
    for start in range(0, len(scores), samples):
        members = [i for i in range(start, start + samples) if mask[i]]
        for i in members:
            others = [scores[j] for j in members if j != i]
            if not others:
                continue
            everyone = [scores[j] for j in members]
            advantages[i] = scores[i] - np.mean(everyone if baseline == "mean" else others)
            if divide_by_std:
                advantages[i] /= np.std(everyone, ddof=1) + 1e-6
    return advantages


@pytest.mark.parametrize(("baseline", "divide_by_std"), [("mean", True), ("leave-one-out", False)])
def test_groups_match_numpy(baseline, divide_by_std):
    """Rows over all devices: a group may lie on several."""
    rng = np.random.default_rng(0)
    scores, mask = rng.normal(size=40).astype(np.float32), rng.random(40) < 0.6
    mask[:4], mask[4:8], mask[8:12] = True, False, [False, True, False, False]
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(("data", "fsdp", "tensor")))
        given = jax.device_put(np.where(mask, scores, np.nan).astype(np.float32), rows)
        options = {"baseline": baseline, "divide_by_std": divide_by_std, "mask": jax.device_put(mask, rows)}
        got = grouped(given, 4, **options)
        assert got.sharding == rows
        expected = numpy_group(scores.astype(np.float64), 4, baseline, divide_by_std, mask)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("value", [0.1, 1234.567, -3e7])
def test_equal_scores_teach_exactly_nothing(value):
    rounded = np.full(14, value, np.float32)
    rounded[9] = np.nextafter(rounded[9], np.float32(np.inf))  # the second group differs by rounding only
    for baseline in ("mean", "leave-one-out"):
        assert not np.any(grouped(jnp.asarray(rounded), 7, baseline=baseline, divide_by_std=True))
        assert not np.any(grouped(jnp.asarray(rounded[:7]), 7, baseline=baseline, divide_by_std=False))
    assert not np.any(grouped(jnp.asarray(rounded), 1, divide_by_std=True))


def test_a_bad_score_stays_in_its_group_and_is_not_hidden():
    scores = jnp.array([1.0, jnp.nan, 2.0, 4.0])
    got = np.asarray(grouped(scores, 2, divide_by_std=True))
    assert np.isnan(got[:2]).all() and np.isfinite(got[2:]).all()


def test_the_spread_is_of_the_rows_that_count():
    scores = np.array([[1.0, 2.0, 5.0], [0.7, 0.7, 9.0], [3.0, 4.0, 5.0], [1.0, 2.0, 3.0]], np.float32)
    counted = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]], bool)
    given = jnp.asarray(np.where(counted, scores, np.nan).ravel())
    spread = jax.jit(group_spread, static_argnums=1)
    std, equal = spread(given, 3, jnp.asarray(counted.ravel()))
    np.testing.assert_allclose(std, [scores[0].std(ddof=1), 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(equal, [False, True, True, True])
    std, equal = spread(jnp.asarray(scores.ravel()), 3)
    np.testing.assert_allclose(std, scores.std(1, ddof=1), rtol=1e-6)
    assert not equal.any()


def test_rows_that_do_not_divide_are_one_clear_error():
    with pytest.raises(ValueError, match="10 rows do not divide into groups of samples=4"):
        group_advantages(jnp.zeros(10), 4, divide_by_std=True)


def test_returns_are_sums_over_what_follows():
    discount, rng = 0.9, np.random.default_rng(2)
    rewards, mask = rng.normal(size=(5, 11)).astype(np.float32), rng.random((5, 11)) < 0.6
    mask[0], mask[1] = False, np.arange(11) == 3
    given = np.where(mask, rewards, np.nan).astype(np.float32)
    got = np.asarray(jax.jit(jax.vmap(partial(returns_to_go, discount=discount)))(given, mask))
    for row in range(5):
        actions = np.flatnonzero(mask[row])
        for i, t in enumerate(actions):
            expected = sum(discount**k * rewards[row, s] for k, s in enumerate(actions[i:]))
            np.testing.assert_allclose(got[row, t], expected, rtol=1e-5, atol=1e-5)
    assert not np.any(got[~mask])
