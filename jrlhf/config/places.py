"""Settings that are a path on this machine, or an address in an object store."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jrlhf.errors import UserError, expanded
from jrlhf.ppo.fields import LONGEST, Section, checked, positive

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # scheme of an address -> the client package of the store
PREFIX = "<python>:"  # begins the name of what a Python program gives in place of a file
HUB = ", a hub name such as org/name"  # in messages about what the hub has


def place(default: str | None = None, also: str = "") -> Any:
    """A field for a path, or for a name, which is first looked up as a path. also: other kinds, for messages."""
    return checked(default, _is_path, f"a path on this machine{also}, with names of at most 255 bytes and without ://")


def address(default: str | None = None, also: str = HUB, **more: Any) -> Any:
    """A field like `place` that also takes an address in an object store. more: as in `checked`."""
    kinds = f"a path on this machine{also}, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, with names of at most 255 bytes"
    return checked(default, lambda text: _is_path(text) or is_address(text), kinds, **more)


def file_name(default: str | None, pattern: str, most: int, expected: str) -> Any:
    """A field with a name of at most `most` bytes that becomes a part of a file's or a directory's name."""
    return checked(default, lambda text: bool(re.fullmatch(pattern, text)) and len(text.encode()) <= most, expected)


def _is_path(text: str) -> bool:
    if "://" in text or re.match(r"\w+:/", text):  # another kind of address, or one with a missing slash
        return False
    is_known = not os.path.expanduser(text).startswith("~")
    return is_known and len(text) < 4000 and all(len(os.fsencode(name)) < 256 for name in text.split("/"))


def is_address(text: str) -> bool:
    """True if a setting is an address in an object store, such as s3://bucket/runs."""
    scheme, separator, rest = text.partition("://")
    names = rest.rstrip("/").split("/")
    return separator != "" and scheme in PACKAGES and _is_path(rest) and not {"", ".", ".."} & {*names}


def local(argument: str, text: Path | str) -> Path:
    """Returns the path in an argument of a command or a function; refuses an address."""
    if re.match(r"\w+:/", str(text)):
        raise UserError(f"{argument}={text} is an address: give a path on this machine (of a run: a copy)")
    return expanded(text, argument)


@dataclass(frozen=True)
class StorageConfig(Section):
    """The object store of a run whose run_dir is an address."""

    # Local working directory of such runs, whose files are copied to the store; null: ~/.cache/jrlhf/runs
    scratch: str | None = place()
    # Timeout of a request in seconds; a large file gets one more second for each MB.
    timeout: float = positive(60.0, most=LONGEST)
    patience: float = positive(600.0, most=LONGEST)  # seconds of failed requests after which the run ends
    lease: float = positive(60.0, most=LONGEST)  # seconds without a heartbeat after which another process may take over
