"""Each sentence of docs/troubleshooting.md stands in the sources, word by word."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FOLDERS = ("jrlhf", "meshes", "models", "ppo", "kernels")


def sentences(source: str) -> Iterator[str]:
    """Yields the texts in a source, with … for what is put into them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_sentence_is_one_of_ours():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    written = "\n".join(sentence for path in paths for sentence in sentences(path.read_text(encoding="utf-8")))
    quoted = re.findall(r"^\*\*`(.*)`\*\*$", PAGE, re.MULTILINE)
    assert len(quoted) >= 25
    assert [sentence for sentence in quoted if sentence not in written] == []
