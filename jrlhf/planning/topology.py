"""What a graph says about time: which call waits for which, within an iteration and from one to the next."""

from collections.abc import Collection
from dataclasses import dataclass

from jrlhf.meshes import Call, Graph
from jrlhf.meshes.graph import LEARNER, home_of


@dataclass(frozen=True)
class Topology:
    """The calls of a graph by number, in the order in which a program makes them.

    placed: which of them have a model, and therefore devices. The others are arithmetic or functions: they take no
        device's time, and their values lie where call `anchor` runs.
    before: of each call, those whose outputs it reads.
    updated: of each call, those of the iteration before that it waits for: what trains its weights; in lockstep, the
        calls that read no other's values wait for all that end an iteration.
    home: of each call, the one where its role's weights live; its own number where that is itself, or it has none.
    last: the placed calls whose outputs no placed call of the iteration waits for: it ends with them.
    """

    graph: Graph
    placed: tuple[bool, ...]
    before: tuple[tuple[int, ...], ...]
    updated: tuple[tuple[int, ...], ...]
    home: tuple[int, ...]
    anchor: int
    last: tuple[int, ...]


def topology(graph: Graph, roles: Collection[str] | None = None, *, lockstep: bool = False) -> Topology:
    """roles: those with a model; by default all that do anything but arithmetic. lockstep: no iterations overlap."""
    calls = graph.calls
    number = {call.name: index for index, call in enumerate(calls)}
    placed = tuple(has_model(call, roles) for call in calls)
    before = tuple(tuple(number[other.name] for other in graph.before(call)) for call in calls)
    homes = (home_of(graph, call.role) or call for call in calls)
    home = tuple(number[at.name] if placed[index] else index for index, at in enumerate(homes))
    updated = tuple(
        (home[index],) if placed[index] and calls[home[index]].kind == "train" else () for index in range(len(calls))
    )
    trained = [index for index, call in enumerate(calls) if placed[index] and call.kind == "train"]
    actors = [index for index in trained if calls[index].role in ("actor", LEARNER)]
    anchor = (actors or trained or [index for index in range(len(calls)) if placed[index]])[0]
    awaited = {index for index, found in enumerate(placed) if not found or _is_awaited(index, before, placed)}
    last = tuple(index for index in range(len(calls)) if index not in awaited)
    if lockstep:
        updated = tuple(
            waits if before[index] else tuple(sorted({*waits, *last})) for index, waits in enumerate(updated)
        )
    return Topology(graph, placed, before, updated, home, anchor, last)


def has_model(call: Call, roles: Collection[str] | None) -> bool:
    """Whether a plan has to say where the call runs."""
    return call.kind != "compute" and (roles is None or call.role in roles)


def _is_awaited(index: int, before: tuple[tuple[int, ...], ...], placed: tuple[bool, ...]) -> bool:
    """Whether a placed call reads what `index` made, or what arithmetic made of it."""
    readers = [reader for reader, reads in enumerate(before) if index in reads]
    return any(placed[reader] or _is_awaited(reader, before, placed) for reader in readers)
