"""Lists the core files that one iteration runs: `python -m tests.support.reading_path`.

Trains GRPO on one device and records every function of the core whose body runs during the third iteration. All
compiled programs are dropped before that iteration, so that tracing counts, too.
"""

import ast
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jrlhf import train
from jrlhf.meshes import resharding
from jrlhf.stages import loop

ROOT = Path(__file__).resolve().parents[2]
CORE = "jrlhf/", "kernels/", "meshes/", "models/", "ppo/"
ALWAYS = ("jrlhf/training.py", "jrlhf/stages/loop.py")  # the frame around the iteration counts in full
# Services that a reader of the algorithm skips: a run's files and console, settings, errors.
OUTSIDE = ("jrlhf/run/", "jrlhf/config/", "jrlhf/errors.py")
SETTINGS = (
    "name=path model.embed=16 model.layers=2 model.heads=2 model.kv_heads=1 model.head_dim=8 model.mlp=32 "
    "compute.remat=full data.digits=1 data.problems=60 data.heldout_rows=8 sft.steps=2 sft.batch=8 sft.warmup=1 "
    "grpo.iterations=3 grpo.rollout_batch=16 grpo.save_every=3 grpo.algorithm.samples=4 evaluation.prompts=8"
).split()


Watcher = Callable[[FrameType, str, Any], None]  # gets the interpreter's events, as `sys.setprofile` passes them


def train_watched(watchers: Mapping[int, Watcher], settings: Sequence[str] = ()) -> None:
    """Trains GRPO on one device, and passes the events of these iterations, in all threads, to their watchers.

    All compiled programs are dropped before the first of them, so that tracing counts, too.

    watchers: number of an iteration -> what gets its events.
    settings: come last.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    original, present = loop.traced, list[Watcher]()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        for watcher in present:
            watcher(frame, event, argument)

    def traced(config: Any, path: Any, name: str, step: int, advance: Any) -> Any:
        if name != "grpo" or step not in watchers:
            return original(config, path, name, step, advance)
        if step == min(watchers):
            jax.clear_caches()
            resharding._steps.cache_clear()
        present.append(watchers[step])
        sys.setprofile(profile)
        try:
            return original(config, path, name, step, advance)
        finally:
            sys.setprofile(None)
            present.clear()

    loop.traced = traced
    threading.setprofile(profile)  # of threads that start before the iteration, too
    try:
        with tempfile.TemporaryDirectory() as directory:
            code = train.cli(["--config", "arithmetic-grpo", f"run_dir={directory}", *SETTINGS, *settings])
    finally:
        loop.traced = original
        threading.setprofile(None)  # type: ignore[arg-type]
    assert code == 0, f"the training ended with {code}"


def record() -> dict[str, tuple[int, int]]:
    """Core file -> (its lines, the lines of its functions that run), for all files on the path of the iteration."""
    functions = dict[str, set[int]]()  # file -> the first lines of its functions that run

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name != "<module>":
            functions.setdefault(frame.f_code.co_filename, set()).add(frame.f_code.co_firstlineno)

    train_watched({3: watch})
    ran = {Path(file).resolve(): lines for file, lines in functions.items()}
    paths = {str(path.relative_to(ROOT)): lines for path, lines in ran.items() if path.is_relative_to(ROOT)}
    paths = dict.fromkeys(ALWAYS, set[int]()) | paths
    names = sorted(name for name in paths if name.startswith(CORE) and not name.startswith(OUTSIDE))
    return {name: _lines((ROOT / name).read_text(), paths[name]) for name in names}


def _lines(source: str, ran: set[int]) -> tuple[int, int]:
    """Returns the number of lines of a file, and of those within functions that begin at the lines `ran`."""
    within = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            within |= set(range(first, (node.end_lineno or first) + 1)) if first in ran else set()
    return len(source.splitlines()), len(within)


if __name__ == "__main__":
    path = record()
    files, functions = (sum(lines[part] for lines in path.values()) for part in (0, 1))
    print(json.dumps({"files": len(path), "lines": files, "lines of functions": functions, "path": path}, indent=2))
