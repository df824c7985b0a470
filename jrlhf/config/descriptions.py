"""Reads the descriptions of settings from the comments in the sources of their classes."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import yaml

from jrlhf.config.keys import classes_of, kinds_of

WIDTH = 110


def summary(cls: Any) -> str:
    """Returns the first paragraph of a section class's docstring in one line; "" if there is none."""
    about = (cls.__doc__ or "").split("\n\n")[0]
    return "" if about.startswith(f"{cls.__name__}(") else " ".join(about.split())


@cache
def descriptions(cls: Any) -> dict[str, str]:
    """Returns field -> description of a section's class.

    It is the comment at the field's end, the comment above it, the string below it, or a line of the class's docstring.
    A class that only changes a default keeps the description of its base class.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        written = getattr(sys.modules[base.__module__], base.__name__, None) is base  # False for generated classes
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


def commented(settings: Mapping[str, Any], cls: Any, head: str) -> str:
    """Returns settings as YAML, in the order of a section's class, with their descriptions as comments."""
    return "\n".join([*_comment(head, ""), *_lines(settings, cls, "")]) + "\n"


def _lines(settings: Mapping[str, Any], cls: Any, indent: str) -> Iterator[str]:
    dump = partial(yaml.safe_dump, sort_keys=False, width=10_000)
    texts, kinds = descriptions(cls), kinds_of(cls)
    for key in sorted(settings, key=list(kinds).index):
        value, text, sections = settings[key], texts.get(key, ""), classes_of(kinds[key])
        if not indent:
            yield ""
        if isinstance(value, Mapping) and sections:
            source = value.get("source")
            section = next((one for one in sections if source == getattr(one(), "source", None)), sections[0])
            yield from (*_comment(summary(section) or text, indent), f"{indent}{key}:")
            yield from _lines(value, section, indent + "  ")
        elif isinstance(value, list) and isinstance(value[0], Mapping):
            yield from (*_comment(text, indent), f"{indent}{key}:")
            yield from textwrap.indent(dump(value), indent + "  ").splitlines()
        else:
            flow = dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
            line = f"{indent}{key}: {flow}"
            short = text and len(line) + len(text) + 4 <= WIDTH
            yield from [f"{line}  # {text}"] if short else [*_comment(text, indent), line]


def _comment(text: str, indent: str) -> list[str]:
    text = text if len(text) < 2 * WIDTH else text.partition(". ")[0] + "."
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
