"""plan=auto: what it finds runs, on devices that are known and on devices that were measured."""

from dataclasses import dataclass, replace

import pytest

from jrlhf.algorithms.registry import graph_of
from jrlhf.config import Config, load_config
from jrlhf.errors import UserError
from jrlhf.planning.auto import auto_plan, prices_here
from jrlhf.planning.memory import plan_memory
from jrlhf.planning.plans import plan_of_config, plan_yaml, validate_plan
from jrlhf.planning.simulate import simulate
from jrlhf.planning.workload import workload_of
from jrlhf.stages.setup import PLAN, architectures, select_plan


@dataclass(frozen=True)
class Device:
    """A GPU that is not there."""

    device_kind: str = "NVIDIA H100 80GB HBM3"
    platform: str = "gpu"
    process_index: int = 0

    def memory_stats(self) -> None:
        """It does not say."""


@pytest.fixture(autouse=True)
def no_profiles(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("jrlhf.planning.auto.PROPOSALS", 2000)


def config_of(*overrides: str) -> Config:
    return load_config("llama3-8b-ppo", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("compute.score_tokens=8192",),
        ("ppo.rollout_batch=64", "ppo.algorithm.minibatches=1", "compute.shared_passes=true"),
    ],
)
def test_what_is_found_runs(overrides):
    config, devices = config_of(*overrides), [Device()] * 8
    models = architectures(config)
    plan = auto_plan(config, graph_of(config), models, devices)
    validate_plan(plan, config, workload_of(config, graph_of(config), models), 8)
    assert plan == auto_plan(config, graph_of(config), models, devices), "a function of the seed"


def test_adapters_stay_in_the_mesh_of_the_config():
    config = config_of("lora.rank=16", "mesh.fsdp=2", "mesh.tensor=4")
    models = architectures(config)
    plan = auto_plan(config, graph_of(config), models, [Device()] * 8)
    validate_plan(plan, config, workload_of(config, graph_of(config), models), 8)
    assert plan["actor.generate"].sizes == (1, 2, 4)


def test_a_plan_fits_the_memory_that_a_run_may_use():
    config = config_of("device.memory=50")
    _, prices = prices_here(config, workload_of(config, graph_of(config), architectures(config)), [Device()] * 8)
    assert prices.capacity == 50 * 2**30


def test_a_base_is_counted_once_for_all_its_adapters():
    config = config_of("lora.rank=16", "mesh.fsdp=2", "mesh.tensor=4")
    models, devices = architectures(config), [Device()] * 8
    workload = workload_of(config, graph_of(config), models)
    plan = plan_of_config(config, workload, 8)
    _, prices = prices_here(config, workload, devices)
    (group,) = simulate(workload.graph, plan, prices).memory
    assert group.resident == pytest.approx(plan_memory(workload, plan).phases[0].resident, rel=1e-9)


def test_unknown_devices_are_to_be_measured_first():
    config = config_of()
    with pytest.raises(UserError, match="nothing is known of what calls cost on abacus devices: measure"):
        prices_here(config, workload_of(config, graph_of(config), architectures(config)), [Device("abacus", "cpu")])


def test_a_run_goes_on_with_the_plan_that_its_search_found(monkeypatch, tmp_path):
    config, devices = config_of("plan=auto", f"run_dir={tmp_path}", "name=run"), [Device()] * 8
    models, graph = architectures(config), graph_of(config)
    workload = workload_of(config, graph, models)
    colocated, split = (plan_of_config(config_of(f"plan={name}"), workload, 8) for name in ("colocate", "split"))
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("jrlhf.stages.setup.auto_plan", lambda *_: colocated)
    auto = replace(split, name="auto")
    for saved, expected in ((auto, auto), (split, colocated)):  # one that was asked for by name was not auto_plan for
        (tmp_path / "run" / PLAN).write_text(plan_yaml(saved))
        assert select_plan(config, models, devices, resume=True) == expected
        assert select_plan(config, models, devices) == colocated
