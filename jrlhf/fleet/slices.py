"""What draws for a lane of a fleet; and logical workers on a slice of this process's devices."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jrlhf.fleet.identity import Identity, drawing_identity
from jrlhf.fleet.state import DrawnRows, drawn_rows, restored, saved
from jrlhf.models.generation.continuous import ContinuousBatch, Decoding, Progress, Prompt, Weights


class Workers(Protocol):
    """The decode slots of the logical workers of a lane, wherever they are."""

    own_devices: bool  # True: rows decode in other processes, and this one may wait for them in a thread

    @property
    def rooms(self) -> list[int]:
        """For each worker, the number of prompts for all of whose rows it has free slots."""
        ...

    @property
    def running(self) -> int:
        """The number of rows that decode."""
        ...

    def fresh(self) -> list[Decoding]:
        """Returns the states in which no slot is taken, in the form of `saved`."""
        ...

    def states(self) -> list[Decoding]:
        """Returns the states in the form of `saved`. The next chunk uses them up."""
        ...

    def drawn(self) -> DrawnRows:
        """Returns `drawn_rows` of the states. A successor of a lost process goes on from here."""
        ...

    def start(self, states: Sequence[Decoding]) -> None:
        """Goes on from these states. `take` must be called before `decode`."""
        ...

    def put(self, weights: Weights) -> Any:
        """Begins to hand weights over; returns what `take` is given."""
        ...

    def weights(self, handle: Any) -> Weights:
        """Returns what `put` was given, on the devices of the trainer's process: themselves, or a copy."""
        ...

    def take(self, weights: Any, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        """Draws with these weights from now on. Returns identities of the weights before and of these.

        again: prompts of the rows that decode, by number, to compute their caches again.
        """
        ...

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[Progress]:
        """Gives slots to these prompts of each worker and decodes a chunk."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns what it took to hand weights over since the last call."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...


class SliceWorkers:
    """Batches of decode slots that share a mesh and weights. See `Workers`.

    The program hands each chunk to their devices while the trainer's still compute the update: JAX does not wait for
    either.
    """

    own_devices = False

    def __init__(self, batches: Sequence[ContinuousBatch]):
        self._batches, self._weights = batches, None

    @property
    def rooms(self) -> list[int]:
        return [batch.room for batch in self._batches]

    @property
    def running(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def fresh(self) -> list[Decoding]:
        return [saved(batch.fresh(), batch.mesh) for batch in self._batches]

    def states(self) -> list[Decoding]:
        return [saved(batch.state, batch.mesh) for batch in self._batches]

    def drawn(self) -> DrawnRows:
        return drawn_rows([batch.state for batch in self._batches])

    def start(self, states: Sequence[Decoding]) -> None:
        for batch, state in zip(self._batches, states, strict=True):
            batch.state = restored(state)

    def put(self, weights: Weights) -> Weights:
        return weights

    def weights(self, handle: Weights) -> Weights:
        return handle

    def take(self, weights: Weights, again: Mapping[int, Prompt] | None) -> list[tuple[Identity | None, Identity]]:
        old = None if self._weights is None else drawing_identity(*self._weights)
        self._weights = weights
        if again is not None:
            for batch in self._batches:
                batch.prefill_again(weights, again.__getitem__)
        return [(old, drawing_identity(*weights))]

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[Progress]:
        assert self._weights is not None
        progress = []
        for batch, entering in zip(self._batches, prompts, strict=True):
            if entering:
                batch.admit(self._weights, entering)
            if len(batch.rows):
                progress += batch.decode(self._weights)
        return progress

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._weights = None
