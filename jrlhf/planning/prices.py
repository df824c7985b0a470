"""What a plan's parts cost: the one thing that the simulator and the search ask for."""

from dataclasses import dataclass
from typing import Protocol

from jrlhf.meshes import Call
from jrlhf.meshes.plan import Placement


@dataclass(frozen=True)
class Price:
    """Of one call in one placement, on each of its devices.

    seconds: from its inputs being there to its outputs.
    resident: bytes that its role keeps there from call to call: weights, optimizer state.
    active: bytes besides, while it runs: activations, cache, weights as generation needs them.
    moved: bytes of a copy of the weights, while it runs where its role does not live.
    """

    seconds: float
    resident: float
    active: float
    moved: float = 0.0


class Prices(Protocol):
    """A role lives where it is trained, or else where its first call runs; `resident` is 0 in its other calls, and what
    roles share is in one call's."""

    def call(self, call: Call, placement: Placement) -> Price:
        """Of a call that has a model."""
        ...

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        """Seconds to bring a role's weights from where it lives to where, and as, a call needs them; 0 if they are."""
        ...

    def transfer(self, source: Placement, target: Placement) -> float:
        """Seconds to bring what one call hands to another from its devices to the other's."""
        ...

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        ...
