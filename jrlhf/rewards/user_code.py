"""A user's functions, as a config names them: `package.module:function` or `path/file.py:function`. Imports no JAX."""

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jrlhf.errors import UserError

DETAIL = 500  # characters of an explanation


class UserCode(NamedTuple):
    """A user's function, its file, and the sha256 of the file's content."""

    function: Any
    file: str | None
    sha256: str | None


def resolve(spec: str, called: str) -> str:
    """Returns the spec with its file's whole path, as far as it can be checked without running anything.

    called: the setting, for messages.
    """
    module, _, function = spec.rpartition(":")
    if not module or not all(part.isidentifier() for part in function.split(".")):
        raise UserError(f"{called}: {spec!r} must be package.module:function or path/file.py:function")
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"{called}: there is no file {path}")
        return f"{path}:{function}"
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"{called}: {module!r} is neither a module's name nor a file that ends in .py")
    return spec


def load(spec: str, called: str) -> UserCode:
    """Imports the function that a resolved spec names; a file anew where its content has changed."""
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
            public = ", ".join(key for key in vars(module) if not key.startswith("_")) or "nothing"
            raise UserError(f"{called}: there is no {part!r} in {source}, which has {public}")
        function = getattr(function, part)
    if not callable(function):
        raise UserError(f"{called} is a {type(function).__name__}: name a function")
    file = getattr(module, "__file__", None)
    readable = file is not None and os.path.isfile(file)
    return UserCode(function, file, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and readable else None)


@functools.cache
def _module_of(path: str, source: bytes) -> ModuleType:
    """Returns the module of a file with this content. No bytecode is written next to the file."""
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)  # for its neighbours; last, so that none of them hides an installed module
    location = importlib.util.spec_from_file_location(f"user_{Path(path).stem}", path)
    assert location is not None, path
    module = importlib.util.module_from_spec(location)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def explain(error: BaseException) -> str:
    """Returns the message of an exception, and its last frame."""
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # its __str__ is the function's own
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return " ".join(text.split())[:DETAIL] + place
