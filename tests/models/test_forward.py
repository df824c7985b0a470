"""Log-probabilities, values and scores against the plain decoder, on every mesh, and what their programs cost."""

import itertools
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from benchmarks.hlo import collectives
from jrlhf.meshes import AXES, GENERATE, TRAIN, TRAIN_TP, make_mesh
from jrlhf.models import PRESETS, ModelConfig, init_lm, make_logprobs, make_scores, make_values, param_shardings
from jrlhf.models.modules import Norm
from tests.models.shared import (
    FAMILIES,
    QUICK,
    SHALLOW,
    assert_stored,
    batch,
    fast_jit,
    same_gradient,
    scans,
    shapes_on,
    weighted_sum,
)

# Every switch; 2 key-value heads for up to 8 devices; a vocabulary that is no multiple of 128.
EVERYTHING = ModelConfig(300, 32, 2, 8, 2, 8, mlp=48, max_positions=64, qk_norm=True, qkv_bias=True, softcap=20.0)
TEMPERATURE = 0.7
# A model, and what its scalar head computes, if it has one.
CASES = {"values": (EVERYTHING, "values"), "scores": (EVERYTHING, "scores")}
CASES |= {name: (config, None) for name, config in SHALLOW.items()}


@pytest.fixture(scope="module")
def expected(reference):
    """(config, kind of scalars) -> the weights, and the plain decoder's outputs and gradients."""

    @cache
    def compute(config, what):
        params = reference.random_params(config), reference.random_params(config, "scalar", seed=1)
        params = params if what else params[:1]
        tokens, lengths = batch(config)

        def loss(lm, *scalar):
            values = [reference.values(head, config, tokens) for head in scalar]
            scalars = [x[np.arange(len(lengths)), lengths] for x in values] if what == "scores" else values
            outputs = *reference.logprobs(lm, config, tokens, TEMPERATURE), *scalars
            return weighted_sum(outputs), outputs

        step = jax.value_and_grad(lambda params: loss(*params), has_aux=True)
        (_, outputs), gradients = fast_jit(step)(params)
        return params, jax.device_get((outputs, gradients))

    return compute


@pytest.mark.parametrize(
    ("case", "sizes", "layout", "remat", "axis_type"),
    [
        ("values", (2, 2, 2), TRAIN, "full", AxisType.Explicit),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("gemma", (1, 2, 2), TRAIN_TP, "gather", AxisType.Auto),
                ("gpt2", (1, 2, 4), TRAIN, "full", AxisType.Auto),
            )
        ),
        *(
            pytest.param(*case, marks=pytest.mark.proof("families"))
            for case in (
                ("scores", (1, 1, 8), TRAIN_TP, "gather", AxisType.Explicit),
                ("llama", (2, 1, 4), TRAIN_TP, "gather", AxisType.Explicit),
            )
        ),
    ],
    ids=lambda x: getattr(x, "name", None) or str(x),
)
def test_outputs_and_gradients_equal_the_plain_decoder(expected, case, sizes, layout, remat, axis_type):
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)], axis_type=axis_type)
    config, what = CASES[case]
    params, (outputs, gradients) = expected(config, what)
    tokens, lengths = batch(config)
    logprobs = make_logprobs(config, mesh, layout, temperature=TEMPERATURE, remat=remat)
    values = make_values(config, mesh, layout, remat=remat)
    scores = make_scores(config, mesh, layout, remat=remat)

    def loss(params):
        lm, *heads = params
        scalars = [values(x, tokens) if what == "values" else scores(x, tokens, lengths) for x in heads]
        outputs = *logprobs(lm, tokens), *scalars
        # Results meet arrays whose rows lie over all axes, as those of an experience do.
        return weighted_sum(outputs, rows), outputs

    rows = jax.NamedSharding(mesh, jax.P(AXES))
    stored = tuple(param_shardings(config, mesh, layout, head) for head in ("lm", "scalar")[: len(params)])
    with jax.set_mesh(mesh):
        step = fast_jit(jax.value_and_grad(loss, has_aux=True))
        (_, actual), actual_gradients = step(jax.device_put(params, stored))
        assert_stored(actual_gradients, stored)
    for x, y in zip(actual, outputs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 if case not in FAMILIES else 1e-4)

    def same(path, actual, expected):
        if config.positions == "learned" and path[-1].key == "bk":
            # Without rotation a bias on all keys adds the same to all scores of a query: its gradient is 0.
            assert max(np.abs(actual).max(), np.abs(expected).max()) < 1e-4
        else:
            same_gradient(path, actual, expected, 2e-5)

    jax.tree.map_with_path(same, jax.device_get(actual_gradients), gradients)


def test_bfloat16_compute_stays_near_float32(expected):
    mesh = make_mesh(fsdp=4, tensor=2)
    config = EVERYTHING
    params, ((logprobs, entropy, _), _) = expected(config, "values")
    with jax.set_mesh(mesh):
        stored = jax.device_put(params[0], param_shardings(config, mesh, TRAIN))
        rounded = fast_jit(make_logprobs(config, mesh, TRAIN, temperature=TEMPERATURE, dtype=jnp.bfloat16))
        actual, actual_entropy = rounded(stored, batch(config)[0])
    assert actual.dtype == actual_entropy.dtype == jnp.float32
    error = np.abs(np.asarray(actual) - logprobs)
    # Not float32's numbers, but as near as 8 bits of mantissa bring a two-layer model with logits of some tens.
    assert 1e-4 < error.mean() < 0.15
    assert np.abs(np.asarray(actual_entropy) - entropy).mean() < 0.15


@pytest.mark.parametrize("family", ["gemma", "gpt2"])
def test_activations_keep_the_compute_dtype(family):
    """Float32 biases, norms and factors must not widen what follows them."""
    config, mesh = FAMILIES[family], make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        logprobs = make_logprobs(config, mesh, TRAIN, dtype=jnp.bfloat16)
        jaxpr = jax.jit(logprobs).trace(shapes_on(config, mesh), jax.ShapeDtypeStruct((8, 12), jnp.int32)).jaxpr
    (scan,) = scans(jaxpr)
    assert [x.aval.dtype for x in scan.outvars] == [jnp.bfloat16]
    products = [
        equation.outvars[0].aval
        for equation in scan.params["jaxpr"].jaxpr.eqns[0].params["jaxpr"].eqns
        if equation.primitive.name == "dot_general"
    ]
    assert products and all(x.dtype == jnp.bfloat16 for x in products if x.ndim == 3)


def test_norms_are_applied_in_float32_whatever_their_dtype():
    """1 + 2^-9 is no bfloat16, but 2^-9 is; and what float32 scales compute is what it was."""
    x: Any = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    for name, dtype in itertools.product(("gemma", "gpt2"), (jnp.bfloat16, jnp.float32)):
        weights = {"scale": jnp.full(32, 2.0**-9, dtype), "bias": jnp.full(32, 3.0, dtype)}
        norm = Norm(FAMILIES[name], weights if name == "gpt2" else {"scale": weights["scale"]})
        centred = x - (x.mean(-1, keepdims=True) if name == "gpt2" else 0)
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + FAMILIES[name].norm_eps)
        np.testing.assert_allclose(norm(x), unit * 2.0**-9 + 3 if name == "gpt2" else unit * (1 + 2.0**-9), rtol=1e-5)


def test_traces_on_an_abstract_mesh():
    mesh = AbstractMesh((2, 16, 8), AXES, axis_types=(AxisType.Explicit,) * 3)
    config = PRESETS["meta-llama/Meta-Llama-3-8B"]
    params = shapes_on(config, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        loss = make_logprobs(config, mesh, TRAIN, dtype=jnp.bfloat16, attention="xla")
        gradient = jax.grad(lambda params, tokens: loss(params, tokens)[0].sum())
        gradients = jax.eval_shape(gradient, params, jax.ShapeDtypeStruct((256, 128), jnp.int32))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), gradients) == jax.tree.map(lambda x: (x.shape, x.dtype), params)


@pytest.mark.full
def test_gradients_are_reduce_scattered():
    """Compiled, on a mesh with all three axes: sums over `data` are of slices, a quarter of a weight here."""
    config, mesh = ModelConfig(256, 64, 4, 8, 8, 8, mlp=256, max_positions=64), make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        logprobs = make_logprobs(config, mesh, TRAIN)
        function = jax.jit(jax.grad(lambda params, tokens: logprobs(params, tokens)[0].mean()))
        lowered = function.lower(shapes_on(config, mesh), jax.ShapeDtypeStruct((16, 16), jnp.int32))
        text: Any = lowered.compile(QUICK).as_text()
    assert collectives(text)["reduce-scatter"] >= 7  # one a weight of the layer, at least
    reduced = [
        np.prod([int(size) for size in shape.split(",")])
        for line in re.findall(r" = (.*?) all-reduce\(", text)
        for shape in re.findall(r"\w+\[([\d,]+)\]", line)
    ]
    assert reduced and max(reduced) <= config.embed * config.mlp // 4


# ---- what is refused


def test_a_model_that_does_not_fit_the_mesh_is_refused():
    for change, sizes, message in (
        ({"heads": 6, "kv_heads": 2}, (1, 2, 4), "heads=6 cannot be divided over tensor=4"),
        ({"heads": 12, "kv_heads": 6}, (1, 2, 4), "kv_heads=6 cannot be divided over tensor=4"),
        ({"mlp": 42}, (1, 2, 4), "mlp=42 cannot be divided over tensor=4"),
        ({"embed": 36}, (1, 8, 1), "embed=36 cannot be divided over fsdp=8"),
        ({"heads": 3, "kv_heads": 3, "vocab_size": 128}, (1, 1, 3), "padded_vocab=128 cannot be divided over tensor=3"),
    ):
        mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        for make in (make_logprobs, make_values):
            with pytest.raises(ValueError, match=message):
                make(replace(EVERYTHING, **change), mesh, TRAIN)
    with pytest.raises(ValueError, match="mesh has axes d, but a model needs data, fsdp, tensor: use make_mesh"):
        make_logprobs(EVERYTHING, jax.make_mesh((8,), ("d",)), TRAIN)
    with pytest.raises(TypeError, match="config is of class str, but must be a ModelConfig, such as HFConfig.model"):
        make_logprobs("llama", make_mesh(fsdp=8), TRAIN)  # pyright: ignore[reportArgumentType]


def test_bad_arguments_are_refused():
    mesh = make_mesh(2, 2, 2)
    shapes = jax.eval_shape(partial(init_lm, EVERYTHING), jax.random.key(0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'span'"):
        make_values(EVERYTHING, mesh, TRAIN, span=3)
    with pytest.raises(ValueError, match="remat .none.: known are offload, full"):
        make_logprobs(EVERYTHING, mesh, TRAIN, remat="none")
    for temperature in (0, float("inf")):
        with pytest.raises(ValueError, match=f"temperature={temperature} must be positive and finite"):
            make_logprobs(EVERYTHING, mesh, TRAIN, temperature=temperature)
    with pytest.raises(ValueError, match=r"train layout: a batch of 12 rows .* over 8 devices .*data=2 \* fsdp=2"):
        jax.eval_shape(make_logprobs(EVERYTHING, mesh, TRAIN), shapes, jax.ShapeDtypeStruct((12, 8), jnp.int32))
    listed = {**shapes, "layers": [{}]}
    for layout, weights, dtype, message in (
        (TRAIN, shapes, jnp.float32, "^tokens must be an array of integers, of rows and time"),
        (TRAIN, listed, jnp.int32, r"reshard them to param_shardings\(model, mesh, TRAIN\)"),
        (GENERATE, shapes, jnp.int32, r"reshard them to param_shardings\(model, mesh, GENERATE\)"),
    ):
        for make in (make_logprobs, make_values):
            with pytest.raises((TypeError, ValueError), match=message):
                jax.eval_shape(make(EVERYTHING, mesh, layout), weights, jax.ShapeDtypeStruct((16, 8), dtype))
    with pytest.raises(ValueError, match="65 tokens a row exceed the model's max_positions=64"):
        jax.eval_shape(make_logprobs(EVERYTHING, mesh, TRAIN_TP), shapes, jax.ShapeDtypeStruct((12, 65), jnp.int32))
