"""Generation against the plain decoder: tokens, log-probabilities, where rows end, and what they depend on."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import ModelConfig, SamplingConfig, init_lm, make_generate, param_shardings
from jrlhf.models.generation import decoding
from tests.models.shared import SHALLOW, fast_jit, unstacked

# One layer; the families have two. 2 key-value heads: each serves 2 devices at tensor=4. 150 is no multiple of 128.
CONFIG = ModelConfig(150, 32, 1, 8, 2, 8, mlp=48, max_positions=32, qk_norm=True, qkv_bias=True, softcap=8.0)
B, P, R = 16, 6, 8
STOPS = tuple(range(0, 150, 7))


def prompts(rows=B, width=P) -> Any:
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, P + 1, rows).astype(np.int32)
    tokens = generator.integers(0, CONFIG.vocab_size, (rows, P)).astype(np.int32)
    tokens = np.where(np.arange(P)[None, :] < lengths[:, None], tokens, 0)
    return np.pad(tokens, ((0, 0), (0, width - P))), lengths


def row_keys(rows=B):
    return jax.random.split(jax.random.key(11), rows)


class Generator:
    """A compiled generation on one mesh, from host to host."""

    def __init__(self, config, params, sampling, sizes, dtype=jnp.float32):
        self.mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        with jax.set_mesh(self.mesh):
            self.params = jax.device_put(unstacked(params), param_shardings(config, self.mesh, GENERATE))
            self.function = fast_jit(make_generate(config, self.mesh, sampling, dtype=dtype))

    def __call__(self, prompts, keys):
        with jax.set_mesh(self.mesh):
            return jax.device_get(self.function(self.params, *prompts, keys))


@pytest.fixture(scope="module")
def model(reference):
    """Weights, sharpened so that logits differ clearly, and the plain decoder's jitted logits."""
    params = reference.random_params(CONFIG)
    params["embedding"] = params["embedding"] * np.float32(0.5)
    return params, fast_jit(lambda tokens: reference.logits(params, CONFIG, tokens))


def recomputed(logits, tokens, temperature):
    """The log-probabilities of the tokens, 0 at t = 0."""
    log_p = jax.nn.log_softmax(logits(tokens)[:, :-1] / temperature, axis=-1)
    return np.pad(np.take_along_axis(np.asarray(log_p), tokens[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))


def test_operations_say_in_a_trace_to_which_part_they_belong(model, scopes):
    generator = Generator(CONFIG, model[0], SamplingConfig(R), (1, 1, 1))
    with jax.set_mesh(generator.mesh):
        names = scopes(generator.function, generator.params, *prompts(), row_keys())
    assert {"prefill", "decode", "embed", "attention", "mlp", "norm", "head", "sample"} <= names


def in_response(out):
    position = np.arange(out.tokens.shape[1])[None, :]
    return (position >= out.prompt_lengths[:, None]) & (position < (out.prompt_lengths + out.response_lengths)[:, None])


@pytest.fixture(scope="module")
def stopped(model):
    """A run with a minimal length and many stop tokens, and its generator."""
    sampling = SamplingConfig(R, temperature=0.9, min_new_tokens=2, stop_ids=STOPS)
    run = Generator(CONFIG, model[0], sampling, (2, 2, 2))
    return run, run(prompts(), row_keys())


def test_logprobs_equal_recomputed_ones_and_rows_do_not_depend_on_the_mesh(model, stopped):
    params, logits = model
    sampling = SamplingConfig(R, temperature=0.9, min_new_tokens=2, stop_ids=STOPS)
    out = Generator(CONFIG, params, sampling, (1, 2, 4))(prompts(), row_keys())
    inside = in_response(out)
    np.testing.assert_allclose(out.logprobs[inside], recomputed(logits, out.tokens, 0.9)[inside], atol=1e-4)
    assert (out.logprobs[~inside] == 0).all()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), out, stopped[1])
    np.testing.assert_array_equal(out.tokens, stopped[1].tokens)


def test_rows_end_at_their_stop_token(stopped):
    tokens, lengths = prompts()
    out = stopped[1]
    np.testing.assert_array_equal(out.prompt_lengths, lengths)
    for row in range(B):
        start, count = lengths[row], out.response_lengths[row]
        response = out.tokens[row, start : start + count]
        stops = np.isin(response, STOPS)
        np.testing.assert_array_equal(out.tokens[row, :start], tokens[row, :start])
        assert (out.tokens[row, start + count :] == 0).all()
        assert not stops[:-1].any()
        assert stops[-1] == out.finished[row]
        assert count == R or out.finished[row]
        assert count > 2 or not out.finished[row]
    # The run is a test only where rows ended early, at their limit, and with a stop at the first step that allows one.
    assert 0 < out.finished.sum() < B
    assert out.response_lengths.min() == 3
    assert (out.response_lengths == R).any()


def test_each_token_is_drawn_with_its_rows_key_and_its_position(model, stopped):
    out = stopped[1]
    logits = np.asarray(model[1](out.tokens)) / 0.9
    rows, positions = np.nonzero(in_response(out))
    drawable = np.pad(logits[rows, positions - 1], ((0, 0), (0, 256 - 150)), constant_values=-np.inf)
    banned = (positions - out.prompt_lengths[rows] < 2)[:, None] & np.isin(np.arange(256), STOPS)[None, :]
    keys = jax.vmap(jax.random.fold_in)(row_keys()[rows], positions)
    drawn = jax.vmap(jax.random.categorical)(keys, np.where(banned, -np.inf, drawable))
    np.testing.assert_array_equal(drawn, out.tokens[rows, positions])


def test_rows_do_not_depend_on_their_neighbours(stopped):
    run, out = stopped
    tokens, lengths = prompts()
    order = np.random.default_rng(0).permutation(B)
    shuffled = run((tokens[order], lengths[order]), row_keys()[order])
    np.testing.assert_array_equal(shuffled.tokens, out.tokens[order])
    # Other neighbours, other tokens behind the prompts' ends.
    half = np.arange(B) % 2 == 0
    different = np.where(half[:, None], tokens, 140), np.where(half, lengths, P).astype(np.int32)
    others = run(different, row_keys())
    behind = np.arange(P)[None, :] >= lengths[:, None]
    rubbish = run((np.where(behind, 99, tokens), lengths), row_keys())
    np.testing.assert_array_equal(others.tokens[half], out.tokens[half])
    np.testing.assert_array_equal(rubbish.tokens, out.tokens)
    assert (others.tokens[~half] != out.tokens[~half]).any()


@pytest.mark.full
def test_bfloat16_logprobs_are_bounded(model):
    params, logits = model
    out = Generator(CONFIG, params, SamplingConfig(R), (1, 1, 1), dtype=jnp.bfloat16)(prompts(), row_keys())
    assert out.logprobs.dtype == np.float32
    gap = np.abs(out.logprobs - recomputed(logits, out.tokens, 1.0))[in_response(out)]
    assert 1e-4 < gap.mean() < 0.15


@pytest.mark.full
def test_the_loop_ends_when_every_row_has_stopped(model, monkeypatch):
    calls = []
    sample = decoding.sample

    def counting(*arguments, **keywords):
        jax.debug.callback(lambda: calls.append(1))
        return sample(*arguments, **keywords)

    monkeypatch.setattr(decoding, "sample", counting)
    run = Generator(CONFIG, model[0], SamplingConfig(R, stop_ids=tuple(range(150))), (1, 1, 1))
    out = run(prompts(), row_keys())
    jax.effects_barrier()
    assert len(calls) == 1 and (out.response_lengths == 1).all() and out.finished.all()


@pytest.mark.parametrize("family", ["gemma", pytest.param("gpt2", marks=pytest.mark.full)])
def test_families_draw_with_the_log_probabilities_of_the_plain_decoder(reference, family):
    """Rows of unequal lengths that outgrow the windows, one device's cache holding a share of the heads."""
    config, few = SHALLOW[family], jax.tree.map(lambda x: x[:8], prompts())
    params = reference.random_params(config)
    out = Generator(config, params, SamplingConfig(R, temperature=0.8), (1, 1, 2))(few, row_keys(8))
    drawn = in_response(out)
    assert drawn.sum() == 8 * R
    plain = recomputed(fast_jit(lambda tokens: reference.logits(params, config, tokens)), out.tokens, 0.8)
    np.testing.assert_allclose(out.logprobs[drawn], plain[drawn], atol=1e-4)
    assert (out.logprobs[~drawn] == 0).all()


def test_what_does_not_fit_is_refused():
    mesh = make_mesh(2, 2, 2)
    shapes = jax.eval_shape(partial(init_lm, CONFIG), jax.random.key(0))
    listed = jax.eval_shape(unstacked, shapes)

    def trace(sampling, rows, width):
        run = make_generate(CONFIG, mesh, sampling)
        tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        jax.eval_shape(run, listed, tokens, jax.ShapeDtypeStruct((rows,), jnp.int32), keys)

    tokens, keys = jnp.ones((8, 6), jnp.int32), row_keys(8)
    for weights, prompts, key, message in (
        (listed, tokens.astype(jnp.float32), keys, "^prompts must be an array of integers, of rows and time$"),
        (listed, tokens[0], keys, "^prompts must be an array of integers"),
        (listed, tokens, keys[0], "8 prompts with 1 samples each need 8 keys, not a single one: use jax.random"),
        (
            shapes,
            tokens,
            keys,
            r"params are .*: reshard them to param_shardings\(model, mesh, GENERATE\)$",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            make_generate(CONFIG, mesh, SamplingConfig(4))(weights, prompts, jnp.full(8, 6), key)
    with pytest.raises(ValueError, match="stop id 150 is outside the vocabulary of 150 tokens"):
        make_generate(CONFIG, mesh, SamplingConfig(4, stop_ids=(150,)))
    with pytest.raises(ValueError, match=r"generation: a batch of 12 rows .* 8 devices .*: use a multiple of 8"):
        trace(SamplingConfig(4), 12, 6)
    with pytest.raises(
        ValueError, match="prompts of 29 tokens and max_new_tokens=4 together exceed .*max_positions=32"
    ):
        trace(SamplingConfig(4), 16, 29)
    with pytest.raises(ValueError, match="kv_heads=2 cannot be divided over tensor=3"):
        config = ModelConfig(**{**vars(CONFIG), "heads": 6, "vocab_size": 384})
        make_generate(config, make_mesh(tensor=3, devices=jax.devices()[:3]), SamplingConfig(4))
