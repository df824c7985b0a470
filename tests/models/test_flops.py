"""Counted operations and bytes: against the compiler's count of the same functions, and against plain loops."""

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import GENERATE, SCORE, make_mesh
from jrlhf.models import PRESETS, LoRAConfig, ModelConfig, init_lm, init_lora, init_scalar, make_logprobs, make_values
from jrlhf.models.flops import (
    attention_operations,
    cache_bytes,
    forward_operations,
    generation_seconds,
    lora_weights,
    training_operations,
    weight_bytes,
)

# One layer: the compiler counts the body of a scan over layers once.
ONE = ModelConfig(
    vocab_size=1024, embed=256, layers=1, heads=4, kv_heads=2, head_dim=64, mlp=512, max_positions=64, qk_norm=True
)
LORA = LoRAConfig(rank=8, alpha=16.0)
ROWS, LENGTH = 4, 32
LENGTHS = np.full(ROWS, LENGTH)


def compiled_operations(function, *arguments) -> float:
    """The compiler's count. It has elementwise operations, too: few at these widths."""
    analysis: Any = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return analysis["flops"]


def whole_square(config: ModelConfig, factor: float) -> float:
    """What XLA's attention computes beyond the causal half."""
    full = 4.0 * config.layers * config.heads * config.head_dim * ROWS * LENGTH**2
    return factor * (full - attention_operations(config, LENGTHS))


@pytest.mark.parametrize(
    ("head", "span", "lora"), [pytest.param("lm", 8, None, marks=pytest.mark.full), ("scalar", None, LORA)]
)
def test_forward_and_training_are_what_the_compiler_counts(head, span, lora):
    """A language model's head is counted for what is predicted."""
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1], axis_type=jax.sharding.AxisType.Auto)
    make, init = cast(Any, (make_logprobs, init_lm) if head == "lm" else (make_values, init_scalar))
    options: Any = {"implementation": "reference", "span": span} if head == "lm" else {}
    function = make(ONE, mesh, SCORE if lora is None else GENERATE, remat="gather", lora=lora, **options)
    key, tokens = jax.random.key(0), jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    params: Any = jax.eval_shape(lambda: init(ONE, key))
    if lora is None:
        arguments = params, tokens, jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    else:
        layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
        arguments = jax.eval_shape(lambda: init_lora(ONE, lora, key, head)), tokens, params | {"layers": [layer]}
    predicted = None if span is None else np.full(ROWS, span)
    expected = forward_operations(ONE, LENGTHS, head, lora, predicted=predicted) + whole_square(ONE, 1)
    assert compiled_operations(function, *arguments) == pytest.approx(expected, rel=0.04)

    def loss(*inputs):
        return jnp.sum(jax.tree.leaves(function(*inputs))[0])

    expected = training_operations(ONE, LENGTHS, head, lora, predicted=predicted) + whole_square(ONE, 3)
    if lora is not None:  # nothing is trained before the first layer: its projections pass no gradient to their input
        expected -= 2.0 * ONE.embed * ONE.head_dim * (ONE.heads + 2 * ONE.kv_heads) * LENGTHS.sum()
    assert compiled_operations(jax.grad(loss), *arguments) == pytest.approx(expected, rel=0.06)


def test_layers_add_up_and_a_table_that_is_only_looked_up_costs_nothing():
    deep = replace(ONE, layers=3)
    lengths = np.array([5, 1, 9])
    one, three = (forward_operations(config, lengths, "scalar") for config in (ONE, deep))
    head = 2 * ONE.embed * 15
    assert three - head == 3 * (one - head)
    untied = replace(ONE, tie_embeddings=False)
    assert forward_operations(untied, lengths) == forward_operations(ONE, lengths)
    logits = 2 * ONE.embed * ONE.padded_vocab
    none = forward_operations(ONE, lengths, predicted=np.zeros(3, int))
    assert forward_operations(ONE, lengths) - none == logits * (lengths - 1).sum()
    assert weight_bytes(untied, 2) == weight_bytes(ONE, 2)


def test_attention_counts_the_pairs_that_see_each_other():
    lengths, window = np.array([1, 3, 10]), 4
    mixed = replace(ONE, layers=2, window=window, local_layers=(True, False))
    pairs = 0
    for length in lengths:
        for t in range(length):
            pairs += min(t + 1, window) + (t + 1)
    assert attention_operations(mixed, lengths) == 4 * ONE.heads * ONE.head_dim * pairs


def test_bytes_are_those_of_the_arrays():
    params = jax.eval_shape(lambda: init_lm(ONE, jax.random.key(0)))
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if min(leaf.shape[-2:]) > 1 and leaf.ndim > 2)
    matrices += params["embedding"].size
    assert weight_bytes(ONE, 2) == 2 * matrices
    assert weight_bytes(ONE, 2, layer_itemsize=1) == matrices + params["embedding"].size
    assert cache_bytes(ONE, 2) == 2 * 2 * ONE.kv_heads * ONE.head_dim
    adapter = jax.eval_shape(lambda: init_lora(ONE, LORA, jax.random.key(0)))
    assert lora_weights(ONE, LORA) == sum(leaf.size for leaf in jax.tree.leaves(adapter))
    assert lora_weights(PRESETS["Qwen/Qwen3-8B"], LoRAConfig(rank=32, alpha=64.0)) == 87_293_952


@pytest.mark.parametrize("local", [(), (True, False, False)])
@pytest.mark.parametrize("bandwidth", [1e6, 1e12])  # bound by memory, bound by operations
def test_a_generation_takes_its_steps_one_by_one(bandwidth, local):
    prompts, responses, operations, copies = np.array([4, 2, 7]), np.array([3, 1, 5]), 1e9, 2
    deep = replace(ONE, layers=3, window=5 if local else None, local_layers=local)
    kv, matrices = cache_bytes(deep, 4), weight_bytes(deep, 4) / 4
    seconds = (forward_operations(deep, prompts, "scalar") - 2 * deep.embed * prompts.sum()) / operations
    for t in range(5):
        rows = [p + t for p, r in zip(prompts, responses, strict=True) if r > t]
        seen = sum(min(row, 5) if near else row for row in rows for near in deep.locality)
        work = 2 * matrices * len(rows) + 4 * deep.heads * deep.head_dim * seen
        seconds += max((copies * 4 * matrices + kv / deep.layers * seen) / bandwidth, work / operations)
    actual = generation_seconds(
        deep, prompts, responses, bandwidth=bandwidth, operations=operations, itemsize=4, copies=copies
    )
    assert actual == pytest.approx(seconds, rel=1e-12)
