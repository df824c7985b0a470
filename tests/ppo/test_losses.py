"""Edges of losses, of estimates of the KL and of the KL controller. Goldens have their values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import KLState, PPOConfig, bradley_terry_loss, kl_estimate, policy_loss, update_kl, value_loss

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.mark.parametrize(("low", "high", "advantage"), [(0.5, 0.2, -1.0), (0.2, 1.0, 1.0)])
def test_exactly_on_a_clip_boundary_the_gradient_is_unclipped(low, high, advantage):
    # exp(log 0.5) and exp(log 2) are exact in float32; jnp.maximum would halve the gradient here.
    ratio = 0.5 if advantage < 0 else 2.0

    def loss(logprob):
        return policy_loss(logprob, jnp.float32(0), jnp.float32(advantage), clip_low=low, clip_high=high).loss

    logprob = jnp.log(jnp.float32(ratio))
    assert jnp.exp(logprob) == ratio
    assert jax.jit(jax.grad(loss))(logprob) == -advantage * ratio


def test_extreme_log_ratios_stay_finite():
    logprobs, old = jnp.array([-1e4, -0.0, -1e30]), jnp.array([0.0, -1e4, 0.0])
    run = jax.jit(jax.value_and_grad(lambda x, a: jnp.sum(policy_loss(x, old, a).loss)))
    for advantage in (1.0, -1.0):
        value, gradient = run(logprobs, np.full(3, advantage, np.float32))
        assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_value_loss_without_clip_is_half_the_squared_error():
    parts = value_loss(jnp.array([3.0, -1.0]), jnp.zeros(2), jnp.array([1.0, -1.0]), clip=None)
    np.testing.assert_array_equal(parts.loss, [2.0, 0.0])
    assert not parts.clipped.any()


def test_bradley_terry_has_a_gradient_at_any_margin():
    # d/d chosen = -(1 - sigmoid(margin)), d/d rejected = the opposite.
    gradient = jax.jit(jax.grad(lambda c, r: jnp.sum(bradley_terry_loss(c, r)), argnums=(0, 1)))
    chosen, rejected = gradient(np.array([1000, -1000, 0], np.float32), np.zeros(3, np.float32))
    np.testing.assert_array_equal(chosen, [0.0, -1.0, -0.5])
    np.testing.assert_array_equal(rejected, [0.0, 1.0, 0.5])


def test_values_and_bounds():
    d = jnp.array([0.0, 0.5, -0.5, 40.0, -40.0])
    zero = jnp.zeros(5)
    np.testing.assert_array_equal(kl_estimate(d, zero, "k1"), d)
    np.testing.assert_array_equal(kl_estimate(d, zero, "k2"), d**2 / 2)
    k3 = kl_estimate(d, zero, "k3")
    np.testing.assert_allclose(k3, [0, np.exp(-0.5) - 0.5, np.exp(0.5) - 1.5, 10, 10], rtol=1e-6)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(d, zero, "k4")  # pyright: ignore[reportArgumentType]


def test_k3_keeps_its_digits_where_policies_hardly_differ():
    d = np.array([1e-2, -2e-3, 5e-4, -1e-5], np.float32)
    exact = np.expm1(-d.astype(np.float64)) + d
    np.testing.assert_allclose(jax.jit(kl_estimate, static_argnums=2)(d, jnp.zeros(4), "k3"), exact, rtol=2e-2)
    np.testing.assert_allclose(kl_estimate(jnp.asarray(d[:3]), jnp.zeros(3), "k3"), exact[:3], rtol=1e-3)


@pytest.mark.parametrize(("inside", "beyond"), [(-2.6, -2.7), (10.99, 11.01)])
def test_k3_has_a_bound_and_beyond_it_no_gradient(inside, beyond):
    slope = jax.jit(jax.grad(lambda d: kl_estimate(d, jnp.float32(0), "k3")))
    assert slope(jnp.float32(inside)) != 0 and slope(jnp.float32(beyond)) == 0
    assert kl_estimate(jnp.float32(inside), jnp.float32(0), "k3") < 10


def test_fixed_controller_and_a_kl_that_is_not_finite():
    state = KLState(jnp.float32(0.05))
    assert update_kl(state, jnp.float32(99.0), 64, config=PPOConfig()).coef == state.coef
    adaptive = PPOConfig(kl_target=1.0)
    for kl in (jnp.nan, jnp.inf):
        assert update_kl(state, jnp.float32(kl), 64, config=adaptive).coef == state.coef


def test_a_horizon_that_could_turn_the_coefficient_negative_is_refused():
    config = PPOConfig(kl_target=4.0, kl_horizon=20.0)
    safe = update_kl(KLState(jnp.float32(1.0)), jnp.float32(0.0), 99, config=config)
    assert safe.coef > 0
    with pytest.raises(ValueError, match="kl_horizon=20 must exceed a fifth of the 100 episodes"):
        update_kl(KLState(jnp.float32(1.0)), jnp.float32(0.0), 100, config=config)
