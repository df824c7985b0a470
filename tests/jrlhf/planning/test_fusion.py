"""Fused schedules against published bounds and makespans, and against all schedules of small instances."""

import json
import random
import re
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from benchmarks import published
from benchmarks.fusion import PUBLISHED, lean, optimum
from benchmarks.records import RESULTS
from jrlhf.algorithms.registry import planned_graph
from jrlhf.config import load_config
from jrlhf.meshes import Graph
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.pipeline import arrange, makespan, peak, synchronous_makespan, violation
from jrlhf.meshes.plan import Placement, Plan, Slice, plan_of
from jrlhf.planning import auto
from jrlhf.planning.fusion.dispatch import Dispatcher, SlotRules, search, search_apart
from jrlhf.planning.fusion.problem import FusedModel, Problem, fuse
from jrlhf.planning.fusion.updates import fused_prices, fused_updates
from jrlhf.planning.memory import call_bytes, plan_memory, state_bytes
from jrlhf.planning.plans import validate_plan
from jrlhf.planning.search import Result
from jrlhf.planning.search import search as search_plans
from jrlhf.planning.show import describe
from jrlhf.planning.simulate import simulate
from jrlhf.planning.time import CostModel
from jrlhf.stages.setup import architectures

# get-lower-bound.py of github.com/FlexFusion/FlexFusion, in the order of PUBLISHED.
BOUNDS = [708, 372, 225, 702, 366, 225, 618, 330, 186, 606, 318, 186]


def test_the_measured_makespans_of_the_docs():
    text = (RESULTS.parents[1] / "docs/plans.md").read_text(encoding="utf-8")
    record = json.loads((RESULTS / "makespan.json").read_text(encoding="utf-8"))
    rows, gains = {row["table"]: row for row in record["results"]}, record["gains"].values()
    fused, alone = (
        [row["ratio"] for name, row in rows.items() if name.startswith(kinds)]
        for kinds in ("fused: ", ("1f1b: ", "zb-h1: "))
    )
    measured, predicted = ([gain[kind] for gain in gains] for kind in ("measured", "predicted"))
    sizes = [name.removeprefix("zb-h1: ") for name in rows if name.startswith("zb-h1: ")]
    shorter = [rows[f"zb-h1: {size}"]["measured"] / rows[f"1f1b: {size}"]["measured"] for size in sizes]
    assert max(row["ratio"] for row in rows.values()) <= 1.1 and max(shorter) < 1
    for numbers in (fused, measured, predicted, alone, shorter):
        assert f"{min(numbers):.2f} to {max(numbers):.2f}" in text


def small(generator: random.Random, micro_batches: int) -> Problem:
    depths, costs = generator.choice(((2, 2), (2, 1), (4, 2))), (1, 2, 3, 5, 8)
    actor, critic = (
        FusedModel(depth, generator.randint(1, micro_batches), generator.choice(costs), generator.choice(costs))
        for depth in depths
    )
    return fuse(actor, critic)


def test_the_example_and_the_figures_of_the_docs():
    text = (RESULTS.parents[1] / "docs/plans.md").read_text(encoding="utf-8").partition("## Fused pipelines")[2]
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, {})
    record = json.loads((RESULTS / "fusion.json").read_text(encoding="utf-8"))
    published, others, summary = record["published"], record["generated"], record["summary"]
    assert [row["makespan"] for row in published] == [row["bound"] for row in published] == BOUNDS
    excess = sorted(row["makespan"] / row["bound"] - 1 for row in others if row["makespan"] > row["bound"])
    far = [share for share in excess if share > 0.03]
    more = max(row["memory"] / row["published"]["memory"] for row in published) - 1
    for sentence in (
        f"at most {max(row['seconds'] for row in published):.0f} s of one core",
        f"at most theirs in {summary['published_memory_at_most_theirs']} of the 12, and up to {100 * more:.0f} % above",
        f"Of {len(others)} random pairs",
        f"{len(others) - len(excess)} reach the bound, so that they are optimal",
        f"{len(excess) - len(far)} end at most {100 * max(set(excess) - set(far)):.1f} % above it",
        f"{len(far)} between {100 * far[0]:.1f} and {100 * far[-1]:.1f} %",
    ):
        assert sentence in " ".join(text.split()), sentence


def test_pipelines_run_against_each_other():
    problem = fuse(FusedModel(6, 2, 1, 2), FusedModel(4, 3, 1, 2))
    assert [pipeline.devices for pipeline in problem.pipelines] == [
        *((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)),
        *((11, 10, 9, 8), (7, 6, 5, 4), (3, 2, 1, 0)),
    ]
    assert [pipeline.micro_batches for pipeline in problem.pipelines] == [2, 2, 3, 3, 3]


def test_published_instances_reach_the_bound():
    assert [problem.bound for problem, _ in PUBLISHED] == BOUNDS
    for (problem, theirs), bound in list(zip(PUBLISHED, BOUNDS, strict=True))[::2]:
        table = search(problem, effort=0.2)
        assert makespan(table, problem.seconds) == bound <= theirs["makespan"]
        assert violation(table) is None


@pytest.mark.full
def test_tables_for_several_processes_wait_less():
    """The search that compares the waits of senders and receivers finds faster tables than the one that ignores them,
    by the share of each row, within the same memory."""
    for problem, share in (
        (PUBLISHED[5][0], 0.02),
        (fuse(FusedModel(4, 8, 4, 12), FusedModel(2, 4, 3, 9)), 0.01),
        (fuse(FusedModel(4, 4, 4, 12), FusedModel(4, 4, 4, 12)), 0.02),
        (fuse(FusedModel(8, 8, 1, 3.26, 2), FusedModel(8, 16, 2.03, 6.57)), 0.01),
    ):
        pairs = zip(problem.pipelines, problem.activations, strict=True)
        sizes = {(len(one.devices), one.micro_batches, size) for one, size in pairs}  # of each model
        most = sum(min(depth, count) * size for depth, count, size in sizes)
        tables = [find(problem, most=most, effort=0.05) for find in (search, search_apart)]
        without, with_waits = (synchronous_makespan(table, problem.seconds) for table in tables)
        assert violation(tables[1], most, problem.activations) is None
        assert problem.bound <= with_waits < (1 - share) * without
        assert search_apart(problem, most=most, effort=0.05) == tables[1]


def test_memory_falls_at_the_same_makespan_and_runs_repeat():
    problem, theirs = PUBLISHED[5]
    tables = [find(problem, effort=0.1) for find in (search, lean)]
    assert [makespan(table, problem.seconds) for table in tables] == [225, 225]
    shortest, least = (max(peak(table, problem.activations)) for table in tables)
    assert least == pytest.approx(theirs["memory"])
    assert least < shortest
    assert [find(problem, effort=0.1) for find in (search, lean)] == tables


def test_branch_and_bound_is_the_best_of_all_orders():
    generator = random.Random(0)
    for _ in range(3):
        actor, critic = (FusedModel(2, 1, generator.randint(1, 5), generator.randint(1, 5)) for _ in range(2))
        problem = fuse(actor, critic)
        table = search(problem, effort=0.01)
        spans = []
        for orders in product(*(permutations(order) for order in table.orders)):
            try:
                spans.append(makespan(arrange(problem.pipelines, orders), problem.seconds))
            except ValueError:  # the devices would wait for each other
                pass
        assert min(spans) == optimum(problem) == makespan(table, problem.seconds) >= problem.bound


def test_the_optimum_of_small_instances_is_reached():
    generator, above = random.Random(1), 0
    for _ in range(20):
        problem = small(generator, 2)
        reached = makespan(search(problem, effort=0.01), problem.seconds)
        assert problem.bound <= reached == optimum(problem, reached)
        above += reached > problem.bound
    assert above  # the bound is not always the optimum


def test_no_limit_of_memory_that_1f1b_respects_leads_to_a_deadlock():
    """Random priorities and ranks: all operations are dispatched, within the limit."""
    generator = random.Random(0)
    for _ in range(200):
        sizes = [(generator.choice((1, 2, 4)), generator.randint(1, 6)) for _ in range(2)]
        problem = fuse(*(FusedModel(*size, 1.0, 2.0, generator.choice((0.5, 1.0, 2.0))) for size in sizes))
        dispatcher, ranks = Dispatcher(problem), list(range(len(problem.pipelines)))
        generator.shuffle(ranks)
        keys, rules = dispatcher.values(lambda *_: generator.random()), SlotRules(generator.choice((0, 0.5, 1)), ranks)
        schedule = dispatcher.run(keys, problem.least_memory, rules, backwards=generator.random() < 0.5)
        assert violation(dispatcher.table(schedule), problem.least_memory, problem.activations) is None


# ---- updates that a plan fuses


def fused_plan(schedule: Any) -> Plan:
    """A 7B actor in four stages and a critic in two pipelines of two, on 16 devices."""
    deep = Placement(Slice(0, 16), "train", fsdp=4, pipeline=4, micro_batches=8, schedule=schedule)
    shallow = Placement(Slice(0, 16), "train", data=2, fsdp=4, pipeline=2, micro_batches=4, schedule=schedule)
    return Plan("by hand", {"actor.update": deep, "critic.update": shallow})


def test_fused_updates_take_the_makespan_of_their_table_and_the_memory_of_both():
    serial, plan = fused_plan("1f1b"), fused_plan("fused")
    updates = tuple(published.GRAPH[name] for name in plan.placements)
    graph = Graph("updates", tuple({value for call in updates for value in call.inputs}), updates)
    workload, cluster = replace(published.workload(), graph=graph, minibatches=4), Cluster(HARDWARE["h100"], 16)
    fused = fused_updates(workload, plan)
    assert fused is not None and violation(fused.table) is None
    assert fused_updates(workload, serial) is None and fused.pipelines["critic.update"] == range(1, 3)
    assert [pipeline.devices for pipeline in fused.table.pipelines] == [(0, 1, 2, 3), (3, 2), (1, 0)]

    prices = CostModel(workload, cluster)
    calls = [workload.graph[name] for name in plan.placements]
    alone = [prices.parts(call, serial[call.name]) for call in calls]
    prices = fused_prices(prices, plan)
    together = [prices.parts(call, plan[call.name]) for call in calls]
    operations = [prices.stage_seconds(call, plan[call.name]) for call in calls]
    whole = 4 * makespan(fused.table, lambda step: operations[step.model > 0][step.kind == "backward"])
    fixed = [sum(time for name, time in parts.items() if name != "bubble") for parts in alone]
    work = [4 * count * sum(both) for count, both in zip((8, 4), operations, strict=True)]
    assert sum(sum(parts.values()) for parts in together) == pytest.approx(whole + sum(fixed) - sum(work))
    assert 0 <= sum(parts["bubble"] for parts in together) < 0.5 * sum(parts["bubble"] for parts in alone)

    # With four devices in a process, stages wait for each other, by the table of a run of these processes.
    several = fused_updates(workload, plan, 4)
    assert several is not None and several.pipelines == fused.pipelines
    waiting = fused_prices(CostModel(workload, cluster, processes=4), plan)
    apart = sum(sum(waiting.parts(call, plan[call.name]).values()) for call in calls)
    seconds = 4 * synchronous_makespan(several.table, lambda step: operations[step.model > 0][step.kind == "backward"])
    assert apart == pytest.approx(seconds + sum(fixed) - sum(work))

    simulated = simulate(workload.graph, plan, prices, iterations=2)
    both = [call_bytes(workload, call, plan[call.name]) for call in calls]
    stored = [state_bytes(workload.models[call.role], workload.itemsize, plan[call.name]) for call in calls]
    stays = sum(sum(sizes.values()) for sizes in stored)
    # The critic's two pipelines each return the gradients of all of its weights.
    expected = stays + sum(sum(sizes.active.values()) for sizes in both) + both[1].active["copies of stages"] / 2
    assert plan_memory(workload, plan).peak == pytest.approx(expected) == pytest.approx(simulated.peak)
    # What the table has in flight is within the inputs in flight that were added up.
    sizes = [both[0].active["inputs in flight"] / 4, *[both[1].active["inputs in flight"] / 2] * 2]
    most = sum(one.active["inputs in flight"] for one in both)
    assert violation(fused.table, most, sizes) is None


# ---- updates that a search fuses


def searched(**links: Any) -> tuple[auto.Setting, Result]:
    """A search for 8B models on eight H200 with these links."""
    config = load_config("llama3-8b-ppo", ("ppo.algorithm.minibatches=16",))
    graph, models = planned_graph(config), architectures(config)
    cluster = Cluster(replace(HARDWARE["h200"], **links), 8)
    setting = auto.Setting(config, graph, models, cluster)
    return setting, setting.search(proposals=250)


@pytest.mark.full
def test_a_search_fuses_updates_where_links_are_slow():
    setting, result = searched(node=1, network=5e9)
    best, serial, workload, prices = result.best, result.runners_up[0], setting.workload, setting.prices
    assert serial.plan.fused == () and serial.plan.name == "not fused"
    own = fused_prices(prices, best.plan)
    assert simulate(workload.graph, best.plan, own, lockstep=True) == best
    assert best.seconds < serial.seconds and best.peak <= prices.capacity
    others = (*result.runners_up, *result.rules.values())
    assert all(one.seconds > best.seconds for one in others)
    # The bound that ranks plans is one, and one 1F1B after the other is slower.
    least = simulate(workload.graph, best.plan, fused_prices(prices, best.plan, least=True), lockstep=True).seconds
    placed = {name: replace(best.plan[name], schedule="1f1b") for name in best.plan.fused}
    alone = simulate(workload.graph, Plan("1f1b", {**best.plan.placements, **placed}), prices, lockstep=True).seconds
    assert least <= best.seconds < alone
    assert plan_of(best.plan.as_dict()) == best.plan
    validate_plan(best.plan, setting.config, workload, 8)
    text = describe(own, result)
    both = sum(own.call(workload.graph[name], best.plan[name]).seconds for name in best.plan.fused)
    bound = fused_prices(prices, best.plan, least=True)
    bound = sum(bound.call(workload.graph[name], best.plan[name]).seconds for name in best.plan.fused)
    assert f"fused updates: {float(f'{both:.2g}'):g} s, {100 * (both / bound - 1):.1f} % above what any table" in text
    assert bound <= both and "pipeline=8 by fused" in text
    # Stages of several processes wait for each other, and still gain.
    several = setting.search(proposals=250, processes=8)
    assert several.best.plan.fused
    assert best.seconds < several.best.seconds < serial.seconds
    waiting = fused_prices(replace(prices, processes=8), several.best.plan)
    assert simulate(workload.graph, several.best.plan, waiting, lockstep=True) == several.best


def test_a_search_leaves_updates_alone_where_links_are_fast():
    setting, result = searched()
    assert result.best.plan.fused == ()
    alone = search_plans(setting.prices, proposals=250)
    assert result.best == alone.best and result.runners_up == alone.runners_up


def test_a_backward_operation_computes_its_forward_pass_again():
    placed = Placement(Slice(0, 8), "train", pipeline=8, micro_batches=8)
    cluster = Cluster(replace(HARDWARE["h100"], latency=0, link=1e30), 8)
    for name in ("actor.update", "critic.update"):
        work = published.workload(minibatches=4)
        costs = [
            CostModel(replace(work, recomputed_stages=again), cluster).stage_seconds(work.graph[name], placed)
            for again in (False, True)
        ]
        (forward, backward), (own, twice) = costs
        if name == "critic.update":  # every stage is alike, for a head of one column is nothing
            assert own == pytest.approx(forward) and twice == pytest.approx(backward + forward)
        else:  # all but the last one have no head
            assert own < forward and own + twice >= forward + backward
