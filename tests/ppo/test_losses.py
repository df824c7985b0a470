"""Edges of losses, of estimates of the KL and of the KL controller. Goldens have their values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import KLState, PPOConfig, bradley_terry_loss, kl_estimate, policy_loss, update_kl, value_loss

pytestmark = pytest.mark.usefixtures("strict_dtypes")
ZERO = np.zeros(5, np.float32)
estimate = jax.jit(kl_estimate, static_argnums=2)
controlled: Any = jax.jit(update_kl, static_argnums=2, static_argnames="config")


def test_exactly_on_a_clip_boundary_the_gradient_is_unclipped():
    """exp(log 0.5) and exp(log 2) are exact in float32; jnp.maximum would halve the gradient here."""
    ratio, advantage = np.array([0.5, 2], np.float32), jnp.array([-1.0, 1.0])

    def loss(logprob):
        parts = policy_loss(logprob, jnp.zeros(2), advantage, clip_low=0.5, clip_high=1.0)
        return jnp.sum(parts.loss), parts.ratio

    gradient, exact = jax.jit(jax.grad(loss, has_aux=True))(np.log(ratio))
    np.testing.assert_array_equal(exact, ratio)
    np.testing.assert_array_equal(gradient, -advantage * ratio)


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
    d = np.array([0.0, 0.5, -0.5, 40.0, -40.0], np.float32)
    np.testing.assert_array_equal(estimate(d, ZERO, "k1"), d)
    np.testing.assert_array_equal(estimate(d, ZERO, "k2"), d**2 / 2)
    k3 = estimate(d, ZERO, "k3")
    np.testing.assert_allclose(k3, [0, np.exp(-0.5) - 0.5, np.exp(0.5) - 1.5, 10, 10], rtol=1e-6)
    with pytest.raises(ValueError, match="k4"):
        estimate(d, ZERO, "k4")


def test_k3_keeps_its_digits_where_policies_hardly_differ():
    d = np.array([0, 1e-2, -2e-3, 5e-4, -1e-5], np.float32)
    exact, k3 = np.expm1(-d.astype(np.float64)) + d, estimate(d, ZERO, "k3")
    np.testing.assert_allclose(k3, exact, rtol=2e-2)
    np.testing.assert_allclose(k3[:4], exact[:4], rtol=1e-3)


def test_k3_has_a_bound_and_beyond_it_no_gradient():
    both = jax.jit(jax.vmap(jax.value_and_grad(lambda d: kl_estimate(d, jnp.float32(0), "k3"))))
    values, slopes = both(np.array([-2.6, 10.99, -2.7, 11.01], np.float32))
    assert np.all(values[:2] < 10) and np.all(slopes[:2] != 0) and not np.any(slopes[2:])


def test_fixed_controller_and_a_kl_that_is_not_finite():
    coef = jnp.float32(0.05)
    for kl, config in ((99, PPOConfig()), (np.nan, PPOConfig(kl_target=1.0)), (np.inf, PPOConfig(kl_target=1.0))):
        assert controlled(KLState(coef), np.float32(kl), 64, config=config).coef == coef


def test_a_horizon_that_could_turn_the_coefficient_negative_is_refused():
    config = PPOConfig(kl_target=4.0, kl_horizon=20.0)
    state, kl = KLState(jnp.float32(1)), np.float32(0)
    assert controlled(state, kl, 99, config=config).coef > 0
    with pytest.raises(ValueError, match="kl_horizon=20 must exceed a fifth of the 100 episodes"):
        controlled(state, kl, 100, config=config)
