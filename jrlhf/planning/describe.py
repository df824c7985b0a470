"""What a search found, as text."""

from collections.abc import Sequence

from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Plan
from jrlhf.planning.memory import GIB
from jrlhf.planning.placements import RULES
from jrlhf.planning.prices import Prices
from jrlhf.planning.search import Found, Result
from jrlhf.planning.simulator import Simulation, Span
from jrlhf.planning.workload import Workload

WIDTH = 72  # characters of the timeline
STEADY = 2  # the iteration that is shown and explained: what comes before it has settled


def describe(workload: Workload, cluster: Cluster, prices: Prices, result: Result) -> str:
    """The best plan of a search, and what other plans lose."""
    return "\n".join([describe_plan(workload, cluster, prices, result.best), "", *_others(result)])


def describe_plan(workload: Workload, cluster: Cluster, prices: Prices, found: Found) -> str:
    """A plan's calls and timeline, and what bounds it."""
    lines = [
        f"plan for {workload.graph.name} on {cluster.devices} x {cluster.hardware.name}: "
        f"{_time(found.simulation.seconds)} an iteration, {found.simulation.peak / GIB:.1f} of "
        f"{prices.capacity / GIB:.1f} GiB on the fullest device",
        "",
        *calls(workload, found, prices),
        "",
        *timeline(found.simulation),
        "",
        f"bottleneck: {bottleneck(found.simulation)}",
    ]
    return "\n".join(lines)


def calls(workload: Workload, found: Found, prices: Prices) -> list[str]:
    """A table: of each call its devices, layout, mesh, micro-batches, seconds and GiB of each device."""
    rows = [
        ("call", "devices", "layout", "mesh", "micro-batches", "seconds", "weights from home", "stays", "while it runs")
    ]
    moves = {
        span.call: span.seconds
        for span in found.simulation.spans
        if span.kind == "reallocation" and span.iteration == STEADY
    }
    for name, placement in found.plan.placements.items():
        price = prices.call(workload.graph[name], placement)
        moved = f"{_time(moves[name])}" if name in moves else "-"
        rows.append(
            (
                name,
                str(placement.devices),
                placement.layout,
                mesh(placement),
                str(placement.micro_batches),
                _time(price.seconds),
                moved,
                f"{price.resident / GIB:.2f} GiB" if price.resident else "-",
                f"{(price.active + price.moved * (name in moves)) / GIB:.2f} GiB",
            )
        )
    return _columns(rows)


def mesh(placement: Placement) -> str:
    """Sizes of the mesh axes that divide anything."""
    axes = {axis: getattr(placement, axis) for axis in ("data", "fsdp", "tensor", "pipeline")}
    return " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "one device"


def timeline(simulation: Simulation) -> list[str]:
    """One iteration in the steady state: rows are groups of devices, columns time, and letters calls.

    Work of the iterations before and after, where it lies in the same time, is in small letters; `~` are moves of
    weights and values.
    """
    spans = simulation.spans
    own = [span for span in spans if span.iteration == STEADY]
    start, end = min(span.start for span in own), max(span.end for span in own)
    names = list(dict.fromkeys(span.call for span in sorted(own, key=lambda span: span.start) if span.kind == "call"))
    letters = {name: chr(ord("A") + index) for index, name in enumerate(names)}
    scale = WIDTH / max(end - start, 1e-12)
    lines = []
    for group in simulation.memory:
        row = [" "] * WIDTH
        # Moves first, so that a call is never hidden behind one of them.
        for span in sorted(spans, key=lambda span: span.kind == "call"):
            if not any(each.overlaps(group.devices) for each in span.devices):
                continue
            first, last = round((span.start - start) * scale), round((span.end - start) * scale)
            mark = letters[span.call] if span.kind == "call" else "~"
            mark = mark if span.iteration == STEADY else mark.lower()
            for column in range(max(first, 0), min(max(last, first + (span.kind == "call")), WIDTH)):
                row[column] = mark
        lines.append((f"devices {group.devices}", f"|{''.join(row)}|"))
    legend = ", ".join(f"{letter} {name}" for name, letter in letters.items())
    width = max(len(name) for name, _ in lines)
    scale_line = f"  {'':<{width}}  0{_time(end - start):>{WIDTH}}"
    return [f"timeline of an iteration: {legend}", *(f"  {name:<{width}}  {row}" for name, row in lines), scale_line]


def critical_path(simulation: Simulation) -> list[Span]:
    """The work that an iteration's end waits for, from its begin on: each piece ends where the next begins.

    From the last piece back: before each comes the one that ends when it starts, be it that its values or its devices
    were waited for.
    """
    spans = [span for span in simulation.spans if span.iteration <= STEADY]
    path = [max((span for span in spans if span.iteration == STEADY), key=lambda span: span.end)]
    begin = path[0].end - simulation.seconds
    while True:
        earlier = [
            span
            for span in spans
            if span.start < path[0].start and abs(span.end - path[0].start) <= 1e-9 * max(path[0].start, 1.0)
        ]
        if not earlier or path[0].start <= begin + 1e-9 * max(begin, 1.0):
            return path
        path.insert(0, max(earlier, key=lambda span: span.seconds))


def bottleneck(simulation: Simulation) -> str:
    """The call that takes most of the critical path, and how the path divides."""
    path = critical_path(simulation)
    shares: dict[str, float] = {}
    for span in path:
        name = span.call if span.kind == "call" else f"{span.kind} to {span.call}"
        shares[name] = shares.get(name, 0.0) + span.seconds
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    total = sum(shares.values())
    told = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in ordered if seconds > 0.005 * total)
    return f"{ordered[0][0]}; of the critical path: {told}"


def differences(plan: Plan, best: Plan) -> str:
    """Where a plan's calls lie or look otherwise than the best plan's."""
    told = []
    for name, placement in plan.placements.items():
        other = best[name]
        if (placement.devices, placement.layout) != (other.devices, other.layout):
            told.append(f"{name} on {placement.devices} {placement.layout}")
    same = len(plan.placements) - len(told)
    return ("; ".join(told) or "other meshes") + (f"; {same} as in the best" if told and same else "")


def _others(result: Result) -> list[str]:
    best = result.best.simulation.seconds
    rows = []
    for name, found in result.rules.items():
        rows.append((name, _time(found.simulation.seconds), _loss(found, best), f"{_group(found.plan)}"))
    for found in result.runners_up:
        rows.append(
            (
                found.plan.name,
                _time(found.simulation.seconds),
                _loss(found, best),
                differences(found.plan, result.best.plan),
            )
        )
    missing = [name for name in RULES if name not in result.rules]
    absent = [f"  none that runs and fits: {', '.join(missing)}"] if missing else []
    looked_at = f"of {result.proposals} plans, looked at in {result.seconds:.1f} s, what the others lose:"
    return [looked_at, *(_columns(rows) if rows else ()), *absent]


def _group(plan: Plan) -> str:
    """A plan by rule, by its slices."""
    slices: dict[str, list[str]] = {}
    for name, placement in plan.placements.items():
        slices.setdefault(str(placement.devices), []).append(name.split(".")[0])
    return ", ".join(f"{', '.join(dict.fromkeys(roles))} on {where}" for where, roles in slices.items())


def _loss(found: Found, best: float) -> str:
    return f"{100 * found.loss / best:+.1f} %"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2f} ms"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
