"""What a result file says first, and where it lies."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jrlhf.meshes.mesh import Device

RESULTS = Path(__file__).parent / "results"
PLACES = "--venv", "--work", "--output", "--out", "--profile"  # options whose values are paths
# The environment of runs that are timed: each compiles all its programs, as a first run does.
FIRST_RUN = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def hardware(device: Device | None = None) -> str:
    """The kind of the device; without one, or on a CPU, the machine and its number of cores."""
    if device is None or device.platform == "cpu":
        return f"{platform.machine()}, {os.cpu_count()} cores"
    return device.device_kind


def provenance(*packages: str) -> dict[str, Any]:
    """The command of this process, the commit, the date, and the versions of Python and of these packages."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "command": command(sys.argv[1:]),
        "commit": commit(),
        "date": date.today().isoformat(),
        "versions": {**versions, "python": platform.python_version()},
    }


def command(arguments: Sequence[str]) -> str:
    """Writes the command of this process with these arguments, without those that name places of this machine."""
    words, place = list[str](), False
    for argument in arguments:
        if argument.startswith("-"):
            place = argument.split("=")[0] in PLACES
        if not place:
            words.append(argument)
    module = sys.modules["__main__"].__spec__
    return shlex.join(["python", "-m", "" if module is None else module.name.removesuffix(".__main__"), *words])


def commit() -> str:
    """The hash of the checkout's commit, which ends with `-dirty` if tracked files differ from it; else "unknown"."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(git, cwd=RESULTS, capture_output=True, text=True).stdout.strip() or "unknown"


def path_for(benchmark: str, device: Device) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return RESULTS / f"{benchmark}-{slug}.json"


def joined(path: Path, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The file's results and these, each in the place of an earlier one that says the same under all of `names`.

    Of the file's, those that lack one of the names are of another form and are left out.
    """
    old = json.loads(path.read_text())["results"] if path.exists() else []
    new = {tuple(row[name] for name in names) for row in rows}
    comparable = [row for row in old if all(name in row for name in names)]
    return [row for row in comparable if tuple(row[name] for name in names) not in new] + list(rows)


def output_path(description: str | None, benchmark: str) -> Path:
    """Returns what the command line of a benchmark says after --output, by default the path of its results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{benchmark}.json")
    return parser.parse_args().output


def write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
