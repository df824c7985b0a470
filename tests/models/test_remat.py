"""What each remat policy keeps and computes again: gradients, residuals, temporary memory and operations."""

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
from tests.models.shared import QUICK, stacked_by_scan, unstacked

# Sizes of which no two are equal where they could be confused, and wide enough for products to outweigh the rest.
CONFIG = ModelConfig(
    vocab_size=128, embed=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=160, max_positions=64, qk_norm=True
)
ROWS, LENGTH = 8, 16


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def arguments(mesh):
    params = init_lm(CONFIG, jax.random.key(0))
    tokens: Any = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    return jax.device_put(params, param_shardings(CONFIG, mesh, TRAIN)), tokens


@pytest.fixture(scope="module")
def programs(mesh, arguments):
    """Each policy's gradient of a mean log-probability, traced and compiled."""

    def gradient(remat: Remat):
        logprobs = make_logprobs(CONFIG, mesh, TRAIN, remat=remat)
        traced = jax.jit(jax.grad(lambda params, tokens: logprobs(params, tokens)[0].mean())).trace(*arguments)
        return traced, traced.lower().compile(QUICK)

    with jax.set_mesh(mesh):
        return {remat: gradient(remat) for remat in REMATS}


def test_gradients_do_not_depend_on_the_policy(programs, arguments, mesh):
    with jax.set_mesh(mesh):
        gradients = {remat: jax.device_get(compiled(*arguments)) for remat, (_, compiled) in programs.items()}
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients["full"]))
    for remat in REMATS:
        compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6 * largest, err_msg=remat)
        jax.tree.map(compare, gradients[remat], gradients["full"])


@pytest.mark.parametrize("remat", ["offload", "full", "attention", "products"])
def test_what_a_layer_keeps_is_what_the_table_says(programs, remat):
    D, N, K, H, F = CONFIG.embed, CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, CONFIG.mlp
    table = {"offload": D, "full": D, "attention": D + N * H, "products": 2 * D + 2 * (N + K) * H + 2 * F}
    memory = stacked_by_scan(programs[remat][0].jaxpr, CONFIG.layers)
    tokens = ROWS // 2 * LENGTH
    assert sum(x.size for x in memory) == CONFIG.layers * tokens * table[remat]
    spaces = {str(x.memory_space) for x in memory}
    assert spaces == ({"MemorySpace.Host"} if remat == "offload" else {"MemorySpace.Device"})


def test_more_kept_is_less_computed(programs):
    memory, operations = [], []
    for _, compiled in programs.values():  # in the order of REMATS, from the least kept to the most
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        operations.append(compiled.cost_analysis()["flops"])
    assert memory == sorted(memory)
    assert memory[2] < memory[3] < memory[4]
    full, attention, products = operations[1:4]
    assert operations[0] == full > attention > products
    D, N, K, H, F = CONFIG.embed, CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, CONFIG.mlp
    tokens = ROWS // 2 * LENGTH
    # XLA computes attention's scores again under either, and counts a scan's body once.
    again = 2 * tokens * (D * (N + 2 * K) * H + N * H * D + 2 * D * F)
    assert attention - products == pytest.approx(again, rel=0.05)
    assert full - attention == pytest.approx(2 * tokens * N * H * LENGTH, rel=0.05)


@pytest.mark.full
def test_layers_that_are_not_scanned_follow_the_policy(mesh):
    lora = LoRAConfig(rank=2, alpha=4.0)
    base = unstacked(init_lm(CONFIG, jax.random.key(0)))
    adapter = init_lora(CONFIG, lora, jax.random.key(1))
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    tokens: Any = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    flops = {}
    with jax.set_mesh(mesh):
        base = jax.device_put(base, param_shardings(CONFIG, mesh, GENERATE))
        adapter = jax.device_put(adapter, lora_shardings(CONFIG, mesh, lora))

        def gradient(remat: Remat):
            logprobs = make_logprobs(CONFIG, mesh, GENERATE, remat=remat, lora=lora)
            step = jax.jit(jax.grad(lambda *arguments: logprobs(*arguments)[0].mean()), compiler_options=QUICK)
            lowered = step.lower(adapter, tokens, base)
            cost: Any = lowered.compile().cost_analysis()
            flops[remat] = cost["flops"]
            return jax.device_get(step(adapter, tokens, base))

        same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(same, gradient("products"), gradient("full"))
    assert flops["products"] < 0.9 * flops["full"]  # what is kept is not computed again


def test_what_cudnn_hands_its_backward_pass_is_kept_with_its_output():
    keeping: list[Remat] = ["attention", "products", "gather"]
    for remat in keeping:
        keeps = policy(remat)
        assert keeps is not None and keeps(_dot_product_attention_fwd_p_wrapper) is True
        assert keeps(lax.all_gather_p) is False
