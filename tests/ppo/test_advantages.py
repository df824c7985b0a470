from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import gae

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
