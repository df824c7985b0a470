"""Rotary positions, attention against a cache, and the choice of an implementation."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.models import RopeScaling
from jrlhf.models.attention import (
    append,
    attention,
    cached_attention,
    default_attention,
    grown_cache,
    prefilled_cache,
    rotate,
    rotation,
    scaled,
)
from jrlhf.models.flash import reads_filled_positions
from jrlhf.models.generation.programs import empty_cache, filled_cache

B, T, N, K, H = 3, 7, 4, 2, 8


def normal(*shape) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_bfloat16_activations_are_turned_by_exact_angles():
    x = jnp.ones((1, 2, 1, H), jnp.bfloat16)
    turned = jax.jit(lambda x: rotate(x, rotation(jnp.array([[256, 257]]), H, 10000.0)))(x)
    assert turned.dtype == jnp.bfloat16
    angles = np.array([256.0, 257.0])[:, None] * 10000.0 ** (-np.arange(0, H, 2) / H)[None, :]
    expected = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], -1)
    np.testing.assert_allclose(turned[0, :, 0].astype(np.float32), expected, atol=0.01)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_cache_is_written_at_each_rows_position_only(transposed):
    cache = empty_cache(B, K, T, H, jnp.float32, transposed=transposed)
    positions: Any = np.array([0, 3, 6])
    key, value = normal(B, 1, K, H), normal(B, 1, K, H + 1)[..., :H]
    written = append(cache, key, value, positions)
    keys = written.key.swapaxes(2, 3) if transposed else written.key
    for actual, new in ((keys, key), (written.value, value)):
        expected = np.zeros((B, K, T, H), np.float32)
        expected[np.arange(B), :, positions] = new[:, 0]
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_enter_a_grown_cache(transposed):

    @jax.jit
    def enter(key, value, former):
        prompts = prefilled_cache(key, value, T, transposed=transposed)
        decoding = grown_cache(prefilled_cache(former, former, 1, transposed=transposed), T + 3)
        # A former row's NaN would spoil the next row even where its weight is 0: it must be gone.
        decoding = jax.tree.map(lambda x: x.at[jnp.array([0, 2])].set(jnp.nan), decoding)
        slots = jnp.array([2, B, 0, B, B, B])  # each row has two slots; most of them are nowhere
        return prompts, decoding, filled_cache(decoding, prompts, slots)

    prompts, decoding, result = enter(normal(B, T, K, H), normal(B, T, K, H + 1)[..., :H], normal(B, 1, K, H))
    for name in ("key", "value"):

        def by_position(cache, last=transposed and name == "key", name=name):
            x = np.asarray(getattr(cache, name))
            return x.swapaxes(2, 3) if last else x

        expected = np.zeros((B, K, T + 3, H), np.float32)
        expected[1] = by_position(decoding)[1]
        expected[[2, 0], :, :T] = by_position(prompts)[[0, 1]]
        np.testing.assert_array_equal(by_position(result), expected)


def by_loops(query, key, value, *, scale, softcap, window):
    """Attention position by position, in float64."""
    out = np.zeros(query.shape)
    for b, t, n in np.ndindex(query.shape[:3]):
        first = max(0, t + 1 - window) if window else 0
        head = n // (query.shape[2] // key.shape[2])
        scores = key[b, first : t + 1, head].astype(np.float64) @ query[b, t, n] * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ value[b, first : t + 1, head] / weights.sum()
    return out


@pytest.mark.parametrize(
    ("scale", "softcap", "window"), [(None, None, 1), (0.7, 1.5, 3), (None, 1.5, T), (0.2, None, None)]
)
def test_scale_softcap_and_window(scale, softcap, window):
    """Attends over whole rows and over a cache. A flag, traced or not, turns a layer's window on."""
    query, key, value = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H + 1)[..., :H]
    options = {"scale": scale, "softcap": softcap, "window": window}
    lengths, rows = np.array([1, 4, 7]), np.arange(B)
    rubbish = np.where(np.arange(T)[None, :] < lengths[:, None], 0, 1e3)[:, :, None, None].astype(np.float32)

    def run(local):
        return attention(query, key, value, **options, local=local)

    @partial(jax.jit, static_argnums=0)
    def over_caches(local):
        last = query[rows, lengths - 1][:, None]
        caches = [prefilled_cache(key + rubbish, value + rubbish, size=T + 2, transposed=x) for x in (False, True)]
        return [cached_attention(last, cache, jnp.asarray(lengths), **options, local=local) for cache in caches]

    static, traced = jax.jit(run, static_argnums=0), jax.jit(run)
    for local in (True, False):
        seen = window if local else None
        expected = by_loops(query, key, value, scale=scale or H**-0.5, softcap=softcap, window=seen)
        for actual in (static(local), traced(local)):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
        for last in over_caches(local):
            np.testing.assert_allclose(last[:, 0], expected[rows, lengths - 1], atol=1e-5)


def test_cudnn_windows_are_its_own_and_layers_choose_by_a_branch(monkeypatch):
    """cuDNN takes no masks of [T, T]: what it is asked for, computed here by XLA."""
    asked = []
    dense = jax.nn.dot_product_attention

    def cudnn(*arguments, implementation, **keywords):
        assert implementation == "cudnn" and "mask" not in keywords
        asked.append(keywords.get("local_window_size"))
        return dense(*arguments, implementation="xla", **keywords)

    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    query, key, value = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H + 1)[..., :H]

    def run(local, window=3):
        return attention(query, key, value, window=window, local=local, implementation="cudnn")

    static, traced = jax.jit(run, static_argnums=(0, 1)), jax.jit(run)

    near, everywhere = (by_loops(query, key, value, scale=H**-0.5, softcap=None, window=size) for size in (3, None))
    np.testing.assert_allclose(static(True), near, atol=1e-5)
    np.testing.assert_allclose(static(False), everywhere, atol=1e-5)
    np.testing.assert_allclose(static(True, T), everywhere, atol=1e-5)
    assert asked == [(2, 0), None, None]
    np.testing.assert_allclose(traced(True), near, atol=1e-5)
    np.testing.assert_allclose(traced(False), everywhere, atol=1e-5)
    with pytest.raises(ValueError, match="cuDNN's attention has no softcap=2: use attention='xla'"):
        attention(query, key, value, softcap=2.0, implementation="cudnn")


def test_rope_scaling_lowers_what_it_should():
    """The bands of Llama 3.1: wavelengths are 2 pi / frequency."""
    scaling = RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    wavelengths = np.array([100.0, 8192 / 4, 8192 / 2.5, 8192.0, 20000.0])
    lowered = jax.jit(scaled, static_argnums=1)((2 * np.pi / wavelengths).astype(np.float32), scaling)
    actual = np.asarray(lowered) * wavelengths / (2 * np.pi)
    # Kept; kept at the border; half way between; lowered at the border; lowered.
    np.testing.assert_allclose(actual, [1, 1, (1 + 1 / 8) / 2, 1 / 8, 1 / 8], rtol=1e-5)
    linear, positions = RopeScaling("linear", 4.0), jnp.arange(5)[None]
    turned = jax.jit(lambda: (rotation(4 * positions, H, 100.0, linear), rotation(positions, H, 100.0)))
    for slow, fast in zip(*turned(), strict=True):
        np.testing.assert_allclose(slow, fast, atol=1e-6)


def test_kernels_are_chosen_where_they_can_run():
    for backend, dtype, head_dim, expected in (
        ("cpu", jnp.bfloat16, 128, "xla"),
        ("tpu", jnp.bfloat16, 128, "splash"),
        ("tpu", jnp.bfloat16, 64, "splash"),
        ("tpu", jnp.bfloat16, 96, "xla"),
        ("tpu", jnp.float32, 128, "xla"),
        ("gpu", jnp.bfloat16, 128, "cudnn"),
        ("gpu", jnp.float16, 256, "cudnn"),
        ("gpu", jnp.float32, 128, "xla"),
        ("gpu", jnp.bfloat16, 264, "xla"),
        ("gpu", jnp.bfloat16, 12, "xla"),
    ):
        assert default_attention(backend, jnp.dtype(dtype), head_dim, None, 1024) == expected
        capped = default_attention(backend, jnp.dtype(dtype), head_dim, 50.0, 1024)
        assert capped == ("xla" if expected == "cudnn" else expected)
        short = default_attention(backend, jnp.dtype(dtype), head_dim, None, 127)
        assert short == ("xla" if expected == "splash" else expected)


def test_gpus_kernels_are_not_chosen_where_they_lack_the_head(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for version, capability, largest in (
        ("PJRT C API\ncuda 12090", "9.0", 256),
        ("PJRT C API\ncuda 12090", "10.3", 256),
        ("PJRT C API\ncuda 12090", "8.0", 128),
        ("PJRT C API\ncuda 12090", "7.5", 0),
        ("rocm 60300", "gfx942", 0),
    ):
        client, kind = SimpleNamespace(platform_version=version), "NVIDIA H100" if "cuda" in version else "MI300X"
        device = SimpleNamespace(client=client, compute_capability=capability, device_kind=kind)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        for head_dim in (64, 128, 256):
            chosen = default_attention("gpu", jnp.dtype(jnp.bfloat16), head_dim, None, 1024)
            assert chosen == ("cudnn" if head_dim <= largest else "xla")
            assert reads_filled_positions(jnp.zeros((128, 1, 1, head_dim), jnp.bfloat16)) == (head_dim <= largest)
