"""Where the roles' weights and optimizer states are while other roles compute.

What sleeps lies in pinned memory of the host, and its sharding says so: there is no other record. A call brings what it
needs to the devices and frees that when it ends. The host keeps its own meanwhile, so that only what an update has
changed must go back.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.config.schema import SleepConfig
from jrlhf.errors import UserError
from jrlhf.meshes import Graph
from jrlhf.meshes.offload import check_host_memory, free_host, is_on_host, offload, onload
from jrlhf.planning.residency import weights_sleep
from jrlhf.ppo import TrainState
from jrlhf.run.clock import Clock


class Offloader:
    """Brings a role's arrays to the devices for its calls, and puts them to sleep. Its time is `timing_s/sleep`.

    weights, optimizer: what of a trained role's state sleeps between its calls.
    """

    def __init__(self, clock: Clock, *, weights: bool = False, optimizer: bool = False):
        self._clock, self._weights, self._optimizer = clock, weights, optimizer
        self._fetched: tuple[Any, Any] | None = None  # a tree that sleeps, and its copy on the devices

    def prefetch(self, tree: Any) -> None:
        """Begins to bring a tree that the role's next call will ask for. Without waiting, and without a time."""
        if is_on_host(tree):
            self._fetched = tree, onload(tree)

    def onload(self, tree: Any) -> Any:
        """What to compute with in place of `tree`: itself, or a copy, whose memory is free once nobody holds it."""
        return self._clock.run("sleep", self._brought, tree) if is_on_host(tree) else tree

    def consume(self, state: TrainState) -> TrainState:
        """`awake`, for an update that uses the state up: what lay on the host is freed."""
        return self._clock.run("sleep", self._taken, state) if is_on_host(state) else state

    def offload(self, state: TrainState) -> TrainState:
        """The state as it is kept until the role's next call: what sleeps is on the devices no more."""
        sleeps = self._weights or self._optimizer
        return self._clock.run("sleep", self._laid, state) if sleeps else state

    def _brought(self, tree: Any) -> Any:
        fetched, self._fetched = self._fetched, None
        return fetched[1] if fetched is not None and fetched[0] is tree else onload(tree)

    def _taken(self, state: TrainState) -> TrainState:
        awake = jax.block_until_ready(self._brought(state))
        free_host(state)
        return awake

    def _laid(self, state: TrainState) -> TrainState:
        if self._optimizer:
            state = replace(state, opt_state=offload(state.opt_state))
        return replace(state, params=offload(state.params)) if self._weights else state


def offloader_of(role: str, config: SleepConfig, clock: Clock) -> Offloader:
    """Of a role that is trained."""
    return Offloader(clock, weights=weights_sleep(role, config), optimizer=config.optimizer == "host")


def fetch_ahead(graph: Graph, roles: Mapping[str, Any]) -> None:
    """Lets every call begin with bringing what another role's next call needs of arrays that sleep.

    The same role's would be there twice: what is brought for one call is not kept for the next.
    """
    ahead: dict[str, dict[str, Callable[[], None]]] = {}
    for earlier, later in pairwise(call for call in graph if call.kind != "compute"):
        if earlier.role != later.role:
            _, _, method = earlier.name.partition(".")
            ahead.setdefault(earlier.role, {})[method] = partial(roles[later.role].prefetch, later.kind)
    for role, begins in ahead.items():
        roles[role].ahead = begins


def check_sleep(config: SleepConfig, mesh: Mesh) -> None:
    """That what is to sleep has a place.

    Raises:
        UserError: a device has no memory of its host.
    """
    asleep = [key for key in SleepConfig.SWITCHES if getattr(config, key) == "host"]
    try:
        if asleep:
            check_host_memory(mesh)
    except ValueError as error:
        raise UserError(f"sleep.{asleep[0]}=host: {error}: set it to device") from error
