"""What roles with a model have in common: weights, where they are computed with, and where they wait between calls."""

import copy
from collections.abc import Callable
from typing import Any, Self

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from jrlhf.meshes.graph import Kind
from jrlhf.models.params import Params
from jrlhf.ppo import TrainState
from jrlhf.roles.compiled import Compute
from jrlhf.roles.model import Model
from jrlhf.roles.offloading import Offloader
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.clock import Clock


class Role:
    """A frozen model and its calls, which the subclasses define.

    placement: of the role's calls; or one mesh for all of them.
    """

    def __init__(
        self,
        model: Model,
        placement: Mesh | RolePlacement,
        compute: Compute,
        clock: Clock,
        offloader: Offloader | None = None,
    ):
        self._model, self.placement, self._compute, self.clock = model, RolePlacement.of(placement), compute, clock
        self.offloader = Offloader(clock) if offloader is None else offloader

    @property
    def model(self) -> Model:
        """The model with its present weights."""
        return self._model

    def prefetch(self, kind: Kind) -> None:
        """Starts bringing the offloaded arrays that the next call, of this kind, needs."""
        self.offloader.prefetch(self.model.params)

    def _weights(self, method: str) -> Params:
        """The weights as a call needs them, on its devices."""
        model = self._model.holding(self.offloader.onload(self.model.params))
        return self.placement.weights(method, model, self._compute, self.clock)


class TrainedRole(Role):
    """A role whose model is trained. It is built once, without weights; `bind` gives it those of an iteration."""

    state: TrainState  # of a bound role; `update` replaces it

    def __init__(
        self,
        model: Model,
        placement: Mesh | RolePlacement,
        compute: Compute,
        optimizer: optax.GradientTransformation,
        clock: Clock,
        offloader: Offloader | None = None,
    ):
        super().__init__(model.holding({}), placement, compute, clock, offloader)  # the weights are the state's
        self.architecture, self.optimizer = model.architecture, optimizer

    def create(self, params: Params) -> TrainState:
        """The state from which training starts, where it is stored between calls."""
        with jax.set_mesh(self.placement.home.mesh):
            return self.offloader.offload(TrainState.create(params, self.optimizer))

    def bind(self, state: TrainState) -> Self:
        """This role with a state of its own, for one iteration. The state is used up; `.state` is the present one."""
        bound = copy.copy(self)
        bound.state = state
        return bound

    @property
    def model(self) -> Model:
        return self._model.holding(self.state.params)

    def prefetch(self, kind: Kind) -> None:
        self.offloader.prefetch(self.state if kind == "train" else self.state.params)

    def _train(
        self, name: str, update: Callable[..., tuple[TrainState, dict[str, Array]]], *arguments: Any
    ) -> dict[str, Array]:
        """Replaces the state by what `update` makes of it, timed as `name`; returns the metrics."""
        self.state = self.offloader.consume(self.state)

        def run() -> dict[str, Array]:
            # Only the metrics are returned: the clock holds results until they are ready, and a state is large.
            self.state, metrics = update(self.state, *arguments, *self._model.frozen)
            return metrics

        metrics = self.clock.run(name, run)
        self.state = self.offloader.offload(self.state)
        return metrics


def responses(rollout: Any) -> tuple[Array, Array, Array]:
    """What a model needs to score a rollout's responses: tokens, lengths, and where the responses begin."""
    return rollout.tokens, rollout.lengths, rollout.prompt_lengths
