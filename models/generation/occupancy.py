"""`Occupancy`: the rules by which the rows of a rollout take decode slots, leave them and move, computed on the host.

The engine follows these rules with arrays on devices; a simulator follows them with lengths only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import numpy as np
from jaxtyping import Int

from jrlhf.models.generation.schedule import Schedule

EMPTY = -1  # a slot without a row

# Number of the row in each slot of each group of devices, or EMPTY. Row prompt * samples + n is sample n of a prompt.
Owner = Int[np.ndarray, "groups slots"]


@dataclass(frozen=True)
class LastRows:
    """Where the last rows decode: on `groups` groups of devices, once at most `rows` are left; None: once they fit."""

    groups: int
    rows: int | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Self | None:
        """Returns the move that a schedule asks for; None: rows stay, or a simulation chooses."""
        return cls(schedule.last_groups, schedule.last_rows) if isinstance(schedule.last_groups, int) else None

    def move(self, running: Int[np.ndarray, "groups"], slots: int) -> bool:
        """True if the rows move now: few enough are left, and they fit.

        running: number of rows of each group. slots: of each target group; each target group replaces equally many
        neighbouring groups.
        """
        fullest = running.reshape(self.groups, -1).sum(axis=1).max()
        return fullest <= slots and (self.rows is None or running.sum() <= self.rows)


class LastRowsPolicy(Protocol):
    """Chooses, before each rollout, where its last rows decode. call: the name of the call that draws.

    seconds: how long other processes wait for the one that chooses.
    """

    def before(self, call: str, *, seconds: float = 3600.0) -> LastRows | None: ...
    def after(self, call: str, lengths: Int[np.ndarray, "B"]) -> None: ...


def empty(groups: int, slots: int) -> Owner:
    """Returns the owners of slots without rows. slots: per group."""
    return np.full((groups, slots), EMPTY, np.int32)


def running(owner: Owner) -> Int[np.ndarray, "groups"]:
    """Returns the number of rows in each group's slots."""
    return (owner != EMPTY).sum(axis=1)


def entered(owner: Owner, prompts: Sequence[Sequence[int]], samples: int) -> tuple[Owner, list[Int[np.ndarray, "_"]]]:
    """Returns the owners after all rows of these prompts entered, and their slots. prompts: numbers, of each group."""
    owner, taken = owner.copy(), []
    for own, numbers in zip(owner, prompts, strict=True):
        rows = [number * samples + sample for number in numbers for sample in range(samples)]
        taken.append(np.flatnonzero(own == EMPTY)[: len(rows)])
        own[taken[-1]] = rows
    return owner, taken


def packed(owner: Owner, slots: int) -> tuple[Owner, Int[np.ndarray, "groups slots"]]:
    """Returns the owners if each group has only `slots`, and which slots it keeps: all taken ones, and free ones."""
    assert running(owner).max() <= slots, "a row would be lost"
    places = np.argsort(owner == EMPTY, axis=1, kind="stable")[:, :slots].astype(np.int32)
    return np.take_along_axis(owner, places, axis=1), places


def fitting(sizes: Sequence[int], needed: int) -> int:
    """Returns the smallest of `sizes` that is at least `needed`."""
    return min(size for size in sizes if size >= needed)


def filled(sizes: Sequence[int], count: int) -> int:
    """Returns the largest of `sizes`, which ascend, that `count` can fill; the smallest if it can fill none."""
    return max((size for size in sizes if size <= count), default=sizes[0])


@dataclass(frozen=True)
class Occupancy:
    """The rules for one number of slots.

    samples: rows of a prompt, which enter together. prompts: a group's share of the prompts, if all have room.
    groups: groups of `tensor` devices. slots: of a group, before they are halved.
    width, limit: tokens of a prompt and of a response.
    """

    schedule: Schedule
    samples: int
    prompts: int
    groups: int
    tensor: int
    slots: int
    width: int
    limit: int

    @classmethod
    def of_rollout(
        cls, schedule: Schedule, prompts: int, samples: int, *, groups: int, tensor: int, width: int, limit: int
    ) -> Self:
        """Returns the rules of a rollout of `prompts` prompts."""
        slots = schedule.slots_of(prompts * samples) // groups
        return cls(schedule, samples, prompts // groups, groups, tensor, slots, width, limit)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The possible numbers of slots per group, descending."""
        return self.schedule.slot_counts(self.slots, self.tensor)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The possible cache lengths, ascending."""
        return self.schedule.cache_lengths(self.width, self.limit)

    @cached_property
    def waves(self) -> tuple[int, ...]:
        """The numbers of prompts that a group may prefill at a time, ascending."""
        return self.schedule.waves(self.prompts, self.slots // self.samples, self.width)

    def room(self, owner: Owner) -> Int[np.ndarray, "groups"]:
        """Returns the number of prompts for which each group has enough free slots."""
        return (owner == EMPTY).sum(axis=1) // self.samples

    def entering(self, owner: Owner, waiting: int) -> Int[np.ndarray, "groups"]:
        """Returns how many of the waiting prompts each group takes in the next wave; those with most room take first.

        If not all prompts have room, a group waits until it has room for a wave, unless it has no row to decode.
        """
        room, most = self.room(owner), self.waves[-1]
        if waiting > room.sum():
            room[(room < self.waves[0]) & (running(owner) > 0)] = 0
        counts = np.zeros_like(room)
        for _ in range(min(waiting, np.minimum(room, most).sum())):
            counts[np.argmax(np.where(counts < most, room - counts, 0))] += 1
        return np.minimum(counts, self.wave(counts))

    def wave(self, counts: Int[np.ndarray, "groups"]) -> int:
        """Returns how many prompts each group prefills in a wave, with padding: as many as some group can fill."""
        return filled(self.waves, max(counts))

    def halvings(self, owner: Owner) -> tuple[int, ...]:
        """Returns the successive smaller numbers of slots into which the rows of each group fit."""
        needed = fitting(self.counts, running(owner).max())
        return tuple(count for count in self.counts if needed <= count < owner.shape[1])

    def longer(self, length: int, needed: int) -> tuple[int, ...]:
        """Returns the successive longer caches until `needed` positions fit, or the maximum is reached."""
        enough = fitting(self.lengths, min(needed, self.lengths[-1]))
        return tuple(size for size in self.lengths if length < size <= enough)
