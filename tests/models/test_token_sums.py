"""Sums of a policy loss over all devices: values and gradients of summing the log-probabilities' terms."""

from functools import partial
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
    init_lora,
    lora_shardings,
    make_logprobs,
    make_logprobs_with_base,
    make_token_sums,
    param_shardings,
)
from tests.models.shared import fast_jit, same_gradient, unstacked

# A vocabulary that is no multiple of 128: the last device's slice of it is mostly padding.
CONFIG = ModelConfig(100, 16, 1, 4, 2, 8, mlp=32, max_positions=16, softcap=20.0)
LORA = LoRAConfig(rank=4, alpha=8.0)
ROWS, LENGTH = 8, 6


def batch() -> Any:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    mask = (rng.random((ROWS, LENGTH)) < 0.7) & (np.arange(LENGTH) > 0)
    return tokens, {"old": rng.normal(size=(ROWS, LENGTH)).astype(np.float32) - 5, "mask": mask}


def terms(logprobs, entropy, data):
    ratio = jnp.exp(jnp.clip(logprobs - data["old"], -2, 2))
    loss = jnp.where(data["mask"], jnp.minimum(ratio, 1.5) - 0.1 * entropy, 0)
    return loss, {"ratio": jnp.where(data["mask"], ratio, 0)}


def summed(logprobs, params, tokens, data, *frozen):
    """The sums, and of which log-probabilities and entropies."""
    scored = chosen, entropy = logprobs(params, tokens, *frozen)
    loss, metrics = jax.tree.map(jnp.sum, terms(chosen, entropy, data))
    return loss, (metrics, scored)


def gradients(function, *arguments):
    return jax.device_get(fast_jit(jax.value_and_grad(function, has_aux=True))(*arguments))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "layout", "axis_type", "span"),
    [
        ((1, 2, 2), TRAIN_TP, AxisType.Explicit, 4),
        pytest.param((2, 2, 2), TRAIN, AxisType.Auto, 2, marks=pytest.mark.proof("families")),
    ],
    ids=lambda x: getattr(x, "name", None) or str(x),
)
def test_sums_equal_the_summed_terms_of_whole_rows_and_of_spans(reference, sizes, layout, axis_type, span):
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)], axis_type=axis_type)
    tokens, data = batch()
    starts: Any = np.array([1, 2, 3, 5, 4, 1, 2, 0], np.int32)  # a start of 0 is one of 1
    after = np.arange(LENGTH)[None, :] - np.maximum(starts, 1)[:, None]
    inside = (after >= 0) & (after < span)
    spanned = {**data, "mask": data["mask"] & inside}
    options = {"temperature": 0.7, "implementation": "xla"}
    with jax.set_mesh(mesh):
        params = jax.device_put(reference.random_params(CONFIG), param_shardings(CONFIG, mesh, layout))
        rows = jax.NamedSharding(mesh, jax.P(AXES))
        tokens, data, spanned, starts = jax.device_put((tokens, data, spanned, starts), rows)
        everywhere = make_logprobs(CONFIG, mesh, layout, **options)
        part = make_logprobs(CONFIG, mesh, layout, **options, span=span)
        by_span = lambda params, tokens: part(params, tokens, starts)  # noqa: E731
        sums = make_token_sums(CONFIG, mesh, layout, **options)
        sums_of_span = make_token_sums(CONFIG, mesh, layout, **options, span=span)
        plain = fast_jit(jax.value_and_grad(partial(summed, everywhere), has_aux=True))
        for function, of_tokens in (
            (partial(sums, terms=terms), data),
            (partial(summed, by_span), spanned),
            (lambda *x: sums_of_span(*x, terms, starts=starts), spanned),
        ):
            (loss, (metrics, whole)), gradient = jax.device_get(plain(params, tokens, of_tokens))
            (actual, more), actual_gradient = gradients(function, params, tokens, of_tokens)
            if isinstance(more, tuple):
                more, scored = more
                for x, everything in zip(scored, whole, strict=True):
                    np.testing.assert_allclose(x, np.where(inside, everything, 0), rtol=1e-5, atol=1e-6)
            jax.tree.map_with_path(same_gradient, (actual, more, actual_gradient), (loss, metrics, gradient))


def test_starts_come_with_a_span(reference):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1], axis_type=AxisType.Auto)
    params, (tokens, data), starts = reference.random_params(CONFIG), batch(), np.ones(ROWS, np.int32)
    with pytest.raises(TypeError, match="`starts`"):
        jax.eval_shape(make_logprobs(CONFIG, mesh, TRAIN, span=2), params, tokens)
    with pytest.raises(TypeError, match="`starts`"):
        sums = make_token_sums(CONFIG, mesh, TRAIN)
        jax.eval_shape(lambda *x: sums(*x, terms, starts=starts), params, tokens, data)


@pytest.mark.full
def test_sums_under_an_adapter(reference):
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        base = jax.device_put(unstacked(reference.random_params(CONFIG)), param_shardings(CONFIG, mesh, GENERATE))
        adapter = jax.tree.map(lambda x: x + 0.1, init_lora(CONFIG, LORA, jax.random.key(0)))
        adapter = jax.device_put(adapter, lora_shardings(CONFIG, mesh, LORA))
        arguments = adapter, *jax.device_put(batch(), jax.NamedSharding(mesh, jax.P(AXES)))
        logprobs = make_logprobs(CONFIG, mesh, GENERATE, lora=LORA)
        (loss, (metrics, _)), expected = gradients(lambda *x: summed(logprobs, *x, base), *arguments)
        sums = make_token_sums(CONFIG, mesh, GENERATE, lora=LORA)
        actual = gradients(lambda adapter, tokens, data: sums(adapter, tokens, data, terms, base), *arguments)
        jax.tree.map_with_path(same_gradient, actual, ((loss, metrics), expected))

        starts = jax.device_put(np.full(ROWS, 2, np.int32), jax.NamedSharding(mesh, jax.P(AXES)))
        both = fast_jit(make_logprobs_with_base(CONFIG, mesh, LORA, span=3))(adapter, arguments[1], starts, base)
        of_base, _ = fast_jit(make_logprobs(CONFIG, mesh, GENERATE))(base, arguments[1])
        alone = *fast_jit(logprobs)(adapter, arguments[1], base), of_base
        inside = (np.arange(LENGTH) >= 2) & (np.arange(LENGTH) < 5)
        for part, whole in zip(both, alone, strict=True):
            np.testing.assert_allclose(part, np.where(inside, whole, 0), rtol=1e-5, atol=1e-6)
