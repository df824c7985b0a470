"""Loads the functions of users that a config names: `package.module:function` or `path/file.py:function`.

`<python>:NAME` is a function that a Python program has passed to a run (`python_code.py`). Imports no JAX.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jrlhf.config.places import PREFIX
from jrlhf.errors import UserError, alike, beside, expanded, printable
from jrlhf.rewards.python_code import is_installed, python_code

DETAIL = 500  # maximum number of characters of an explanation


class UserCode(NamedTuple):
    """A user's function, its file, the sha256 of the file's content, and those of the modules that it imports."""

    function: Any
    file: str | None
    sha256: str | None
    modules: dict[str, str]


def resolve(spec: str, called: str) -> str:
    """Returns the spec with the absolute path of its file. Checks all that can be checked without running code.

    called: the setting, for messages.
    """
    if spec.startswith(PREFIX):
        python_code(spec, called)
        return spec
    module, _, function = spec.rpartition(":")
    if not module or not all(part.isidentifier() for part in function.split(".")):
        raise UserError(f"{called}: {spec!r} must be package.module:function or path/file.py:function")
    if module.endswith(".py"):
        path = expanded(module, called).resolve()
        if not path.is_file():
            raise UserError(f"{called}: there is no file {path}: {beside(path, 'name one that exists')}")
        return f"{path}:{function}"
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"{called}: {module!r} is neither a module's name nor a file that ends in .py")
    return spec


def load(spec: str, called: str) -> UserCode:
    """Imports the function that a resolved spec names. A file is imported again if its content has changed."""
    if spec.startswith(PREFIX):
        code = python_code(spec, called)
        code.identify(called)
        modules: dict[str, str] = {}
        for name in code.modules:
            module = sys.modules[name]
            file = getattr(module, "__file__", None)
            if file is not None:  # a namespace package has none
                modules |= {name: _sha256(file)} | imported_modules(file, getattr(module, "__package__", None) or "")
        return UserCode(code.function, None, code.sha256, modules)
    source, _, name = spec.rpartition(":")
    try:
        if source.endswith(".py"):
            module = _module_of(source, Path(source).read_bytes())
        else:
            module = importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{called} cannot be imported: {explain(error)}") from error
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            public = [key for key in vars(module) if not key.startswith("_")]
            remedy = alike(part, public, f"it has {', '.join(public) or 'nothing'}")
            raise UserError(f"{called}: there is no {part!r} in {source}: {remedy}")
        function = getattr(function, part)
    if not callable(function):
        raise UserError(f"{called} is of type {type(function).__name__}: name a function")
    file = getattr(module, "__file__", None)
    if file is None or not os.path.isfile(file):
        return UserCode(function, file, None, {})
    modules = imported_modules(file, getattr(module, "__package__", None) or "")
    return UserCode(function, file, _sha256(file), modules)


def as_it_is(spec: str, called: str) -> UserCode:
    """Returns the function to call in this process. A Python function is identified by its name alone."""
    if spec.startswith(PREFIX):
        return UserCode(python_code(spec, called).function, None, None, {})
    return load(spec, called)


def shipped(spec: str, called: str) -> dict[str, Any] | None:
    """Returns what a worker needs to call a Python function of this process; None for another spec."""
    if not spec.startswith(PREFIX):
        return None
    try:
        code, function = load(spec, called), python_code(spec, called).pickled(called)
    except UserError as error:
        raise UserError(f"{error}, or set in_process of {called} (docs/data-and-rewards.md)") from error
    return {"code": function, "sha256": code.sha256, "modules": code.modules, "path": sys.path}


def received(code: Mapping[str, Any], called: str) -> UserCode:
    """Restores a function in a worker from the result of `shipped`."""
    sys.path.extend(path for path in code["path"] if path not in sys.path)
    try:
        return UserCode(pickle.loads(code["code"]), "a Python function", code["sha256"], code["modules"])
    except (Exception, SystemExit) as error:
        raise UserError(f"{called} cannot be made in its process: {explain(error)}") from error


def imported_modules(file: str, package: str = "") -> dict[str, str]:
    """Returns module -> sha256 of its file, for all modules that a Python file imports, directly or indirectly.

    Leaves out the standard library, installed packages and this program. Does not see imports of computed names.
    """
    modules: dict[str, str] = {}
    pending = [(file, package)]
    while pending:
        for name in _imports(*pending.pop()):
            if name in modules or is_installed(name):
                continue
            try:
                spec = importlib.util.find_spec(name)
            except Exception:  # an attribute of a module, or a missing module whose import error the file handles
                continue
            origin = None if spec is None or not spec.has_location else spec.origin
            if spec is None or origin is None or is_installed(name, origin):
                continue
            modules[name] = _sha256(origin)
            pending.append((origin, spec.parent or ""))
    return modules


def _imports(file: str, package: str) -> Iterator[str]:
    """Yields the names that a file may import: modules, their packages, and attributes.

    package: the package of the file, to which relative imports refer.
    """
    try:
        nodes = list(ast.walk(ast.parse(Path(file).read_bytes())))
    except (SyntaxError, ValueError):  # not Python, such as a compiled module
        return
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join(filter(None, [*parents, node.module]))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _sha256(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def _module_of(path: str, source: bytes) -> ModuleType:
    """Returns the module of a file with this content. No bytecode is written next to the file."""
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)  # lets it import its neighbours; last, so that they hide no installed module
    location = importlib.util.spec_from_file_location(f"user_{Path(path).stem}", path)
    assert location is not None, path
    module = importlib.util.module_from_spec(location)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def explain(error: BaseException) -> str:
    """Returns the message of an exception, and its last frame outside of this folder."""
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):  # not of a text that a function reads
        return printable(f"{error.filename}, line {error.lineno}: {error.msg}")
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # a user's __str__ may fail
        text = type(error).__name__
    own = os.path.dirname(__file__), os.path.dirname(importlib.__file__)
    frames = [x for x in traceback.extract_tb(error.__traceback__) if os.path.dirname(x.filename) not in own]
    text = text.partition(f"\n{'-' * 20}\nFor simplicity, JAX has removed")[0]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return printable(" ".join(text.split())[:DETAIL] + place)
