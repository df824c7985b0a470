"""Programs for accelerators lowered from a CPU, and the memory of compiled ones."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jrlhf.kernels.logprob import pallas_gpu, pallas_tpu, token_logprobs
from jrlhf.kernels.logprob.common import Head
from jrlhf.kernels.logprob.implementations import Implementation

DEVICES = {
    "tpu": AbstractDevice("TPU v5p", num_cores=1, platform="tpu"),
    "cuda": AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"),
}
CUSTOM_CALL = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu"}
KERNELS = {"tpu": 3, "cuda": 1}  # forward, dX and dW; forward
KERNEL: dict[str, Implementation] = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}


def abstract_mesh(platform, tensor=1):
    return AbstractMesh((tensor,), ("tensor",), (AxisType.Explicit,), abstract_device=DEVICES[platform])


def shapes(n, v, d, dtype):
    return (
        jax.ShapeDtypeStruct((n, d), dtype),
        jax.ShapeDtypeStruct((v, d), dtype),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )


def loss(hidden, unembedding, targets, **options):
    logprobs, entropy = token_logprobs(hidden, unembedding, targets, **options)
    return jnp.mean(logprobs) + 0.1 * jnp.mean(entropy)


def lowered(f, arguments, platform):
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("platform", "sizes"),
    [
        ("tpu", (3, 100, 64, jnp.bfloat16)),
        ("cuda", (3, 100, 64, jnp.bfloat16)),
        ("tpu", (252, 1000, 96, jnp.float32)),
    ],
)
def test_kernels_lower(platform, sizes):
    """A problem smaller than any block, too; the next test has a large one."""
    f = partial(loss, softcap=30.0, temperature=0.9, vocab_size=93, implementation=KERNEL[platform])
    with jax.sharding.use_abstract_mesh(abstract_mesh(platform)):
        text = lowered(jax.grad(f, argnums=(0, 1)), shapes(*sizes), platform)
    assert len(re.findall(rf"custom_call @{CUSTOM_CALL[platform]}", text)) == KERNELS[platform]


@pytest.mark.parametrize("platform", CUSTOM_CALL)
def test_kernels_lower_vocabulary_parallel(platform):
    mesh = abstract_mesh(platform, tensor=4)
    op = jax.shard_map(
        partial(token_logprobs, axis_name="tensor", vocab_size=151936, implementation=KERNEL[platform]),
        mesh=mesh,
        in_specs=(P(), P("tensor"), P()),
        out_specs=P(),
    )
    hidden, unembedding, targets = shapes(16384, 152064, 4096, jnp.bfloat16)
    sharding = jax.sharding.NamedSharding(mesh, P("tensor"))
    unembedding = jax.ShapeDtypeStruct(unembedding.shape, unembedding.dtype, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh):
        text = lowered(
            jax.grad(lambda h, w, y: jnp.sum(op(h, w, y)[0]), argnums=(0, 1)), (hidden, unembedding, targets), platform
        )
    assert CUSTOM_CALL[platform] in text


@pytest.mark.parametrize("platform", CUSTOM_CALL)
def test_the_default_is_xla_and_the_other_platforms_kernel_is_refused(platform):
    """A kernel becomes the default when it has been measured to win."""
    arguments, other = shapes(256, 1024, 64, jnp.bfloat16), KERNEL["cuda" if platform == "tpu" else "tpu"]
    with jax.sharding.use_abstract_mesh(abstract_mesh(platform)):
        assert "custom_call" not in lowered(loss, arguments, platform)
        with pytest.raises(ValueError, match=other):
            lowered(partial(loss, implementation=other), arguments, platform)


def test_blocks_may_be_given_to_lower_where_no_device_is():
    head = Head(1.0, None, 1024, None)
    arguments = shapes(256, 1024, 64, jnp.bfloat16)
    text = lowered(partial(pallas_tpu.token_logprobs, head=head, forward=pallas_tpu.Forward()), arguments, "tpu")
    assert CUSTOM_CALL["tpu"] in text
    with jax.sharding.use_abstract_mesh(abstract_mesh("cuda")):
        text = lowered(
            partial(pallas_gpu.token_logprobs, head=head, tile=64, forward=pallas_gpu.GpuForward()), arguments, "cuda"
        )
    assert CUSTOM_CALL["cuda"] in text


def temp_bytes(n, v, d, dtype, *, tile, gradient=True):
    f = partial(loss, tile=tile, implementation="xla")
    f = jax.grad(f, argnums=(0, 1)) if gradient else f
    memory = jax.jit(f).lower(*shapes(n, v, d, dtype)).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


# XLA's CPU backend cannot add a matmul's result in place as a GPU's does, so it holds one float32 dW more. In float32
# that is the only one, since the sum is in the result's buffer; in bfloat16 only a narrow model fits the bound.
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.full)])
def test_temp_memory_is_a_few_tiles_beside_dw(dtype):
    n, v, d, tile = 16384, 151936, 1024, 1024
    tile_bytes, dw_bytes = 4 * tile * v, 4 * v * d
    assert temp_bytes(n, v, d, dtype, tile=tile) <= 3 * tile_bytes + dw_bytes
    # The forward pass has no dW, but XLA's CPU backend may hold a transposed or widened unembedding.
    assert temp_bytes(n, v, d, dtype, tile=tile, gradient=False) <= 3 * tile_bytes + dw_bytes


def test_temp_memory_does_not_grow_with_tokens():
    few, many = (temp_bytes(n, 32000, 256, jnp.float32, tile=512) for n in (4096, 16384))
    assert many - few <= 0.01 * few
