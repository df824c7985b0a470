"""`Schedule`: settings that determine which rows decode when. They do not affect which tokens are drawn."""

from dataclasses import dataclass
from typing import Literal

from jrlhf.models.config.checks import is_count

FILLING = 2048  # tokens of a prefill; fewer would not keep an accelerator busy


@dataclass(frozen=True)
class Schedule:
    """Settings of how the rows of a rollout share the devices' decode slots.

    slots: rows that decode at a time, on all devices together; the others wait, and replace finished rows. None: all
        of them.
    chunk: decode steps between two checks for finished rows.
    buckets: number of possible numbers of slots. They are halved as rows finish, once no prompt waits.
    lengths: number of possible cache lengths, evenly spaced up to the longest possible row. Caches grow with the
        longest row, because attention reads a whole cache, however much of it is filled. On GPUs where decoding reads
        only what is filled there is one length, and no program for others.
    prefill: number of prompts that a group of devices prefills at a time. None: all of them, in one program with the
        decoding, if every row has a slot and responses fit a chunk; otherwise an eighth of what the slots hold, or
        2048 tokens while that many wait and have room.
    last_groups: the groups of devices to which the last rows move, once these groups have room for them in their
        smallest number of slots. The other devices are then free. None: rows stay. auto: by the rollouts before.
    last_rows: maximum number of rows in such a move; with more, rows stay. None: as many as fit.

    Each pair of a bucket and a length is a compiled program, and so is each of at most two numbers of prompts that are
    prefilled together. Small programs move a layer's rows between caches of these shapes.

    Raises ValueError for numbers out of range.
    """

    slots: int | None = None
    chunk: int = 64
    buckets: int = 3
    lengths: int = 3
    prefill: int | None = None
    last_groups: int | Literal["auto"] | None = None
    last_rows: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            word = value is None and getattr(Schedule, name) is None or (name, value) == ("last_groups", "auto")
            if not word and not (is_count(value) and value < 2**31):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1 and below 2**31")

    def is_one_program(self, rows: int, response: int) -> bool:
        """True if all rows share one prefill and one chunk, and so one program."""
        return (self.slots is None or self.slots >= rows) and response <= self.chunk and self.prefill is None

    def slots_of(self, rows: int) -> int:
        """Returns the number of decode slots of a rollout, on all devices together."""
        return min(self.slots or rows, rows)

    def waves(self, prompts: int, room: int, width: int) -> tuple[int, ...]:
        """The numbers of prompts of `width` tokens that a group with this room may prefill at a time, ascending."""
        few = min(self.prefill or max(1, room // 8), room)
        many = few if self.prefill else min(max(few, FILLING // width), room)
        return (many,) if many == prompts else tuple(sorted({few, many}))

    def slot_counts(self, slots: int, multiple: int) -> tuple[int, ...]:
        """The possible numbers of a group's slots, descending by halves, if they are multiples of `multiple`."""
        counts = [slots]
        while len(counts) < self.buckets and counts[-1] % (2 * multiple) == 0:
            counts.append(counts[-1] // 2)
        return tuple(counts)

    def cache_lengths(self, prompt: int, response: int) -> tuple[int, ...]:
        """The possible cache lengths in positions, ascending; the smallest holds a prompt and a chunk."""
        longest = prompt + response
        spaced = {prompt + -(-response * part // self.lengths) for part in range(1, self.lengths + 1)}
        return tuple(sorted(size for size in spaced if size >= min(prompt + self.chunk, longest)))
