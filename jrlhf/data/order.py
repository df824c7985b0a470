"""The order in which rows are drawn. It depends on the seed and, for prompts, on which ones are solved."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

UNSOLVED = np.iinfo(np.int32).max

Rows = Int[np.ndarray, "B"]
Solved = Int[np.ndarray, "N"]  # the epoch from which each row is left out; UNSOLVED: it never is


@dataclass(frozen=True)
class Order:
    """An endless stream of rows, shuffled anew in every epoch, in batches.

    An epoch in which fewer rows than a batch would remain has all rows.
    """

    count: int  # number of rows, N
    batch: int
    seed: int

    def draw(self, number: int, solved: Solved | None = None) -> tuple[Rows, Rows]:
        """Returns the rows of batch `number`, from 0, and the epoch of each."""
        solved = np.full(self.count, UNSOLVED) if solved is None else solved
        rows, epochs = np.zeros(0, int), np.zeros(0, int)
        epoch = min(number * self.batch // self.count, int(solved.min()))  # the epochs before it have all rows
        start = number * self.batch - epoch * self.count  # place of the first row, from the start of that epoch
        while len(rows) < self.batch:
            remaining = np.flatnonzero(solved > epoch)
            remaining = remaining if len(remaining) >= self.batch else np.arange(self.count)
            if start < len(remaining):
                order = remaining[np.random.default_rng((self.seed, epoch)).permutation(len(remaining))]
                rows = np.concatenate([rows, order[start : start + self.batch - len(rows)]])
                epochs = np.pad(epochs, (0, len(rows) - len(epochs)), constant_values=epoch)
            start, epoch = max(start - len(remaining), 0), epoch + 1
        return rows, epochs

    def without_solved(self, solved: Solved, scores: Mapping[int, Float[np.ndarray, "B"]], bound: float) -> Solved:
        """Leaves out the rows whose mean score is at least `bound`, from the first epoch on that has not begun.

        scores: number of a batch -> equally many scores for each of its rows, in their order. They must be the last
            batches that were drawn.
        """
        drawn = {number: self.draw(number, solved) for number in scores}
        first, solved = 1 + max(int(epochs[-1]) for _, epochs in drawn.values()), solved.copy()
        for number, (rows, _) in drawn.items():
            now = rows[scores[number].reshape(self.batch, -1).mean(axis=1) >= bound]
            solved[now] = np.minimum(solved[now], first)
        return solved
