"""Placement of calls: the devices on which each call of a role runs, and the copies that are brought to them.

A role's weights are stored where it is trained, or else where its first call runs. A call elsewhere gets a copy of them
(`RolePlacement.weights`), and a `TransferCache` copies what calls hand to each other.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, overload

import jax
from jax.sharding import Mesh

from jrlhf.meshes.graph import Kind, method_of
from jrlhf.meshes.layout import GENERATE, TRAIN_TP, Layout
from jrlhf.meshes.transfers import is_on_host, lies_elsewhere, transfer
from jrlhf.models.params import Params
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Architecture, Compute, Model, relocate, weights_at
from jrlhf.run.clock import Clock, calling, present_call

CALL, CONDITION = "algorithm_call", "algorithm_loop_condition"  # attributes that the decorators set, for `trace`

T = TypeVar("T")
P = ParamSpec("P")


class Pending(Generic[T]):
    """The result of a call that has only begun. The next call that reads it waits for it.

    wait: computes the result. It sets the mesh that it needs, because any call may be the one that waits.
    """

    def __init__(self, wait: Callable[[], T]):
        self._wait, self._outcome, self._call = [wait], Future[T](), present_call()

    @property
    def waits(self) -> bool:
        """True until `result` is called."""
        return bool(self._wait)

    def result(self) -> T:
        """The value, or the error; waits for it the first time."""
        if self._wait:
            wait = self._wait.pop()
            try:
                with calling(self._call):
                    self._outcome.set_result(wait())
            except BaseException as error:
                self._outcome.set_exception(error)
        return self._outcome.result()

    def by_rows(self, function: Callable[[T], Any], mesh: Mesh, outputs: int = 1) -> Any:
        """Applies `function` on `mesh`. It treats rows independently, so it may be called for some rows at a time."""
        return function(self.result())


class _Decorator(Protocol):
    @overload
    def __call__(self, method: Callable[P, Pending[T]], /) -> Callable[P, T]: ...
    @overload
    def __call__(self, method: Callable[P, T], /) -> Callable[P, T]: ...


def call(kind: Kind, *outputs: str, rows: Literal["all", "each", "open"] = "all") -> _Decorator:
    """Decorates a role's method that an algorithm calls, and names its outputs. The role's `placement` runs it.

    rows: "all": the call waits for `Pending` arguments. "each": it treats rows independently, and may be called for
        some at a time. "open": it gets `Pending` values.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self, *arguments, **named):
            placement: RolePlacement = self.placement
            name = placement.begin_call(method.__name__)
            if rows == "each" and arguments and isinstance(arguments[0], Pending):
                prefetch = functools.cache(placement.prefetch_after)

                def run_tile(tile):
                    prefetch(name)  # with the first tile; cached for the others
                    with calling(f"{placement.role}.{name}"):
                        return placement.run(name, method, self, (tile, *arguments[1:]), named)

                return arguments[0].by_rows(run_tile, placement[name].mesh, len(outputs))
            placement.prefetch_after(name)
            if rows != "open":
                arguments, named = jax.tree.map(ready, (arguments, named))
            with calling(f"{placement.role}.{name}"):
                return placement.run(name, method, self, arguments, named)

        setattr(run, CALL, (kind, outputs))
        return run

    return decorate


def loop_condition(method: Callable[Concatenate[Any, P], bool]) -> Callable[Concatenate[Any, P], bool]:
    """Decorates a role's method that decides whether a loop goes on. `trace` runs the loop's body once."""
    setattr(method, CONDITION, True)
    return method


class TransferCache:
    """Copies arrays to the meshes of the calls that read them, each once. A copy lives as long as its original."""

    # The originals are results that a dataflow holds by its own names. Nobody else knows when it drops one of them, so
    # no owner could free the copies, and a finalizer of the original does.
    def __init__(self):
        self._copies: dict[tuple[int, Mesh], jax.Array] = {}  # by the original's id, which is unique while it lives

    def bring(self, tree: Any, mesh: Mesh, clock: Clock) -> Any:
        """Returns `tree` with all its arrays on `mesh`. Arrays that are on it already are not copied."""
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
    """The mesh of one call, and how its model is stored there.

    layout: the layout of its model's weights; None: the default of this kind of call.
    parts: the number of parts in which a device computes its rows.
    joint: (bound role, what begins its updates) -> pending metrics; set where the updates of two roles run together.
    """

    mesh: Mesh
    layout: Layout | None = None
    parts: int = 1
    joint: Callable[..., Any] | None = None

    @property
    def stored(self) -> "CallPlacement":
        """The placement of the weights between calls."""
        return self

    def compiled(self, architecture: Architecture, compute: Compute) -> CompiledModel:
        """The compiled functions of a model's calls here."""
        if self.layout == GENERATE:
            architecture = replace(architecture, shared=True)
        if self.layout == TRAIN_TP:
            compute = replace(compute, train_layout=TRAIN_TP, score_layout=TRAIN_TP)
        compute = compute if self.parts == 1 else replace(compute, score_parts=self.parts)
        return CompiledModel(architecture, self.mesh, compute)


@dataclass(frozen=True)
class RolePlacement:
    """The placement of each call of a role: its entry in `calls`, else `home`, where the weights are stored.

    calls: by method; those of a method's second call are by `METHOD_2`, and so on.
    readers: the meshes of the calls that read a call's results.
    role: its name in the graph, by which `prefetch` finds it.
    begun: number of calls that an iteration has made of each method that it calls more than once.
    """

    home: CallPlacement
    calls: Mapping[str, CallPlacement] = field(default_factory=dict)
    readers: Mapping[str, tuple[Mesh, ...]] = field(default_factory=dict)
    transfers: TransferCache = field(default_factory=TransferCache)
    role: str = ""
    prefetch: Any = None  # a `Prefetch` or None
    begun: Counter[str] = field(default_factory=Counter, compare=False)

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        """Returns the placement of a role whose calls all run on one mesh."""
        return cls(CallPlacement(mesh))

    def __getitem__(self, method: str) -> CallPlacement:
        """The placement of a method: within a call of it, that of the call."""
        return self.calls.get(self.call_of(method), self.home)

    def call_of(self, method: str) -> str:
        """The name of the present call, if it is one of this method; else the method."""
        role, _, present = present_call().partition(".")
        return present if role == self.role and method_of(present) == method else method

    def begin_call(self, method: str) -> str:
        """Returns the name of the next call of a method in this iteration, which `Roles.bind` begins."""
        if f"{method}_2" not in self.readers:
            return method
        self.begun[method] += 1
        return method if self.begun[method] == 1 else f"{method}_{self.begun[method]}"

    def prefetch_after(self, name: str) -> None:
        """Starts to copy offloaded weights that the next call in the graph needs."""
        if self.prefetch is not None:
            self.prefetch.before(self.role, name)

    def run(self, name: str, method: Callable, role: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Runs the call `name` of a role's method on its mesh."""
        mesh, clock = self[name].mesh, role.clock
        with jax.set_mesh(mesh):
            arguments, named = self.transfers.bring((arguments, named), mesh, clock)
            result = method(role, *arguments, **named)
            # Devices work in the order in which they are given work. So results are sent on at once: later they would
            # wait behind the next call on the same devices.
            for reader in self.readers.get(name, ()):
                self.transfers.bring(result, reader, clock)
        return result

    def store(self, model: Model, *, donate: bool = True) -> Model:
        """Moves a model's weights to where they are stored. donate: frees the source buffers.

        An offloaded model is brought to the devices for the move, and is offloaded again there.
        """
        target = self.home.compiled(model.architecture, Compute())
        if model.is_stored_at(target.architecture, target.mesh):
            return model
        offloaded = is_on_host(model.params)
        moved = relocate(model.onloaded(), target.architecture, target.mesh, donate=donate)
        return moved.offloaded() if offloaded else moved

    def weights(self, method: str, model: Model, compute: Compute, clock: Clock) -> Params:
        """Returns the weights as a call needs them: the role's own, or a copy, which the caller drops afterwards."""
        target = self[method].stored.compiled(model.architecture, compute)
        if model.is_stored_at(target.architecture, target.mesh):
            return model.params
        return clock.run("reshard", weights_at, model, target.architecture, target.mesh, target.compute)


def ready(value: Any) -> Any:
    """Returns a value; waits for it if it is `Pending`."""
    return value.result() if isinstance(value, Pending) else value
