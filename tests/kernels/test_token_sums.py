"""Sums of a loss over tokens: equal to summing what `token_logprobs` returns, for fewer operations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jrlhf.kernels.logprob import token_logprobs, token_sums
from jrlhf.meshes import make_mesh

N, V, D, VOCAB_SIZE = 252, 640, 64, 500  # 64 x 4 devices' slices: the last one is nothing but padding
OPTIONS: dict[str, Any] = {"temperature": 0.7, "softcap": 3.0, "vocab_size": VOCAB_SIZE}


def problem(n=N, dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(n)
    hidden = rng.normal(size=(n, D)).astype(dtype)
    unembedding = (2 / D**0.5 * rng.normal(size=(V, D))).astype(dtype)
    targets = rng.integers(0, VOCAB_SIZE, size=n, dtype=np.int32)
    data = {"old": rng.normal(size=n).astype(np.float32) - 6, "mask": rng.random(n) < 0.8}
    return hidden, unembedding, targets, data


def terms(logprobs, entropy, data, entropy_coef=0.1):
    """A clipped ratio; infinite where a tile is filled up with zeros."""
    ratio = jnp.exp(jnp.clip(logprobs - data["old"], -2, 2)) / jnp.abs(data["old"])
    loss = jnp.where(data["mask"], jnp.minimum(ratio, 1.2) - entropy_coef * entropy, 0)
    return loss, {"ratio": ratio, "entropy": jnp.where(data["mask"], entropy, 0)}


def composed(op, hidden, unembedding, targets, data, terms=terms):
    loss, metrics = terms(*op(hidden, unembedding, targets), data)
    return jnp.sum(loss), jax.tree.map(jnp.sum, metrics)


def value_and_grad(sums):
    """The loss as a caller has it: a mean, whose cotangent is not 1."""

    def mean(hidden, unembedding, targets, data):
        loss, metrics = sums(hidden, unembedding, targets, data)
        return -loss / 7, metrics

    return jax.jit(jax.value_and_grad(mean, argnums=(0, 1), has_aux=True))


def check(actual, expected, tolerances=(2e-6, 1e-5)):
    for tree, other, tolerance in zip(actual, expected, tolerances, strict=True):
        for a, e in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
            np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * np.max(np.abs(e)))


def expected(*arguments, **options):
    op = partial(token_logprobs, **OPTIONS, implementation="reference")
    return value_and_grad(partial(composed, op, **options))(*arguments)


def test_values_and_gradients_are_those_of_the_composition_and_half_precision_rounds_only_the_gradients():
    """In float32: `test_vocabulary_parallel`."""
    arguments = problem(dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arguments[:2]]
    sums = partial(token_sums, terms=terms, **OPTIONS, tile=100, implementation="xla")
    actual = value_and_grad(sums)(*arguments)
    assert [x.dtype for x in actual[1]] == [jnp.bfloat16, jnp.bfloat16]
    (mean, metrics), gradients = expected(*wide, *arguments[2:])
    check(actual, ((mean, metrics), gradients), (2e-6, 1e-2))
    check((jax.jit(sums)(*arguments),), ((-7 * mean, metrics),), (2e-6,))  # not differentiated


def test_without_an_entropy_gradient_the_entropy_is_a_constant():
    arguments = problem()
    sums = partial(token_sums, terms=terms, **OPTIONS, implementation="xla", tile=4096, entropy_gradient=False)

    def constant(logprobs, entropy, data):
        return terms(logprobs, lax.stop_gradient(entropy), data)

    check(value_and_grad(sums)(*arguments), expected(*arguments, terms=constant))


def test_metrics_and_data_have_no_gradient():
    hidden, unembedding, targets, data = problem(n=16)

    def run(hidden, old):
        loss, metrics = token_sums(hidden, unembedding, targets, {**data, "old": old}, terms, implementation="xla")
        return metrics["entropy"] + 0 * loss, loss

    @jax.jit
    def gradients(hidden, old):
        return jax.grad(lambda hidden: run(hidden, old)[0])(hidden), jax.grad(lambda old: run(hidden, old)[1])(old)

    d_hidden, d_old = gradients(hidden, data["old"])
    assert not np.any(d_hidden) and not np.any(d_old)


def test_a_target_outside_the_vocabulary_has_no_gradient():
    hidden, unembedding, _, data = problem(n=16)
    targets = np.where(np.arange(16) % 2 == 0, VOCAB_SIZE, 7)

    def likelihood(logprobs, entropy, data):
        return jnp.exp(logprobs), {}

    sums = partial(token_sums, terms=likelihood, **OPTIONS, implementation="xla")
    (loss, _), (d_hidden, _) = value_and_grad(sums)(hidden, unembedding, targets, data)
    assert np.isfinite(loss) and loss != 0
    assert not np.any(d_hidden[::2]) and np.all(np.any(d_hidden[1::2], axis=1))


@pytest.mark.parametrize(
    ("implementation", "gathered"), [("xla", True), pytest.param("reference", False, marks=pytest.mark.full)]
)
def test_vocabulary_parallel(implementation, gathered):
    """Rows over all axes and gathered over `tensor`, data too; or the same rows on all devices of `tensor`."""
    mesh = make_mesh(fsdp=2, tensor=4)
    rows = P(("fsdp", "tensor")) if gathered else P("fsdp")

    def local(hidden, unembedding, targets, data):
        if gathered:
            gather = partial(lax.all_gather, axis_name="tensor", tiled=True)
            hidden, targets, data = jax.tree.map(gather, (hidden, targets, data))
        options = {**OPTIONS, "axis_name": "tensor", "tile": 50, "implementation": implementation}
        return lax.psum(token_sums(hidden, unembedding, targets, data, terms, **options), "fsdp")

    specs = (rows, P("tensor"), rows, rows)
    arguments = problem(n=256)
    with jax.set_mesh(mesh):
        sums = jax.shard_map(local, in_specs=specs, out_specs=P())
        placed = [
            jax.tree.map(lambda x, spec=spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), argument)
            for argument, spec in zip(arguments, specs, strict=True)
        ]
        actual = jax.device_get(value_and_grad(sums)(*placed))
    check(actual, expected(*arguments))


def flops(f, *arguments):
    cost = jax.jit(f).lower(*arguments).compile().cost_analysis()
    assert cost is not None
    return cost["flops"]


def test_differentiation_computes_no_logits_twice():
    """Forward, dX and dW are one product each of all tokens; under an adapter the unembedding has no dW.

    There are several tiles: of a single one XLA itself finds that its logits are computed twice.
    """
    n, v, d = 256, 512, 1024  # wide, so that products are nearly all there is
    arguments = (*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, d), (v, d))),)
    arguments += jax.ShapeDtypeStruct((n,), jnp.int32), {"mask": jax.ShapeDtypeStruct((n,), jnp.float32)}

    def plain(logprobs, entropy, data):
        return logprobs * data["mask"], {"entropy": entropy}

    options = {"tile": 64, "implementation": "xla"}
    fused = partial(token_sums, terms=plain, **options, entropy_gradient=False)
    unfused = partial(composed, partial(token_logprobs, **options), terms=plain)
    product = flops(fused, *arguments)  # of a loop's body, which is counted once
    assert product == pytest.approx(2 * 64 * v * d, rel=0.02)
    for sums, argnums, count in ((fused, (0, 1), 3), (fused, (0,), 2), (unfused, (0, 1), 4)):
        gradient = jax.grad(sums, argnums=argnums, has_aux=True)
        assert flops(gradient, *arguments) == pytest.approx(count * product, rel=0.02)


def test_temp_memory_is_a_few_tiles_beside_dw():
    n, v, d, tile = 16384, 151936, 1024, 1024
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, d), (v, d))]
    arguments += [jax.ShapeDtypeStruct((n,), jnp.int32), {"old": jax.ShapeDtypeStruct((n,), jnp.float32)}]

    def ratio(logprobs, entropy, data):
        return jnp.exp(logprobs - data["old"]) - 0.1 * entropy, {"entropy": entropy}

    sums = partial(token_sums, terms=ratio, tile=tile, implementation="xla")
    memory = jax.jit(jax.grad(sums, argnums=(0, 1), has_aux=True)).lower(*arguments).compile().memory_analysis()
    assert memory is not None
    hidden_bytes = 4 * n * d  # dX of all tiles, before it is scaled
    assert memory.temp_size_in_bytes <= 3 * 4 * tile * v + 4 * v * d + hidden_bytes


def test_bad_arguments_are_named():
    *arguments, data = problem(n=16)

    def evaluate(terms=terms, data=data, **options):
        jax.eval_shape(partial(token_sums, terms=terms, **options), *arguments, data)

    with pytest.raises(ValueError, match=r"data must have one entry for each of 16 tokens, got shape \(15,\)"):
        evaluate(data=data["old"][:15])
    one, zeros = np.float32(0), np.zeros(16, np.float32)
    for result, name in (((one, {}), "the loss"), ((zeros, {"kl": zeros[:3]}), "kl")):
        for implementation in ("xla", "reference"):
            with pytest.raises(ValueError, match=f"terms returned {name} of shape"):
                evaluate(lambda *_, r=result: r, implementation=implementation)
    with pytest.raises(ValueError, match="temperature must be positive"):
        evaluate(temperature=0.0)
