"""The order of the folders: a module imports only from folders below its own. And how much a module loads.

Read from the sources, so that it holds for code that no test runs, and for imports inside functions.
"""

import ast
import collections
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the top down. Folders of one line do not know each other.
ORDER = (
    ("__main__", "api"),
    ("train", "generate", "export", "plan", "doctor", "new_config"),
    ("training",),
    ("planning", "report"),  # clients: called by commands only
    ("stages",),
    ("tasks",),
    ("algorithms",),
    ("rollouts",),
    ("rewards",),
    ("roles",),
    ("data",),
    ("storage",),
    ("run",),
    ("config",),
    ("ppo", "models"),
    ("kernels", "meshes"),
    ("errors", "lazy", "configs", "__init__"),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
AT_THE_TOP = ("kernels", "meshes", "models", "ppo", "configs")
MOST_LINES = 800  # of a file
MOST_OF_A_FUNCTION = 60  # lines of a function without its docstring
# Maximum number of lines of our modules that importing a module loads, imports inside functions included.
MOST_LOADED = {
    "jrlhf.algorithms.grpo": 2_500,
    "jrlhf.config.schema": 3_150,
    "jrlhf.roles.actor": 12_650,
    "jrlhf.generate": 14_150,
    "jrlhf.stages.rl": 21_950,
}
MOST_IN_A_RUN = 34_750  # lines of our modules that a run of `arithmetic-grpo` loads


@cache
def nodes(source: str) -> list[ast.AST]:
    """All statements, also those inside of others; expressions hold no imports."""
    statements: list[ast.AST] = [ast.parse(source)]
    for node in statements:
        statements += [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]
    return statements


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, folder or module below jrlhf) for every import in `source`, a module of the package `package`."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            # `from jrlhf import models` names the folder on the right.
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == "jrlhf":
                yield node.lineno, rest[0] if rest and rest[0] in LEVEL else "__init__"
            elif top in AT_THE_TOP:
                yield node.lineno, f"bare {top}"


def modules() -> list[Path]:
    files = (ROOT / "jrlhf").rglob("*.py")  # does not follow links
    inside = [path for path in files if not any(parent.is_symlink() for parent in path.parents)]
    return sorted([*inside, *(path for folder in AT_THE_TOP for path in (ROOT / folder).rglob("*.py"))])


def package_of(file: Path) -> str:
    parts = file.parent.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "jrlhf" else ("jrlhf", *parts))


def home_of(file: Path) -> str:
    """The folder, or the command, that a file belongs to."""
    return [*package_of(file).split("."), file.stem][1]


def test_the_reader_sees_every_form_of_import():
    for statement, folders in (
        ("import jrlhf.models.config", ["models"]),
        ("from jrlhf.ppo import gae", ["ppo"]),
        ("from jrlhf import meshes, models", ["meshes", "models"]),
        ("def f():\n    from jrlhf.train import cli", ["train"]),
        ("import jrlhf", ["__init__"]),
        ("from . import xla", ["kernels"]),
        ("from .. import logprob", ["kernels"]),
        ("from ...ppo import steps", ["ppo"]),
        ("import models", ["bare models"]),
        ("import jax, numpy.linalg as la\nfrom jax.experimental import pallas", []),
    ):
        assert [folder for _, folder in imported(statement, "jrlhf.kernels.logprob")] == folders


def test_modules_import_only_folders_below_their_own():
    files = modules()
    assert {home_of(file) for file in files} == LEVEL.keys()
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imported(file.read_text(), package_of(file))
        if name != home_of(file) and (name not in LEVEL or LEVEL[name] <= LEVEL[home_of(file)])
    ]
    assert wrong == []


def test_files_of_a_folder_form_no_cycle():
    """Imports between the modules of one folder have an order, too."""
    names = {file: f"{package_of(file)}.{file.stem}".removesuffix(".__init__") for file in modules()}
    graph: dict[str, set[str]] = {name: set() for name in names.values()}
    for file, name in names.items():
        for node in nodes(file.read_text()):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                targets = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= {target if target in graph else node.module for target in targets} - {name}
        graph[name] &= graph.keys()
    while removable := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in removable:
            del graph[name]
    assert graph == {}


@cache
def imports_of_modules() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, wherever in its file; packages count, too."""
    names = {f"{package_of(file)}.{file.stem}".removesuffix(".__init__"): file for file in modules()}
    graph: dict[str, set[str]] = {}
    for name, file in names.items():
        targets = {name.rpartition(".")[0]}
        for node in nodes(file.read_text()):
            if isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, f"{file} has a relative import"
                targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        graph[name] = targets & names.keys()
    return graph


def lines_of(names: Iterable[str]) -> int:
    files = {f"{package_of(file)}.{file.stem}".removesuffix(".__init__"): file for file in modules()}
    return sum(len(files[name].read_text().splitlines()) for name in names)


@pytest.mark.parametrize("module", MOST_LOADED)
def test_a_module_loads_only_what_it_needs(module):
    graph, loaded, waiting = imports_of_modules(), set[str](), [module]
    while waiting:
        if (name := waiting.pop()) not in loaded:
            loaded.add(name)
            waiting += graph[name]
    assert lines_of(loaded) <= MOST_LOADED[module]


@cache
def stubs() -> dict[str, tuple[Path, dict[str, str]]]:
    """Package that loads its names when they are used -> its folder, and name -> module that defines it."""
    packages = {}
    for file in (file.with_suffix(".pyi") for file in modules() if file.stem == "__init__"):
        if file.is_file():
            statements = [node for node in nodes(file.read_text()) if isinstance(node, ast.ImportFrom)]
            homes = {alias.name: str(node.module) for node in statements for alias in node.names}
            packages[package_of(file)] = file.parent, homes
    return packages


def test_names_of_packages_are_no_modules_and_can_be_loaded():
    """A module of the same name would replace the name once it is imported."""
    assert {"jrlhf.ppo", "jrlhf.models", "jrlhf.meshes", "jrlhf.kernels.logprob"} <= stubs().keys()
    for package, (folder, homes) in stubs().items():
        inside = {path.stem for path in folder.iterdir()}
        assert not inside & homes.keys()
        module = importlib.import_module(package)
        assert module.__all__ == sorted(homes) == dir(module)
        for name, home in homes.items():
            assert getattr(module, name) is getattr(importlib.import_module(home), name)
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'unknown'"):
            _ = module.unknown


def hidden(source: str) -> list[str]:
    """The imports of a lazy package's name, or of the package itself, which do not say what they load."""
    homes, imports = {package: names for package, (_, names) in stubs().items()}, []
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom):
            inside = homes.get(str(node.module), ())
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imports += [name for name in names if name in homes or name.endswith(".*")]
            imports += [f"{node.module}.{alias.name}" for alias in node.names if alias.name in inside]
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names if alias.name in homes]
    return imports


def test_modules_import_names_from_where_they_are_defined():
    for statement in ("from jrlhf.ppo import gae", "from jrlhf import models", "import jrlhf.models as m"):
        assert hidden(statement)
    assert hidden("from jrlhf.models import *") and not hidden("from jrlhf.ppo.token_advantages import gae")
    wrong = {str(file.relative_to(ROOT)): names for file in modules() if (names := hidden(file.read_text()))}
    assert wrong == {}


def test_a_public_class_has_a_name_of_its_own():
    names = collections.defaultdict[str, list[str]](list)
    for file in modules():
        for node in nodes(file.read_text()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in names.items() if len(files) > 1} == {}


def raising(source: str, names: Iterable[str]) -> list[str]:
    """The functions and classes among these names that raise an error of which their docstrings do not tell."""
    silent = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            inside = [node] if isinstance(node, ast.FunctionDef) else node.body
            for part in (part for part in inside if isinstance(part, ast.FunctionDef)):
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(part))
                text = f"{ast.get_docstring(node)} {ast.get_docstring(part)}"
                if raises and not re.search("[Rr]aises|efuse", text):
                    silent.append(node.name)
    return silent


def test_public_functions_tell_of_the_errors_that_they_raise():
    assert raising('def f(x):\n    """Returns x."""\n    raise ValueError(x)', ["f"]) == ["f"]
    silent = {}
    for _, homes in stubs().values():
        for module in set(homes.values()):
            source = Path(str(importlib.import_module(module).__file__)).read_text()
            if names := raising(source, [name for name, home in homes.items() if home == module]):
                silent[module] = names
    assert silent == {}


PLAIN = """
import sys
from jrlhf.train import cli
code = cli(["--config", "arithmetic-grpo", "sft.steps=1", "grpo.iterations=1", f"run_dir={sys.argv[1]}"])
print("MODULES", code, *(name for name in sys.modules if name.split(".")[0] == "jrlhf"))
"""


@pytest.mark.full
def test_a_run_loads_only_what_its_config_asks_for(tmp_path):
    command = [sys.executable, "-c", PLAIN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "MODULES 0 " in done.stdout, done.stderr
    _, _, *names = next(line for line in done.stdout.splitlines() if line.startswith("MODULES")).split()
    assert lines_of(names) <= MOST_IN_A_RUN
    absent = "rollouts.fleet", "planning.search", "planning.time", "models.pipeline", "storage.mirror"
    assert not {f"jrlhf.{name}" for name in absent} & {*names}


LIGHT = """
import sys
import jrlhf.config, jrlhf.models, jrlhf.ppo
from jrlhf.train import cli
for options in (["quickstart", "ppo.iterationz=3"], ["quickstrt"], ["pod", "--all"]):
    assert cli(["--config", *options]) == 2
assert "jax" not in sys.modules
import jrlhf.training
assert "matplotlib" not in sys.modules
"""


def test_settings_are_refused_without_jax_and_a_run_draws_only_at_its_end():
    subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, check=True, timeout=60)


def test_functions_stay_small():
    def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        first = function.body[bool(ast.get_docstring(function)) and len(function.body) > 1]
        return (function.body[-1].end_lineno or 0) - first.lineno + 1

    longer = {
        f"{file.relative_to(ROOT)}: {node.name}": length(node)
        for file in modules()
        for node in nodes(file.read_text())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > MOST_OF_A_FUNCTION
    }
    assert longer == {}


def test_files_stay_small():
    files = modules()
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {file: length for file, length in lengths.items() if length > MOST_LINES} == {}


IMPORT_ALL = """
import sys
for name in sys.argv[1:]:
    __import__(name)
from jrlhf.config import Config, validate
from jrlhf.roles.pretrained import fresh_model
validate(Config(), 4, {"actor": fresh_model(Config().model)})
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # raises where a backend has been initialised
assert jax.device_count() == 3
"""


def test_imports_do_nothing():
    """Imports and checks of configs neither print, warn nor start a backend: the devices can still be chosen."""
    names = []
    for file in modules():
        package = package_of(file)
        if file.stem != "__main__":
            names.append(package if file.stem == "__init__" else f"{package}.{file.stem}")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
