"""The floors: which folder may import which. Read from the sources, so that it holds for code no test runs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "meshes": {"meshes"},
    "models": {"models", "kernels", "meshes"},
    "ppo": {"ppo", "kernels", "meshes"},
    "configs": {"configs"},
    "jrlhf": {"jrlhf", "kernels", "meshes", "models", "ppo", "configs"},
}


def imported_folders(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, folder of ours) for every import in `source`, a module of the package `package`, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
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
                yield node.lineno, rest[0] if rest and rest[0] in MAY_IMPORT else "jrlhf"
            elif top in MAY_IMPORT:
                yield node.lineno, f"bare {top}"


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def package_of(file: Path) -> str:
    parts = file.parent.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "jrlhf" else ("jrlhf", *parts))


@pytest.mark.parametrize(
    ("statement", "folders"),
    [
        ("import jrlhf.models.config", ["models"]),
        ("from jrlhf.ppo import gae", ["ppo"]),
        ("from jrlhf import meshes, models", ["meshes", "models"]),
        ("def f():\n    from jrlhf.train import cli", ["jrlhf"]),
        ("import jrlhf", ["jrlhf"]),
        ("from . import xla", ["kernels"]),
        ("from .. import logprob", ["kernels"]),
        ("from ...ppo import steps", ["ppo"]),
        ("import models", ["bare models"]),
        ("import jax, numpy.linalg as la\nfrom jax.experimental import pallas", []),
    ],
)
def test_the_reader_sees_every_form_of_import(statement: str, folders: list[str]):
    assert [folder for _, folder in imported_folders(statement, "jrlhf.kernels.logprob")] == folders


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_floor_imports_only_floors_below(folder: str):
    assert modules(folder)
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {imported}"
        for file in modules(folder)
        for line, imported in imported_folders(file.read_text(), package_of(file))
        if imported not in MAY_IMPORT[folder]
    ]
    assert wrong == []


IMPORT_ALL = """
import sys
for name in sys.argv[1:]:
    __import__(name)
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # raises where a backend has been initialised
assert jax.device_count() == 3
"""


def test_imports_do_nothing():
    """No import prints, warns, or starts a JAX backend: after all of them the devices can still be chosen."""
    names = []
    for file in (file for folder in MAY_IMPORT for file in modules(folder)):
        package = package_of(file)
        if file.stem != "__main__":
            names.append(package if file.stem == "__init__" else f"{package}.{file.stem}")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
