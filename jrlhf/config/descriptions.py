"""What settings mean, read from the sources of their classes, where their comments are the only documentation."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any


def summary(cls: Any) -> str:
    """Returns the first paragraph of what a section's class says of itself, in one line; "" if it says nothing."""
    about = (cls.__doc__ or "").split("\n\n")[0]
    return "" if about.startswith(f"{cls.__name__}(") else " ".join(about.split())


@cache
def descriptions(cls: Any) -> dict[str, str]:
    """Returns field -> description of a section's class.

    It is the comment at the field's end, the comment above it, the string below it, or a line of the class's docstring.
    A class that only changes a default keeps the description of the class above.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        written = getattr(sys.modules[base.__module__], base.__name__, None) is base  # others are made by a function
        if written and base.__dict__.get("__dataclass_fields__") and base.__module__.startswith("jrlhf"):
            texts |= {name: text for name, text in _described(base) if text}
    return texts


def _described(cls: type) -> Iterator[tuple[str, str]]:
    for name, text in re.findall(r"^(\w+): (.+?)(?=^\w+: |\n\n|\Z)", inspect.getdoc(cls) or "", re.M | re.S):
        yield name, " ".join(text.split())
    source = textwrap.dedent(inspect.getsource(cls))
    lines, (tree,) = source.splitlines(), ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        comments = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno] if "  # " in line]
        row = node.lineno - 2
        while lines[row].strip().startswith("# ") and "---" not in lines[row]:
            row -= 1
        above = [line.strip().removeprefix("# ") for line in lines[row + 1 : node.lineno - 1]]
        below = following.value if isinstance(following, ast.Expr) else None
        text = below.value if isinstance(below, ast.Constant) else " ".join(comments or above)
        yield node.target.id, " ".join(str(text).split())
