"""The state of an asynchronous run between two iterations, and its conversion to arrays for a checkpoint."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.models.generation.continuous import Decoding, Prompt, ToHosts
from jrlhf.models.generation.occupancy import EMPTY
from jrlhf.rollouts.recompute import Row, Tracked

FREE = -1  # marks a place in `Started` without a group
NEVER = np.iinfo(np.int32).max  # completion time of a group that is not complete


DrawnRows = dict[int, tuple[np.ndarray, np.ndarray]]  # number of a row -> its tokens and log-probabilities so far


class Drawn(NamedTuple):
    """The tokens that rows have drawn so far, up to R each: S rows of a group, or the rows of several groups."""

    tokens: Int[np.ndarray, "*S R"]
    logprobs: Float[np.ndarray, "*S R"]
    versions: Int[np.ndarray, "*S R"]  # version of the weights that drew each token
    lengths: Int[np.ndarray, "*S"]  # 0 for a row that is not done
    finished: Bool[np.ndarray, "*S"]  # whether it drew a stop token

    @classmethod
    def blank(cls, *rows: int, limit: int) -> "Drawn":
        """Returns rows without tokens, to be filled in place."""
        tokens, lengths = np.zeros((*rows, limit), np.int32), np.zeros(rows, np.int32)
        return cls(tokens, tokens.astype(np.float32), tokens.copy(), lengths, lengths > 0)


@dataclass
class Group:
    """A group that has started and that no update has used yet. Its rows are changed in place while they are drawn."""

    prompt: Prompt
    worker: int  # the one that draws it
    rows: Drawn  # [S]
    time: int = NEVER  # when it was complete

    @property
    def complete(self) -> bool:
        return bool(self.rows.lengths.all())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Started:
    """The groups that have started and that no update has used yet: Q places for groups of S rows."""

    count: Any  # number of all groups that have started so far
    number: Any  # [Q]: number of the group, or FREE
    time: Any  # [Q]: time at which it was complete, or NEVER
    worker: Any  # [Q]: worker that draws it
    rows: Drawn  # [Q, S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Times:
    """Counts and virtual times, in decode steps."""

    spare: Any  # batches that were collected beyond one per version (by dynamic sampling)
    version: Any  # version of the weights that draw
    published: Any  # the newest version
    rollouts: Any  # virtual time of the rollouts; 0 in a saved state, whose times count from it
    trainer: Any  # virtual time of the trainer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FleetState:
    """All that a resumed run needs: the decode slots, the groups that started, the clock."""

    decoding: Any  # the `Decoding` of the logical worker; a tuple if there are several
    started: Started
    times: Times
    weights: Any = None  # with "finish": (weights that draw, their identity); they may be older than the trainer's
    tracked: Tracked | None = None
    rounding: Any = (np.int32(0), np.float32(0))  # `Recompute.calibration`


class Collected(NamedTuple):
    """A batch of groups, in the order of their numbers: B = groups * S rows."""

    numbers: Int[np.ndarray, "U"]
    workers: Int[np.ndarray, "U"]  # the logical workers that drew them
    rows: Drawn  # [B]
    version: int  # version of the weights that draw when the batch is collected


def collected(groups: Mapping[int, Group], version: int) -> Collected:
    """Returns the batch of these groups."""
    rows = (np.concatenate(arrays) for arrays in zip(*(group.rows for group in groups.values()), strict=True))
    workers = np.array([group.worker for group in groups.values()])
    return Collected(np.array(list(groups)), workers, Drawn(*rows), version)


def pack(count: int, groups: Mapping[int, Group], places: int, blank: Drawn, now: int) -> Started:
    """Returns the started groups as arrays of a fixed size. count: number of all groups that have started so far.

    Their times count from `now`, so they fit into an int32 however long the run is.
    """
    number, time = np.full(places, FREE, np.int32), np.full(places, NEVER, np.int32)
    worker = np.zeros(places, np.int32)
    rows = Drawn(*(np.repeat(array[None], places, axis=0) for array in blank))
    for place, (own, group) in enumerate(groups.items()):
        number[place], worker[place] = own, group.worker
        if group.complete:
            time[place] = group.time - now
        for array, values in zip(rows, group.rows, strict=True):
            array[place] = values
    return Started(np.int32(count), number, time, worker, rows)


def unpack(started: Started, prompt: Callable[[int], Prompt]) -> dict[int, Group]:
    """Returns the groups of `pack`. prompt: number of a group -> its prompt."""
    groups = {}
    for place in np.flatnonzero(started.number != FREE):
        number, rows = int(started.number[place]), Drawn(*(np.array(array[place]) for array in started.rows))
        groups[number] = Group(prompt(number), int(started.worker[place]), rows, int(started.time[place]))
    return groups


def drawn_rows(decoding: Sequence[Decoding], read: ToHosts = to_host) -> DrawnRows:
    """Returns the tokens and the log-probabilities so far of each row that decodes, by its number.

    read: copies arrays of a mesh to the host, in every process; the same below.
    """
    rows = {}
    for own in decoding:
        arrays = read((own.owner, own.drawn, own.slots.tokens, own.slots.logprobs))
        for row, count, tokens, logprobs in zip(*arrays, strict=True):
            if row != EMPTY:
                rows[int(row)] = tokens[:count], logprobs[:count]
    return rows


def rows_of(groups: Mapping[int, Group], workers: Container[int], running: DrawnRows) -> list[Row]:
    """Returns the rows of the groups that these workers draw, with their tokens so far.

    running: the tokens of rows that are not done.
    """
    rows: list[Row] = []
    for number, group in groups.items():
        prompt, drawn, samples = group.prompt, group.rows, len(group.rows.lengths)
        for sample in range(samples) if group.worker in workers else ():
            row, own = number * samples + sample, slice(drawn.lengths[sample])
            tokens, logprobs = running.get(row, (drawn.tokens[sample, own], drawn.logprobs[sample, own]))
            versions, ids = drawn.versions[sample, : len(tokens)], prompt.tokens[: prompt.length]
            rows.append(Row(row, group.worker, ids, tokens, logprobs, versions, row in running, prompt.keys[sample]))
    return rows


def saved(decoding: Decoding, mesh: Mesh) -> Decoding:
    """Returns the state of slots as arrays on devices, which a checkpoint can hold: without PRNG keys."""
    # Copied, because CPU arrays may share this host memory, which the next chunk may change.
    host = np.array(decoding.owner), np.array(decoding.drawn)
    owner, drawn = to_devices(host, NamedSharding(mesh, P()))
    return _with_keys(replace(decoding, owner=owner, drawn=drawn), jax.random.key_data)


def restored(decoding: Decoding, read: ToHosts = to_host) -> Decoding:
    """Inverts `saved`."""
    owner, drawn = jax.tree.map(np.array, read((decoding.owner, decoding.drawn)))
    return _with_keys(replace(decoding, owner=owner, drawn=drawn), jax.random.wrap_key_data)


def _with_keys(decoding: Decoding, convert: Any) -> Decoding:
    slots = decoding.slots
    rows = replace(slots.rows, keys=convert(slots.rows.keys))
    return replace(decoding, slots=replace(slots, caches=list(slots.caches), rows=rows))
