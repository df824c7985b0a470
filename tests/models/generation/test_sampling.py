"""What is drawn, how often, and with what log-probability."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models import SamplingConfig
from jrlhf.models.generation.sampling import gumbel, largest, sample
from jrlhf.models.generation.truncation import restrict

V = 12
ROWS = 8192
compiled = jax.jit(sample, static_argnames=("config", "vocab_size"))


@cache
def keys_of(seed):
    return jax.random.split(jax.random.key(seed), ROWS)


def draw(logits, config, *, rows=ROWS, vocab_size=V, may_stop=True, seed=0):
    """The first `rows` of many with the same logits."""
    repeated = np.tile(np.asarray(logits, np.float32), (ROWS, 1))
    tokens, logprobs = compiled(
        repeated, keys_of(seed), config, vocab_size=vocab_size, may_stop=np.full(ROWS, may_stop)
    )
    return np.asarray(tokens)[:rows], np.asarray(logprobs)[:rows]


def softmax(z):
    weights = np.exp(z - z.max())
    return weights / weights.sum()


def nucleus(p, top_k, top_p, min_p=None):
    """The allowed tokens: those of falling probability before which there is less than `top_p`, if likely enough."""
    order = np.argsort(-p)[:top_k]
    shares = p[order] / p[order].sum()
    order = order if top_p is None else order[np.cumsum(shares) - shares < top_p]
    return order[p[order] >= (min_p or 0) * p.max()]


LOGITS = np.random.default_rng(0).normal(size=V) * 1.5


def test_draws_follow_the_restricted_softmax():
    temperature = 0.5
    limits = (None, None, None), (5, 0.8, None), (100, 0.95, None), (None, None, 0.2), (4, 0.97, 0.1)
    for top_k, top_p, min_p in limits:
        config = SamplingConfig(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens, logprobs = draw(LOGITS, config)
        p = softmax(LOGITS / temperature)
        allowed = nucleus(p, top_k, top_p, min_p)
        share = np.zeros(V)
        share[allowed] = p[allowed] / p[allowed].sum()
        count = np.bincount(tokens, minlength=V)
        assert (count[share == 0] == 0).all(), (top_k, top_p)
        assert (np.abs(count / ROWS - share) <= 5 * np.sqrt(share * (1 - share) / ROWS)).all(), (top_k, top_p)
        # Whatever may be drawn, the log-probability is that of the whole softmax.
        np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=1e-5)


def test_stop_tokens_are_not_drawn_before_they_may_be():
    likely = LOGITS.copy()
    likely[[3, 7]] += 4
    config = SamplingConfig(9, min_new_tokens=2, stop_ids=(3, 7))
    p = softmax(likely)
    assert np.isin(draw(likely, config)[0], (3, 7)).mean() == pytest.approx(p[[3, 7]].sum(), abs=0.02)
    tokens, logprobs = draw(likely, config, may_stop=False)
    assert not np.isin(tokens, (3, 7)).any()
    np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=1e-5)
    # The ban comes before the nucleus, which is then taken among what is left.
    config = SamplingConfig(9, min_new_tokens=2, stop_ids=(3, 7), top_k=1, temperature=0.5)
    tokens, _ = draw(likely, config, may_stop=False, rows=10)
    assert (tokens == np.delete(likely, [3, 7]).argmax() + np.sum(np.array([3, 7]) <= LOGITS.argmax())).all()
    greedy = SamplingConfig(9, min_new_tokens=2, stop_ids=(3, 7), temperature=0.0)
    assert (draw(likely, greedy, may_stop=False, rows=2)[0] == tokens[:2]).all()


def test_vocabulary_padding_is_never_drawn_and_has_no_probability():
    """Temperature zero draws the most likely token, with its probability at temperature one."""
    padded = np.concatenate([LOGITS, np.full(4, 50.0)])
    for config in (SamplingConfig(1, top_k=3), SamplingConfig(1, temperature=0.0)):
        tokens, logprobs = draw(padded, config, rows=500)
        assert tokens.max() < V and (config.temperature or (tokens == LOGITS.argmax()).all())
        np.testing.assert_allclose(logprobs, np.log(softmax(LOGITS))[tokens], atol=1e-5)


def test_ids_beyond_the_token_limit_are_never_drawn_and_keep_their_probability():
    likely = LOGITS.copy()
    likely[[9, 10]] += 6
    every: Any = {"temperature": 0.0}, {"top_k": 2, "top_p": 0.5, "min_new_tokens": 1}
    for options in every:
        config = SamplingConfig(2, token_limit=9, stop_ids=(3,), **options)
        tokens, logprobs = draw(likely, config, rows=500, may_stop=False)
        assert tokens.max() < 9
        np.testing.assert_allclose(logprobs, np.log(softmax(likely))[tokens], atol=1e-5)


def test_a_rows_draw_depends_on_its_key_only():
    keys = jax.random.split(jax.random.key(1), 64)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, V)), jnp.float32)
    config = SamplingConfig(1)
    may = jnp.array([True])
    draw = jax.jit(lambda logits, keys: sample(logits, keys, config, vocab_size=V, may_stop=may)[0])
    whole, some = draw(logits, keys), draw(logits[10:13], keys[10:13])
    np.testing.assert_array_equal(whole[10:13], some)
    assert len(set(np.asarray(whole).tolist())) > 3


def test_ties_with_the_last_kept_token_are_kept():
    logits = jnp.array([[1.0, 0.0, 1.0, 1.0]])
    np.testing.assert_array_equal(restrict(logits, 2, None), [[1.0, -np.inf, 1.0, 1.0]])


def test_a_nucleus_ends_where_more_likely_tokens_have_its_mass():
    """Many tokens, some of them alike and some impossible; both signs of logits, and zeros."""
    logits = np.round(np.random.default_rng(1).normal(size=(6, 400)) * np.geomspace(0.1, 1.5, 6)[:, None], 1)
    logits[:, 390:] = -np.inf
    for top_k, top_p in ((None, 0.05), (None, 0.9999999), (37, 0.9)):
        result = np.asarray(jax.jit(restrict, static_argnums=(1, 2))(logits.astype(np.float32), top_k, top_p))
        for row, restricted in zip(logits, result, strict=True):
            best = np.sort(row)[::-1][:top_k]
            least = min(x for x in best if softmax(best)[best > x].sum() < top_p)
            np.testing.assert_array_equal(restricted, np.where(row < least, -np.inf, row).astype(np.float32))


def test_numbers_out_of_range_are_refused():
    for change, message in (
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer"),
        ({"min_new_tokens": 5}, "min_new_tokens=5 must be an integer between 0 and max_new_tokens=4"),
        ({"min_new_tokens": 1.5}, "min_new_tokens=1.5 must be an integer between"),
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"temperature": float("inf")}, "temperature=inf must be 0 .greedy. or positive and finite"),
        ({"top_k": 0}, "top_k=0 must be an integer of at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"min_p": 0.0}, "min_p=0.0 must be above 0"),
        ({"token_limit": 8.0}, "token_limit=8.0 must be an integer"),
        ({"token_limit": 5, "stop_ids": (2, 5)}, "stop id 5 is never drawn: it must be below token_limit=5"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingConfig(**{"max_new_tokens": 4, **change})


# ---- Gumbel noise against JAX's: the same bits, and the same logarithms up to a rounding


def test_noise_is_that_of_jax():
    def draw(keys, size):
        return jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)

    noise, plain = (jax.jit(function, static_argnums=1) for function in (gumbel, draw))
    threefry, raw, rbg = jax.random.key(3), jax.random.PRNGKey(4), jax.random.key(3, impl="rbg")
    for key, size in ((threefry, 4096), (raw, 7)):
        keys = jax.random.split(key, 5)
        np.testing.assert_allclose(noise(keys, size), plain(keys, size), rtol=2e-6, atol=1e-6)
    # Other generators keep their own noise.
    keys = jax.random.split(rbg, 5)
    np.testing.assert_array_equal(noise(keys, 7), plain(keys, 7))


def test_largest_is_argmax():
    x = np.random.default_rng(0).integers(0, 9, (50, 20)).astype(np.float32)  # with ties
    x[3, 4], x[5] = np.nan, -np.inf
    expected = np.argmax(x, axis=1)
    expected[3] = 0
    result = largest(jnp.asarray(x))
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == jnp.int32
