import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import masked_mean, masked_variance, masked_whiten, response_mask
from jrlhf.ppo.masked import last_token_mask, token_count

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def test_response_mask_counts_from_lengths():
    mask = response_mask(jnp.array([1, 3, 2, 5]), jnp.array([2, 0, 4, 1]), 6)
    expected = [[0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(mask, np.array(expected, bool))


def test_last_token_is_the_last_true_also_behind_gaps():
    mask = jnp.array([[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]], bool)
    expected = [[0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(last_token_mask(mask), np.array(expected, bool))


def test_statistics_match_numpy_and_ignore_what_is_masked():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (5, 7)).astype(np.float32)
    mask = rng.random((5, 7)) < 0.6
    poisoned = np.where(mask, x, np.nan)
    selection = x[mask].astype(np.float64)
    np.testing.assert_allclose(masked_mean(jnp.asarray(poisoned), jnp.asarray(mask)), selection.mean(), rtol=1e-6)
    np.testing.assert_allclose(
        masked_variance(jnp.asarray(poisoned), jnp.asarray(mask)), selection.var(ddof=1), rtol=1e-5
    )
    expected = (selection - selection.mean()) / np.sqrt(selection.var(ddof=1) + 1e-8)
    whitened = np.asarray(masked_whiten(jnp.asarray(poisoned), jnp.asarray(mask)))
    np.testing.assert_allclose(whitened[mask], expected, rtol=1e-4, atol=1e-6)
    assert np.all(whitened[~mask] == 0)
    unshifted = masked_whiten(jnp.asarray(poisoned), jnp.asarray(mask), shift_mean=False)
    np.testing.assert_allclose(np.asarray(unshifted)[mask], expected + selection.mean(), rtol=1e-4)


def test_row_means_have_row_denominators():
    x, mask = jnp.array([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), jnp.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(masked_mean(x, mask, axis=1), [1.5, 4.0])


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_elements_are_defined(count):
    x = jnp.array([5.0, 7.0, 11.0])
    mask = jnp.arange(3) < count
    np.testing.assert_array_equal(masked_whiten(x, mask), np.zeros(3))
    assert masked_variance(x, mask) == 0
    assert masked_mean(x, mask) == (5.0 if count else 0.0)


@pytest.mark.parametrize("value", [0.1, 123.456, 1000.3, -3e7])
def test_equal_elements_are_nothing_whatever_their_scale(value):
    """None is a binary fraction: their mean is off by rounding, which the division would blow up."""
    mask = jnp.arange(1000) % 7 > 0
    equal = jnp.where(mask, jnp.full(1000, value, jnp.float32), jnp.nan)
    near = equal.at[500].set(jnp.nextafter(jnp.float32(value), jnp.float32(jnp.inf)))
    for x in (equal, near):
        assert not np.any(masked_whiten(x, mask))
        unshifted = np.asarray(masked_whiten(x, mask, shift_mean=False))
        np.testing.assert_allclose(unshifted[mask], np.float32(value), rtol=1e-5)
    odd = (jnp.arange(1000) % 2).astype(jnp.float32)
    spread = jnp.where(mask, equal * (1 + 1e-2 * odd), 0)  # not rounding any more
    assert np.abs(np.asarray(masked_whiten(spread, mask))[mask]).mean() > 0.5


def test_a_bad_element_is_not_hidden():
    assert np.isnan(masked_whiten(jnp.array([1.0, jnp.nan, 1.0]), jnp.ones(3, bool))).all()


def test_counts_are_exact_integers():
    assert token_count(jnp.ones((3, 5), bool)) == 15
    assert token_count(jnp.zeros((3, 5), bool)) == 1
