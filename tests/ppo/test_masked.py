import jax
import numpy as np
import pytest

from jrlhf.ppo import masked_mean, masked_variance, masked_whiten
from jrlhf.ppo.masked import last_token_mask, token_count

pytestmark = pytest.mark.usefixtures("strict_dtypes")
whiten = jax.jit(masked_whiten, static_argnames="shift_mean")


@jax.jit
def statistics(x, mask):
    return masked_mean(x, mask), masked_variance(x, mask), masked_whiten(x, mask)


def test_last_token_is_the_last_true_also_behind_gaps():
    mask = np.array([[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]], bool)
    expected = [[0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(jax.jit(last_token_mask)(mask), np.array(expected, bool))


def test_statistics_match_numpy_and_ignore_what_is_masked():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (5, 7)).astype(np.float32)
    mask = rng.random((5, 7)) < 0.6
    poisoned = np.where(mask, x, np.float32(np.nan))
    selection = x[mask].astype(np.float64)
    mean, variance, whitened = map(np.asarray, statistics(poisoned, mask))
    np.testing.assert_allclose(mean, selection.mean(), rtol=1e-6)
    np.testing.assert_allclose(variance, selection.var(ddof=1), rtol=1e-5)
    expected = (selection - selection.mean()) / np.sqrt(selection.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whitened[mask], expected, rtol=1e-4, atol=1e-6)
    assert np.all(whitened[~mask] == 0)
    unshifted = whiten(poisoned, mask, shift_mean=False)
    np.testing.assert_allclose(np.asarray(unshifted)[mask], expected + selection.mean(), rtol=1e-4)


def test_fewer_than_two_elements_are_defined():
    for count in (0, 1):
        mean, variance, whitened = statistics(np.array([5, 7, 11], np.float32), np.arange(3) < count)
        np.testing.assert_array_equal(whitened, np.zeros(3))
        assert variance == 0 and mean == (5.0 if count else 0.0)


def test_equal_elements_are_nothing_whatever_their_scale():
    """No value is a binary fraction: the mean is off by rounding, which the division would blow up."""
    mask, odd = np.arange(1000) % 7 > 0, (np.arange(1000) % 2).astype(np.float32)
    for value in np.array([0.1, 123.456, 1000.3, -3e7], np.float32):
        equal = np.where(mask, value, np.float32(np.nan))
        near = equal.copy()
        near[500] = np.nextafter(value, np.float32(np.inf))
        for x in (equal, near):
            assert not np.any(whiten(x, mask))
            np.testing.assert_allclose(np.asarray(whiten(x, mask, shift_mean=False))[mask], value, rtol=1e-5)
        spread = np.where(mask, equal * (1 + np.float32(1e-2) * odd), 0)  # not rounding any more
        assert np.abs(np.asarray(whiten(spread, mask))[mask]).mean() > 0.5


def test_a_bad_element_is_not_hidden():
    assert np.isnan(statistics(np.array([1, np.nan, 1], np.float32), np.ones(3, bool))[2]).all()


def test_counts_are_exact_integers():
    count = jax.jit(token_count)
    assert (count(np.ones((3, 5), bool)), count(np.zeros((3, 5), bool))) == (15, 1)
