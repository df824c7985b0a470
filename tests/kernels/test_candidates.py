"""Log-probabilities of K given tokens for each token: values, gradients, sums of losses, and their memory."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jrlhf.kernels.logprob import token_logprobs, token_sums
from jrlhf.meshes import make_mesh

N, K, V, D, VOCAB_SIZE = 72, 5, 320, 16, 250  # on 8 devices the last slice is nothing but padding
OPTIONS: dict[str, Any] = {"temperature": 0.7, "softcap": 3.0, "vocab_size": VOCAB_SIZE}
OUTSIDE = (-1, VOCAB_SIZE, V - 1, V, 5000, -(2**31))


def problem(dtype: Any = jnp.float32) -> Any:
    """Hidden states, unembedding, targets [N, K], data. Some rows repeat an id, others have one that is no token."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(N, D)).astype(dtype)
    unembedding = (2 / D**0.5 * rng.normal(size=(V, D))).astype(dtype)
    targets = rng.integers(0, VOCAB_SIZE, size=(N, K), dtype=np.int32)
    targets[::3, 1] = targets[::3, 4] = targets[::3, 0]
    targets[1::3, 2] = np.resize(OUTSIDE, N // 3)
    data = {"teacher": rng.normal(size=(N, K)).astype(np.float32) - 5, "mask": rng.random(N) < 0.8}
    return hidden, unembedding, targets, data


def dense(hidden, unembedding, targets):
    """What one writes first: all logits at once, in the dtype of the arguments."""
    products = jnp.dot(hidden, unembedding[:VOCAB_SIZE].T, precision=lax.Precision.HIGHEST)
    log_p = jax.nn.log_softmax(3.0 * jnp.tanh(products / 3.0) / 0.7, axis=-1)
    exists = (targets >= 0) & (targets < VOCAB_SIZE)
    chosen = jnp.take_along_axis(log_p, jnp.where(exists, targets, 0), axis=-1)
    return jnp.where(exists, chosen, -jnp.inf), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def divergence(logprobs, entropy, data):
    """Each token's generalised Kullback-Leibler divergence to a teacher's candidates, which are a part of the whole."""
    exists = jnp.isfinite(logprobs)
    logprobs, p = jnp.where(exists, logprobs, 0), jnp.exp(logprobs)
    terms = p * (logprobs - data["teacher"]) - p + jnp.exp(data["teacher"])
    loss = jnp.sum(terms / (0.2 + p), axis=1) / jnp.abs(data["teacher"][:, 0])  # infinite where a tile is filled up
    return jnp.where(data["mask"], loss - 0.1 * entropy, 0), {"mass": jnp.sum(p, axis=1), "entropy": entropy}


def composed(op, hidden, unembedding, targets, data):
    logprobs, entropy = op(hidden, unembedding, targets)
    loss, metrics = divergence(logprobs, entropy, data)
    return jnp.sum(loss), jax.tree.map(jnp.sum, metrics)


def value_and_grad(sums):
    """The loss as a caller has it: a mean, whose cotangent is not 1."""

    def mean(hidden, unembedding, targets, data):
        loss, metrics = sums(hidden, unembedding, targets, data)
        return -loss / 7, metrics

    return jax.jit(jax.value_and_grad(mean, argnums=(0, 1), has_aux=True))


@cache
def expected():
    return jax.device_get(value_and_grad(partial(composed, dense))(*problem()))


def check(actual, other, tolerances=(3e-6, 2e-5)):
    for tree, others, tolerance in zip(actual, other, tolerances, strict=True):
        for a, e in zip(jax.tree.leaves(tree), jax.tree.leaves(others), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), e, rtol=0, atol=tolerance * np.max(np.abs(e)))


def exact(targets):
    """Log-probabilities and entropies of the problem in float64 NumPy."""
    hidden, unembedding, _, _ = (np.asarray(x, np.float64) for x in (*problem()[:2], 0, 0))
    z = 3.0 * np.tanh(hidden @ unembedding[:VOCAB_SIZE].T / 3.0) / 0.7
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    exists = (targets >= 0) & (targets < VOCAB_SIZE)
    chosen = np.take_along_axis(log_p, np.where(exists, targets, 0), axis=1)
    return np.where(exists, chosen, -np.inf), -(np.exp(log_p) * log_p).sum(axis=1)


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_values_are_the_log_softmax_of_each_candidate(implementation):
    hidden, unembedding, targets, _ = problem()
    op = jax.jit(partial(token_logprobs, **OPTIONS, tile=20, implementation=implementation))
    logprobs, entropy = op(hidden, unembedding, targets)
    assert (logprobs.shape, logprobs.dtype, entropy.shape) == ((N, K), jnp.float32, (N,))
    for actual, e in zip((logprobs, entropy), exact(targets), strict=True):
        np.testing.assert_allclose(actual, e, rtol=2e-6, atol=2e-6)
    for place in (0, 2):  # bit by bit what the candidate alone has
        alone = op(hidden, unembedding, targets[:, place])
        np.testing.assert_array_equal(alone[0], logprobs[:, place])
        np.testing.assert_array_equal(alone[1], entropy)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gradients_are_those_of_dense_logits(implementation):
    hidden, unembedding, targets, _ = problem()
    weights = np.random.default_rng(1).normal(size=(N, K + 1)).astype(np.float32)

    def gradients(op):
        def loss(hidden, unembedding):
            logprobs, entropy = op(hidden, unembedding, targets)
            # A candidate that does not exist gets a cotangent, too.
            logprobs = jnp.maximum(logprobs, -1e3 + 0 * logprobs.sum(where=jnp.isfinite(logprobs)))
            return jnp.sum(jnp.concatenate([logprobs, entropy[:, None]], axis=1) * weights)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, unembedding)

    op = partial(token_logprobs, **OPTIONS, tile=20, implementation=implementation)
    check(gradients(op), gradients(dense))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_sums_of_a_nonlinear_loss(implementation):
    arguments = problem()
    options = {**OPTIONS, "tile": 20, "implementation": implementation}
    sums = partial(token_sums, terms=divergence, **options)
    check(value_and_grad(sums)(*arguments), expected())
    check(value_and_grad(partial(composed, partial(token_logprobs, **options)))(*arguments), expected())
    (mean, metrics), _ = expected()
    check((jax.jit(sums)(*arguments),), ((-7 * mean, metrics),), (3e-6,))  # not differentiated


def test_half_precision_rounds_only_the_gradients():
    arguments = problem(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arguments[:2]]
    sums = partial(token_sums, terms=divergence, **OPTIONS, tile=4096)
    actual = value_and_grad(sums)(*arguments)
    assert [x.dtype for x in actual[1]] == [jnp.bfloat16, jnp.bfloat16]
    check(actual, value_and_grad(partial(composed, dense))(*wide, *arguments[2:]), (3e-6, 1e-2))


def test_candidates_outside_the_vocabulary_have_probability_and_gradient_zero():
    hidden, unembedding, _, _ = problem()
    targets: Any = np.tile(np.asarray(OUTSIDE, np.int32), (4, 1))
    targets[3, 0] = 7

    def likelihood(logprobs, entropy, data):
        return jnp.sum(jnp.where(jnp.isfinite(logprobs), jnp.exp(logprobs), 2 * logprobs), axis=1), {}

    def total(hidden, unembedding):
        logprobs, _ = token_logprobs(hidden, unembedding, targets, **OPTIONS)
        return jnp.sum(logprobs), logprobs

    def fused(hidden, unembedding):
        return token_sums(hidden, unembedding, targets, (), likelihood, **OPTIONS)

    (_, logprobs), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(hidden[:4], unembedding)
    np.testing.assert_array_equal(np.isneginf(logprobs), targets != 7)
    of_sums, _ = jax.jit(jax.grad(fused, has_aux=True))(hidden[:4], unembedding)
    for d_hidden in (gradient, of_sums):
        assert not np.any(d_hidden[:3]) and np.all(np.isfinite(d_hidden)) and np.any(d_hidden[3])


def test_rows_of_sequences_with_a_temperature_for_each_token():
    hidden, unembedding, targets, _ = problem()
    op = partial(token_logprobs, vocab_size=VOCAB_SIZE, tile=20)
    expected = jax.jit(partial(op, temperature=0.5))(hidden, unembedding, targets)
    temperature = np.full((3, N // 3, 1), 0.5, np.float32)
    rows, sequences = hidden.reshape(3, -1, D), targets.reshape(3, -1, K)
    logprobs, entropy = jax.jit(op)(rows, unembedding, sequences, temperature=temperature)
    np.testing.assert_allclose(logprobs, expected[0].reshape(sequences.shape), rtol=1e-5)  # halves: nothing is rounded
    np.testing.assert_allclose(entropy, expected[1].reshape(3, -1), rtol=1e-5)
    one, its_entropy = jax.jit(partial(op, temperature=0.5))(hidden[0], unembedding, targets[0])
    np.testing.assert_allclose(one, expected[0][0], rtol=1e-5)
    assert its_entropy.shape == ()


def test_no_token_and_no_candidate():
    for implementation in ("reference", "xla"):
        for shape in ((0, 3), (2, 0)):
            op = jax.jit(partial(token_logprobs, implementation=implementation))
            hidden, targets = np.zeros((shape[0], 8), np.float32), np.zeros(shape, np.int32)
            logprobs, entropy = op(hidden, np.ones((40, 8), np.float32), targets)
            assert logprobs.shape == shape and entropy.shape == shape[:1]


@pytest.mark.parametrize(
    ("sizes", "gathered"),
    [((2, 2), True), ((1, 8), False), pytest.param((1, 1), False, marks=pytest.mark.full)],
)
def test_vocabulary_parallel(sizes, gathered):
    """Rows over all axes and gathered over `tensor`, data too; or the same rows on all devices of `tensor`."""
    mesh = make_mesh(fsdp=sizes[0], tensor=sizes[1], devices=jax.devices()[: sizes[0] * sizes[1]])
    rows = P(("fsdp", "tensor")) if gathered else P("fsdp")
    options = {**OPTIONS, "axis_name": "tensor", "tile": 20}

    def gather(*arrays):
        return jax.tree.map(partial(lax.all_gather, axis_name="tensor", tiled=True), arrays) if gathered else arrays

    def local(hidden, unembedding, targets, data):
        hidden, targets, data = gather(hidden, targets, data)
        return lax.psum(token_sums(hidden, unembedding, targets, data, divergence, **options), "fsdp")

    def scores(hidden, unembedding, targets):
        hidden, targets = gather(hidden, targets)
        return token_logprobs(hidden, unembedding, targets, **options)

    specs = (rows, P("tensor"), rows, rows)
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda x, spec=spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), argument)
            for argument, spec in zip(problem(), specs, strict=True)
        ]
        sums = jax.shard_map(local, in_specs=specs, out_specs=P())
        actual = jax.device_get(value_and_grad(sums)(*placed))
        op = jax.shard_map(scores, in_specs=specs[:3], out_specs=(P("fsdp"), P("fsdp")))
        data = jax.device_put(placed[3], jax.NamedSharding(mesh, P("fsdp")))  # as the results lie
        by_op = jax.device_get(value_and_grad(partial(composed, op))(*placed[:3], data))
        logprobs, _ = jax.device_get(jax.jit(op)(*placed[:3]))
    check(actual, expected())
    check(by_op, expected())
    np.testing.assert_allclose(logprobs, exact(problem()[2])[0], rtol=3e-6, atol=3e-6)


def arrays_of(jaxpr) -> list[Any]:
    """The shapes of all arrays that a program makes, those inside of its loops included."""
    shapes = []
    for equation in jaxpr.eqns:
        shapes += [x.aval.shape for x in equation.outvars]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                shapes += arrays_of(inner)
    return shapes


def test_nothing_has_an_entry_for_each_token_and_each_word():
    n, k, v, d, tile = 4096, 32, 8192, 64, 128
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, d), (v, d))]
    shapes += [jax.ShapeDtypeStruct((n, k), jnp.int32), jax.ShapeDtypeStruct((n, k), jnp.float32)]

    def terms(logprobs, entropy, teacher):
        return jnp.sum(jnp.exp(logprobs) * (logprobs - teacher), axis=1), {"entropy": entropy}

    def unfused(hidden, unembedding, targets, teacher):
        return jnp.sum(terms(*token_logprobs(hidden, unembedding, targets, tile=tile), teacher)[0])

    fused = jax.grad(partial(token_sums, terms=terms, tile=tile), argnums=(0, 1), has_aux=True)
    for gradient in (fused, jax.grad(unfused, argnums=(0, 1))):
        traced = jax.jit(gradient).trace(*shapes)
        assert max(np.prod(shape) for shape in arrays_of(traced.jaxpr)) <= tile * v
        memory = traced.lower().compile().memory_analysis()
        assert memory is not None
        # A tile's logits and their gradient by label, products and probabilities; dW; dX of all tiles; [n, k] arrays.
        assert memory.temp_size_in_bytes <= 4 * (4 * tile * v + v * d + 2 * n * d + 4 * n * k)


def test_bad_arguments_are_named():
    hidden, unembedding, targets, data = problem()
    for name in ("pallas_tpu", "pallas_gpu"):
        message = rf"implementation='{name}' takes one target a token, got targets \({N}, {K}\)"
        with pytest.raises(ValueError, match=message):
            token_logprobs(hidden, unembedding, targets, implementation=name)
        with pytest.raises(ValueError, match=message):
            token_sums(hidden, unembedding, targets, data, divergence, implementation=name)
    for shape in ((N, K, 1), (K, N), (N + 1, K)):
        with pytest.raises(ValueError, match=r"targets \[\*N, K\?\] of one \*N and D"):
            token_logprobs(hidden, unembedding, jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError, match=r"token_sums takes tokens in one dimension, got hidden \(2, 36, 16\)"):
        token_sums(hidden.reshape(2, 36, D), unembedding, targets.reshape(2, 36, K), (), divergence)
    for implementation in ("xla", "reference"):
        with pytest.raises(ValueError, match=rf"terms returned the loss of shape \({N}, {K}\) for tokens of shape"):
            token_sums(hidden, unembedding, targets, (), lambda p, *_: (p, {}), tile=N, implementation=implementation)
