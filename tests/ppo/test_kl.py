import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import KLState, PPOConfig, kl_estimate, update_kl

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def distributions(seed, size=7):
    rng = np.random.default_rng(seed)
    # Near enough that no k3 reaches its bound.
    return jax.nn.log_softmax(jnp.asarray(rng.uniform(-1, 1, (2, size)), jnp.float32))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_unbiased_by_enumeration(estimator, seed):
    p, q = distributions(seed)
    exact = np.sum(np.exp(p) * (p - q))
    np.testing.assert_allclose(jnp.sum(jnp.exp(p) * kl_estimate(p, q, estimator)), exact, rtol=1e-5)


def test_k2_gradient_is_the_gradient_of_the_exact_kl():
    # E_p[d k2] = E_p[d * grad log p] = grad KL(p, q): why k2 is the estimator to differentiate.
    p, q = distributions(1)

    def weighted(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(jax.lax.stop_gradient(logp)) * kl_estimate(logp, q, "k2"))

    def exact(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - q))

    np.testing.assert_allclose(jax.grad(weighted)(p), jax.grad(exact)(p), rtol=1e-5, atol=1e-7)


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
    slope = jax.grad(lambda d: kl_estimate(d, jnp.float32(0), "k3"))
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
