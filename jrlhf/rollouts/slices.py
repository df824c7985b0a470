"""`Workers`, the interface of a fleet to its logical workers; workers on a slice of the run's devices; their lanes."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jrlhf.models.generation.continuous import ContinuousBatch, Decoding, Prompt, RowProgress, Weights
from jrlhf.rollouts.identity import Identity, drawing_identity
from jrlhf.rollouts.recompute import Row, Tracked
from jrlhf.rollouts.state import DrawnRows, drawn_rows, restored, saved


class Workers(Protocol):
    """The logical workers of a lane, in this process or in others."""

    own_devices: bool  # True: rows decode in other processes, so a thread of this one may wait for them

    @property
    def rooms(self) -> list[int]:
        """For each worker, the number of prompts for which it has enough free slots."""
        ...

    @property
    def running(self) -> int:
        """The number of rows that decode."""
        ...

    def fresh(self) -> list[Decoding]:
        """Returns the states in which no slot is taken, in the form of `saved`."""
        ...

    def states(self) -> list[Decoding]:
        """Returns the states in the form of `saved`. The next chunk donates them. May end and start processes."""
        ...

    def drawn(self) -> DrawnRows:
        """Returns `drawn_rows` of the states. A successor of a lost process will start from these states."""
        ...

    def start(self, states: Sequence[Decoding]) -> None:
        """Continues from these states. `take` must be called before `decode`."""
        ...

    def put(self, weights: Weights) -> Any:
        """Starts the transfer of weights to the workers; returns the argument for `take`."""
        ...

    def weights(self, handle: Any) -> Weights:
        """Returns the weights that `put` got, or a copy, on devices of the trainer's process."""
        ...

    def take(self, weights: Any, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        """Makes all workers draw with these weights. Returns the identities of the old and of the new weights.

        again: by number of their group, prompts of the running rows, whose caches are to be recomputed.
        """
        ...

    def identities(self) -> list[Identity]:
        """Returns the identities of the weights that draw now."""
        ...

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[RowProgress]:
        """Puts these prompts into free slots, by worker, and decodes a chunk."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns the costs of weight transfers since the last call."""
        ...

    def close(self) -> None:
        """Ends the workers' processes and frees their weights."""
        ...


class Published(NamedTuple):
    """Weights that were published. handle: what `Workers.put` returned. saved: the weights, if a state needs them."""

    version: int
    handle: Any
    expected: Identity  # computed by the trainer from the state that a checkpoint saves
    saved: Weights | None
    updates: Any = None  # number of updates that its optimizer has applied so far


@dataclass
class Lane:
    """Workers that decode their chunks together and draw with one version.

    numbers: those of its logical workers. updates: those whose tokens are not all compared; the last one draws
    now. retired: updates that no longer draw, each with the rows until then. tracked: rows that continue with caches of
    retired weights. chunk: the chunk that it decodes. idle_since: when its last chunk ended. idle_seconds: seconds
    between chunks. decoded, decoding_seconds: decode steps since the last `metrics`, and their time.
    """

    workers: Workers
    numbers: range
    updates: list[Published] = field(default_factory=list)
    retired: list[tuple[Published, list[Row]]] = field(default_factory=list)
    tracked: Tracked | None = None
    chunk: Future | None = None
    idle_since: float = 0.0
    idle_seconds: float = 0.0
    decoded: int = 0
    decoding_seconds: float = 0.0

    @property
    def version(self) -> int:
        """The version of the weights that draw now."""
        return self.updates[-1].version


class SliceWorkers:
    """Batches of decode slots that share a mesh and weights. See `Workers`.

    A chunk is dispatched to their devices while the trainer's devices still compute the update, because JAX dispatches
    asynchronously.
    """

    own_devices = False

    def __init__(self, batches: Sequence[ContinuousBatch]):
        self.batches, self._weights = batches, None

    @property
    def rooms(self) -> list[int]:
        return [batch.room for batch in self.batches]

    @property
    def running(self) -> int:
        return sum(len(batch.rows) for batch in self.batches)

    def fresh(self) -> list[Decoding]:
        return [saved(batch.fresh(), batch.mesh) for batch in self.batches]

    def states(self) -> list[Decoding]:
        return [saved(batch.state, batch.mesh) for batch in self.batches]

    def drawn(self) -> DrawnRows:
        return drawn_rows([batch.state for batch in self.batches], self.batches[0].read)

    def start(self, states: Sequence[Decoding]) -> None:
        for batch, state in zip(self.batches, states, strict=True):
            batch.state = restored(state, batch.read)

    def put(self, weights: Weights) -> Weights:
        return weights

    def weights(self, handle: Weights) -> Weights:
        return handle

    def take(self, weights: Weights, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        old = None if self._weights is None else drawing_identity(*self._weights)
        self._weights = weights
        if again is not None:
            for batch in self.batches:
                batch.prefill_again(weights, again.__getitem__)
        return [(old, drawing_identity(*weights))]

    def identities(self) -> list[Identity]:
        assert self._weights is not None
        return [drawing_identity(*self._weights)]

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[RowProgress]:
        return [row for rows in self.decode_each(prompts) for row in rows]

    def decode_each(self, prompts: Sequence[Sequence[Prompt]]) -> list[list[RowProgress]]:
        """Does what `decode` does; returns the progress of each worker."""
        assert self._weights is not None
        progress = []
        for batch, entering in zip(self.batches, prompts, strict=True):
            if entering:
                left = batch.admit(self._weights, entering)
                assert not left, "more prompts than slots"
            progress.append(batch.decode(self._weights) if len(batch.rows) else [])
        return progress

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._weights = None
