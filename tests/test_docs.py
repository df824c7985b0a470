"""README and docs: examples run, commands are understood, paths and links exist, figures are those of the results."""

import ast
import importlib
import inspect
import json
import math
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
import types
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import jrlhf.api
import jrlhf.meshes
import jrlhf.models
import jrlhf.ppo
from examples.grpo import make_iteration
from jrlhf import plan, train
from jrlhf.algorithms import registry as algorithms
from jrlhf.algorithms.grpo import grpo
from jrlhf.config import load_config
from jrlhf.config.check import validate
from jrlhf.config.stages import TITLES
from jrlhf.models.hf.presets import PRESETS
from jrlhf.planning.plans import read_plan
from jrlhf.run.console import SHOWN
from tools.config_reference import reference_table

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {
    path: path.read_text(encoding="utf-8")
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "configs/launch/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
FOLDERS = (
    *(".ci", "benchmarks", "colab", "configs", "docs", "examples"),
    *("jrlhf", "kernels", "meshes", "models", "ppo", "tests"),
)
ROOT_PAGES = ("index.md", "changelog.md", "contributing.md", "security.md")  # of the site, made from files at the root
EXAMPLES = {  # page with Python code -> the tests that run it; tests/jrlhf/test_tutorials.py runs all tutorials
    "README.md": "tests/test_docs.py",
    "docs/algorithms.md": "tests/jrlhf/algorithms/test_optimizers.py",
    "docs/judges.md": "tests/jrlhf/rewards/test_judge.py",
    "docs/layouts.md": "tests/benchmarks/test_figures.py",
    "docs/plans.md": "tests/jrlhf/planning/test_fusion.py",
    "docs/python.md": "tests/jrlhf/test_api.py",
    "docs/staleness.md": "tests/benchmarks/test_staleness.py",
    **{f"docs/reference/{name}.md": "tests/test_docs.py" for name in ("kernels", "meshes", "models", "ppo")},
}
README, METRICS, RESULTS = (DOCUMENTS[ROOT / name] for name in ("README.md", "docs/metrics.md", "docs/results.md"))


def commands_of(text: str) -> set[str]:
    """The commands that a page shows, on lines of their own or within a sentence."""
    lines = re.findall(r"^    (?:.*&& )?(python -m .*?)(?:  +#.*)?$", text, re.M)
    return {*lines, *re.findall(r"`(python -m [^`]+)`", text)}


IN_README = commands_of(README)
# The configs of tutorials are in the pages: tests/jrlhf/test_tutorials.py runs their commands.
IN_PAGES = {
    command for path, text in DOCUMENTS.items() if path.parent.name != "tutorials" for command in commands_of(text)
}
COMMANDS = sorted(IN_README | IN_PAGES)


def test_every_page_is_in_the_navigation():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]
    assert sorted(re.findall(r"([\w/-]+\.md)$", site, re.MULTILINE)) == sorted([*pages, *ROOT_PAGES])


def test_each_page_with_python_is_read_by_the_tests_that_run_it():
    shown = {path.relative_to(ROOT).as_posix(): path.parent.name for path, text in DOCUMENTS.items() if "```py" in text}
    assert {page for page, folder in shown.items() if folder != "tutorials"} == EXAMPLES.keys()
    for page, test in EXAMPLES.items():
        assert f'{Path(page).name}"' in (ROOT / test).read_text(encoding="utf-8"), page


def test_the_lines_of_plans_are_read(tmp_path):
    blocks = re.findall(r"(?:^    [\w.]+: \{.*\}\n)+", DOCUMENTS[ROOT / "docs/plans.md"], re.MULTILINE)
    assert blocks
    for block in blocks:
        (tmp_path / "plan.yaml").write_text(f"calls:\n{block}")
        for placement in read_plan(tmp_path / "plan.yaml").placements.values():
            assert math.prod(placement.sizes) * placement.pipeline == placement.devices.count == 8


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
    assert len(README.encode()) <= 12_000


def distributions(requirements: list[str]) -> set[str]:
    """Names of the distributions that are required, as package indexes compare them."""
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in requirements}


@pytest.mark.parametrize("path", [path for path, text in DOCUMENTS.items() if "```py" in text], ids=lambda p: p.name)
def test_the_code_of_a_page_needs_only_what_readers_have_installed(path: Path):
    """Readers have `.[test]`, by the README's lines, and what the page itself tells to install with pip."""
    text, project = DOCUMENTS[path], tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"pip install (?:'jrlhf\[\w+\]'|([\w-]+))", text)
    installed = distributions([*project["dependencies"], *project["optional-dependencies"]["test"], *named])
    providers, foreign = packages_distributions(), path.stem.removeprefix("from-")  # the library that is compared with
    own = {"jrlhf", *re.findall(r"`(\w+)\.py`", text)}
    for block in re.findall(r"```py(?:thon)?\n(.*?)```", text, re.DOTALL):
        nodes = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {
            name
            for node in nodes
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        modules = {str(name).partition(".")[0] for name in names} - sys.stdlib_module_names - own
        if foreign not in modules:
            for module in modules:
                assert distributions(providers.get(module, [module])) & installed, f"{path.name} imports {module}"


@pytest.mark.parametrize("page", ["kernels.md", "meshes.md", "models.md", "ppo.md"])
def test_the_example_of_a_page_of_reference_computes_what_its_comments_say(page: str):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENTS[ROOT / "docs/reference" / page], re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    if page == "ppo.md":
        np.testing.assert_allclose(names["advantages"], [0.8, 0.6, 0.4], rtol=1e-6)
        np.testing.assert_allclose(names["kl"], math.log(2) - 0.5, rtol=1e-6)
        moved = names["state"].params["logits"]  # from 0
        assert float(moved[2:, 3].sum()) > 0 == float(abs(moved[:2]).max())  # responses have more of what is rewarded
    elif page == "models.md":
        drawn = names["drawn"]
        assert names["logprobs"].shape == (2, 8) and drawn.tokens.shape == drawn.logprobs.shape == (4, 8)
    elif page == "meshes.md":
        np.testing.assert_array_equal(names["array"], np.arange(64.0).reshape(8, 8))
    else:
        logits = names["hidden"] @ names["head"].T
        np.testing.assert_allclose(names["logprobs"], np.diagonal(jax.nn.log_softmax(logits)), rtol=1e-5)


@pytest.fixture
def hooks(monkeypatch) -> dict[str, Any]:
    """The names of docs/hooks.py, with which the site is built."""
    for name in ("griffe", "mkdocs", "mkdocs.structure", "mkdocs.structure.files"):  # of the site's environment
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(Docstring=None, Extension=object, File=None))
    return runpy.run_path(str(ROOT / "docs/hooks.py"))


@pytest.mark.parametrize("package", ["ppo", "models", "meshes", "kernels.logprob"])
def test_the_reference_has_every_public_name_of_a_package(package, hooks):
    lines = "\n".join(hooks["_names"](package, set()))
    shown = re.findall(rf"^::: jrlhf\.{re.escape(package)}\.(\w+)$", lines, re.MULTILINE)
    assert sorted(shown) == importlib.import_module(f"jrlhf.{package}").__all__ and len(shown) > 3


def test_arguments_of_a_docstring_become_a_table_and_no_word_is_lost(hooks):
    with_sections = hooks["with_sections"]
    raised = "Raises ValueError if a: b, TypeError\nif c."
    text = f"Does it.\n\nrows, more: of text. seed:\n    of 1. None: 0.\n\nIt says more.\n\n{raised}"
    arguments = "Args:\n    rows: of text.\n    more: of text.\n    seed: of 1. None: 0."
    errors = "Raises:\n    ValueError: if a: b\n    TypeError: if c."
    assert with_sections(text, ["rows", "more", "seed"]) == f"Does it.\n\nIt says more.\n\n{arguments}\n\n{errors}"
    tables = 0
    for package in (jrlhf.ppo, jrlhf.models, jrlhf.meshes, jrlhf.api):
        for name in getattr(package, "__all__", ("train", "load", "plan")):
            if inspect.isfunction(function := getattr(package, name)):
                written = inspect.getdoc(function) or ""
                shown = with_sections(written, list(inspect.signature(function).parameters))
                lost = set(re.findall(r"\w+", written)) - set(re.findall(r"\w+", shown)) - {"Raises", "and"}
                assert not lost, (name, lost)
                tables += "Args:\n" in shown
    assert tables > 25


@pytest.mark.full
def test_the_example_with_a_foreign_model_trains_it():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENTS[ROOT / "docs/python.md"], re.DOTALL)
    (code,) = [block for block in blocks if "def weights_of" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    before = names["weights_of"](0, 11)
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


def test_the_iteration_shown_is_that_of_the_page():
    _, shown = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown == inspect.getsource(make_iteration)


def test_the_algorithm_of_ones_own_is_a_graph_of_its_calls(tmp_path):
    own, *_ = re.findall(r"```python\n(.*?)```", DOCUMENTS[ROOT / "docs/tutorials/own-algorithm.md"], re.DOTALL)
    (tmp_path / "median.py").write_text(own)
    graph = algorithms.graph_of(load_config("arithmetic-grpo", [f"grpo.dataflow={tmp_path}/median.py:median"]))
    assert "estimator.custom_experience" in [call.name for call in graph]


def test_every_path_and_link_in_the_documents_exists():
    for path, text in DOCUMENTS.items():
        links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (path.parent / link).exists()]
        assert links == [], path
    named = [name for text in DOCUMENTS.values() for name in re.findall(r"`([\w./{},*-]+)`", text)]
    inside = [path for name in named if name.partition("/")[0] in FOLDERS and "/" in name for path in expanded(name)]
    assert len(inside) > 50
    assert [path for path in inside if not list(ROOT.glob(path.rstrip("/")))] == []
    modules = {module for command in COMMANDS for module in re.findall(r"python -m ([a-z_.]+)", command)}
    ours = {name for name in modules if name.startswith(("jrlhf", "benchmarks"))}
    assert {"jrlhf.train", "jrlhf.plan", "benchmarks.memory"} <= ours
    files = {name: ROOT / name.replace(".", "/") for name in ours}
    assert [name for name, path in files.items() if not (path.with_suffix(".py").is_file() or path.is_dir())] == []


def expanded(path: str) -> list[str]:
    """`a{b,c}` as `ab` and `ac`."""
    braces = re.search(r"\{([^}]*)\}", path)
    if braces is None:
        return [path]
    return [name for choice in braces[1].split(",") for name in expanded(path.replace(braces[0], choice, 1))]


def test_settings_are_understood(tmp_path):
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "shown.yaml").write_text(shown)
    config = load_config(str(tmp_path / "shown.yaml"))
    assert config.model.path is not None
    validate(config, 1, dict.fromkeys(("actor", "reference"), PRESETS[config.model.path]))
    commands = [shlex.split(command.partition("#")[0]) for command in COMMANDS if "jrlhf.train --config" in command]
    understood = 0
    for words in commands:
        name, *rest = words[words.index("--config") + 1 :]
        if name not in ("FILE", "FILE-or-NAME", "mine.yaml"):
            load_config(name, [word for word in rest if not word.startswith("--") and "dataflow" not in word])
            understood += 1
    assert understood >= 6


@pytest.mark.parametrize("name", ["asynchronous", "data-and-rewards"])
def test_settings_of_a_part_are_understood(name: str, tmp_path):
    """A block that shows some settings is a config together with those of arithmetic-grpo."""
    text = DOCUMENTS[ROOT / f"docs/{name}.md"]
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) + re.findall(
        r"(?<=\n\n)(?: {4}rewards:\n(?: {6}.*\n)+)", text
    )
    assert blocks
    for block in blocks:
        config = yaml.safe_load((ROOT / "configs/arithmetic-grpo.yaml").read_text())
        for key, value in yaml.safe_load(textwrap.dedent(block)).items():
            adds = isinstance(value, dict) and key in config and "source" not in value  # data of another kind replaces
            config[key] = config[key] | value if adds else value
        (tmp_path / "part.yaml").write_text(yaml.safe_dump(config))
        load_config(str(tmp_path / "part.yaml"))


@pytest.mark.full
@pytest.mark.parametrize("shown", [IN_README, pytest.param(IN_PAGES - IN_README, marks=pytest.mark.proof("inputs"))])
def test_commands_run(shown, capsys, tmp_path, monkeypatch):
    """Trainings of configs that need no download are validated by their own --dry-run, plans are made as shown."""
    monkeypatch.chdir(tmp_path)
    own, *_ = re.findall(r"```python\n(.*?)```", DOCUMENTS[ROOT / "docs/tutorials/own-algorithm.md"], re.DOTALL)
    (tmp_path / "median.py").write_text(own)
    (tmp_path / "mine.yaml").write_text((ROOT / "configs" / "llama3-8b-ppo.yaml").read_text(encoding="utf-8"))
    here = ["--dry-run", "device.simulated=8", "mesh={fsdp: 8}"]  # the devices of this process
    for command in sorted(shown):
        _, _, module, *arguments = shlex.split(command.partition("#")[0])
        if module == "jrlhf.train" and "".join(arguments[1:2]).startswith(("quickstart", "arithmetic")):
            given = [word for word in arguments if not word.startswith(("--resume", "--dry-run", "run_dir=s3:"))]
            code = train.cli(given + here)
        elif module == "jrlhf.plan" and arguments:
            code = plan.cli(arguments)
        else:
            continue
        assert code == 0, (command, capsys.readouterr().err)


def test_the_words_of_the_console_are_explained():
    rows = (ROOT / "docs/metrics.md").read_text().split("## The line of an iteration")[1].split("\n## ")[0]
    table = re.findall(r"^\| ([^|`]+) \| (`.*`) \|$", rows, re.MULTILINE)
    assert [(word, metric) for word, metrics in table for metric in re.findall("`(.+?)`", metrics)] == sorted(
        ((word, metric) for metric, word, _ in SHOWN), key=lambda row: [word for word, _ in table].index(row[0])
    )


def test_every_metric_has_a_meaning():
    """Each metric that the sources name in full is in docs/metrics.md."""
    documented = set(re.findall(r"`([\w@/-]+)`", METRICS))
    first = [line.split("|")[1] for line in METRICS.splitlines() if line.startswith("| `")]
    for cell in first:  # `a/b_mean`, `_std`, `c`: the last words of the name before
        names = re.findall(r"`([^`]+)`", cell)
        for name in names[1:]:
            documented |= {names[0].rpartition(mark)[0] + mark * (mark == "/") + name for mark in ("/", "_")}
    prefixes = (
        "actor|critic|cost|cost_critic|objective|rollout|rollout_corr|training|perf|group|dapo|safe|sft|dpo|"
        "reward_model|logps"
    )
    sources = [path for folder in ("jrlhf", "ppo") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    named = set(re.findall(rf'"((?:{prefixes})/[a-z_0-9/]+[a-z0-9])"', text))
    assert len(named) > 25
    spread = {name for name in named if {f"{name}/mean", f"{name}_mean"} & documented}
    as_critic = {name for name in named if name.replace("cost_critic/", "critic/") in documented}
    assert sorted(named - documented - spread - as_critic) == []


def test_the_page_of_settings_is_made_from_the_classes():
    assert reference_table() + "\n" == DOCUMENTS[ROOT / "docs/configuration.md"]


def test_figures_are_those_of_the_results():
    for run in result("algorithms-cpu")["runs"]:
        title, seconds = TITLES[run["algorithm"]], run["seconds_per_iteration"]
        right = f"{run['before']:.1%} → {run['after']:.1%}"
        assert re.search(rf"^\| {re.escape(title)} \|.*\| {right} \| {seconds:.2f} \|$", RESULTS, re.MULTILINE), title
    judged = result("judge")["runs"][0]
    times = f"take {judged['seconds']:.1f} s with one worker, where the endpoint allows {judged['ideal']:g} s"
    assert times in DOCUMENTS[ROOT / "docs" / "judges.md"]
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
        assert f"| {' | '.join(cells)} |" in RESULTS
    measured = {
        tuple(f"{ratio[name]:.2f}" for name in ("least", "median", "most"))
        for peer in ("tunix", "trl", "trl-grpo", "hf")
        for comparison in result(f"compare-{peer}")["results"]
        for ratio in comparison["ratios"].values()
    }
    stated = set(re.findall(r"\| ([\d.]+) – ([\d.]+) – ([\d.]+) \|$", RESULTS, re.MULTILINE))
    assert len(stated) >= 9 and stated <= measured


def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
