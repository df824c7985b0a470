"""What a cache holds after a slot has changed hands."""

import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models.attention import LayerCache, filled_cache


@pytest.mark.parametrize("transposed", [False, True])
def test_a_slots_former_row_leaves_nothing_behind(transposed):
    slots, kv_heads, size, prompt, head_dim = 4, 2, 6, 3, 5
    generator = np.random.default_rng(0)

    def cache(rows, size, fill=None):
        key, value = (jnp.asarray(generator.normal(size=(rows, kv_heads, size, head_dim))) for _ in range(2))
        key, value = (x if fill is None else jnp.full_like(x, fill) for x in (key, value))
        return LayerCache(key.swapaxes(2, 3) if transposed else key, value, transposed)

    def by_position(cache):
        return [np.asarray(x) for x in (cache.key.swapaxes(2, 3) if transposed else cache.key, cache.value)]

    prompts = cache(2, prompt)
    after = filled_cache(cache(slots, size, jnp.nan), jnp.array([2, 0, slots]), prompts, jnp.array([1, 0, 1]))
    for found, entered in zip(by_position(after), by_position(prompts), strict=True):
        np.testing.assert_array_equal(found[[2, 0], :, :prompt], entered[[1, 0]])
        assert (found[[2, 0], :, prompt:] == 0).all()
        assert np.isnan(found[[1, 3]]).all()
