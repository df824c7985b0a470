"""The simulator: published sums, what may overlap, what waits, memory; and the search's core against it."""

import random

import pytest

from jrlhf.meshes import Call
from jrlhf.meshes.plan import LayoutName, Placement, Plan, Slice, segments
from jrlhf.planning.simulate import Simulation, Simulator, simulate
from jrlhf.planning.time import Price
from tests.jrlhf.planning.synthetic import PPO, Table, problem

CALLS = ("actor.generate", "reward.score", "reference.logprobs", "critic.values", "critic.update", "actor.update")
BOTH, ONE, TWO = Slice(0, 16), Slice(0, 8), Slice(8, 8)
LAYOUTS: dict[str, LayoutName] = {"generate": "generate", "infer": "score", "train": "train"}


def placed(call: str, devices: Slice, **sizes: int) -> Placement:
    sizes = sizes or {"fsdp": devices.count}
    return Placement(devices, LAYOUTS[PPO[call].kind], **sizes)  # pyright: ignore[reportArgumentType]


def plan_of(*slices: Slice) -> Plan:
    return Plan("test", {call: placed(call, devices) for call, devices in zip(CALLS, slices, strict=True)})


def total(simulation: Simulation) -> float:
    """Seconds from the first start to the end of the last call."""
    return max(span.end for span in simulation.spans if span.kind == "call")


def test_published_calls_take_what_algorithm_1_says():
    """ReaL's measured calls of 7B + 7B on 16 H100: searched plan, and heuristic."""
    for seconds, slices, expected in (
        ((16.3, 6.0, 8.0, 4.7, 28.1, 26.6), (BOTH, ONE, TWO, BOTH, TWO, ONE), 57.1),
        ((44.2, 7.3, 7.6, 6.8, 24.3, 24.7), (BOTH,) * 6, 114.9),
    ):
        prices, plan = Table(dict(zip(CALLS, seconds, strict=True))), plan_of(*slices)
        result = simulate(PPO, plan, prices)
        assert (result.seconds, total(result)) == (pytest.approx(expected), pytest.approx(5 * expected))
        assert simulate(PPO, plan, prices, iterations=2).seconds == pytest.approx(expected, abs=1e-9)
    with pytest.raises(ValueError, match="at least 2"):
        simulate(PPO, plan, prices, iterations=1)


def test_disjoint_calls_overlap_and_a_device_does_one_thing_at_a_time():
    prices = Table(dict(zip(CALLS, (4.0, 1.0, 2.0, 1.0, 8.0, 3.0), strict=True)))
    result = simulate(PPO, plan_of(BOTH, ONE, TWO, BOTH, TWO, ONE), prices)
    spans = {(span.call, span.iteration): span for span in result.spans}
    assert (spans["reward.score", 0].start, spans["reward.score", 0].end) == (4.0, 5.0)
    assert (spans["reference.logprobs", 0].start, spans["critic.values", 0].start) == (4.0, 6.0)
    assert spans["critic.update", 0].start == spans["actor.update", 0].start == 7.0
    assert spans["actor.generate", 1].start == 15.0  # the actor is ready at 10, its devices are not
    for one in result.spans:
        for other in result.spans:
            shared = any(a.overlaps(b) for a in one.devices for b in other.devices)
            assert one is other or not shared or one.end <= other.start or other.end <= one.start


def test_in_lockstep_an_iteration_waits_for_all_of_the_one_before():
    prices = Table(dict(zip(CALLS, (4.0, 1.0, 2.0, 1.0, 8.0, 3.0), strict=True)))
    plan = plan_of(ONE, ONE, ONE, ONE, TWO, ONE)
    overlapping, lockstep = (simulate(PPO, plan, prices, lockstep=flag) for flag in (False, True))
    assert lockstep.seconds == total(lockstep) / 5 == 4 + 1 + 2 + 1 + 8
    assert overlapping.seconds == 4 + 1 + 2 + 1 + 3  # the critic trains in the meantime
    assert total(overlapping) == 4 * 11 + 16
    starts = {(span.call, span.iteration): span.start for span in overlapping.spans}
    assert starts["actor.generate", 1] == 11.0


def test_no_schedule_repeats_faster_than_its_busiest_device_or_its_longest_path():
    """Random plans overlap their iterations as they can; their rate is that of the ends of updates in the spans."""
    draw, scoring = random.Random(0), ("reward.score", "reference.logprobs", "critic.values")
    slices = [Slice(0, 1), Slice(1, 1), Slice(0, 2), Slice(2, 1), Slice(1, 2), Slice(0, 3)]
    overlaps = 0
    for _ in range(60):
        seconds = {name: float(draw.randrange(1, 12)) for name in CALLS}
        result = simulate(PPO, plan_of(*(draw.choice(slices) for _ in CALLS)), Table(seconds))
        ends = {(span.call, span.iteration): span.end for span in result.spans}
        rate = max((ends[name, 4] - ends[name, 0]) / 4 for name in ("critic.update", "actor.update"))
        for device in range(3):
            here = [span for span in result.spans if span.devices[0].overlaps(Slice(device, 1))]
            assert rate >= sum(span.seconds for span in here) / 5 - 1e-9
        longest = seconds["actor.generate"] + max(seconds[name] for name in scoring) + seconds["actor.update"]
        assert rate >= longest - 1e-9
        assert result.seconds == pytest.approx(rate)
        overlaps += total(result) < 5 * ends["critic.update", 0] - 1e-9
    assert overlaps > 2  # iterations did overlap


class Moving:
    """Every call takes a second; weights and values take as long as the distance that they go."""

    capacity = 100.0

    def call(self, call: Call, placement: Placement) -> Price:
        home = call.kind == "train" or call.role in ("reward", "reference")
        return Price(placement, 1.0, 10.0 if home else 0.0, len(call.name) / 10)

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        return abs(home.devices.start - placement.devices.start) / 10 + (home.layout != placement.layout) / 4

    def transfer(self, source: Placement, target: Placement) -> float:
        return abs(source.devices.start - target.devices.start) / 100


def test_weights_and_values_move_and_occupy_both_places():
    result = simulate(PPO, plan_of(TWO, ONE, ONE, ONE, ONE, ONE), Moving())
    first = [span for span in result.spans if span.iteration == 0]
    timeline = [(span.kind, span.call, round(span.start, 9), round(span.end, 9)) for span in first]
    assert timeline[:5] == [
        ("reallocation", "actor.generate", 0.0, 1.05),
        ("call", "actor.generate", 1.05, 2.05),
        ("transfer", "reward.score", 2.05, 2.13),
        ("transfer", "reference.logprobs", 2.13, 2.21),
        ("transfer", "critic.values", 2.21, 2.29),
    ]
    assert first[0].devices == (ONE, TWO) and first[2].devices == (TWO, ONE)
    assert ("reallocation", "critic.values") in {(span.kind, span.call) for span in first}
    assert ("reallocation", "critic.update") not in {(span.kind, span.call) for span in first}


def test_memory_is_what_stays_and_the_largest_call():
    result = simulate(PPO, plan_of(TWO, ONE, ONE, ONE, ONE, ONE), Moving())
    one, two = result.memory
    assert (one.devices, one.resident, one.peak) == (ONE, 40.0, 40.0 + len("reference.logprobs") / 10)
    assert (two.devices, two.resident, two.peak) == (TWO, 0.0, len("actor.generate") / 10)
    assert result.peak == one.peak


def test_segments_are_divided_where_a_slice_begins_or_ends():
    result = segments([Slice(0, 8), Slice(4, 8), Slice(20, 2)])
    assert result == [Slice(0, 4), Slice(4, 4), Slice(8, 4), Slice(20, 2)]


@pytest.mark.parametrize("prices", [Moving(), problem(16)])
def test_the_search_sees_the_same_numbers(prices):
    """Random plans, with slices that overlap in part, with and without a record."""
    draw = random.Random(0)
    roles = [role for role in PPO.roles if role != "estimator"]
    evaluators = {lockstep: Simulator(PPO, prices, roles, lockstep=lockstep) for lockstep in (False, True)}
    for turn in range(150):
        placements = {}
        for name in CALLS:
            tensor, fsdp, data = (2 ** draw.randrange(3) for _ in range(3))
            devices = Slice(draw.choice([0, 1, 4, 8, 9, 16]), tensor * fsdp * data)
            placements[name] = placed(name, devices, tensor=tensor, fsdp=fsdp, data=data)
        plan = Plan("random", placements)
        lockstep = bool(turn % 2)
        evaluator = evaluators[lockstep]
        result, choice = simulate(PPO, plan, prices, lockstep=lockstep), evaluator.choice(plan)
        seconds, peak, nested = evaluator.evaluate(choice)
        assert seconds == pytest.approx(result.seconds, rel=1e-12)
        assert peak == pytest.approx(result.peak, rel=1e-12)
        devices = [set(range(placement.devices.start, placement.devices.stop)) for placement in placements.values()]
        assert nested == all(a <= b or b <= a or not a & b for a in devices for b in devices)
        assert evaluator.plan(choice, "random") == plan
