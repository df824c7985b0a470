"""Base classes of roles with a model. They hold its weights, and offload them between calls.

Offloaded weights and optimizer states are stored in pinned memory of the host while other roles compute. An array's
sharding says whether it is on the host; there is no other record. A call copies the arrays that it needs to the devices
and frees the copies when it ends. The host's arrays remain, so only arrays that an update changed are copied back.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import optax
from jaxtyping import Array

from jrlhf.errors import UserError
from jrlhf.meshes.graph import Kind
from jrlhf.meshes.mesh import mesh_of
from jrlhf.meshes.offload import free_host, offload, onload
from jrlhf.meshes.transfers import is_on_host
from jrlhf.models.lora import base_on
from jrlhf.models.params import Params
from jrlhf.ppo.types import Rollout, TrainState
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Compute, Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.clock import Clock


class Offloader:
    """Moves a role's arrays between host and devices. The time of the moves is logged as `timing_s/sleep`.

    weights, optimizer: the parts of a trained role's state that are offloaded between its calls.
    """

    def __init__(self, clock: Clock, *, weights: bool = False, optimizer: bool = False):
        self._clock, self._weights, self._optimizer = clock, weights, optimizer
        self._prefetched: tuple[Any, Any] | None = None  # an offloaded tree, and its copy on the devices

    def prefetch(self, tree: Any) -> None:
        """Starts bringing an offloaded `tree` to the devices for the role's next call, unless this has begun, as in a
        loop of the dataflow. Does not wait; is not timed."""
        if is_on_host(tree) and (self._prefetched is None or self._prefetched[0] is not tree):
            self._prefetched = tree, onload(tree)

    def onload(self, tree: Any) -> Any:
        """Returns `tree` if it is on the devices, else a copy of it there, which is freed with its last reference."""
        return self._clock.run("sleep", self._onload, tree) if is_on_host(tree) else tree

    def consume(self, state: TrainState) -> TrainState:
        """Like `onload`, but frees the host's copy: the update donates the state."""
        return self._clock.run("sleep", self._consume, state) if is_on_host(state) else state

    def offload(self, state: TrainState) -> TrainState:
        """Returns the state with its offloaded parts on the host, until the role's next call."""
        return self._clock.run("sleep", self._offload, state) if self._weights or self._optimizer else state

    def _onload(self, tree: Any) -> Any:
        # A prefetched copy of older weights is dropped here: copies are matched by identity.
        prefetched, self._prefetched = self._prefetched, None
        return prefetched[1] if prefetched is not None and prefetched[0] is tree else onload(tree)

    def _consume(self, state: TrainState) -> TrainState:
        onloaded = jax.block_until_ready(self._onload(state))
        free_host(state)
        return onloaded

    def _offload(self, state: TrainState) -> TrainState:
        if self._optimizer:
            state = replace(state, opt_state=offload(state.opt_state))
        return replace(state, params=offload(state.params)) if self._weights else state


@dataclass(frozen=True)
class Site:
    """The devices, the settings and the services of a role's calls.

    offloader: None: nothing is offloaded.
    """

    placement: RolePlacement
    compute: Compute
    clock: Clock
    offloader: Offloader | None = None


class Role:
    """A frozen model and its calls, which the subclasses define."""

    def __init__(self, model: Model, site: Site):
        self._model, self.compute, self.clock = model, site.compute, site.clock
        self.placement, self.offloader = site.placement, site.offloader or Offloader(site.clock)

    @property
    def model(self) -> Model:
        """The model with its present weights."""
        return self._model

    def compiled(self, method: str) -> CompiledModel:
        """The compiled functions of the model on the devices of a call."""
        return self.placement[method].compiled(self._model.architecture, self.compute)

    def prefetch(self, kind: Kind) -> None:
        """Starts bringing the offloaded arrays that the next call, of this kind, needs."""
        self.offloader.prefetch(self.model.params)

    def _frozen(self, method: str) -> tuple[Params, ...]:
        """The last arguments of a call's function: the base under an adapter, on the devices of the call."""
        return tuple(base_on(base, self.placement[method].stored.mesh) for base in self._model.frozen)

    def _weights(self, method: str) -> Params:
        """The weights as a call needs them, on its devices."""
        model = self._model.holding(self.offloader.onload(self.model.params))
        return self.placement.weights(method, model, self.compute, self.clock)

    def _infer(self, method: str, function: Callable[..., Any], *rows: Array) -> Any:
        """Calls a compiled function of the model with the weights of a call, on its devices."""
        if (width := rows[0].shape[1]) > (positions := self._model.config.max_positions):
            raise UserError(
                f"{self.placement.role}.{method} reads rows of {width} tokens, and its model has {positions} "
                "positions: lower data.max_prompt or data.max_response, or give prompts.after a shorter turn"
            )
        return function(self._weights(method), *rows, *self._frozen(method))


def fresh_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state from which training starts, on the mesh of the weights."""
    # Jitted, because eager operations need devices of this process.
    with jax.set_mesh(mesh_of(jax.tree.leaves(params)[0].sharding)):
        return TrainState.create(params, optax.GradientTransformation(jax.jit(optimizer.init), optimizer.update))


class TrainedRole(Role):
    """A role whose model is trained. It is built once, without weights; `bind` gives it those of an iteration."""

    state: TrainState  # set by `bind`, replaced by `update`

    def __init__(self, model: Model, site: Site, optimizer: optax.GradientTransformation):
        super().__init__(model.holding({}), site)  # the state has the weights
        self.architecture, self.optimizer = model.architecture, optimizer

    def create(self, params: Params) -> TrainState:
        """Returns the state from which training starts, stored as between calls."""
        return self.offloader.offload(fresh_state(params, self.optimizer))

    def bind(self, state: TrainState) -> Self:
        """Returns a copy of this role for one iteration. Its updates donate `state` and replace the copy's `.state`."""
        bound = copy.copy(self)
        bound.state = state
        return bound

    def replace_state(self, state: TrainState) -> None:
        """Replaces the state by the one that updates have left."""
        self.state = state

    @property
    def model(self) -> Model:
        return self._model.holding(self.state.params)

    def prefetch(self, kind: Kind) -> None:
        self.offloader.prefetch(self.state if kind == "train" else self.state.params)

    def _train(
        self, name: str, update: Callable[..., tuple[TrainState, dict[str, Array]]], *arguments: Any
    ) -> dict[str, Array]:
        """Replaces the state by the result of `update`, timed as `name`; returns the metrics."""
        if (begin := self.placement["update"].joint) is not None:
            return begin(self, partial(update, self.state, *arguments, *self._model.frozen))
        self.state = self.offloader.consume(self.state)

        def run(*inputs: Any) -> dict[str, Array]:
            # Only the metrics are returned: the clock holds results until they are ready, and a state is large.
            self.state, metrics = update(self.state, *inputs, *self._frozen("update"))
            return metrics

        metrics = self.clock.run(name, run, *arguments)
        self.state = self.offloader.offload(self.state)
        return metrics


def responses(rollout: Rollout) -> tuple[Array, Array, Array]:
    """What functions that score responses read: tokens, lengths of the rows, and where responses begin."""
    return rollout.tokens, rollout.lengths, rollout.prompt_lengths
