"""Continuous batching: decode slots that are refilled with new prompts. The weights may change between two chunks.

If lengths differ, most rows of a single program are soon idle. Here a chunk of steps is decoded at a time. Then waiting
prompts take the slots of finished rows. Once no prompt waits, the remaining rows can move into fewer slots, and at last
to fewer groups of devices. Caches grow with the longest row. This does not affect the random numbers: a row's token t
is drawn with fold_in(row key, t). But programs of different shapes round logits differently: no test has seen another
token in float32, while near ties do differ in bfloat16. The move to fewer groups changes no bit: caches move with their
rows, and a device's program keeps its shape.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from jrlhf.meshes.mesh import AXES
from jrlhf.meshes.transfers import to_host
from jrlhf.models.collectives import check_rows
from jrlhf.models.generation.decoding import SHARED, Decoder
from jrlhf.models.generation.occupancy import EMPTY, LastRows, Occupancy, Owner, empty, entered, filled, packed, running
from jrlhf.models.generation.programs import Entering, Programs, Slots, no_keys
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.params import Params

Weights = tuple[Params, Params]  # (all weights, {}), or (base, adapter)
# (arrays, rows=None) -> the arrays on the host of every process, while the devices of other meshes may be busy. Given a
# mask of rows, the others may be zeros.
ToHosts = Callable[..., Any]


def read_rows(tree: Any, rows: Bool[np.ndarray, "slots"] | None = None) -> Any:
    """Returns arrays on the host, with all rows: `ToHosts` of a single process."""
    return to_host(tree)


@dataclass(frozen=True)
class Prompt:
    """A prompt whose `samples` rows start together. Its rows have the numbers number * samples + 0, 1, ..."""

    number: int
    tokens: Int[np.ndarray, "P"]  # right-padded
    length: int
    keys: np.ndarray  # [samples, ...]: data of one PRNG key per row


@dataclass(frozen=True)
class RowProgress:
    """A row's tokens from one chunk: those from `start` to `end` of its response.

    response: all its tokens [end], their log-probabilities [end], and whether it drew a stop token; None: it is not
        done.
    """

    row: int
    start: int
    end: int
    response: tuple[Int[np.ndarray, "end"], Float[np.ndarray, "end"], bool] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoding:
    """The state between two chunks. The programs of `ContinuousBatch` donate it.

    Arrays on the host are replaced and never changed in place, because a checkpoint may still read them.
    """

    slots: Slots
    owner: Any  # [slots]: number of the row in each slot, or EMPTY
    drawn: Any  # [slots]: number of tokens that the row drew so far


class ContinuousBatch:
    """Decode slots on a mesh, which are refilled with new prompts when rows are done.

    Mutable: its user may read `state` between two chunks, and set it if there is one cache length; `move` changes the
    mesh. There are no caches before the first prompt.

    read: copies arrays of `mesh`, or some of their rows, to the host of every process. impl: of the rows' PRNG keys.
    shares: whether processes without a device of `mesh` get the tokens of rows that are done; otherwise they get zeros.
    """

    def __init__(
        self, programs: Programs, rules: Occupancy, read: ToHosts = read_rows, impl: Any = None, *, shares: bool
    ):
        self.read, self.rules, self.programs, self.impl, self._shares = read, rules, programs, impl, shares
        self._state: Decoding | None = None  # None: fresh
        self._longest = 0  # tokens of the longest row, at most
        if rules.slots < rules.samples:
            least = -(-rules.samples * rules.groups // self.mesh.size) * self.mesh.size
            raise ValueError(
                f"{rules.samples} samples of a prompt need as many decode slots, but each of {rules.groups} groups of "
                f"devices has {rules.slots}: raise slots to {least} or more"
            )

    @classmethod
    def of_size(
        cls, decoder: Decoder, mesh: Mesh, schedule: Schedule, slots: int, width: int, read: ToHosts = read_rows
    ) -> Self:
        """Returns a batch whose states all have the same shapes.

        slots: number of slots on all devices. width: P, the width of the prompts' array.
        """
        programs, limit = Programs(decoder, mesh, schedule.chunk), decoder.sampling.max_new_tokens
        groups, samples, one_size = programs.groups, programs.samples, replace(schedule, buckets=1, lengths=1)
        check_rows(slots, mesh, AXES, "decode slots")
        room = slots // groups // samples
        rules = Occupancy(one_size, samples, room, groups, programs.tensor, slots // groups, width, limit)
        return cls(programs, rules, read, shares=True)

    def fresh(self) -> Decoding:
        """Returns the state in which all slots are empty."""
        owner = self._no_owner.ravel()
        slots = self.programs.empty(self.rules.slots, self.rules.lengths[0], self.impl)
        return Decoding(slots, owner, np.zeros_like(owner))

    @property
    def state(self) -> Decoding:
        if self._state is None:
            self._state = self.fresh()
        return self._state

    @state.setter
    def state(self, state: Decoding) -> None:
        self._state = state

    @property
    def mesh(self) -> Mesh:
        """The devices that decode."""
        return self.programs.mesh

    @property
    def owner(self) -> Owner:
        """The number of the row in each slot of each group."""
        return self._no_owner if self._state is None else self._by_group(self._state.owner)

    @property
    def _no_owner(self) -> Owner:
        return empty(self.rules.groups, self.rules.slots)

    @property
    def room(self) -> int:
        """The number of prompts for which there are enough free slots."""
        return int(self.rules.room(self.owner).sum())

    @property
    def rows(self) -> Int[np.ndarray, "n"]:
        """The numbers of the rows in the slots."""
        return self.owner[self.owner != EMPTY]

    def admit(self, weights: Weights, waiting: Sequence[Prompt]) -> Sequence[Prompt]:
        """Puts all rows of prompts into free slots, as far as the rules allow. Returns the prompts that still wait."""
        while (counts := self.rules.entering(self.owner, len(waiting))).any():
            ends = np.cumsum(counts)
            entering = [waiting[end - count : end] for count, end in zip(counts, ends, strict=True)]
            self._enter(weights, entering, self.rules.wave(counts))
            waiting = waiting[ends[-1] :]
        return waiting

    def _enter(self, weights: Weights, groups: Sequence[Sequence[Prompt]], wave: int) -> None:
        """Prefills at most `wave` prompts for each group."""
        programs, samples = self.programs, self.rules.samples
        owner, taken = entered(self.owner, [[prompt.number for prompt in own] for own in groups], samples)
        entries = [[(prompt.tokens, prompt.length, prompt.keys) for prompt in own] for own in groups]
        entering = self._put(entries, taken, self.rules.width, wave, samples)
        prefilled = programs.prefill(*weights, entering.prompts)
        programs.admit(self.state.slots, prefilled, entering)
        drawn = np.where(owner == self.owner, self._by_group(self.state.drawn), 0)
        self.state = replace(self.state, owner=owner.ravel(), drawn=drawn.ravel())
        self._longest = max(self._longest, self.rules.width)

    def decode(self, weights: Weights) -> list[RowProgress]:
        """Decodes a chunk. Returns the tokens that each row drew; rows that are done leave their slots.

        Before that the caches get as many positions as the chunk may fill.
        """
        state, positions = self.state, self.state.slots.caches[0].size
        with jax.set_mesh(self.mesh):
            for longer in self.rules.longer(positions, self._longest + self.programs.steps):
                self.programs.grow(state.slots, longer)
            slots = self.programs.chunk(*weights, state.slots)
        prompts, lengths, finished = self.read((slots.rows.prompt_lengths, slots.rows.lengths, slots.rows.finished))
        is_taken = state.owner != EMPTY
        is_done = is_taken & (finished | (lengths >= self.rules.limit))
        drawn, sent = (slots.tokens, slots.logprobs), is_done & self._shares
        tokens, logprobs = self.read(drawn, sent) if is_done.any() else (None, None)
        progress = []
        for slot in np.flatnonzero(is_taken):
            response = None
            if is_done[slot]:
                own = slot, slice(lengths[slot])  # later places have tokens of the slot's former rows
                response = tokens[own], logprobs[own], bool(finished[slot])  # type: ignore
            progress.append(RowProgress(int(state.owner[slot]), int(state.drawn[slot]), int(lengths[slot]), response))
        owner, drawn = np.where(is_done, np.int32(EMPTY), state.owner), np.where(is_taken, lengths, state.drawn)
        self.state = Decoding(slots, owner, drawn)
        self._longest = int((prompts + lengths)[is_taken & ~is_done].max(initial=0))
        return progress

    # ---- changes of sizes between two chunks

    def shrink(self) -> None:
        """Moves the rows into half as many slots, as often as they fit. Only if no prompt waits."""
        for count in self.rules.halvings(self.owner):
            self._keep(count)

    def may_move(self, last: LastRows) -> bool:
        """True if the last rows fit the devices to which they shall move, and are few enough."""
        return last.move(running(self.owner), self.rules.counts[-1])

    def move(self, fewer: Programs) -> None:
        """Moves the rows to fewer groups of devices. Each gets those of equally many neighbours, in a group's slots."""
        count = self.rules.counts[-1]
        schedule = replace(self.rules.schedule, buckets=1)  # each device's program keeps its shape
        self.rules = replace(self.rules, schedule=schedule, groups=fewer.groups, slots=count)
        self.programs = fewer
        self._keep(count)

    def _keep(self, count: int) -> None:
        """Keeps `count` slots of each group, with all rows."""
        (owner, places), state = packed(self.owner, count), self.state
        with jax.set_mesh(self.mesh):
            self.programs.take(state.slots, places)
        drawn = np.take_along_axis(self._by_group(state.drawn), places, axis=1)
        self.state = Decoding(state.slots, owner.ravel(), drawn.ravel())

    # ---- caches of new weights

    def prefill_again(self, weights: Weights, prompt_of: Callable[[int], Prompt]) -> None:
        """Recomputes the caches of all rows with new weights. prompt_of: number of a prompt -> the prompt."""
        programs, state, groups = self.programs, self.state, []
        nobody = np.zeros(state.owner.shape, bool)  # a process without a device of the mesh puts no tokens anywhere
        drawn, tokens = map(self._by_group, (state.drawn, self.read(state.slots.tokens, nobody)))
        for owner, counts, own in zip(self.owner, drawn, tokens, strict=True):
            slots = np.flatnonzero(owner != EMPTY)
            groups.append([(slot, self._whole(prompt_of, owner[slot], counts[slot], own[slot])) for slot in slots])
        sizes, width = [wave * self.rules.samples for wave in self.rules.waves], self.rules.width + self.rules.limit
        while most := max(map(len, groups)):
            size = filled(sizes, most)
            entries = [[entry for _, entry in own[:size]] for own in groups]
            slots = [[slot for slot, _ in own[:size]] for own in groups]
            entering = self._put(entries, slots, width, size, 1)
            programs.fill_caches(state.slots, programs.prefill(*weights, entering.prompts), entering)
            groups = [own[size:] for own in groups]

    def _whole(self, prompt_of: Callable[[int], Prompt], row: int, count: int, drawn: Int[np.ndarray, "R"]) -> "_Entry":
        """Returns a row's prompt and its `count` tokens so far as an entry for prefill."""
        number, sample = divmod(int(row), self.rules.samples)
        prompt = prompt_of(number)
        tokens = np.concatenate([prompt.tokens[: prompt.length], drawn[:count]])
        padded = np.pad(tokens, (0, self.rules.width + self.rules.limit - len(tokens)))
        return padded, len(tokens), prompt.keys[sample : sample + 1]

    def padding(self, wave: int) -> Entering:
        """Returns a wave without prompts, which enters no slot."""
        groups: list[list] = [[] for _ in range(self.rules.groups)]
        return self._put(groups, groups, self.rules.width, wave, self.rules.samples)

    def _by_group(self, array: Any) -> Any:
        return array.reshape(self.programs.groups, -1, *array.shape[1:])

    def _put(
        self, groups: Sequence[Sequence["_Entry"]], slots: Sequence[Collection[int]], width: int, size: int, keys: int
    ) -> Entering:
        """Puts the entries of each group on its devices, padded to `size` entries with `keys` keys each."""
        programs, past = self.programs, self.rules.slots  # padding is put into a slot past the end
        blank = np.zeros(width, np.int32), 1, no_keys(keys, impl=self.impl)
        entries = [entry for own in groups for entry in (*own, *[blank] * (size - len(own)))]
        tokens, lengths, data = (np.stack([entry[part] for entry in entries]) for part in range(3))
        slot = np.array([[*own, *[past] * (size * keys - len(own))] for own in slots], np.int32)
        tokens, lengths, slot = programs.put((tokens.astype(np.int32), lengths.astype(np.int32), slot.ravel()))
        return Entering(tokens, lengths, programs.keys(data.reshape(-1, *data.shape[2:]), SHARED, self.impl), slot)


_Entry = tuple[Int[np.ndarray, "T"], int, np.ndarray]  # (tokens, number of tokens, data of keys)
