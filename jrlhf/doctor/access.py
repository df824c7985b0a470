"""Checks access to the hub, and to the directories in which files are written."""

import http.client
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jrlhf.errors import UserError, path_error
from jrlhf.run.files import file_error, in_units
from jrlhf.storage.outward import within

GIB = 2**30
LEAST_FREE, FEW_FREE = 1 * GIB, 20 * GIB  # free bytes: below the first a problem, below the second a note
HUB_SECONDS, STORE_SECONDS = 4, 10  # deadlines


@dataclass(frozen=True)
class Finding:
    """One line about a part of the machine: its state and, if it does not suit runs, a remedy."""

    part: str
    state: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def check_hub() -> Iterator[Finding]:
    """Checks that models and datasets can be downloaded by name, also gated ones."""
    try:
        from huggingface_hub import constants, get_token
    except ImportError as error:
        yield Finding("hub", "note", f"not reached ({error})", "mend the packages named above")
        return
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "note", "offline, as HF_HUB_OFFLINE says: only what was downloaded before has a name")
    elif error := _hub_error(constants.ENDPOINT):
        remedy = "if you need it, see network, proxy and HF_ENDPOINT; directories and files need no hub"
        yield Finding("hub", "note", f"not reached ({error})", remedy)
    else:
        yield Finding("hub", "ok", "reached")
    token = get_token()
    if token is None:
        yield Finding("hub token", "note", "none, which gated models need", "hf auth login, or set HF_TOKEN")
    elif re.fullmatch(r"[!-~]+", token):
        yield Finding("hub token", "ok", "present")
    else:
        remedy = "hf auth login, or set HF_TOKEN to the token alone"
        yield Finding("hub token", "problem", "it holds a space or another character that no token has", remedy)


def _hub_error(address: str) -> str | None:
    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()

    try:
        within(HUB_SECONDS, ask)  # a name server that does not answer has no deadline
    except urllib.error.HTTPError:
        pass  # it answers
    except TimeoutError as error:
        return str(error)
    except (OSError, ValueError, http.client.HTTPException) as error:  # also of an address that is none
        return f"{address}: {getattr(error, 'reason', error)}"
    return None


def check_places() -> Iterator[Finding]:
    """Yields directories besides `run_dir` that cannot be written: the hub's cache, the temporary directory."""
    temporary = os.environ.get("TMPDIR", "/tmp")
    places = {"TMPDIR": ("the temporary directory", temporary, Path(temporary))}  # must be there
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        places["HF_HOME"] = ("the cache of the hub", HF_HUB_CACHE, _existing(Path(HF_HUB_CACHE).absolute()))
    except ImportError:
        pass  # a finding on packages
    for variable, (what, name, place) in places.items():
        if (error := path_error(name) or file_error(place)) is not None:
            remedy = f"set {variable} to a directory that can be written"
            yield Finding(variable, "problem", f"{what} {name} cannot be written ({error})", remedy)


def check_run_dir(run_dir: str) -> Iterator[Finding]:
    """Checks that runs can be written, and the free space. run_dir: a path or an address."""
    if re.match(r"\w+:/", run_dir):  # also an address that lost a slash
        error, space, free = _store_error(run_dir), "no bound is known", FEW_FREE
    else:
        path = Path(os.path.expanduser(run_dir)).absolute()
        place, run_dir = _existing(path), str(path)
        error = path_error(path) or file_error(place)
        free = 0 if error else shutil.disk_usage(place).free
        space = f"{in_units(free)} free"
    if error is not None:
        remedy = "mend that, or choose another place: run_dir=PLACE"
        yield Finding("run_dir", "problem", f"{run_dir} cannot be written ({error})", remedy)
    elif free >= FEW_FREE:
        yield Finding("run_dir", "ok", f"{run_dir}: can be written, {space}")
    elif free < LEAST_FREE:
        yield Finding("run_dir", "problem", f"{run_dir}: {space}", "make room, or choose another place")
    else:
        remedy = "a checkpoint takes 12 bytes per trained weight: see that they fit"
        yield Finding("run_dir", "note", f"{run_dir}: {space}", remedy)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if os.path.lexists(folder))


def _store_error(address: str) -> str | None:
    """Writes and deletes an object; returns why that fails."""
    try:
        from jrlhf.config.places import StorageConfig, is_address
        from jrlhf.storage.store import Store, StoreError
    except Exception as error:  # incompatible packages may raise anything
        return f"{type(error).__name__}: {error}"
    if not is_address(address):
        return "it is not s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
    try:
        store = Store(address, StorageConfig(timeout=STORE_SECONDS, patience=STORE_SECONDS))
        store.contact()
        store.try_out()
    except StoreError as error:
        return f"{error}: {error.remedy}" if error.remedy else str(error)
    except UserError as error:
        return str(error)
    return None
