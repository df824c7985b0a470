"""Sums of table rows in a fixed order, and that no training step on GPUs adds by a race."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from benchmarks.shapes import placed
from jrlhf.kernels.row_sums import BLOCK, row_sums
from jrlhf.meshes import AXES, TRAIN
from jrlhf.models import init_lm, make_token_sums, param_shardings
from tests.models.shared import FAMILIES


@pytest.mark.parametrize(("count", "rows"), [(1, 9), (2 * BLOCK, 9), (5 * BLOCK - 1, 2), (900, 300)])
def test_values_of_equal_index_are_summed(count, rows):
    """An index may have no value, or several blocks of them."""
    random = np.random.default_rng(count)
    values = random.normal(size=(count, 5)).astype(np.float32)
    index = random.integers(-1, rows + 2, count).astype(np.int32)  # the first and the last two are outside
    expected = np.zeros((rows, 5))
    for value, row in zip(values, index, strict=True):
        if 0 <= row < rows:
            expected[row] += value
    np.testing.assert_allclose(jax.jit(row_sums, static_argnums=2)(values, index, rows), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma", "gpt2"])  # learned positions are looked up too
def test_no_training_step_on_gpus_adds_by_a_race(family):
    """A scatter that adds has unique indices."""
    config = replace(FAMILIES[family], layers=2, local_layers=FAMILIES[family].local_layers[:2])
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3, abstract_device=device)
    sums = make_token_sums(config, mesh, TRAIN, dtype=jnp.bfloat16, attention="xla")

    def loss(params, tokens):
        return sums(params, tokens, {}, lambda logprobs, entropy, data: (-logprobs, {}))[0]

    shapes = jax.eval_shape(lambda: init_lm(config, jax.random.key(0)))
    with jax.sharding.use_abstract_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        arguments = placed(shapes, param_shardings(config, mesh, TRAIN)), jax.ShapeDtypeStruct((8, 16), jnp.int32)
        text = jax.jit(jax.grad(loss)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    scatters = re.findall(
        r'"stablehlo\.scatter"\(.*?unique_indices = (\w+).*?\^bb0.*?stablehlo\.(\w+)', text, re.DOTALL
    )
    assert len(scatters) == text.count('"stablehlo.scatter"') > 0
    assert not [operation for unique, operation in scatters if unique == "false" and operation == "add"]
