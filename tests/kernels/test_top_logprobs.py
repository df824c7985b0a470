"""The most likely tokens: the oracle sorts float64 logits; ties, padding, slices smaller than k, and memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrlhf.kernels.logprob import token_logprobs, top_logprobs
from jrlhf.meshes import make_mesh
from tests.kernels.test_candidates import arrays_of

N, V, D, VOCAB_SIZE = 72, 320, 16, 250  # on 8 devices the last slice is nothing but padding
OPTIONS: dict[str, Any] = {"temperature": 0.7, "softcap": 3.0, "vocab_size": VOCAB_SIZE}


def problem(ties: bool, dtype: Any = jnp.float32) -> Any:
    """With `ties` few different logits, which float32 holds exactly. Padding stands out."""
    rng = np.random.default_rng(0)
    hidden, unembedding = rng.normal(size=(N, D)), 0.5 * rng.normal(size=(V, D))
    if ties:
        hidden, unembedding = (rng.integers(-1, 2, size=x.shape).astype(np.float64) for x in (hidden, unembedding))
        hidden[:5] = 0
    unembedding[VOCAB_SIZE:] *= 100
    return hidden.astype(dtype), unembedding.astype(dtype)


def exact(hidden, unembedding, k, *, temperature=1.0, softcap=None, vocab_size=VOCAB_SIZE):
    """(ids, log-probabilities) in float64 NumPy."""
    z = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64)[:vocab_size].T
    z = (z if softcap is None else softcap * np.tanh(z / softcap)) / temperature
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    ids = np.argsort(-z, axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(log_p, ids, axis=1)


def check(actual, e):
    ids, logprobs = actual
    assert (ids.dtype, logprobs.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(ids, e[0])
    np.testing.assert_allclose(logprobs, e[1], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tile", [20, None])
def test_ids_and_logprobs_are_those_of_sorted_logits(ties, tile):
    hidden, unembedding = problem(ties)
    options: Any = {"vocab_size": VOCAB_SIZE} if ties else OPTIONS
    for k in (1, 7, VOCAB_SIZE):
        actual = jax.jit(partial(top_logprobs, k=k, **options, tile=tile))(hidden, unembedding)
        check(actual, exact(hidden, unembedding, k, **options))
        scored, _ = token_logprobs(hidden, unembedding, actual[0], **options)
        np.testing.assert_allclose(actual[1], scored, rtol=1e-6, atol=1e-6)


def test_half_precision_and_rows_of_sequences():
    hidden, unembedding = problem(False, jnp.bfloat16)
    op = jax.jit(partial(top_logprobs, k=4, **OPTIONS))
    ids, logprobs = op(hidden.reshape(3, 24, D), unembedding)
    assert ids.shape == logprobs.shape == (3, 24, 4)
    check((ids.reshape(N, 4), logprobs.reshape(N, 4)), exact(hidden, unembedding, 4, **OPTIONS))
    np.testing.assert_array_equal(op(hidden[0], unembedding)[0], ids[0, 0])
    assert op(hidden[:0], unembedding)[0].shape == (0, 4)


def test_logits_of_both_zeros_are_equal():
    hidden, unembedding = np.zeros((2, 1), np.float32), np.array([[-1], [1], [-2], [3], [-1], [0]], np.float32)
    for softcap in (None, 2.0):
        ids, logprobs = jax.jit(partial(top_logprobs, k=4, softcap=softcap))(hidden, unembedding)
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
        np.testing.assert_allclose(logprobs, -np.log(6), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_padding_never_appears_even_below_infinite_logits(count):
    """Two words exist; the logit of one is -inf. Padding would be more likely than that."""
    hidden = np.full((3, 1), 3e38, np.float32)
    unembedding = np.array([[-3e38], [0], [1], [np.nan], [0], [0], [0], [0]], np.float32)
    mesh = make_mesh(tensor=count, devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        op = partial(top_logprobs, k=2, vocab_size=2, axis_name="tensor")
        mapped = jax.jit(jax.shard_map(op, in_specs=(P(), P("tensor")), out_specs=P()))
        ids, logprobs = mapped(hidden, jax.device_put(unembedding, jax.NamedSharding(mesh, P("tensor"))))
    np.testing.assert_array_equal(ids, [[1, 0]] * 3)
    np.testing.assert_array_equal(logprobs, [[0, -np.inf]] * 3)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 8)])
def test_vocabulary_parallel(sizes):
    """40 words a slice on 8 devices, fewer than the largest k. `out_specs` say that all devices of `tensor` agree."""
    mesh = make_mesh(fsdp=sizes[0], tensor=sizes[1], devices=jax.devices()[: sizes[0] * sizes[1]])
    specs = (P("fsdp"), P("tensor"))
    for ties in (True, False):
        arrays, options = problem(ties), {"vocab_size": VOCAB_SIZE} if ties else OPTIONS
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
            for k in (3, 60) if ties else (VOCAB_SIZE,):
                op = partial(top_logprobs, k=k, **options, axis_name="tensor", tile=20)
                actual = jax.jit(jax.shard_map(op, in_specs=specs, out_specs=P("fsdp")))(*placed)
                check(jax.device_get(actual), exact(arrays[0], arrays[1], k, **options))


@pytest.mark.parametrize("slices", [1, 8])
def test_ids_beyond_the_limit_are_never_among_the_results_but_count_in_the_softmax(slices):
    """The limit cuts the second of 8 slices; the likeliest words are beyond it."""
    (hidden, unembedding), limit = problem(False), 50
    unembedding[limit:VOCAB_SIZE] *= 5
    ids, logprobs = exact(hidden, unembedding, VOCAB_SIZE, temperature=0.7)
    assert np.mean(ids[:, :5] >= limit) > 0.8
    wanted = [np.flatnonzero(row < limit) for row in ids]
    mesh = make_mesh(tensor=slices, devices=jax.devices()[:slices])
    with jax.set_mesh(mesh):
        placed = jax.device_put(unembedding, jax.NamedSharding(mesh, P("tensor")))
        for k in (5, limit):
            op = partial(top_logprobs, k=k, limit=limit, vocab_size=VOCAB_SIZE, temperature=0.7, axis_name="tensor")
            actual = jax.jit(jax.shard_map(op, in_specs=(P(), P("tensor")), out_specs=P()))(hidden, placed)
            places = np.stack([row[:k] for row in wanted])
            check(jax.device_get(actual), [np.take_along_axis(x, places, axis=1) for x in (ids, logprobs)])


def test_results_have_no_gradient():
    hidden, unembedding = problem(False)
    loss = lambda hidden, unembedding: jnp.sum(top_logprobs(hidden, unembedding, 3)[1])  # noqa: E731
    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, unembedding):
        assert not np.any(gradient)


def test_nothing_has_an_entry_for_each_token_and_each_word():
    n, k, v, d, tile = 4096, 32, 8192, 64, 128
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, d), (v, d))]
    traced = jax.jit(partial(top_logprobs, k=k, tile=tile)).trace(*shapes)
    assert max(np.prod(shape) for shape in arrays_of(traced.jaxpr)) <= tile * v
    memory = traced.lower().compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 4 * (3 * tile * v + n * d + 4 * n * k)


def test_bad_arguments_are_named():
    hidden, unembedding = problem(False)
    for k in (0, VOCAB_SIZE + 1):
        with pytest.raises(ValueError, match=f"k={k} must be between 1 and vocab_size={VOCAB_SIZE}"):
            top_logprobs(hidden, unembedding, k, vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match="k=4 must be between 1 and vocab_size=320, and at most limit=3"):
        top_logprobs(hidden, unembedding, 4, limit=3)
    with pytest.raises(ValueError, match=r"expected hidden \[\*N, D\]"):
        top_logprobs(hidden[:, 1:], unembedding, 2)
    with pytest.raises(ValueError, match="tile must be a positive number"):
        top_logprobs(hidden, unembedding, 2, tile=0)

    def run(**options):
        mesh = make_mesh(tensor=8)
        with jax.set_mesh(mesh):
            op = partial(top_logprobs, k=2, axis_name="tensor")
            return jax.shard_map(op, in_specs=(P(), P()), out_specs=P(), **options)(hidden, unembedding)

    with pytest.raises(ValueError, match="unembedding does not vary over axis_name='tensor'"):
        run()
    with pytest.raises(ValueError, match="unembedding does not vary over axis_name='tensor'"):
        run(check_vma=False)
