"""The state of an asynchronous run between two iterations, and its conversion to arrays for a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from jrlhf.fleet.recompute import Tracked
from jrlhf.fleet.schedule import Groups
from jrlhf.meshes import to_devices, to_host
from jrlhf.models.generation.chunks import EMPTY, Slots
from jrlhf.models.generation.continuous import Decoding

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
    rollouts: Any  # virtual time of the rollouts
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


class Collected(NamedTuple):
    """A batch of groups, in the order of their numbers: B = groups * S rows."""

    numbers: Int[np.ndarray, "U"]
    rows: Drawn  # [B]
    version: int  # version of the weights that draw when the batch is collected


def collected(numbers: Sequence[int], drawn: Mapping[int, Drawn], version: int) -> Collected:
    """Returns the batch of these groups."""
    rows = Drawn(*(np.concatenate(arrays) for arrays in zip(*(drawn[number] for number in numbers), strict=True)))
    return Collected(np.array(numbers), rows, version)


def pack(
    groups: Groups[int], drawn: Mapping[int, Drawn], worker: Mapping[int, int], places: int, blank: Drawn
) -> Started:
    """Returns the started groups as arrays of a fixed size. worker: number of a group -> worker that draws it."""
    number, time = np.full(places, FREE, np.int32), np.full(places, NEVER, np.int32)
    workers = np.zeros(places, np.int32)
    rows = Drawn(*(np.repeat(array[None], places, axis=0) for array in blank))
    times = {complete: at for at, complete in groups.complete}
    for place, (group, own) in enumerate(drawn.items()):
        number[place], time[place], workers[place] = group, times.get(group, NEVER), worker[group]
        for array, values in zip(rows, own, strict=True):
            array[place] = values
    return Started(np.int32(groups.started), number, time, workers, rows)


def unpack(started: Started) -> tuple[Groups[int], dict[int, Drawn], dict[int, int]]:
    """Inverts `pack`."""
    groups, drawn, worker = Groups[int](int(started.count)), {}, {}
    for place in np.flatnonzero(started.number != FREE):
        number, time = int(started.number[place]), int(started.time[place])
        worker[number] = int(started.worker[place])
        drawn[number] = own = Drawn(*(np.array(array[place]) for array in started.rows))
        if time == NEVER:
            groups.unfinished[number] = int((own.lengths == 0).sum())
        else:
            groups.complete.append((time, number))
    return groups, drawn, worker


def drawn_rows(decoding: Sequence[Decoding]) -> DrawnRows:
    """Returns the tokens and the log-probabilities so far of each row that decodes, by its number."""
    rows = {}
    for own in to_host([(d.owner, d.drawn, d.results.tokens, d.results.logprobs) for d in decoding]):
        for row, count, tokens, logprobs in zip(*own, strict=True):
            if row != EMPTY:
                rows[int(row)] = tokens[:count], logprobs[:count]
    return rows


def saved(decoding: Decoding, mesh: Mesh) -> Decoding:
    """Returns the state of slots as arrays on devices, which a checkpoint can hold: without PRNG keys."""
    # Copied, because CPU arrays may share this host memory, which the next chunk may change.
    host = np.array(decoding.owner), np.array(decoding.drawn)
    owner, drawn = to_devices(host, NamedSharding(mesh, P()))
    return _with_keys(replace(decoding, owner=owner, drawn=drawn), jax.random.key_data)


def restored(decoding: Decoding) -> Decoding:
    """Inverts `saved`."""
    owner, drawn = jax.tree.map(np.array, to_host((decoding.owner, decoding.drawn)))
    return _with_keys(replace(decoding, owner=owner, drawn=drawn), jax.random.wrap_key_data)


def _with_keys(decoding: Decoding, convert: Any) -> Decoding:
    slots = decoding.slots
    rows = replace(slots.rows, keys=convert(slots.rows.keys))
    return replace(decoding, slots=Slots(list(slots.caches), rows))
