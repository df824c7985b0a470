"""Seconds of calls from a measured profile: how it is measured, kept, and added up to calls."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import plans
from benchmarks.hlo import collectives
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.planning import microbenchmarks as measure
from jrlhf.planning import profile as profiles
from jrlhf.planning.candidates import placements, slices
from jrlhf.planning.moves import DeviceGroup
from jrlhf.planning.profile import Profile, ProfiledCosts, interpolate, load, save
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import RoleModel, Workload

LOCAL = Cluster(HARDWARE["h100"], 4)
WORK = plans.Case((1, 2, 2), batch=32).workload


def test_between_sizes_a_power_law_holds():
    curve = ((1.0, 2.0), (4.0, 4.0), (16.0, 16.0))  # sizes ** 0.5 * 2, then in proportion
    assert interpolate(curve, 2.0) == pytest.approx(2 * 2**0.5)
    assert interpolate(curve, 8.0) == pytest.approx(8.0)
    assert [interpolate(curve, size) for size, _ in curve] == [2.0, 4.0, 16.0]
    assert interpolate(curve, 64.0) == pytest.approx(64.0)  # beyond the last in proportion
    assert interpolate(curve, 0.1) == 2.0  # nothing is below what the least size costs


def test_the_least_time_of_programs_that_take_turns(monkeypatch):
    clock, order = [0.0], []

    def program(name, *taken):
        left = list(taken)

        def run():
            order.append(name)
            clock[0] += left.pop(0)
            return 0

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    durations = measure.seconds([program("a", 9.0, 3.0, 2.0, 4.0), program("b", 0.5, 7.0, 8.0, 6.0)], repeats=2)
    assert durations == [2.0, 6.0]  # the first run compiles, and does not count
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b"]


def invented(count: int = 4, of: float = 1e-3) -> Profile:
    """A profile of a machine on which everything takes its size times `of`."""
    questions = profiles.wanted_curves(WORK, jax.devices()[:count])
    curves = {name: tuple((size, size * of) for size in sorted(programs)) for name, programs in questions}
    return Profile("cpu", count, "0", {1: 1.0, 2: 2.0, 4: 4.0}, curves)


def test_calls_add_up_from_what_was_measured():
    units = ProfiledCosts(invented(), WORK)
    for mesh in ((1, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)):
        plan = plans.Case(mesh, batch=32).plan
        for call in plans.CALLS:
            parts = CostModel(WORK, LOCAL, costs=units).parts(call, plan[call.name])
            assert sum(parts.values()) > 0
            assert ("steps" in parts) == (call.kind == "generate")
            assert ("optimizer" in parts) == (call.kind == "train")
    case = replace(plans.Case((4, 1, 1), batch=32), micro_batches=2)
    parts = CostModel(WORK, LOCAL, costs=units).parts(plans.GRAPH["actor.update"], case.plan["actor.update"])
    rows, length = 32 // 4, plans.PROMPT + plans.RESPONSE  # both micro-batches together, in proportion
    assert parts["layers"] == pytest.approx(plans.MODEL.layers * rows * length * 1e-3 / measure.LAYERS)
    assert parts["ends"] == pytest.approx(rows * plans.RESPONSE * 1e-3)  # prompts are not predicted
    assert parts["optimizer"] == pytest.approx(1e-3 * (1 + 2 / 3))  # all numbers on each device, two gradients


def test_parts_that_were_measured():
    units, model = ProfiledCosts(invented(), WORK), WORK.models["actor"][0]
    adapter = replace(model, lora=LoRAConfig(rank=4, alpha=4.0))
    assert units.update(model, 1.0, 1)["optimizer"] == pytest.approx(1e-3)
    assert units.update(adapter, 1.0, 1)["optimizer"] == pytest.approx(0.25e-3)  # the least size that was measured
    # Fewer devices have the cores to themselves; collectives go array by array.
    whole, half = (units.on(devices).layer(model, 88, 44, 1, True)["layers"] for devices in (4, 2))
    assert half == pytest.approx(whole / 2)
    assert units.gather(DeviceGroup(1, 1), 1e6) == 0
    assert units.gather(DeviceGroup(2, 2), 4096 * 7, 7) == pytest.approx(7 * 4096e-3 / measure.CHAINED)
    bare = ProfiledCosts(Profile("cpu", 4, "0", {4: 1.0}), WORK)
    with pytest.raises(UserError, match="the profile has no layer .*--profile"):
        bare.layer(model, 44, 44, 1, False)


def test_files(tmp_path):
    path = tmp_path / "deep" / "profile.json"
    assert load(path) is None
    save(invented(), path)
    assert load(path) == invented()
    for seconds in ("0.0", "-1e-3", "NaN", "Infinity"):
        path.write_text('{"device": "cpu", "count": 4, "version": "0", "busy": {"4": 1.0}, "curves": {}}')
        curve, busy = f'"curves": {{"call": [[1.0, {seconds}]]}}', f'"busy": {{"4": {seconds}}}'
        sound = path.read_text()
        assert load(path) == Profile("cpu", 4, "0", {4: 1.0}, {})
        for text in (sound.replace('"curves": {}', curve), sound.replace('"busy": {"4": 1.0}', busy)):
            path.write_text(text)
            with pytest.raises(UserError, match="is not a profile"):
                load(path)
    path.write_text('{"device": "cpu"}')
    with pytest.raises(UserError, match="is not a profile"):
        load(path)


def test_what_is_known_is_not_measured_again(monkeypatch):
    devices, messages = jax.devices()[:4], []
    profile = replace(invented(), device=devices[0].device_kind, version=jax.__version__)
    assert profiles.measure(WORK, devices, profile=profile, say=messages.append) == profile
    assert messages == []
    taken = []

    def seconds(programs, repeats):
        taken.append(len(programs))
        return [1.0, *([3.0] * (len(programs) - 1))]

    monkeypatch.setattr(measure, "seconds", seconds)
    monkeypatch.setattr(measure, "layers", lambda *_, **__: None)
    fewer = {name: curve for name, curve in profile.curves.items() if "train full" not in name}
    result = profiles.measure(WORK, devices, profile=replace(profile, curves=fewer), say=messages.append)
    wanted = [name for name, _ in profiles.wanted_curves(WORK, devices)]
    names = [name for name in wanted if "train full" in name]
    assert messages == [f"{1 + wanted.index(name)} of {len(wanted)}: {name}" for name in names] and messages
    durations = {seconds for name in names for _, seconds in result.curves[name]}
    assert durations == {2.0}  # less what an empty program takes
    assert taken == [1 + len(result.curves[name]) for name in names]
    assert {name: result.curves[name] for name in fewer} == fewer


def test_devices_at_hand_as_hardware():
    profile = replace(invented(), busy={1: 0.5, 4: 2.0})
    cluster = profiles.cluster_of(profile, memory=1e9)
    assert (cluster.devices, cluster.hardware.node, cluster.hardware.memory) == (4, 4, 1e9)
    assert cluster.hardware.float32 == measure.BUSY_OPERATIONS / 2.0  # what each reaches while all are at work
    assert cluster.hardware.bandwidth == cluster.hardware.host == pytest.approx(1e3)  # a second for each thousand bytes
    assert cluster.hardware.latency == pytest.approx(64e-3 / measure.CHAINED)
    assert cluster.hardware.link == pytest.approx(1e3 * measure.CHAINED / 2, rel=1e-3)


# ---- the programs that are measured are what they are called


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.proof("memory"))])
def test_every_program_that_is_measured_runs(count):
    """One of each kind; on one device those that no other test runs: embeddings and heads."""
    tiny = ModelConfig(16, 16, 1, heads=2, kv_heads=2, head_dim=8, mlp=16, max_positions=16)
    models = {"actor": (RoleModel(tiny, "lm", True),), "critic": (RoleModel(tiny, "scalar", True),)}
    kinds: set[str] = set()
    for fused in (True, False):
        work = Workload(plans.GRAPH, models, 4, 2, 2, 2.0, 2.0, fused_loss=fused)
        for name, programs in profiles.wanted_curves(work, jax.devices()[:count]):
            ends, forward = name.startswith("ends"), name.endswith("forward")
            kind = name.split()[0] if ends or " train " not in name else "trained layer"
            if not ends and (not fused or count == 1 or kind in kinds):
                continue
            kinds.add(kind)
            results = jax.tree.leaves(programs[min(programs)]()())
            assert all(np.isfinite(np.asarray(x)).all() for x in results if x.dtype == np.float32), name
            if ends and not forward:  # gradients of the tables
                assert all(np.abs(gradient).max() > 0 for gradient in results)
    rest = {"call", "gather", "reduce", "copy", "host", "update", "layer", "trained layer", "generation"}
    assert kinds == {"ends"} | (rest if count > 1 else set())


@pytest.mark.parametrize("count", [6, 8])
def test_all_groups_that_candidates_have_are_measured(count):
    hardware = replace(HARDWARE["h100"], node=count)
    names = {name for name, _ in profiles.wanted_curves(WORK, jax.devices()[:count])}
    groups = {
        size
        for devices in slices(Cluster(hardware, count))
        for call in WORK.calls
        for placed in placements(replace(WORK, rows=48 * WORK.rows), call, devices.count, count, hypothetical=True)
        for size in (placed.data, placed.fsdp, placed.tensor, placed.pipeline)
    }
    assert {f"{kind} {size}" for kind in ("gather", "reduce") for size in groups - {1}} <= names
    assert max(groups) == count


@pytest.mark.full
def test_layers_are_those_of_the_model():
    devices = jax.devices()[:2]
    model = plans.MODEL
    y = measure.layers(model, devices, 1, 8, train=False, dtype=np.float32, remat="full")()
    assert y.shape == (2, 1, 8, model.embed)
    x_gradient, gradients = measure.layers(model, devices, 1, 8, train=True, dtype=np.float32, remat="full")()
    assert x_gradient.shape == y.shape
    assert gradients["mlp"]["up"].shape == (2, measure.LAYERS, model.embed, model.mlp)
    assert all(np.abs(gradient).max() > 0 for gradient in jax.tree.leaves(gradients))


def test_collectives_are_in_the_programs():
    for kind, name in (("gather", "all-gather"), ("reduce", "all-reduce")):
        program = measure.collective(kind, jax.devices()[:4], 2, 64)
        assert set(collectives(program.func.lower(*program.args).compile())) == {name}
    part = measure.sliced(plans.MODEL, 4)
    assert (part.heads, part.kv_heads, part.head_dim, part.mlp, part.embed) == (1, 1, 32, 96, 128)
