"""Candidates for each token: sums of a distillation loss over them, and the most likely ones, on meshes."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jrlhf.meshes import AXES, GENERATE, TRAIN, TRAIN_TP, make_mesh
from jrlhf.models import (
    LoRAConfig,
    ModelConfig,
    lora_shardings,
    make_logprobs,
    make_token_sums,
    make_top_logprobs,
    param_shardings,
)
from tests.models.shared import fast_jit, same_gradient, unstacked
from tests.models.test_lora import dense, random_adapter

# A vocabulary that is no multiple of 128: over 4 devices a slice has 32 rows, and the last one 4 words.
CONFIG = ModelConfig(100, 16, 1, 4, 2, 8, mlp=32, max_positions=16, softcap=20.0)
LORA = LoRAConfig(rank=4, alpha=8.0)
ROWS, LENGTH, K, TEMPERATURE = 8, 6, 3, 0.7
STARTS = np.array([1, 2, 3, 5, 4, 1, 2, 0], np.int32)  # a start of 0 is one of 1
# mesh sizes, layout, axis type, span
CASES = [
    pytest.param((2, 2, 2), TRAIN, AxisType.Explicit, 2, id="train-span"),
    pytest.param((1, 1, 1), TRAIN, AxisType.Auto, None, id="one", marks=pytest.mark.full),
    pytest.param((1, 2, 4), TRAIN, AxisType.Auto, None, id="train", marks=pytest.mark.full),
    pytest.param((1, 2, 2), TRAIN_TP, AxisType.Explicit, 4, id="tensor-parallel-span", marks=pytest.mark.full),
]


def batch() -> Any:
    """Tokens, data and candidates, some of which are padding, twice the same, or the token itself."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    ids = rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH, K)).astype(np.int32)
    ids[::2, :, 1], ids[::3, :, 2], ids[1::3, ::2, 2] = ids[::2, :, 0], tokens[::3], 110
    data = {
        "old": rng.normal(size=(ROWS, LENGTH)).astype(np.float32) - 5,
        "teacher": rng.normal(size=(ROWS, LENGTH, K)).astype(np.float32) - 3,
        "mask": (rng.random((ROWS, LENGTH)) < 0.7) & (np.arange(LENGTH) > 0),
    }
    return tokens, data, ids


def inside(span):
    """Where a span of each row is, or all of its tokens but the first."""
    after = np.arange(LENGTH)[None, :] - np.maximum(STARTS, 1)[:, None]
    return (after >= 0) & (after < span) if span else np.broadcast_to(np.arange(LENGTH) > 0, (ROWS, LENGTH))


def terms(logprobs, entropy, data):
    """A divergence to the teacher's candidates, a clipped ratio of the token itself, and an entropy."""
    drawn, candidates = logprobs[..., 0], logprobs[..., 1:]
    exists = jnp.isfinite(candidates)
    candidates, p = jnp.where(exists, candidates, 0), jnp.exp(candidates)
    loss = jnp.sum(p * (candidates - data["teacher"]) - p + jnp.exp(data["teacher"]), axis=-1)
    loss = loss + jnp.minimum(jnp.exp(jnp.clip(drawn - data["old"], -2, 2)), 1.5) - 0.1 * entropy
    return jnp.where(data["mask"], loss, 0), {"mass": jnp.where(data["mask"], p.sum(-1), 0)}


def all_logprobs(reference, params, tokens):
    """The plain decoder's log-probabilities [B, T, V] of each token; at t = 0 of any distribution."""
    log_p = jax.nn.log_softmax(reference.logits(params, CONFIG, tokens) / TEMPERATURE, axis=-1)
    return jnp.roll(log_p, 1, axis=1)


def dense_sums(reference, params, span):
    tokens, data, ids = batch()
    log_p = all_logprobs(reference, params, tokens)
    targets = np.concatenate([tokens[..., None], ids], axis=-1)
    exists = targets < CONFIG.vocab_size
    chosen = jnp.take_along_axis(log_p, np.where(exists, targets, 0), axis=-1)
    masked = {**data, "mask": data["mask"] & inside(span)}
    loss, metrics = terms(jnp.where(exists, chosen, -jnp.inf), -(jnp.exp(log_p) * log_p).sum(-1), masked)
    return loss.sum(), jax.tree.map(jnp.sum, metrics)


@pytest.fixture(scope="module")
def plain(reference):
    """A function: span -> loss, metrics and gradient of the plain decoder."""

    @cache
    def compute(span):
        gradient = jax.value_and_grad(lambda params: dense_sums(reference, params, span), has_aux=True)
        return jax.device_get(fast_jit(gradient)(reference.random_params(CONFIG)))

    return compute


def on(mesh, tree):
    return jax.device_put(tree, jax.NamedSharding(mesh, jax.P(AXES)))


@pytest.mark.parametrize(("sizes", "layout", "axis_type", "span"), CASES)
def test_sums_over_candidates_equal_those_of_dense_logits(reference, plain, sizes, layout, axis_type, span):
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)], axis_type=axis_type)
    with jax.set_mesh(mesh):
        params = jax.device_put(reference.random_params(CONFIG), param_shardings(CONFIG, mesh, layout))
        tokens, data, ids = on(mesh, batch())
        starts = {"starts": on(mesh, STARTS)} if span else {}
        sums = make_token_sums(CONFIG, mesh, layout, temperature=TEMPERATURE, span=span)

        def loss(params, tokens, data, ids, starts):
            return sums(params, tokens, data, terms, ids=ids, **starts)

        step = fast_jit(jax.value_and_grad(loss, has_aux=True))
        actual = jax.device_get(step(params, tokens, data, ids, starts))
    jax.tree.map_with_path(same_gradient, actual, plain(span))


def check_top(actual, log_p, span):
    """The ids' log-probabilities are the largest, in order, in the span, and zeros elsewhere."""
    ids, logprobs = actual
    assert (ids.dtype, logprobs.dtype, ids.shape) == (jnp.int32, jnp.float32, logprobs.shape)
    spanned, k = inside(span), ids.shape[-1]
    assert not np.any(ids[~spanned]) and not np.any(logprobs[~spanned])
    assert np.all(ids < CONFIG.vocab_size) and all(len({*row}) == k for row in ids[spanned].tolist())
    largest = -np.sort(-log_p, axis=-1)[..., :k]
    np.testing.assert_allclose(logprobs[spanned], largest[spanned], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(log_p, ids, axis=-1)[spanned], largest[spanned], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sizes", "layout", "axis_type", "span"), CASES)
def test_the_most_likely_tokens_are_those_of_sorted_dense_logits(reference, sizes, layout, axis_type, span):
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)], axis_type=axis_type)
    tokens, _, _ = batch()
    weights = reference.random_params(CONFIG)
    log_p = np.asarray(fast_jit(lambda weights: all_logprobs(reference, weights, tokens))(weights))
    with jax.set_mesh(mesh):
        params = jax.device_put(weights, param_shardings(CONFIG, mesh, layout))
        arguments = on(mesh, (tokens, STARTS) if span else (tokens,))
        for k in (1, 70):  # more than a slice has
            top = make_top_logprobs(CONFIG, mesh, layout, k=k, temperature=TEMPERATURE, span=span)
            actual = fast_jit(top)(params, *arguments)
            assert all(x.sharding.is_equivalent_to(arguments[0].sharding, 3) for x in actual)
            check_top(jax.device_get(actual), log_p, span)


@pytest.mark.full
def test_under_an_adapter(reference):
    mesh, span = make_mesh(2, 2, 2), 3
    base, adapter, (tokens, _, _) = reference.random_params(CONFIG), random_adapter(CONFIG, LORA), batch()

    def whole(adapter):
        return dense(base, adapter, LORA.scale)

    gradient = jax.value_and_grad(lambda adapter: dense_sums(reference, whole(adapter), span), has_aux=True)
    expected = jax.device_get(fast_jit(gradient)(adapter))
    log_p = np.asarray(fast_jit(lambda adapter: all_logprobs(reference, whole(adapter), tokens))(adapter))
    options: Any = {"temperature": TEMPERATURE, "span": span, "lora": LORA}
    with jax.set_mesh(mesh):
        frozen = jax.device_put(unstacked(base), param_shardings(CONFIG, mesh, GENERATE))
        adapter = jax.device_put(adapter, lora_shardings(CONFIG, mesh, LORA))
        tokens, data, ids, starts = on(mesh, (*batch(), STARTS))
        sums = make_token_sums(CONFIG, mesh, GENERATE, **options)

        def loss(adapter, base):
            return sums(adapter, tokens, data, terms, base, starts=starts, ids=ids)

        actual = jax.device_get(fast_jit(jax.value_and_grad(loss, has_aux=True))(adapter, frozen))
        top = make_top_logprobs(CONFIG, mesh, GENERATE, k=5, **options)
        most_likely = jax.device_get(fast_jit(top)(adapter, tokens, starts, frozen))
    jax.tree.map_with_path(same_gradient, actual, expected)
    check_top(most_likely, log_p, span)


@pytest.mark.full
def test_on_the_last_stage_of_a_pipeline(reference):
    """Its input does not depend on tokens: log-probabilities of other tokens are those of the candidates."""
    mesh = make_mesh(2, 2, 2)
    tokens, data, ids = batch()
    data["mask"] = inside(None)
    hidden = np.random.default_rng(1).normal(size=(ROWS, LENGTH, CONFIG.embed)).astype(np.float32)
    with jax.set_mesh(mesh):
        params = jax.device_put(reference.random_params(CONFIG), param_shardings(CONFIG, mesh, TRAIN))
        params, tokens, data, ids = {**params, "hidden": on(mesh, hidden)}, *on(mesh, (tokens, data, ids))
        logprobs, sums = make_logprobs(CONFIG, mesh, TRAIN), make_token_sums(CONFIG, mesh, TRAIN)

        def composed(params):
            drawn, entropy = logprobs(params, tokens)
            others = [logprobs(params, ids[..., place])[0] for place in range(K)]
            loss, metrics = terms(jnp.stack([drawn, *others], axis=-1), entropy, data)
            return loss.sum(), jax.tree.map(jnp.sum, metrics)

        def fused(params):
            return sums(params, tokens, data, terms, ids=ids)

        expected, actual = (
            jax.device_get(fast_jit(jax.value_and_grad(loss, has_aux=True))(params)) for loss in (composed, fused)
        )
        most_likely, their = fast_jit(make_top_logprobs(CONFIG, mesh, TRAIN, k=K))(params, tokens)
        scored = [fast_jit(logprobs)(params, most_likely[..., place])[0] for place in range(K)]
        np.testing.assert_allclose(np.stack(jax.device_get(scored), axis=-1), their, rtol=1e-5, atol=1e-5)
    assert np.any(actual[1]["hidden"])
    jax.tree.map_with_path(same_gradient, actual, expected)


def test_bad_arguments_are_named(reference):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1], axis_type=AxisType.Auto)
    params, (tokens, data, ids) = reference.random_params(CONFIG), batch()
    for k in (0, 101):
        with pytest.raises(ValueError, match=f"k={k} must be between 1 and vocab_size=100"):
            make_top_logprobs(CONFIG, mesh, TRAIN, k=k)
    with pytest.raises(ValueError, match="implementation='pallas_gpu' does not find the most likely tokens"):
        make_top_logprobs(CONFIG, mesh, TRAIN, k=2, implementation="pallas_gpu")
    with pytest.raises(TypeError, match="`starts`"):
        jax.eval_shape(make_top_logprobs(CONFIG, mesh, TRAIN, k=2, span=2), params, tokens)
    sums = make_token_sums(CONFIG, mesh, TRAIN)
    for wrong, error, message in (
        (ids.astype(np.float32), ValueError, "targets must be integers, got float32"),
        (ids[..., 0], ValueError, r"ids must be \[B, T, K\] for tokens \(8, 6\), got shape \(8, 6\)"),
        (ids[:, 1:], ValueError, r"ids must be \[B, T, K\] for tokens \(8, 6\), got shape \(8, 5, 3\)"),
    ):
        with pytest.raises(error, match=message):
            jax.eval_shape(lambda *x, wrong=wrong: sums(*x, terms, ids=wrong), params, tokens, data)
    with pytest.raises(ValueError, match="implementation='pallas_gpu' takes one target a token"):
        sums = make_token_sums(CONFIG, mesh, TRAIN, implementation="pallas_gpu")
        jax.eval_shape(lambda *x: sums(*x, terms, ids=ids), params, tokens, data)
