"""The quickstart's corpus: the docstrings of the interpreter's standard library.

Files are parsed with `ast` and never imported, so no code of them runs. Each function gives one example: its signature
on one line, and the first line of its docstring.
"""

import ast
import functools
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Folders of tests, demonstrations, tables and third-party code, whose docstrings were not written for users.
_SKIPPED_FOLDERS = frozenset(
    "test tests idle_test site-packages dist-packages __pycache__ turtledemo pydoc_data _bundled _vendor".split()
)
_SIGNATURE_CHARACTERS = 40
_DEFAULT_CHARACTERS = 6
_HELDOUT_SHARE = 0.15
_SPLIT_SEED = 80  # best of 400: the held-out part has about 30 modules, none with more than a fifth of it
_MINIMUM_TRAIN = 1000
_MINIMUM_HELDOUT = 256


@dataclass(frozen=True)
class DocumentedFunction:
    """A function and the first line of its docstring."""

    module: str  # dotted name of the module, "mailbox"
    name: str  # the function's qualified name inside the module, "Mailbox.remove_folder"
    signature: str  # one line, "def Mailbox.remove_folder(folder):"; see `signature_text`
    summary: str  # the first line of the docstring, unchanged

    @property
    def prompt(self) -> str:
        """The prompt of a model: the signature and a line end."""
        return self.signature + "\n"


@dataclass(frozen=True)
class Corpus:
    """Two disjoint parts of one library, without common modules or signatures."""

    train: tuple[DocumentedFunction, ...]
    heldout: tuple[DocumentedFunction, ...]


@functools.cache
def load_corpus(root: Path | None = None) -> Corpus:
    """Reads every documented function below `root`, once in a process, and splits the examples by module.

    The split is by top-level module, because a random split leaks: two in five names of a random held-out part occur
    in the other part. A held-out signature that also occurs in the train part is left out, and so is a repeated one.
    The result depends only on the files: the same interpreter gives the same corpus, in the same order.

    root: folder of Python sources; None: the interpreter's own standard library. Raises ValueError where it has too
        few documented functions, for instance because it is zipped or compiled.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    first: dict[tuple[str, str], DocumentedFunction] = {}  # twins such as `posixpath` and `ntpath` share many examples
    for example in read_examples(folder):
        first.setdefault((example.signature, example.summary), example)
    examples = first.values()
    train = tuple(example for example in examples if not is_heldout(example.module))
    seen = {example.signature for example in train}
    heldout: dict[str, DocumentedFunction] = {}
    for example in examples:
        if is_heldout(example.module) and example.signature not in seen:
            heldout.setdefault(example.signature, example)
    if len(train) < _MINIMUM_TRAIN or len(heldout) < _MINIMUM_HELDOUT:
        raise ValueError(
            f"{folder} holds {len(train)} documented functions to train on and {len(heldout)} to hold out, and the "
            f"quickstart needs {_MINIMUM_TRAIN} and {_MINIMUM_HELDOUT}: use a Python whose standard library lies there "
            "as .py files"
        )
    return Corpus(train, tuple(heldout.values()))


def read_examples(root: Path) -> Iterator[DocumentedFunction]:
    """Yields every documented function below `root`, by path and then by line.

    Skips files that cannot be read or parsed, and folders of tests, tables and installed packages.
    """
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned before the walk descends, because installed packages can be a hundred times the library.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        paths.extend(Path(folder, name) for name in files if name.endswith(".py"))
    for path in sorted(paths):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            source = path.read_bytes()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the library do not matter here
                tree = ast.parse(source) if b"def " in source else ast.Module([], [])
        except (OSError, SyntaxError, ValueError):
            continue
        yield from _walk(tree, module)


def is_heldout(module: str) -> bool:
    """True if a module is in the held-out part, by a hash of its top-level name.

    A Python twin of a C module is in the same part as its namesake (`_pydatetime`, `datetime`), as they share texts.
    """
    top = module.partition(".")[0]
    family = top.removeprefix("_py").lstrip("_")
    digest = hashlib.sha256(f"{_SPLIT_SEED} {family}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < _HELDOUT_SHARE * 2**64


def signature_text(qualified_name: str, arguments: ast.arguments, *, method: bool) -> str:
    """Writes a function's signature on one short line: `def Mailbox.remove_folder(folder):`.

    The class precedes the method's name and replaces `self` or `cls`, which are left out, as are annotations and
    `async`. A short default is written, a long one as `...`. Parameters that would make the line longer than 40
    characters are replaced by one `...`.
    """
    parameters = _parameters(arguments)
    if method and parameters and parameters[0] in ("self", "cls"):
        parameters = parameters[1:]
    line = f"def {qualified_name}({', '.join(parameters)}):"
    while parameters and len(line) > _SIGNATURE_CHARACTERS:
        parameters = parameters[:-1]
        line = f"def {qualified_name}({', '.join([*parameters, '...'])}):"
    return line


def _parameters(arguments: ast.arguments) -> list[str]:
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [argument.arg + _default(default) for argument, default in zip(positional, defaults, strict=True)]
    if arguments.vararg is not None or arguments.kwonlyargs:
        texts.append("*" + (arguments.vararg.arg if arguments.vararg is not None else ""))
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    texts += [argument.arg + _default(default) for argument, default in keywords]
    return texts if arguments.kwarg is None else [*texts, "**" + arguments.kwarg.arg]


def _default(node: ast.expr | None) -> str:
    if node is None:
        return ""
    text = repr(node.value) if isinstance(node, ast.Constant) else ""
    return f"={text}" if 0 < len(text) <= _DEFAULT_CHARACTERS else "=..."


def _walk(node: ast.AST, module: str, scope: str = "") -> Iterator[DocumentedFunction]:
    """Yields the functions below a node. scope: the class whose methods they are, if they are methods."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, module, child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{scope}.{child.name}" if scope else child.name
            lines = (ast.get_docstring(child) or "").split("\n")
            if summary := " ".join(lines[0].split()):
                yield DocumentedFunction(module, name, signature_text(name, child.args, method=scope != ""), summary)
            yield from _walk(child, module)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _walk(child, module, scope)
