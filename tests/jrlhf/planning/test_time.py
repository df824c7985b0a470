"""Seconds of calls and moves against published measurements and closed forms; and the same from a measured profile."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plans, published
from benchmarks.hlo import collectives
from benchmarks.records import RESULTS
from jrlhf.errors import UserError
from jrlhf.meshes import AXES, TRAIN, make_mesh
from jrlhf.meshes.hardware import HARDWARE, Cluster, cluster
from jrlhf.meshes.pipeline import SCHEDULES, needs_of
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import ForwardOptions, LoRAConfig, ModelConfig, init_lm, param_shardings, pipeline
from jrlhf.models.flops import generation_seconds, training_operations
from jrlhf.models.hf.presets import PRESETS
from jrlhf.planning import microbenchmarks as measure
from jrlhf.planning import profile as profiles
from jrlhf.planning.memory import call_bytes
from jrlhf.planning.moves import (
    Group,
    gather_seconds,
    group,
    reallocation_seconds,
    reduce_seconds,
    stored_share,
    transfer_seconds,
)
from jrlhf.planning.profile import Profile, ProfiledCosts, interpolate, load, save
from jrlhf.planning.time import CallTime, CostModel
from jrlhf.planning.workload import RoleModel, Workload

SMALL, LARGE = PRESETS["meta-llama/Meta-Llama-3-8B"], PRESETS["meta-llama/Meta-Llama-3-70B"]
THIRTEEN = ModelConfig(32000, 5120, 40, 40, 40, 128, 13824, 4096, tie_embeddings=False)
LAYERS, TABLES = SMALL.layers * 218_103_808, 2 * 128256 * 4096  # weights in the matrices of SMALL
H100 = cluster("16xh100")
# A device that reaches all that its maker says, and launches for nothing; with links so fast that they do not count.
IDEAL = Cluster(
    replace(HARDWARE["h100"], infer=1, train=1, decode=1, stream=1, collective=1, launch=0, latency=0, link=1e18), 8
)
LINK = 450e9
LINKED = replace(IDEAL, hardware=replace(IDEAL.hardware, link=LINK))


def priced(placement: Placement, call: str = "actor.update", on: Cluster = H100, **changes) -> CallTime:
    model = changes.pop("model", SMALL)
    return CostModel(published.workload(model, **changes), on).time(published.GRAPH[call], placement)


def place(layout, start=0, **sizes) -> Placement:
    count = int(np.prod([size for axis, size in sizes.items() if axis != "micro_batches"]))
    return Placement(Slice(start, count), layout, **sizes)


# ---- published measurements


def predicted(rows, graphs: bool) -> dict[str, float]:
    work, on = published.workload(), published.cluster(graphs)
    return {row.call: CostModel(work, on).time(published.GRAPH[row.call], row.placement).seconds for row in rows}


def test_calls_and_iterations_of_the_published_tables():
    errors, iterations = [], {}
    for name, rows in (("searched", published.SEARCHED), ("heuristic", published.HEURISTIC)):
        fast, slow = predicted(rows, True), predicted(rows, False)
        errors += [abs(fast[row.call] / row.seconds - 1) for row in rows]
        errors += [abs(slow[row.call] / row.without_graphs - 1) for row in rows if row.without_graphs]
        for graphs, measured in zip((True, False), published.MEASURED[name], strict=True):
            on, calls = published.cluster(graphs), fast if graphs else slow
            iterations[measured] = published.end_to_end(rows, calls, on, published.workload())
            assert iterations[measured] == pytest.approx(measured, rel=0.10), (name, graphs)
    assert len(errors) == 14 and np.mean(errors) <= 0.20 and max(errors) <= 0.25, errors
    assert sorted(iterations, key=lambda measured: iterations[measured]) == sorted(iterations)
    searched, heuristic = predicted(published.SEARCHED, True), predicted(published.HEURISTIC, True)
    for ours, theirs in zip(published.SEARCHED, published.HEURISTIC, strict=True):  # which plan is faster for a call
        assert (searched[ours.call] < heuristic[ours.call]) == (ours.seconds < theirs.seconds), ours.call


def test_one_h200_as_measured():
    # This program's own steps, of which the fractions of the GPUs' profile come from one trace.
    record = json.loads((RESULTS / "accelerator-nvidia-h200.json").read_text())
    models = {"1.7B": PRESETS["Qwen/Qwen3-1.7B"], "8B": PRESETS["Qwen/Qwen3-8B"]}
    errors = []
    for result in record["results"]:
        model, half = models[result["model"]], result.get("length", 0) // 2
        settings: Any = {"rows": result["batch"], "prompt": half, "response": half, "minibatches": 1}
        settings |= {"fused_loss": False, "spanned": ()}  # these steps predicted every token
        layout, call = {
            "decode": ("generate", "actor.generate"),
            "train": ("train", "actor.update"),
            "score": ("score", "reference.logprobs"),
        }[result["part"]]
        if layout == "generate":
            prompt, response = result["prompt"], result["response"]
            settings |= {"prompt": prompt, "response": response, "mean_prompt": prompt, "mean_response": response}
            result["seconds"] = result["prefill"] + response * result["step"]
        elif layout == "train":
            settings["remat"] = result["remat"]
        time = priced(place(layout), call, cluster("1xh200"), model=model, **settings)
        errors.append(abs(time.seconds / result["seconds"] - 1))
    assert len(errors) == 9 and np.mean(errors) <= 0.10 and max(errors) <= 0.20, errors


# ---- closed forms


def test_generation_at_the_roofline():
    """Bytes of weights and cache bound few rows, operations bound many: as `generation_seconds` says step by step, with
    which the report compares runs. It does not count the drawing of tokens."""
    model = replace(SMALL, kv_heads=8, vocab_size=128)
    widths = {"prompt": 64, "response": 64, "mean_prompt": 64.0, "mean_response": 64.0}
    memory, operations = IDEAL.hardware.bandwidth * 8, IDEAL.hardware.bfloat16 * 8
    for rows in (8, 16384):
        time = priced(place("generate", data=8), "actor.generate", IDEAL, rows=rows, model=model, **widths)
        lengths = np.full(rows, 64)
        least = generation_seconds(model, lengths, lengths, memory=memory, operations=operations, itemsize=2, copies=8)
        counted = time.seconds - time.parts["activations"] - time.parts["sampling"]
        assert counted == pytest.approx(least, rel=0.04)
        if rows == 8:
            assert time.parts["weights"] + time.parts["cache"] > 0.8 * counted
        else:
            assert time.parts["operations"] > time.parts["weights"]


def test_training_operations_are_three_forwards_and_what_is_computed_again():
    rows, length = 64, 32
    settings = {"rows": rows, "prompt": 16, "response": 16, "minibatches": 1, "fused_loss": True}
    needed = training_operations(SMALL, np.full(rows, length), predicted=np.full(rows, 16))
    needed /= IDEAL.hardware.bfloat16 * 8
    remats = ("gather", "products", "attention", "full", "offload")
    parts = {remat: priced(place("train", fsdp=8), on=IDEAL, remat=remat, **settings).parts for remat in remats}
    operations = {remat: parts[remat]["operations"] for remat in remats}
    assert operations["gather"] == pytest.approx(needed, rel=0.03)
    assert operations["products"] == operations["gather"]
    layers = 2 * SMALL.layers * rows * length * (SMALL.embed * (2 * SMALL.heads * 128 + 2 * SMALL.kv_heads * 128))
    layers += 2 * SMALL.layers * rows * length * 2 * SMALL.embed * SMALL.mlp  # all but down
    again = layers / IDEAL.hardware.bfloat16 / 8
    assert operations["attention"] - operations["products"] == pytest.approx(again, rel=1e-6)
    assert 0 < operations["full"] - operations["attention"] < 0.01 * needed
    # What is not computed again is written and read, on the device or the host.
    assert parts["full"]["activations"] < parts["attention"]["activations"] < parts["products"]["activations"]
    assert parts["offload"]["host"] > 0 and "host" not in parts["full"]


def test_prompts_have_a_head_where_a_call_does_not_span_responses_only():
    settings: Any = {"rows": 64, "prompt": 48, "response": 16, "minibatches": 1, "fused_loss": True}
    head = 2 * SMALL.embed * SMALL.padded_vocab * 64 * 48 / IDEAL.hardware.bfloat16 / 8  # of the prompts
    for layout, call, products in (("score", "reference.logprobs", 1), ("train", "actor.update", 3)):
        spanned, whole = (
            priced(place(layout, fsdp=8), call, IDEAL, **settings, spanned=kinds).parts["operations"]
            for kinds in (("infer", "train"), ())
        )
        assert whole - spanned == pytest.approx(products * head, rel=1e-6)


def test_collectives_of_a_call():
    """Each of g devices in a ring sends (g - 1) / g of the bytes."""
    for call, part, placement, minibatches, moved in (
        # Each micro-batch of training gathers every matrix twice and scatters its gradient once; scoring gathers once.
        ("actor.update", "gathers", place("train", fsdp=8, micro_batches=2), 4, 8 * 3 * 7 / 8 * 2 * (LAYERS + TABLES)),
        ("reference.logprobs", "gathers", place("score", fsdp=8), 4, 7 / 8 * 2 * (LAYERS + TABLES)),
        ("reference.logprobs", "gathers", place("generate", tensor=8), 4, 0),
        # Gradients of whole layers are summed in float32; those of tables, and of layers that are gathered, travel in
        # the compute dtype, as their weights do.
        ("actor.update", "gathers", place("train", data=8), 1, 2 * 7 / 8 * (4 * LAYERS + 2 * TABLES)),
        (
            "actor.update",
            "gathers",
            place("train", data=4, fsdp=2),
            1,
            (3 / 2 * 2 + 2 * 3 / 4 * 2 / 2) * (LAYERS + TABLES),
        ),
        # Two all-reduces a layer of the residual stream of a group's rows, and one for the embedding.
        ("critic.values", "tensor", place("generate", data=2, tensor=4), 4, 64 * 2 * 3 / 4 * 32 * 2048 * 4096 * 2),
    ):
        time = priced(placement, call, LINKED, rows=64, minibatches=minibatches)
        assert time.parts[part] == pytest.approx(moved / LINK, rel=1e-6), (call, placement)


def test_a_pipeline_waits_for_its_first_and_last_part():
    for parts in (2, 8):
        time = priced(place("train_tp", data=4, pipeline=4, micro_batches=parts))
        working = sum(seconds for name, seconds in time.parts.items() if name not in ("bubble", "optimizer", "gathers"))
        assert time.parts["bubble"] == pytest.approx((4 - 1) / parts * working)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_an_update_in_stages_takes_as_long_as_its_table(schedule):
    """Walks the table: each device takes its next operation once what that needs has ended."""
    stages, parts = 4, 8
    placed = replace(place("train", pipeline=stages, micro_batches=parts), schedule=schedule)
    work = published.workload(minibatches=1, recomputed_stages=True)
    call, on = work.graph["critic.update"], Cluster(IDEAL.hardware, stages)
    forward, backward = CostModel(work, on).stage_seconds(call, placed)
    seconds = {"forward": forward, "backward": backward}
    if schedule == "interleaved":
        seconds = {kind: half / 2 for kind, half in seconds.items()}
    if schedule == "zb-h1":  # a whole pass, and one without gradients of weights
        whole = (forward + backward) / 2
        seconds |= {"weight": whole, "backward": whole - forward}
    table = SCHEDULES[schedule](stages, parts)
    orders, ends, free = [list(order) for order in table.orders], {}, [0.0] * stages
    while any(orders):
        for device, order in enumerate(orders):
            while order and all(need in ends for need in needs_of(table.pipelines, order[0])):
                step = order.pop(0)
                start = max([free[device], *(ends[need] for need in needs_of(table.pipelines, step))])
                free[device] = ends[step] = start + seconds[step.kind]
    parts_of = CostModel(work, on).time(call, placed).parts
    assert sum(parts_of.values()) - parts_of["optimizer"] == pytest.approx(max(free))
    assert parts_of["bubble"] == pytest.approx(max(free) - parts * (forward + backward))


class Rows(NamedTuple):
    tokens: Any


def test_a_split_backward_operation_computes_nearly_all_of_it_twice():
    """XLA counts the operations of a middle stage."""
    model = ModelConfig(64, 64, 6, heads=4, kv_heads=4, head_dim=16, mlp=192, max_positions=64)
    widths = {"prompt": 16, "response": 16, "mean_prompt": 16.0, "mean_response": 16.0, "rows": 24, "minibatches": 1}
    fast = Cluster(replace(IDEAL.hardware, bandwidth=1e30), 3)
    for remat in ("full", "products"):
        work = published.workload(model, **widths, remat=remat, recomputed_stages=True)
        split, joint = (
            sum(CostModel(work, fast).stage_seconds(work.graph["critic.update"], replace(placed, schedule=schedule)))
            for placed in [place("train", pipeline=3, micro_batches=3)]
            for schedule in ("zb-h1", "1f1b")
        )
        groups = tuple(make_mesh(1, 1, 1, devices=[device]) for device in jax.devices()[:3])
        stages, mesh = pipeline.Stages(model, groups, TRAIN, ForwardOptions(remat=remat)), groups[1]
        shardings = param_shardings(stages.part(1), mesh, TRAIN)["layers"]
        weights = {"layers": jax.device_put(init_lm(stages.part(1), jax.random.key(0))["layers"], shardings)}
        rows = Rows(jax.device_put(np.zeros((3, 8, 32), np.int32), NamedSharding(mesh, P())))
        hidden = jax.device_put(np.zeros((8, 32, 64), np.float32), NamedSharding(mesh, P(AXES)))
        function = pipeline._stage(stages, 1)
        with jax.set_mesh(mesh):
            given = weights, {"hidden": hidden}, rows, 0, ()
            programs = (
                pipeline._forward.lower(function, *given),
                pipeline._gradient_of_input.lower(function, *given, hidden),
                pipeline._gradients.lower(function, pipeline._zeros(weights), *given, hidden),
            )
        counts: Any = [program.compile().cost_analysis() for program in programs]
        forward, half, whole = (count["flops"] for count in counts)
        assert split / joint == pytest.approx((forward + half + whole) / (forward + whole), rel=0.03)


def test_epochs_and_minibatches():
    once = priced(place("train", fsdp=16), minibatches=8)
    twice = priced(place("train", fsdp=16), minibatches=8, epochs=2)
    assert twice.seconds == pytest.approx(2 * once.seconds)
    coarse = priced(place("train", fsdp=16), minibatches=4)
    assert coarse.parts["optimizer"] == pytest.approx(once.parts["optimizer"] / 2)
    assert coarse.parts["gathers"] == pytest.approx(once.parts["gathers"] / 2)
    assert coarse.parts["operations"] == pytest.approx(once.parts["operations"])


# ---- what holds of any sizes


def test_sizes_scale_the_time():
    """Twice the devices is nearly half the time; twice the rows nearly twice, but in decoding; models by their size."""
    for call, layout, low, high in (
        ("actor.update", "train", 1.7, 2.0),
        ("reference.logprobs", "score", 1.9, 2.0),
        ("actor.generate", "generate", 1.1, 1.9),
    ):
        one = priced(place(layout, data=16), call).seconds
        assert low * one < priced(place(layout, data=16), call, rows=1024).seconds <= high * one * 1.001
        if layout != "generate":
            half = priced(place(layout, data=2, fsdp=8), call).seconds
            whole = priced(place(layout, data=4, fsdp=8), call, Cluster(H100.hardware, 32)).seconds
            assert 0.5 * half < whole < 0.65 * half
    placed, on = place("train", data=2, fsdp=64), Cluster(H100.hardware, 128)
    small = priced(placed, on=on).parts["operations"]
    for model, numbers in ((THIRTEEN, 12.7e9), (LARGE, 69.5e9)):
        assert priced(placed, on=on, model=model).parts["operations"] / small == pytest.approx(numbers / 7.5e9, rel=0.1)


def test_tensor_parallelism_between_nodes_is_slower_than_within():
    within, between = priced(place("train_tp", data=2, tensor=8)), priced(place("train_tp", tensor=16))
    assert between.parts["tensor"] > 2 * within.parts["tensor"] and between.seconds > within.seconds
    aligned, across = place("train_tp", tensor=8), place("train_tp", start=4, tensor=8)
    assert group(aligned, 8, "tensor") == Group(8, 8) and group(across, 8, "tensor") == Group(8, 4)
    assert priced(across, rows=64).seconds > priced(aligned, rows=64).seconds


def test_slots_let_rows_follow_each_other_and_samples_share_a_prefill():
    settings, placed = {"rows": 512, "response": 1024, "mean_response": 256.0}, place("generate", data=16)
    waiting = priced(placed, "actor.generate", **settings)
    refilled = priced(placed, "actor.generate", slots=128, **settings)
    assert refilled.parts["cache"] < waiting.parts["cache"]  # nothing is fed on that is done
    steps = (4 - 1) * 256 + 1024  # each of 128 slots has four rows; the longest may be the last
    assert refilled.parts["weights"] == pytest.approx(waiting.parts["weights"] * steps / 1024, rel=0.02)
    one, eight = (priced(placed, "actor.generate", samples=samples).parts for samples in (1, 8))
    assert eight["activations"] == pytest.approx(one["activations"] / 8)
    assert {name: eight[name] for name in ("cache", "sampling")} == {name: one[name] for name in ("cache", "sampling")}


def test_key_value_heads_that_slices_share_are_read_by_each():
    model = replace(SMALL, kv_heads=2)
    four, eight = (
        priced(place("generate", tensor=slices), "actor.generate", model=model, rows=64).parts["cache"]
        for slices in (4, 8)
    )
    assert four == pytest.approx(eight)


def test_an_adapter_trains_without_its_bases_gradient():
    work = published.workload()
    adapter = replace(work.models["actor"][0], lora=LoRAConfig(rank=16, alpha=16.0))
    adapted = replace(work, models={**work.models, "actor": (adapter,)})
    call, placed = published.GRAPH["actor.update"], place("generate", data=16)
    whole, small = CostModel(work, H100).time(call, placed), CostModel(adapted, H100).time(call, placed)
    assert 0.70 < small.parts["operations"] / whole.parts["operations"] < 0.78  # three of four forwards
    assert small.parts["optimizer"] < 0.05 * whole.parts["optimizer"]
    # Both halves of its backward operation are the same passes.
    critic, staged = published.GRAPH["critic.update"], place("generate", pipeline=4, micro_batches=8)
    adapted = replace(adapted, models={**adapted.models, "critic": (replace(adapter, head="scalar"),)})
    adapted = replace(adapted, recomputed_stages=True)
    joint, split = (
        CostModel(adapted, IDEAL).stage_seconds(critic, replace(staged, schedule=schedule))[1]
        for schedule in ("1f1b", "zb-h1")
    )
    assert split == pytest.approx(2 * joint)
    # It is stored as generation needs it, whole on the devices of an fsdp axis, and each updates all of it.
    divided = CostModel(adapted, H100).time(call, place("generate", data=2, fsdp=8))
    assert divided.parts["optimizer"] == small.parts["optimizer"]


def test_faster_hardware_is_faster():
    order = ["8xa100", "8xh100", "8xh200", "8xb200"]
    for call, layout in (("actor.update", "train"), ("actor.generate", "generate")):
        seconds = [priced(place(layout, data=8), call, cluster(name)).seconds for name in order]
        assert seconds == sorted(seconds, reverse=True)


# ---- moves


def test_collectives_are_rings_over_groups_of_mesh_axes():
    on = Cluster(replace(HARDWARE["h100"], collective=0.5, latency=1e-5, link=400e9, network=50e9), 16)
    assert gather_seconds(on, Group(1, 1), 1e9) == 0
    for ring, rate in ((Group(8, 8), 200e9), (Group(16, 4), 100e9), (Group(2, 1), 25e9)):  # four ports, one port
        share = (ring.size - 1) / ring.size
        assert gather_seconds(on, ring, 1e9) == pytest.approx(share * 1e9 / rate + 1e-5)
        assert reduce_seconds(on, ring, 1e9) == pytest.approx(2 * share * 1e9 / rate + 1e-5)
    placed = place("train", data=2, fsdp=4, tensor=2)
    for axes, expected in ((["tensor"], (2, 2)), (["fsdp"], (4, 4)), (["fsdp", "tensor"], (8, 8)), (["data"], (2, 1))):
        assert group(placed, 8, *axes) == expected


def test_weights_and_values_travel():
    on = Cluster(replace(HARDWARE["h100"], collective=1.0, latency=0.0), 16)
    train, size = place("train", fsdp=4, tensor=2), 16e9
    for target, moved, rate in (
        (train, 0, LINK),
        # Dropping fsdp: each device has an eighth and needs a half.
        (place("generate", fsdp=4, tensor=2), 3 / 8, LINK),
        (place("generate", data=4, tensor=2), 3 / 8, LINK),
        # To other devices all of it travels, and between nodes through the network.
        (place("generate", start=8, data=4, tensor=2), 1 / 2, 50e9),
        (place("score", start=8, fsdp=8), 1 / 8, 50e9),
    ):
        casts = (2 * size / 8 + size * stored_share(target)) / (on.hardware.bandwidth * on.hardware.stream)
        expected = moved * size / rate + (casts if target != train else 0)
        assert reallocation_seconds(2 * size, size, train, target, on) == pytest.approx(expected)
    # Whole weights that stay where they are are read as float32 and written in the compute dtype.
    alone = reallocation_seconds(2 * size, size, place("train", data=8), place("generate", data=8), on)
    assert alone == pytest.approx(3 * size / (on.hardware.bandwidth * on.hardware.stream))
    here, there = place("generate", data=8), place("score", start=8, fsdp=8)
    assert transfer_seconds(1e6, here, place("score", fsdp=8), H100) == 0
    assert transfer_seconds(8e9, here, there, H100) == pytest.approx(1e9 / (0.75 * 50e9), rel=1e-2)


# ---- what the search asks


def test_prices():
    work = published.workload()
    prices = CostModel(work, H100)
    update, score = published.GRAPH["actor.update"], published.GRAPH["actor.generate"]
    placed = place("train", fsdp=16)
    price = prices.call(update, placed)
    needs = call_bytes(work, update, placed)
    sums = sum(needs.resident.values()), sum(needs.active.values())
    assert (price.resident, price.active, price.moved) == (*sums, needs.moved) and min(sums) > needs.moved > 0
    assert price.seconds == CostModel(work, H100).time(update, placed).seconds
    assert prices.call(score, place("generate", data=16)).resident == 0  # the actor lives where it is trained
    assert prices.call(update, placed) is price
    assert prices.capacity == HARDWARE["h100"].memory
    assert prices.reallocation("actor", placed, placed) == 0
    assert prices.reallocation("actor", placed, place("generate", data=16)) > 0
    assert prices.transfer(placed, place("score", start=8, fsdp=8)) < 0.01


# ---- measured costs

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
    questions = profiles.wanted_curves(WORK, jax.devices()[:count], ("full",))
    curves = {name: tuple((size, size * of) for size in sorted(programs)) for name, programs in questions}
    return Profile("cpu", count, "0", {1: 1.0, 2: 2.0, 4: 4.0}, curves)


def test_calls_add_up_from_what_was_measured():
    units = ProfiledCosts(invented(), WORK)
    for mesh in ((1, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)):
        plan = plans.Case(mesh, batch=32).plan
        for call in plans.CALLS:
            time = CostModel(WORK, LOCAL, costs=units).time(call, plan[call.name])
            assert time.seconds > 0
            assert ("steps" in time.parts) == (call.kind == "generate")
            assert ("optimizer" in time.parts) == (call.kind == "train")
    case = replace(plans.Case((4, 1, 1), batch=32), micro_batches=2)
    time = CostModel(WORK, LOCAL, costs=units).time(plans.GRAPH["actor.update"], case.plan["actor.update"])
    rows, length = 32 // 4, plans.PROMPT + plans.RESPONSE  # both micro-batches together, in proportion
    assert time.parts["layers"] == pytest.approx(plans.MODEL.layers * rows * length * 1e-3 / measure.LAYERS)
    assert time.parts["ends"] == pytest.approx(rows * plans.RESPONSE * 1e-3)  # prompts are not predicted
    assert time.parts["optimizer"] == pytest.approx(1e-3 * (1 + 2 / 3))  # all numbers on each device, two gradients


def test_parts_that_were_measured():
    units, model = ProfiledCosts(invented(), WORK), WORK.models["actor"][0]
    adapter = replace(model, lora=LoRAConfig(rank=4, alpha=4.0))
    assert units.update(model, 1.0, 1)["optimizer"] == pytest.approx(1e-3)
    assert units.update(adapter, 1.0, 1)["optimizer"] == pytest.approx(0.25e-3)  # the least size that was measured
    # Fewer devices have the cores to themselves; collectives go array by array.
    whole, half = (units.on(devices).layer(model, 88, 44, 1, True)["layers"] for devices in (4, 2))
    assert half == pytest.approx(whole / 2)
    assert units.gather(Group(1, 1), 1e6) == 0
    assert units.gather(Group(2, 2), 4096 * 7, 7) == pytest.approx(7 * 4096e-3 / measure.CHAINED)
    bare = ProfiledCosts(Profile("cpu", 4, "0", {4: 1.0}), WORK)
    with pytest.raises(UserError, match="the profile has no layer .*--profile"):
        bare.layer(model, 44, 44, 1, False)


def test_files(tmp_path):
    path = tmp_path / "deep" / "profile.json"
    assert load(path) is None
    save(invented(), path)
    assert load(path) == invented()
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
    assert messages == [name for name in profile.curves if "train full" in name] and messages
    durations = {seconds for name in messages for _, seconds in result.curves[name]}
    assert durations == {2.0}  # less what an empty program takes
    assert taken == [1 + len(result.curves[name]) for name in messages]
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


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.full)])
def test_every_program_that_is_measured_runs(count):
    """On one device those that no other test runs: embeddings and heads."""
    tiny = ModelConfig(16, 16, 1, heads=2, kv_heads=2, head_dim=8, mlp=16, max_positions=16)
    models = {"actor": (RoleModel(tiny, "lm", True),), "critic": (RoleModel(tiny, "scalar", True),)}
    kinds: set[str] = set()
    for fused in (True, False):
        work = Workload(plans.GRAPH, models, 4, 2, 2, 2.0, 2.0, fused_loss=fused)
        for name, programs in profiles.wanted_curves(work, jax.devices()[:count], ("full",)):
            ends, forward = name.startswith("ends"), name.endswith("forward")
            if not ends and (not fused or count == 1):
                continue
            kinds.add(name.split()[0])
            results = jax.tree.leaves(programs[min(programs)]()())
            assert all(np.isfinite(np.asarray(x)).all() for x in results if x.dtype == np.float32), name
            if ends and not forward:  # gradients of the tables
                assert all(np.abs(gradient).max() > 0 for gradient in results)
    rest = {"call", "gather", "reduce", "copy", "host", "update", "layer", "generation"}
    assert kinds == {"ends"} | (rest if count > 1 else set())


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
