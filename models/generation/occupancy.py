"""`Occupancy`: which rows of a rollout are in which slots, and the decisions between two chunks. It is on the host.

The engine follows these decisions with arrays on devices; a simulator follows them with lengths only.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
from jaxtyping import Bool, Int

from jrlhf.models.generation.schedule import Schedule

EMPTY = -1  # a slot without a row

# (prompts that enter one group's slots, slots of their samples; those of one prompt are neighbours)
Admission = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class LastRows:
    """Where the last rows decode: on `groups` groups of devices, once at most `rows` are left; None: once they fit."""

    groups: int
    rows: int | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Self | None:
        """Returns the move that a schedule asks for; None: rows stay, or a simulation chooses."""
        return cls(schedule.last_groups, schedule.last_rows) if isinstance(schedule.last_groups, int) else None

    def move(self, running: Sequence[int], waiting: bool, slots: int) -> bool:
        """True if the rows move now: no prompt waits, few enough are left, and they fit.

        running: number of rows of each group. slots: of each target group; each target group replaces equally many
        neighbouring groups.
        """
        fullest = np.reshape(running, (self.groups, -1)).sum(axis=1).max()
        return not waiting and fullest <= slots and (self.rows is None or sum(running) <= self.rows)


class SlotTable:
    """Records which row of a group of devices is in which slot, and which prompts wait.

    A row is a sample of a prompt: row prompt * samples + number.
    """

    def __init__(self, prompts: int, samples: int, slots: int):
        self.prompts, self.samples = prompts, samples
        self.waiting = deque(range(prompts))
        self.row = np.full(slots, EMPTY, np.int32)

    @property
    def occupied(self) -> Bool[np.ndarray, "slots"]:
        return self.row != EMPTY

    @property
    def running(self) -> int:
        return int(self.occupied.sum())

    @property
    def done(self) -> Bool[np.ndarray, "rows"]:
        """The rows that neither wait nor decode."""
        done = np.ones(self.prompts * self.samples, bool)
        done[self.row[self.occupied]] = False
        done.reshape(self.prompts, self.samples)[list(self.waiting)] = False
        return done

    @property
    def room(self) -> int:
        """Number of waiting prompts for which there are enough free slots."""
        return min((len(self.row) - self.running) // self.samples, len(self.waiting))

    def admit(self, most: int) -> Admission:
        """Puts at most `most` waiting prompts into free slots, all samples of a prompt together."""
        free = np.flatnonzero(~self.occupied)
        count = min(most, self.room)
        prompts = tuple(self.waiting.popleft() for _ in range(count))
        slots = free[: count * self.samples]
        self.row[slots] = [prompt * self.samples + number for prompt in prompts for number in range(self.samples)]
        return prompts, slots.tolist()

    def release(self, done: Bool[np.ndarray, "slots"]) -> None:
        """Empties the slots of rows that are done."""
        self.row[done] = EMPTY

    @classmethod
    def of_groups(cls, tables: Sequence["SlotTable"]) -> "SlotTable":
        """Returns the table of one group with the prompts and slots of all tables in turn. No prompt may wait."""
        samples, prompts = tables[0].samples, [table.prompts for table in tables]
        merged = cls(sum(prompts), samples, 0)
        merged.waiting.clear()
        firsts = np.cumsum([0, *prompts[:-1]]) * samples
        rows = [np.where(table.occupied, table.row + first, EMPTY) for table, first in zip(tables, firsts, strict=True)]
        merged.row = np.concatenate(rows).astype(np.int32)
        return merged

    def shrink(self, slots: int) -> Int[np.ndarray, "new"]:
        """Keeps this number of slots; returns the old indices of the kept ones. All rows must fit."""
        order = np.argsort(~self.occupied, kind="stable")[:slots]
        assert self.running <= slots, "a row would be lost"
        self.row = self.row[order]
        return order.astype(np.int32)


def fitting(sizes: Sequence[int], needed: int) -> int:
    """Returns the smallest of `sizes` that is at least `needed`."""
    return min(size for size in sizes if size >= needed)


class LastRowsPolicy(Protocol):
    """Chooses, before each rollout, where its last rows decode. call: the name of the call that draws.

    seconds: how long other processes wait for the one that chooses.
    """

    def before(self, call: str, *, seconds: float = 3600.0) -> LastRows | None: ...
    def after(self, call: str, lengths: Int[np.ndarray, "B"]) -> None: ...


class Occupancy:
    """The tables of all groups of devices, and their common sizes; mutable.

    counts: possible slots per group, descending. lengths: possible cache lengths, ascending. length: the present one.
    """

    def __init__(self, schedule: Schedule, tables: Sequence[SlotTable], width: int, limit: int, tensor: int):
        """tables: of the groups, of `tensor` devices each. width, limit: tokens of a prompt and of a response."""
        self.tables, self._schedule, self._sizes = tables, schedule, (width, limit, tensor)
        first, slots = tables[0], len(tables[0].row)
        self.samples, self.counts = first.samples, schedule.slot_counts(slots, tensor)
        self.lengths = schedule.cache_lengths(width, limit)
        self.waves = schedule.waves(first.prompts, slots // first.samples, width)
        self.length = self.lengths[0]

    @classmethod
    def empty(
        cls, schedule: Schedule, prompts: int, samples: int, *, groups: int, tensor: int, width: int, limit: int
    ) -> Self:
        """Returns the occupancy before the first prompt. prompts: of all groups."""
        slots = min(schedule.slots or prompts * samples, prompts * samples) // groups
        tables = [SlotTable(prompts // groups, samples, slots) for _ in range(groups)]
        return cls(schedule, tables, width, limit, tensor)

    @property
    def running(self) -> list[int]:
        """The number of rows that decode, for each group."""
        return [table.running for table in self.tables]

    @property
    def waiting(self) -> bool:
        """True if a prompt waits for slots."""
        return any(table.waiting for table in self.tables)

    @property
    def done(self) -> Bool[np.ndarray, "N"]:
        """The rows that neither wait nor decode."""
        return np.concatenate([table.done for table in self.tables])

    def admit(self) -> tuple[int, list[Admission]] | None:
        """Admits a wave of prompts in every group; returns its size, the largest that a group fills. None: no wave."""
        admits = [self._may_admit(table) for table in self.tables]
        if not any(admits):
            return None
        most = max(table.room for table in self.tables)
        wave = max((size for size in self.waves if size <= most), default=self.waves[0])
        return wave, [table.admit(wave if may else 0) for table, may in zip(self.tables, admits, strict=True)]

    def _may_admit(self, table: SlotTable) -> bool:
        """True if a wave or all waiting prompts have room; or any prompt, if otherwise no row would decode."""
        return table.room > 0 and (table.room >= min(self.waves[0], len(table.waiting)) or table.running == 0)

    def shrink(self) -> list[list[Int[np.ndarray, "new"]]]:
        """Moves the rows into fewer slots, if they fit and no prompt waits.

        Returns, for each halving, the slots that each group keeps.
        """
        if self.waiting:
            return []
        needed, now = fitting(self.counts, max(self.running)), len(self.tables[0].row)
        halvings = [count for count in self.counts if needed <= count < now]
        return [[table.shrink(count) for table in self.tables] for count in halvings]

    def moves(self, last: LastRows | None) -> bool:
        """True if the last rows move now."""
        return last is not None and last.move(self.running, self.waiting, self.counts[-1])

    def merged(self, groups: int) -> tuple[Self, list[Int[np.ndarray, "new"]]]:
        """Returns the rows on fewer groups with the smallest number of slots, and which slots of each they keep."""
        share, slots = len(self.tables) // groups, self.counts[-1]
        tables = [SlotTable.of_groups(self.tables[first * share : (first + 1) * share]) for first in range(groups)]
        places = [table.shrink(slots) for table in tables]
        merged = type(self)(replace(self._schedule, buckets=1), tables, *self._sizes)
        merged.length = self.length
        return merged, places

    def grow(self, needed: int) -> list[int]:
        """Returns the successive cache lengths until `needed` positions fit, or the maximum is reached."""
        enough = fitting(self.lengths, min(needed, self.lengths[-1]))
        longer = [length for length in self.lengths if self.length < length <= enough]
        self.length = max(self.length, enough)
        return longer
