"""A policy and a critic small enough to differentiate by hand: a table of logits and one of values."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.ppo import Experience

VOCAB = 5
# Both are looked up by the previous token: `logits[previous, token]` and `values[previous]`.
inlined = partial(jax.jit, inline=True)  # one program when called by a test, and nothing when traced


def _previous(tokens):
    return jax.nn.one_hot(jnp.roll(tokens, 1, axis=1), VOCAB)


@inlined
def _logprobs(params, tokens):
    logp = jax.nn.log_softmax(_previous(tokens) @ params["logits"])
    return jnp.sum(logp * jax.nn.one_hot(tokens, VOCAB), -1), -jnp.sum(jnp.exp(logp) * logp, -1)


@inlined
def _values(params, tokens):
    return _previous(tokens) @ params["values"]


@inlined
def _scores(params, tokens, lengths):
    real = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    return jnp.sum(jnp.where(real, jax.nn.one_hot(tokens, VOCAB) @ params["values"], 0), 1)


def _params(seed=0):
    rng = np.random.default_rng(seed)
    logits, values = rng.normal(size=(VOCAB, VOCAB)), rng.normal(size=VOCAB)
    return {"logits": jnp.asarray(logits, jnp.float32)}, {"values": jnp.asarray(values, jnp.float32)}


def _experience(rows=16, time=9, seed=0, ratio_noise=0.4):
    """Experience with made-up numbers: ratios on both sides of every clip, ragged prompts and responses."""
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(1, 4, rows)
    response_lengths = rng.integers(1, time - 3, rows)
    clock = np.arange(time)[None]
    start = prompt_lengths[:, None]
    mask = (start <= clock) & (clock < start + response_lengths[:, None])
    tokens = rng.integers(0, VOCAB, (rows, time)).astype(np.int32)
    logprobs = np.asarray(_logprobs(_params(seed)[0], tokens)[0])

    def noise(scale=1.0):
        return np.where(mask, rng.normal(size=(rows, time)) * scale, 0).astype(np.float32)

    old = np.where(mask, logprobs + noise(ratio_noise), 0).astype(np.float32)
    arrays = dict(
        tokens=tokens,
        prompt_lengths=prompt_lengths.astype(np.int32),
        response_lengths=response_lengths.astype(np.int32),
        logprobs=old + noise(0.01),
        finished=rng.random(rows) < 0.7,
        version=np.int32(3),
        scores=rng.normal(size=rows).astype(np.float32),
        response_mask=mask,
        old_logprobs=old,
        ref_logprobs=old + noise(0.3),
        values=noise(),
        rewards=noise(),
        advantages=noise(),
        returns=noise(),
    )
    return Experience(**{name: jnp.asarray(x) for name, x in arrays.items()})  # type: ignore[arg-type]


@pytest.fixture(scope="package")
def toy():
    return SimpleNamespace(
        vocab=VOCAB, logprobs=_logprobs, values=_values, scores=_scores, params=_params, experience=_experience
    )


@pytest.fixture
def strict_dtypes():
    """Forbids silent promotion: a bfloat16 or integer in float32 mathematics is an error."""
    with jax.numpy_dtype_promotion("strict"):
        yield
