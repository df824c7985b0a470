"""The pages in examples/: they run, their results do not depend on the mesh, and GRPO is that of `jrlhf.train`."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import grpo, ppo
from jrlhf.algorithms.factory import algorithm_of
from jrlhf.api import train
from jrlhf.config import load_config
from jrlhf.meshes import TRAIN, make_mesh, to_host
from jrlhf.models import ModelConfig, SamplingConfig, init_sharded, param_shardings
from jrlhf.ppo import GRPOConfig, TrainState
from jrlhf.roles.optimizers import adamw
from jrlhf.stages.rl import Iterations
from tests.support.runs import stage_of

ROOT = Path(__file__).resolve().parents[2]
EOS, ZERO, RESPONSE = 1, 2, 4  # of the arithmetic task: the end's token, the digit 0's, and tokens of a response


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(quick_compilation) -> None:
    pass


def even(completions) -> list[float]:
    """A reward that differs between the responses of fresh weights."""
    return [sum(char in "02468" for char in text) / RESPONSE for text in completions]


def even_digits(rollout, _) -> np.ndarray:
    """The same, of tokens."""
    tokens, starts, ends = jax.device_get((rollout.tokens, rollout.prompt_lengths, rollout.lengths))
    rows = [row[start:end] for row, start, end in zip(tokens, starts, ends, strict=True)]
    return np.array([np.isin(row, np.arange(ZERO, ZERO + 10, 2)).sum() / RESPONSE for row in rows], np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """A run of `jrlhf.train` on 8 devices: its settings, first weights, the prompts and keys it drew, its metrics."""
    directory, weights, batches = str(tmp_path_factory.mktemp("run")), [], []
    settings: dict[str, Any] = {
        "sft": {"steps": 1, "batch": 8},
        "device": {"simulated": 8},
        "mesh": {"fsdp": 4, "tensor": 2},
        "model": {"embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 32},
        "data": {"problems": 40, "heldout_rows": 8},
        "grpo": {
            "iterations": 4,
            "rollout_batch": 32,
            "actor": {"learning_rate": 3e-3, "warmup": 1},
            "algorithm": {"samples": 4, "epochs": 2, "minibatches": 2},
        },
        "evaluation": {"prompts": 8},
    }
    advance = Iterations.advance

    def recorded(self, state, step):
        weights.append(to_host(state.trained["actor"].params))
        tokens, lengths, keys = self.rollouts.collect(step).arrays
        batches.append((to_host(tokens), to_host(lengths), to_host(jax.random.key_data(keys))))
        return advance(self, state, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iterations, "advance", recorded)
        reward = {"name": "even", "function": even, "in_process": True}
        done = train("arithmetic-grpo", run_dir=directory, rewards=[reward], **settings)
    config = load_config(str(done.path / "config.yaml"))
    return SimpleNamespace(config=config, params=weights[0], batches=batches, metrics=stage_of(done.path, "grpo"))


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 8])
def test_an_iteration_of_the_page_has_the_numbers_of_a_run(run, count: int):
    """Given the same prompts, row keys, first weights and optimizer, on whatever mesh."""
    config, algorithm = run.config, algorithm_of(run.config)
    mesh = make_mesh(fsdp=-1, tensor=min(count, 2), devices=jax.devices()[:count])
    model = ModelConfig(14, embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=32, max_positions=16)
    sampling = SamplingConfig(max_new_tokens=RESPONSE, stop_ids=(EOS,), token_limit=14)
    optimizer = adamw(config.rl.optimizer_of("actor"), updates=config.rl.updates)
    iteration = grpo.make_iteration(model, mesh, sampling, algorithm, optimizer, even_digits)
    with jax.set_mesh(mesh):
        params = jax.device_put(run.params, param_shardings(model, mesh, TRAIN))
        state, reference = TrainState.create(params, optimizer), jax.tree.map(jnp.copy, params)
        for (tokens, lengths, keys), theirs in zip(run.batches, run.metrics, strict=True):
            keys = jax.random.wrap_key_data(keys)
            state, _, ours = iteration(state, reference, tokens, lengths, keys, None)
            ours = {name: float(value) for name, value in ours.items()}
            assert len(ours) > 25 and ours.keys() <= theirs.keys()
            assert ours["critic/score/mean"] > 0 < ours["actor/grad_norm"]
            theirs = {name: theirs[name] for name in ours}
            np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=1e-5, atol=1e-5, err_msg=str(ours))
    assert ours["objective/kl"] > 0.1  # the weights have moved


def printed(main: Callable[..., Any], count: int, capsys, **sizes) -> str:
    """What a page prints on this number of devices, without their number and the seconds."""
    main(steps=2, iterations=2, devices=jax.devices()[:count], **sizes)
    return re.sub(rf"{count} device\(s\)|[\d.]+ s ", "", capsys.readouterr().out)


PAGES = pytest.mark.parametrize(
    ("main", "sizes"), [(grpo.main, {"prompts": 4}), (ppo.main, {"rows": 32})], ids=["grpo", "ppo"]
)


def test_the_first_iteration_on_eight_devices():
    """The switched weights draw tokens as probable as the trained ones say; the update is a step along the gradient."""
    mesh = make_mesh(fsdp=4, tensor=2)
    model = ModelConfig(14, embed=16, layers=1, heads=2, kv_heads=2, head_dim=8, mlp=32, max_positions=16)
    sampling = SamplingConfig(max_new_tokens=RESPONSE, stop_ids=(EOS,), token_limit=14)
    config, optimizer = GRPOConfig(samples=4), optax.sgd(1.0)
    iteration = grpo.make_iteration(model, mesh, sampling, config, optimizer, even_digits)
    prompts, lengths = np.arange(16, dtype=np.int32).reshape(4, 4) % 14, np.full(4, 4, np.int32)
    with jax.set_mesh(mesh):
        first = init_sharded(model, jax.random.key(0), mesh)
        before, reference = to_host(first), jax.tree.map(jnp.copy, first)
        keys, state = jax.random.split(jax.random.key(1), 16), TrainState.create(first, optimizer)
        state, experience, metrics = jax.device_get(iteration(state, reference, prompts, lengths, keys, None))
    assert metrics["rollout/logprob_gap_max"] < 1e-5 and metrics["objective/kl"] == 0
    assert metrics["critic/score/mean"] == pytest.approx(even_digits(experience, None).mean()) and state.step == 1
    np.testing.assert_array_equal(experience.tokens[:, :4], np.repeat(prompts, 4, axis=0))
    moved = jax.tree.map(lambda x, y: np.linalg.norm(x - y), before, state.params)
    norm = np.linalg.norm(jax.tree.leaves(moved))  # of the gradient, at a learning rate of 1
    assert norm == pytest.approx(metrics["actor/grad_norm"], rel=1e-4) and norm > 0


@pytest.mark.full
@PAGES
def test_a_page_prints_the_same_on_one_device_and_on_eight(main, sizes, capsys):
    text = printed(main, 1, capsys, **sizes)
    assert re.search(r"^  1  [\d.]+% right .*KL 0\.00 .* \d\+\d=", text, re.MULTILINE)
    assert text == printed(main, 8, capsys, **sizes)


@pytest.mark.full
@PAGES
def test_a_page_teaches_what_it_says(main, sizes):
    right = main(devices=jax.devices()[:1])
    assert 0.2 < right[0] < 0.5 and right[-1] > 0.7


def test_pages_are_short_and_need_public_functions_only():
    for path, most in (("grpo", 120), ("ppo", 160)):
        lines = (ROOT / f"examples/{path}.py").read_text(encoding="utf-8").splitlines()
        ours = [line for line in lines if re.match(r"(from|import) jrlhf", line)]
        assert len(lines) <= most and all(
            re.match(r"from jrlhf import ppo$|from jrlhf\.(meshes|models) import ", line) for line in ours
        )
