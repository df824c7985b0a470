"""Where the calls of a run are: a plan, on the devices that there are.

A role's weights live where it is trained, or else where its first call runs. What a call elsewhere needs of them, and
what calls hand to each other, is brought by `programs.weights_at` and by a `TransferCache`.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jrlhf.meshes import GENERATE, SCORE, TRAIN, TRAIN_TP, Call, Graph, Layout, lies_elsewhere, make_mesh, transfer
from jrlhf.meshes.graph import home_of
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.offload import is_on_host
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.models.params import Params
from jrlhf.roles.compiled import Compute, is_stored_at, relocate, weights_at
from jrlhf.roles.model import Architecture, Model
from jrlhf.run.clock import Clock

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (TRAIN, TRAIN_TP, GENERATE, SCORE)}


class TransferCache:
    """Copies arrays to the meshes of the calls that read them, each once. A copy lives as long as its original."""

    def __init__(self):
        self._copies: dict[tuple[int, Mesh], jax.Array] = {}  # by the original's id, which is its own while it lives

    def bring(self, tree: Any, mesh: Mesh, clock: Clock) -> Any:
        """`tree` with all its arrays on `mesh`; what is there is not touched."""
        if not lies_elsewhere(tree, mesh):
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        wanted = [leaf for leaf in leaves if lies_elsewhere(leaf, mesh) and (id(leaf), mesh) not in self._copies]
        if wanted:
            for original, copy in zip(wanted, clock.run("transfer", transfer, wanted, mesh), strict=True):
                key = id(original), mesh
                self._copies[key] = copy
                weakref.finalize(original, self._copies.pop, key, None).atexit = False
        return treedef.unflatten([self._copies.get((id(leaf), mesh), leaf) for leaf in leaves])


@dataclass(frozen=True)
class CallPlacement:
    """Where one call runs.

    layout: how it sees its model; None: as calls of its kind do.
    parts: in which a device computes its rows.
    """

    mesh: Mesh
    layout: Layout | None = None
    parts: int = 1

    def resolve(self, architecture: Architecture, compute: Compute) -> tuple[Architecture, Mesh, Compute]:
        """What the compiled functions of a call here depend on."""
        if self.layout == GENERATE:
            architecture = replace(architecture, shared=True)
        if self.layout == TRAIN_TP:
            compute = replace(compute, train_layout=TRAIN_TP, score_layout=TRAIN_TP)
        return architecture, self.mesh, compute if self.parts == 1 else replace(compute, score_parts=self.parts)


@dataclass(frozen=True)
class RolePlacement:
    """Where the calls of one role run, by its methods' names: at `home`, where its weights live, but for `calls`.

    readers: the meshes of the calls that read what a method gives.
    """

    home: CallPlacement
    calls: Mapping[str, CallPlacement] = field(default_factory=dict)
    readers: Mapping[str, tuple[Mesh, ...]] = field(default_factory=dict)
    courier: TransferCache = field(default_factory=TransferCache)

    @classmethod
    def of(cls, where: "Mesh | RolePlacement") -> "RolePlacement":
        """Itself; or of a mesh, on which all calls run."""
        return where if isinstance(where, RolePlacement) else cls(CallPlacement(where))

    def __getitem__(self, method: str) -> CallPlacement:
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

    def resolve(self, method: str, architecture: Architecture, compute: Compute) -> tuple[Architecture, Mesh, Compute]:
        """What the compiled functions of a call depend on."""
        return self[method].resolve(architecture, compute)

    def store(self, model: Model, *, donate: bool = True) -> Model:
        """The model with its weights moved to where they are to live. donate: from where they are now they are gone.

        One that sleeps wakes up for that, and sleeps there.
        """
        architecture, mesh, _ = self.home.resolve(model.architecture, Compute())
        if is_stored_at(model, architecture, mesh):
            return model
        asleep = is_on_host(model.params)
        moved = relocate(model.onloaded(), architecture, mesh, donate=donate)
        return moved.offloaded() if asleep else moved

    def weights(self, method: str, model: Model, compute: Compute, clock: Clock) -> Params:
        """The role's weights as a call needs them: where they do not live so, a copy, which is gone after the call."""
        architecture, mesh, compute = self.resolve(method, model.architecture, compute)
        if (architecture, mesh) == (model.architecture, self.home.mesh):
            return model.params
        return clock.run("reshard", weights_at, model, architecture, mesh, compute)


def place_roles(plan: Plan, graph: Graph, devices: Sequence[Device]) -> dict[str, RolePlacement]:
    """The places of every role of a graph, and as "arithmetic" those of calls that have no model: where the actor
    trains."""
    found = {name: _place(placement, devices) for name, placement in plan.placements.items()}
    trained = home_of(graph, "actor", plan)
    assert trained is not None, "every algorithm trains an actor"
    arithmetic, courier = CallPlacement(found[trained.name].mesh), TransferCache()

    def readers(call: Call) -> tuple[Mesh, ...]:
        reading = (other for other in graph if set(call.outputs) & set(other.inputs))
        return tuple(dict.fromkeys(found.get(other.name, arithmetic).mesh for other in reading))

    def places(role: str) -> RolePlacement:
        home, own = home_of(graph, role, plan), [call for call in graph if call.role == role]
        calls = {_method(call): found[call.name] for call in own if call.name in found}
        sent = {_method(call): readers(call) for call in own}
        return RolePlacement(arithmetic if home is None else found[home.name], calls, sent, courier)

    # A learner trains the actor and, where there is one, the critic, which then has no call of its own.
    return {role: places(role) for role in dict.fromkeys(("actor", "critic", "arithmetic", *graph.roles))}


def _method(call: Call) -> str:
    return call.name.partition(".")[2]


def _place(placement: Placement, devices: Sequence[Device]) -> CallPlacement:
    chosen = devices[placement.devices.start : placement.devices.stop]
    return CallPlacement(
        make_mesh(*placement.sizes, devices=chosen), LAYOUTS[placement.layout], placement.micro_batches
    )
