"""`Mixture`: the order in which the prompts of several datasets are drawn, by their weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from jrlhf.data.order import Order, Rows, Solved
from jrlhf.data.types import Source


@dataclass(frozen=True)
class Mixture(Order):
    """An `Order` of the rows of several sources, which follow each other, with epochs of each source's own.

    Every batch, and every run of batches, has rows of each source in proportion to its weight, up to a row or two. An
    epoch of a source in which fewer rows than its part of a batch would remain has all rows.
    """

    sources: tuple[Source, ...] = field(kw_only=True)

    def draw(self, number: int, solved: Solved | None = None) -> Rows:
        """Returns the rows of a batch, in which those of the sources alternate."""
        rows, times = [], []
        for own, order, start, stop in self._spans(number):
            rows.append(order.span(start, stop, None if solved is None else solved[own]) + own.start)
            times.append((np.arange(start, stop) + 0.5) / self._weights[len(times)])
        return np.concatenate(rows)[np.argsort(np.concatenate(times), kind="stable")]

    def epochs_of_sources(self, number: int, solved: Solved | None = None) -> list[list[int]]:
        """Returns the numbers of the epochs from which a batch takes rows of each source."""
        return [
            order.epochs_of_span(start, stop, None if solved is None else solved[own])
            for own, order, start, stop in self._spans(number)
        ]

    def begun(self, number: int, solved: Solved | None = None) -> dict[str, int]:
        """Returns the metrics of the epochs in which a batch begins: the earliest one, and that of each source."""
        begun = [epochs[0] for epochs in self.epochs_of_sources(number, solved)]
        named = {f"source/{own.name}/epoch": epoch for own, epoch in zip(self.sources, begun, strict=True)}
        return {"training/epoch": min(begun)} | named

    def next_epochs(self, number: int, solved: Solved) -> Solved:
        ends = [1 + epochs[-1] for epochs in self.epochs_of_sources(number, solved)]
        return np.repeat(ends, [source.count for source in self.sources]).astype(solved.dtype)

    @cached_property
    def _weights(self) -> Float[np.ndarray, "sources"]:
        return np.array([source.weight for source in self.sources])

    @cached_property
    def _orders(self) -> list[tuple[slice, Order]]:
        """The rows of each source, and their order."""
        counts = [source.count for source in self.sources]
        ends, rows_of_batch = np.cumsum(counts), np.ceil(self.batch * self._weights / self._weights.sum())
        return [
            (slice(int(end) - count, int(end)), Order(count, int(rows), self.seed, (which,)))
            for which, (count, end, rows) in enumerate(zip(counts, ends, rows_of_batch, strict=True))
        ]

    def _spans(self, number: int) -> Iterator[tuple[slice, Order, int, int]]:
        """Yields for each source its rows, their order, and the span of it that a batch takes."""
        starts, stops = (self._taken((number + after) * self.batch) for after in (0, 1))
        for (own, order), start, stop in zip(self._orders, starts.tolist(), stops.tolist(), strict=True):
            yield own, order, start, stop

    def _taken(self, rows: int) -> Int[np.ndarray, "sources"]:
        """Returns how many of the first rows of the whole stream are of each source.

        Row j of a source with weight w has the time (j + 1/2) / w, and the stream has the rows of all sources in the
        order of their times (Webster's method of apportionment). Most of them are counted at once.
        """
        weights = self._weights
        counts = np.floor(max(rows - 2 * len(weights), 0) / weights.sum() * weights + 0.5).astype(np.int64)
        for _ in range(rows - counts.sum()):
            counts[np.argmin((counts + 0.5) / weights)] += 1
        return counts
