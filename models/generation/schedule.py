"""Decides which rows decode when: bookkeeping on the host. Nothing here decides which tokens are drawn."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

EMPTY = -1  # a slot without a row
FILLING = 2048  # tokens: a prefill of fewer would not keep an accelerator busy


@dataclass(frozen=True)
class Schedule:
    """How the rows of a rollout share the devices' decode slots.

    slots: rows that decode at a time, over all devices; the others wait, and take the place of rows that are done.
        None: all of them.
    chunk: steps between two looks at which rows are done.
    buckets: number of sizes that the slots may have. They are halved as rows finish, once no prompt waits.
    lengths: number of sizes that the caches may have, evenly spaced up to the longest possible row. They grow with the
        longest row; attention reads a whole cache, however much of it is filled.
    prefill: number of prompts that a group of devices prefills at a time. None: all of them, in one program with the
        decoding, if every row has a slot and responses fit a chunk; otherwise an eighth of what the slots hold, or
        2048 tokens while that many wait and have room.

    Every pair of a bucket and a length is a compiled program, and so is every number of prompts prefilled together, of
    which there are at most two. Small programs move a layer's rows between caches of these shapes.
    """

    slots: int | None = None
    chunk: int = 64
    buckets: int = 3
    lengths: int = 3
    prefill: int | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "chunk", "buckets", "lengths", "prefill"):
            value = getattr(self, name)
            optional = value is None and name in ("slots", "prefill")
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")

    def is_one_program(self, rows: int, response: int) -> bool:
        """Whether all rows share one prefill and one chunk, and so one program."""
        return (self.slots is None or self.slots >= rows) and response <= self.chunk and self.prefill is None

    def waves(self, prompts: int, room: int, width: int) -> tuple[int, ...]:
        """The numbers of prompts of `width` tokens that a group with this room prefills at a time, rising."""
        few = min(self.prefill or max(1, room // 8), room)
        many = few if self.prefill else min(max(few, FILLING // width), room)
        return (many,) if many == prompts else tuple(sorted({few, many}))

    def slot_counts(self, slots: int, multiple: int) -> tuple[int, ...]:
        """The sizes of a group's slots, falling: halves, as long as they are whole multiples of `multiple`."""
        counts = [slots]
        while len(counts) < self.buckets and counts[-1] % (2 * multiple) == 0:
            counts.append(counts[-1] // 2)
        return tuple(counts)

    def cache_lengths(self, prompt: int, response: int) -> tuple[int, ...]:
        """Positions of the caches, rising; the least holds a prompt and a chunk."""
        longest = prompt + response
        spaced = {prompt + -(-response * part // self.lengths) for part in range(1, self.lengths + 1)}
        return tuple(sorted(size for size in spaced if size >= min(prompt + self.chunk, longest)))


@dataclass(frozen=True)
class Admission:
    """Prompts that enter one group's slots: which prompt, and which slot each of its samples takes."""

    prompts: tuple[int, ...]
    slots: tuple[int, ...]  # a prompt's after one another


class Table:
    """Which row of a group of devices is in which of its slots, and which prompts wait.

    A row is a sample of a prompt: row prompt * samples + number.
    """

    def __init__(self, prompts: int, samples: int, slots: int):
        self.samples = samples
        self.waiting = deque(range(prompts))
        self.row = np.full(slots, EMPTY, np.int32)

    @property
    def occupied(self) -> Bool[np.ndarray, "slots"]:
        return self.row != EMPTY

    @property
    def running(self) -> int:
        return int(self.occupied.sum())

    @property
    def room(self) -> int:
        """Waiting prompts for all of whose samples there are free slots."""
        return min((len(self.row) - self.running) // self.samples, len(self.waiting))

    def admit(self, most: int) -> Admission:
        """Gives free slots to at most `most` waiting prompts, all samples of a prompt together."""
        free = np.flatnonzero(~self.occupied)
        count = min(most, self.room)
        prompts = tuple(self.waiting.popleft() for _ in range(count))
        slots = free[: count * self.samples]
        self.row[slots] = [prompt * self.samples + number for prompt in prompts for number in range(self.samples)]
        return Admission(prompts, tuple(slots))

    def release(self, done: Bool[np.ndarray, "slots"]) -> None:
        """Empties the slots of rows that are done."""
        self.row[done] = EMPTY

    def shrink(self, slots: int) -> Int[np.ndarray, "new"]:
        """Keeps this number of slots; returns the old indices of the kept ones. Every row must have a place."""
        order = np.argsort(~self.occupied, kind="stable")[:slots]
        assert self.running <= slots, "a row would be lost"
        self.row = self.row[order]
        return order.astype(np.int32)


def fitting(sizes: Sequence[int], needed: int) -> int:
    """The least of `sizes` that is at least `needed`."""
    return min(size for size in sizes if size >= needed)
