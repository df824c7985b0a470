"""Candidate placements of a call: slices of a cluster, and ways to divide the call's models and rows there.

As in ReaL (arXiv 2406.14088), slices are powers of two within a node, or neighbouring whole nodes, and only the fastest
placements are kept.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import lcm
from typing import Any

from jrlhf.errors import UserError
from jrlhf.meshes.graph import Call
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models.config.divisors import divisors, indivisible
from jrlhf.planning.memory import call_bytes
from jrlhf.planning.rows import stuck_rows, undivided_rows
from jrlhf.planning.time import CostModel, Price
from jrlhf.planning.workload import Workload
from jrlhf.roles.graph import LEARNER
from jrlhf.run.files import in_units

ALL_RANGES = 8  # maximum number of nodes for which every range of nodes is a slice
MOST = 1000  # maximum number of candidates of a call, as in ReaL
MOST_STEPS = 100  # maximum change of the number of rows that is tried for a remedy
OF_A_SIZE = 16  # number of candidates per slice size that are kept even if they save no memory


class NoPlan(UserError):
    """No placement or plan can run and fits. The message names the problem, without a remedy.

    by_weights: the weights alone are too large, so that fewer rows do not help.
    """

    by_weights = False


def slices(cluster: Cluster) -> list[Slice]:
    """Returns the cluster's slices: aligned powers of two within a node, and ranges of whole nodes.

    With more than `ALL_RANGES` nodes only some ranges are slices: those of 1, 3 or 7 times a power of two nodes,
    aligned to that power, and those that end with the cluster.
    """
    node, nodes = cluster.node, -(-cluster.devices // cluster.node)
    result = [
        Slice(first + start, size)
        for first in range(0, cluster.devices, node)
        for size in powers_of_two(node - 1)
        for start in range(0, node - size + 1, size)
        if first + start + size <= cluster.devices
    ]
    for size in range(1, nodes + 1):
        power = size & -size
        if nodes > ALL_RANGES and size // power not in (1, 3, 7) and size != nodes:
            continue
        step = 1 if nodes <= ALL_RANGES else power
        starts = sorted({*range(0, nodes - size + 1, step), nodes - size})
        result += [Slice(start * node, size * node) for start in starts if (start + size) * node <= cluster.devices]
    if not any(devices.count == cluster.devices for devices in result):
        result.append(Slice(0, cluster.devices))  # the last node is incomplete
    return result


def placements(
    workload: Workload, call: Call, count: int, node: int, *, hypothetical: bool = False
) -> Iterator[Placement]:
    """Yields the ways to divide a call over the devices 0 to `count` - 1. hypothetical: also pipelines."""
    models = [model.config for model in workload.models[call.role]]
    rows = workload.rows // (2 * workload.minibatches if call.kind == "train" else 1)
    # ReaL's bounds of a pipeline: on stages per node, and with enough layers and rows.
    most = min(max(-(-count // node), 8), *(model.layers for model in models), rows) if hypothetical else 1
    for layout, stages in product(workload.layouts(call), [1, *(size for size in divisors(count)[1:] if size <= most)]):
        for tensor, fsdp in product(divisors(count // stages), repeat=2):
            data, rest = divmod(count // stages, tensor * fsdp)
            if rest or tensor > node or (layout == "train_tp" and tensor == 1):
                continue
            if any(next(indivisible(model, fsdp, tensor), None) for model in models):
                continue
            # Generation has slots instead of micro-batches, and a fused update has a single pass.
            once = call.kind == "generate" or call.role == LEARNER
            for micro_batches in powers_of_two(1 if once else workload.rows):
                placement = Placement(Slice(0, count), layout, data, fsdp, tensor, stages, micro_batches)
                if next(undivided_rows(workload, call, placement), None) or stuck_rows(workload, call, placement):
                    break
                yield placement


def candidates(prices: CostModel, *, hypothetical: bool = False) -> dict[str, list[Price]]:
    """Returns the candidates of every call that has a model, by name.

    Roles on a shared base run on all devices, in one mesh: the one with the smallest sum of their calls' times.
    """
    workload, devices = prices.workload, prices.cluster.devices
    result = {call.name: call_candidates(prices, call, hypothetical=hypothetical) for call in workload.calls}
    shared = [call.name for call in workload.calls if workload.on_base(call.role)]
    if not shared:
        return result
    by_mesh: dict[tuple[int, ...], dict[str, list[Price]]] = {}
    for name in shared:
        for candidate in result[name]:
            if candidate.placement.devices.count == devices:
                by_mesh.setdefault(candidate.placement.stored, {}).setdefault(name, []).append(candidate)
    common = {mesh: options for mesh, options in by_mesh.items() if len(options) == len(shared)}
    if not common:
        raise UserError(
            f"no mesh of all {devices} devices suits {', '.join(shared)}, which share the base under their adapters: "
            + _rows_for(workload, prices.cluster)
        )

    seconds = {mesh: sum(ranked[0].seconds for ranked in options.values()) for mesh, options in common.items()}
    # Among equally fast meshes, takes the one with the fewest replicas.
    return result | common[min(common, key=lambda mesh: (seconds[mesh], mesh))]


def call_candidates(prices: CostModel, call: Call, *, hypothetical: bool = False) -> list[Price]:
    """Returns at most `MOST` placements of a call that fit alone, the fastest first.

    For each slice size, or each mesh of a shared base, it keeps the fastest, and slower ones that need less memory than
    all faster ones.
    """
    workload, cluster = prices.workload, prices.cluster
    by_size = by_key((devices.count, devices) for devices in slices(cluster))
    every = [
        prices.call(call, placement)
        for count in sorted(by_size)
        for placement in placements(workload, call, count, cluster.node, hypothetical=hypothetical)
    ]
    if not every:
        count = min(by_size)
        smallest = Placement(Slice(0, count), workload.layouts(call)[0], data=count)
        whole = replace(smallest, devices=Slice(0, cluster.devices), data=cluster.devices)
        stuck = stuck_rows(workload, call, whole)
        of_whole = [f"it {stuck}"] if stuck else undivided_rows(workload, call, whole)
        reason = [*undivided_rows(workload, call, smallest), *of_whole][0]
        if reason.startswith(workload.rows_key):  # slots, tiles and groups have a remedy of their own
            reason = f"{reason.rsplit(':', 1)[0]}: {_rows_for(workload, cluster)}"
        raise UserError(f"{call.name} runs nowhere, for {reason}")
    on_base = workload.on_base(call.role)
    fitting = by_key(
        (candidate.placement.stored if on_base else candidate.placement.devices.count, candidate)
        for candidate in every
        if candidate.bytes <= prices.capacity
    )
    if not fitting:
        widest, smallest = every[-1].placement.devices.count, min(every, key=lambda candidate: candidate.bytes)
        limit = "" if widest == cluster.devices else f", {widest} of which can divide its {workload.rows} rows"
        needs = call_bytes(workload, call, smallest.placement, prices.backend)
        weights = max(smallest.resident, smallest.moved, needs.active.get("generation weights", 0.0))
        problem = NoPlan(
            f"{call.name} fits nowhere on {cluster.devices} device(s) of {in_units(prices.capacity)}{limit}: it "
            f"needs {in_units(smallest.bytes)} of each device, {in_units(weights)} of it for weights"
        )
        problem.by_weights = weights > prices.capacity
        raise problem
    survivors: list[Price] = []
    for alternatives in fitting.values():
        least = float("inf")
        for index, candidate in enumerate(sorted(alternatives, key=lambda one: (one.seconds, one.bytes))):
            if index < OF_A_SIZE or candidate.bytes < least:
                survivors.append(candidate)
            least = min(least, candidate.bytes)
    spread: list[Price] = []
    for candidate in sorted(survivors, key=lambda one: one.seconds):
        for devices in by_size[candidate.placement.devices.count]:
            if len(spread) < MOST or devices.count == cluster.devices:
                spread.append(replace(candidate, placement=replace(candidate.placement, devices=devices)))
    return spread


def _rows_for(workload: Workload, cluster: Cluster) -> str:
    """Returns a remedy: the nearest number of rows that every call can divide over all devices."""

    def divides(**changes: Any) -> bool:
        tried = replace(workload, **changes)
        return all(any(placements(tried, call, cluster.devices, cluster.node)) for call in workload.calls)

    if divides():  # the models do not divide
        return "choose another number of devices"
    if divides(score_rows=None, last_groups=None):
        return "choose another compute.score_rows or rollout.last_groups"
    step = lcm(workload.samples, cluster.devices)
    below = workload.rows // step * step
    lower = next((rows for rows in range(below, 0, -step) if divides(rows=rows)), None)
    higher = next((rows for rows in range(below + step, below + MOST_STEPS * step, step) if divides(rows=rows)), None)
    choices = " or ".join(str(rows) for rows in (lower, higher) if rows is not None)
    return f"choose {workload.rows_key} of {choices}" if choices else "choose another number of devices"


def by_key(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Returns key -> the values that it has in these pairs, in their order."""
    groups = defaultdict[Any, list[Any]](list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)


def powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
