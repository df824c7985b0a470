"""Adapters on one frozen base, against the plain decoder with dense weights W + a b: values, gradients, sharing."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import GENERATE, TRAIN, make_mesh
from jrlhf.models import (
    LoRAConfig,
    ModelConfig,
    SamplingConfig,
    init_lora,
    lora_shardings,
    make_generate,
    make_logprobs,
    make_logprobs_with_base,
    make_values,
    merge,
    param_shardings,
)
from jrlhf.models.lora import base_on
from tests.models.shared import QUICK, assert_stored, batch, fast_jit, same_gradient, unstacked, weighted_sum

# One layer. Biases, head norms, a softcap, 2 key-value heads for up to 8 devices, 300 words: no multiple of 128.
EVERYTHING = ModelConfig(300, 32, 1, 8, 2, 8, mlp=48, max_positions=64, qk_norm=True, qkv_bias=True, softcap=20.0)
# Gemma's switches: local and global layers, a norm after each contribution, scaled embeddings.
LOCAL = replace(
    EVERYTHING,
    layers=2,
    qk_norm=False,
    qkv_bias=False,
    tie_embeddings=False,
    kv_heads=8,
    window=3,
    local_layers=(True, False),
    post_norms=True,
    norm_offset=True,
    embed_scale=32**0.5,
    activation="gelu_tanh",
    attention_softcap=5.0,
)
FULL = LoRAConfig(rank=3, alpha=6.0)
SOME = LoRAConfig(rank=2, alpha=3.0, targets=("v_proj", "o_proj", "down_proj"), rslora=True)


def random_adapter(config, lora, head: Any = "lm", seed=2) -> Any:
    """An adapter whose b is far from zero."""
    generator = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: init_lora(config, lora, key, head), jax.random.key(0))
    return jax.tree.map(lambda x: (0.3 * generator.normal(size=x.shape)).astype(np.float32), shapes)


def test_a_base_on_a_part_of_its_devices_shares_their_memory():
    whole = make_mesh(2, 2, 2)
    base = {"w": jax.device_put(np.arange(24.0).reshape(4, 6), NamedSharding(whole, P(None, "tensor")))}
    half = make_mesh(1, 2, 2, devices=list(whole.devices.flat[4:]))
    view = base_on(base, half)["w"]
    np.testing.assert_array_equal(view, base["w"])
    assert view.sharding.mesh == half and base_on(base, whole) is base
    buffers = [{x.device: x.data.unsafe_buffer_pointer() for x in own.addressable_shards} for own in (base["w"], view)]
    assert len(buffers[1]) == 4 and buffers[1].items() <= buffers[0].items()
    with pytest.raises(AssertionError, match="another part"):
        base_on(base, make_mesh(4, 1, 1, devices=list(whole.devices.flat[4:])))


# The sums that make one dense matrix of a and b, spelled out by name.
DENSE = {
    "wq": "ldr,lrnh->ldnh",
    "wk": "ldr,lrkh->ldkh",
    "wv": "ldr,lrkh->ldkh",
    "wo": "lnhr,lrd->lnhd",
    "gate": "ldr,lrf->ldf",
    "up": "ldr,lrf->ldf",
    "down": "lfr,lrd->lfd",
}


def dense(base, adapter, scale):
    """The full weights of stacked layers, and the adapter's scalar head."""
    layers = {**base["layers"]}
    for part, weights in adapter["layers"].items():
        layers[part] = {**layers[part]}
        for name, low in weights.items():
            layers[part][name] = layers[part][name] + scale * jnp.einsum(DENSE[name], low["a"], low["b"])
    return {**base, **adapter, "layers": layers}


def on(mesh, config, base):
    """A host tree as GENERATE stores it."""
    return jax.device_put(unstacked(base), param_shardings(config, mesh, GENERATE))


# ---- values and gradients


@pytest.fixture(scope="module")
def expected(reference):
    """A function: case -> base and adapters on the host, the plain decoder's outputs and gradients by the adapters."""

    @cache
    def compute(config, lora):
        base = reference.random_params(config)
        adapters = random_adapter(config, lora), random_adapter(config, lora, "scalar", seed=4)
        tokens, _ = batch(config)

        def loss(lm, scalar):
            actor, critic = (dense(base, adapter, lora.scale) for adapter in (lm, scalar))
            outputs = *reference.logprobs(actor, config, tokens, 0.7), reference.values(critic, config, tokens)
            return weighted_sum(outputs), outputs

        (_, outputs), gradients = fast_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*adapters)
        return base, adapters, jax.device_get((outputs, gradients))

    return compute


@pytest.mark.parametrize(
    ("config", "lora", "sizes", "axis_type", "remat"),
    [
        (EVERYTHING, FULL, (2, 2, 2), AxisType.Explicit, "full"),
        pytest.param(LOCAL, SOME, (1, 2, 4), AxisType.Auto, "gather", marks=pytest.mark.full),
    ],
    ids=["everything-2-2-2", "local-tensor=4"],
)
def test_outputs_and_gradients_are_those_of_the_dense_sum(expected, config, lora, sizes, axis_type, remat):
    mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)], axis_type=axis_type)
    base, adapters, (outputs, gradients) = expected(config, lora)
    tokens, _ = batch(config)
    logprobs = make_logprobs(config, mesh, GENERATE, temperature=0.7, remat=remat, lora=lora)
    values = make_values(config, mesh, GENERATE, remat=remat, lora=lora)

    def loss(lm, scalar, base):
        outputs = *logprobs(lm, tokens, base), values(scalar, tokens, base)
        return weighted_sum([jax.device_put(x, jax.NamedSharding(mesh, jax.P())) for x in outputs]), outputs

    with jax.set_mesh(mesh):
        stored = tuple(lora_shardings(config, mesh, lora, head) for head in ("lm", "scalar"))
        placed, frozen = jax.device_put(adapters, stored), on(mesh, config, base)
        step = fast_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, actual), actual_gradients = step(*placed, frozen)
    assert_stored(actual_gradients, stored)
    for x, y in zip(actual, outputs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
    jax.tree.map_with_path(same_gradient, jax.device_get(actual_gradients), gradients)


@pytest.mark.full
def test_one_pass_scores_an_adapter_and_its_base_as_two_do(expected):
    config, lora, mesh = EVERYTHING, FULL, make_mesh(1, 2, 2, devices=jax.devices()[:4])
    base, (adapter, _), _ = expected(config, lora)
    tokens, _ = batch(config)
    with jax.set_mesh(mesh):
        frozen, stored = on(mesh, config, base), lora_shardings(config, mesh, lora)
        placed = jax.device_put(adapter, stored)
        fresh = jax.device_put(init_lora(config, lora, jax.random.key(0)), stored)
        score = fast_jit(make_logprobs(config, mesh, GENERATE, temperature=0.7, lora=lora))
        score_both = fast_jit(make_logprobs_with_base(config, mesh, lora, temperature=0.7))
        (own, entropy), (bare, _) = (score(adapter, tokens, frozen) for adapter in (placed, fresh))
        together, new = (score_both(adapter, tokens, frozen) for adapter in (placed, fresh))
    for actual, wanted in zip(together, (own, entropy, bare), strict=True):
        assert actual.sharding.is_equivalent_to(wanted.sharding, 2)
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(together[0]) - together[2]).max() > 0.1
    np.testing.assert_array_equal(new[0], new[2])  # the KL to the reference is 0, not nearly
    np.testing.assert_array_equal(new[2], together[2])


def test_generation_holds_the_base_once_and_draws_from_what_is_scored(reference):
    """Temporary memory is the cache and activations, not another base. Nothing is merged."""
    config, mesh = replace(EVERYTHING, mlp=2048), make_mesh(1, 2, 4)
    base, adapter = reference.random_params(config), random_adapter(config, FULL)
    tokens, lengths = batch(config, length=6)
    with jax.set_mesh(mesh):
        frozen = on(mesh, config, base)
        placed = jax.device_put(adapter, lora_shardings(config, mesh, FULL))
        arguments = placed, tokens, lengths, jax.random.split(jax.random.key(1), len(tokens)), frozen
        generate = jax.jit(make_generate(config, mesh, SamplingConfig(4, temperature=0.7), lora=FULL))
        compiled = generate.lower(*arguments).compile(QUICK)
        out = compiled(*arguments)
        score = fast_jit(make_logprobs(config, mesh, GENERATE, temperature=0.7, lora=FULL))
        recomputed, _ = jax.device_get(score(placed, out.tokens, frozen))
    memory: Any = compiled.memory_analysis()
    a_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(frozen))
    assert a_device <= memory.argument_size_in_bytes < 1.3 * a_device
    assert memory.temp_size_in_bytes < a_device / 2
    drawn = np.asarray(out.logprobs) != 0
    assert (drawn.sum(axis=1) == 4).all()
    np.testing.assert_allclose(np.asarray(out.logprobs)[drawn], recomputed[drawn], atol=1e-4)


# ---- how an adapter begins, where it lies, and what it merges into


def test_a_new_adapter_is_drawn_as_peft_draws_it():
    config, lora = EVERYTHING, LoRAConfig(rank=64, alpha=1.0)
    adapter = jax.device_get(fast_jit(partial(init_lora, config, lora))(jax.random.key(0)))
    inputs = {"wo": config.heads * config.head_dim, "down": config.mlp}
    seen = []
    for part in adapter["layers"].values():
        for name, low in part.items():
            bound = inputs.get(name, config.embed) ** -0.5
            assert low["a"].dtype == np.float32 and low["a"].shape[0] == config.layers
            # Kaiming with slope sqrt(5): sqrt(6 / ((1 + 5) inputs)), uniform, of variance bound^2 / 3.
            assert np.abs(low["a"]).max() <= bound
            np.testing.assert_allclose(low["a"].var(), bound**2 / 3, rtol=0.05)
            assert not low["b"].any()
            seen.append(low["a"].ravel()[:8])
    assert len(np.unique(seen)) == 7 * 8  # each from a key of its own


def test_a_scalar_head_begins_as_that_of_init_scalar():
    zero = fast_jit(lambda key: init_lora(EVERYTHING, SOME, key, "scalar")["value_head"])(jax.random.key(0))
    assert not zero["kernel"].any() and zero["kernel"].shape == (32,) and zero["bias"] == 0
    wide = replace(EVERYTHING, embed=4096)
    init = fast_jit(lambda key: init_lora(wide, SOME, key, "scalar", zero_head=False)["value_head"])
    drawn = jax.device_get(init(jax.random.key(0)))
    np.testing.assert_allclose(drawn["kernel"].var(), 1 / 4097, rtol=0.1)
    assert "value_head" not in jax.eval_shape(partial(init_lora, EVERYTHING, SOME), jax.random.key(0))


def test_adapters_are_sliced_where_their_projection_is():
    mesh = make_mesh(1, 2, 4)
    specs = jax.tree.map(lambda x: tuple(x.spec), lora_shardings(EVERYTHING, mesh, FULL, "scalar"))
    whole = (None,) * 4
    assert (
        specs["layers"]["attention"]
        == {
            "wq": {"a": whole[:3], "b": (None, None, "tensor", None)},
            "wk": {"a": whole[:3], "b": whole},  # 2 heads for 4 devices: each has both
            "wv": {"a": whole[:3], "b": whole},
            "wo": {"a": (None, "tensor", None, None), "b": whole[:3]},
        }
    )
    for name in ("gate", "up"):
        assert specs["layers"]["mlp"][name] == {"a": whole[:3], "b": (None, None, "tensor")}
    assert specs["layers"]["mlp"]["down"] == {"a": (None, "tensor", None), "b": whole[:3]}
    assert specs["value_head"] == {"kernel": (None,), "bias": ()}


def test_merged_weights_are_the_dense_sum_in_the_base_dtype(expected):
    config, lora = EVERYTHING, FULL
    base, (_, adapter), _ = expected(config, lora)
    want = fast_jit(lambda base, adapter: dense(base, adapter, lora.scale))(base, adapter)
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(base, param_shardings(config, mesh, TRAIN))
        low = jax.device_put(adapter, lora_shardings(config, mesh, lora, "scalar"))
        merged = merge(placed, low, lora)
        rounded = merge(jax.tree.map(lambda x: x.astype(jnp.bfloat16), placed), low, lora)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), merged, want)
    assert_stored(merged["layers"], jax.tree.map(lambda x: x.sharding, placed["layers"]))
    assert merged["embedding"] is placed["embedding"]
    assert "value_head" in merged and "value_head" not in merge(merged, {"layers": low["layers"]}, lora)
    assert rounded["layers"]["mlp"]["gate"].dtype == jnp.bfloat16


# ---- what is refused


def test_bad_settings_are_refused():
    cases: Any = (
        ({"rank": 0}, "lora rank=0 must be a positive integer"),
        ({"rank": 2.0}, "lora rank=2.0 must be a positive integer"),
        ({"alpha": 0}, "lora alpha=0 must be positive"),
        ({"alpha": float("inf")}, "lora alpha=inf must be positive and finite"),
        ({"targets": ("q_proj", "lm_head")}, r"lora targets=\['q_proj', 'lm_head'\] must be some of q_proj, k_proj"),
        ({"targets": ()}, r"lora targets=\[\] must be some of"),
    )
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            LoRAConfig(**({"rank": 2, "alpha": 4.0} | arguments))


def test_what_cannot_be_adapted_is_refused():
    mesh = make_mesh(1, 2, 4)
    with pytest.raises(ValueError, match="lora needs its base in the generate layout, but this is train"):
        make_logprobs(EVERYTHING, mesh, TRAIN, lora=FULL)
    gpt2 = replace(EVERYTHING, gated_mlp=False, positions="learned", norm="layer", qk_norm=False)
    with pytest.raises(ValueError, match="GPT-2's projections"):
        make_generate(gpt2, mesh, SamplingConfig(4), lora=FULL)
    with pytest.raises(ValueError, match="GPT-2's projections"):
        init_lora(gpt2, FULL, jax.random.key(0))
    with pytest.raises(ValueError, match="heads=8 cannot be divided over tensor=3"):
        lora_shardings(EVERYTHING, make_mesh(tensor=3, devices=jax.devices()[:3]), FULL)


def test_scale_follows_alpha_and_rank():
    assert LoRAConfig(rank=4, alpha=8.0).scale == 2
    assert LoRAConfig(rank=4, alpha=8.0, rslora=True).scale == 4
    assert LoRAConfig(rank=4, alpha=8.0, targets=("down_proj", "q_proj")).targets == ("q_proj", "down_proj")
