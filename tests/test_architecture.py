"""The order of the folders: a module imports only from folders below its own.

Read from the sources, so that it holds for code that no test runs, and for imports inside functions.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
    ("fleet",),
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
