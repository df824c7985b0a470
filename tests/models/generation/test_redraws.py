"""Tokens that are drawn again: by how much they fall short, and how much of that is rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models import SamplingConfig
from jrlhf.models.generation.redraws import HOPELESS, shortfall, spread
from jrlhf.models.generation.sampling import sample


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.2}, {"temperature": 0.0}]
)
def test_a_drawn_token_falls_short_of_nothing_and_another_one_of_much(settings):
    """So it is with logits that are rounded otherwise, too; what must not be drawn is infinitely short."""
    config = SamplingConfig(
        4, **{"temperature": 0.7, "stop_ids": (3,), "min_new_tokens": 2, "token_limit": 48, **settings}
    )
    rng, rows, size = np.random.default_rng(0), 400, 50
    logits = jnp.asarray(2 * rng.normal(size=(rows, size)), jnp.float32)
    keys, may_stop = jax.random.split(jax.random.key(1), rows), jnp.arange(rows) % 2 == 0
    drawn, _ = sample(logits, keys, config, vocab_size=size, may_stop=may_stop)

    def short(tokens, rounding: Any = 0.0, keys=keys, noise=0.0):
        near = logits + noise * rng.uniform(-1, 1, logits.shape).astype(np.float32)
        own = {"vocab_size": size, "may_stop": may_stop, "rounding": jnp.asarray(rounding, jnp.float32)}
        return np.asarray(shortfall(tokens, near, keys, config, **own))

    assert (short(drawn) <= 0).all() and (short(drawn, 0.06, noise=0.01) < 0.06).all()
    assert (short((drawn + 1) % size) > 0).mean() > 0.8  # the last token that stays may be left out
    assert np.isinf(short(jnp.full_like(drawn, 49))).all()
    assert np.isinf(short(jnp.full_like(drawn, 3))[1::2]).all()
    # Each row by its own rounding: the largest difference between two tokens' changes.
    changes = rng.uniform(0, 0.5, (rows, 1)) * rng.normal(size=logits.shape)
    rounded, _ = sample(logits + changes.astype(np.float32), keys, config, vocab_size=size, may_stop=may_stop)
    spread = jnp.asarray(np.ptp(changes, axis=1) / (config.temperature or 1), jnp.float32)
    assert (short(rounded, spread) <= spread + 1e-4).all() and (rounded != drawn).any()
    if config.temperature > 0:
        assert (short(drawn, keys=keys[::-1]) > 0.06).mean() > 0.3


@pytest.mark.parametrize("temperature", [0.5, 0.0])
def test_changes_of_what_may_be_drawn_spread(temperature):
    """Not those of padding, of ids without a token, nor of what is hopeless in both logits."""
    config = SamplingConfig(4, temperature=temperature, token_limit=40, min_new_tokens=2, stop_ids=(39,))
    rng, scale = np.random.default_rng(0), temperature or 1
    logits, changes = (rng.normal(size=(30, 60)).astype(np.float32) for _ in range(2))
    changes[:, 39:] *= 100
    logits[:, 0], changes[:, 0] = -1000, -100  # hopeless in both
    logits[:10, 1], changes[:10, 1] = -50, 48 + changes[:10, 1]  # in one of them only
    assert (50 - 2 - 4) / scale > HOPELESS
    may_stop = jnp.arange(30) % 2 == 0
    result = spread(jnp.asarray(logits), jnp.asarray(logits + changes), config, vocab_size=50, may_stop=may_stop)
    np.testing.assert_allclose(result[::2], np.ptp(changes[::2, 1:40], axis=1) / scale, rtol=1e-4)
    np.testing.assert_allclose(result[1::2], np.ptp(changes[1::2, 1:39], axis=1) / scale, rtol=1e-4)


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 3, "top_p": 0.9184}])
def test_a_drawn_token_falls_short_of_rounding_where_a_nucleus_ends_elsewhere(settings):
    """The most likely token has just less than top_p, and after rounding just more. Then another one, with far lower
    logit, may be drawn or not."""
    config, rows, others = SamplingConfig(4, **settings), 2000, np.array([0.05, 0.03, 0.015, 0.005])
    logits, near = (
        jnp.tile(jnp.log(jnp.asarray([first, *(others * (1 - first) / 0.1)], jnp.float32)), (rows, 1))
        for first in (0.899, 0.901)
    )
    keys, may_stop = jax.random.split(jax.random.key(1), rows), jnp.ones(rows, bool)
    own: dict[str, Any] = {"vocab_size": 5, "may_stop": may_stop}
    rounding = jnp.float32(0.1)
    for drawn_from, drawn_again in ((logits, near), (near, logits)):
        drawn, _ = sample(drawn_from, keys, config, **own)
        assert (drawn == 1).any() == (drawn_from is logits)
        assert (np.asarray(shortfall(drawn, drawn_again, keys, config, **own, rounding=rounding)) <= 0.1).all()
        for least_likely in (3, 4):  # both are left out by far
            wrong = jnp.full(rows, least_likely)
            assert (np.asarray(shortfall(wrong, drawn_again, keys, config, **own, rounding=rounding)) > 0.1).all()
