"""Names and docstrings that a reader understands: variables are nouns, docstrings begin with a subject or a verb."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jrlhf", "meshes", "models", "ppo", "kernels", "tests", "benchmarks")
NO_NOUNS = {"each", "said", "told", "found", "kept", "made", "held", "beside", "known", "how", "where"}
NO_BEGINNINGS = ("Of ", "As ", "That ", "Whose ", "By which ")


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def variables(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every variable and parameter that the module binds."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def test_variables_are_nouns():
    wrong = [
        f"{path}:{line} {name}" for path, module in sources() for line, name in variables(module) if name in NO_NOUNS
    ]
    assert wrong == []


def test_docstrings_begin_with_a_subject_or_a_verb():
    wrong = [
        f"{path}:{line} {text.splitlines()[0]}"
        for path, module in sources()
        for line, text in docstrings(module)
        if text.startswith(NO_BEGINNINGS)
    ]
    assert wrong == []
