"""Continuous batching: decode slots that are refilled with new prompts. The weights may change between two chunks.

It uses the programs of `chunks` for prefill and decoding, so the same weights draw the same rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from jrlhf.meshes.mesh import AXES
from jrlhf.meshes.transfers import to_host
from jrlhf.models.collectives import check_rows
from jrlhf.models.generation.chunks import Programs, PromptSlots, Slots, ToHosts
from jrlhf.models.generation.decoding import Decoder, Results
from jrlhf.models.generation.occupancy import EMPTY
from jrlhf.models.generation.schedule import Schedule
from jrlhf.models.params import Params

Weights = tuple[Params, Params]  # (all weights, {}), or (base, adapter)


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
    results: Results  # tokens of the row in each slot
    owner: Any  # [slots]: number of the row in each slot, or EMPTY
    drawn: Any  # [slots]: number of tokens that the row drew so far


class ContinuousBatch:
    """Decode slots on a mesh, which are refilled with new prompts when rows are done. Only `state` is mutable.

    slots: number of slots on all devices. width: P, the width of the prompts' array.
    read: copies arrays of `mesh`, or some of their rows, to the host of every process.
    """

    state: Decoding

    def __init__(
        self, decoder: Decoder, mesh: Mesh, schedule: Schedule, slots: int, width: int, read: ToHosts = read_rows
    ):
        self.mesh, self.read, limit = mesh, read, decoder.sampling.max_new_tokens
        self._programs = programs = Programs(decoder, mesh, min(schedule.chunk, limit))
        check_rows(slots, mesh, AXES, "decode slots")
        self._own, self._width, self._limit = slots // programs.groups, width, limit  # slots per group of devices
        if self._own < programs.samples:
            raise ValueError(f"slots={slots}: each of {programs.groups} groups needs {programs.samples}, raise it")
        room = self._own // programs.samples
        self._waves = schedule.waves(room, room, width)
        self._row_of = programs.per_group([np.arange(self._own, dtype=np.int32)] * programs.groups)
        self._blank = self._put([[] for _ in range(programs.groups)], width, self._waves[0], programs.samples)
        self.state = self.fresh()

    def fresh(self) -> Decoding:
        """Returns the state in which all slots are empty."""
        programs, count = self._programs, self._own * self._programs.groups
        slots = programs.empty(self._blank, self._own, self._width + self._limit)
        owner, drawn = np.full(count, EMPTY, np.int32), np.zeros(count, np.int32)
        return Decoding(slots, programs.no_results(count), owner, drawn)

    @property
    def _free(self) -> Bool[np.ndarray, "groups slots"]:
        return (self.state.owner == EMPTY).reshape(self._programs.groups, self._own)

    @property
    def room(self) -> int:
        """The number of prompts for which there are enough free slots."""
        return int((self._free.sum(axis=1) // self._programs.samples).sum())

    @property
    def rows(self) -> Int[np.ndarray, "n"]:
        """The numbers of the rows in the slots."""
        return self.state.owner[self.state.owner != EMPTY]

    def admit(self, weights: Weights, prompts: Sequence[Prompt]) -> None:
        """Puts all rows of these prompts, at most `room` of them, into free slots."""
        programs, samples, waiting, entering = self._programs, self._programs.samples, list(prompts), []
        for free in self._free.sum(axis=1) // samples:
            entering.append(waiting[:free])
            del waiting[:free]
        assert not waiting, "more prompts than slots"
        for wave, groups in _waves(entering, self._waves):
            rows = [[prompt.number * samples + number for prompt in own for number in range(samples)] for own in groups]
            slots = [np.flatnonzero(free)[: len(own)] for free, own in zip(self._free, rows, strict=True)]
            entries = [[(prompt.tokens, prompt.length, prompt.keys) for prompt in own] for own in groups]
            on_mesh = self._put(entries, self._width, wave, samples)
            admitted = programs.admitted([(range(wave), own.tolist()) for own in slots], wave, samples, self._own)
            prefilled = programs.prefill(*weights, on_mesh, admitted.prompts)
            programs.admit(self.state.slots, prefilled, on_mesh, admitted)
            taken = np.concatenate([group * self._own + own for group, own in enumerate(slots)])
            owner, drawn = np.array(self.state.owner), np.array(self.state.drawn)
            owner[taken], drawn[taken] = np.concatenate(rows), 0
            self.state = replace(self.state, owner=owner, drawn=drawn)

    def decode(self, weights: Weights) -> list[RowProgress]:
        """Decodes a chunk. Returns the tokens that each row drew; rows that are done leave their slots."""
        state = self.state
        slots, results = self._programs.chunk(*weights, state.slots, state.results, self._row_of)
        lengths, finished = self.read((slots.rows.lengths, slots.rows.finished))
        is_done = (state.owner != EMPTY) & (finished | (lengths >= self._limit))
        taken, done = np.flatnonzero(state.owner != EMPTY), np.flatnonzero(is_done)
        tokens, logprobs = self.read((results.tokens, results.logprobs), is_done) if len(done) else (None, None)
        progress = []
        for slot in taken:
            response = None
            if slot in done:
                own = slot, slice(lengths[slot])  # later places have tokens of the slot's former rows
                response = tokens[own], logprobs[own], bool(finished[slot])  # type: ignore
            progress.append(RowProgress(int(state.owner[slot]), int(state.drawn[slot]), int(lengths[slot]), response))
        owner, drawn = np.array(state.owner), np.array(state.drawn)
        owner[done], drawn[taken] = EMPTY, lengths[taken]
        self.state = Decoding(slots, results, owner, drawn)
        return progress

    def prefill_again(self, weights: Weights, prompt_of: Callable[[int], Prompt]) -> None:
        """Recomputes the caches of all rows with new weights. prompt_of: number of a prompt -> the prompt."""
        state, programs, samples = self.state, self._programs, self._programs.samples
        nobody = np.zeros(len(state.owner), bool)  # a process without a device of the mesh puts no tokens anywhere
        drawn = self.read(state.results.tokens, nobody)
        groups, width = [], self._width + self._limit
        for first in range(0, len(state.owner), self._own):
            slots = first + np.flatnonzero(state.owner[first : first + self._own] != EMPTY)
            groups.append([(slot - first, self._whole(prompt_of, int(slot), drawn[slot])) for slot in slots])
        for wave, rows in _waves(groups, [size * samples for size in self._waves]):
            entries = [[entry for _, entry in own] for own in rows]
            slots = [[slot for slot, _ in own] for own in rows]
            on_mesh = self._put(entries, width, wave, 1)
            admitted = programs.admitted([(range(wave), own) for own in slots], wave, 1, self._own)
            prefilled = programs.prefill(*weights, on_mesh, admitted.prompts)
            programs.fill_caches(state.slots, prefilled, admitted)

    def _whole(self, prompt_of: Callable[[int], Prompt], slot: int, drawn: Int[np.ndarray, "R"]) -> "_Entry":
        """Returns a row's prompt and response so far as an entry for prefill."""
        number, sample = divmod(int(self.state.owner[slot]), self._programs.samples)
        prompt, count = prompt_of(number), self.state.drawn[slot]
        tokens = np.concatenate([prompt.tokens[: prompt.length], drawn[:count]])
        padded = np.pad(tokens, (0, self._width + self._limit - len(tokens)))
        return padded, len(tokens), prompt.keys[sample : sample + 1]

    def _put(self, groups: Sequence[Sequence["_Entry"]], width: int, size: int, keys: int) -> PromptSlots:
        """Puts the entries of each group on its devices, padded to `size` entries with `keys` keys each."""
        key: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        blank = np.zeros(width, np.int32), 1, np.zeros((keys, *key.shape), key.dtype)
        entries = [entry for own in groups for entry in (*own, *[blank] * (size - len(own)))]
        tokens, lengths, data = (np.stack([entry[part] for entry in entries]) for part in range(3))
        prompts, lengths = self._programs.put((tokens, lengths.astype(np.int32)))
        row_keys = jax.random.wrap_key_data(jnp.asarray(data.reshape(-1, data.shape[-1])))
        return PromptSlots(prompts, lengths, self._programs.put(row_keys))


_Entry = tuple[Int[np.ndarray, "T"], int, np.ndarray]  # (tokens, number of tokens, data of keys)


def _waves(groups: Sequence[list], sizes: Sequence[int]) -> Iterator[tuple[int, list[list]]]:
    """Yields waves: the largest size that some group can fill, else the smallest size, and each group's entries."""
    waiting = [list(own) for own in groups]
    while most := max(map(len, waiting)):
        size = max((size for size in sizes if size <= most), default=sizes[0])
        yield size, [own[:size] for own in waiting]
        waiting = [own[size:] for own in waiting]
