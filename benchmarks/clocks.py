"""Seconds from update to update by the virtual and by the wall clock, with two workers, one of which may be slow.

    python -m benchmarks.clocks

writes `results/clocks.json`. A `Fleet` drives workers that draw nothing: chunks and updates are sleeps, so the figures
say who waits for whom, and not how fast a model is. All rows have one length. `theory` follows from the rates of the
workers, which decode together by the virtual clock and each for itself by the wall clock.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.records import hardware, output_path, provenance, write
from jrlhf.meshes import make_mesh
from jrlhf.models.generation.continuous import Prompt, RowProgress
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.schedule import Clock, Rules
from tests.support.fleets import NO_RECOMPUTE

STEP = 0.02  # seconds of a decode step
LENGTH, CHUNK, UPDATE = 32, 4, 16  # tokens of a row; decode steps of a chunk, and of an update
GROUPS, SAMPLES = 4, 4  # of a batch, and rows of a group; each worker has slots for half of them
ITERATIONS, FIRST = 30, 6  # of a run, and those in which slots fill
SLOWER = 1.0, 3.0  # times as long are the chunks of the second worker


class Sleeping:
    """Workers of a lane, whose chunks take as long as those of the slowest one. seconds: of a chunk of each."""

    own_devices = True

    def __init__(self, seconds: Sequence[float]):
        self._seconds, self._rows = seconds, [dict[int, int]() for _ in seconds]  # row -> the tokens that it drew

    @property
    def rooms(self) -> list[int]:
        return [GROUPS // 2 - len(rows) // SAMPLES for rows in self._rows]

    @property
    def running(self) -> int:
        return sum(map(len, self._rows))

    def fresh(self) -> list[Any]:
        return [{} for _ in self._seconds]

    def drawn(self) -> dict[int, Any]:
        return {}

    def start(self, states: Sequence[Any]) -> None:
        pass

    def put(self, weights: Any) -> None:
        pass

    def take(self, weights: None, again: Mapping[int, Prompt] | None) -> list[Any]:
        return []

    def identities(self) -> list[Any]:
        return []

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[RowProgress]:
        time.sleep(max(self._seconds))
        blank, progress = (np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.float32), False), []
        for rows, entering in zip(self._rows, prompts, strict=True):
            rows |= {prompt.number * SAMPLES + sample: 0 for prompt in entering for sample in range(SAMPLES)}
            for row, start in list(rows.items()):
                rows[row] = start + CHUNK
                progress.append(RowProgress(row, start, rows[row], blank if rows[row] == LENGTH else None))
                if rows[row] == LENGTH:
                    del rows[row]
        return progress

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def prompt(number: int) -> Prompt:
    return Prompt(number, np.zeros(1, np.int32), 1, np.zeros(1))


def seconds_of_a_step(clock: Clock, slower: float) -> list[float]:
    """The seconds from update to update, after the first ones."""
    seconds, weights = (STEP * CHUNK, STEP * CHUNK * slower), ({}, {})
    lanes: list[Any] = [Sleeping(seconds)] if clock == "virtual" else [Sleeping([own]) for own in seconds]
    rules, mesh = Rules(GROUPS, 2, UPDATE), make_mesh(devices=jax.devices()[:1])
    options: Any = {"samples": SAMPLES, "limit": LENGTH, "clock": clock, "recompute": NO_RECOMPUTE}
    fleet = Fleet(lanes, mesh, rules, prompt, lambda group: None, **options)
    fleet.start(fleet.fresh(weights, {}), weights, {})
    begins = []
    for _ in range(ITERATIONS):
        fleet.collect()
        begins.append(time.monotonic())
        time.sleep(STEP * UPDATE)
        fleet.publish(weights, {})
    fleet.close()
    return np.diff(begins[FIRST:]).tolist()


def theory(clock: Clock, slower: float) -> float:
    """The seconds in which the workers draw a batch, or the update takes, if that is longer."""
    lengths = slower if clock == "virtual" else 2 / (1 + 1 / slower)
    return STEP * max(LENGTH * lengths, UPDATE)


def main() -> None:
    output, rows = output_path(__doc__, "clocks"), []
    clocks: tuple[Clock, ...] = "virtual", "wall"
    for slower in SLOWER:
        for clock in clocks:
            seconds = seconds_of_a_step(clock, slower)
            row = {"clock": clock, "slower": slower, "theory": theory(clock, slower)}
            rows.append({**row, "seconds": float(np.mean(seconds)), "spread": float(np.std(seconds))})
            print(rows[-1], flush=True)
    sizes = {"step": STEP, "length": LENGTH, "chunk": CHUNK, "update": UPDATE, "groups": GROUPS, "samples": SAMPLES}
    packages = provenance("jax", "numpy")
    write(output, {**packages, "hardware": hardware(jax.devices()[0]), "sleeps": sizes, "runs": rows})


if __name__ == "__main__":
    main()
