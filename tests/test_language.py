"""Names and docstrings that a reader understands: variables are nouns, docstrings begin with a subject or a verb."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jrlhf", "meshes", "models", "ppo", "kernels", "tests", "benchmarks")
NO_NOUNS = {"each", "said", "told", "found", "kept", "made", "held", "beside", "known", "how", "where"}
NO_BEGINNINGS = ("Of ", "As ", "That ", "Whose ", "By which ")


def violations(module: ast.Module) -> Iterator[str]:
    """Yields the line and the name of each variable and parameter, and the first line of each docstring, at fault."""
    for node in ast.walk(module):
        name, text = "", None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
        if name in NO_NOUNS or (text and text.startswith(NO_BEGINNINGS)):
            yield f"{getattr(node, 'lineno', 1)} {name or str(text).splitlines()[0]}"


def test_variables_are_nouns_and_docstrings_begin_with_a_subject_or_a_verb():
    wrong = [
        f"{path.relative_to(ROOT)}:{violation}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
        for violation in violations(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert wrong == []
