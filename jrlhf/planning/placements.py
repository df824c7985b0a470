"""Plans by rule: ReaL's symmetric heuristic, and HybridFlow's placements of whole models (arXiv 2409.19256).

HybridFlow's Algorithm 1 tries every way to divide the models into sets and the devices among the sets. In a set every
model has all of the set's devices, and each of its calls the fastest layout there. A plan costs, for every stage of the
iteration, the slowest set's calls one after the other. The graph's levels are the stages.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jrlhf.meshes import Graph
from jrlhf.meshes.graph import LEARNER, home_of
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.options import Option, on_base, placed_calls, shapes, slices
from jrlhf.planning.prices import Prices
from jrlhf.planning.topology import has_model
from jrlhf.planning.workload import Workload

RULES = ("heuristic", "colocate", "split", "standalone")
Options = Mapping[str, Sequence[Option]]


@dataclass(frozen=True)
class Division:
    """One of HybridFlow's plans. sets: roles that share devices. seconds: by its stage-wise cost."""

    plan: Plan
    sets: tuple[tuple[str, ...], ...]
    counts: tuple[int, ...]
    seconds: float


def heuristic(workload: Workload, cluster: Cluster, prices: Prices, known: Options) -> Plan | None:
    """ReaL's symmetric heuristic: every call on all devices, tensor-parallel within a node and data-parallel beyond.

    Of each call the widest tensor axis that divides its model, weights whole in every replica or, where that does not
    fit, divided over all, and as few micro-batches as fit. None where nothing does. Roles on a shared base are in the
    one mesh that they have among the `known` options.
    """
    choices = {}
    for call in placed_calls(workload):
        placements = shapes(workload, call, cluster.devices, cluster.node)
        if on_base(workload, call.role):
            placements = [each.placement for each in known[call.name]]
        found = [Option(placement, prices.call(call, placement)) for placement in placements]
        widest = max((each.placement.tensor for each in found), default=0)
        choices[call.name] = [
            each
            for each in found
            if each.placement.tensor == widest and (each.placement.layout not in ("train", "score") or widest == 1)
        ]
    for sign in (1, -1):
        fitting = _fit(
            workload.graph,
            choices,
            prices.capacity,
            first=lambda each, sign=sign: (sign * each.placement.fsdp, each.placement.micro_batches),
            then=lambda each, sign=sign: (sign * each.placement.fsdp, each.placement.micro_batches),
        )
        if fitting is not None:
            return Plan("heuristic", {name: each.placement for name, each in fitting.items()})
    return None


def divisions(graph: Graph, options: Options, cluster: Cluster, capacity: float) -> list[Division]:
    """All plans of HybridFlow's Algorithm 1 that fit, the cheapest first.

    Sets take neighbouring devices in the order of their size, so that all are aligned. A layout is chosen for each call
    with what its devices hold already: the states of all models of the set.
    """
    best = _fastest(options)
    roles = [role for role in graph.roles if any(call.role == role and call.name in options for call in graph)]
    together = ("actor", "critic", LEARNER) if LEARNER in roles else ()
    counts = sorted({each.count for each in slices(cluster)})
    costs: dict[tuple[tuple[str, ...], int], tuple[dict[str, Placement], tuple[float, ...]] | None] = {}
    found = []
    for sets in partitions(roles):
        if any(0 < len(set(each) & set(together)) < len(set(roles) & set(together)) for each in sets):
            continue
        for sizes in allocations(counts, len(sets), cluster.devices):
            parts = []
            for members, count in zip(sets, sizes, strict=True):
                key = tuple(members), count
                if key not in costs:
                    costs[key] = _set(graph, members, best, count, capacity)
                parts.append(costs[key])
            if any(part is None for part in parts):
                continue
            placements, start = {}, 0
            for index in sorted(range(len(sets)), key=lambda index: -sizes[index]):
                devices = Slice(start, sizes[index])
                placements |= {name: replace(each, devices=devices) for name, each in parts[index][0].items()}
                start = devices.stop
            seconds = sum(max(part[1][level] for part in parts) for level in range(len(graph.levels())))
            plan = Plan("+".join("/".join(each) for each in sets), {name: placements[name] for name in options})
            found.append(Division(plan, tuple(map(tuple, sets)), sizes, seconds))
    return sorted(found, key=lambda each: each.seconds)


def named(found: Sequence[Division]) -> dict[str, Division]:
    """The best division of each of HybridFlow's kinds.

    colocate: one set. standalone: every role its own. split: actor and reference in one half, all others in the other.
    """
    roles = {role for each in found for members in each.sets for role in members}
    policy = frozenset(roles & {"actor", "reference"})
    halves = {policy, frozenset(roles - policy)}
    kinds = {
        "colocate": lambda each: len(each.sets) == 1,
        "split": lambda each: set(map(frozenset, each.sets)) == halves and len(set(each.counts)) == 1,
        "standalone": lambda each: all(len(members) == 1 for members in each.sets),
    }
    best = {}
    for name, belongs in kinds.items():
        of_kind = [each for each in found if belongs(each)]
        if of_kind and (name == "colocate" or len(roles) > 1):
            best[name] = replace(of_kind[0], plan=replace(of_kind[0].plan, name=name))
    return best


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every way to divide items into sets: Bell(n) of them."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index, members in enumerate(smaller):
            yield [*smaller[:index], [first, *members], *smaller[index + 1 :]]


def allocations(counts: Collection[int], sets: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each of so many sets one of these counts of devices, and all devices to the sets."""
    if sets == 1:
        yield from [(devices,)] if devices in counts else []
        return
    for count in counts:
        if count < devices:
            yield from ((count, *others) for others in allocations(counts, sets - 1, devices - count))


def _fastest(options: Options) -> dict[tuple[str, int], list[Option]]:
    """(call, number of devices) -> its options there, on whichever slice, the fastest first."""
    found: dict[tuple[str, int], dict[Placement, Option]] = {}
    for name, choices in options.items():
        for each in choices:
            if each.placement.pipeline == 1:
                anywhere = replace(each.placement, devices=Slice(0, each.placement.devices.count))
                found.setdefault((name, each.placement.devices.count), {}).setdefault(anywhere, each)
    return {key: sorted(known.values(), key=lambda each: each.price.seconds) for key, known in found.items()}


def _set(
    graph: Graph, members: Sequence[str], best: dict[tuple[str, int], list[Option]], count: int, capacity: float
) -> tuple[dict[str, Placement], tuple[float, ...]] | None:
    """Of a set on so many devices: placements, and seconds of each stage. None where it does not fit."""
    names = [call.name for call in graph if call.role in members and has_model(call, members)]
    choices = {name: best.get((name, count), []) for name in names}
    for first in (_seconds, _resident):
        fitting = _fit(graph, choices, capacity, first=first, then=_seconds)
        if fitting is not None:
            stages = tuple(
                sum(fitting[call.name].price.seconds for call in level if call.name in fitting)
                for level in graph.levels()
            )
            return {name: each.placement for name, each in fitting.items()}, stages
    return None


def _fit(
    graph: Graph,
    choices: Mapping[str, Sequence[Option]],
    capacity: float,
    *,
    first: Callable[[Option], Any],
    then: Callable[[Option], Any],
) -> dict[str, Option] | None:
    """One option a call, all on the same devices: what stays there is chosen by `first`, the calls by `then`.

    As HybridFlow does: where a model trains is chosen first, and the rest has what memory is left.
    """
    if not all(choices.values()):
        return None
    homes = [home_of(graph, call.role) for call in graph if call.name in choices]
    kept = {name: min(choices[name], key=first).price.resident for name in choices if graph[name] in homes}
    left, found = capacity - sum(kept.values()), {}
    for name, known in choices.items():
        fitting = [each for each in known if each.price.active <= left and each.price.resident <= kept.get(name, 0.0)]
        if not fitting:
            return None
        found[name] = min(fitting, key=then)
    return found


def _seconds(option: Option) -> tuple[float, float]:
    return option.price.seconds, option.price.resident


def _resident(option: Option) -> tuple[float, float]:
    return option.price.resident, option.price.seconds
