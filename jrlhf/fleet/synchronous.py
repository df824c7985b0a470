"""What gives the iterations of a run their batches; and `SynchronousRollouts`, to whose prompts the actor responds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from jaxtyping import Array

from jrlhf.data.batches import Batch
from jrlhf.data.order import Solved
from jrlhf.ppo.types import TrainState
from jrlhf.roles.actor import Actor
from jrlhf.run.files import Closing


class RolloutSource(AbstractContextManager, Protocol):
    """Gives iterations their batches. Its state between iterations, a pytree, is None if nothing is drawn ahead.

    An iteration calls `start`, `collect` for each batch, `publish` after its updates, and `state`.
    """

    def fresh(self, actor: Actor, trained: TrainState) -> Any:
        """Returns the state before the first iteration."""
        ...

    def start(self, state: Any, actor: Actor, trained: TrainState) -> None:
        """Begins an iteration with the state of the one before."""
        ...

    def collect(self, step: int, solved: Solved | None = None) -> Batch:
        """Returns a batch of prompts, with responses if they were drawn ahead. solved: the prompts to leave out."""
        ...

    def publish(self, actor: Actor, trained: TrainState, grad_norm: Array | float) -> None:
        """Takes the weights after the updates."""
        ...

    def state(self) -> Any:
        """Returns the present state."""
        ...

    def saved(self, state: Any) -> Any:
        """Returns what a checkpoint holds of an iteration's state."""
        ...

    def metrics(self) -> dict[str, float]: ...


class SynchronousRollouts(Closing):
    """A `RolloutSource` that draws nothing ahead. take: (number of a batch, prompts to leave out) -> its prompts."""

    def __init__(self, take: Callable[[int, Solved | None], Batch]):
        self._take = take

    def collect(self, step: int, solved: Solved | None = None) -> Batch:
        return self._take(step, solved)

    def close(self) -> None: ...

    def fresh(self, actor: Actor, trained: TrainState) -> None: ...

    def start(self, state: Any, actor: Actor, trained: TrainState) -> None: ...

    def publish(self, actor: Actor, trained: TrainState, grad_norm: Array | float) -> None: ...

    def state(self) -> None: ...

    def saved(self, state: Any) -> Any:
        return state

    def metrics(self) -> dict[str, float]:
        return {}
