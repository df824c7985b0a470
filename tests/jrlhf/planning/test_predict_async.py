"""Asynchronous configs on plans: seconds in closed form, the fastest division of the devices, and `plan: auto`."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jrlhf.algorithms.registry import planned_graph
from jrlhf.config import load_config
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import cluster
from jrlhf.planning import simulate_async as rollouts
from jrlhf.planning.auto import Setting
from jrlhf.planning.plans import plan_of_config, validate_plan
from jrlhf.planning.predict_async import (
    VERSIONS,
    alternatives,
    choose,
    costs,
    describe,
    drawing_time,
    mean_before_cut,
    predict,
)
from jrlhf.planning.profile import Profile, default_path, save, wanted_curves
from jrlhf.planning.resolve import select_plan
from jrlhf.planning.simulate import Simulation, simulate
from jrlhf.planning.simulate_async import lognormal, measured
from jrlhf.rollouts.schedule import Rules
from jrlhf.run.files import seal
from jrlhf.stages.setup import PLAN, architectures
from tests.jrlhf.planning.test_auto import Device


def setting(devices: int, *overrides: str, **asynchronous: object) -> Setting:
    options = [f"ppo.asynchronous.{key}={value}" for key, value in asynchronous.items()]
    config = load_config("llama3-8b-ppo", [*options, *overrides])
    return Setting(config, planned_graph(config), architectures(config), cluster(f"{devices}xh100"))


def halves(own: Setting) -> Simulation:
    """Rollouts on the second half of the devices, in the config's mesh."""
    config, count = replace(own.config, plan="disaggregated"), own.prices.cluster.devices
    plan = plan_of_config(config, own.workload, count)
    return simulate(own.graph, plan, own.prices, lockstep=True)


def test_rows_of_one_length_in_closed_form():
    """With staleness 0 both sides take turns, as in an iteration of the plan's simulator. With a bound the longer one
    never waits, unless `update_steps` are so few that rows remain to be drawn after the update."""
    outcome, mesh = halves(setting(16, "mesh.fsdp=16", staleness=0)), "mesh.fsdp=16"
    spans = [span for span in outcome.spans if span.iteration == 2]
    (drawing,) = (span for span in spans if span.call == "actor.generate" and span.kind == "call")
    update = max(span.end for span in spans) - drawing.end
    step = drawing.seconds / 1024

    def seconds(**asynchronous):
        own = setting(16, mesh, **asynchronous)
        return predict(own.config, own.prices, outcome).seconds

    for steps in (1, 128, 5000):
        assert seconds(staleness=0, update_steps=steps) == pytest.approx(outcome.seconds, rel=1e-3)
    assert seconds(staleness=0, clock="wall") == pytest.approx(outcome.seconds, rel=1e-3)
    assert update > drawing.seconds
    assert seconds(staleness=2, clock="wall") == pytest.approx(update, rel=1e-3)
    for steps in (1100, 5000):
        assert seconds(staleness=2, update_steps=steps) == pytest.approx(update, rel=1e-3)
    rest = 1024 - 512  # a look at the rows may come a chunk later
    assert seconds(staleness=2, update_steps=512) == pytest.approx(update + rest * step, abs=64 * step)


def test_the_virtual_clock_counts_steps_whatever_they_take():
    """Costs of few rows and of new weights do not change the schedule, as in a run (`test_fleet.py`)."""
    options = {"staleness": 2, "update_steps": 150, "on_new_weights": "prefill_again"}
    own = replace(setting(16, "mesh.fsdp=16", **options), mean_response=400.0)
    lengths = lognormal(mean_before_cut(400.0, 0.8, 1024), 0.8, 1024)
    counted = rollouts.Scenario(Rules(256, 2, 150, "prefill_again"), 256, 1, lengths, own.config.rollout.chunk)
    assert predict(own.config, own.prices, halves(own), 0.8).costs == costs(counted, VERSIONS)
    arrival = replace(setting(16, "mesh.fsdp=16", clock="wall", staleness=2), mean_response=400.0)
    steps = predict(arrival.config, arrival.prices, halves(arrival), 0.8)
    counted = replace(counted, rules=replace(counted.rules, update=steps.update_steps))
    assert steps.costs != costs(counted, VERSIONS)


@pytest.mark.parametrize("on_new_weights", ["keep_cache", "prefill_again", "finish"])
def test_rollouts_take_the_time_of_their_steps_and_of_new_weights(on_new_weights):
    lengths = measured(np.random.default_rng(0).integers(1, 30, 50).tolist())
    counted = rollouts.Scenario(Rules(3, 2, 14, on_new_weights), 12, 3, lengths)
    trace, prices = rollouts.simulate(counted, 20), {"empty": 0.4, "transfer": 2.5, "prefill": 0.01, "prompt": 5}
    first, last, time = 4, 19, 0.0
    rows = list(zip(trace.starts.ravel(), trace.lengths.ravel(), strict=True))
    steps = range(int(trace.working[first]), int(trace.working[last]))
    for step in steps:
        active = sum(start <= step < start + length for start, length in rows)
        time += 0.4 + 0.6 * active / 12
    for step in set(trace.swaps) & set(steps):
        cached = [step - start + 5 for start, length in rows if start < step < start + length]
        time += 2.5 + 0.01 * sum(cached) * (on_new_weights == "prefill_again")
        assert not cached or on_new_weights != "finish"
    assert drawing_time(trace, replace(counted, **prices)) == pytest.approx(time / (last - first))


def test_the_division_is_the_fastest_of_all():
    """One or two nodes of three may draw. The chosen meshes are faster than the mesh of the config."""
    own = setting(24, "mesh.fsdp=8", "mesh.data=3", "ppo.rollout_batch=768", staleness=2, update_steps=2000)
    options = choose(own, 0.5)
    assert {str(one.outcome.plan["actor.generate"].devices) for one in options} == {"8-23", "16-23"}
    assert options[0].seconds < options[1].seconds
    for one in options:
        validate_plan(one.outcome.plan, own.config, own.workload, 24)
        assert one.outcome.peak <= own.prices.capacity
    sixteen = setting(16, "mesh.fsdp=16", staleness=2, update_steps=2000)
    (half,) = choose(sixteen)
    assert half.seconds < predict(sixteen.config, sixteen.prices, halves(sixteen)).seconds


def test_the_text_names_the_ratio_of_an_update_and_a_decode_step():
    own = setting(16, staleness=2, update_steps=128)
    outcome = choose(own)[0].outcome
    *_, line, _ = describe(own.config, own.prices, [predict(own.config, own.prices, outcome)])
    steps = int(line.partition("an update takes ")[2].split()[0])
    assert line.startswith("ppo.asynchronous.update_steps=128, and an update takes ")
    matched = setting(16, staleness=2, update_steps=steps)
    text = describe(matched.config, matched.prices, alternatives(matched.config, matched.prices, outcome))
    assert text[-1].endswith("time of full weight, with these settings: staleness=1 rollout.slots=256")
    assert not any("update_steps" in line for line in text)


def test_a_run_takes_the_fastest_division_and_keeps_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    overrides = "plan=auto", "lora.rank=16", f"run_dir={tmp_path}", "name=run"
    own, devices = setting(8, *overrides, staleness=2), [Device()] * 8
    plan = select_plan(own.config, dict(own.models), devices)
    assert plan == choose(own)[0].outcome.plan and plan.name == "auto"
    assert capsys.readouterr().out.startswith("plan=auto: rollouts on devices 4-7, predicted ")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / PLAN).write_text(seal(plan.to_yaml()))
    monkeypatch.setattr("jrlhf.planning.predict_async.choose", None)
    assert select_plan(own.config, dict(own.models), devices, resume=True) == plan


def test_without_prices_another_plan_for_rollouts_apart_is_named():
    for asynchronous, fleet, plan in (
        ("{}", "1", "colocate"),
        ("{}", "null", "disaggregated"),
        ("null", "null", "colocate"),
    ):
        settings = "plan=auto", f"grpo.asynchronous={asynchronous}", f"fleet.workers={fleet}"
        config = load_config("arithmetic-grpo", settings)
        own = Setting(config, planned_graph(config), architectures(config), [Device("abacus", "cpu")] * 2)
        with pytest.raises(UserError, match=f"abacus devices: measure them .*, or set plan={plan}"):
            assert own.prices


@pytest.mark.parametrize("count, drawing", [(4, {"2-3"}), (6, {"2-5", "3-5", "4-5"})])
def test_measured_devices_are_divided_into_measured_sides(count, drawing, monkeypatch, tmp_path):
    """A profile has costs of groups of three devices, which divide 96 rows, too, only if they divide its devices."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = (
        "plan=auto",
        "grpo.asynchronous={staleness: 2, uncorrected: true}",
        "grpo.rollout_batch=96",
        "grpo.algorithm.samples=2",
    )
    config, devices = load_config("arithmetic-grpo", settings), [Device("abacus", "gpu")] * count
    own = Setting(config, planned_graph(config), architectures(config), devices)
    wanted = wanted_curves(own.workload, devices)
    curves = {name: tuple((float(size), 1e-3) for size in programs) for name, programs in wanted}
    save(Profile("abacus", count, jax.__version__, {1: 1.0, 2: 1.0, count: 1.0}, curves), default_path(devices))
    assert {str(one.plan["actor.generate"].devices) for one in own.splits()} == drawing


def test_two_slots_are_compared_with_one():
    settings = "mesh.fsdp=2", "ppo.algorithm.minibatches=1", "ppo.algorithm.micro_batches=1", "ppo.rollout_batch=2"
    config = load_config("gsm8k-ppo", [*settings, "ppo.asynchronous={staleness: 2, uncorrected: true}"])
    own = Setting(config, planned_graph(config), architectures(config), cluster("2xh100"))
    assert {one.slots for one in alternatives(config, own.prices, choose(own)[0].outcome)} == {2, 1}


def test_where_no_division_runs_the_reason_is_one_sentence():
    with pytest.raises(UserError, match=r"no division of 8 device.s. into two sides divides the rows and fits: choose"):
        setting(8, staleness=2).splits()
    with pytest.raises(UserError, match=r"rollout.slots=16 must give each of 3 logical worker.s. a multiple"):
        setting(8, "lora.rank=16", "rollout.slots=16", staleness=2, logical_workers=3).splits()


@pytest.mark.parametrize("mean, sigma", [(300, 0.5), (900, 1.0), (1000, 3.0), (1024, 1.0), (64, 0.0)])
def test_lengths_that_are_cut_have_the_mean_that_was_asked_for(mean, sigma):
    before = mean_before_cut(mean, sigma, 1024)
    if mean == 1024:
        assert before == mean  # no lengths below it can have it
        return
    draws = lognormal(before, sigma, 1024)(np.random.default_rng(0), (200_000, 1))
    assert abs(draws.mean() - 0.5 * (sigma > 0) - mean) < 0.01 * mean  # lengths are rounded up
