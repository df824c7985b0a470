"""The search against optima, rules and itself; branch and bound against trying everything; HybridFlow's placements."""

import math
import random
import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from benchmarks.exact import optimum
from jrlhf.errors import UserError
from jrlhf.meshes import Call
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.candidates import candidates
from jrlhf.planning.search import allocations, divisions, heuristic, named_divisions, partitions, search
from jrlhf.planning.simulate import Simulator, simulate
from jrlhf.planning.time import Price
from tests.jrlhf.planning.synthetic import PPO, assert_runs, problem


def space(prices, keep=lambda placement: True, *, lockstep=False):
    evaluator = Simulator(PPO, prices, prices.workload.models, lockstep=lockstep)
    options = candidates(prices)
    choices = [
        [evaluator.add(call, option.placement) for option in options[name] if keep(option.placement)]
        for call, name in enumerate(evaluator.calls)
    ]
    return evaluator, choices


@dataclass(frozen=True)
class Rough:
    """Prices without order: what a placement costs says nothing of its neighbours."""

    seed: int
    capacity: float = 10.0

    def _draw(self, *what) -> float:
        return random.Random(repr((self.seed, *what))).random()

    def call(self, call: Call, placement: Placement) -> Price:
        seconds = (0.2 + self._draw(call.name, placement)) / placement.devices.count**0.5
        home = call.kind == "train" or call.role in ("reference", "reward")
        resident = 3 * self._draw("stays", placement) if home else 0.0
        return Price(placement, seconds, resident, 3 * self._draw("needs", placement))

    def reallocation(self, role: str, home: Placement, placement: Placement) -> float:
        return 0.1 * self._draw(role, home, placement)

    def transfer(self, source: Placement, target: Placement) -> float:
        return 0.02 * self._draw(source, target) * (source.devices != target.devices)


@pytest.mark.parametrize(("seed", "lockstep"), [(0, False), (1, True)])
def test_branch_and_bound_finds_what_trying_everything_finds(seed, lockstep):
    prices = Rough(seed, capacity=9.0)
    evaluator = Simulator(PPO, prices, ("actor", "critic", "reference", "reward"), lockstep=lockstep)
    places = [Placement(Slice(0, 2), "score", fsdp=2), Placement(Slice(0, 1), "score"), Placement(Slice(1, 1), "score")]
    places += [Placement(Slice(1, 2), "score", data=2)]
    choices = [[evaluator.add(call, place) for place in places] for call in range(6)]
    results = ((*evaluator.evaluate(choice), choice) for choice in product(*choices))
    best = min((seconds, choice) for seconds, peak, runs, choice in results if peak <= 9.0 and runs)
    result = optimum(evaluator, choices)
    assert (result.seconds, result.choice) == best
    assert result.nodes < 4**6
    assert optimum(evaluator, choices, below=best[0]).choice is None
    assert optimum(evaluator, choices, below=best[0] * 1.001).choice == best[1]


@pytest.mark.proof("memory")
@pytest.mark.parametrize("rows", [512, 64])
def test_7b_and_7b_on_8_devices_come_within_a_hundredth_of_the_optimum(rows):
    """At least 99 % for each of 6 seeds in 50,000 proposals, proven by branch and bound on slices of 4 devices or more
    and one micro-batch, as the optimum of 1.1e8 plans in ReaL's own setting is."""
    prices = problem(8, rows=rows)
    winners = [search(prices, proposals=50_000, seed=seed).best for seed in range(6)]
    worst = max(winner.seconds for winner in winners)
    evaluator, choices = space(
        prices,
        lambda placement: placement.devices.count >= 4 and placement.micro_batches == 1,
        lockstep=True,
    )
    assert math.prod(map(len, choices)) > 1e6
    assert optimum(evaluator, choices, below=0.99 * worst).choice is None
    for winner in winners:
        assert winner.peak <= prices.capacity


def test_within_what_branch_and_bound_can_prove_on_4_devices():
    prices = problem(4, rows=32, minibatches=2, memory=160e9)
    result = search(prices, proposals=3_000, seed=1, lockstep=False)
    evaluator, choices = space(prices, lambda placement: placement.micro_batches == 1)
    assert optimum(evaluator, choices, below=0.99 * result.best.seconds).choice is None


def test_a_search_is_a_function_of_its_seed_and_gets_no_worse_with_time():
    prices = problem(16, rows=128)
    one, other = (search(prices, proposals=300, seed=seed) for seed in (3, 4))
    assert one.trace != other.trace
    longer = search(prices, proposals=600, seed=3)
    assert longer.trace[: len(one.trace)] == one.trace
    assert [seconds for _, seconds in longer.trace] == sorted((seconds for _, seconds in longer.trace), reverse=True)
    assert longer.best.seconds == pytest.approx(longer.trace[-1][1], rel=1e-12)


def test_the_best_beats_every_rule_and_runs():
    prices = problem(16, rows=128)
    reports = []
    result = search(prices, proposals=1_000, progress=lambda *report: reports.append(report))
    assert result.rules.keys() == {"heuristic", "colocate", "split", "standalone"}
    for proposal in [*result.rules.values(), *result.runners_up]:
        assert_runs(proposal.plan, prices)
        assert proposal.seconds >= result.best.seconds - 1e-9
    assert_runs(result.best.plan, prices)
    assert reports[-1] == (result.proposals, pytest.approx(result.best.seconds, rel=1e-12))
    others = [proposal.seconds for proposal in result.runners_up]
    assert len(others) == 3 and others == sorted(others)
    assert result.rules["heuristic"].seconds > 1.1 * result.best.seconds


def test_seconds_end_a_search():
    prices = problem(8)
    result = search(prices, seconds=1e-9)
    assert result.proposals < 1000 and result.best.seconds > 0
    with pytest.raises(ValueError, match="proposals or seconds"):
        search(prices)


def test_no_best_plan_exceeds_the_memory():
    """Where memory is scarce: each model fits alone, and few combinations do."""
    prices = problem(8, rows=64, memory=50e9)
    result = search(prices, proposals=500, seed=0)
    for proposal in [result.best, *result.runners_up, *result.rules.values()]:
        assert proposal.peak <= 50e9
    assert_runs(result.best.plan, prices)
    prices = problem(8, rows=64, memory=36e9)
    with pytest.raises(UserError, match="no plan was found in which all models fit 33.53 GiB a device: the leanest of"):
        search(prices, proposals=1_000, seed=0)


def scarce(number: int):
    """A drawn problem, with little more memory than the leanest plan needs that many proposals meet."""
    draw = random.Random(number)
    devices, actor, critic = draw.choice((4, 8)), draw.choice(("7b", "34b")), draw.choice(("7b", "34b"))
    sizes: dict[str, Any] = {"rows": draw.choice((32, 64, 128)), "minibatches": draw.choice((1, 2, 4))}
    states = sum({"7b": 165e9, "34b": 809e9}[name] for name in (actor, critic))  # of the leanest plans, about
    for share in (0.99, 0.95, 0.9, 0.8, 0.7):
        try:
            search(problem(devices, actor, critic, **sizes, memory=share * states / devices), proposals=10_000)
        except UserError as error:
            (least,) = re.findall(r"the leanest of \d+ plans needs ([\d.]+) GiB of each", str(error))
            memory = 2**30 * float(least) * draw.choice((1.002, 1.01, 1.03, 1.06))
            return problem(devices, actor, critic, **sizes, memory=memory)
    raise AssertionError("every plan fits")


@pytest.mark.proof("memory")
@pytest.mark.parametrize("number", range(12))
def test_where_memory_is_scarce_six_seeds_come_within_a_hundredth_of_the_optimum(number):
    prices = scarce(number)
    seconds = [search(prices, proposals=8_000, seed=seed).best.seconds for seed in range(6)]
    evaluator, choices = space(prices, lockstep=True)
    assert math.prod(map(len, choices)) > 1e8
    assert optimum(evaluator, choices, below=0.99 * max(seconds)).choice is None, seconds


def test_the_heuristic_is_symmetric():
    prices = problem(16)
    plan = heuristic(prices, {})
    assert plan is not None
    for name, placement in plan.placements.items():
        assert (placement.devices, placement.tensor, placement.fsdp) == (Slice(0, 16), 8, 1), name
        assert placement.layout in ("generate", "train_tp")
    assert simulate(PPO, plan, prices).peak <= prices.capacity


def test_all_partitions_and_allocations_are_tried():
    for count, bell in enumerate((1, 1, 2, 5, 15, 52)):
        results = [frozenset(map(frozenset, partition)) for partition in partitions("abcde"[:count])]
        assert len(results) == len(set(results)) == bell
    counts = (1, 2, 4, 8, 16, 24)
    for sets in (1, 2, 3, 4):
        wanted = [allocation for allocation in product(counts, repeat=sets) if sum(allocation) == 24]
        assert sorted(allocations(counts, sets, 24)) == sorted(wanted) and wanted


def test_hybridflow_divides_sets_and_devices_by_its_stages():
    prices = problem(16)
    options = candidates(prices)
    results = divisions(prices, options)
    assert [division.seconds for division in results] == sorted(division.seconds for division in results)
    for division in results:
        assert sum(division.counts) == 16
        assert_runs(division.plan, prices)
        set_of = {role: index for index, members in enumerate(division.sets) for role in members}
        stages = (
            ("actor.generate",),
            ("reward.score", "reference.logprobs", "critic.values"),
            ("critic.update", "actor.update"),
        )
        expected = 0.0
        for stage in stages:
            loads = [0.0] * len(division.sets)
            for name in stage:
                loads[set_of[PPO[name].role]] += prices.call(PPO[name], division.plan[name]).seconds
            expected += max(loads)
        assert division.seconds == pytest.approx(expected)
        # The stages are a simulation without moves, in which no stage begins before the last has ended.
        assert simulate(PPO, division.plan, prices, lockstep=True).seconds <= 1.05 * division.seconds
    kinds = named_divisions(results)
    assert {name: len(kind.sets) for name, kind in kinds.items()} == {"colocate": 1, "split": 2, "standalone": 4}
    assert kinds["split"].plan["actor.update"].devices.count == kinds["split"].plan["critic.update"].devices.count == 8


def test_rule_plans_have_room_for_the_copies_of_weights_that_they_need():
    """Where memory is scarce; and there is one set of devices wherever states that are divided most leave room."""
    draw = random.Random(0)
    for _ in range(2):
        memory = draw.uniform(34e9, 70e9)
        prices = problem(16, draw.choice(("7b", "34b")), rows=draw.choice((64, 128)), memory=memory)
        try:
            options = candidates(prices)
        except UserError:  # a model alone does not fit
            continue
        results = divisions(prices, options)
        plans = [division.plan for division in results]
        symmetric = heuristic(prices, options)
        for plan in plans if symmetric is None else [symmetric, *plans]:
            assert simulate(PPO, plan, prices).peak <= memory, plan.name
        everywhere = [[option for option in some if option.placement.devices.count == 16] for some in options.values()]
        if all(everywhere):
            lean = {name: min(some, key=_needs).placement for name, some in zip(options, everywhere, strict=True)}
            fits = simulate(PPO, Plan("lean", lean), prices).peak <= memory
            assert not fits or any(len(division.sets) == 1 for division in results)


def _needs(option):
    return option.resident, option.active + option.moved


@pytest.mark.full
def test_colocation_is_best_on_few_devices_and_loses_its_lead_on_many():
    """HybridFlow's finding for PPO on A100s, with these prices: to 64 devices one set is best; the lead over two halves
    shrinks with the devices; and at 96, which do not divide the rows, a split wins."""
    leads = []
    for devices in (32, 64, 96):
        prices = problem(devices, rows=1024, hardware="a100")
        results = divisions(prices, candidates(prices))
        kinds = named_divisions(results)
        if devices <= 64:
            assert results[0].sets == kinds["colocate"].sets
        if devices != 96:
            leads.append(kinds["split"].seconds / kinds["colocate"].seconds)
    assert leads == sorted(leads, reverse=True) and len(results[0].sets) == 2


@pytest.mark.full
def test_a_thousand_devices_are_planned_for():
    prices = problem(1024, "70b", "70b", rows=8192)
    result = search(prices, proposals=10_000, seed=0)
    assert_runs(result.best.plan, prices)
    assert result.best.seconds < 0.98 * result.rules["heuristic"].seconds
    assert result.best.seconds <= min(rule.seconds for rule in result.rules.values())
