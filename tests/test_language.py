"""Names and docstrings that a reader understands: variables are nouns, docstrings begin with a subject or a verb."""

import ast
import re
import symtable
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jrlhf", "meshes", "models", "ppo", "kernels", "tests", "benchmarks", "examples")
NO_NOUNS = {"each", "said", "told", "found", "kept", "made", "held", "beside", "known", "how", "where"}
NO_BEGINNINGS = ("Of ", "As ", "That ", "Whose ", "By which ")
SUSPECT = re.compile(rf"""["'\\]\s*(?:{"|".join(NO_BEGINNINGS)})""")  # parsing every file takes seconds


def violations(source: str) -> Iterator[str]:
    """Yields the faults: scope and name of a variable or parameter, or line and text of a docstring."""
    tables = [symtable.symtable(source, "source", "exec")]
    for table in tables:
        tables += table.get_children()
        for name in NO_NOUNS.intersection(table.get_identifiers()):
            symbol = table.lookup(name)
            if symbol.is_parameter() or (symbol.is_assigned() and not symbol.is_namespace()):
                yield f"{table.get_name()}:{table.get_lineno()} {name}"
    nodes: list[ast.AST] = [ast.parse(source)] if SUSPECT.search(source) else []
    for node in nodes:
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if text.startswith(NO_BEGINNINGS):
                yield f"{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"


def test_the_reader_sees_every_variable():
    at_fault = (
        "def f(told):\n    'As x.'\n    for made in told: [kept for kept in made]\n    (lambda each: (held := each))(1)"
    )
    names = sorted(violation.rpartition(" ")[2] for violation in violations(at_fault))
    assert names == ["each", "held", "kept", "made", "told", "x."]
    assert [*violations("def found(): 'Returns x.'; y.known = found.made")] == []


def test_variables_are_nouns_and_docstrings_begin_with_a_subject_or_a_verb():
    wrong = [
        f"{path.relative_to(ROOT)}:{violation}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
        for violation in violations(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []
