"""What each remat policy keeps and computes again: gradients, residuals, temporary memory and operations."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn.fused_attention_stablehlo import _dot_product_attention_fwd_p_wrapper

from jrlhf.meshes import GENERATE, TRAIN, make_mesh
from jrlhf.models import LoRAConfig, ModelConfig, init_lm, init_lora, lora_shardings, make_logprobs, param_shardings
from jrlhf.models.remat import REMATS, Remat, policy
from tests.models.shared import FAMILIES, QUICK, shapes_on, stacked_by_scan

# Sizes of which no two are equal where they could be confused, and wide enough for products to outweigh the rest.
CONFIG = ModelConfig(
    vocab_size=128, embed=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=160, max_positions=64, qk_norm=True
)
ROWS, LENGTH = 8, 16


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def traced(mesh):
    """Each policy's gradient of a mean log-probability, traced."""
    arguments = shapes_on(CONFIG, mesh), jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)

    def gradient(remat: Remat):
        logprobs = make_logprobs(CONFIG, mesh, TRAIN, remat=remat)
        return jax.jit(jax.grad(lambda params, tokens: logprobs(params, tokens)[0].mean())).trace(*arguments)

    with jax.set_mesh(mesh):
        return {remat: gradient(remat) for remat in REMATS}


@pytest.mark.full
def test_gradients_do_not_depend_on_the_policy(traced, mesh):
    params = jax.device_put(init_lm(CONFIG, jax.random.key(0)), param_shardings(CONFIG, mesh, TRAIN))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    with jax.set_mesh(mesh):
        programs = {remat: trace.lower().compile(QUICK) for remat, trace in traced.items()}
        gradients = {remat: jax.device_get(compiled(params, tokens)) for remat, compiled in programs.items()}
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients["full"]))
    for remat in REMATS:
        compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6 * largest, err_msg=remat)
        jax.tree.map(compare, gradients[remat], gradients["full"])
    # In the order of REMATS, from the least kept to the most.
    memory = [compiled.memory_analysis().temp_size_in_bytes for compiled in programs.values()]
    assert memory == sorted(memory) and memory[2] < memory[3] < memory[4]
    operations = [compiled.cost_analysis()["flops"] for compiled in programs.values()]
    assert operations[0] == operations[1] > operations[2] > operations[3]


def test_what_a_layer_keeps_is_what_the_table_says(traced):
    D, N, K, H, F = CONFIG.embed, CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, CONFIG.mlp
    table = {"offload": D, "full": D, "attention": D + N * H, "products": 2 * D + 2 * (N + K) * H + 2 * F}
    for remat, numbers in table.items():
        memory = stacked_by_scan(traced[remat].jaxpr, CONFIG.layers)
        assert sum(x.size for x in memory) == CONFIG.layers * (ROWS // 2 * LENGTH) * numbers, remat
        spaces = {str(x.memory_space) for x in memory}
        assert spaces == ({"MemorySpace.Host"} if remat == "offload" else {"MemorySpace.Device"}), remat


def test_layers_of_both_kinds_keep_no_weights():
    """Traced only: one scan of local and global layers keeps all but the weights."""
    config, mesh = FAMILIES["gemma"], make_mesh(2, 2, 2)
    params = shapes_on(config, mesh)
    matrices = {leaf.size // config.layers for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2}
    with jax.set_mesh(mesh):
        logprobs = make_logprobs(config, mesh, TRAIN, remat="gather")
        step = jax.jit(jax.grad(lambda params, tokens: logprobs(params, tokens)[0].mean()))
        jaxpr = step.trace(params, jax.ShapeDtypeStruct((16, 12), np.int32)).jaxpr
    shapes = [x.shape[1:] for x in stacked_by_scan(jaxpr, config.layers)]
    assert (2, 12, config.mlp) in shapes
    assert not {math.prod(shape) for shape in shapes} & matrices  # in whatever shape


@pytest.mark.proof("memory")
def test_layers_that_are_not_scanned_follow_the_policy(mesh):
    """Compiled only: what is kept is not computed again. `test_pipeline.py` compares gradients under `products`."""
    lora, flops = LoRAConfig(rank=2, alpha=4.0), {}
    base = shapes_on(CONFIG, mesh, shardings=param_shardings(CONFIG, mesh, GENERATE))
    adapter = shapes_on(
        CONFIG, mesh, lambda config, key: init_lora(config, lora, key), lora_shardings(CONFIG, mesh, lora)
    )
    with jax.set_mesh(mesh):
        for remat in ("products", "full"):
            logprobs = make_logprobs(CONFIG, mesh, GENERATE, remat=remat, lora=lora)
            step = jax.jit(jax.grad(lambda *arguments, f=logprobs: f(*arguments)[0].mean()))
            tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)
            cost: Any = step.lower(adapter, tokens, base).compile(QUICK).cost_analysis()
            flops[remat] = cost["flops"]
    assert flops["products"] < 0.9 * flops["full"]


def test_what_cudnn_hands_its_backward_pass_is_kept_with_its_output():
    keeping: list[Remat] = ["attention", "products", "gather"]
    for remat in keeping:
        keeps = policy(remat)
        assert keeps is not None and keeps(_dot_product_attention_fwd_p_wrapper) is True
        assert keeps(lax.all_gather_p) is False
