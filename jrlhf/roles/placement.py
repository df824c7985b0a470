"""Where calls run: the devices of each call of a role, and what is brought to them.

A role's weights are stored where it is trained, or else where its first call runs. A call elsewhere gets a copy of them
(`RolePlacement.weights`), and a `TransferCache` copies what calls hand to each other.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import jax
from jax.sharding import Mesh

from jrlhf.meshes import GENERATE, SCORE, TRAIN, TRAIN_TP, Call, Graph, Layout, lies_elsewhere, make_mesh, transfer
from jrlhf.meshes.graph import Kind, home_of
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.offload import is_on_host
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.models.params import Params
from jrlhf.roles.compiled import Compute, is_stored_at, relocate, weights_at
from jrlhf.roles.model import Architecture, Model
from jrlhf.run.clock import Clock

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (TRAIN, TRAIN_TP, GENERATE, SCORE)}
CALL, CONDITION = "algorithm_call", "algorithm_loop_condition"  # attributes that the decorators set, for `trace`

T = TypeVar("T")
P = ParamSpec("P")


class Pending(Generic[T]):
    """The result of a call that has only begun. The next call that reads it waits for it."""

    def __init__(self, wait: Callable[[], T]):
        self._wait = functools.cache(wait)

    def result(self) -> T:
        """The value; waits for it the first time."""
        return self._wait()

    def on(self, mesh: Mesh) -> "Pending[T]":
        """The same, computed on `mesh` whatever the mesh of the caller."""

        def wait() -> T:
            with jax.set_mesh(mesh):
                return self.result()

        return Pending(wait)


class Scores(NamedTuple):
    """The scores of a rollout's rows or tokens. Algorithms hand them on; roles get the shaped ones."""

    shaped: jax.Array
    raw: jax.Array  # the rows' sums before they were shaped


class _Decorator(Protocol):
    @overload
    def __call__(self, method: Callable[P, Pending[T]], /) -> Callable[P, T]: ...
    @overload
    def __call__(self, method: Callable[P, T], /) -> Callable[P, T]: ...


def call(kind: Kind, *outputs: str, raw_scores: bool = False) -> _Decorator:
    """Decorates a role's method that is a call of an algorithm, and names its outputs.

    raw_scores: the method gets `Scores` as they are, and not only the shaped ones.

    The call waits for arguments that are `Pending`, and runs on the mesh of the role's `placement`, if it has one.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self, *arguments, **named):
            placement: RolePlacement | None = getattr(self, "placement", None)
            if placement is not None and placement.prefetch is not None:
                placement.prefetch.before(placement.role, method.__name__)
            ready = partial(_ready, raw_scores=raw_scores)
            arguments, named = jax.tree.map(ready, (arguments, named), is_leaf=lambda x: isinstance(x, Scores))
            if placement is None:
                return method(self, *arguments, **named)
            return placement.run(method, self, arguments, named)

        setattr(run, CALL, (kind, outputs))
        return run

    return decorate


def loop_condition(method: Callable[Concatenate[Any, P], bool]) -> Callable[Concatenate[Any, P], bool]:
    """Decorates a role's method that decides whether a loop goes on. `trace` runs the loop's body once."""
    setattr(method, CONDITION, True)
    return method


class TransferCache:
    """Copies arrays to the meshes of the calls that read them, each once. A copy lives as long as its original."""

    def __init__(self):
        self._copies: dict[tuple[int, Mesh], jax.Array] = {}  # by the original's id, which is unique while it lives

    def bring(self, tree: Any, mesh: Mesh, clock: Clock) -> Any:
        """`tree` with all its arrays on `mesh`. Arrays that are there already are not touched."""
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


class Prefetch:
    """Before each call, starts to bring the offloaded arrays that another role's next call needs.

    Not those of the same role: they would be on the devices twice, because a call's copies end with it.
    """

    def __init__(self, graph: Graph):
        calls = [call for call in graph if call.kind != "compute"]
        self._following = {earlier.name: later for earlier, later in pairwise(calls) if earlier.role != later.role}
        self._roles: Mapping[str, Any] = {}

    def bind(self, roles: Mapping[str, Any]) -> None:
        """Begins an iteration with these roles, by name."""
        self._roles = roles

    def before(self, role: str, method: str) -> None:
        """Starts to bring what the call after `role.method` needs. Does not wait."""
        following = self._following.get(f"{role}.{method}")
        if following is not None and following.role in self._roles:
            self._roles[following.role].prefetch(following.kind)


@dataclass(frozen=True)
class CallPlacement:
    """Where one call runs.

    layout: how it sees its model; None: as calls of its kind do.
    parts: the number of parts in which a device computes its rows.
    """

    mesh: Mesh
    layout: Layout | None = None
    parts: int = 1

    def resolve(self, architecture: Architecture, compute: Compute) -> tuple[Architecture, Mesh, Compute]:
        """The arguments of the compiled functions of a call here."""
        if self.layout == GENERATE:
            architecture = replace(architecture, shared=True)
        if self.layout == TRAIN_TP:
            compute = replace(compute, train_layout=TRAIN_TP, score_layout=TRAIN_TP)
        return architecture, self.mesh, compute if self.parts == 1 else replace(compute, score_parts=self.parts)


@dataclass(frozen=True)
class RolePlacement:
    """Where the calls of one role run, by method: at `home`, where its weights are stored, except for `calls`.

    readers: the meshes of the calls that read a method's results.
    role: its name in the graph, by which `prefetch` finds it.
    """

    home: CallPlacement
    calls: Mapping[str, CallPlacement] = field(default_factory=dict)
    readers: Mapping[str, tuple[Mesh, ...]] = field(default_factory=dict)
    transfers: TransferCache = field(default_factory=TransferCache)
    role: str = ""
    prefetch: Prefetch | None = None

    @classmethod
    def of(cls, placement: "Mesh | RolePlacement") -> "RolePlacement":
        """Returns a placement as it is; or that of a role whose calls all run on the given mesh."""
        return placement if isinstance(placement, RolePlacement) else cls(CallPlacement(placement))

    def __getitem__(self, method: str) -> CallPlacement:
        return self.calls.get(method, self.home)

    def run(self, method: Callable, role: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Runs a role's method on the mesh of its call."""
        mesh, clock = self[method.__name__].mesh, role.clock
        with jax.set_mesh(mesh):
            arguments, named = self.transfers.bring((arguments, named), mesh, clock)
            result = method(role, *arguments, **named)
            # Devices work in the order in which they are given work. So results are sent on at once: later they would
            # wait behind the next call on the same devices.
            for reader in self.readers.get(method.__name__, ()):
                self.transfers.bring(result, reader, clock)
        return result.on(mesh) if isinstance(result, Pending) else result

    def resolve(self, method: str, architecture: Architecture, compute: Compute) -> tuple[Architecture, Mesh, Compute]:
        """The arguments of the compiled functions of a call."""
        return self[method].resolve(architecture, compute)

    def store(self, model: Model, *, donate: bool = True) -> Model:
        """Moves a model's weights to where they are stored. donate: frees the source buffers.

        An offloaded model is brought to the devices for the move, and is offloaded again there.
        """
        architecture, mesh, _ = self.home.resolve(model.architecture, Compute())
        if is_stored_at(model, architecture, mesh):
            return model
        offloaded = is_on_host(model.params)
        moved = relocate(model.onloaded(), architecture, mesh, donate=donate)
        return moved.offloaded() if offloaded else moved

    def weights(self, method: str, model: Model, compute: Compute, clock: Clock) -> Params:
        """The role's weights as a call needs them: its own, or else a copy, which the caller drops after the call."""
        architecture, mesh, compute = self.resolve(method, model.architecture, compute)
        if (architecture, mesh) == (model.architecture, self.home.mesh):
            return model.params
        return clock.run("reshard", weights_at, model, architecture, mesh, compute)


def place_roles(
    plan: Plan, graph: Graph, devices: Sequence[Device], *, prefetch: bool = False
) -> dict[str, RolePlacement]:
    """The placement of every role of a graph. "arithmetic" is that of calls without a model: where the actor trains."""
    calls = {name: _call_placement(placement, devices) for name, placement in plan.placements.items()}
    trained = home_of(graph, "actor", plan)
    assert trained is not None, "every algorithm trains an actor"
    arithmetic, transfers = CallPlacement(calls[trained.name].mesh), TransferCache()
    ahead = Prefetch(graph) if prefetch else None

    def readers(call: Call) -> tuple[Mesh, ...]:
        reading = (other for other in graph if set(call.outputs) & set(other.inputs))
        return tuple(dict.fromkeys(calls.get(other.name, arithmetic).mesh for other in reading))

    def placement(role: str) -> RolePlacement:
        home, own = home_of(graph, role, plan), [call for call in graph if call.role == role]
        placed = {_method(call): calls[call.name] for call in own if call.name in calls}
        sent = {_method(call): readers(call) for call in own}
        return RolePlacement(arithmetic if home is None else calls[home.name], placed, sent, transfers, role, ahead)

    # The learner trains the actor and, if there is one, the critic, which then has no call of its own.
    return {role: placement(role) for role in dict.fromkeys(("actor", "critic", "arithmetic", *graph.roles))}


def _method(call: Call) -> str:
    return call.name.partition(".")[2]


def _call_placement(placement: Placement, devices: Sequence[Device]) -> CallPlacement:
    chosen = devices[placement.devices.start : placement.devices.stop]
    mesh = make_mesh(*placement.sizes, devices=chosen)
    return CallPlacement(mesh, LAYOUTS[placement.layout], placement.micro_batches)


def _ready(value: Any, raw_scores: bool) -> Any:
    value = value.result() if isinstance(value, Pending) else value
    return value.shaped if isinstance(value, Scores) and not raw_scores else value
