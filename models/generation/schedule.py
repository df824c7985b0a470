"""Which rows decode when: pure bookkeeping on the host. Nothing here decides what is drawn."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

EMPTY = -1  # a slot without a row
FILLING = 2048  # tokens: a prefill of fewer would leave an accelerator's arithmetic idle


@dataclass(frozen=True)
class Schedule:
    """How the rows of a rollout share the devices' decode slots.

    slots: rows that decode at a time, over all devices; the others wait, and take the place of rows that are done.
        None: all of them.
    chunk: steps between two looks at which rows are done.
    buckets: once nothing waits, the slots are halved as rows finish; so many sizes exist, the first included.
    lengths: the caches grow with the longest row; so many sizes exist, evenly spaced, the last being the longest row's.
        Attention reads a whole cache, however much of it is filled.
    prefill: prompts that a group of devices prefills at a time. None: all of them, in one program with the decoding,
        where every row has a slot and responses fit a chunk; else an eighth of what the slots hold, or, while so many
        wait and have room, 2048 tokens.

    Every pair of a bucket and a length is a compiled program, and so is every number of prompts prefilled together, of
    which there are at most two. Small ones move a layer's rows between caches of these shapes.

    Raises:
        ValueError: a number below 1.
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
        """Whether all rows go together, through one prefill and one chunk."""
        return (self.slots is None or self.slots >= rows) and response <= self.chunk and self.prefill is None

    def waves(self, prompts: int, room: int, width: int) -> tuple[int, ...]:
        """How many of its prompts, of `width` tokens, a group with room for some of them prefills at a time, rising."""
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
        """Gives free slots to at most so many waiting prompts, all samples of a prompt together."""
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
        """Keeps so many slots; returns which of the old ones they were. Every row must have a place."""
        order = np.argsort(~self.occupied, kind="stable")[:slots]
        assert self.running <= slots, "a row would be lost"
        self.row = self.row[order]
        return order.astype(np.int32)


def fitting(sizes: Sequence[int], needed: int) -> int:
    """The least of `sizes` that is at least `needed`."""
    return min(size for size in sizes if size >= needed)
