"""A result as text and as a picture, of the timeline."""

import re

import pytest

from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.search import search
from jrlhf.planning.show import _range, bottleneck, critical_path, describe, operations, plot, timeline
from jrlhf.planning.simulate import simulate
from jrlhf.run.colors import call_color
from jrlhf.stages import mfu
from tests.jrlhf.planning.synthetic import PPO, Table, problem

CALLS = [call.name for call in PPO if call.kind != "compute"]
TABLE = Table(dict(zip(CALLS, (16.0, 6.0, 8.0, 5.0, 28.0, 9.0), strict=True)))
ALL, ONE, TWO = Slice(0, 4), Slice(0, 2), Slice(2, 2)
PLAN = Plan(
    "drawn",
    {
        name: Placement(devices, "score", fsdp=devices.count)
        for name, devices in zip(CALLS, (ALL, ONE, TWO, ALL, TWO, ONE), strict=True)
    },
)


def test_the_critical_path_is_what_the_end_waits_for():
    simulation = simulate(PPO, PLAN, TABLE)
    path = critical_path(simulation)
    names = ["actor.generate", "reference.logprobs", "critic.values", "critic.update"]
    assert [span.call for span in path] == names
    assert sum(span.seconds for span in path) == simulation.seconds == 57
    assert bottleneck(simulation).startswith(
        "critic.update; of the critical path: critic.update 49 %, actor.generate 28"
    )
    # Work of no length next to an iteration ends the path too.
    seconds = {"actor.generate": 1e6, "reward.score": 1e-7, "critic.update": 1e-7, "actor.update": 1e-7}
    simulation = simulate(PPO, PLAN, Table({name: seconds.get(name, 1.0) for name in CALLS}))
    assert bottleneck(simulation).startswith("actor.generate; of the critical path: actor.generate 100 %")


def test_the_timeline_shows_who_works_when():
    simulation = simulate(PPO, PLAN, TABLE)
    legend, one, two, scale = timeline(simulation)
    assert all(f"{letter} {name}" in legend for letter, name in zip("ABCD", CALLS, strict=False))
    drawn = {line.split("|")[0].strip(): line.split("|")[1] for line in (one, two)}
    assert drawn.keys() == {"devices 0-1", "devices 2-3"}
    columns = 72 / 57
    for row, letter, seconds in (("devices 0-1", "A", 16), ("devices 0-1", "B", 6), ("devices 2-3", "C", 8)):
        assert drawn[row].count(letter) == pytest.approx(seconds * columns, abs=1)
    assert drawn["devices 0-1"].count(" ") == pytest.approx((2 + 19) * columns, abs=2)
    assert " " not in drawn["devices 2-3"]
    assert scale.endswith(" 57 s")


def test_a_result_is_told_with_all_that_a_user_asks_for():
    prices = problem(16, rows=128)
    result = search(prices, proposals=1_000)
    text = describe(prices, result)
    for name, placement in result.best.plan.placements.items():
        assert re.search(rf"{re.escape(name)} +{placement.devices} +{placement.layout} ", text)
    for name in ("heuristic", "colocate", "split", "standalone", "next 1", "next 3"):
        assert re.search(rf"\n  {name} +[\d.]+ m?s +\+[\d.]+ %", text)
    for name, at in result.best.plan.placements.items():  # MFU and shares of what was priced
        [(mfu, first)] = re.findall(rf"\n  {name} +(\d+) % +\w+ (\d+) %", text)
        parts, peak = prices.parts(PPO[name], at), prices.cluster.hardware.bfloat16 * at.devices.count
        assert int(first) == round(100 * max(parts.values()) / sum(parts.values()))
        assert int(mfu) == round(100 * operations(prices.workload, PPO[name]) / sum(parts.values()) / peak) < 100
    assert "bottleneck: " in text and "timeline of an iteration" in text
    [numbers] = re.findall(r"plan for ppo on 16 x h100: (\S+) s an iteration \((\S+) s to (\S+) s\)", text)
    for number, factor in zip(numbers, (1, 0.84, 2.8), strict=True):  # two digits
        assert float(number) == float(f"{factor * result.best.seconds:.2g}")
    assert "calibrated on programs on one H200; what collectives reach is assumed, and that a h100 reaches" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("  devices")) < 100


@pytest.mark.parametrize(
    ("hardware", "devices", "most", "source"),
    [
        ("h200", 1, 1.16, "assumed$"),
        ("h200", 8, 2.8, "assumed$"),
        ("v5p", 8, 2.8, "nothing; all fractions are assumed$"),
    ],
)
def test_times_tell_their_range_and_what_they_are_calibrated_on(hardware: str, devices: int, most: float, source: str):
    prices = problem(devices, hardware=hardware)
    assert _range(prices, 123.456) == f"100 s to {float(f'{123.456 * most:.2g}'):g} s"
    assert re.search(source, prices.cluster.hardware.calibration)


def test_a_call_has_one_colour_in_all_pictures():
    """By its name in the graph and in the metrics, whatever other calls there are; and no other call has it."""
    timed = {name: metric for name, (_, metric, _) in mfu.CALLS.items()}
    for name, metric in {**timed, "actor.generate": "gen", "reward.score": "reward"}.items():
        assert call_color(name) == call_color(metric), name
    assert len({call_color(name) for name in CALLS}) == len(CALLS)


def test_the_timeline_is_drawn(tmp_path):
    for ending, begins in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        path = tmp_path / f"plan{ending}"
        plot(simulate(PPO, PLAN, TABLE), "PPO", path)
        assert path.read_bytes().startswith(begins)
    # One box a call, iteration and group of devices: 2 groups, 3 iterations, 4 calls each.
    assert (tmp_path / "plan.svg").read_text().count('id="patch_') >= 2 * 3 * 4
