"""The order in which rows are drawn. It depends on the seed and, for prompts, on which ones are solved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

UNSOLVED = np.iinfo(np.int32).max

Rows = Int[np.ndarray, "B"]
Solved = Int[np.ndarray, "N"]  # the epoch from which each row is left out; UNSOLVED: it never is


@dataclass(frozen=True)
class Order:
    """An endless stream of rows, shuffled anew in every epoch, in batches with numbers from 0.

    An epoch in which fewer rows than a batch would remain has all rows.
    """

    count: int  # number of rows, N
    batch: int
    seed: int

    def draw(self, number: int, solved: Solved | None = None) -> Rows:
        """Returns the rows of a batch."""
        drawn = []
        for epoch, rows, places in self._parts(number, solved):
            shuffled = np.random.default_rng((self.seed, epoch)).permutation(len(rows))
            drawn.append(rows[shuffled[places]])
        return np.concatenate(drawn)

    def epochs(self, number: int, solved: Solved | None = None) -> list[int]:
        """Returns the numbers of the epochs, from 0, from which a batch takes rows."""
        return [epoch for epoch, _, _ in self._parts(number, solved)]

    def _parts(self, number: int, solved: Solved | None) -> Iterator[tuple[int, Rows, slice]]:
        """Yields for each of these epochs: its number, its rows, and the part of their shuffled order."""
        solved = np.full(self.count, UNSOLVED) if solved is None else solved
        epoch = min(number * self.batch // self.count, int(solved.min()))  # the epochs before it have all rows
        first, missing = number * self.batch - epoch * self.count, self.batch
        while missing:
            rows = np.flatnonzero(solved > epoch)
            rows = rows if len(rows) >= self.batch else np.arange(self.count)
            taken = min(max(len(rows) - first, 0), missing)
            if taken:
                yield epoch, rows, slice(first, first + taken)
            first, missing, epoch = max(first - len(rows), 0), missing - taken, epoch + 1

    def without_solved(
        self, solved: Solved, scores: Mapping[int, Float[np.ndarray, "B"]], bound: float, last: int
    ) -> Solved:
        """Leaves out the rows whose mean score is at least `bound`, from the first epoch on that has not begun.

        scores: number of a batch -> equally many scores for each of its rows, in their order. last: number of the last
            batch that was drawn.
        """
        first, result = 1 + self.epochs(last, solved)[-1], solved.copy()
        for number, of_rows in scores.items():
            means = of_rows.reshape(self.batch, -1).mean(axis=1, dtype=np.float64).astype(np.float32)
            now = self.draw(number, solved)[np.isfinite(means) & (means >= np.float32(bound))]
            result[now] = np.minimum(result[now], first)
        return result
