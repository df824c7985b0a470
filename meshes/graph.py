"""`Graph`: the calls of an algorithm and the values that they pass to each other, as plain data."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

Kind = Literal["generate", "infer", "train", "compute"]


@dataclass(frozen=True)
class Call:
    """One call: a role's model generates, infers or is trained; or arithmetic without a model ("compute").

    name: unique in its graph. inputs, outputs: names of values.
    """

    name: str
    role: str
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def method(self) -> str:
        """The method of the role: the second call of `teacher.logprobs` is named `teacher.logprobs_2`."""
        return method_of(self.name.partition(".")[2])


def method_of(name: str) -> str:
    """Returns the method of a call's name without the role, which has a number if the call is not the first one."""
    return re.sub(r"_\d+$", "", name)


@dataclass(frozen=True)
class Graph:
    """The calls of one iteration of an algorithm. inputs: the values that it starts from.

    continued: number of responses, and of further bytes, of all prompts that continue others (`Batch.after`).

    Raises ValueError for names that occur twice, for values that nothing produces, and for circles.
    """

    name: str
    inputs: tuple[str, ...]
    calls: tuple[Call, ...]
    continued: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        names = [call.name for call in self.calls]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"graph {self.name}: two calls are named {name}")
        produced = [*self.inputs, *(value for call in self.calls for value in call.outputs)]
        for value in produced:
            if produced.count(value) > 1:
                raise ValueError(f"graph {self.name}: {value} is produced more than once")
        for call in self.calls:
            for value in call.inputs:
                if value not in produced:
                    raise ValueError(f"graph {self.name}: {call.name} reads {value}, which nothing produces")
        try:
            self._order()
        except CycleError as error:
            raise ValueError(f"graph {self.name}: {' and '.join(error.args[1])} wait for each other") from None

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __getitem__(self, name: str) -> Call:
        return next(call for call in self.calls if call.name == name)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have calls, in the order of their first calls."""
        return tuple(dict.fromkeys(call.role for call in self.calls))

    def before(self, call: Call) -> tuple[Call, ...]:
        """The calls whose outputs this one reads."""
        return tuple(other for other in self.calls if set(other.outputs) & set(call.inputs))

    def levels(self) -> tuple[tuple[Call, ...], ...]:
        """The calls in groups that read only values of earlier groups, so that calls of one group may overlap."""
        order, levels = self._order(), []
        while order.is_active():
            ready = order.get_ready()
            levels.append(tuple(call for call in self.calls if call.name in ready))
            order.done(*ready)
        return tuple(levels)

    def _order(self) -> TopologicalSorter[str]:
        order = TopologicalSorter({call.name: [other.name for other in self.before(call)] for call in self.calls})
        order.prepare()
        return order
