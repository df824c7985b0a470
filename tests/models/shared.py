"""Helpers of the models' tests: quick compilation, trees of shapes, comparisons."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jrlhf.meshes import TRAIN
from jrlhf.models import ModelConfig, RopeScaling, init_lm, param_shardings

# Without LLVM's optimisations programs compile in half the time; their collectives and buffers are the same.
QUICK: Any = {"xla_backend_optimization_level": 0}
fast_jit = partial(jax.jit, compiler_options=QUICK)

# Everything that adds weights to a Llama or takes them away.
GEMMA: Any = {"norm_offset": True, "post_norms": True, "qk_norm": True}
GPT_2: Any = {"norm": "layer", "positions": "learned", "gated_mlp": False}
GPT_2 |= {"qkv_bias": True, "output_bias": True, "mlp_bias": True}

# 2 key-value heads for up to 4 devices of `tensor`; sequences longer than the windows; layers of both kinds.
_SIZES: Any = dict(
    vocab_size=150, embed=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=32, tie_embeddings=True
)
FAMILIES = {
    "gemma": ModelConfig(
        **_SIZES,
        **GEMMA,
        activation="gelu_tanh",
        rope_theta=1000.0,
        rope_scaling=RopeScaling("linear", 8.0),
        window=4,
        local_layers=(True, False, True),
        local_rope_theta=100.0,
        query_scale=0.3,
        attention_softcap=3.0,
        softcap=9.0,
        embed_scale=32**0.5,
    ),
    "gpt2": ModelConfig(**{**_SIZES, "kv_heads": 4}, **GPT_2, activation="gelu_tanh"),
    "llama": ModelConfig(
        **{**_SIZES, "tie_embeddings": False},
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope_theta=500.0,
        rope_scaling=RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
        window=5,
    ),
}
# The same with a layer of each kind: what unrolls its layers compiles faster.
SHALLOW = {name: replace(config, layers=2, local_layers=config.local_layers[:2]) for name, config in FAMILIES.items()}


def unstacked(params):
    """Stacked layers as a list of layers, as GENERATE stores them."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    return {**params, "layers": [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(count)]}


def shapes_on(config, mesh, init=init_lm, shardings=None) -> Any:
    """The weights as shapes with shardings, by default those of TRAIN."""
    shapes = jax.eval_shape(partial(init, config), jax.random.key(0))
    shardings = param_shardings(config, mesh, TRAIN) if shardings is None else shardings
    if isinstance(shardings["layers"], list):
        shapes = jax.eval_shape(unstacked, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def batch(config, rows=16, length=9) -> Any:
    """Random tokens [rows, length] and lengths [rows]."""
    generator = np.random.default_rng(7)
    tokens = generator.integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    return tokens, generator.integers(1, length + 1, rows).astype(np.int32)


def weighted_sum(outputs, rows=None):
    """A scalar whose gradient reaches every output with a weight of its own.

    rows: the sharding of the weights, which under Explicit axes must be that of the outputs.
    """
    generator = np.random.default_rng(3)
    weights: Any = [generator.normal(size=x.shape).astype(np.float32) for x in outputs]
    weights = weights if rows is None else jax.device_put(weights, rows)
    return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))


def same_gradient(path, actual, expected, tolerance=1e-5):
    """Compares one leaf of a gradient by its largest entry: for `jax.tree.map_with_path`."""
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


def assert_stored(tree, shardings):
    """Checks that every array of `tree` has its sharding."""
    for array, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim), (array.sharding, sharding)


def scans(jaxpr) -> list[Any]:
    """All scans of a jaxpr, in order, however deep; a scan's own scans are left out."""
    equations = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            equations.append(equation)
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                equations += scans(inner)
    return equations


def stacked_by_scan(jaxpr, layers) -> list[Any]:
    """What the forward layer scan, the first of a program, stacks for the backward one."""
    return [x.aval for x in scans(jaxpr)[0].outvars if x.aval.shape[:1] == (layers,)]
