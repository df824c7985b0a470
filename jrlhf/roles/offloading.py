"""Offloading: weights and optimizer states wait in pinned memory of the host while other roles compute.

An array's sharding says whether it is on the host; there is no other record. A call brings what it needs to the devices
and frees that when it ends. The host keeps its copy meanwhile, so that only what an update has changed must go back.
"""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.config.schema import SleepConfig
from jrlhf.errors import UserError
from jrlhf.meshes.offload import check_host_memory, free_host, is_on_host, offload, onload
from jrlhf.planning.memory import weights_sleep
from jrlhf.ppo import TrainState
from jrlhf.run.clock import Clock


class Offloader:
    """Moves a role's arrays between host and devices. The time that this takes is `timing_s/sleep`.

    weights, optimizer: the parts of a trained role's state that are offloaded between its calls.
    """

    def __init__(self, clock: Clock, *, weights: bool = False, optimizer: bool = False):
        self._clock, self._weights, self._optimizer = clock, weights, optimizer
        self._prefetched: tuple[Any, Any] | None = None  # an offloaded tree, and its copy on the devices

    def prefetch(self, tree: Any) -> None:
        """Starts bringing an offloaded `tree` to the devices for the role's next call. Does not wait; is not timed."""
        if is_on_host(tree):
            self._prefetched = tree, onload(tree)

    def onload(self, tree: Any) -> Any:
        """`tree` on the devices: itself, or a copy, whose memory is free as soon as nobody holds it."""
        return self._clock.run("sleep", self._onload, tree) if is_on_host(tree) else tree

    def consume(self, state: TrainState) -> TrainState:
        """Like `onload`, but frees the host's copy: the update donates the state."""
        return self._clock.run("sleep", self._consume, state) if is_on_host(state) else state

    def offload(self, state: TrainState) -> TrainState:
        """The state as it is stored until the role's next call."""
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


def offloader_of(role: str, config: SleepConfig, clock: Clock) -> Offloader:
    """The offloader of a trained role."""
    return Offloader(clock, weights=weights_sleep(role, config), optimizer=config.optimizer == "host")


def check_sleep(config: SleepConfig, mesh: Mesh) -> None:
    """Checks that the devices have host memory to offload to."""
    offloaded = [key for key in SleepConfig.SWITCHES if getattr(config, key) == "host"]
    try:
        if offloaded:
            check_host_memory(mesh)
    except ValueError as error:
        raise UserError(f"sleep.{offloaded[0]}=host: {error}: set it to device") from error
