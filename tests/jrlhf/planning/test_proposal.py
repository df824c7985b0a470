"""The stages that a search proposes for updates and scores."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from jrlhf.algorithms.registry import planned_graph
from jrlhf.config import Config, load_config
from jrlhf.config.parse import build
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.pipeline import SCHEDULES, peak
from jrlhf.meshes.plan import plan_of
from jrlhf.planning import auto
from jrlhf.planning.memory import call_bytes
from jrlhf.planning.plans import validate_plan
from jrlhf.planning.search import Result, search
from jrlhf.planning.simulate import simulate
from jrlhf.stages.setup import architectures

ADAPTERS: dict[str, Any] = {"lora": {"rank": 16}, "mesh": {"fsdp": 8}}


def grpo(network: float, rows: int = 256, **sections: Any) -> auto.Setting:
    """GRPO of an 8B model on eight nodes of one device each."""
    mapping = {
        **{"stages": ["grpo"], "compute": {"dtype": "bfloat16"}, "model": {"path": "meta-llama/Llama-3.1-8B"}},
        **{"data": {"source": "arithmetic", "max_prompt": 1024, "max_response": 1024}},
        **{"rewards": [{"name": "right", "function": "exact_match"}]},
        **{"grpo": {"rollout_batch": rows, "algorithm": {"samples": 8, "minibatches": 4}}},
    }
    return setting_of(build(Config, {**mapping, **sections}), network)


def ppo(network: float, *overrides: str) -> auto.Setting:
    return setting_of(load_config("llama3-8b-ppo", overrides), network)


def setting_of(config: Config, network: float) -> auto.Setting:
    cluster = Cluster(replace(HARDWARE["h200"], node=1, network=network), 8)
    return auto.Setting(config, planned_graph(config), architectures(config), cluster)


@cache
def slow() -> tuple[auto.Setting, Result]:
    """GRPO where links are slow, and what a search finds."""
    setting = grpo(5e9)
    return setting, setting.search(proposals=250)


def test_grpo_is_trained_in_stages_where_links_are_slow():
    """The weights do not fit one device, and computation takes less time than to gather them."""
    setting, result = slow()
    prices, workload, before = setting.prices, setting.workload, search(setting.prices, proposals=250)
    best = result.best
    for call in ("actor.update", "actor.logprobs"):
        assert best.plan[call].pipeline == 8 and best.plan[call].fsdp == 1
        apart = replace(best.plan, placements={**best.plan.placements, call: before.best.plan[call]})
        assert simulate(workload.graph, apart, prices, lockstep=True).seconds > best.seconds
    assert best.seconds < 0.75 * before.best.seconds
    assert best == simulate(workload.graph, best.plan, prices, lockstep=True)
    assert best.peak <= prices.capacity
    assert result.runners_up[0].plan.placements == before.best.plan.placements
    assert result.runners_up[1:] == before.runners_up and best.plan.fused == ()
    assert plan_of(best.plan.as_dict()) == best.plan
    validate_plan(best.plan, setting.config, workload, 8)


def test_the_schedule_is_the_fastest():
    setting = grpo(12.5e9, rows=64)
    call = setting.graph["actor.update"]
    placed = setting.search(proposals=250).best.plan[call.name]
    assert placed.pipeline == 8 and placed.schedule == "interleaved"
    for other in (replace(placed, schedule=schedule) for schedule in ("gpipe", "1f1b", "zb-h1")):
        assert setting.prices.call(call, placed).seconds <= setting.prices.call(call, other).seconds


def test_a_plan_with_pipelines_of_several_processes_is_faster_and_runs():
    setting = ppo(5e9, "ppo.rollout_batch=64", "ppo.algorithm.minibatches=1")
    result = setting.search(proposals=250, processes=8)
    before = search(setting.prices, proposals=250)
    assert any(placement.pipeline > 1 for placement in result.best.plan.placements.values())
    assert result.best.seconds < before.best.seconds
    assert result.best.peak <= setting.prices.capacity
    validate_plan(result.best.plan, setting.config, setting.workload, 8)


def test_calls_that_run_in_no_stages_get_none():
    """Stages of adapters gain nothing; token budgets of updates, of scores and shared passes exclude them; and other
    stages of a config run by no plan."""
    pairs = {"stages": ["dpo"], "dpo": {"batch": 64}, "model": {"path": "meta-llama/Llama-3.1-8B"}}
    whole, budget = "ppo.algorithm.micro_batches=1", "ppo.algorithm.micro_batch_tokens=8192"
    for setting in (
        grpo(5e9, **ADAPTERS),
        ppo(5e9, whole, budget, "compute.score_tokens=8192"),
        ppo(5e9, whole, budget, "compute.score_rows=64"),
        ppo(5e9, whole, "ppo.algorithm.minibatches=1", "compute.shared_passes=true"),
        setting_of(build(Config, pairs), 5e9),
    ):
        plan = setting.search(proposals=250).best.plan
        assert all(placement.pipeline == 1 for placement in plan.placements.values()), setting.config.stages


def test_inputs_in_flight_are_those_of_the_table():
    setting, result = slow()
    call, plan = setting.graph["actor.update"], result.best.plan
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1"):
        sizes = [
            call_bytes(setting.workload, call, replace(plan[call.name], schedule=schedule, micro_batches=parts))
            for parts in (8, 16)
        ]
        peaks = [max(peak(SCHEDULES[schedule](8, parts))) / parts for parts in (8, 16)]
        first, second = (one.active["inputs in flight"] for one in sizes)
        assert first / second == pytest.approx(peaks[0] / peaks[1])
        assert first == pytest.approx(peaks[0] * 64 * 2048 * 4096 * 2)
