"""A rollout process whose chunks take a given time, and a reward that does: sleeps stand for what accelerators do."""

import os
import time
from collections.abc import Sequence
from typing import Any

SECONDS = "JRLHF_SECONDS_OF_A_CHUNK"  # the environment variable


def main(descriptor: int) -> None:
    """A rollout process, as `jrlhf.rollouts.processes.worker.main`."""
    from jrlhf.rollouts.processes import worker
    from jrlhf.rollouts.slices import SliceWorkers

    decode, seconds = SliceWorkers.decode_each, float(os.environ[SECONDS])

    def padded(self: SliceWorkers, prompts: Sequence[Any]) -> Any:
        end = time.monotonic() + seconds
        progress = decode(self, prompts)
        time.sleep(max(0.0, end - time.monotonic()))
        return progress

    SliceWorkers.decode_each = padded
    worker.main(descriptor)


def reward(completions: Sequence[str], seconds: float) -> list[float]:
    """The number of different characters, after some time."""
    time.sleep(seconds)
    return [float(len({*completion})) for completion in completions]
