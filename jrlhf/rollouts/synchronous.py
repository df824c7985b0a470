"""`SynchronousRollouts`: draws a rollout when the actor is called. It draws nothing ahead."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from jrlhf.data.batches import Batch
from jrlhf.data.order import Solved
from jrlhf.meshes.transfers import to_host
from jrlhf.models.generation.decoding import Generation
from jrlhf.models.generation.occupancy import LastRowsPolicy
from jrlhf.ppo.types import Rollout
from jrlhf.roles.actor import Actor
from jrlhf.roles.open_rollout import HandOut, OpenRollout


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

        def drawn(hand_out: HandOut) -> Rollout:
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
