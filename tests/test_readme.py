"""The README's example, run as it stands."""

import ast
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf import algorithms
from jrlhf.ppo import Rollout

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_with_a_foreign_model_trains_it():
    _, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    vocabulary, rows, time = 11, 8, 6
    keys = jax.random.split(jax.random.key(0), 5)

    def weights(key, outputs):
        embed, head = jax.random.split(key)
        return {"embed": jax.random.normal(embed, (vocabulary, 4)), "head": jax.random.normal(head, (4, outputs))}

    tokens = jax.random.randint(keys[0], (rows, time), 0, vocabulary)
    logprobs = -jnp.ones((rows, time))
    names = {
        "VOCAB": vocabulary,
        "actor": weights(keys[1], vocabulary),
        "critic": weights(keys[2], 1),
        "scores": jax.random.normal(keys[3], (rows,)),
        "old": logprobs,
        "ref": logprobs,
        "values": jax.random.normal(keys[4], (rows, time)),
        "rollout": Rollout(
            tokens=tokens,
            prompt_lengths=jnp.full(rows, 2),
            response_lengths=jnp.full(rows, 4),
            logprobs=logprobs,
            finished=jnp.ones(rows, bool),
            version=jnp.array(0),
        ),
    }
    before = jax.tree.map(np.asarray, names["actor"])
    exec(code, names)
    state, metrics = names["state"], jax.device_get(names["metrics"])
    assert state.actor.step == state.critic.step == 1
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 0
    moved = jax.tree.map(lambda old, new: float(abs(old - new).max()), before, state.actor.params)
    assert all(0 < change < 0.1 for change in jax.tree.leaves(moved))


def test_the_algorithm_shown_is_the_one_that_runs():
    shown, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    documented = ast.parse(inspect.getsource(algorithms.grpo)).body[0]
    assert isinstance(documented, ast.FunctionDef) and ast.get_docstring(documented)
    documented.body = documented.body[1:]
    assert ast.unparse(ast.parse(shown)) == ast.unparse(documented)


def test_every_path_that_the_readme_names_exists():
    root = Path(__file__).resolve().parents[1]
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and all((root / link).exists() for link in links)
