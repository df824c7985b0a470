"""What Gemma, GPT-2 and the scaled and windowed Llamas add to the block, against the plain decoder on every layout."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import GENERATE, TRAIN, TRAIN_TP, make_mesh
from jrlhf.models import (
    ModelConfig,
    RopeScaling,
    SamplingConfig,
    make_generate,
    make_logprobs,
    make_values,
    param_shardings,
)
from jrlhf.models.modules import Norm
from tests.models.shared import GEMMA, GPT_2, fast_jit, same_gradient, scans, shapes_on, stacked_by_scan, unstacked

# 2 key-value heads for up to 4 devices of `tensor`; sequences longer than the windows; layers of both kinds.
SIZES: Any = dict(
    vocab_size=150, embed=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=32, tie_embeddings=True
)
CONFIGS = {
    "gemma": ModelConfig(
        **SIZES,
        **GEMMA,
        activation="gelu_tanh",
        rope_theta=1000.0,
        rope_scaling=RopeScaling("linear", 8.0),
        window=4,
        local_layers=(True, False, True),
        local_rope_theta=100.0,
        query_scale=0.3,
        attention_softcap=3.0,
        softcap=9.0,
        embed_scale=32**0.5,
    ),
    "gpt2": ModelConfig(**{**SIZES, "kv_heads": 4}, **GPT_2, activation="gelu_tanh"),
    "llama": ModelConfig(
        **{**SIZES, "tie_embeddings": False},
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope_theta=500.0,
        rope_scaling=RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
        window=5,
    ),
}
B, T, P, R = 8, 12, 6, 6


def batch(config) -> Any:
    return np.random.default_rng(7).integers(0, config.vocab_size, (B, T)).astype(np.int32)


def weighting() -> Any:
    return np.random.default_rng(3).normal(size=(2, B, T)).astype(np.float32)


@pytest.fixture(scope="module")
def expected(reference):
    """A function: family -> the weights, and the plain decoder's log-probabilities, entropies and gradients."""

    @cache
    def compute(family):
        config = CONFIGS[family]
        params = reference.random_params(config)

        def loss(params):
            outputs = reference.logprobs(params, config, batch(config))
            return sum((x * w).sum() for x, w in zip(outputs, weighting(), strict=True)), outputs

        (_, outputs), gradients = fast_jit(jax.value_and_grad(loss, has_aux=True))(params)
        return params, jax.device_get(outputs), jax.device_get(gradients)

    return compute


@pytest.mark.parametrize(
    ("family", "sizes", "layout", "remat"),
    [
        ("gemma", (2, 2, 2), TRAIN, "full"),
        ("gpt2", (1, 2, 4), TRAIN_TP, "full"),
        pytest.param("llama", (2, 1, 4), TRAIN_TP, "gather", marks=pytest.mark.full),
        pytest.param("gpt2", (2, 2, 2), TRAIN, "gather", marks=pytest.mark.full),
    ],
    ids=lambda x: getattr(x, "name", None) or str(x),
)
def test_outputs_and_gradients_equal_the_plain_decoder(expected, family, sizes, layout, remat):
    config, mesh = CONFIGS[family], make_mesh(*sizes)
    params, outputs, gradients = expected(family)
    logprobs = make_logprobs(config, mesh, layout, remat=remat)
    stored = param_shardings(config, mesh, layout)
    replicated = jax.NamedSharding(mesh, jax.P())

    def loss(params):
        outputs = logprobs(params, batch(config))
        weighted = (jax.device_put(x, replicated) * w for x, w in zip(outputs, weighting(), strict=True))
        return sum(x.sum() for x in weighted), outputs

    with jax.set_mesh(mesh):
        step = fast_jit(jax.value_and_grad(loss, has_aux=True))
        (_, actual), actual_gradients = jax.device_get(step(jax.device_put(params, stored)))
    for x, y in zip(actual, outputs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)

    def same(path, actual, expected):
        name = jax.tree_util.keystr(path)
        if config.positions == "learned" and "bk" in name:
            # Without rotation a bias on all keys adds the same to all scores of a query: its gradient is 0.
            assert max(np.abs(actual).max(), np.abs(expected).max()) < 1e-4
            return
        same_gradient(path, actual, expected, 2e-5)

    jax.tree.map_with_path(same, actual_gradients, gradients)


@pytest.mark.parametrize(
    "family", ["gemma", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "llama"))]
)
def test_generation_draws_with_the_log_probabilities_of_the_plain_decoder(expected, reference, family):
    """Rows of unequal lengths that outgrow the windows, one device's cache holding a share of the heads."""
    config, mesh = CONFIGS[family], make_mesh(1, 2, 4)
    params = expected(family)[0]
    lengths = np.random.default_rng(5).integers(1, P + 1, B).astype(np.int32)
    with jax.set_mesh(mesh):
        stored = jax.device_put(unstacked(params), param_shardings(config, mesh, GENERATE))
        generate = fast_jit(make_generate(config, mesh, SamplingConfig(R, temperature=0.8)))
        keys = jax.random.split(jax.random.key(11), B)
        out = jax.device_get(generate(stored, batch(config)[:, :P], lengths, keys))
    position = np.arange(P + R)[None, :]
    drawn = (position >= lengths[:, None]) & (position < lengths[:, None] + R)
    recomputed, _ = fast_jit(lambda tokens: reference.logprobs(params, config, tokens, 0.8))(out.tokens)
    np.testing.assert_allclose(out.logprobs[drawn], np.asarray(recomputed)[drawn], atol=1e-4)
    assert (out.logprobs[~drawn] == 0).all()


@pytest.mark.parametrize("family", CONFIGS)
def test_what_the_layer_scan_keeps(family):
    """Traced only: layers of both kinds in one scan keep one activation a layer, or all but their weights."""
    config, mesh, rows = CONFIGS[family], make_mesh(2, 2, 2), 2
    params = shapes_on(config, mesh)
    for remat in ("full", "gather"):
        with jax.set_mesh(mesh):
            logprobs = make_logprobs(config, mesh, TRAIN, remat=remat)
            function = jax.jit(jax.grad(lambda params, tokens, f=logprobs: f(params, tokens)[0].mean()))
            jaxpr = function.trace(params, jax.ShapeDtypeStruct((2 * B, T), jnp.int32)).jaxpr
        shapes = [x.shape[1:] for x in stacked_by_scan(jaxpr, config.layers)]
        if remat == "full":
            assert shapes == [(rows, T, config.embed)]
            continue
        assert (rows, T, config.mlp) in shapes
        weights = {leaf.shape[1:] for leaf in jax.tree.leaves(params["layers"])}
        assert not {shape for shape in shapes if len(shape) > 1} & weights


@pytest.mark.parametrize("family", ["gemma", "gpt2"])
def test_activations_keep_the_compute_dtype(family):
    """Float32 biases, norms and factors must not widen what follows them."""
    config, mesh = CONFIGS[family], make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        logprobs = make_logprobs(config, mesh, TRAIN, dtype=jnp.bfloat16)
        jaxpr = jax.jit(logprobs).trace(shapes_on(config, mesh), jax.ShapeDtypeStruct((B, T), jnp.int32)).jaxpr
    (scan,) = scans(jaxpr)
    assert [x.aval.dtype for x in scan.outvars] == [jnp.bfloat16]
    products = [
        equation.outvars[0].aval
        for equation in scan.params["jaxpr"].jaxpr.eqns[0].params["jaxpr"].eqns
        if equation.primitive.name == "dot_general"
    ]
    assert products and all(x.dtype == jnp.bfloat16 for x in products if x.ndim == 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_norms_are_applied_in_float32_whatever_their_dtype(dtype):
    """1 + 2^-9 is no bfloat16, but 2^-9 is; and what float32 scales compute is what it was."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.float32)
    for name in ("gemma", "gpt2"):
        weights = {"scale": jnp.full(32, 2.0**-9, dtype), "bias": jnp.full(32, 3.0, dtype)}
        norm = Norm(CONFIGS[name], weights if name == "gpt2" else {"scale": weights["scale"]})
        centred = x - (x.mean(-1, keepdims=True) if name == "gpt2" else 0)
        unit = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + CONFIGS[name].norm_eps)
        np.testing.assert_allclose(norm(x), unit * 2.0**-9 + 3 if name == "gpt2" else unit * (1 + 2.0**-9), rtol=1e-5)


def test_rows_of_padding_leave_everything_finite(expected):
    """Rows that are padding but for one token: no value and no gradient is NaN."""
    config, mesh = CONFIGS["gemma"], make_mesh(1, 1, 1, devices=jax.devices()[:1])
    params = expected("gemma")[0]
    scalar = {name: params[name] for name in ("embedding", "layers", "final_norm")}
    scalar["value_head"] = {"kernel": np.ones(config.embed, np.float32), "bias": np.zeros((), np.float32)}
    tokens: Any = np.zeros((B, T), np.int32)
    with jax.set_mesh(mesh):
        values = make_values(config, mesh, TRAIN)
        stored = jax.device_put(scalar, param_shardings(config, mesh, TRAIN, "scalar"))
        value, gradients = fast_jit(jax.value_and_grad(lambda p: values(p, tokens)[:, 1].sum()))(stored)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(gradients)))
