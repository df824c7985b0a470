"""Asynchronous runs that train a pretrained model, with all their checks on, and what transformers reads of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jrlhf import generate
from jrlhf.data.batches import key_for
from jrlhf.data.types import Example
from jrlhf.meshes import GENERATE
from jrlhf.models import to_int8
from jrlhf.models.hf import load_hf
from jrlhf.run.metrics import read_metrics
from tests.real.conftest import CHATS, Peer, mesh_of

pytestmark = [
    pytest.mark.proof("real"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
ROOT = Path(__file__).parents[2]
NEW, ITERATIONS = 16, 3


def run(directory: Path, model: Path, *, rows: int, **sections: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A run of GRPO on sums, in a process of its own; returns its directory and its metrics."""
    draw = np.random.default_rng(0)
    sums = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a, b in draw.integers(1, 30, (64, 2)).tolist()
    ]
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    config: dict[str, Any] = {
        "name": "real",
        "run_dir": str(directory),
        "stages": ["grpo"],
        "device": {"platform": "cpu", "simulated": 2},
        "mesh": {"data": 2, "fsdp": 1, "tensor": 1},
        "plan": "disaggregated",
        "model": {"path": str(model)},
        "data": {
            "source": "datasets",
            "prompts": {"path": str(directory / "sums.jsonl")},
            "heldout_rows": 4,
            "chat": True,
            "system": "Answer with the number only.",
            "max_prompt": 40,
            "max_response": NEW,
        },
        "rewards": [{"name": "long", "function": "word_count"}],
        "rollout": {"slots": rows, "chunk": 4, "buckets": 1, "lengths": 1},
        "grpo": {
            "iterations": ITERATIONS,
            "rollout_batch": rows,
            "actor": {"learning_rate": 2e-5, "warmup": 0},
            "algorithm": {"samples": 4, "kl_coef": 0.01, "importance": "token"},
            "asynchronous": {"staleness": 2, "update_steps": 12},
        },
        "evaluation": {"prompts": 4},
    }
    config |= sections
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "jrlhf.train", "--config", str(directory / "run.yaml")]
    variables = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return directory / "real", read_metrics(directory / "real")


def check(metrics: list[dict[str, Any]], *, rounding: float) -> None:
    """Old tokens were learned from, nothing was left unchecked, and log-probabilities differ by rounding only."""
    assert len(metrics) == ITERATIONS
    for row in metrics:
        assert row["actor/grad_norm"] > 0 and row["actor/skipped_updates"] == 0
        assert row["async/recomputed_tokens"] > 0 and row["async/unchecked_versions"] == 0
        assert row["async/logprob_distance"] < rounding
    assert metrics[0]["rollout/logprob_gap_max"] < 20 * rounding
    assert metrics[0]["objective/kl"] == 0 and metrics[0]["actor/initial_ratio_gap"] < rounding
    # The estimate of the KL is negative where older weights drew the tokens.
    assert metrics[-1]["objective/kl"] != 0 and metrics[-1]["training/off_policy/token_staleness/max"] >= 1


def test_a_run_on_devices_that_share_heads(peer, tmp_path):
    """All weights, in float32. The checks compare every version's log-probabilities with a pass of their own.

    transformers draws the same greedy texts from the trained weights.
    """
    devices = {"device": {"platform": "cpu", "simulated": 6}, "mesh": {"data": 1, "fsdp": 2, "tensor": 3}}
    path, metrics = run(tmp_path, peer.directory, rows=24, **devices)
    check(metrics, rounding=1e-5)
    trained = Peer(path / "model")
    assert not np.allclose(peer.chosen(peer.rows()), trained.chosen(peer.rows()), atol=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "select", lambda config: jax.devices()[:3])
        loaded = generate.load(str(path), {"temperature": 0.0, "max_new_tokens": NEW}, batch=6)
    prompts = loaded.encode([Example(prompt=messages) for messages in CHATS[:6]])
    with jax.set_mesh(loaded.mesh):
        answers = [answer.ids for answer in loaded.answer(prompts, key_for(0, "generate"))]
    assert answers == trained.greedy([[*ids] for ids in prompts.ids], NEW)


def test_a_run_of_an_adapter_on_an_int8_base_in_bfloat16(peer, tmp_path):
    """PEFT's sum of the trained adapter and the base is the merged model that the run wrote, in float32 as it was read.

    The run reads its base in bfloat16, and rounds that to int8.
    """
    import peft
    import torch

    adapter = {"compute": {"dtype": "bfloat16"}, "lora": {"rank": 8, "alpha": 16.0, "base": "int8"}}
    path, metrics = run(tmp_path, peer.directory, rows=8, **adapter)
    check(metrics, rounding=0.05)
    read, params = load_hf(peer.directory, mesh_of(), layout=GENERATE, dtype=jnp.bfloat16)
    stored = peer.load(dtype=torch.bfloat16).float()
    base = peer.rounded(to_int8(params), read.model, tmp_path / "rounded", stored)
    before = peer.chosen(peer.rows(), base)
    merged = peft.PeftModel.from_pretrained(base, path / "adapter").merge_and_unload()
    assert np.abs(peer.chosen(peer.rows(), merged) - before).max() > 1e-3
    written = peer.load(path / "model").state_dict()
    for name, weight in merged.state_dict().items():
        error = (written[name] - weight).abs().max()
        assert error <= (1e-6 * weight.abs().max() if "layers" in name and weight.ndim == 2 else 0), name
