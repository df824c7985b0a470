"""What gives a run its batches of prompts and their rollouts; and `SynchronousRollouts`, which draws nothing ahead."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from jrlhf.data.batches import Batch
from jrlhf.data.order import Solved
from jrlhf.meshes.transfers import to_host
from jrlhf.models.generation.decoding import Generation
from jrlhf.models.generation.occupancy import LastRowsPolicy
from jrlhf.ppo.types import Rollout, TrainState
from jrlhf.roles.actor import Actor
from jrlhf.roles.open_rollout import OpenRollout, Watch


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
    """RolloutSource that are drawn ahead. They have a state between iterations, a pytree.

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


class SynchronousRollouts:
    """Draws a rollout when the actor is called, or, if its readers get tiles, when a call first needs all rows.

    take: (number of a batch, prompts to leave out) -> its prompts.
    rows: number of rows of a tile; None: readers get all rows at once.
    moves: chooses where the last rows of an open rollout decode; None: they stay.
    """

    ahead = None

    def __init__(
        self, take: Callable[[int, Solved | None], Batch], rows: int | None = None, moves: LastRowsPolicy | None = None
    ):
        self._take, self._rows, self._moves = take, rows, moves

    def collect(self, number: int, solved: Solved | None = None) -> Batch:
        """See `RolloutSource`."""
        return self._take(number, solved)

    def draw(self, actor: Actor, method: str, prompts: Batch) -> Rollout | OpenRollout:
        """See `RolloutSource`."""
        if self._rows is None:
            return actor.sample(method, prompts)
        version = to_host(actor.state.step)  # not in `watch`: its devices may be busy then
        clock, moves, name = actor.clock, self._moves, f"actor.{method}"

        def drawn(hand_out: Watch) -> Rollout:
            def watch(done: Bool[np.ndarray, "B"], assemble: Callable[[slice], Generation], decoding: Mesh) -> None:
                clock.watch(done, assemble, decoding)
                hand_out(done, lambda rows: Rollout(**vars(assemble(rows)), version=version), decoding)

            last = None if moves is None else moves.before(name, seconds=clock.deadline)
            with jax.set_mesh(actor.placement[method].mesh):
                rollout = actor.sample(method, prompts, watch=watch, last=last, shares=True)
            if moves is not None:
                moves.after(name, to_host(rollout.response_lengths))
            return rollout

        return OpenRollout(drawn, len(prompts.examples), self._rows)
