"""Counts our own frames from `train.main` to the loss, and our own calls of a warm iteration.

    python -m tools.callchain [key=value ...]

Trains GRPO on one device, with the settings of `tests.support.reading_path`; those given here come last. Iteration 3
traces all programs again, iteration 4 only runs them. Counts twice: with one chunk of responses, and with several.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.reading_path import CORE, ROOT, train_watched

FOUR = "grpo.iterations=4", "grpo.save_every=4"
CHUNKS = {"one chunk": (), "several chunks": ("rollout.chunk=2",)}


@cache
def is_ours(file: str) -> bool:
    return str(Path(file).resolve()).startswith(tuple(f"{ROOT}/{folder}" for folder in CORE))


class Calls:
    """What one iteration called: the numbers of our own calls by function, and of our own frames up to the loss."""

    def __init__(self) -> None:
        self.counts, self.frames = Counter[str](), 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not is_ours(frame.f_code.co_filename):
            return
        self.counts[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1
        if frame.f_code.co_name == "policy_loss":
            above, depth = frame.f_back, 1
            while above is not None:
                depth += is_ours(above.f_code.co_filename)
                above = above.f_back
            self.frames = max(self.frames, depth)


def main(settings: Sequence[str]) -> None:
    for title, chunks in CHUNKS.items():
        cold, warm = Calls(), Calls()
        train_watched({3: cold, 4: warm}, [*FOUR, *chunks, *settings])
        print(f"{title}: {cold.frames} frames to the loss, {warm.counts.total()} calls of a warm iteration")
        print("  " + ", ".join(f"{name} {count}" for name, count in warm.counts.most_common(12)))


if __name__ == "__main__":
    main(sys.argv[1:])
