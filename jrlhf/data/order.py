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
    stream: tuple[int, ...] = ()  # numbers that distinguish orders of one seed

    def draw(self, number: int, solved: Solved | None = None) -> Rows:
        """Returns the rows of a batch."""
        return self.span(number * self.batch, (number + 1) * self.batch, solved)

    def span(self, start: int, stop: int, solved: Solved | None = None) -> Rows:
        """Returns the rows from one place of the stream to another."""
        drawn = [np.zeros(0, np.int64)]
        for epoch, rows, places in self._parts(start, stop, solved):
            shuffled = np.random.default_rng((self.seed, *self.stream, epoch)).permutation(len(rows))
            drawn.append(rows[shuffled[places]])
        return np.concatenate(drawn)

    def epochs(self, number: int, solved: Solved | None = None) -> list[int]:
        """Returns the numbers of the epochs, from 0, from which a batch takes rows."""
        return self.epochs_of_span(number * self.batch, (number + 1) * self.batch, solved)

    def epochs_of_span(self, start: int, stop: int, solved: Solved | None) -> list[int]:
        """Returns the numbers of the epochs from which a span takes rows; of an empty one, that of the next row."""
        return [epoch for epoch, _, _ in self._parts(start, max(stop, start + 1), solved)]

    def begun(self, number: int, solved: Solved | None = None) -> dict[str, int]:
        """Returns the metric of the epoch in which a batch begins."""
        return {"training/epoch": self.epochs(number, solved)[0]}

    def _parts(self, start: int, stop: int, solved: Solved | None) -> Iterator[tuple[int, Rows, slice]]:
        """Yields for each of these epochs: its number, its rows, and the part of their shuffled order."""
        solved = np.full(self.count, UNSOLVED) if solved is None else solved
        epoch = min(start // self.count, int(solved.min()))  # the epochs before it have all rows
        first, missing = start - epoch * self.count, stop - start
        while missing:
            rows = np.flatnonzero(solved > epoch)
            rows = rows if len(rows) >= self.batch else np.arange(self.count)
            taken = min(max(len(rows) - first, 0), missing)
            if taken:
                yield epoch, rows, slice(first, first + taken)
            first, missing, epoch = max(first - len(rows), 0), missing - taken, epoch + 1

    def next_epochs(self, number: int, solved: Solved) -> Solved:
        """Returns for each row the first epoch that has not begun after a batch."""
        return np.full_like(solved, 1 + self.epochs(number, solved)[-1])

    def without_solved(
        self, solved: Solved, scores: Mapping[int, Float[np.ndarray, "B"]], bound: float, last: int
    ) -> Solved:
        """Leaves out the rows whose mean score is at least `bound`, from the first epoch on that has not begun.

        scores: number of a batch -> equally many scores for each of its rows, in their order. last: number of the last
            batch that was drawn.
        """
        first, result = self.next_epochs(last, solved), solved.copy()
        for number, of_rows in scores.items():
            means = of_rows.reshape(self.batch, -1).mean(axis=1, dtype=np.float64).astype(np.float32)
            now = self.draw(number, solved)[np.isfinite(means) & (means >= np.float32(bound))]
            result[now] = np.minimum(result[now], first[now])
        return result
