"""Directories of models in Hugging Face form: the names of their files, and their replacement as a whole."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from glob import escape
from pathlib import Path

import jax
from jax.experimental import multihost_utils

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CARD, PLOT = "README.md", "progress.png"  # optional files for readers, next to the weights
PROMPTING = "prompting.json"  # how to prompt the model
TEMPLATES = "additional_chat_templates"  # the folder of a model with more chat templates, such as tool_use.jinja
ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"
SIGNATURE = "Trained by jrlhf"  # a card without it is not ours
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja "
    "chat_template.json vocab.json merges.txt tokenizer.model"
).split()
_NAMES = ("config.json", "generation_config.json", SINGLE, INDEX, CARD, PLOT, PROMPTING, *TOKENIZER_FILES)
_WRITTEN = re.compile(
    "|".join(map(re.escape, _NAMES)) + rf"|model-\d{{5}}-of-\d{{5}}\.safetensors|{TEMPLATES}/[^/]+\.jinja"
)
_NEW, _PREVIOUS, _PARTIAL = "new", "previous", ".partial"  # of the hidden folder of an export
_RANDOM = 8  # characters that mkdtemp adds; other names that begin alike are longer


def previous_export(directory: Path, ours: Callable[[str], bool]) -> None:
    """Checks that an export may replace `directory`: it does not exist, is empty, or contains only plain files that the
    same kind of export writes, and no card but ours.

    ours: name of a file, with that of its folder if it has one -> whether an export writes it.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise FileExistsError(f"{directory} is a file: choose another directory for the export")
    folder = directory / TEMPLATES
    inner = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    entries = {path.relative_to(directory).as_posix(): path for path in (*sorted(directory.iterdir()), *inner)}
    if inner:
        del entries[TEMPLATES]
    foreign = [name for name, path in entries.items() if path.is_symlink() or not path.is_file() or not ours(name)]
    foreign += [CARD] if CARD not in foreign and is_foreign_card(directory / CARD) else []
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise FileExistsError(
            f"{directory} holds {foreign[0]!r}{more}, which an export does not write and would delete: move it away, "
            "or choose another directory for the export"
        )


def is_model_file(name: str) -> bool:
    """True for the names of files that `export_hf` writes."""
    return _WRITTEN.fullmatch(name) is not None


def is_of_export(name: str) -> bool:
    """True for the names of files that `export_hf` or `export_adapter` writes."""
    return is_model_file(name) or name in ADAPTER_FILES


def is_foreign_card(path: Path) -> bool:
    """True for a card that was not written by an export."""
    return path.is_file() and SIGNATURE.encode() not in path.read_bytes()


def replace_directory(directory: Path, write: Callable[[Path], None], card: Mapping[str, bytes] | None = None) -> Path:
    """Writes a new directory, card included, which replaces `directory`; returns it. Process 0 writes, the others wait.

    write: writes all but the card into the directory that it is given.
    """
    if jax.process_index() == 0:
        with _replacing(directory) as folder:
            write(folder)
            for name, content in (card or {}).items():
                (folder / name).write_bytes(content)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("export")
    return directory


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """Yields a new directory to write into, which replaces `directory` at the end, unless there is an error.

    If `directory` is a symbolic link, its target is replaced. Everything is in one hidden folder, which is locked while
    this process lives. If it is killed, `heal` ends what it left.
    """
    target = directory.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    heal(target)
    place = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=_PARTIAL, dir=target.parent))
    written = place / _NEW
    try:
        with _locked(place):
            written.mkdir()
            yield written
            for path in (*written.rglob("*"), written):
                _sync(path)
            if target.exists():
                target.rename(place / _PREVIOUS)
            written.rename(target)
            _sync(target.parent)
    finally:  # after the lock is closed: NFS keeps a folder with an open file
        _restore(place, target)
        shutil.rmtree(place, ignore_errors=True)


def heal(directory: Path) -> None:
    """Removes the hidden folders of killed exports of a directory, and first moves the directory back if it is missing.

    On a file system without locks they stay, because another process may use them.
    """
    target = directory.resolve()
    for left in target.parent.glob(f".{escape(target.name)}-{'?' * _RANDOM}{_PARTIAL}"):
        with _locked(left) as ours:
            if ours:
                _restore(left, target)
        if ours:
            shutil.rmtree(left, ignore_errors=True)


def _restore(place: Path, target: Path) -> None:
    """Moves the previous directory back from the hidden folder of an export if there is no new one."""
    if (place / _PREVIOUS).exists() and not target.exists():
        (place / _PREVIOUS).rename(target)


@contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Locks a folder; yields False if it is locked already, if it is gone, or if the file system has no locks."""
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(open(place / "lock", "a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except OSError:
            ours = False
        yield ours


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot sync a directory
            raise
    finally:
        os.close(descriptor)
