"""Splash attention against XLA's: values and gradients, interpreted, inside a `shard_map` that checks types."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jrlhf.meshes import TRAIN, make_mesh
from jrlhf.models import ModelConfig, make_logprobs
from jrlhf.models.attention import attention
from jrlhf.models.flash import splash_attention
from tests.models.shared import shapes_on, stacked_by_scan

B, N, H = 2, 4, 64


def drawn(seed, *shape) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.full
def test_values_and_gradients_are_those_of_xla():
    """Where key-value heads are the same on both devices of an axis, so that their gradient is a sum over these too."""
    length, options = 150, {"softcap": 1.5, "window": 20, "scale": 0.3}
    mesh = make_mesh(2, 1, 2, devices=jax.devices()[:4])
    query, weights = drawn(0, B, length, N, H), drawn(1, B, length, N, H)
    key, value = drawn(2, B, length, N // 2, H), drawn(3, B, length, N // 2, H)
    by_head, rows = jax.P("data", None, "tensor"), jax.P("data")

    def attend(query, key, value):
        here = jax.lax.axis_index("tensor")  # each device's query heads read one of the heads that both hold
        key, value = (jax.lax.dynamic_slice_in_dim(x, here, 1, 2) for x in (key, value))
        return splash_attention(query, key, value, interpret=pltpu.InterpretParams(), **options)

    def loss(attend, *operands):
        out = attend(*operands)
        return (out * weights).sum(), out

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(attend, in_specs=(by_head, rows, rows), out_specs=by_head)
        specs = (by_head, rows, rows)
        operands = [
            jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip((query, key, value), specs, strict=True)
        ]

        def placed(*operands):
            return jax.device_put(mapped(*operands), jax.NamedSharding(mesh, jax.P()))

        step = jax.jit(jax.value_and_grad(partial(loss, placed), argnums=(0, 1, 2), has_aux=True))
        (_, out), gradients = step(*operands)
    dense = partial(attention, implementation="xla", **options)
    (_, wanted), expected = jax.value_and_grad(partial(loss, dense), argnums=(0, 1, 2), has_aux=True)(query, key, value)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    for x, y in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-5)


CONFIG = ModelConfig(128, 64, 3, 2, 1, 64, mlp=96, max_positions=256, window=32, local_layers=(True, False, True))


def test_a_training_step_lowers_for_a_tpu_and_keeps_what_its_kernels_need():
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    params = shapes_on(CONFIG, mesh)
    with jax.set_mesh(mesh):
        logprobs = make_logprobs(CONFIG, mesh, TRAIN, dtype=jnp.bfloat16, attention="splash", remat="attention")
        step = jax.jit(jax.grad(lambda params, tokens: logprobs(params, tokens)[0].mean()))
        traced = step.trace(params, jax.ShapeDtypeStruct((2, 256), jnp.int32))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    # A layer's input, attention's output, and the sums of its softmax.
    residuals = {(x.shape[1:], x.dtype.name) for x in stacked_by_scan(traced.jaxpr, CONFIG.layers)}
    assert residuals == {((1, 256, 64), "bfloat16"), ((1, 2, 256, 64), "bfloat16"), ((1, 2, 256), "float32")}
    assert len(stacked_by_scan(traced.jaxpr, CONFIG.layers)) == 3
    # Of layers with and without a window, once forward, and twice backward; nothing is run forward again.
    assert text.count("tpu_custom_call") == 2 * 3
    assert "256x256" not in text
