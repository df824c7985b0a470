"""Sections about the calls of an iteration: the duration of each, and its devices."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jrlhf.config.schema import SleepConfig
from jrlhf.errors import UserError
from jrlhf.meshes.pipeline import table_of
from jrlhf.meshes.plan import Slice, segments
from jrlhf.report.charts import COLORS
from jrlhf.report.read import Metrics, Record
from jrlhf.run.colors import TICK_COLORS, call_color
from jrlhf.run.contents import FUSED
from jrlhf.run.metrics import TIMELINE
from jrlhf.run.text import duration

# What the calls of an iteration do.
_CALLS = {
    "validation": "answer and score held-out prompts",
    "reshard": "switch weights to the layout of a call",
    "gen": "generate responses",
    "reward": "scores of reward models",
    "old_log_prob": "actor log-probs",
    "ref": "reference log-probs",
    "values": "critic values",
    "cost_values": "cost critic values",
    "reward_wait": "wait for functions' scores",
    "pool": "select groups with different scores",
    "adv": "rewards and advantages",
    "update_critic": "train the critic",
    "update_cost_critic": "train the cost critic",
    "update_actor": "train the actor",
    "update": "experience, train both",
    "transfer": "arrays to the devices of a call",
    "sleep": "offload weights and states and bring them back",
}
_PARALLEL = {"reward_functions": "reward functions", "cost_functions": "cost functions"}  # run in other processes
_COMPILING = 2  # number of iterations at the start that compile


class Bar(NamedTuple):
    """A part of a lane. start, width, height: shares of the lane. color: in CSS."""

    start: float
    width: float
    color: str
    height: float = 1.0


class TimelineLane(NamedTuple):
    """A row of bars. numbers: texts at its end."""

    name: str
    note: str
    bars: list[Bar]
    numbers: tuple[str, str]


class TimelineSpan(NamedTuple):
    """A call, in seconds of its iteration. devices: None where they are not known.

    rows: (seconds, unfinished rows from then on), if it drew in chunks of decode steps. lane: not None for a chunk that
    rollout processes decoded: the number of their lane.
    """

    name: str
    start: float
    end: float
    devices: Slice | None = None
    copies: bool = False
    rows: Sequence[tuple[float, int]] = ()
    lane: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def is_on(self, devices: Slice) -> bool:
        return self.devices is not None and self.devices.overlaps(devices)


def timeline(run: Record) -> tuple[str, list[TimelineLane]]:
    """Draws the iteration of median length: a lane for each slice of the devices, if there are several, and each call.

    Rollout processes have a lane if they decode together, else one each.
    The median does not include the first iterations, which compile.
    """
    settled = run.iterations[_COMPILING:] or run.iterations
    if (measured := _measured(run, settled)) is None:
        return "", []
    record, spans = measured
    chunks = [span for span in spans if span.lane is not None]
    spans = [span for span in spans if span.end > span.start and span.lane is None]
    length = max([record["timing_s/step"], *(span.end for span in spans)])
    spans += _rest(spans, length)
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
    draw = _Painter(length)
    lanes = [
        draw.lane(name, _CALLS.get(name, ""), [span for span in spans if span.name == name], busy)
        for name, busy in seconds.items()
    ]
    drawing = [span for span in spans if span.rows]
    if any(left for span in drawing for _, left in span.rows):
        lanes.insert(1 + [*seconds].index(drawing[0].name), draw.unfinished_rows(drawing))
    slices, overlap = draw.slices(spans)
    text = _summary(run, record, seconds, len(settled)) + overlap + _moves(drawing)
    return text, draw.processes(chunks) + slices + lanes


class _Painter(NamedTuple):
    """Draws spans as lanes. length: seconds of the iteration."""

    length: float

    def lane(
        self, name: str, note: str, spans: list[TimelineSpan], busy: float, color: str | None = None
    ) -> TimelineLane:
        """Draws spans. busy: seconds to write at the lane's end. color: of all, in place of that of each call."""
        length = self.length
        bars = [Bar(span.start / length, span.seconds / length, color or call_color(span.name)) for span in spans]
        return TimelineLane(name, note, bars, (_milliseconds(busy), f"{busy / length:.1%}"))

    def slices(self, spans: list[TimelineSpan]) -> tuple[list[TimelineLane], str]:
        """Draws each slice of the devices, and describes their overlap; nothing if all calls run on the same one."""
        groups = segments(span.devices for span in spans if span.devices is not None)
        if len(groups) < 2:
            return [], ""
        calls, lanes = [span for span in spans if span.devices is not None and not span.copies], []
        for group in groups:
            # Copies first, so that no call is hidden behind one of them.
            own = sorted((span for span in spans if span.is_on(group)), key=lambda span: not span.copies)
            busy = _sum(_lasting([span for span in calls if span.is_on(group)]))
            lanes.append(self.lane(f"devices {group}", "in the colours of the calls", own, busy))
        share = _sum(_lasting(calls, 2)) / self.length
        return lanes, f" Calls on separate devices overlap for {share:.1%} of it."

    def unfinished_rows(self, spans: list[TimelineSpan]) -> TimelineLane:
        """Draws how many rows are unfinished."""
        most, bars = max(left for span in spans for _, left in span.rows), []
        for span in spans:
            for (start, left), (end, _) in pairwise([*span.rows, (span.end, 0)]):
                width = (end - start) / self.length
                bars.append(Bar(start / self.length, width, call_color(span.name), left / most))
        return TimelineLane("unfinished rows", "waiting or decoding", bars, (f"{most} rows", ""))

    def processes(self, chunks: list[TimelineSpan]) -> list[TimelineLane]:
        """Draws the chunks that rollout processes decode."""
        numbers, lanes = sorted({span.lane for span in chunks if span.lane is not None}), []
        for number in numbers:
            own = [span for span in chunks if span.lane == number]
            name = f"rollout process {number}" if len(numbers) > 1 else "rollout processes"
            busy = sum(span.seconds for span in own)
            lanes.append(self.lane(name, "chunks of decode steps", own, busy, COLORS[number % 2]))
        return lanes


def _rest(spans: list[TimelineSpan], length: float) -> list[TimelineSpan]:
    """Returns the gaps between calls, except very short ones; none if all together are short."""
    gaps = _gaps(spans, length)
    matter = sum(gap.seconds for gap in gaps) > 0.005 * length
    return [gap for gap in gaps if matter and gap.seconds > 0.002 * length]


def _moves(drawing: list[TimelineSpan]) -> str:
    """Describes the moves of the last unfinished rows to other devices."""
    return "".join(
        f" The last {after.rows[0][1]} rows move from devices {before.devices} to {after.devices} "
        f"after {_milliseconds(after.start)}."
        for before, after in pairwise(drawing)
        if before.name == after.name and after.start == before.end and after.devices != before.devices
    )


def _measured(run: Record, settled: list[Metrics]) -> tuple[Metrics, list[TimelineSpan]] | None:
    """Returns the record and the calls of the iteration of median length among those with a timeline."""
    records = {record["step"]: record for record in settled if record.get("timing_s/step")}
    try:
        own = {line["step"]: line["calls"] for line in run.timelines if line["stage"] == run.algorithm}
        steps = sorted(own.keys() & records.keys(), key=lambda step: records[step]["timing_s/step"])
        if not steps:
            return None
        step = steps[(len(steps) - 1) // 2]
        spans = [
            TimelineSpan(
                str(call["name"]),
                float(call["start"]),
                float(call["end"]),
                Slice.of(call["devices"]) if "devices" in call else None,
                call.get("copies", False),
                [(float(when), int(left)) for when, left in call.get("rows", ())],
                None if "lane" not in call else int(call["lane"]),
            )
            for call in own[step]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run.name}/{TIMELINE} holds a line that is no timeline ({error}): delete the file") from error
    return records[step], spans


def _lasting(spans: list[TimelineSpan], least: int = 1) -> list[tuple[float, float]]:
    """Returns the intervals (start, end) in which at least `least` of the spans overlap."""
    changes = sorted(change for span in spans for change in ((span.start, 1), (span.end, -1)))
    lasting, start, times = 0, 0.0, []
    for when, change in changes:
        if lasting < least <= lasting + change:
            start = when
        elif lasting + change < least <= lasting:
            times.append((start, when))
        lasting += change
    return times


def _sum(times: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in times)


def _gaps(spans: list[TimelineSpan], length: float) -> list[TimelineSpan]:
    """Returns the intervals without any span."""
    bounds = [0.0, *(bound for times in _lasting(spans) for bound in times), length]
    return [
        TimelineSpan("rest", start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True) if end > start
    ]


def _summary(run: Record, record: Metrics, seconds: dict[str, float], count: int) -> str:
    total, first = record["timing_s/step"], run.iterations[0].get("timing_s/step")
    text = f"Step {record['step']}, the median of the last {count}, takes {_milliseconds(total)}"
    text += f"; the first one, which compiles, took {duration(first)}." if first and len(run.iterations) > 1 else "."
    if "reshard" in seconds:
        text += f" Switching weights from layout to layout costs {seconds['reshard'] / total:.1%} of it."
    parallel = [(words, length) for name, words in _PARALLEL.items() if (length := record.get(f"timing_s/{name}"))]
    if parallel:
        work = " and ".join(f"{words} ({_milliseconds(length)})" for words, length in parallel)
        text += f" In parallel run {work}; the calls wait {_milliseconds(seconds.get('reward_wait', 0.0))} for them."
    validations = [length for length in run.curve("timing_s/validation")[1] if length > 0]
    if validations and "validation" not in seconds:
        text += f" Validation, {len(validations)} times in all, takes {_milliseconds(float(np.median(validations)))}."
    return text


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def placement(run: Record) -> tuple[str, list[TimelineLane]]:
    """Draws the plan: a bar for each call across the devices that it runs on; empty with a single device."""
    plan = run.plan
    if plan is None or plan.devices == 1:
        return "", []
    text = (
        f"The plan is {plan.name}. A bar spans the devices, of {plan.devices}, that a call runs on, "
        "in its layout (docs/layouts.md) and mesh, in the call's colour in the timeline."
    )
    if any(call.micro_batches > 1 for call in plan.placements.values()):
        text += " × n: a device computes its rows in n parts."
    if away := [part for part in SleepConfig.SWITCHES if run.settings.get(f"sleep.{part}") == "host"]:
        text += f" In host memory while others compute: {', '.join(away)}."
    lanes = []
    for name, call in plan.placements.items():
        sizes = zip(("data", "fsdp", "tensor", "pipeline"), (*call.sizes, call.pipeline), strict=True)
        mesh = " × ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one device"
        mesh += f" by {call.schedule}" if call.pipeline > 1 and _updates(name) else ""
        parts = f"× {call.micro_batches}" if call.micro_batches > 1 else ""
        bar = Bar(call.devices.start / plan.devices, call.devices.count / plan.devices, call_color(name))
        lanes.append(TimelineLane(name, f"{call.layout} · {mesh}", [bar], (str(call.devices), parts)))
    return text, lanes


def stages(run: Record) -> tuple[str, list[TimelineLane]]:
    """Draws what each group of devices computes at each tick of a minibatch, or of a call that scores, in stages."""
    lanes, plan = [], run.plan
    if plan is None:
        return "", lanes
    text = "A bar is an operation on one micro-batch: blue forward, orange backward, green gradients of weights."
    if plan.fused and run.fused:
        try:
            lanes += _ticks("updates", "fused", *_fused_operations(run.fused))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{run.name}/{FUSED} holds no table of updates ({reason}): delete the file") from error
        text += f" The updates are {' and '.join(plan.fused)}; forward and backward of the latter are violet and red."
    for name, call in plan.placements.items():
        if call.pipeline > 1 and call.schedule != "fused":
            table = table_of(call.schedule, call.pipeline, call.micro_batches, trains=(trains := _updates(name)))
            (pipeline,) = table.pipelines
            kinds = dict(zip(("forward", "backward", "weight"), TICK_COLORS[0], strict=True))
            operations = [(tick, pipeline.devices[step.stage], kinds[step.kind]) for tick, step in table.operations]
            lanes += _ticks(name, call.schedule if trains else "scores", operations, table.devices)
    return (text if lanes else ""), lanes


def _fused_operations(fused: Mapping[str, Any]) -> tuple[list[tuple[int, int, str]], int]:
    """Returns the (tick, group of devices, color) of each operation of a stored table, and the number of groups."""
    colors = {}
    for numbers, pair in zip(fused["pipelines"].values(), TICK_COLORS, strict=True):
        colors |= {number: dict(zip(("forward", "backward"), pair, strict=False)) for number in numbers}
    devices, steps = fused["devices"], fused["operations"]
    operations = [(tick, devices[model][stage], colors[model][kind]) for tick, model, stage, _, kind in steps]
    return operations, 1 + max(map(max, devices))


def _ticks(name: str, schedule: str, operations: Sequence[tuple[int, int, str]], groups: int) -> list[TimelineLane]:
    """Returns a lane for each group of devices. operations: (tick, group, color)."""
    ticks = 1 + max(tick for tick, _, _ in operations)
    note = f"{schedule}: {ticks} ticks, bubble {100 - 100 * len(operations) / (groups * ticks):.0f}%"
    bars: list[list[Bar]] = [[] for _ in range(groups)]
    for tick, group, color in operations:
        bars[group].append(Bar(tick / ticks, 1 / ticks, color))
    return [TimelineLane(f"{name}, group {n}", "" if n else note, own, ("", "")) for n, own in enumerate(bars)]


def _updates(call: str) -> bool:
    return call.partition(".")[2].startswith("update")
