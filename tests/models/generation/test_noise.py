"""Gumbel noise against JAX's: the same bits, and the same logarithms up to a rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models.generation.sampling import gumbel, largest, threefry2x32


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("keys", [jax.random.split(jax.random.key(3), 5), jax.random.split(jax.random.PRNGKey(4), 5)])
def test_noise_is_that_of_jax(keys, size):
    expected = jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)
    np.testing.assert_allclose(gumbel(keys, size), expected, rtol=2e-6, atol=1e-6)


def test_the_cipher_is_that_of_jax():
    key = jax.random.key(11)
    first, second = threefry2x32(
        tuple(jax.random.key_data(key)), (jnp.zeros(9, jnp.uint32), jnp.arange(9, dtype=jnp.uint32))
    )
    np.testing.assert_array_equal(first ^ second, jax.random.bits(key, (9,)))


def test_other_generators_keep_their_own_noise():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 5)
    np.testing.assert_array_equal(gumbel(keys, 9), jax.vmap(lambda key: jax.random.gumbel(key, (9,)))(keys))


def test_largest_is_argmax():
    x = np.random.default_rng(0).integers(0, 9, (50, 20)).astype(np.float32)  # with ties
    x[3, 4], x[5] = np.nan, -np.inf
    expected = np.argmax(x, axis=1)
    expected[3] = 0
    found = largest(jnp.asarray(x))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.int32
