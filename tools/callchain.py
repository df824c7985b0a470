"""Counts our own frames from `train.main` to the loss, and our own calls of a warm iteration.

    python -m tools.callchain [key=value ...]

Trains GRPO on one device, with the settings of `tests.support.reading_path`; those given here come last. Iteration 3
traces all programs again, iteration 4 only runs them. The second line is of responses that exceed one chunk.
"""

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jrlhf import train
from jrlhf.stages import loop
from tests.support.reading_path import ROOT, SETTINGS

CORE = tuple(f"{ROOT / folder}/" for folder in ("jrlhf", "models", "ppo", "kernels", "meshes"))
LONGER = ("rollout.chunk=2",)


def is_ours(frame: FrameType) -> bool:
    return str(Path(frame.f_code.co_filename).resolve()).startswith(CORE)


class Calls:
    """What one iteration called: the numbers of our own calls by function, and of our own frames up to the loss."""

    def __init__(self) -> None:
        self.counts, self.frames = Counter[str](), 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not is_ours(frame):
            return
        self.counts[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1
        if frame.f_code.co_name == "policy_loss":
            above, depth = frame.f_back, 1
            while above is not None:
                depth += is_ours(above)
                above = above.f_back
            self.frames = max(self.frames, depth)


def record(settings: Sequence[str]) -> dict[int, Calls]:
    """Runs GRPO; returns the calls of iterations 3 (which traces all programs) and 4 (which only runs them)."""
    original, calls, present = loop.traced, {3: Calls(), 4: Calls()}, list[Calls]()

    def profile(*event: Any) -> None:
        for watching in present:
            watching(*event)

    def traced(config: Any, path: Any, name: str, step: int, advance: Any) -> Any:
        if name != "grpo" or step not in calls:
            return original(config, path, name, step, advance)
        if step == 3:
            jax.clear_caches()
        present.append(calls[step])
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
            options = [*SETTINGS, "grpo.iterations=4", "grpo.save_every=4", *settings]
            code = train.cli(["--config", "arithmetic-grpo", f"run_dir={directory}", *options])
            assert code == 0, code
    finally:
        loop.traced = original
        threading.setprofile(None)
    return calls


def main(settings: Sequence[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    for title, more in (("one chunk", ()), ("several chunks", LONGER)):
        calls = record([*more, *settings])
        print(f"{title}: {calls[3].frames} frames to the loss, {calls[4].counts.total()} calls of a warm iteration")
        print("  " + ", ".join(f"{name} {count}" for name, count in calls[4].counts.most_common(12)))


if __name__ == "__main__":
    main(sys.argv[1:])
