"""Write what the peers compute from one input of every check, for tests that run without them.

    python -m benchmarks.oracle.goldens          where verl and TRL are installed: see .ci/run

The files hold inputs as well as results, so that they do not depend on NumPy's random numbers.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.oracle.cases import Arrays, Shape

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "ppo" / "goldens"
COMMAND = "python -m benchmarks.oracle.goldens"
SHAPE = Shape(rows=8, time=6, spread=0.4)  # with holes in the responses where a check allows them
SEED = 0


def main() -> None:
    from benchmarks.oracle.checks import CHECKS, GAPS

    peers = import_module("benchmarks.oracle.peers")
    FOLDER.mkdir(exist_ok=True)
    for package, pinned in peers.VERSIONS.items():
        inputs: list[dict[str, Any]] = []
        results = {}
        for check in CHECKS:
            if not check.name.startswith(f"{package}/"):
                continue
            shape = replace(SHAPE, kind="gaps") if GAPS in check.shapes else SHAPE
            arrays = {name: _rounded(x) for name, x in check.draw(SEED, shape).items()}
            written = {name: x.tolist() for name, x in arrays.items()}
            written = {name: _short(x, 4) for name, x in written.items()}
            if written not in inputs:
                inputs.append(written)
            outputs = check.theirs(peers, arrays)
            results[check.name] = {
                "function": f"benchmarks.oracle.peers.{check.peer}",
                "options": check.options,
                "input": inputs.index(written),
                "result": {name: _short(x.tolist(), 8) for name, x in outputs.items()},
            }
        provenance = {
            package: pinned,
            "torch": version("torch"),
            "dtype": "float64",
            "seed": SEED,
            "command": COMMAND,
        }
        lines = [
            f'{{"provenance": {json.dumps(provenance)},',
            '"inputs": [',
            ",\n".join(json.dumps(x) for x in inputs),
            '],\n"results": {',
            ",\n".join(f"{json.dumps(name)}: {json.dumps(x)}" for name, x in results.items()),
            "}}",
        ]
        path = FOLDER / f"{package}-{pinned}.json"
        path.write_text("\n".join(lines) + "\n")
        print(f"{path.name}: {len(results)} results of {len(inputs)} inputs, {path.stat().st_size / 1e3:.0f} kB")


def read() -> Iterator[tuple[str, Arrays, Arrays]]:
    """(name of a check, inputs, what the peer said) of all goldens."""
    for path in sorted(FOLDER.glob("*.json")):
        goldens = json.loads(path.read_text())
        for name, record in goldens["results"].items():
            arrays = {key: _array(x) for key, x in goldens["inputs"][record["input"]].items()}
            yield name, arrays, {key: np.asarray(x, np.float64) for key, x in record["result"].items()}


def _rounded(x: np.ndarray) -> np.ndarray:
    """Few digits, so that a file is short and its numbers are those that the peer read."""
    return np.round(x.astype(np.float64), 3).astype(np.float32) if x.dtype.kind == "f" else x


def _short(x: Any, digits: int) -> Any:
    if isinstance(x, list):
        return [_short(entry, digits) for entry in x]
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


def _array(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.astype({"b": np.bool_, "i": np.int32, "f": np.float32}[array.dtype.kind])


if __name__ == "__main__":
    main()
