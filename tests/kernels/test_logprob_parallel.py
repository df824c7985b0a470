"""Vocabulary-parallel log-probabilities on simulated devices: values and gradients of the dense reference."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jrlhf.kernels.logprob import pallas_gpu, pallas_tpu, token_logprobs
from jrlhf.kernels.logprob.common import Head
from jrlhf.meshes import make_mesh

N, D, V, VOCAB_SIZE = 64, 64, 1024, 700  # on 4 and 8 devices the last slice is nothing but padding
OPTIONS = {"temperature": 0.7, "softcap": 5.0, "vocab_size": VOCAB_SIZE}
BATCH = ("data", "fsdp")


def problem(dtype):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(N, D)).astype(dtype)
    unembedding = (0.3 * rng.normal(size=(V, D))).astype(dtype)
    targets = rng.integers(0, VOCAB_SIZE, size=N, dtype=np.int32)
    return hidden, unembedding, targets, tuple(rng.normal(size=(2, N)).astype(np.float32))


def rows_spec(gathered):
    """Rows over all axes and gathered over `tensor` for the head, or the same rows on all devices of `tensor`."""
    return P((*BATCH, "tensor")) if gathered else P(BATCH)


def sharded_value_and_vjp(op, gathered):
    """(hidden, unembedding, targets, cotangents) -> (logprobs, entropy, d_hidden, d_unembedding), on the mesh."""

    def local(hidden, unembedding, targets):
        unembedding = lax.all_gather(unembedding, "fsdp", axis=1, tiled=True)
        if gathered:
            hidden = lax.all_gather(hidden, "tensor", axis=0, tiled=True)
            targets = lax.all_gather(targets, "tensor", axis=0, tiled=True)
        return op(hidden, unembedding, targets)

    rows = rows_spec(gathered)

    def run(hidden, unembedding, targets, cotangents):
        mapped = jax.shard_map(local, in_specs=(rows, P("tensor", "fsdp"), rows), out_specs=(P(BATCH), P(BATCH)))
        outputs, vjp = jax.vjp(lambda h, w: mapped(h, w, targets), hidden, unembedding)
        return *outputs, *vjp(cotangents)

    return jax.jit(run)


def placed(mesh, gathered, dtype):
    specs = (rows_spec(gathered), P("tensor", "fsdp"), rows_spec(gathered), (P(BATCH), P(BATCH)))
    return jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), problem(dtype), specs)


@lru_cache
def expected(dtype):
    hidden, unembedding, targets, cotangents = problem(dtype)

    @jax.jit
    def dense(hidden, unembedding):
        op = partial(token_logprobs, targets=targets, **OPTIONS, implementation="reference")
        outputs, vjp = jax.vjp(op, hidden, unembedding)
        return *outputs, *vjp(cotangents)

    return dense(hidden.astype(jnp.float32), unembedding.astype(jnp.float32))


def check(op, mesh, gathered, dtype=jnp.float32, tolerances=(2e-6, 1e-5)):
    """Compares with the dense reference; returns the compiled program's text."""
    with jax.set_mesh(mesh):
        arguments = placed(mesh, gathered, dtype)
        program = sharded_value_and_vjp(op, gathered).lower(*arguments).compile()
        actual = jax.block_until_ready(program(*arguments))
    for a, e, tolerance in zip(actual, expected(dtype), np.repeat(tolerances, 2), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), e, rtol=0, atol=tolerance * np.max(np.abs(e)))
    return str(program.as_text())


@pytest.mark.parametrize("gathered", [True, pytest.param(False, marks=pytest.mark.full)])
def test_xla(gathered):
    """Gathered rows of hidden states get their gradient by a reduce-scatter."""
    op = partial(token_logprobs, **OPTIONS, axis_name="tensor", tile=5, implementation="xla")
    hlo = check(op, make_mesh(fsdp=2, tensor=4), gathered)
    results = [line.split(" = ")[1] for line in hlo.splitlines() if " = " in line]
    scattered = [result for result in results if " reduce-scatter(" in result]
    assert any(result.startswith(f"f32[{N // 8},{D}]") for result in scattered) == gathered
    # What is all-reduced has one number a token, never a row of hidden states.
    reduced = [result for result in results if " all-reduce(" in result]
    assert reduced and any(f"f32[{N // 2},{D}]" in result for result in reduced) != gathered


def test_reference():
    op = partial(token_logprobs, **OPTIONS, axis_name="tensor", implementation="reference")
    check(op, make_mesh(data=2, tensor=4, axis_type=AxisType.Auto), gathered=True)


# The interpreters answer one callback at a time for each device: with all 8 devices waiting, none is left to answer.
# Blocks of 384 that do not divide a slice of 512: the last one reaches over the next slice's targets.
def test_pallas_tpu():
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    forward = pallas_tpu.Forward(tokens=128, vocabulary=384, interpret=interpret)
    backward = pallas_tpu.Backward(tokens=128, vocabulary=512, interpret=interpret)
    head = Head(**OPTIONS, axis_name="tensor")
    op = partial(pallas_tpu.token_logprobs, head=head, forward=forward, backward=backward)
    check(op, make_mesh(tensor=2, devices=jax.devices()[:2]), gathered=True)


# With two devices the interpreter of jax 0.12 now and then aborts, or sees a race between a write and the commit that
# follows it; that of 0.10, with which the slow proofs run, does not.
@pytest.mark.full
def test_pallas_gpu(gpu_params):
    forward = pallas_gpu.GpuForward(interpret=gpu_params)
    op = partial(pallas_gpu.token_logprobs, head=Head(**OPTIONS, axis_name="tensor"), tile=16, forward=forward)
    check(op, make_mesh(tensor=2, devices=jax.devices()[:2]), True, jnp.bfloat16, tolerances=(2e-6, 1e-2))


def test_explicitly_sharded_arguments_need_shard_map():
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"hidden is divided over .*'fsdp'.* inside jax.shard_map"):
        token_logprobs(*placed(mesh, False, jnp.float32)[:3])


def test_unembedding_must_vary_over_the_axis():
    """Without shard_map's type check gradients would be silently scaled by 1/tensor, so switching it off is refused."""
    hidden, unembedding, targets, _ = problem(jnp.float32)

    def run(spec, **kwargs):
        mesh = make_mesh(tensor=8, axis_type=AxisType.Auto)
        op = partial(token_logprobs, axis_name="tensor")
        mapped = jax.shard_map(op, mesh=mesh, in_specs=(P(), spec, P()), out_specs=P(), **kwargs)
        return mapped(*map(jnp.asarray, (hidden, unembedding, targets)))

    with pytest.raises(ValueError, match="unembedding does not vary over axis_name='tensor'"):
        run(P())
    with pytest.raises(ValueError, match="unembedding does not vary over axis_name='tensor'"):
        run(P("tensor"), check_vma=False)
