"""What docs/tutorials say: the files and commands of a page, and the settings of a peer beside ours."""

import ast
import re
import shlex
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
PEERS = ("trl", "verl", "tunix")


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def files(text: str) -> dict[str, str]:
    """File name -> content, of the blocks before which a paragraph names the file: `name.py`."""
    pairs = re.findall(r"`([\w-]+\.(?:py|yaml))`[^`\n]*\n\n```\w+\n(.*?)```", text, re.DOTALL)
    return dict(pairs)


def commands(text: str) -> list[list[str]]:
    """The words of each command, in an indented block."""
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (python .*)$", text, re.MULTILINE)]


def rows(text: str) -> list[tuple[list[str], list[str]]]:
    """(settings of the peer, ours), as written between backticks, of each row of the table that compares them."""
    table = re.search(r"^\| \w+ \| here \| note \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    cells = [line.split("|") for line in table[1].splitlines()]
    return [(re.findall("`([^`]+)`", theirs), re.findall("`([^`]+)`", ours)) for _, theirs, ours, *_ in cells]


def settings(text: str) -> dict[str, dict[str, str]]:
    """The peer's settings in a page: class named ...Config, or "" for a command line -> {key: value as written}."""
    shell = re.search(r"```shell\n(.*?)```", text, re.DOTALL)
    if shell is not None:
        words = shlex.split(shell[1].replace("\\\n", " "))
        return {"": dict(word.split("=", 1) for word in words if "=" in word)}
    calls = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Config"):
                calls[node.func.id] = {str(word.arg): ast.unparse(word.value) for word in node.keywords}
    return calls
