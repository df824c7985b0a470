"""Fetches model directories from an object store into a local cache."""

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from jrlhf.config.places import StorageConfig
from jrlhf.errors import UserError
from jrlhf.models.hf.directories import PROMPTING, TEMPLATES
from jrlhf.run.files import cache_directory, sha256
from jrlhf.storage.store import Store, StoreError, refused

PATIENCE = 60.0  # seconds of failed requests


def fetch(address: str, key: str, patterns: Sequence[str]) -> Path:
    """Returns a directory with the files of a model that match one of `patterns`, from an address.

    The address is that of a directory with a config.json, or of a run, whose model/ is used. The files are cached in
    ~/.cache/jrlhf/models, and are fetched again if those at the address have changed. key: the setting that names it.
    """
    with refused(f"{key}={address} cannot be fetched", "list and read"):
        store = _store(address)
        objects = store.versions()
        roots = [root for root in ("", "model/") if f"{root}config.json" in objects]
        if not roots:
            unfinished = "config.yaml" in objects
            reason = "is a run that has not finished" if unfinished else "holds no config.json and no model/config.json"
            raise UserError(f"{key}={address} {reason}: name a model directory, or a run that has finished")
        folders = roots[0].rstrip("/"), roots[0] + TEMPLATES
        files = {name: version for name, version in objects.items() if name.rpartition("/")[0] in folders}
        return _download(store, files, patterns)


def fetch_run(address: str, key: str) -> Path:
    """Returns a directory with the describing files of a run or an export at an address, without its model."""
    with refused(f"{key}={address} cannot be fetched", "list and read"):
        store = _store(address)
        versions = store.versions()
        prompting = PROMPTING if PROMPTING in versions else f"model/{PROMPTING}"  # of a run, or of an export
        files = {name: version for name, version in versions.items() if "/" not in name or name == prompting}
        return _download(store, files, ("config.yaml", "summary.json", PROMPTING))


def _store(address: str) -> Store:
    return Store(address, StorageConfig(patience=PATIENCE), partial(print, file=sys.stderr, flush=True))


def _download(store: Store, files: Mapping[str, tuple[int, str]], patterns: Sequence[str]) -> Path:
    """Downloads the files that match a pattern, and returns the directory of these versions of the files."""
    directory = cache_directory() / "models" / sha256(store.address + str(sorted(files.items())))[:16]
    for name, (size, _) in files.items():
        folder, _, last = name.rpartition("/")
        file = directory / (TEMPLATES if folder.endswith(TEMPLATES) else "") / last
        present = file.exists() and file.stat().st_size == size
        if not present and any(fnmatchcase(file.name, pattern) for pattern in patterns):
            if not store.download(name, file, size):
                raise StoreError(f"{name} was deleted meanwhile")
    return directory
