"""Traces an algorithm, a plain function over roles, to a graph of calls, as JAX traces a function to a jaxpr.

So a plan is always made for the calls that really run.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrlhf.meshes.graph import Call, Graph, Kind, method_of
from jrlhf.meshes.plan import Plan
from jrlhf.roles.placement import CALL, CONDITION

LEARNER = "learner"  # the role that trains actor and critic in one program; their weights are stored where it runs
LEARNED = ("actor", "critic")
TURN = 32  # tokens that a chat template writes around a message, at most; most write about ten


def trace(
    algorithm: Callable,
    roles: Mapping[str, type],
    facts: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    watched: Mapping[str, Callable[..., None]] | None = None,
) -> Graph:
    """Returns the graph of the calls of one iteration of `algorithm`. name: of the graph; None: the function's.

    algorithm: a function of roles and of values. A parameter with the name of one of `roles` is that role; any other is
        an input of the graph, except for those in `facts`.
    roles: the class of each role, whose decorated methods are its calls.
    facts: values of parameters, and results of undecorated methods (key `role.method`), that are known before a run.
        The value None of a role means that there is no such role.
    watched: `role.method` -> function that gets the arguments of this call.
    """
    facts, recorder, inputs = dict(facts or {}), _Recorder(watched or {}), []
    arguments: dict[str, Any] = {}
    for parameter in inspect.signature(algorithm).parameters:
        if parameter in facts:
            arguments[parameter] = facts[parameter]
        elif parameter in roles:
            arguments[parameter] = _StandIn(parameter, roles[parameter], recorder, facts)
        else:
            arguments[parameter] = recorder.value(parameter)
            inputs.append(parameter)
    algorithm(**arguments)
    return Graph(name or algorithm.__name__, tuple(inputs), tuple(recorder.calls), (*recorder.continued.values(),))


def home_of(graph: Graph, role: str, plan: Plan | None = None) -> Call | None:
    """Returns the call in whose placement a role's weights are stored: the one that trains them, or else the role's
    first call. None: the role has no call.

    plan: ignores calls that it does not place. Among calls that do not train, prefers one with stacked layers, because
        these can be unstacked for generation.
    """
    if role in LEARNED and LEARNER in graph.roles:
        role = LEARNER
    own = [call for call in graph if call.role == role and (plan is None or call.name in plan.placements)]
    own.sort(key=lambda call: (call.kind != "train", plan is not None and plan[call.name].layout == "generate"))
    return own[0] if own else None


class Value:
    """Stands for the result of a call while an algorithm is traced."""

    def __init__(self, name: str):
        self.name = name

    def __or__(self, other: Any) -> "Value":
        return self  # metrics of two calls as one mapping

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} has no value while the algorithm is traced: its calls may not depend on values")

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"{self.name} has no {attribute} while the algorithm is traced: only calls read values")


class PromptsValue(Value):
    """Stands for a `Batch` while an algorithm is traced."""

    def __init__(self, name: str, recorder: "_Recorder"):
        super().__init__(name)
        self._recorder = recorder

    def after(self, rollout: Any, turn: Any) -> Any:
        """See `Batch.after`."""
        texts = [turn] if isinstance(turn, str) else [message.get("content") for message in turn]
        if not (type(rollout) is Value and texts and all(isinstance(text, str) for text in texts)):
            raise TypeError(
                "prompts.after needs a rollout of these prompts, and a text or messages with role and content"
            )
        if not self._recorder.is_drawn_from(self.name, rollout.name):
            raise TypeError(f"{rollout.name} is no rollout of {self.name}, which prompts.after needs")
        following = self._recorder.record("prompts", "after", "compute", ("prompts",), [self, rollout])
        responses, size = self._recorder.continued.get(self.name, (0, 0))
        size += sum(len(text.encode()) for text in texts) + (0 if isinstance(turn, str) else TURN * len(texts))
        self._recorder.continued[following.name] = responses + 1, size
        return following


class _Recorder:
    def __init__(self, watched: Mapping[str, Callable[..., None]]):
        self.watched = watched
        self.calls: list[Call] = []
        self.continued = dict[str, tuple[int, int]]()  # name of continued prompts -> as in `Graph`
        self._names: Counter[str] = Counter()

    def value(self, name: str) -> Value:
        name = self._unique(name)
        return PromptsValue(name, self) if method_of(name) == "prompts" else Value(name)

    def is_drawn_from(self, prompts: str, rollout: str) -> bool:
        """Whether a value holds responses to these prompts."""
        made_by = next((call for call in self.calls if rollout in call.outputs), None)
        if made_by is None or made_by.kind == "generate":
            return made_by is not None and made_by.inputs[:1] == (prompts,)
        mixed = made_by.role == "estimator" and method_of(made_by.name.partition(".")[2]) == "mix"
        return mixed and all(self.is_drawn_from(prompts, one) for one in made_by.inputs)

    def record(self, role: str, method: str, kind: Kind, outputs: tuple[str, ...], arguments: list[Any]) -> Any:
        leaves = jax.tree.leaves(arguments)  # values may be fields of a dataclass
        inputs = tuple(dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Value)))
        values = tuple(self.value(name) for name in outputs)
        name = self._unique(f"{role}.{method}")
        self.calls.append(Call(name, role, kind, inputs, tuple(value.name for value in values)))
        return values[0] if len(values) == 1 else values

    def _unique(self, name: str) -> str:
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}_{self._names[name]}"


class _StandIn:
    """Stands for a role while an algorithm is traced: records its calls instead of running them."""

    def __init__(self, name: str, role: type, recorder: _Recorder, facts: Mapping[str, Any]):
        self._name, self._role, self._recorder, self._facts = name, role, recorder, facts
        self._conditions: Counter[str] = Counter()

    def __getattr__(self, method: str) -> Any:
        if f"{self._name}.{method}" in self._facts:
            return lambda *_: self._facts[f"{self._name}.{method}"]
        function: Any = getattr(self._role, method, None)
        if hasattr(function, CONDITION):
            self._conditions[method] += 1
            return lambda *_: self._conditions[method] == 1
        if not hasattr(function, CALL):
            members = [item for base in reversed(self._role.__mro__) for item in vars(base).items()]
            calls = dict.fromkeys(name for name, member in members if hasattr(member, CALL))
            raise AttributeError(f"{self._name} has no call {method}: its calls are {', '.join(calls)}")
        kind, outputs = getattr(function, CALL)
        outputs = tuple(output.format(role=self._name) for output in outputs)

        def record(*arguments: Any, **named: Any) -> Any:
            given = inspect.signature(function).bind(self, *arguments, **named)  # raises where they do not fit
            given.apply_defaults()
            self._recorder.watched.get(f"{self._name}.{method}", lambda *_: None)(*given.args[1:])
            return self._recorder.record(self._name, method, kind, outputs, [*given.args[1:], *given.kwargs.values()])

        return record
