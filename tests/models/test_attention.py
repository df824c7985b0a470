"""Rotary positions, attention against a cache, and the choice of an implementation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models.attention import attention, cached_attention, default_attention, rotate, rotation
from jrlhf.models.cache import LayerCache, append, prefill

B, T, N, K, H = 3, 7, 4, 2, 8


def normal(*shape) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_rotated_scores_depend_on_the_distance_only():
    query, key = normal(1, 1, 1, H), normal(1, 1, 1, H + 2)[..., :H]

    def score(at_query, at_key):
        q, k = (rotate(x, rotation(jnp.full((1, 1), at), H, 10000.0)) for x, at in ((query, at_query), (key, at_key)))
        return float((q * k).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)
    assert score(6, 6) == pytest.approx(float((query * key).sum()), abs=1e-5)


def test_bfloat16_activations_are_turned_by_exact_angles():
    x = jnp.ones((1, 2, 1, H), jnp.bfloat16)
    turned = rotate(x, rotation(jnp.array([[256, 257]]), H, 10000.0))
    assert turned.dtype == jnp.bfloat16
    angles = np.array([256.0, 257.0])[:, None] * 10000.0 ** (-np.arange(0, H, 2) / H)[None, :]
    expected = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], -1)
    np.testing.assert_allclose(turned[0, :, 0].astype(np.float32), expected, atol=0.01)


def test_attention_against_a_cache_is_the_last_row_of_causal_attention():
    query, key, value = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H + 1)[..., :H]
    whole = attention(query, key, value)
    lengths: Any = np.array([1, 4, 7])  # tokens before and with the new one
    last = lengths - 1
    rows = np.arange(B)
    # The cache holds the rows up to their lengths, and rubbish behind.
    garbage = np.where(np.arange(T)[None, :] < last[:, None], 0, 1e3)[:, :, None, None].astype(np.float32)
    cache = prefill(key + garbage, value + garbage, size=T + 2)
    cache = append(cache, key[rows, last][:, None], value[rows, last][:, None], last)
    actual = cached_attention(query[rows, last][:, None], cache, lengths)
    np.testing.assert_allclose(actual[:, 0], whole[rows, last], atol=1e-6)


def test_a_cache_is_written_at_each_rows_position_only():
    cache = LayerCache(jnp.zeros((B, K, T, H)), jnp.zeros((B, K, T, H)))
    positions: Any = np.array([0, 3, 6])
    key, value = normal(B, 1, K, H), normal(B, 1, K, H + 1)[..., :H]
    written = append(cache, key, value, positions)
    for actual, new in zip(written, (key, value), strict=True):
        expected = np.zeros((B, K, T, H), np.float32)
        expected[np.arange(B), :, positions] = new[:, 0]
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "expected"),
    [
        ("cpu", jnp.bfloat16, 128, "xla"),
        ("tpu", jnp.bfloat16, 128, "xla"),
        ("gpu", jnp.bfloat16, 128, "cudnn"),
        ("gpu", jnp.float16, 256, "cudnn"),
        ("gpu", jnp.float32, 128, "xla"),
        ("gpu", jnp.bfloat16, 264, "xla"),
        ("gpu", jnp.bfloat16, 12, "xla"),
    ],
)
def test_cudnn_is_chosen_where_it_can_run(backend, dtype, head_dim, expected):
    assert default_attention(backend, jnp.dtype(dtype), head_dim) == expected


def test_gradients_pass_through_rotation_unscaled():
    positions = rotation(jnp.arange(5)[None], H, 10000.0)
    _, pullback = jax.vjp(lambda x: rotate(x, positions), normal(1, 5, 2, H))
    cotangent = normal(1, 5, 2, H)
    # A rotation's transpose is its inverse.
    np.testing.assert_allclose(rotate(pullback(cotangent)[0], positions), cotangent, atol=1e-5)
