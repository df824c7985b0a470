"""Packages whose modules are loaded when a name of theirs is first used, so that `import jrlhf.ppo` costs nothing."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__` (PEP 562), `__dir__` and `__all__` of a package.

    Its `__init__.pyi`, which type checkers and editors read, says which module defines each name. package, file: the
    package's `__name__` and `__file__`.
    """
    imports = [
        node for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    homes = {alias.name: node.module for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if (home := homes.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value := getattr(import_module(home), name))  # asked for once
        return value

    return get, lambda: sorted(homes), sorted(homes)
