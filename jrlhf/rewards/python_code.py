"""Python functions in place of files of user code: during a run a config names them `<python>:NAME`.

Reward workers get them by cloudpickle. A function is identified by a digest of all that it computes with: bytecode,
constants, names, nested code, defaults, captured values and the globals that it reads, recursively; for objects of
modules, by name and module file. File names, line numbers and ids are left out, so the digest is the same in all
processes of one version of Python. Imports no JAX.
"""

import copyreg
import dis
import hashlib
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from jrlhf.config.places import PREFIX
from jrlhf.errors import UserError, one_line, printable

_PLAIN = (type(None), bool, int, float, complex, str, type(...), type(NotImplemented))
# Entries of a class that do not change what it computes.
_OWN = ("__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__", "_abc_impl")
_OWN += ("__annotations_cache__",)


@dataclass
class PythonCode:
    """A function, its digest, and the user's modules that it refers to. The digest is taken at its first use.

    So a function that changes its captured values during the run keeps its digest.
    """

    function: Any
    sha256: str = ""
    modules: tuple[str, ...] = ()

    def identify(self, called: str) -> None:
        """Computes the digest if there is none yet. Raises UserError for a value that cannot be digested."""
        if not self.sha256:
            digest = _Digest()
            try:
                self.sha256 = digest(self.function)
            except Exception as error:
                raise _refused(called, "identified", error) from error
            self.modules = tuple(sorted(digest.modules))

    def pickled(self, called: str) -> bytes:
        """Returns the pickled function, from which another process restores it."""
        import cloudpickle  # takes a while, and only these functions need it

        try:
            return cloudpickle.dumps(self.function)
        except Exception as error:
            raise _refused(called, "sent to its process", error) from error


def _refused(called: str, what: str, error: Exception) -> UserError:
    reason = printable(one_line(error, kind=True)[:300])
    return UserError(
        f"{called} cannot be {what} ({reason}): do not let it capture such a value, make the value when it is called"
    )


_functions: ContextVar[Mapping[str, PythonCode]] = ContextVar("functions")


@contextmanager
def python_functions(*settings: Any) -> Iterator[list[Any]]:
    """Yields settings with names in place of functions. The names are valid inside the block.

    `hooks` are functions, or one. In `rewards` and `costs` a bare function is a reward or a cost with the function's
    name.
    """
    functions: dict[str, PythonCode] = {}
    token = _functions.set(functions)
    try:
        yield [_named(value, functions) for value in settings]
    finally:
        _functions.reset(token)


def _named(value: Any, functions: dict[str, PythonCode], key: str = "") -> Any:
    if isinstance(value, Mapping):
        inner = {name: _named(part, functions, str(name).rpartition(".")[2]) for name, part in value.items()}
        return inner | {name: value[name] for name in ("options", "columns") if name in value}  # the function's own
    if key == "hooks" and (callable(value) or isinstance(value, list | tuple)):
        return [_named(part, functions, "function") for part in ([value] if callable(value) else value)]
    if key in ("rewards", "costs"):
        listed = [value] if callable(value) else value
        if not isinstance(listed, list | tuple):
            return value
        named = [_named(part, functions, "function") for part in listed]
        return [
            {"name": spec.removeprefix(PREFIX), "function": spec} if callable(part) else spec
            for part, spec in zip(listed, named, strict=True)
        ]
    if key not in ("function", "dataflow", "optimizer") or not callable(value):
        return value
    stem = re.sub(r"\W", "_", getattr(value, "__name__", type(value).__name__).strip("<>"))
    spec, number = PREFIX + stem, 1
    while spec in functions:
        number += 1
        spec = f"{PREFIX}{stem}_{number}"
    functions[spec] = PythonCode(value)
    return spec


def is_given(spec: str) -> bool:
    """False for the name of a function that this run was not given."""
    return not spec.startswith(PREFIX) or spec in _functions.get({})


def python_code(spec: str, called: str) -> PythonCode:
    """Returns the function with this name. Raises UserError if this run was not given it."""
    if not is_given(spec):
        raise UserError(
            f"{called}: {spec.removeprefix(PREFIX)} was a Python function of the program that began the run, and no "
            "file has it: go on in Python, by train(..., resume=True) with the function"
        )
    return _functions.get()[spec]


class _Digest:
    """Computes digests of values. A value that contains itself is represented there by its depth.

    modules: the user's modules to which the values belong.
    """

    def __init__(self):
        self.modules: set[str] = set()
        self._done: dict[int, tuple[str, Any]] = {}  # holds the value, too, so that its id is not reused
        self._open: dict[int, int] = {}

    def __call__(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return _sha(type(value).__name__, repr(value))
        if id(value) in self._open:
            return _sha("inside", str(self._open[id(value)]))
        if id(value) not in self._done:
            self._open[id(value)] = len(self._open)
            self._done[id(value)] = _sha(type(value).__qualname__, *self._words(value)), value
            del self._open[id(value)]
        return self._done[id(value)][0]

    def _words(self, value: Any) -> list[str]:
        """Returns the digests, or the texts, of the parts of a value."""
        kind = type(value)
        if kind in (bytes, bytearray):
            return [hashlib.sha256(value).hexdigest()]
        if kind in (tuple, list):
            return [*map(self, value)]
        if kind in (set, frozenset):
            return sorted(map(self, value))
        if kind in (dict, MappingProxyType):
            return [self(item) for pair in value.items() for item in pair]
        if kind is CodeType:
            counts = value.co_flags, value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            return [value.co_code.hex(), value.co_exceptiontable.hex(), repr((counts, names)), self(value.co_consts)]
        if kind is CellType:
            return [self(value.cell_contents)] if _filled(value) else []
        if isinstance(value, ModuleType):
            if sys.modules.get(value.__name__) is not value or value.__name__ == "__main__":
                raise TypeError(f"no file has the module {value.__name__}")
            return self._part(value.__name__, "")
        if isinstance(value, FunctionType | type):
            if _is_part(value, value.__module__, value.__qualname__):
                return self._part(value.__module__, value.__qualname__)
            return self._function(value) if isinstance(value, FunctionType) else self._class(value)
        if isinstance(value, MethodType):
            return [self(value.__func__), self(value.__self__)]
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            of_module = owner is None or isinstance(owner, ModuleType)
            return [value.__qualname__, *([value.__module__ or ""] if of_module else [self(owner)])]
        if isinstance(value, staticmethod | classmethod):
            return [self(value.__func__)]
        if isinstance(value, property):
            return [self((value.fget, value.fset, value.fdel))]
        if kind.__name__ == "PjitFunction":  # its pickle contains line numbers
            return [self(value.__wrapped__)]
        if kind.__module__.partition(".")[0] == "torch" and hasattr(value, "tolist"):  # its pickles contain addresses
            return [str(getattr(value, name, "")) for name in ("dtype", "shape")] + [self(value.tolist())]
        reduced: Any = copyreg.dispatch_table.get(kind, lambda value: value.__reduce_ex__(4))(value)
        if isinstance(reduced, str):  # the name of a global
            module = pickle.whichmodule(value, reduced)  # pyright: ignore[reportAttributeAccessIssue]
            if not _is_part(value, module, reduced, main=True):
                raise TypeError(f"no module has {reduced}")
            if getattr(value, "__module__", "__main__") != "__main__":
                return self._part(module, reduced)
            return [reduced, self(getattr(value, "__wrapped__", None))]
        return [self(list(part) if hasattr(part, "__next__") else part) for part in reduced]

    def _part(self, module: str, name: str) -> list[str]:
        if not _installed(module):
            self.modules.add(module)
        return [module, name]

    def _function(self, value: FunctionType) -> list[str]:
        parts = value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__, vars(value)
        if _installed(value.__module__):
            return [*map(self, parts)]
        names, attributes = _names_of(value.__code__)
        used = {name: value.__globals__[name] for name in sorted(names) if name in value.__globals__}
        for name in [name for name in sys.modules if "." in name and set(name.split(".")) <= names | attributes]:
            if used.get(top := name.partition(".")[0]) is sys.modules.get(top) and not _installed(name):
                used[name] = sys.modules[name]  # `import package.module` binds the package
        return [*map(self, parts), self(dict(sorted(used.items())))]

    def _class(self, value: type) -> list[str]:
        members = {name: member for name, member in sorted(vars(value).items()) if name not in _OWN}
        return [value.__qualname__, self(value.__bases__), self(members)]


def _filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names_of(code: CodeType) -> tuple[set[str], set[str]]:
    """Returns the names of globals that a code object, or one nested in it, reads, and all of its other names."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = {*code.co_names} - names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, others = _names_of(inner)
            names, attributes = names | more, attributes | others
    return names, attributes


def _is_part(value: Any, module: str | None, name: str, main: bool = False) -> bool:
    """True if another process can import a value by its module and name; from `__main__` only if `main`."""
    place = sys.modules.get(module or "")
    for part in name.split("."):
        place = getattr(place, part, None)
    return place is value and (main or module != "__main__")


def _installed(module: str | None) -> bool:
    """True if a module that is imported is not the user's."""
    top = (module or "").partition(".")[0]
    if top == "__main__":  # in a notebook its file is one of the kernel's package
        return False
    files = [getattr(sys.modules.get(name), "__file__", None) for name in (module or "", top)]
    return is_installed(top, *files)


def is_installed(module: str, *files: str | None) -> bool:
    """True if a module belongs to Python, to this program or, by one of its files, to an installed package."""
    top, packages = module.partition(".")[0], {"site-packages", "dist-packages"}
    ours = top == "jrlhf" or top in sys.stdlib_module_names
    return ours or any(packages & {*Path(file).parts} for file in files if file)


def _sha(*words: str) -> str:
    return hashlib.sha256("".join(f"{len(word)}:{word}" for word in words).encode("utf-8", "surrogatepass")).hexdigest()
