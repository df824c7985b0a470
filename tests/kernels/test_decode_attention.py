"""The decode kernel against attention position by position, and where it is chosen."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from benchmarks.shapes import generation_copy
from jrlhf.kernels import decode_attention as kernel_module
from jrlhf.kernels.decode_attention import BLOCK, decode_attention
from jrlhf.meshes import AXES
from jrlhf.models import SamplingConfig, make_generate
from jrlhf.models import attention as attention_module
from jrlhf.models.attention import LayerCache, cached_attention
from tests.models.shared import FAMILIES

# Newer releases of JAX warn of what a later one leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
TRITON = "gpu.triton"  # the custom call of a Triton kernel


def by_loops(query, key, value, lengths, *, scale, softcap, window):
    """Attention in float64, row by row and head by head."""
    out = np.zeros(query.shape)
    for row, head, member in np.ndindex(query.shape[:3]):
        end = min(lengths[row], key.shape[2])
        start = 0 if window is None else max(0, end - window)
        scores = key[row, head, start:end].astype(np.float64) @ query[row, head, member] * scale
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[row, head, member] = weights @ value[row, head, start:end] / weights.sum()
    return out


@pytest.mark.parametrize(("group", "softcap", "window"), [(7, None, None), (20, 1.5, BLOCK + 3)])
def test_only_filled_positions_are_read(group, softcap, window):
    """Positions past a row's length, or before its window, are NaN. The last row is done: its length exceeds S."""
    size = 2 * BLOCK + 11
    lengths = np.array([1, BLOCK, 2 * BLOCK + 1, size, size + 50], np.int32)
    random = np.random.default_rng(0)
    query = random.normal(size=(5, 2, group, 16)).astype(np.float32)
    key, value = random.normal(size=(2, 5, 2, size, 16)).astype(np.float32)
    end, position = np.minimum(lengths, size)[:, None, None, None], np.arange(size)[None, None, :, None]
    unread = (position >= end) | (position < end - (size if window is None else window))
    options = {"scale": 0.3, "softcap": softcap, "window": window}
    kernel = jax.jit(partial(decode_attention, interpret=True, **options))
    actual = kernel(query, np.where(unread, np.nan, key), np.where(unread, np.nan, value), lengths)
    np.testing.assert_allclose(actual, by_loops(query, key, value, lengths, **options), atol=2e-6)


@pytest.mark.parametrize("options", [{"scale": 0.7, "softcap": 1.5, "window": 20}, {"window": 20, "local": False}])
def test_a_cache_is_read_as_xla_reads_it(monkeypatch, options):
    """On the way to the kernel: its scale and window, keys and values, and the grouping of heads."""
    random, size = np.random.default_rng(1), BLOCK + 8
    query = random.normal(size=(3, 1, 6, 16)).astype(np.float32)
    key, value = random.normal(size=(2, 3, 2, size, 16)).astype(np.float32)
    lengths = jnp.asarray([1, BLOCK, size], jnp.int32)

    def attend(implementation):
        cache = LayerCache(jnp.asarray(key), jnp.asarray(value))
        return jax.jit(partial(cached_attention, implementation=implementation, **options))(query, cache, lengths)

    expected = attend("xla")
    monkeypatch.setattr(attention_module, "target_platform", lambda: "gpu")
    monkeypatch.setattr(attention_module, "reads_filled_positions", lambda cache: True)
    monkeypatch.setattr(kernel_module, "decode_attention", partial(decode_attention, interpret=True))
    np.testing.assert_allclose(attend(None), expected, atol=2e-6)


def text_on_gpus(f, *arguments, mesh=None):
    mesh = mesh or AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows", "implementation", "kernels"),
    [
        (jnp.bfloat16, 128, 64, None, 1),
        (jnp.float16, 64, 64, "cudnn", 1),
        (jnp.bfloat16, 128, 64, "xla", 0),
        (jnp.float32, 128, 64, None, 0),
        (jnp.bfloat16, 80, 64, None, 0),
        (jnp.bfloat16, 8, 64, None, 0),
        (jnp.bfloat16, 128, 63, None, 0),  # 126 programs
        (jnp.bfloat16, 128, 2**18, None, 0),  # 2^32 numbers, which 32 bits do not count
    ],
)
def test_which_caches_the_kernel_reads(dtype, head_dim, rows, implementation, kernels):
    def attend(query, key, value, lengths):
        return cached_attention(query, LayerCache(key, value), lengths, implementation=implementation)

    query, cache = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 1, 6, head_dim), (rows, 2, 64, head_dim)))
    text = text_on_gpus(attend, query, cache, cache, jax.ShapeDtypeStruct((rows,), jnp.int32))
    assert text.count(TRITON) == kernels


@pytest.mark.parametrize("attention", [None, "xla"])
def test_generation_on_gpus_has_one_kernel_a_layer(attention):
    config = replace(FAMILIES["gemma"], head_dim=64)  # softcap, windows, and layers of both kinds
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3, abstract_device=H200)
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    rows = [jax.ShapeDtypeStruct(*one) for one in (((512, 6), jnp.int32), ((512,), jnp.int32), ((512,), key))]
    generate = make_generate(config, mesh, SamplingConfig(max_new_tokens=4), dtype=jnp.bfloat16, attention=attention)
    assert text_on_gpus(generate, generation_copy(config, mesh, jnp.bfloat16), *rows, mesh=mesh).count(TRITON) == (
        config.layers if attention is None else 0
    )
