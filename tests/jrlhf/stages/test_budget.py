"""Scoring and training under a budget of tokens: what the whole batch gives, by the decoder on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.config.stages import RewardModelConfig, SFTConfig
from jrlhf.data.batches import put_rows
from jrlhf.meshes import GENERATE, make_mesh, reshard
from jrlhf.models import LoRAConfig, ModelConfig, init_lora, init_sharded, lora_shardings, param_shardings
from jrlhf.ppo import Experience, PPOConfig, TrainState
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Architecture, Compute

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(
    vocab_size=50, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=16, max_positions=20, initializer_range=0.3
)
ROWS, TIME = 12, 20  # widths 16 and 20
RESPONSE = 7  # tokens at most, where only responses are predicted
WHOLE, BUDGET = Compute(), Compute(score_tokens=32)
ADAPTER = LoRAConfig(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def mesh():
    mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="module")
def rows(mesh):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, (ROWS, TIME)).astype(np.int32)
    lengths = np.where(np.arange(ROWS) % 5 == 0, rng.integers(17, TIME + 1, ROWS), rng.integers(3, 17, ROWS))
    return put_rows((tokens, lengths.astype(np.int32)), mesh)


def model_of(mesh, head, lora):
    """(architecture, arguments before the rows, arguments after them)"""
    if lora is None:
        return Architecture(MODEL), init_sharded(MODEL, jax.random.key(0), mesh, head, zero_head=False), ()
    base = reshard(init_sharded(MODEL, jax.random.key(0), mesh), param_shardings(MODEL, mesh, GENERATE))
    adapter = jax.device_put(init_lora(MODEL, lora, jax.random.key(1), head), lora_shardings(MODEL, mesh, lora, head))
    return Architecture(MODEL, lora, shared=True), adapter, (base,)


def real(x, lengths):
    """Results with what stands in the padding taken out."""
    x = np.asarray(x)
    return np.where(np.arange(x.shape[1])[None] < np.asarray(lengths)[:, None], x, 0) if x.ndim > 1 else x


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "head", "options", "lora"),
    [
        (CompiledModel.score_logprobs, "lm", {"temperature": 0.7}, None),
        (CompiledModel.score_values, "scalar", {}, ADAPTER),
        (CompiledModel.score_sequences, "scalar", {}, None),
    ],
)
def test_scores_are_those_of_the_whole_batch(mesh, rows, program, head, options, lora):
    architecture, params, base = model_of(mesh, head, lora)
    expected, got = (
        program(CompiledModel(architecture, mesh, compute), **options)(params, *rows, *base)
        for compute in (WHOLE, BUDGET)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(real(a, rows[1]), real(b, rows[1]), rtol=1e-4, atol=1e-5), got, expected
    )
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, expected)


@pytest.mark.full
@pytest.mark.parametrize("compute", [BUDGET, Compute(score_parts=3)])
def test_scores_of_responses_are_those_of_all_tokens(mesh, rows, compute):
    architecture, params, _ = model_of(mesh, "lm", None)
    starts, mask = responses_in(rows[1])
    whole = CompiledModel(architecture, mesh, WHOLE).score_logprobs(temperature=0.7)(params, *rows)
    spanned = CompiledModel(architecture, mesh, compute).score_logprobs(temperature=0.7, span=RESPONSE)
    for expected, got in zip(whole, spanned(params, *rows, put_rows(starts, mesh)), strict=True):
        np.testing.assert_allclose(np.where(mask, got, 0), np.where(mask, expected, 0), rtol=1e-4, atol=1e-5)


def responses_in(lengths):
    """The start of each row's response, and a mask of its tokens: at most RESPONSE, the last ones of the row."""
    lengths = np.asarray(lengths)
    starts = np.maximum(lengths - np.random.default_rng(2).integers(1, RESPONSE + 1, ROWS), 1).astype(np.int32)
    return starts, (np.arange(TIME)[None] >= starts[:, None]) & (np.arange(TIME)[None] < lengths[:, None])


@pytest.mark.full
@pytest.mark.parametrize(
    ("lora", "responses"), [pytest.param(None, None, marks=pytest.mark.proof("runs")), (ADAPTER, RESPONSE)]
)
def test_an_update_is_that_of_the_whole_minibatch(mesh, rows, lora, responses):
    tokens, lengths = rows
    architecture, params, base = model_of(mesh, "lm", lora)
    optimizer, rng = optax.sgd(1e-1), np.random.default_rng(1)
    _, mask = responses_in(lengths)
    noise = put_rows(rng.normal(size=(ROWS, TIME)).astype(np.float32), mesh)
    made_up: Any = dict.fromkeys(Experience.__dataclass_fields__, lengths) | {
        "importance": None,
        "kl_coef": None,
        "version": jnp.int32(0),
        "versions": None,
        "targets": None,
    }
    made_up |= {"tokens": tokens, "response_mask": put_rows(mask, mesh), "advantages": noise, "old_logprobs": noise}
    results = []
    for algorithm, longest in ((PPOConfig(), None), (PPOConfig(micro_batch_tokens=32), responses)):
        options = {"temperature": 1.0, "responses": longest}
        step = CompiledModel(architecture, mesh, WHOLE).actor_step(optimizer, algorithm, **options)  # its loss is fused
        state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
        results.append(jax.device_get(step(state, Experience(**made_up), *base)))
    (expected, expected_metrics), (got, metrics) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), metrics, expected_metrics)


def test_two_ways_to_divide_a_batch_are_refused():
    for section in (SFTConfig, RewardModelConfig):
        with pytest.raises(ValueError, match="^micro_batches=4: it must be 1 with micro_batch_tokens"):
            section(micro_batches=4, micro_batch_tokens=4096)
