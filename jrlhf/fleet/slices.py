"""Logical workers on a slice of this process's devices."""

from collections.abc import Mapping, Sequence

from jrlhf.fleet.identity import Identity, drawing_identity
from jrlhf.fleet.state import restored, saved
from jrlhf.models.generation.continuous import ContinuousBatch, Decoding, Progress, Prompt, Weights


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
