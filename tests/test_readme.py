"""The README and its sisters: examples run, commands are understood, paths exist, figures are those of the results."""

import ast
import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.algorithms import registry as algorithms
from jrlhf.algorithms.grpo import grpo
from jrlhf.algorithms.registry import TITLES
from jrlhf.config import load_config
from jrlhf.config.check import validate
from jrlhf.models.presets import PRESETS
from jrlhf.ppo import Rollout

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "configs/launch/README.md")
FOLDERS = (".ci", "benchmarks", "colab", "configs", "jrlhf", "kernels", "meshes", "models", "ppo", "tests")
README = (ROOT / DOCUMENTS[0]).read_text(encoding="utf-8")


def test_the_example_with_a_foreign_model_trains_it():
    *_, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
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
    shown, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    documented = ast.parse(inspect.getsource(grpo)).body[0]
    assert isinstance(documented, ast.FunctionDef) and ast.get_docstring(documented)
    documented.body, documented.returns = documented.body[1:], None  # README leaves the types out
    for parameter in documented.args.args:
        parameter.annotation = None
    assert ast.unparse(ast.parse(shown)) == ast.unparse(documented)


def test_the_algorithm_of_ones_own_is_a_graph_of_its_calls(tmp_path):
    _, own, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "median.py").write_text(own)
    graph = algorithms.graph_of(load_config("arithmetic-grpo", [f"grpo.dataflow={tmp_path}/median.py:median"]))
    assert "estimator.custom_experience" in [call.name for call in graph]


def test_every_path_that_the_documents_name_exists():
    documents = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    links = re.findall(r"\]\(([^)#:]+)\)", documents["README.md"])
    assert links and all((ROOT / link).exists() for link in links)
    named = [path for text in documents.values() for path in re.findall(r"`([\w./{},*-]+)`", text)]
    inside = [each for path in named if path.partition("/")[0] in FOLDERS for each in expanded(path)]
    assert len(inside) > 60
    assert [path for path in inside if not list(ROOT.glob(path.rstrip("/")))] == []
    modules = {module for text in documents.values() for module in re.findall(r"python -m ([a-z_.]+)", text)}
    ours = {name for name in modules if name.startswith(("jrlhf", "benchmarks"))}
    assert {"jrlhf.train", "jrlhf.plan", "benchmarks.memory"} <= ours
    assert [name for name in ours if not (ROOT / f"{name.replace('.', '/')}.py").is_file()] == []


def expanded(path: str) -> list[str]:
    """`a{b,c}` as `ab` and `ac`."""
    found = re.search(r"\{([^}]*)\}", path)
    if found is None:
        return [path]
    return [each for choice in found[1].split(",") for each in expanded(path.replace(found[0], choice, 1))]


def test_settings_are_understood(tmp_path):
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "shown.yaml").write_text(shown)
    config = load_config(str(tmp_path / "shown.yaml"))
    assert config.model.path is not None
    validate(config, 1, dict.fromkeys(("actor", "reference"), PRESETS[config.model.path]))
    spans = re.findall(r"`([^`\n]+)`|^    (python .*)$", README, re.MULTILINE)
    given = [re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+=[^\s,]+", span or line) for span, line in spans]
    assert sum(map(len, given)) > 10
    for overrides in filter(None, given):
        load_config("quickstart", overrides)
    for name in re.findall(r"--config ([a-z][\w-]*)(?![\w./-])", README):
        load_config(name)


def test_figures_are_those_of_the_results():
    for run in result("algorithms-cpu")["runs"]:
        title, seconds = TITLES[run["algorithm"]], run["seconds_per_iteration"]
        right = f"{run['before']:.1%} → {run['after']:.1%}"
        assert re.search(rf"^\| {re.escape(title)} \|.*\| {right} \| {seconds:.2f} \|$", README, re.MULTILINE), title
    for run in result("quickstart")["runs"]:
        phases, heldout = run["phases"], run["held_out"]
        before, after = heldout["before"], heldout["after"]
        cells = (
            f"{run['seed']}",
            f"{run['seconds']:.0f} s",
            f"{phases['sft']:.0f} / {phases['reward_model']:.0f} / {phases['ppo']:.0f} s",
            f"{100 * run['reward_model_accuracy']:.1f} %",
            f"{before['gold']:.3f} → {after['gold']:.3f}",
            f"{heldout['difference']:+.3f} ± {heldout['standard_error']:.3f} ({heldout['standard_errors']:.1f})",
            f"{before['items']['specific']:.3f} → {after['items']['specific']:.3f}",
            f"{before['distinct']} → {after['distinct']}",
            f"{run['kl_last_quarter']:.2f}",
        )
        assert f"| {' | '.join(cells)} |" in README
    measured = {
        tuple(f"{ratio[name]:.2f}" for name in ("least", "median", "most"))
        for peer in ("tunix", "trl", "trl-grpo", "hf")
        for each in result(f"compare-{peer}")["results"]
        for ratio in each["ratios"].values()
    }
    stated = set(re.findall(r"\| ([\d.]+) – ([\d.]+) – ([\d.]+) \|$", README, re.MULTILINE))
    assert len(stated) >= 9 and stated <= measured


def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
