"""`SynchronousRollouts`: gives the iterations of a synchronous run batches of prompts, to which the actor responds."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from jrlhf.data.batches import Batch
from jrlhf.data.order import Solved
from jrlhf.fleet.state import FleetState
from jrlhf.ppo.types import TrainState
from jrlhf.roles.actor import Actor
from jrlhf.run.files import Closing


class SynchronousRollouts(Closing):
    """Has the methods of `AsynchronousRollouts`. Nothing is drawn ahead, so there is no state between iterations.

    take: (number of a batch, the prompts that are left out) -> its prompts.
    """

    def __init__(self, take: Callable[[int, Solved | None], Batch]):
        self._take = take

    def collect(self, step: int, solved: Solved | None = None) -> Batch:
        """Returns the prompts of a batch."""
        return self._take(step, solved)

    def close(self) -> None: ...

    def fresh(self, actor: Actor, trained: TrainState) -> None: ...

    def start(self, state: FleetState | None, actor: Actor, trained: TrainState) -> None: ...

    def publish(self, actor: Actor, trained: TrainState, grad_norm: Array | float) -> None: ...

    def state(self) -> None: ...

    def saved(self, state: Any) -> Any:
        return state

    def metrics(self) -> dict[str, float]:
        return {}
