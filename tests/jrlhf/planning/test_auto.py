"""plan=auto: what it finds runs, on devices that are known and on devices that were measured."""

from dataclasses import dataclass, replace

import pytest

from jrlhf.algorithms.registry import graph_of
from jrlhf.config import Config, load_config
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import HARDWARE, Cluster, cluster
from jrlhf.meshes.plan import Plan
from jrlhf.planning.auto import auto_plan, prices_here, prices_of
from jrlhf.planning.plans import plan_of_config, validate_plan
from jrlhf.planning.resolve import select_plan
from jrlhf.planning.workload import Workload, workload_of
from jrlhf.run.files import seal
from jrlhf.stages.setup import PLAN, architectures


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
    monkeypatch.setattr("jrlhf.planning.auto.PROPOSALS", 300)


def config_of(*overrides: str) -> Config:
    return load_config("llama3-8b-ppo", overrides)


def work(config: Config) -> Workload:
    return workload_of(config, graph_of(config), architectures(config))


@pytest.mark.full
def test_what_is_found_runs():
    for overrides in (
        ("ppo.rollout_batch=64", "ppo.algorithm.minibatches=1", "compute.shared_passes=true"),
        ("compute.score_rows=64", "rollout.last_groups=2"),  # without them two groups of devices draw
        ("lora.rank=16", "mesh.fsdp=2", "mesh.tensor=4"),
    ):
        config, devices = config_of(*overrides), [Device()] * 8
        models = architectures(config)
        plan = auto_plan(config, graph_of(config), models, devices)
        validate_plan(plan, config, work(config), 8)
    assert plan["actor.generate"].sizes == (1, 2, 4)  # adapters stay in the mesh of the config


def test_prices_are_those_of_the_devices_at_hand():
    config = config_of("device.memory=50")
    prices = prices_here(config, work(config), [Device()] * 8)
    assert prices.capacity == 50 * 2**30  # the memory that a run may use
    for memory, limit in ((50, 50 * 2**30), (500, cluster("8xh100").hardware.memory)):
        config = config_of(f"device.memory={memory}")
        assert prices_of(config, work(config), cluster("8xh100")).capacity == limit
    old = replace(HARDWARE["a100"], name="v100")
    for hardware, platform in ((old, "gpu"), (HARDWARE["h200"], "gpu"), (HARDWARE["v5e"], "tpu")):
        assert prices_of(config, work(config), Cluster(hardware, 8)).backend.platform == platform
    with pytest.raises(UserError, match="what calls cost on abacus devices: measure .* --profile` with the config"):
        prices_here(config, work(config), [Device("abacus", "cpu")])
    with pytest.raises(UserError, match="set plan=colocate; `python .* --cluster 8xh100` plans for other"):
        prices_here(config_of("plan=auto"), work(config), [Device("abacus", "cpu")])


def test_a_run_goes_on_with_the_plan_that_its_search_found(monkeypatch, tmp_path):
    config, devices = config_of("plan=auto", f"run_dir={tmp_path}", "name=run"), [Device()] * 8
    models, workload = architectures(config), work(config)
    colocated, split = (plan_of_config(config_of(f"plan={name}"), workload, 8) for name in ("colocate", "split"))
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("jrlhf.planning.auto.auto_plan", lambda *_: colocated)
    auto = replace(split, name="auto")
    for saved, expected in ((auto, auto), (split, colocated)):  # one that was asked for by name was not auto_plan for
        (tmp_path / "run" / PLAN).write_text(seal(saved.to_yaml()))
        assert select_plan(config, models, devices, resume=True) == expected
        assert select_plan(config, models, devices) == colocated


def test_an_asynchronous_run_goes_on_only_with_as_many_groups_of_devices(tmp_path):
    """The schedule counts free slots in each group. A synchronous run and the wall clock may go on with any number."""
    devices, start = [Device()] * 8, ("plan=disaggregated", f"run_dir={tmp_path}", "name=run", "mesh.data=1")
    drawing, pairs, singles = (
        "ppo.asynchronous={staleness: 2, uncorrected: true}",
        ("mesh.fsdp=4", "mesh.tensor=2"),
        ("mesh.fsdp=8",),
    )

    def plan(*overrides: str, resume: bool = True) -> Plan:
        config = config_of(*start, *overrides)
        return select_plan(config, architectures(config), devices, resume=resume)

    assert plan(*pairs, drawing)["actor.generate"].sizes == (1, 2, 2)  # there is no plan to compare with yet
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / PLAN).write_text(seal(plan(*pairs, drawing).to_yaml()))
    others = "plan=colocate", "fleet.workers=1", "mesh.fsdp=2", "mesh.tensor=4"
    assert plan(*others, drawing)["actor.generate"].sizes == (1, 2, 4)
    with pytest.raises(
        UserError, match=r"drew on 2 group.s. of devices and here on 4, .* the schedule of ppo.asy.*: res"
    ):
        plan(*singles, drawing)
    for free in ((), (drawing, "ppo.asynchronous.clock=wall")):
        assert plan(*singles, *free)["actor.generate"].sizes == (1, 4, 1)
    assert plan(*singles, drawing, resume=False)
