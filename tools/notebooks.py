"""Executes notebooks of colab/ and stores them with their outputs: `python -m tools.notebooks NAME ...`.

Outputs that readers on GitHub cannot see, large outputs and paths of this machine are left out.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 12_000  # characters of a text, and of a page in HTML
LARGEST = 120_000  # of a picture in base64


def execute(name: str) -> Path:
    """Executes colab/NAME.ipynb in an empty directory, and stores it with its outputs."""
    path = ROOT / "colab" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute(env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "110"})
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times
            if cell.cell_type == "code":
                cell.outputs = kept(cell.outputs, folder)
    notebook.metadata = metadata  # without the versions of this machine
    path.write_text(json.dumps(json.loads(nbformat.writes(notebook)), indent=1, ensure_ascii=False) + "\n", "utf-8")
    return path


def kept(outputs: Sequence[Any], folder: str) -> list[Any]:
    """Returns the outputs that are stored: what was printed, as one text, results and pictures; no warnings."""
    streams, rest = dict[str, Any](), list[Any]()
    for output in outputs:
        if output.output_type == "stream" and output.name == "stdout":
            first = streams.setdefault(output.name, output)
            if first is output:
                rest.append(output)
            else:
                first.text += output.text
        elif output.output_type in ("display_data", "execute_result"):
            output.metadata = {}
            output.data = {kind: clean(text, folder) for kind, text in output.data.items() if fits(kind, text)}
            if output.data:
                rest.append(output)
    for output in streams.values():
        output.text = shortened(clean(output.text, folder))
    return rest


def fits(kind: str, text: Any) -> bool:
    return len(str(text)) <= (LARGEST if kind.startswith("image/png") else LONGEST) and "widget" not in kind


def clean(text: Any, folder: str) -> Any:
    """Returns a text as a terminal shows it, without the paths of this machine."""
    if not isinstance(text, str):
        return text
    places = {folder, os.path.realpath(folder), str(ROOT), str(Path.home()), *sys.path} - {"", "/"}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(f"{place}/", "").replace(place, ".")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def shortened(text: str) -> str:
    """Returns a text without most of its middle lines if it is long."""
    lines = text.splitlines(keepends=True)
    return text if len(lines) <= 90 else "".join([*lines[:50], f"... ({len(lines) - 80} lines)\n", *lines[-30:]])


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        print(execute(chosen), flush=True)
