"""A user's functions, as a config names them: `package.module:function` or `path/file.py:function`. Imports no JAX."""

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jrlhf.errors import UserError

DETAIL = 500  # characters of an explanation


@dataclass(frozen=True)
class Found:
    """What a spec names, and where it is from. sha256: of the file's content."""

    function: Any
    file: str | None
    sha256: str | None


def resolve(spec: str, called: str) -> str:
    """The spec with its file's whole path, as far as it can be checked without running anything.

    called: the setting, for messages.

    Raises:
        UserError: it names no function, or a file that is not there.
    """
    where, _, function = spec.rpartition(":")
    if not where or not all(part.isidentifier() for part in function.split(".")):
        raise UserError(f"{called}: {spec!r} must be package.module:function or path/file.py:function")
    if where.endswith(".py"):
        path = Path(where).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"{called}: there is no file {path}")
        return f"{path}:{function}"
    if not all(part.isidentifier() for part in where.split(".")):
        raise UserError(f"{called}: {where!r} is neither a module's name nor a file that ends in .py")
    return spec


def load(spec: str, called: str) -> Found:
    """Imports what a resolved spec names; a file anew where its content has changed.

    Raises:
        UserError: it cannot be imported, or is no function.
    """
    where, _, name = spec.rpartition(":")
    try:
        if where.endswith(".py"):
            module = _of_file(where, Path(where).read_bytes())
        else:
            module = importlib.import_module(where)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{called} cannot be imported: {explain(error)}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(each for each in vars(module) if not each.startswith("_")) or "nothing"
            raise UserError(f"{called}: there is no {part!r} in {where}, which has {public}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{called} is a {type(found).__name__}: name a function")
    file = getattr(module, "__file__", None)
    readable = file is not None and os.path.isfile(file)
    return Found(found, file, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and readable else None)


@functools.cache
def _of_file(path: str, source: bytes) -> ModuleType:
    """The module that a file with this content is. Nothing is cached beside the file."""
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
    """The message of an exception, and its last frame."""
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # its __str__ is the function's own
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return " ".join(text.split())[:DETAIL] + place
