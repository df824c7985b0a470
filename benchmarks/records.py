"""What a result file says first, and where it lies."""

import importlib.metadata
import json
import os
import platform
import re
from datetime import date
from pathlib import Path

from jrlhf.meshes.mesh import Device

RESULTS = Path(__file__).parent / "results"


def hardware(device: Device) -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind


def provenance(*packages: str) -> dict[str, object]:
    """The date, and the versions of Python and of these packages."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"date": date.today().isoformat(), "versions": {**versions, "python": platform.python_version()}}


def path_for(benchmark: str, device: Device) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return RESULTS / f"{benchmark}-{slug}.json"


def write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
