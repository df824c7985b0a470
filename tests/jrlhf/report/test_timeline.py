"""The timeline of a report against a random schedule, painted second by second."""

import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from jrlhf.config import Config
from jrlhf.config.keys import flatten
from jrlhf.config.schema import SleepConfig
from jrlhf.errors import UserError
from jrlhf.meshes.pipeline import FusedUpdates, bubble
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.fusion.dispatch import search
from jrlhf.planning.fusion.problem import FusedModel, fuse
from jrlhf.report.charts import COLORS
from jrlhf.report.html import render
from jrlhf.report.read import Record, read_run
from jrlhf.report.timeline import placement, stages, timeline
from jrlhf.run.metrics import MetricsLog

SLICES = ("0-3", "4-7", "0-7", "6-7")


def schedule(draw: random.Random) -> tuple[list[dict], int]:
    """Calls in whole seconds; those on common devices follow each other."""
    free, calls = [0] * 8, []
    for number in range(8):
        devices, length = Slice.of(draw.choice(SLICES)), draw.randint(1, 9)
        own = slice(devices.start, devices.stop)
        start = max(free[own]) + draw.randint(0, 2)
        free[own] = [start + length] * devices.count
        calls.append({"name": f"call{number}", "devices": str(devices), "start": start, "end": start + length})
    return [call | {"copies": False} for call in calls], max(free) + 1


def write(directory: Path, calls: list[dict], length: int) -> None:
    seconds: dict[str, float] = {}
    for call in calls:
        seconds[f"timing_s/{call['name']}"] = float(call["end"] - call["start"])
    with MetricsLog(directory) as log:
        for step, slower in enumerate((9, 9, 2, 0, -1), 1):  # the median of those after two that compile is step 4
            log.log("ppo", step, seconds | {"timing_s/step": float(length + slower)}, calls=calls if step == 4 else ())


@pytest.mark.parametrize("seed", range(3))
def test_lanes_of_slices_and_calls_are_what_ran_when(seed, tmp_path):
    calls, length = schedule(random.Random(seed))
    write(tmp_path, calls, length)
    run = read_run(tmp_path)
    text, lanes = timeline(run)
    busy, names = np.zeros((8, length), int), {}
    for call in calls:
        devices = Slice.of(call["devices"])
        busy[devices.start : devices.stop, call["start"] : call["end"]] += 1
        names[call["name"]] = (call["start"], call["end"])
    assert busy.max() == 1
    drawn = {lane.name: [(bar.start * length, (bar.start + bar.width) * length) for bar in lane.bars] for lane in lanes}
    for name, times in names.items():
        assert drawn[name] == [pytest.approx(times)]
    groups = [Slice.of(name.removeprefix("devices ")) for name in drawn if name.startswith("devices ")]
    assert len(groups) > 1 and [group.start for group in groups] == sorted(group.start for group in groups)
    for group in groups:
        painted = np.zeros(length, int)
        for start, end in drawn[f"devices {group}"]:
            painted[round(start) : round(end)] += 1
        for device in range(group.start, group.stop):
            np.testing.assert_array_equal(painted, busy[device])
    # Calls at the same time: each counts once, on however many devices it runs.
    running = np.zeros(length, int)
    for start, end in names.values():
        running[start:end] += 1
    rest = sum(end - start for start, end in drawn["rest"])
    assert rest == pytest.approx((running == 0).sum())
    (overlap,) = map(float, re.findall(r"overlap for ([\d.]+)% of it", text))
    assert overlap == pytest.approx(100 * (running > 1).mean(), abs=0.51)
    assert text.startswith("Step 4, the median of the last 3, takes ") and render(run).count("devices ") >= len(groups)


def test_the_unfinished_rows_and_their_move_are_drawn(tmp_path):
    calls = [
        {"name": "gen", "devices": "0-3", "start": 0.0, "end": 4.0, "copies": False, "rows": [[0.0, 8], [2.0, 2]]},
        {"name": "ref", "devices": "2-3", "start": 5.0, "end": 7.0, "copies": False},
        {"name": "gen", "devices": "0-1", "start": 4.0, "end": 10.0, "copies": False, "rows": [[4.0, 2], [6.0, 1]]},
    ]
    write(tmp_path, calls, 10)
    text, lanes = timeline(read_run(tmp_path))
    assert text.endswith(" The last 2 rows move from devices 0-3 to 0-1 after 4.00 s.")
    (rows,) = [lane for lane in lanes if lane.name == "unfinished rows"]
    curve = [(round(10 * bar.start), round(10 * (bar.start + bar.width)), 8 * bar.height) for bar in rows.bars]
    assert curve == [(0, 2, 8), (2, 4, 2), (4, 6, 2), (6, 10, 1)] and rows.numbers == ("8 rows", "")
    (group,) = [lane for lane in lanes if lane.name == "devices 2-3"]  # the score begins after the rows have left
    assert [round(10 * bar.start) for bar in group.bars] == [0, 5]


def test_rollout_processes_have_lanes(tmp_path):
    calls = [{"name": "update_actor", "devices": "0-7", "start": 0.0, "end": 8.0, "copies": False}]
    chunks = [
        {"name": "chunk", "lane": lane, "start": start, "end": start + 2.0} for lane, start in ((1, 1), (0, 3), (0, 5))
    ]
    write(tmp_path, calls + chunks, 10)
    _, lanes = timeline(read_run(tmp_path))
    bars = {lane.name: [(round(10 * bar.start), round(10 * bar.width)) for bar in lane.bars] for lane in lanes}
    first, second = [(3, 2), (5, 2)], [(1, 2)]
    assert bars == {"rollout process 0": first, "rollout process 1": second, "update_actor": [(0, 8)], "rest": [(8, 2)]}
    assert lanes[0].numbers == ("4.00 s", "40.0%")
    write(tmp_path, calls + chunks[1:], 10)
    assert [lane.name for lane in timeline(read_run(tmp_path))[1]] == ["rollout processes", "update_actor", "rest"]


def test_a_slice_of_its_own_has_no_lane_and_a_line_that_is_no_timeline_is_one_sentence(tmp_path):
    calls = [{"name": "gen", "devices": "0-7", "start": 0.0, "end": 2.0, "copies": False}]
    calls += [{"name": "gen", "devices": "0-7", "start": 3.0, "end": 4.0, "copies": False}]
    write(tmp_path, calls, 4)
    _, lanes = timeline(read_run(tmp_path))
    assert [lane.name for lane in lanes] == ["gen", "rest"] and len(lanes[0].bars) == 2
    write(tmp_path, [calls[0] | {"devices": "all"}], 4)
    with pytest.raises(UserError, match=r"timeline.jsonl holds a line that is no timeline \(devices=all must be"):
        render(read_run(tmp_path))


def test_stages_are_drawn_tick_by_tick():
    """1F1B leaves (S - 1) / (M + S - 1) of the ticks empty, and stage s begins at tick s and ends at the last but s."""
    count, parts = 4, 8
    staged = Placement(Slice(0, 4), "train", pipeline=count, micro_batches=parts)
    whole = Placement(Slice(0, 4), "score", fsdp=4)
    run = Record("mine", plan=Plan("mine", {"critic.values": whole, "actor.update": staged}))
    _, lanes = stages(run)
    ticks = 2 * (parts + count - 1)
    assert [lane.name for lane in lanes] == [f"actor.update, group {group}" for group in range(count)]
    assert lanes[0].note == f"1f1b: {ticks} ticks, bubble {100 * (count - 1) / (parts + count - 1):.0f}%"
    for group, lane in enumerate(lanes):
        starts = [round(bar.start * ticks) for bar in lane.bars]
        assert len(set(starts)) == 2 * parts and (min(starts), max(starts)) == (group, ticks - 1 - group)
        assert [bar.color for bar in lane.bars].count(COLORS[1]) == parts
        assert all(bar.width == 1 / ticks for bar in lane.bars)
    assert [lane.note for lane in placement(run)[1]] == ["score · fsdp 4", "train · pipeline 4 by 1f1b"]
    away = replace(run, settings=flatten(asdict(Config(sleep=SleepConfig(optimizer="host", critic="host")))))
    assert placement(away)[0] == f"{placement(run)[0]} In host memory while others compute: optimizer, critic."
    assert stages(Record("mine", plan=Plan("mine", {"critic.values": whole}))) == stages(Record("mine")) == ("", [])
    scores = Placement(Slice(0, 4), "score", pipeline=count, micro_batches=parts)
    run = Record("mine", plan=Plan("mine", {"critic.values": scores}))
    lanes, ticks = stages(run)[1], parts + count - 1
    assert [lane.note for lane in placement(run)[1]] == ["score · pipeline 4"]
    assert lanes[0].note == f"scores: {ticks} ticks, bubble {100 * (count - 1) / ticks:.0f}%"
    assert [[round(bar.start * ticks) for bar in lane.bars] for lane in lanes] == [
        list(range(group, group + parts)) for group in range(count)
    ]


def test_fused_updates_are_drawn_from_the_table_that_the_run_stored(tmp_path):
    """Two pipelines of two stages come down while one of four goes up; every operation has its tick and group."""
    table = search(fuse(FusedModel(4, 4, 1, 2), FusedModel(2, 4, 1, 2)), effort=0.1)
    updates = FusedUpdates(table, {"actor.update": range(1), "critic.update": range(1, 3)})
    staged = Placement(Slice(0, 4), "train", pipeline=4, micro_batches=4, schedule="fused")
    calls = {"actor.update": staged, "critic.update": replace(staged, data=2, pipeline=2)}
    run = Record("mine", plan=Plan("mine", calls), fused=json.loads(updates.to_json()))
    text, lanes = stages(run)
    ticks = 1 + table.operations[-1].tick
    drawn = {(round(bar.start * ticks), group, bar.color) for group, lane in enumerate(lanes) for bar in lane.bars}
    expected, colors = set(), {"forward": COLORS[0::3], "backward": COLORS[1::3]}  # of the actor, of the critic
    for tick, step in table.operations:
        expected.add((tick, table.pipelines[step.model].devices[step.stage], colors[step.kind][step.model > 0]))
    assert drawn == expected
    assert len(drawn) == 2 * (4 * 4 + 2 * 2 * 4) and "actor.update and critic.update; " in text
    assert lanes[0].name == "updates, group 0"
    assert lanes[0].note == f"fused: {ticks} ticks, bubble {100 * bubble(table, lambda step: 1):.0f}%"
    whole = Placement(Slice(0, 4), "train", fsdp=4)  # a resume with another plan leaves the file
    assert stages(replace(run, plan=Plan("mine", {"actor.update": whole}))) == ("", [])
    wrong = {"devices": [], "operations": 3, "pipelines": []}
    for damaged in (*(run.fused | {name: value} for name, value in wrong.items()), {"devices": [[0]]}):
        with pytest.raises(UserError, match=r"mine/fused.json holds no table of updates \(.*\): delete the file"):
            stages(replace(run, fused=damaged))
