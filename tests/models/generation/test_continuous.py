"""Continuous batching: the engine's tokens, and log-probabilities of the weights that drew each token."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import ModelConfig, SamplingConfig, Schedule, make_generate, param_shardings
from jrlhf.models.generation.continuous import ContinuousBatch, Prompt
from jrlhf.models.generation.decoding import Decoder
from tests.models.conftest import random_params
from tests.models.shared import fast_jit, unstacked

CONFIG = ModelConfig(vocab_size=50, embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24, max_positions=32)
U, S, P, R = 12, 2, 5, 12
SAMPLING = SamplingConfig(R, temperature=1.0, min_new_tokens=2, stop_ids=tuple(range(0, 50, 12)))
EVERY = 2  # chunks between two versions of the weights


class Setting:
    """Four versions of a model on a mesh, prompts, and a batch of slots."""

    def __init__(self, *sizes):
        self.mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        self.versions = [random_params(CONFIG, seed=seed) for seed in range(4)]
        shardings = param_shardings(CONFIG, self.mesh, GENERATE)
        self.weights = [(jax.device_put(unstacked(params), shardings), {}) for params in self.versions]
        generator = np.random.default_rng(3)
        lengths = generator.integers(1, P + 1, U).astype(np.int32)
        tokens = generator.integers(0, CONFIG.vocab_size, (U, P)).astype(np.int32)
        self.tokens = np.where(np.arange(P)[None, :] < lengths[:, None], tokens, 0)
        self.lengths, self.keys = lengths, jax.random.split(jax.random.key(7), U * S)
        data = np.asarray(jax.random.key_data(self.keys)).reshape(U, S, -1)
        self.prompts = [Prompt(n, self.tokens[n], int(lengths[n]), data[n]) for n in range(U)]
        decoder = Decoder(CONFIG, self.mesh, SAMPLING, S, jnp.float32, None, None)
        with jax.set_mesh(self.mesh):
            self.batch = ContinuousBatch.of_size(decoder, self.mesh, Schedule(chunk=3), 8, P)

    def draw(self, count=1, *, prefill_again: bool = False):
        """Row -> (tokens, log-probabilities, versions, drew a stop token). Every second chunk has newer weights, of
        the first `count` versions."""
        waiting, rows, versions, chunks = list(self.prompts), {}, np.zeros((U * S, R), int), 0
        with jax.set_mesh(self.mesh):
            while waiting or len(self.batch.rows):
                version = min(chunks // EVERY, count - 1)
                if prefill_again and version != min((chunks - 1) // EVERY, version):
                    self.batch.prefill_again(self.weights[version], lambda number: self.prompts[number])
                entering = [waiting.pop(0) for _ in range(min(self.batch.room, len(waiting)))]
                self.batch.admit(self.weights[version], entering)
                for row in self.batch.decode(self.weights[version]):
                    versions[row.row, row.start : row.end] = version
                    if row.response is not None:
                        tokens, logprobs, finished = row.response
                        assert len(tokens) == len(logprobs) == row.end
                        rows[row.row] = tokens, logprobs, versions[row.row, : row.end], finished
                chunks += 1
        return rows

    def sequence(self, row: int, tokens) -> np.ndarray:
        """The row's prompt and these tokens."""
        prompt = row // S
        return np.concatenate([self.tokens[prompt, : self.lengths[prompt]], tokens])


setting_on = cache(Setting)


@pytest.mark.full
def test_arrays_of_the_host_are_replaced_and_not_written_to():
    """A checkpoint may still be writing them: on CPUs an array on a device may share the memory of the host's."""
    setting = setting_on(1, 1, 1)
    batch, states = setting.batch, []
    with jax.set_mesh(setting.mesh):
        for call in (lambda weights: batch.admit(weights, setting.prompts[:2]), batch.decode):
            states.append((batch.state, np.array([batch.state.owner, batch.state.drawn])))
            call(setting.weights[0])
        while len(batch.rows):
            batch.decode(setting.weights[0])
    for state, before in states:
        np.testing.assert_array_equal([state.owner, state.drawn], before)


@pytest.mark.parametrize("sizes", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.full)])
def test_rows_are_those_of_one_program_for_all(sizes):
    setting = setting_on(*sizes)
    rows = setting.draw()
    program = jax.jit(make_generate(CONFIG, setting.mesh, SAMPLING, samples=S))
    with jax.set_mesh(setting.mesh):
        whole = program(setting.weights[0][0], setting.tokens, setting.lengths, setting.keys)
    whole = jax.device_get(whole)
    assert sorted(rows) == list(range(U * S))
    for row, (tokens, logprobs, _, finished) in rows.items():
        start = whole.prompt_lengths[row]
        response = slice(start, start + whole.response_lengths[row])
        np.testing.assert_array_equal(tokens, whole.tokens[row, response])
        np.testing.assert_allclose(logprobs, whole.logprobs[row, response], atol=1e-5)
        assert finished == whole.finished[row]


@pytest.mark.full
def test_with_caches_made_anew_log_probabilities_are_those_of_the_recorded_version(reference):
    setting = setting_on(1, 1, 1)
    rows = setting.draw(4, prefill_again=True)
    assert max(len(set(versions)) for _, _, versions, _ in rows.values()) > 1
    padded = np.zeros((U * S, P + R), np.int32)
    for row, (tokens, *_) in rows.items():
        sequence = setting.sequence(row, tokens)
        padded[row, : len(sequence)] = sequence
    plain = fast_jit(lambda params: reference.logprobs(params, CONFIG, padded)[0])
    expected = [np.asarray(plain(params)) for params in setting.versions]
    for row, (tokens, logprobs, versions, _) in rows.items():
        at = setting.lengths[row // S] + np.arange(len(tokens))
        wanted = [expected[version][row, t] for version, t in zip(versions, at, strict=True)]
        np.testing.assert_allclose(logprobs, wanted, atol=2e-4)


def test_with_kept_caches_log_probabilities_are_those_of_the_recorded_mixture():
    setting = setting_on(1, 1, 1)
    rows = setting.draw(3)
    assert max(len(set(versions)) for _, _, versions, _ in rows.values()) > 1
    for row, (tokens, logprobs, versions, _) in rows.items():
        sequence, start = setting.sequence(row, tokens), setting.lengths[row // S]
        # Position t is fed with the weights that draw token t + 1; the prompt before with those that draw the first.
        fed = np.concatenate([np.full(start, versions[0]), versions])[1:]
        expected = mixture(setting.versions[:3], fed, sequence)
        np.testing.assert_allclose(logprobs, expected[-len(tokens) :], atol=2e-4)


def mixture(versions, fed, sequence) -> np.ndarray:
    """The log-probability of each token but the first, where position t is computed with weights number fed[t]."""
    T, H = len(fed), CONFIG.head_dim
    own: Any = jax.tree.map(lambda *x: np.stack(x).astype(np.float64)[fed], *versions)  # [T, ...], each position's

    def norm(x, weights):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * weights["scale"]

    def rotated(x):  # [T, heads, H]
        angles = np.arange(T)[:, None] * CONFIG.rope_theta ** (-2 * np.arange(H // 2) / H)
        turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    x = own["embedding"][np.arange(T), sequence[:-1]]
    for index in range(CONFIG.layers):
        layer = jax.tree.map(lambda weight, index=index: weight[:, index], own["layers"])
        h, weights = norm(x, layer["attention_norm"]), layer["attention"]
        q, k, v = (np.einsum("td,tdnh->tnh", h, weights[name]) for name in ("wq", "wk", "wv"))
        k, v = (np.repeat(y, CONFIG.heads // CONFIG.kv_heads, axis=1) for y in (rotated(k), v))
        scores = np.einsum("qnh,snh->nqs", rotated(q), k) / np.sqrt(H)
        p = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf) - scores.max(-1, keepdims=True))
        out = np.einsum("nqs,snh->qnh", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("tnh,tnhd->td", out, weights["wo"])
        h, weights = norm(x, layer["mlp_norm"]), layer["mlp"]
        gate, up = (np.einsum("td,tdf->tf", h, weights[name]) for name in ("gate", "up"))
        x = x + np.einsum("tf,tfd->td", gate / (1 + np.exp(-gate)) * up, weights["down"])

    table = own["embedding" if CONFIG.tie_embeddings else "unembedding"][:, : CONFIG.vocab_size]
    z = np.einsum("td,tvd->tv", norm(x, own["final_norm"]), table)
    z = z - z.max(-1, keepdims=True)
    return z[np.arange(T), sequence[1:]] - np.log(np.exp(z).sum(-1))
