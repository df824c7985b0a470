"""Shows the result of a search as text, and a plan's timeline as a picture."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jrlhf.errors import UserError
from jrlhf.meshes.graph import Call
from jrlhf.meshes.pipeline import FusedUpdates, bubble, table_of
from jrlhf.meshes.plan import Plan, segments
from jrlhf.models.flops import forward_operations, training_operations
from jrlhf.planning.candidates import by_key
from jrlhf.planning.fusion.last_rows import Work
from jrlhf.planning.fusion.updates import fused_prices, fused_updates
from jrlhf.planning.search import RULES, TURN, Result
from jrlhf.planning.simulate import STEADY, Simulation, Span
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload
from jrlhf.run.colors import TICK_COLORS, call_color
from jrlhf.run.files import in_units

WIDTH = 72  # characters of the timeline
MOST_NUMBERED = 400  # maximum number of operations of a schedule whose micro-batches are numbered
FORMATS = (".svg", ".png", ".pdf")


def describe(prices: CostModel, result: Result) -> str:
    """Describes the best plan of a search, and how much slower other plans are."""
    best, least = result.best.plan, result.best.seconds
    others = [(name, rule, _by_slice(rule.plan)) for name, rule in result.rules.items()]
    others += [(other.plan.name, other, differences(other.plan, best)) for other in result.runners_up]
    rows = [
        (name, _time(other.seconds), f"{100 * (other.seconds - least) / least:+.1f} %", note)
        for name, other, note in others
    ]
    absent = [name for name in RULES if name not in result.rules]
    lines = [
        describe_plan(prices, result.best),
        *([_fused(prices, result.best, result.runners_up[0])] if best.fused else []),
        "",
        f"{result.proposals} plans priced in {result.seconds:.1f} s, in whole turns of {TURN}; what the others lose:",
        *in_columns(rows),
        *([f"  none that runs and fits: {', '.join(absent)}"] if absent else ()),
    ]
    return "\n".join(lines)


def describe_plan(prices: CostModel, simulation: Simulation) -> str:
    """Describes a plan's calls, its timeline and its bottleneck."""
    calibration = prices.cluster.hardware.calibration if prices.costs is None else "a profile of these devices"
    lines = [
        f"plan for {prices.workload.graph.name} on {prices.cluster.devices} x {prices.cluster.hardware.name}: "
        f"{_time(simulation.seconds)} an iteration ({_range(prices, simulation.seconds)}), "
        f"{in_units(simulation.peak)} of {in_units(prices.capacity)} on the fullest device",
        f"times are calibrated on {calibration}",
        "",
        *_calls(prices, simulation),
        "",
        *_reasons(prices, simulation),
        "",
        *timeline(simulation),
        "",
        f"bottleneck: {bottleneck(simulation)}",
    ]
    return "\n".join(lines)


def _fused(prices: CostModel, best: Simulation, serial: Simulation) -> str:
    priced = fused_prices(prices, best.plan, least=True)
    least = sum(priced.seconds(prices.workload.graph[name], best.plan[name]) for name in best.plan.fused)
    together, apart = (_busy(one, best.plan.fused) for one in (best, serial))
    above, saved, whole = together / least - 1, 1 - together / apart, 1 - best.seconds / serial.seconds
    return (
        f"fused updates: {_time(together)}, {100 * above:.1f} % above what any table needs and {100 * saved:.1f} % "
        f"less than one after the other; an iteration takes {100 * whole:.1f} % less"
    )


def _busy(simulation: Simulation, calls: Collection[str]) -> float:
    """Returns the seconds of an iteration in which any of these calls runs."""
    total = end = 0.0
    spans = [span for span in simulation.steady if span.kind == "call" and span.call in calls]
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def _calls(prices: CostModel, simulation: Simulation) -> list[str]:
    """Returns a table of the calls: devices, layout, mesh, micro-batches, seconds, and memory of each device."""
    rows = [
        ("call", "devices", "layout", "mesh", "micro-batches", "seconds", "weights from home", "stays", "while it runs")
    ]
    moves = {span.call: span.seconds for span in simulation.steady if span.kind == "reallocation"}
    for name, placement in simulation.plan.placements.items():
        price = prices.call(prices.workload.graph[name], placement)
        axes = {axis: getattr(placement, axis) for axis in ("data", "fsdp", "tensor", "pipeline")}
        mesh = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "one device"
        if placement.pipeline > 1 and prices.workload.graph[name].kind == "train":
            mesh += f" by {placement.schedule}"
        sizes = str(placement.devices), placement.layout, mesh, str(placement.micro_batches)
        moved = _time(moves[name]) if name in moves else "-"
        stays = in_units(price.resident) if price.resident else "-"
        runs = in_units(price.active + price.moved * (name in moves))
        rows.append((name, *sizes, _time(price.seconds), moved, stays, runs))
    return in_columns(rows)


def _reasons(prices: CostModel, simulation: Simulation) -> list[str]:
    """Returns a table of the parts of each call's time, and its MFU: operations of the model over the peak's."""
    workload, hardware = prices.workload, prices.cluster.hardware
    peak = hardware.bfloat16 if workload.itemsize == 2 else hardware.float32
    rows = [("call", "MFU", "bound by")]
    for name, placement in simulation.plan.placements.items():
        call = workload.graph[name]
        parts = prices.parts(call, placement)
        seconds = sum(parts.values())
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        most = [(part, size / seconds) for part, size in ordered if size > 0.05 * seconds]
        shares = ", ".join(f"{part} {100 * share:.0f} %" for part, share in most)
        available = seconds * placement.devices.count * peak
        rows.append((name, f"{100 * operations(workload, call) / available:.0f} %", shares))
    mean, most = workload.mean_prompt + workload.mean_response, workload.length
    return [f"where the time goes, for rows of {mean:.0f} tokens in the mean and {most} at most:", *in_columns(rows)]


def operations(workload: Workload, call: Call) -> float:
    """Returns the operations of a call's models for rows of the mean length, as MFU counts them (`models.flops`)."""
    lengths, response = np.array([round(workload.mean_prompt + workload.mean_response)]), round(workload.mean_response)
    total = 0.0
    for model in workload.models[call.role]:
        count = training_operations if call.kind == "train" else forward_operations
        spans = call.kind == "generate" or call.kind in workload.spanned
        total += count(model.config, lengths, model.head, model.lora, np.array([response]) if spans else None)
    return total * workload.rows_of(call) * (workload.epochs if call.kind == "train" else 1)


def timeline(simulation: Simulation) -> list[str]:
    """Draws one steady iteration in text: rows are groups of devices, columns are time, letters are calls.

    Lower-case letters are work of the iterations before and after; `~` are moves of weights and values.
    """
    own = simulation.steady
    start, end = min(span.start for span in own), max(span.end for span in own)
    names = list(dict.fromkeys(span.call for span in sorted(own, key=lambda span: span.start) if span.kind == "call"))
    letters = {name: chr(ord("A") + index) for index, name in enumerate(names)}
    scale = WIDTH / max(end - start, 1e-12)
    lines = []
    for group in simulation.memory:
        row = [" "] * WIDTH
        # Moves first, so that no call is hidden behind one of them.
        for span in sorted(simulation.spans, key=lambda span: span.kind == "call"):
            if not span.occupies(group.devices):
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
    """Returns the critical path of an iteration: each span ends where the next one begins.

    It is built backwards from the last span: the predecessor is the longest span that ends when a span starts, because
    that waited for its values or for its devices.
    """
    spans = [span for span in simulation.spans if span.iteration <= STEADY]
    path = [max(simulation.steady, key=lambda span: span.end)]
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
    """Returns the call that takes most of the critical path, and the shares of the path."""
    shares = defaultdict[str, float](float)
    for span in critical_path(simulation):
        shares[span.call if span.kind == "call" else f"{span.kind} to {span.call}"] += span.seconds
    ordered, total = sorted(shares.items(), key=lambda item: -item[1]), sum(shares.values())
    listed = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in ordered if seconds > 0.005 * total)
    return f"{ordered[0][0]}; of the critical path: {listed}"


def differences(plan: Plan, best: Plan) -> str:
    """Returns the calls whose devices or layout differ from the best plan's."""
    changed = [
        f"{name} on {placement.devices} {placement.layout}"
        for name, placement in plan.placements.items()
        if (placement.devices, placement.layout) != (best[name].devices, best[name].layout)
    ]
    same = len(plan.placements) - len(changed)
    return ("; ".join(changed) or "other meshes") + (f"; {same} as in the best" if changed and same else "")


def _by_slice(plan: Plan) -> str:
    slices = by_key((placement.devices, name.split(".")[0]) for name, placement in plan.placements.items())
    return ", ".join(f"{', '.join(dict.fromkeys(roles))} on {devices}" for devices, roles in slices.items())


# The largest error of a prediction after a profile (benchmarks/results/plans-cpu.json), and on one H200
# (tests/jrlhf/planning/test_time.py). Elsewhere no run was measured: the best published iterations of ReaL (arXiv
# 2406.14088, on nodes of H100s) took up to 2.8 times the prediction.
_PROFILED, _MEASURED, _ELSEWHERE = 0.26, 0.16, 1.8


def _range(prices: CostModel, seconds: float) -> str:
    """Returns the range in which the measured time of a prediction lies, by what has been compared."""
    error = _MEASURED if prices.costs is None else _PROFILED
    alike = prices.costs is not None or (prices.cluster.hardware.name == "h200" and prices.cluster.devices == 1)
    most = 1 + (error if alike else _ELSEWHERE)
    return f"{_time(seconds * (1 - error))} to {_time(seconds * most)}"


def _time(seconds: float) -> str:
    """Writes two digits, because predictions are not better than that."""
    unit, size = ("s", seconds) if seconds >= 0.1 else ("ms", 1000 * seconds)
    return f"{float(f'{size:.2g}'):,.10g} {unit}"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pads the cells of each column to the same width, except for the last cell of a row."""
    longest = max(map(len, rows), default=0)
    widths = [max((len(row[column]) for row in rows if column < len(row) - 1), default=0) for column in range(longest)]
    padded = ([f"{cell:<{width}}" for cell, width in zip(row[:-1], widths, strict=False)] for row in rows)
    return ["  " + "  ".join([*cells, row[-1]]).rstrip() for cells, row in zip(padded, rows, strict=True)]


def check_picture(path: Path) -> None:
    """Refuses a file whose suffix is not that of a picture."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"the picture {path} must end in {', '.join(FORMATS)}")


def tables(workload: Workload, plan: Plan, per_process: int | None = None) -> list[FusedUpdates]:
    """Returns the table of each call that trains or scores in stages; first, if there is one, that of fused calls.

    per_process: number of devices of a process; None: there is one process.
    """
    fused = fused_updates(workload, plan, per_process)
    result = [] if fused is None else [fused]
    for call in workload.calls:
        place = plan[call.name]
        if call.kind == "generate" or place.pipeline == 1 or place.schedule == "fused":
            continue
        trains = call.kind == "train"
        table = table_of(place.schedule, place.pipeline, place.micro_batches, trains=trains)
        result.append(FusedUpdates(table, {f"{call.name}, {place.schedule}" if trains else call.name: range(1)}))
    return result


def plot(
    simulation: Simulation,
    title: str,
    path: Path,
    staged: Sequence[FusedUpdates] = (),
    rollouts: Mapping[str, Sequence[Work]] = MappingProxyType({}),
) -> None:
    """Draws a steady iteration into a file; rows are groups of devices. The iterations around it are pale.

    Below it are the rollouts with their early scores, and the ticks of each of the tables.
    """
    # Imported here because the import takes long, and only pictures need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = simulation.memory
    names = list(dict.fromkeys(span.call for span in simulation.spans if span.kind == "call"))
    colours = {name: call_color(name) for name in names}
    heights = [1.8 + 0.6 * len(groups), *[3.0] * len(rollouts), *(1.0 + 0.3 * one.table.devices for one in staged)]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, *others = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for below, (name, work) in zip(others, rollouts.items(), strict=False):
        _draw_rollout(below, name, work, colours)
    for below, one in zip(others[len(rollouts) :], staged, strict=True):
        _draw_ticks(below, one)
    shown = [span for span in simulation.spans if abs(span.iteration - STEADY) <= 1]
    origin = min(span.start for span in shown)
    for span in shown:
        colour, edge = (colours[span.call], "white") if span.kind == "call" else ("0.4", "none")
        style = {"facecolor": colour, "edgecolor": edge, "alpha": 1.0 if span.iteration == STEADY else 0.45}
        for row, group in enumerate(groups):
            if span.occupies(group.devices):
                _draw_box(axes, row, span.start - origin, span.seconds, **style)
    rows = [f"devices {group.devices}\n{in_units(group.peak)}" for group in groups]
    _label(axes, rows, max(span.end for span in shown) - origin, "seconds")
    axes.set_title(f"{title}: {simulation.seconds:.3g} s an iteration")
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    handles += [Patch(facecolor="0.4", label="moves")] if any(span.kind != "call" for span in shown) else []
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def _draw_box(axes: Any, row: int, start: float, width: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    style = {"edgecolor": "white", "linewidth": 0.5} | style
    axes.add_patch(Rectangle((start, row - 0.45), width, 0.9, **style))


def _label(axes: Any, rows: Sequence[str], end: float, unit: str) -> None:
    """Names the rows, and draws the time axis from 0 to `end`."""
    axes.set_xlim(0, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(unit)


def _draw_rollout(axes: Any, name: str, works: Sequence[Work], colours: Mapping[str, str]) -> None:
    """Draws decode steps and early scores on each group of devices, and the number of unfinished rows as a line."""
    groups = segments(work.devices for work in works)
    for work in works:
        for row, group in enumerate(groups):
            if work.devices.overlaps(group):
                _draw_box(axes, row, work.start, work.end - work.start, facecolor=colours[work.name or name])
    drawing = [work for work in works if work.rows]
    for before, after in pairwise(drawing):
        axes.axvline(after.start, color="0.2", linestyle=":")
        note = f" {after.rows[0][1]} rows move from devices {before.devices} to {after.devices}"
        axes.text(after.start, -0.5, note, va="bottom", fontsize=8)
    seconds, rows = zip(*(point for work in drawing for point in work.rows), strict=True)
    tail = axes.twinx()
    tail.step(seconds, rows, where="post", color="black")
    tail.set_ylim(0, 1.02 * max(rows))
    tail.set_ylabel("unfinished rows")
    _label(axes, [f"devices {group}" for group in groups], max(work.end for work in works), "seconds")
    axes.set_title(f"{name} and the calls that score its rows, for the lengths assumed", pad=16)


def _draw_ticks(axes: Any, updates: FusedUpdates) -> None:
    """Draws what each group of devices computes at each tick: micro-batches as numbers, calls and kinds as colours."""
    from matplotlib.patches import Patch

    table = updates.table
    colours, handles = {}, []
    for (name, numbers), own in zip(updates.pipelines.items(), TICK_COLORS, strict=False):
        pipeline = table.pipelines[numbers.start]
        for kind, colour in zip(pipeline.kinds, own, strict=False):
            colours |= {(number, kind): colour for number in numbers}
            handles.append(Patch(facecolor=colour, label=kind if len(updates.pipelines) == 1 else f"{name}: {kind}"))
    for tick, step in table.operations:
        row, colour = table.pipelines[step.model].devices[step.stage], colours[step.model, step.kind]
        _draw_box(axes, row, tick, 1, facecolor=colour)
        if len(table.operations) <= MOST_NUMBERED:
            axes.text(tick + 0.5, row, step.micro_batch, ha="center", va="center", color="white", fontsize=6)
    _label(axes, [f"group {group}" for group in range(table.devices)], 1 + table.operations[-1].tick, "ticks")
    axes.set_title(f"{' and '.join(updates.pipelines)}: bubble {100 * bubble(table, lambda step: 1):.0f} %")
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
