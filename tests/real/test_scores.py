"""Logits, log-probabilities and gradients of a pretrained model against transformers', in every layout that it has."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf.data.batches import put_rows
from jrlhf.meshes import GENERATE, SCORE, TRAIN, TRAIN_TP, Layout
from jrlhf.models import export_hf, make_logprobs, to_int8
from jrlhf.models.forward import ShardedForward
from jrlhf.models.hf import load_hf
from jrlhf.models.options import ForwardOptions
from jrlhf.models.pipeline import Stages
from jrlhf.ppo import SFTBatch, TrainState, make_sft_step
from jrlhf.ppo.updates import run_on_host
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Architecture, Compute
from jrlhf.roles.pipelined import PipelinedPlacement
from tests.models.test_pipeline import RECORDER
from tests.real.conftest import VOCABULARY, Peer, chosen, log_softmax, logits_of, mesh_of

pytestmark = [
    pytest.mark.proof("real"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # the peers' own
]


def put(peer: Peer, mesh: Any, layout: Layout) -> Any:
    """(config, weights stored on the mesh)."""
    read, params = load_hf(peer.directory, mesh, layout=layout)
    return read.model, params


def filled(tokens: np.ndarray, mesh: Any) -> np.ndarray:
    """The rows, repeated until they divide over the devices."""
    return np.resize(tokens, (-(-len(tokens) // mesh.size) * mesh.size, tokens.shape[1]))


def our_logits(peer: Peer, tokens: np.ndarray, mesh: Any, layout: Layout) -> np.ndarray:
    """Logits [B, T, V] of rows without padding: no function of ours returns them all."""
    config, params = put(peer, mesh, layout)
    forward = ShardedForward(config, mesh, layout, "lm", ForwardOptions())
    with jax.set_mesh(mesh):
        hidden = np.asarray(jax.jit(forward.shard(forward.hidden))(params, filled(tokens, mesh)))
    return hidden[: len(tokens)] @ np.asarray(jax.device_get(params["embedding"]))[:VOCABULARY].T


def our_logprobs(model: Any, tokens: np.ndarray, mesh: Any, layout: Layout, temperature=1.0, compute=None) -> Any:
    """Log-probabilities and entropies [B, T - 1] of (config, weights), by the head that never has all logits."""
    config, params = model
    compute = replace(compute or Compute(), score_layout=layout)
    score = CompiledModel(Architecture(config, shared=layout == GENERATE), mesh, compute)
    rows = filled(tokens, mesh)
    with jax.set_mesh(mesh):
        placed = put_rows((rows, np.full(len(rows), rows.shape[1], np.int32)), mesh)
        results = score.score_logprobs(temperature=temperature)(params, *placed)
        return tuple(np.asarray(x)[: len(tokens), 1:] for x in results)


LAYOUTS = {
    "one": ((1, 1, 1), SCORE),
    "tensor": ((1, 1, 3), TRAIN_TP),
    "fsdp": ((1, 2, 3), SCORE),
    "generate": ((1, 1, 3), GENERATE),
}


def test_logits_are_those_of_transformers(peer):
    """All 49,152 of every token. The judge is transformers in float64: at logits of up to 47, float32 rounds.

    Ours are as near to it as transformers' own in float32: their mean error is 1e-5, and both err by up to 3e-4 where
    activations have outliers.
    """
    tokens = peer.rows()
    exact = logits_of(peer.load().double(), tokens)
    theirs = np.abs(logits_of(peer.model, tokens) - exact)
    assert np.abs(exact).max() > 30 and theirs.mean() < 1e-5
    for sizes, layout in (LAYOUTS[name] for name in ("one", "tensor", "fsdp")):
        ours = np.abs(our_logits(peer, tokens, mesh_of(*sizes), layout) - exact)
        assert ours.mean() < 1.5 * theirs.mean() and ours.max() < 1.5 * theirs.max()
        assert np.mean(ours > 1e-4) < 2 * np.mean(theirs > 1e-4) + 1e-5


@pytest.mark.parametrize(("placing", "temperature"), [("one", 1.0), ("one", 1.5), *((name, 0.6) for name in LAYOUTS)])
def test_log_probabilities_and_entropies_at_a_temperature(peer, placing, temperature):
    """Numbers of words that are almost sure and of words that are almost impossible."""
    tokens = peer.rows()
    every = log_softmax(logits_of(peer.model, tokens), temperature)
    expected, entropies = chosen(every, tokens), -(np.exp(every) * every).sum(-1)[:, :-1]
    assert expected.max() > -1e-3 and expected.min() < -15
    sizes, layout = LAYOUTS[placing]
    mesh = mesh_of(*sizes)
    logprobs, entropy = our_logprobs(put(peer, mesh, layout), tokens, mesh, layout, temperature)
    np.testing.assert_allclose(logprobs, expected, atol=1e-4 / min(temperature, 1), rtol=1e-6)
    np.testing.assert_allclose(entropy, entropies, atol=2e-4)


def test_a_long_repeated_row(peer):
    """2,000 tokens of which most repeat, so that most words are sure and angles of rotation are large."""
    tokens, mesh = np.array([np.resize(peer.rows(width=192).ravel(), 2000)]), mesh_of()
    expected = peer.chosen(tokens)
    assert np.median(expected) > -0.02 and expected.min() < -15
    logprobs, _ = our_logprobs(put(peer, mesh, SCORE), tokens, mesh, SCORE)
    np.testing.assert_allclose(logprobs, expected, atol=5e-4)
    assert np.abs(logprobs - expected).mean() < 2e-5


def test_bfloat16_rounds_no_more_than_transformers_bfloat16(peer):
    """The same weights, the same dtype: an error of ours would add to that of rounding."""
    import torch

    tokens, mesh = peer.rows(), mesh_of(tensor=3)
    expected = peer.chosen(tokens)
    theirs = peer.chosen(tokens, peer.load(dtype=torch.bfloat16)) - expected
    compute = Compute(ForwardOptions(dtype=jnp.dtype(jnp.bfloat16)))
    for layout in (SCORE, GENERATE):
        ours = our_logprobs(put(peer, mesh, layout), tokens, mesh, layout, compute=compute)[0] - expected
        root = lambda x: np.sqrt(np.mean(np.square(x)))  # noqa: E731
        assert 1e-3 < root(ours) < 1.25 * root(theirs) and abs(ours.mean()) < 0.25 * root(theirs)


def test_an_int8_base_is_the_model_with_rounded_matrices(peer, tmp_path):
    tokens, mesh = peer.rows(), mesh_of(tensor=3)
    config, params = put(peer, mesh, GENERATE)
    int8 = to_int8(params)
    expected = peer.chosen(tokens, peer.rounded(int8, config, tmp_path / "rounded"))
    assert np.abs(expected - peer.chosen(tokens)).max() > 0.01, "int8 changes the model"
    np.testing.assert_allclose(our_logprobs((config, int8), tokens, mesh, GENERATE)[0], expected, atol=2e-4)


@pytest.mark.parametrize("stages", [2, 3])
def test_pipelines_score_as_transformers(peer, stages):
    """30 layers in 2 and 3 stages, of one device each and of three that share heads, with tied embeddings."""
    tokens = np.resize(peer.rows(), (6, 96))
    expected = peer.chosen(tokens)
    for tensor in (1, 3) if stages == 2 else (1,):
        groups = tuple(mesh_of(tensor=tensor, first=tensor * number) for number in range(stages))
        whole = mesh_of(fsdp=stages, tensor=tensor)
        config, params = put(peer, whole, SCORE)
        placed = PipelinedPlacement(groups[-1], SCORE, 2, groups=(groups,), whole=whole, schedule="1f1b")
        score = placed.compiled(Architecture(config), Compute()).score_logprobs(temperature=0.6)
        with jax.set_mesh(placed.mesh):
            lengths = np.full(len(tokens), tokens.shape[1], np.int32)
            logprobs, _ = score(params, *put_rows((tokens, lengths), placed.mesh))
        np.testing.assert_allclose(np.asarray(logprobs)[:, 1:], peer.chosen(tokens, temperature=0.6), atol=2e-4)
    assert expected.std() > 1


@pytest.mark.parametrize("placing", ["one", "fsdp", "stages"])
def test_gradients_are_those_of_torch(peer, tmp_path, placing):
    """The gradient of the mean loss of some tokens by every weight, compared under transformers' names.

    The judge is torch in float64: ours are nearer to it than torch's own in float32.
    """
    tokens = np.resize(peer.rows(width=48), (6, 48))
    mask = np.zeros(tokens.shape, bool)
    mask[:, 8:] = True
    sizes, layout = LAYOUTS.get(placing, ((1, 3, 1), TRAIN))
    home = mesh_of(*sizes)
    config, params = put(peer, home, TRAIN)
    pipeline, mesh = None, home
    logprobs = make_logprobs(config, home, TRAIN)
    if placing == "stages":
        stages = Stages(config, tuple(mesh_of(first=number) for number in range(3)), TRAIN, ForwardOptions())
        mesh, pipeline = stages.meshes[-1], partial(run_on_host, gradients_of=stages.gradients)
        logprobs = make_logprobs(stages.tail, mesh, TRAIN)
    step = make_sft_step(logprobs, RECORDER, micro_batches=1 if placing == "fsdp" else 2, pipeline=pipeline)
    with jax.set_mesh(home):
        state = jax.jit(lambda params: TrainState.create(params, RECORDER))(params)
    with jax.set_mesh(mesh):
        after, metrics = step(state, SFTBatch(*put_rows((tokens, mask), mesh)))
    loss, exact = peer.gradients(peer.load().double(), tokens, mask)
    np.testing.assert_allclose(metrics["sft/loss"], loss, rtol=1e-5)
    export_hf(after.opt_state, config, tmp_path / "gradients")
    ours, theirs = load_file(tmp_path / "gradients" / "model.safetensors"), peer.gradients(peer.load(), tokens, mask)[1]
    assert ours.keys() == exact.keys() and len(ours) == 272
    norms = {name: np.linalg.norm(gradient) for name, gradient in exact.items()}

    def errors(gradients: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.array([np.linalg.norm(gradients[name] - exact[name]) / norm for name, norm in norms.items()])

    assert errors(ours).max() < 1e-4 < errors(theirs).max()
    assert errors(ours).mean() < 2e-5 < errors(theirs).mean()
    np.testing.assert_allclose(metrics["sft/grad_norm"], np.linalg.norm([*norms.values()]), rtol=1e-4)
