"""An algorithm is a plain function over roles. Traced once with stand-ins for them, it is also a graph of calls.

So the graph that a plan is made for is the function that runs, as a jaxpr is the function that was traced.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from jrlhf.meshes import Call, Graph
from jrlhf.meshes.graph import Kind
from jrlhf.roles.placement import RolePlacement

_CALL, _CONDITION = "algorithm_call", "algorithm_loop_condition"  # what decorators note on methods


class Pending:
    """What a call will have given: asked for where the next call reads it."""

    def __init__(self, wait: Callable[[], Any]):
        self._wait = functools.cache(wait)

    def result(self) -> Any:
        """The value; waits for it the first time."""
        return self._wait()

    def on(self, mesh: Mesh) -> "Pending":
        """The same, made on `mesh`, whatever the mesh of whoever asks."""

        def wait() -> Any:
            with jax.set_mesh(mesh):
                return self.result()

        return Pending(wait)


class Scores(NamedTuple):
    """The scores of a rollout's rows or tokens. Algorithms hand them on; roles get the shaped ones."""

    shaped: Array
    raw: Array  # the rows' sums before they were shaped


def call(kind: Kind, *outputs: str, raw_scores: bool = False) -> Callable:
    """Decorates a role's method that is a call of an algorithm, and names what it returns.

    raw_scores: the method gets `Scores` as they are, and not only the shaped ones.

    When it runs, what a role's `ahead` says of the method is begun, and arguments that are `Pending` are waited for.
    Where the role has `places`, the others are brought to the call's devices, on whose mesh it runs.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self, *arguments, **named):
            if begin := getattr(self, "ahead", {}).get(method.__name__):
                begin()
            arguments = [_ready(value, raw_scores) for value in arguments]
            named = {name: _ready(value, raw_scores) for name, value in named.items()}
            placement: RolePlacement | None = getattr(self, "placement", None)
            if placement is None:
                return method(self, *arguments, **named)
            result = placement.run(method, self, arguments, named)
            return result.on(placement[method.__name__].mesh) if isinstance(result, Pending) else result

        setattr(run, _CALL, (kind, outputs))
        return run

    return decorate


def loop_condition(method: Callable) -> Callable:
    """Decorates a role's method that says whether a loop goes on. Traced, the loop's body is seen once."""
    setattr(method, _CONDITION, True)
    return method


def trace(
    algorithm: Callable, roles: Mapping[str, type], facts: Mapping[str, Any] | None = None, *, name: str | None = None
) -> Graph:
    """The calls of one iteration of `algorithm`, as the graph `name` (its own name by default).

    algorithm: a function of roles and of values. A parameter named as one of `roles` is that role; any other is an
        input of the graph, but for those in `facts`.
    roles: the class of each role, whose decorated methods are its calls.
    facts: parameters that are no values, and `role.method` for what an undecorated method answers: things that are
        known before anything runs. A role that is None here is not there.
    """
    facts, recorder, inputs = dict(facts or {}), _Recorder(), []
    arguments: dict[str, Any] = {}
    for parameter in inspect.signature(algorithm).parameters:
        if parameter in facts:
            arguments[parameter] = facts[parameter]
        elif parameter in roles:
            arguments[parameter] = _StandIn(parameter, roles[parameter], recorder, facts)
        else:
            arguments[parameter] = Value(parameter)
            inputs.append(parameter)
    algorithm(**arguments)
    return Graph(name or algorithm.__name__, tuple(inputs), tuple(recorder.calls))


class Value:
    """Stands for what a call returns while an algorithm is traced."""

    def __init__(self, name: str):
        self.name = name

    def __or__(self, other: Any) -> "Value":
        return self  # metrics of two calls as one mapping

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} has no value while the algorithm is traced: its calls may not depend on values")

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"{self.name} has no {attribute} while the algorithm is traced: only calls read values")


class _Recorder:
    def __init__(self):
        self.calls: list[Call] = []
        self._names: Counter[str] = Counter()

    def record(self, role: str, method: str, kind: Kind, outputs: tuple[str, ...], arguments: list[Any]) -> Any:
        inputs = tuple(dict.fromkeys(each.name for each in arguments if isinstance(each, Value)))
        values = tuple(Value(self._unique(name)) for name in outputs)
        name = self._unique(f"{role}.{method}")
        self.calls.append(Call(name, role, kind, inputs, tuple(value.name for value in values)))
        return values[0] if len(values) == 1 else values

    def _unique(self, name: str) -> str:
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}_{self._names[name]}"


class _StandIn:
    """A role whose calls are recorded, and not made."""

    def __init__(self, name: str, role: type, recorder: _Recorder, facts: Mapping[str, Any]):
        self._name, self._role, self._recorder, self._facts = name, role, recorder, facts
        self._asked: Counter[str] = Counter()

    def __getattr__(self, method: str) -> Any:
        if f"{self._name}.{method}" in self._facts:
            return lambda *_: self._facts[f"{self._name}.{method}"]
        found = getattr(self._role, method, None)
        if hasattr(found, _CONDITION):
            self._asked[method] += 1
            return lambda *_: self._asked[method] == 1
        if not hasattr(found, _CALL):
            calls = [name for name, each in vars(self._role).items() if hasattr(each, _CALL)]
            raise AttributeError(f"{self._name} has no call {method}: its calls are {', '.join(calls)}")
        kind, outputs = getattr(found, _CALL)
        outputs = tuple(output.format(role=self._name) for output in outputs)
        return lambda *arguments, **named: self._recorder.record(
            self._name, method, kind, outputs, [*arguments, *named.values()]
        )


def _ready(value: Any, raw_scores: bool) -> Any:
    value = value.result() if isinstance(value, Pending) else value
    return value.shaped if isinstance(value, Scores) and not raw_scores else value
