"""Values and gradients: the reference against float64 mathematics, every implementation against the reference."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.kernels.logprob import pallas_gpu, pallas_tpu, token_logprobs
from jrlhf.kernels.logprob.common import Head

# The largest error allowed, relative to the largest entry. bfloat16 gradients are rounded twice to 8 bits.
TOLERANCE = {jnp.float32: (1e-6, 1e-5), jnp.bfloat16: (1e-6, 1e-2)}

# (N, V, D, vocab_size, temperature, softcap): no block, tile or lane divides N and V.
CASES = {
    "plain": (252, 1000, 64, 1000, 1.0, None),
    "temperature": (507, 1531, 64, 1531, 0.5, None),
    "padded": (252, 1531, 64, 1210, 1.0, 3.0),
    "all": (140, 300, 256, 270, 0.5, 3.0),
}


def problem(case, dtype):
    n, v, embed, vocab_size, *_ = CASES[case]
    rng = np.random.default_rng(n + v)
    hidden = rng.normal(size=(n, embed)).astype(dtype)
    unembedding = (2 / embed**0.5 * rng.normal(size=(v, embed))).astype(dtype)
    targets = rng.integers(0, vocab_size, size=n, dtype=np.int32)
    return hidden, unembedding, targets, tuple(rng.normal(size=(2, n)).astype(np.float32))


def value_and_vjp(op, hidden, unembedding, targets, cotangents):
    def run(hidden, unembedding, targets, cotangents):
        outputs, vjp = jax.vjp(lambda h, w: op(h, w, targets), hidden, unembedding)
        return *outputs, *vjp(cotangents)

    return jax.block_until_ready(jax.jit(run)(hidden, unembedding, targets, cotangents))


def options(case):
    *_, vocab_size, temperature, softcap = CASES[case]
    return {"temperature": temperature, "softcap": softcap, "vocab_size": vocab_size}


def head(case):
    return Head(**options(case), axis_name=None)


@lru_cache
def expected(case, dtype):
    hidden, unembedding, targets, cotangents = problem(case, dtype)
    op = partial(token_logprobs, **options(case), implementation="reference")
    return value_and_vjp(op, hidden.astype(jnp.float32), unembedding.astype(jnp.float32), targets, cotangents)


def check(op, case, dtype):
    actual = value_and_vjp(op, *problem(case, dtype))
    assert [x.dtype for x in actual] == [jnp.float32, jnp.float32, dtype, dtype]
    names = ("logprobs", "entropy", "d_hidden", "d_unembedding")
    tolerances = np.repeat(TOLERANCE[dtype], 2)
    for name, a, e, tolerance in zip(names, actual, expected(case, dtype), tolerances, strict=True):
        error = np.max(np.abs(np.asarray(a, np.float32) - e)) / np.max(np.abs(e))
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def test_xla():
    """In float32: `test_logprob_parallel.py`."""
    check(partial(token_logprobs, **options("all"), tile=100, implementation="xla"), "all", jnp.bfloat16)


@pytest.mark.full  # by default, in float32: `test_logprob_parallel.py`
def test_pallas_tpu(tpu_params):
    forward = pallas_tpu.Forward(tokens=128, vocabulary=128, embed=128, interpret=tpu_params)
    backward = pallas_tpu.Backward(tokens=128, vocabulary=128, interpret=tpu_params)
    op = partial(pallas_tpu.token_logprobs, head=head("all"), forward=forward, backward=backward)
    check(op, "all", jnp.bfloat16)


@pytest.mark.parametrize("case", ["all", pytest.param("padded", marks=pytest.mark.full)])
def test_pallas_gpu(case, gpu_params):
    forward = pallas_gpu.GpuForward(interpret=gpu_params)
    check(partial(pallas_gpu.token_logprobs, head=head(case), tile=128, forward=forward), case, jnp.bfloat16)


def test_rows_of_sequences_with_a_traced_temperature():
    hidden, unembedding, targets = map(jnp.asarray, problem("temperature", jnp.float32)[:3])
    expected = jax.jit(partial(token_logprobs, temperature=0.5))(hidden, unembedding, targets)

    rows, sequences = hidden.reshape(3, 169, -1), targets.reshape(3, 169)

    def total(temperature):
        logprobs, entropy = token_logprobs(rows, unembedding, sequences, temperature=temperature)
        return logprobs.sum(), (logprobs, entropy)

    (_, (logprobs, entropy)), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(0.5))
    assert logprobs.shape == entropy.shape == (3, 169)
    np.testing.assert_allclose(logprobs.ravel(), expected[0], rtol=1e-5)  # halves: nothing is rounded
    np.testing.assert_allclose(entropy.ravel(), expected[1], rtol=1e-5)
    # d log p_y / d t = -(z_y - E z) / t = -(log p_y + entropy) / t
    np.testing.assert_allclose(slope, -np.sum(np.asarray(logprobs + entropy, np.float64)) / 0.5, rtol=1e-3)
    halves = np.full((*targets.shape, 1), 0.5, np.float32)
    for array in (halves, jnp.asarray(halves)):  # one for each token
        np.testing.assert_array_equal(token_logprobs(hidden, unembedding, targets, temperature=array)[0], expected[0])
    for array in (np.asarray(0.5), jnp.asarray(0.5)):
        with pytest.raises(ValueError, match="softcap=3.0 needs a temperature that is a Python number"):
            token_logprobs(hidden, unembedding, targets, temperature=array, softcap=3.0)
    with pytest.raises(ValueError, match=r"of one \*N and D"):
        token_logprobs(rows, unembedding, targets)


def exact_problem(magnitude):
    """Logits around `magnitude` whose products float32 holds exactly, so that only what is made of them is rounded."""
    rng = np.random.default_rng(0)
    hidden, unembedding = (rng.integers(-16, 17, size=(rows, 64)) / 8 for rows in (64, 256))
    hidden[:, 16:], hidden[:, 0], unembedding[:, 0] = 0, 1, magnitude
    return hidden, unembedding, rng.integers(0, 256, size=64, dtype=np.int32), rng.normal(size=(2, 64))


def float64_value_and_vjp(hidden, unembedding, targets, cotangents):
    """In NumPy, and the sums of the magnitudes of what is added up in each gradient."""
    z, rows = hidden @ unembedding.T, np.arange(len(targets))
    shifted = z - z.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    p, d_logprobs, d_entropy = np.exp(log_p), *cotangents[..., None]
    entropy = -(p * log_p).sum(axis=1)
    d_z = -p * (d_logprobs + d_entropy * (log_p + entropy[:, None]))
    d_z[rows, targets] += cotangents[0]
    sizes = np.abs(d_z) @ np.abs(unembedding), np.abs(d_z).T @ np.abs(hidden)
    return (log_p[rows, targets], entropy, d_z @ unembedding, d_z.T @ hidden), (1, 1, *sizes)


@pytest.mark.parametrize(
    "implementation",
    ["reference", "xla", *(pytest.param(name, marks=pytest.mark.full) for name in ("pallas_tpu", "pallas_gpu"))],
)
def test_precision_does_not_depend_on_the_magnitude_of_the_logits(implementation, request):
    dtype, op = jnp.float32, partial(token_logprobs, tile=48, implementation=implementation)
    plain = Head(1.0, None, 256, None)
    if implementation == "pallas_tpu":
        interpret = request.getfixturevalue("tpu_params")
        forward, backward = pallas_tpu.Forward(interpret=interpret), pallas_tpu.Backward(interpret=interpret)
        op = partial(pallas_tpu.token_logprobs, head=plain, forward=forward, backward=backward)
    elif implementation == "pallas_gpu":
        dtype, forward = jnp.bfloat16, pallas_gpu.GpuForward(interpret=request.getfixturevalue("gpu_params"))
        op = partial(pallas_gpu.token_logprobs, head=plain, tile=48, forward=forward)
    run = jax.jit(partial(value_and_vjp, op))
    for magnitude in (0, -(2**10), 27 * 2**10):
        hidden, unembedding, targets, cotangents = exact_problem(magnitude)
        arrays = hidden.astype(dtype), unembedding.astype(dtype), targets, tuple(cotangents.astype(np.float32))
        expected, sizes = float64_value_and_vjp(hidden, unembedding, targets, cotangents)
        for actual, e, size, tolerance in zip(
            run(*arrays), expected, sizes, np.repeat(TOLERANCE[dtype], 2), strict=True
        ):
            error = np.max(np.abs(np.asarray(actual, np.float64) - e) / np.maximum(size, 1))
            assert error <= 5 * tolerance, (magnitude, error)


def test_reference_is_the_log_softmax_and_its_gradient_the_numerical_one():
    rng = np.random.default_rng(0)
    hidden, unembedding, weights = rng.normal(size=(3, 4)), rng.normal(size=(7, 4)), rng.normal(size=(2, 3))
    targets = np.array([0, 5, 2])

    def exact(hidden, unembedding):
        z = 1.5 * np.tanh(hidden @ unembedding[:6].T / 1.5) / 0.7
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        return log_p[np.arange(3), targets], -(np.exp(log_p) * log_p).sum(axis=1)

    def numerical(f, x, step=1e-6):
        slopes = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            shift = np.zeros_like(x)
            shift[index] = step
            slopes[index] = np.sum(weights * (np.array(f(x + shift)) - f(x - shift))) / (2 * step)
        return slopes

    op = partial(token_logprobs, temperature=0.7, softcap=1.5, vocab_size=6, implementation="reference")
    h, w, cotangents = (x.astype(np.float32) for x in (hidden, unembedding, weights))
    *outputs, d_hidden, d_unembedding = value_and_vjp(op, h, w, targets, tuple(cotangents))
    np.testing.assert_allclose(outputs, exact(hidden, unembedding), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(d_hidden, numerical(lambda x: exact(x, unembedding), hidden), atol=1e-5)
    np.testing.assert_allclose(d_unembedding, numerical(lambda x: exact(hidden, x), unembedding), atol=1e-5)


def test_huge_logits_stay_finite():
    ones, unembedding = np.ones(2, np.float32), np.array([[3e4], [1e4], [-3e4]], np.float32)
    logprobs, entropy, d_hidden, d_unembedding = value_and_vjp(
        token_logprobs, ones[:, None], unembedding, np.array([0, 1]), (ones, ones)
    )
    np.testing.assert_allclose(logprobs, [0.0, -2e4])
    np.testing.assert_allclose(entropy, [0.0, 0.0], atol=1e-6)
    # d log p_y / dh = w_y − Σ p_v w_v and d log p_y / dw_v = (1[v = y] − p_v) h; the entropy is flat.
    np.testing.assert_allclose(d_hidden, [[0.0], [-2e4]], atol=1e-2)
    np.testing.assert_allclose(d_unembedding, [[-1.0], [1.0], [0.0]], atol=1e-6)


def test_target_outside_the_vocabulary_has_probability_and_gradient_zero():
    hidden, unembedding, _, _ = problem("plain", jnp.float32)
    op = partial(token_logprobs, vocab_size=900, tile=2)
    targets, cotangents = np.array([-1, 900, 1000, 5000, 7]), np.array([[1, 1, 1, 1, 0], [0] * 5], np.float32)
    logprobs, entropy, d_hidden, d_unembedding = value_and_vjp(op, hidden[:5], unembedding, targets, (*cotangents,))
    logprobs = np.asarray(logprobs)
    assert np.all(np.isneginf(logprobs[:4])) and np.isfinite(logprobs[4]) and np.all(np.isfinite(entropy))
    assert not np.any(d_hidden) and not np.any(d_unembedding)


def test_no_token_at_all():
    for implementation in ("reference", "xla"):
        op = jax.jit(partial(token_logprobs, implementation=implementation))
        logprobs, entropy = op(np.zeros((0, 8), np.float32), np.ones((40, 8), np.float32), np.zeros(0, np.int32))
        assert logprobs.shape == entropy.shape == (0,)


def test_bad_arguments_are_named():
    arguments = {
        "hidden": np.zeros((4, 8), np.float32),
        "unembedding": np.zeros((16, 8), np.float32),
        "targets": np.zeros(4, np.int32),
    }
    half, wide = (
        {name: np.zeros((rows, d), jnp.bfloat16) for name, rows in (("hidden", 4), ("unembedding", 16))}
        for d in (8, 64)
    )
    gpu = {"implementation": "pallas_gpu"}
    for change, message in [
        ({"hidden": np.zeros((2, 3, 8), np.float32)}, r"expected hidden \[\*N, D\].*\(2, 3, 8\)"),
        ({"hidden": np.zeros((4, 9), np.float32)}, r"of one \*N and D"),
        ({"targets": np.zeros(5, np.int32)}, r"of one \*N and D"),
        ({"hidden": np.zeros((4, 8), jnp.bfloat16)}, "one floating dtype, got bfloat16 and float32"),
        ({"targets": np.zeros(4, np.float32)}, "targets must be integers, got float32"),
        ({"temperature": jnp.ones(8)}, r"temperature must be one number, or one for each token, got shape \(8,\)"),
        ({"temperature": np.ones(8)}, r"temperature must be one number, or one for each token, got shape \(8,\)"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
        ({"softcap": -1.0}, "softcap must be positive or None, got -1.0"),
        ({"tile": 0}, "tile must be a positive number of tokens, got 0"),
        ({"vocab_size": 17}, "vocab_size=17 must be between 1 and the unembedding's 16 rows"),
        ({"vocab_size": 0}, "vocab_size=0 must be between 1"),
        ({"implementation": "triton"}, "unknown implementation 'triton': known are reference, xla"),
        ({"implementation": "pallas_tpu"}, "'pallas_tpu' needs a TPU, but this program is for cpu"),
        (gpu | wide, "'pallas_gpu' needs a Hopper GPU .* but this program is for cpu"),
        (gpu, "'pallas_gpu' takes bfloat16 or float16 inputs, got float32"),
        (gpu | half, "'pallas_gpu' needs D to be a multiple of 64, got 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            token_logprobs(**(arguments | change))
