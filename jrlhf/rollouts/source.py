"""What gives a run its batches of prompts and their rollouts."""

from typing import Any, Protocol

from jaxtyping import Array

from jrlhf.data.batches import Batch
from jrlhf.data.order import Solved
from jrlhf.ppo.types import TrainState
from jrlhf.roles.actor import Actor


class RolloutSource(Protocol):
    """Gives the iterations of a run their batches of prompts, and the actor the rollouts of these batches."""

    @property
    def ahead(self) -> "RolloutsAhead | None":
        """What is drawn before its iteration; None: the actor's present weights draw when it is called."""
        ...

    def collect(self, number: int, solved: Solved | None = None) -> Batch:
        """Returns the prompts of a batch. solved: the prompts to leave out."""
        ...

    def draw(self, actor: Actor, method: str, prompts: Batch) -> Any:
        """Returns the rollout of a call of the bound actor, which may be `Pending`."""
        ...


class RolloutsAhead(Protocol):
    """Rollouts that are drawn before their iteration. They have a state between iterations, a pytree.

    An iteration calls `start`, `RolloutSource.collect` for each batch, `publish` after its updates, and `state`.
    """

    def fresh(self, actor: Actor, trained: TrainState) -> Any:
        """Returns the state before the first iteration."""
        ...

    def start(self, state: Any, actor: Actor, trained: TrainState) -> None:
        """Begins an iteration with the state of the one before."""
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
