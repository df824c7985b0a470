"""Seconds of calls and moves against published measurements and closed forms."""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import published
from benchmarks.records import RESULTS
from jrlhf.meshes import AXES, GENERATE, TRAIN, make_mesh, reshard_cost
from jrlhf.meshes.hardware import HARDWARE, Cluster, cluster
from jrlhf.meshes.pipeline import SCHEDULES, forwards, makespan, needs_of
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import ForwardOptions, LoRAConfig, ModelConfig, init_lm, param_shardings, pipeline
from jrlhf.models.flops import generation_seconds, training_operations
from jrlhf.models.hf.presets import PRESETS
from jrlhf.planning.memory import call_bytes, state_bytes
from jrlhf.planning.moves import (
    DeviceGroup,
    gather_seconds,
    group,
    reallocation_seconds,
    reduce_seconds,
    stored_alike,
    stored_share,
    transfer_seconds,
)
from jrlhf.planning.time import CostModel, Parts
from tests.support.switches import shapes

SMALL = PRESETS["meta-llama/Meta-Llama-3-8B"]
LAYERS, TABLES = SMALL.layers * 218_103_808, 2 * 128256 * 4096  # weights in the matrices of SMALL
H100 = cluster("16xh100")
# A device that reaches all that its maker says, and launches for nothing; with links so fast that they do not count.
IDEAL = Cluster(
    replace(HARDWARE["h100"], infer=1, train=1, decode=1, stream=1, collective=1, launch=0, latency=0, link=1e18), 8
)
LINK = 450e9
LINKED = replace(IDEAL, hardware=replace(IDEAL.hardware, link=LINK))


def priced(placement: Placement, call: str = "actor.update", on: Cluster = H100, **changes) -> Parts:
    model = changes.pop("model", SMALL)
    return CostModel(published.workload(model, **changes), on).parts(published.GRAPH[call], placement)


def place(layout, start=0, **sizes) -> Placement:
    count = int(np.prod([size for axis, size in sizes.items() if axis != "micro_batches"]))
    return Placement(Slice(start, count), layout, **sizes)


# ---- published measurements


def predicted(rows, graphs: bool) -> dict[str, float]:
    work, on = published.workload(), published.cluster(graphs)
    return {row.call: CostModel(work, on).seconds(published.GRAPH[row.call], row.placement) for row in rows}


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


CALLS: Any = {  # of the functions that were measured
    "decode": ("generate", "actor.generate"),
    "train": ("train", "actor.update"),
    "score": ("score", "reference.logprobs"),
    "gen": ("generate", "actor.generate"),
    "ref": ("score", "reference.logprobs"),
    "values": ("score", "critic.values"),
    "update_actor": ("train", "actor.update"),
    "update_critic": ("train", "critic.update"),
}


def test_one_h200_as_measured():
    # This program's own steps, of which the fractions of the GPUs' profile come from decoding and one trace.
    record = json.loads((RESULTS / "accelerator-nvidia-h200.json").read_text())
    models = {"1.7B": PRESETS["Qwen/Qwen3-1.7B"], "8B": PRESETS["Qwen/Qwen3-8B"]}
    errors = {}

    def compare(name: str, row: dict[str, Any], seconds: float, **settings: Any) -> None:
        half = row.get("length", 0) // 2
        prompt, response = row.get("prompt", half), row.get("response", half)
        means = {"mean_prompt": prompt, "mean_response": response, "remat": row.get("remat", "full")}
        layout, call = CALLS[name]
        at = replace(place(layout), micro_batches=settings.pop("micro_batches", 1))
        settings |= {"rows": row["batch"], "prompt": prompt, "response": response, "minibatches": 1, **means}
        time = priced(at, call, cluster("1xh200"), model=models[row["model"]], **settings)
        errors[name, row["shape"]] = abs(sum(time.values()) / seconds - 1)

    for row in (row for row in record["results"] if "error" not in row):
        seconds = row["seconds"]
        if row["part"] == "iteration":
            for name in row["least"].keys() & CALLS.keys():
                divided = {"micro_batches": 16} if name.startswith("update") else {}
                compare(name, row, row["calls"][name], fused_loss=True, **divided)
        elif row["part"] in CALLS and "attention" not in row:
            if row["part"] == "decode":
                seconds = row["prefill"] + row["response"] * row["seconds"]
            # These steps predicted every token.
            compare(row["part"], row, seconds, spanned=(), fused_loss=row["date"] > "2026-11-20")
    assert len(errors) >= 17 and np.mean(list(errors.values())) <= 0.10 and max(errors.values()) <= 0.20, errors
    assert max(error for (name, _), error in errors.items() if name in ("decode", "gen")) <= 0.08, errors


# ---- closed forms


def test_generation_at_the_roofline():
    """Bytes of weights and cache bound few rows, operations bound many: as `generation_seconds` says step by step, with
    which the report compares runs. It does not count the drawing of tokens."""
    model = replace(SMALL, kv_heads=8, vocab_size=128)
    widths = {"prompt": 64, "response": 64, "mean_prompt": 64.0, "mean_response": 64.0}
    rates: Any = {"bandwidth": IDEAL.hardware.bandwidth * 8, "operations": IDEAL.hardware.bfloat16 * 8}
    for rows in (8, 16384):
        time = priced(place("generate", data=8), "actor.generate", IDEAL, rows=rows, model=model, **widths)
        lengths = np.full(rows, 64)
        least = generation_seconds(model, lengths, lengths, **rates, itemsize=2, copies=8)
        counted = sum(time.values()) - time["activations"] - time["sampling"]
        assert counted == pytest.approx(least, rel=0.04)
        if rows == 8:
            assert time["weights"] + time["cache"] > 0.8 * counted
        else:
            assert time["operations"] > time["weights"]


def test_training_operations_are_three_forwards_and_what_is_computed_again():
    rows, length = 64, 32
    settings = {"rows": rows, "prompt": 16, "response": 16, "minibatches": 1, "fused_loss": True}
    needed = training_operations(SMALL, np.full(rows, length), predicted=np.full(rows, 16))
    needed /= IDEAL.hardware.bfloat16 * 8
    remats = ("gather", "products", "attention", "full", "offload")
    parts = {remat: priced(place("train", fsdp=8), on=IDEAL, remat=remat, **settings) for remat in remats}
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
            priced(place(layout, fsdp=8), call, IDEAL, **settings, spanned=kinds)["operations"]
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
        assert time[part] == pytest.approx(moved / LINK, rel=1e-6), (call, placement)


def test_an_update_in_stages_copies_weights_and_gradients_in_float32():
    """Each of four stages stores a quarter of its own layers and table. Interleaved stages send twice."""
    placed = place("train", fsdp=2, pipeline=4, micro_batches=8)
    sent, run, chunks = (
        priced(place, "critic.update", LINKED, minibatches=2, recomputed_stages=again)["stages"]
        for place, again in ((placed, False), (placed, True), (replace(placed, schedule="interleaved"), True))
    )
    copied = 3 / 4 * 4 * (LAYERS / 4 + TABLES / 2) / 2
    assert run - sent == pytest.approx(2 * 2 * copied / LINK, rel=1e-6)
    assert chunks - run == pytest.approx(sent)


def test_scores_in_stages_take_their_table_and_copies_of_the_layers():
    """In a run each of four stages receives the three quarters of its layers and of a table that others store."""
    placed = place("score", fsdp=2, pipeline=4, micro_batches=8)
    engine, run = (
        priced(placed, "critic.values", LINKED, recomputed_stages=stages_of_a_run) for stages_of_a_run in (False, True)
    )
    received = 3 / 4 * 2 * (LAYERS / 4 + TABLES / 2) / 2
    assert run["stages"] - engine["stages"] == pytest.approx(received / LINK, rel=1e-6)
    assert {**run, "stages": 0} == {**engine, "stages": 0}
    busy = sum(seconds for name, seconds in engine.items() if name != "bubble")
    assert busy + engine["bubble"] == pytest.approx(makespan(forwards(4, 8), lambda _: busy / 8))
    whole = replace(placed, fsdp=8, pipeline=1)
    assert stored_alike(whole, placed) and not stored_alike(whole, place("score", fsdp=8, start=8))


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
    parts_of = CostModel(work, on).parts(call, placed)
    assert sum(parts_of.values()) - parts_of["optimizer"] == pytest.approx(max(free))
    assert parts_of["bubble"] == pytest.approx(max(free) - parts * (forward + backward))


class Rows(NamedTuple):
    tokens: Any


@pytest.mark.proof("memory")
@pytest.mark.parametrize("remat", ["full", "products"])
def test_a_split_backward_operation_computes_nearly_all_of_it_twice(remat):
    """XLA counts the operations of a middle stage."""
    model = ModelConfig(64, 64, 6, heads=4, kv_heads=4, head_dim=16, mlp=192, max_positions=64)
    widths = {"prompt": 16, "response": 16, "mean_prompt": 16.0, "mean_response": 16.0, "rows": 24, "minibatches": 1}
    fast = Cluster(replace(IDEAL.hardware, bandwidth=1e30), 3)
    work = published.workload(model, **widths, remat=remat, recomputed_stages=True)
    split, joint = (
        sum(CostModel(work, fast).stage_seconds(work.graph["critic.update"], replace(placed, schedule=schedule)))
        for placed in [place("train", pipeline=3, micro_batches=3)]
        for schedule in ("zb-h1", "1f1b")
    )
    groups = tuple(make_mesh(1, 1, 1, devices=[device]) for device in jax.devices()[:3])
    stages, mesh = pipeline.Stages(model, groups, TRAIN, ForwardOptions(remat=remat)), groups[1]
    shapes = jax.eval_shape(partial(init_lm, stages.part(1)), jax.random.key(0))["layers"]
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    weights = {"layers": jax.device_put(zeros, param_shardings(stages.part(1), mesh, TRAIN)["layers"])}
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
    assert sum(twice.values()) == pytest.approx(2 * sum(once.values()))
    coarse = priced(place("train", fsdp=16), minibatches=4)
    assert coarse["optimizer"] == pytest.approx(once["optimizer"] / 2)
    assert coarse["gathers"] == pytest.approx(once["gathers"] / 2)
    assert coarse["operations"] == pytest.approx(once["operations"])


# ---- what holds of any sizes


def test_slots_let_rows_follow_each_other_and_samples_share_a_prefill():
    settings, placed = {"rows": 512, "response": 1024, "mean_response": 256.0}, place("generate", data=16)
    waiting = priced(placed, "actor.generate", **settings)
    refilled = priced(placed, "actor.generate", slots=128, **settings)
    assert refilled["cache"] < waiting["cache"]  # nothing is fed on that is done
    steps = (4 - 1) * 256 + 1024  # each of 128 slots has four rows; the longest may be the last
    assert refilled["weights"] == pytest.approx(waiting["weights"] * steps / 1024, rel=0.02)
    one, eight = (priced(placed, "actor.generate", samples=samples) for samples in (1, 8))
    assert eight["activations"] == pytest.approx(one["activations"] / 8)
    assert {name: eight[name] for name in ("cache", "sampling")} == {name: one[name] for name in ("cache", "sampling")}


def test_key_value_heads_that_slices_share_are_read_by_each():
    model = replace(SMALL, kv_heads=2)
    four, eight = (
        priced(place("generate", tensor=slices), "actor.generate", model=model, rows=64)["cache"] for slices in (4, 8)
    )
    assert four == pytest.approx(eight)


def test_an_adapter_trains_without_its_bases_gradient():
    work = published.workload()
    adapter = replace(work.models["actor"][0], lora=LoRAConfig(rank=16, alpha=16.0))
    adapted = replace(work, models={**work.models, "actor": (adapter,)})
    call, placed = published.GRAPH["actor.update"], place("generate", data=16)
    whole, small = CostModel(work, H100).parts(call, placed), CostModel(adapted, H100).parts(call, placed)
    assert 0.70 < small["operations"] / whole["operations"] < 0.78  # three of four forwards
    assert small["optimizer"] < 0.05 * whole["optimizer"]
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
    divided = CostModel(adapted, H100).parts(call, place("generate", data=2, fsdp=8))
    assert divided["optimizer"] == small["optimizer"]


# ---- moves


def test_collectives_are_rings_over_groups_of_mesh_axes():
    on = Cluster(replace(HARDWARE["h100"], collective=0.5, latency=1e-5, link=400e9, network=50e9), 16)
    assert gather_seconds(on, DeviceGroup(1, 1), 1e9) == 0
    for ring, rate in (
        (DeviceGroup(8, 8), 200e9),
        (DeviceGroup(16, 4), 100e9),
        (DeviceGroup(2, 1), 25e9),
    ):  # four ports, one port
        share = (ring.size - 1) / ring.size
        assert gather_seconds(on, ring, 1e9) == pytest.approx(share * 1e9 / rate + 1e-5)
        assert reduce_seconds(on, ring, 1e9) == pytest.approx(2 * share * 1e9 / rate + 1e-5)
    placed = place("train", data=2, fsdp=4, tensor=2)
    for axis, expected in (("tensor", (2, 2)), ("fsdp", (4, 4)), ("data", (2, 1))):
        assert group(placed, 8, axis) == expected
    aligned, across = place("train_tp", tensor=8), place("train_tp", start=4, tensor=8)
    assert group(aligned, 8, "tensor") == DeviceGroup(8, 8) and group(across, 8, "tensor") == DeviceGroup(8, 4)
    assert priced(across, rows=64)["tensor"] > priced(aligned, rows=64)["tensor"]


def test_planned_bytes_are_those_of_the_switch():
    """Between all shapes of 8 devices, the share that a device receives is that of `reshard_cost` for one matrix, which
    the compiled programs send (`tests/meshes/test_repartition.py`)."""
    on, size = Cluster(replace(HARDWARE["h100"], collective=1.0, latency=0.0), 8), 24 * 24
    for old, new, layout in product(shapes(8), shapes(8), (TRAIN, GENERATE)):
        home, target = (
            place(name, **dict(zip(AXES, shape, strict=True))) for name, shape in (("train", old), (layout.name, new))
        )
        ends = (one.sharding(make_mesh(*shape), ("embed", "mlp")) for one, shape in ((TRAIN, old), (layout, new)))
        received = max(reshard_cost((24, 24), 1, *ends).received.values())
        casts = size * (stored_share(home) + stored_share(target)) / (on.hardware.bandwidth * on.hardware.stream)
        expected = 0 if home == target else received / LINK + casts
        assert reallocation_seconds(size, size, home, target, on) == pytest.approx(expected), (old, new, layout.name)


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
    sums = sum(state_bytes(work.models["actor"], work.itemsize, placed).values()), sum(needs.active.values())
    assert (price.resident, price.active, price.moved) == (*sums, needs.moved) and min(sums) > needs.moved > 0
    assert price.seconds == CostModel(work, H100).seconds(update, placed)
    assert prices.call(score, place("generate", data=16)).resident == 0  # the actor lives where it is trained
    assert prices.call(update, placed) is price
    assert prices.capacity == HARDWARE["h100"].memory
    assert prices.reallocation("actor", placed, placed) == 0
    assert prices.reallocation("actor", placed, place("generate", data=16)) > 0
    assert prices.transfer(placed, place("score", start=8, fsdp=8)) < 0.01
