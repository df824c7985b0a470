"""Calls that score in pipeline stages give what the same calls give on one mesh."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.data.batches import put_rows
from jrlhf.meshes import GENERATE, SCORE, TRAIN_TP, Layout, make_mesh, reshard
from jrlhf.models import LoRAConfig, init_lora, lora_shardings, param_shardings
from jrlhf.models.options import ForwardOptions
from jrlhf.roles.model import Architecture, Compute
from jrlhf.roles.pipelined import PipelinedPlacement
from jrlhf.roles.placement import CallPlacement
from tests.models.conftest import random_params
from tests.models.shared import FAMILIES, unstacked

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH, PARTS, SPAN = 32, 12, 4, 5
LORA = LoRAConfig(2, 4.0)
SPANNED = {"temperature": 0.7, "span": SPAN}
# Method, its keywords, family, layout, LoRA, dtype, number of stages, sizes of the mesh of each.
CASES: dict[str, tuple[str, dict[str, Any], str, Layout, LoRAConfig | None, Any, int, tuple[int, int, int]]] = {
    "tied": ("score_logprobs", SPANNED, "gemma", SCORE, None, jnp.float32, 2, (1, 2, 2)),
    "all tokens": ("score_logprobs", {"temperature": 1.0}, "gpt2", TRAIN_TP, None, jnp.float32, 2, (1, 2, 2)),
    "values": ("score_values", {}, "llama", SCORE, None, jnp.float32, 4, (1, 1, 2)),
    "scores": ("score_sequences", {}, "gemma", TRAIN_TP, None, jnp.float32, 2, (1, 2, 2)),
    "bfloat16": ("score_values", {}, "gpt2", SCORE, None, jnp.bfloat16, 2, (1, 2, 1)),
    "critic's adapter": ("score_values", {}, "llama", GENERATE, LORA, jnp.float32, 4, (2, 1, 1)),
    "adapter and base": ("score_logprobs_with_base", SPANNED, "llama", GENERATE, LORA, jnp.float32, 2, (1, 2, 2)),
}
OFTEN = "tied", "adapter and base"


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.proof("families")) for x in CASES]
)
def test_scores_of_stages_are_those_of_the_whole_model(case):
    """Three layers are cut into stages of 1 and 2, five into four stages. Both calls compute the same rows together."""
    method, keywords, family, layout, lora, dtype, count, sizes = CASES[case]
    config, own = FAMILIES[family], int(np.prod(sizes))
    config = replace(config, layers=5) if count == 4 else config
    devices, (data, fsdp, tensor) = jax.devices()[: count * own], sizes
    whole = make_mesh(data, fsdp * count, tensor, devices=devices)
    starts = range(0, count * own, own)
    groups = tuple(make_mesh(*sizes, devices=devices[start : start + own]) for start in starts)
    # Rows divide over the devices of a group; the reference has them there, too.
    placed = PipelinedPlacement(groups[-1], layout, PARTS, groups=(groups,), whole=whole, schedule="1f1b")
    alone = CallPlacement(groups[-1], layout, PARTS)
    architecture, compute = Architecture(config, lora, shared=lora is not None), Compute(ForwardOptions(dtype=dtype))

    head = "lm" if "logprobs" in method else "scalar"
    frozen = ()
    if lora is None:
        params = jax.device_put(random_params(config, head), param_shardings(config, whole, SCORE, head))
    else:
        adapter = jax.tree.map(lambda x: x + 0.1, init_lora(config, lora, jax.random.key(3), head))
        params = jax.device_put(adapter, lora_shardings(config, whole, lora, head))
        frozen = (jax.device_put(unstacked(random_params(config)), param_shardings(config, whole, GENERATE)),)

    generator = np.random.default_rng(1)
    tokens = generator.integers(0, config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    lengths = generator.integers(4, LENGTH + 1, ROWS).astype(np.int32)
    begins = generator.integers(0, 4, ROWS).astype(np.int32)
    given: Any = (tokens, lengths, *([begins] if "span" in keywords else []))
    own_copy = reshard((params, frozen), shardings_on(groups[-1], (params, frozen)))
    results = []
    for place, (weights, bases) in ((placed, (params, frozen)), (alone, own_copy)):
        function = getattr(place.compiled(architecture, compute), method)(**keywords)
        with jax.set_mesh(place.mesh):
            results.append(function(weights, *put_rows(given, place.mesh), *bases))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    assert jax.tree.map(lambda x: x.sharding, results[0]) == jax.tree.map(lambda x: x.sharding, results[1])
    tolerance: Any = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 0.02, "atol": 0.02}
    for actual, expected in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(actual, expected, **tolerance)


def shardings_on(mesh, tree) -> Any:
    return jax.tree.map(lambda x: jax.NamedSharding(mesh, x.sharding.spec), tree)
