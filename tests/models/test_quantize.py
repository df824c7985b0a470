"""int8 matrices: their error, where they lie, and that they compute as the floats they stand for."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jrlhf.meshes import GENERATE, TRAIN, TRAIN_TP, make_mesh
from jrlhf.models import (
    Int8,
    LoRAConfig,
    ModelConfig,
    SamplingConfig,
    init_lm,
    init_lora,
    int8_error,
    int8_shardings,
    lora_shardings,
    make_generate,
    make_logprobs,
    merge,
    param_shardings,
    quantize,
    to_int8,
)
from jrlhf.models.quantize import dequantised
from tests.models.shared import assert_stored, fast_jit, unstacked

CONFIG = ModelConfig(150, 32, 2, 8, 2, 8, mlp=48, max_positions=32, qkv_bias=True)
LORA = LoRAConfig(rank=2, alpha=8.0, targets=("q_proj", "down_proj"))
INPUTS = {"wq": 1, "wk": 1, "wv": 1, "wo": 2, "gate": 1, "up": 1, "down": 1}


@pytest.fixture(scope="module")
def base(reference):
    params = reference.random_params(CONFIG)
    params["embedding"] = params["embedding"] * np.float32(0.3)
    params["layers"]["mlp"]["gate"][0, :, 5] = 0  # a channel of zeros has no largest entry to scale by
    return params


def matrices(layer):
    return {name: layer[part][name] for part in ("attention", "mlp") for name in layer[part] if name in INPUTS}


def test_no_entry_is_off_by_more_than_half_a_step_of_its_channel(base):
    params = jax.tree.map(jnp.asarray, base)
    for weights in (params, unstacked(params)):
        quantised, stacked = to_int8(weights), weights is params
        assert quantised["embedding"] is weights["embedding"]
        layers = [[x["layers"]] if stacked else x["layers"] for x in (quantised, weights)]
        for rounded, whole in zip(*layers, strict=True):
            assert rounded["attention"]["bq"] is whole["attention"]["bq"]
            assert rounded["mlp_norm"]["scale"] is whole["mlp_norm"]["scale"]
            for name, low in matrices(rounded).items():
                w = np.asarray(matrices(whole)[name], np.float32)
                axes = tuple(range(stacked, stacked + INPUTS[name]))
                assert isinstance(low, Int8) and low.values.dtype == np.int8 and low.scale.dtype == np.float32
                assert low.scale.shape == tuple(1 if i in axes else n for i, n in enumerate(w.shape))
                assert np.abs(np.asarray(low.values, np.int32)).max() == 127
                off = np.abs(np.asarray(low.values, np.float32) * np.asarray(low.scale) - w)
                assert (off <= np.abs(w).max(axes, keepdims=True) / 254 * (1 + 1e-5)).all()


def test_the_error_is_measured(base):
    weights = jax.tree.map(jnp.asarray, base)
    quantised = to_int8(weights)
    errors = int8_error(weights, quantised)
    assert errors == pytest.approx(int8_error(unstacked(weights), to_int8(unstacked(weights))), rel=1e-5)
    assert errors.keys() == {
        *(f"attention/{name}" for name in ("wq", "wk", "wv", "wo")),
        *(f"mlp/{name}" for name in ("gate", "up", "down")),
    }
    w, low = base["layers"]["mlp"]["down"], quantised["layers"]["mlp"]["down"]
    lost = np.asarray(low.values, np.float32) * np.asarray(low.scale) - w
    np.testing.assert_allclose(errors["mlp/down"], np.linalg.norm(lost) / np.linalg.norm(w), rtol=1e-5)
    # Uniform rounding of Gaussian channels of 32 to 64: s / sqrt(12) with s = max / 127 and max between 2 and 3 sigma.
    assert all(2 / 127 / 12**0.5 < error < 3 / 127 / 12**0.5 for error in errors.values())


@pytest.mark.full
@pytest.mark.parametrize("generates", [False, True])
def test_int8_computes_as_the_floats_that_it_stands_for(base, generates):
    """Log-probs and an adapter's gradient, or generation, on a mesh, against the dequantised weights'. One layer."""
    config = replace(CONFIG, layers=1)
    base = {**base, "layers": jax.tree.map(lambda x: x[:1], base["layers"])}
    mesh = make_mesh(1, 1, 2, devices=jax.devices()[:2])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (16, 9)).astype(np.int32)
    prompts = tokens[:, :4], np.full(16, 4, np.int32), jax.random.split(jax.random.key(0), 16)
    logprobs = make_logprobs(config, mesh, GENERATE, lora=LORA)
    generate = fast_jit(make_generate(config, mesh, SamplingConfig(5), lora=LORA))
    step = fast_jit(jax.value_and_grad(lambda adapter, base: logprobs(adapter, tokens, base)[0].sum()))
    with jax.set_mesh(mesh):
        shardings = param_shardings(config, mesh, GENERATE)
        quantised = to_int8(jax.device_put(unstacked(base), shardings))
        assert_stored(quantised, int8_shardings(shardings))
        floats = jax.device_put(dequantised(jax.device_get(quantised), jnp.float32), shardings)
        adapter = jax.device_put(
            jax.tree.map(lambda x: x + 0.1, init_lora(config, LORA, jax.random.key(1))),
            lora_shardings(config, mesh, LORA),
        )
        if generates:
            drawn, same = jax.device_get([generate(adapter, *prompts, x) for x in (quantised, floats)])
            np.testing.assert_array_equal(drawn.tokens, same.tokens)
            np.testing.assert_allclose(drawn.logprobs, same.logprobs, atol=1e-5)
            return
        (value, gradient), (same, same_gradient) = jax.device_get([step(adapter, x) for x in (quantised, floats)])
        merged, same_merged = jax.device_get([merge(x, adapter, LORA) for x in (quantised, floats)])
    np.testing.assert_allclose(value, same, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), gradient, same_gradient)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), merged, same_merged)


def test_donated_matrices_are_gone_once_they_are_int8(base):
    """At no time more than the weights and one matrix of them: what was quantised before is deleted."""
    weights = jax.tree.map(jnp.array, unstacked(base))
    copied = to_int8(weights)
    originals = {id(x): x for layer in weights["layers"] for x in matrices(layer).values()}
    alive = []
    original = quantize._quantizer

    def watched(*arguments):
        alive.append(sum(not x.is_deleted() for x in originals.values()))
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "_quantizer", watched)
        given = to_int8(weights, donate=True)
    assert alive == list(range(len(originals), 0, -1)) and all(x.is_deleted() for x in originals.values())
    jax.tree.map(np.testing.assert_array_equal, given, copied)  # and what is shared is still there


def test_weights_that_are_no_numbers_are_refused(base):
    for bad in (np.nan, np.inf):
        weights = jax.tree.map(np.array, unstacked(base))
        weights["layers"][1]["mlp"]["up"][3, 4] = bad
        with pytest.raises(ValueError, match=r"layers\[1\]\['mlp'\]\['up'\] holds NaN or an infinity"):
            to_int8(jax.tree.map(jnp.asarray, weights))


def test_each_layer_waits_for_its_own_input():
    """Traced: as many inputs hold back int8 matrices as there are layers, in the prefill and in the decode loop.

    Where all waited for the same array, a compiler would make the floats of all layers together.
    """
    mesh = make_mesh(1, 2, 4, axis_type=AxisType.Auto)
    shapes = jax.eval_shape(partial(init_lm, CONFIG), jax.random.key(0))
    weights = jax.eval_shape(lambda params: to_int8(unstacked(params)), shapes)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
    tokens, lengths = jax.ShapeDtypeStruct((16, 4), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.int32)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(make_generate(CONFIG, mesh, SamplingConfig(5)))(weights, tokens, lengths, keys)
    orders = [waited for waited in barriers(jaxpr.jaxpr) if waited]
    assert [len(waited) for waited in orders] == [7 * CONFIG.layers] * 2  # the prefill's, and the loop's
    assert [len(set(waited)) for waited in orders] == [CONFIG.layers] * 2


def barriers(jaxpr):
    """For a jaxpr and every one inside it, what its optimisation barriers wait for."""
    origin: dict[Any, Any] = {}
    waited = []
    for equation in jaxpr.eqns:
        # Literals cannot be keys.
        name, inputs = equation.primitive.name, [str(x) if hasattr(x, "val") else x for x in equation.invars]
        if name in ("stop_gradient", "pvary"):  # the same numbers
            origin[equation.outvars[0]] = origin.get(inputs[0], inputs[0])
        elif name == "optimization_barrier":
            waited.append(origin[inputs[-1]])
    orders = [waited]
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                orders += barriers(inner)
    return orders


def test_int8_is_refused_where_it_would_become_floats(base):
    mesh = make_mesh(1, 2, 4)
    tokens = np.zeros((16, 4), np.int32)
    weights = to_int8(jax.tree.map(jnp.asarray, base))
    for layout in (TRAIN, TRAIN_TP):
        with pytest.raises(ValueError, match=f"int8 weights need the generate layout .* this is {layout.name}"):
            jax.eval_shape(make_logprobs(CONFIG, mesh, layout), weights, tokens)
    with pytest.raises(ValueError, match="a remat other than 'gather', but this is generate and 'gather'"):
        jax.eval_shape(make_logprobs(CONFIG, mesh, GENERATE, remat="gather"), weights, tokens)
