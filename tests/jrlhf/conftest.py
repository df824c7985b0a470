"""What a user of real data has: model directories with tokenizers, datasets, reward functions; all of them tiny."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jrlhf.config.places import PACKAGES
from jrlhf.data.datasets import KINDS, data_of
from jrlhf.data.tokenizer_files import load_tokenizer
from jrlhf.models import ModelConfig, init_lm, init_scalar
from jrlhf.models.hf import export_hf

TOKENIZERS = Path(__file__).with_name("tokenizers")

REWARDS = '''"""Reward functions as users have them."""


def short(completions, **columns):
    """TRL's call, of conversations."""
    return [-len(completion[0]["content"]) / 100 for completion in completions]


def short_text(completions):
    return [-len(completion) / 100 for completion in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's call."""
    return {"score": float(ground_truth.split()[0] in solution_str), "of_a": float(data_source == "a")}


def tokens(completions, completion_ids):
    """A score for each token: 1 for the even ones."""
    return [[float(token % 2 == 0) for token in ids] for ids in completion_ids]
'''


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    return write_model


def write_model(
    directory: Path, tokenizer: str = "qwen", *, scalar: bool = False, seed: int = 0, spare: int = 3, **sizes
) -> Path:
    """A model directory with random weights and the files of one of the tokenizers beside this file.

    spare: rows of the vocabulary that the tokenizer has no token for.
    """
    files = TOKENIZERS / tokenizer
    loaded = load_tokenizer(files)
    small = ModelConfig(
        vocab_size=loaded.vocab_size + spare,
        embed=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp=32,
        max_positions=128,
        initializer_range=0.2,
    )
    config = replace(small, **sizes)
    shapes = jax.eval_shape(partial(init_scalar if scalar else init_lm, config), jax.random.key(0))
    draw = np.random.default_rng(seed)

    def fill(path, leaf) -> np.ndarray:  # on the host: nothing is compiled
        scale = path[-1].key == "scale"
        spread = 0.05 if scale else config.initializer_range
        return (draw.normal(0, spread, leaf.shape) + (scale and not config.norm_offset)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(fill, shapes)
    ends = {"eos_ids": loaded.eos_ids, "pad_id": loaded.pad_id, "bos_id": loaded.bos_id}
    return export_hf(params, config, directory, tokenizer_dir=files, **ends)


@pytest.fixture(scope="session")
def user(tmp_path_factory) -> Path:
    """A directory with all that a run may want. Nothing in it is ever changed.

    actor: Qwen-like. critic: Llama-like of another size, with the actor's tokenizer. reward: Gemma-2-like, with a
    tokenizer and a template of its own. qa.jsonl, preferences.jsonl, rewards.py.
    """
    root = tmp_path_factory.mktemp("user")
    write_model(root / "actor", qkv_bias=True)
    write_model(root / "critic", seed=1, embed=24, heads=4, kv_heads=2, layers=1, tie_embeddings=False)
    gemma = {"activation": "gelu_tanh", "norm_offset": True, "post_norms": True, "attention_softcap": 50.0}
    gemma |= {"softcap": 30.0, "embed_scale": 24**0.5, "window": 16, "local_layers": (True, False)}
    gemma |= {"embed": 24, "heads": 4, "kv_heads": 2, "max_positions": 512}
    write_model(root / "reward", "gemma", scalar=True, seed=2, **gemma)
    rows = questions(48)
    write_jsonl(root / "qa.jsonl", rows)
    write_jsonl(
        root / "preferences.jsonl",
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "chosen": [{"role": "assistant", "content": row["answer"]}],
                "rejected": [{"role": "assistant", "content": "I do not know"}],
            }
            for row in rows
        ],
    )
    (root / "rewards.py").write_text(REWARDS)
    return root


def questions(count: int) -> list[dict[str, str]]:
    """Rows in GSM8K's shape, of two sources."""
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]
    return [
        {"question": f"What is {a} plus {b}?", "answer": f"{a + b} #### {a + b}", "data_source": "ab"[row % 2]}
        for row, (a, b) in enumerate(pairs)
    ]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def settings(user: Path) -> Callable[..., dict]:
    """A config as a mapping: PPO of the actor against a function; sections given by name replace or add keys, and
    those of stages that it lacks are left out."""

    def make(**sections) -> dict:
        qa = str(user / "qa.jsonl")
        config = {
            "stages": ["ppo"],
            "device": {"platform": "cpu", "simulated": 8},
            "mesh": {"data": 1, "fsdp": 4, "tensor": 2},
            "model": {"path": str(user / "actor")},
            "data": {
                "source": "datasets",
                "sft": {"path": qa, "columns": {"prompt": "question", "completion": "answer"}},
                "preferences": {"path": str(user / "preferences.jsonl")},
                "prompts": {"path": qa, "columns": {"prompt": "question"}},
                "heldout_rows": 8,
                "chat": True,
                "max_prompt": 64,
                "max_response": 12,
            },
            "sft": {"steps": 3, "batch": 8, "eval_every": 2, "save_every": 2, "warmup": 0},
            "reward_model": {"steps": 3, "batch": 8, "eval_every": 2, "save_every": 2, "warmup": 0},
            "rewards": [{"name": "short", "function": f"{user / 'rewards.py'}:short"}],
            "ppo": {
                "iterations": 4,
                "rollout_batch": 8,
                "save_every": 1,
                "actor": {"learning_rate": 0.01, "warmup": 0},
                "critic": {"learning_rate": 0.01, "warmup": 0},
                "algorithm": {"epochs": 1, "minibatches": 1},
            },
            "evaluation": {"prompts": 8, "samples": 2},
        }
        for name, value in sections.items():
            config[name] = config[name] | value if isinstance(value, dict) and name in config else value
        if config["stages"][-1] in ("sft", "reward_model", "dpo") and "ppo" not in sections:
            config["sampling"] = {"batch": 8} | config.get("sampling", {})  # which is how texts are sampled then
        learnt = set(map(data_of, config["stages"]))
        config["data"] = {key: value for key, value in config["data"].items() if key not in KINDS or key in learnt}
        unread = {"sft", "reward_model", "ppo"} - {*config["stages"], *sections}
        return {name: value for name, value in config.items() if name not in unread}

    return make


@pytest.fixture
def memory() -> Iterator[Any]:
    """Returns fsspec's store in memory, empty, to which addresses with memory:// lead in this test alone."""
    files = pytest.importorskip("fsspec").filesystem("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PACKAGES, "memory", "fsspec")
        files.store.clear()
        yield files
    files.store.clear()
