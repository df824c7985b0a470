"""Where the calls of a run are: a plan, on the devices that there are.

A role's weights live where it is trained, or else where its first call runs. What a call elsewhere needs of them, and
what calls hand to each other, is brought by `programs.weights_at` and by a `Courier`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.meshes import GENERATE, SCORE, TRAIN, TRAIN_TP, Call, Graph, Layout, make_mesh
from jrlhf.meshes.graph import home_of
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.offload import is_on_host
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.models.params import Params
from jrlhf.roles.compiled import Compute, lies_at, relocated, weights_at
from jrlhf.roles.courier import Courier
from jrlhf.roles.model import Architecture, Model
from jrlhf.run.clock import Clock

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (TRAIN, TRAIN_TP, GENERATE, SCORE)}


@dataclass(frozen=True)
class Place:
    """Where one call runs.

    layout: how it sees its model; None: as calls of its kind do.
    parts: in which a device computes its rows.
    """

    mesh: Mesh
    layout: Layout | None = None
    parts: int = 1

    def sees(self, architecture: Architecture, compute: Compute) -> tuple[Architecture, Mesh, Compute]:
        """What the compiled functions of a call here depend on."""
        if self.layout == GENERATE:
            architecture = replace(architecture, shared=True)
        if self.layout == TRAIN_TP:
            compute = replace(compute, train_layout=TRAIN_TP, score_layout=TRAIN_TP)
        return architecture, self.mesh, compute if self.parts == 1 else replace(compute, score_parts=self.parts)


@dataclass(frozen=True)
class Places:
    """Where the calls of one role run, by its methods' names: at `home`, where its weights live, but for `calls`.

    readers: the meshes of the calls that read what a method gives.
    """

    home: Place
    calls: Mapping[str, Place] = field(default_factory=dict)
    readers: Mapping[str, tuple[Mesh, ...]] = field(default_factory=dict)
    courier: Courier = field(default_factory=Courier)

    @classmethod
    def of(cls, where: "Mesh | Places") -> "Places":
        """Itself; or of a mesh, on which all calls run."""
        return where if isinstance(where, Places) else cls(Place(where))

    def __getitem__(self, method: str) -> Place:
        return self.calls.get(method, self.home)

    def run(self, method: Callable, role: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """A role's method on the mesh of its call: brings what it is given there, and sends on what it gives."""
        mesh, clock = self[method.__name__].mesh, role.clock
        with jax.set_mesh(mesh):
            arguments, named = self.courier.bring((arguments, named), mesh, clock)
            result = method(role, *arguments, **named)
            for reader in self.readers.get(method.__name__, ()):
                self.courier.bring(result, reader, clock)
        return result

    def sees(self, method: str, architecture: Architecture, compute: Compute) -> tuple[Architecture, Mesh, Compute]:
        """What the compiled functions of a call depend on."""
        return self[method].sees(architecture, compute)

    def settled(self, model: Model, *, donate: bool = True) -> Model:
        """The model with its weights moved to where they are to live. donate: from where they are now they are gone.

        One that sleeps wakes up for that, and sleeps there.
        """
        architecture, mesh, _ = self.home.sees(model.architecture, Compute())
        if lies_at(model, architecture, mesh):
            return model
        asleep = is_on_host(model.params)
        moved = relocated(model.awake(), architecture, mesh, donate=donate)
        return moved.asleep() if asleep else moved

    def weights(self, method: str, model: Model, compute: Compute, clock: Clock) -> Params:
        """The role's weights as a call needs them: where they do not live so, a copy, which is gone after the call."""
        architecture, mesh, compute = self.sees(method, model.architecture, compute)
        if (architecture, mesh) == (model.architecture, self.home.mesh):
            return model.params
        return clock.run("reshard", weights_at, model, architecture, mesh, compute)


def places_of(plan: Plan, graph: Graph, devices: Sequence[Device]) -> dict[str, Places]:
    """The places of every role of a graph, and as "arithmetic" those of calls that have no model: where the actor
    trains."""
    found = {name: _place(placement, devices) for name, placement in plan.placements.items()}
    trained = home_of(graph, "actor", plan)
    assert trained is not None, "every algorithm trains an actor"
    arithmetic, courier = Place(found[trained.name].mesh), Courier()

    def readers(call: Call) -> tuple[Mesh, ...]:
        reading = (other for other in graph if set(call.outputs) & set(other.inputs))
        return tuple(dict.fromkeys(found.get(other.name, arithmetic).mesh for other in reading))

    def places(role: str) -> Places:
        home, own = home_of(graph, role, plan), [call for call in graph if call.role == role]
        calls = {_method(call): found[call.name] for call in own if call.name in found}
        sent = {_method(call): readers(call) for call in own}
        return Places(arithmetic if home is None else found[home.name], calls, sent, courier)

    # A learner trains the actor and, where there is one, the critic, which then has no call of its own.
    return {role: places(role) for role in dict.fromkeys(("actor", "critic", "arithmetic", *graph.roles))}


def _method(call: Call) -> str:
    return call.name.partition(".")[2]


def _place(placement: Placement, devices: Sequence[Device]) -> Place:
    chosen = devices[placement.devices.start : placement.devices.stop]
    return Place(make_mesh(*placement.sizes, devices=chosen), LAYOUTS[placement.layout], placement.micro_batches)
