"""Advantages by GAE, by groups and by returns, against NumPy one token and one group at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import make_mesh
from jrlhf.ppo import gae, group_advantages, returns_to_go
from jrlhf.ppo.advantages import group_spread

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def numpy_gae(rewards, values, mask, discount, lam, bootstrap=0.0):
    """The textbook form, forwards and in float64: A_t = sum_k (discount lam)^k delta_{t+k} over the actions."""
    actions = np.flatnonzero(mask)
    r, v = rewards[actions].astype(np.float64), values[actions].astype(np.float64)
    following = np.append(v[1:], bootstrap)
    deltas = r + discount * following - v
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    for i, t in enumerate(actions):
        advantages[t] = sum((discount * lam) ** (j - i) * deltas[j] for j in range(i, len(actions)))
        returns[t] = advantages[t] + v[i]
    return advantages, returns


def case(seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 6, 12)).astype(np.float32)
    mask = rng.random((6, 12)) < 0.6  # gaps everywhere
    mask[0], mask[1], mask[2] = True, False, np.arange(12) == 4
    return rewards, values, mask, rng.normal(size=6).astype(np.float32)


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.97, 0.0)])
def test_matches_the_textbook_sum_over_gaps(discount, lam):
    rewards, values, mask, bootstrap = case(0)
    batched = jax.jit(jax.vmap(partial(gae, discount=discount, lam=lam)))
    advantages, returns = batched(rewards, values, mask, bootstrap_value=bootstrap)
    for row in range(len(mask)):
        expected = numpy_gae(rewards[row], values[row], mask[row], discount, lam, bootstrap[row])
        np.testing.assert_allclose(advantages[row], expected[0], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(returns[row], expected[1], rtol=2e-5, atol=2e-6)
    assert np.all(np.asarray(advantages)[~mask] == 0) and np.all(np.asarray(returns)[~mask] == 0)


def test_what_stands_in_a_gap_has_no_influence():
    rewards, values, mask, _ = case(3)
    batched = jax.jit(jax.vmap(partial(gae, discount=0.9, lam=0.8)))
    clean, dirty = (
        batched(np.where(mask, rewards, np.float32(r)), np.where(mask, values, np.float32(v)), mask)
        for r, v in ((0, 0), (np.nan, np.inf))
    )
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_hand_computed_golden():
    # discount 0.5, lambda 0.5, by hand, from the right: delta_3 = 4 + 0.5*2 - 1 = 4 and A_3 = 4; position 2 is a gap;
    # delta_1 = 1 + 0.5*1 - 2 = -0.5 and A_1 = -0.5 + 0.25*4 = 0.5; delta_0 = 0 + 0.5*2 - 0 = 1 and A_0 = 1.125.
    advantages, returns = gae(
        jnp.array([0.0, 1.0, 99.0, 4.0]),
        jnp.array([0.0, 2.0, 99.0, 1.0]),
        jnp.array([True, True, False, True]),
        discount=0.5,
        lam=0.5,
        bootstrap_value=jnp.float32(2),
    )
    np.testing.assert_array_equal(advantages, [1.125, 0.5, 0, 4])
    np.testing.assert_array_equal(returns, [1.125, 2.5, 0, 5])


def test_refuses_a_batch():
    with pytest.raises(AssertionError, match="rank"):
        gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3), bool), discount=1.0, lam=1.0)


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


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
@pytest.mark.parametrize("divide_by_std", [False, True])
def test_groups_match_numpy(baseline, divide_by_std):
    rng = np.random.default_rng(0)
    scores, mask = rng.normal(size=40).astype(np.float32), rng.random(40) < 0.6
    mask[:4], mask[4:8], mask[8:12] = True, False, [False, True, False, False]
    for counts in (mask, np.ones(40, bool)):
        given = np.where(counts, scores, np.nan).astype(np.float32)
        options = {"baseline": baseline, "divide_by_std": divide_by_std}
        got = grouped(jnp.asarray(given), 4, **options, mask=None if counts.all() else jnp.asarray(counts))
        expected = numpy_group(scores.astype(np.float64), 4, baseline, divide_by_std, counts)
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
    std, equal = group_spread(given, 3, jnp.asarray(counted.ravel()))
    np.testing.assert_allclose(std, [scores[0].std(ddof=1), 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(equal, [False, True, True, True])
    std, equal = group_spread(jnp.asarray(scores.ravel()), 3)
    np.testing.assert_allclose(std, scores.std(1, ddof=1), rtol=1e-6)
    assert not equal.any()


def test_rows_that_do_not_divide_are_one_clear_error():
    with pytest.raises(ValueError, match="10 rows do not divide into groups of samples=4"):
        group_advantages(jnp.zeros(10), 4, divide_by_std=True)


@pytest.mark.parametrize(("axis_type", "samples"), [(AxisType.Auto, 2), (AxisType.Explicit, 8)])
def test_a_group_may_lie_on_several_devices(axis_type, samples):
    scores = np.random.default_rng(1).normal(size=8).astype(np.float32)
    mesh = make_mesh(data=2, fsdp=2, tensor=2, axis_type=axis_type)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(("data", "fsdp", "tensor")))
        masked = jax.device_put(np.arange(8) != 5, rows)
        got = grouped(jax.device_put(scores, rows), samples, divide_by_std=True, mask=masked)
        if axis_type == AxisType.Explicit:
            assert got.sharding == rows
        expected = numpy_group(scores.astype(np.float64), samples, "mean", True, np.arange(8) != 5)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_returns_are_sums_over_what_follows(discount):
    rng = np.random.default_rng(2)
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
