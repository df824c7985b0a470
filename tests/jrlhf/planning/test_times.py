"""The cost model against published measurements, closed forms, and what must hold of any such model."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import published
from benchmarks.records import RESULTS
from jrlhf.meshes.hardware import HARDWARE, Cluster, cluster
from jrlhf.meshes.plan import Placement, Slice
from jrlhf.models import LoRAConfig, ModelConfig
from jrlhf.models.flops import generation_seconds, training_operations
from jrlhf.models.presets import PRESETS
from jrlhf.planning.memory import call_bytes
from jrlhf.planning.moves import Group, gather_seconds, group, reallocation_seconds, reduce_seconds, transfer_seconds
from jrlhf.planning.time import CallTime, CostModel, call_seconds

SMALL, LARGE = PRESETS["meta-llama/Meta-Llama-3-8B"], PRESETS["meta-llama/Meta-Llama-3-70B"]
THIRTEEN = ModelConfig(32000, 5120, 40, 40, 40, 128, 13824, 4096, tie_embeddings=False)
H100 = cluster("16xh100")
# A device that reaches all that its maker says, and launches for nothing.
IDEAL = Cluster(
    replace(HARDWARE["h100"], infer=1, train=1, decode=1, stream=1, collective=1, launch=0, latency=0, link=1e18), 8
)


def priced(placement: Placement, call: str = "actor.update", on: Cluster = H100, **changes) -> CallTime:
    model = changes.pop("model", SMALL)
    return call_seconds(published.workload(model, **changes), published.GRAPH[call], placement, on)


def place(layout, start=0, **sizes) -> Placement:
    count = int(np.prod([size for axis, size in sizes.items() if axis != "micro_batches"]))
    return Placement(Slice(start, count), layout, **sizes)


# ---- published measurements


def predicted(rows, graphs: bool) -> dict[str, float]:
    work, on = published.workload(), published.cluster(graphs)
    return {row.call: call_seconds(work, published.GRAPH[row.call], row.placement, on).seconds for row in rows}


def test_calls_of_the_published_table():
    errors = []
    for rows in (published.SEARCHED, published.HEURISTIC):
        errors += [abs(predicted(rows, True)[row.call] / row.seconds - 1) for row in rows]
        slower = predicted(rows, False)
        errors += [abs(slower[row.call] / row.without_graphs - 1) for row in rows if row.without_graphs]
    assert len(errors) == 14
    assert np.mean(errors) <= 0.20, errors
    assert max(errors) <= 0.25, errors


def test_iterations_of_the_published_table():
    predictions = {}
    for name, rows in (("searched", published.SEARCHED), ("heuristic", published.HEURISTIC)):
        for graphs, measured in zip((True, False), published.MEASURED[name], strict=True):
            seconds = published.end_to_end(
                rows, predicted(rows, graphs), published.cluster(graphs), published.workload()
            )
            assert seconds == pytest.approx(measured, rel=0.10), (name, graphs)
            predictions[measured] = seconds
    assert sorted(predictions, key=lambda measured: predictions[measured]) == sorted(predictions)


def test_which_of_two_published_plans_is_faster_for_each_call():
    searched, heuristic = predicted(published.SEARCHED, True), predicted(published.HEURISTIC, True)
    for ours, theirs in zip(published.SEARCHED, published.HEURISTIC, strict=True):
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
        if result["part"] == "decode":
            prompt, response = result["prompt"], result["response"]
            settings |= {"prompt": prompt, "response": response, "mean_prompt": prompt, "mean_response": response}
            time = priced(place("generate"), "actor.generate", cluster("1xh200"), model=model, **settings)
            measured = result["prefill"] + response * result["step"]
        elif result["part"] == "train":
            remat = result["remat"]
            time = priced(place("train"), "actor.update", cluster("1xh200"), model=model, remat=remat, **settings)
            measured = result["seconds"]
        else:
            time = priced(place("score"), "reference.logprobs", cluster("1xh200"), model=model, **settings)
            measured = result["seconds"]
        errors.append(abs(time.seconds / measured - 1))
    assert len(errors) == 9
    assert np.mean(errors) <= 0.10, errors
    assert max(errors) <= 0.20, errors


# ---- closed forms


@pytest.mark.parametrize(("rows", "bound"), [(8, "bytes"), (16384, "operations")])
def test_generation_at_the_roofline(rows: int, bound: str):
    # Bytes of weights and cache bound few rows, operations bound many: as `generation_seconds` says step by step, with
    # which the report compares runs. It does not count the drawing of tokens.
    model = replace(SMALL, kv_heads=8, vocab_size=128)
    time = priced(
        place("generate", data=8), "actor.generate", IDEAL, rows=rows, prompt=64, response=64, model=model,
        mean_prompt=64.0, mean_response=64.0,
    )  # fmt: skip
    lengths = np.full(rows, 64)
    peak = IDEAL.hardware.bandwidth * 8, IDEAL.hardware.bfloat16 * 8
    least = generation_seconds(model, lengths, lengths, memory=peak[0], operations=peak[1], itemsize=2, copies=8)
    counted = time.seconds - time.parts["activations"] - time.parts["sampling"]
    assert counted == pytest.approx(least, rel=0.04)
    moved = time.parts["weights"] + time.parts["cache"]
    if bound == "bytes":
        assert moved > 0.8 * counted
    else:
        assert time.parts["operations"] > time.parts["weights"]


def test_training_operations_are_three_forwards_and_what_is_computed_again():
    rows, length = 64, 32
    settings = {"rows": rows, "prompt": 16, "response": 16, "minibatches": 1, "fused_loss": True}
    needed = training_operations(SMALL, np.full(rows, length), predicted=np.full(rows, 16))
    needed /= IDEAL.hardware.bfloat16 * 8
    operations = {
        remat: priced(place("train", fsdp=8), on=IDEAL, remat=remat, **settings).parts["operations"]
        for remat in ("gather", "products", "attention", "full")
    }
    assert operations["gather"] == pytest.approx(needed, rel=0.03)
    assert operations["products"] == operations["gather"]
    layers = 2 * SMALL.layers * rows * length * (SMALL.embed * (2 * SMALL.heads * 128 + 2 * SMALL.kv_heads * 128))
    layers += 2 * SMALL.layers * rows * length * 2 * SMALL.embed * SMALL.mlp  # all but down
    again = layers / IDEAL.hardware.bfloat16 / 8
    assert operations["attention"] - operations["products"] == pytest.approx(again, rel=1e-6)
    assert 0 < operations["full"] - operations["attention"] < 0.01 * needed


def test_prompts_have_a_head_where_a_call_does_not_span_responses_only():
    settings: Any = {"rows": 64, "prompt": 48, "response": 16, "minibatches": 1, "fused_loss": True}
    head = 2 * SMALL.embed * SMALL.padded_vocab * 64 * 48 / IDEAL.hardware.bfloat16 / 8  # of the prompts
    for layout, call, products in (("score", "reference.logprobs", 1), ("train", "actor.update", 3)):
        spanned, whole = (
            priced(place(layout, fsdp=8), call, IDEAL, **settings, spanned=kinds).parts["operations"]
            for kinds in (("infer", "train"), ())
        )
        assert whole - spanned == pytest.approx(products * head, rel=1e-6)


def test_gathers_of_fsdp():
    # In training each micro-batch gathers every matrix twice and scatters its gradient once: 7/8 of their bytes each.
    time = priced(place("train", fsdp=8, micro_batches=2), on=replace_link(450e9), rows=64, minibatches=4)
    matrices = 2 * (SMALL.layers * 218_103_808 + 2 * 128256 * 4096)
    assert time.parts["gathers"] == pytest.approx(4 * 2 * 3 * 7 / 8 * matrices / 450e9)
    scored = priced(place("score", fsdp=8), "reference.logprobs", replace_link(450e9), rows=64)
    assert scored.parts["gathers"] == pytest.approx(7 / 8 * matrices / 450e9)
    assert priced(place("generate", tensor=8), "reference.logprobs").parts["gathers"] == 0


def test_gradients_of_whole_layers_are_summed_in_float32():
    """Gradients of tables, and of layers that are gathered, travel in the compute dtype, as their weights do."""
    time = priced(place("train", data=8), on=replace_link(450e9), rows=64, minibatches=1)
    layers, tables = SMALL.layers * 218_103_808, 2 * 128256 * 4096
    assert time.parts["gathers"] == pytest.approx(2 * 7 / 8 * (4 * layers + 2 * tables) / 450e9)
    divided = priced(place("train", data=4, fsdp=2), on=replace_link(450e9), rows=64, minibatches=1)
    travels = 3 * 1 / 2 * 2 * (layers + tables) + 2 * 3 / 4 * 2 * (layers + tables) / 2
    assert divided.parts["gathers"] == pytest.approx(travels / 450e9)


def replace_link(rate: float) -> Cluster:
    return replace(IDEAL, hardware=replace(IDEAL.hardware, link=rate))


def test_tensor_collectives_of_scoring():
    # Two all-reduces a layer of the residual stream of a group's rows, and one for the embedding.
    time = priced(place("generate", data=2, tensor=4), "critic.values", replace_link(450e9), rows=64)
    stream = 32 * 2048 * 4096 * 2
    assert time.parts["tensor"] == pytest.approx(2 * SMALL.layers * 2 * 3 / 4 * stream / 450e9, rel=1e-6)


@pytest.mark.parametrize("parts", [2, 8])
def test_a_pipeline_waits_for_its_first_and_last_part(parts: int):
    time = priced(place("train_tp", data=4, pipeline=4, micro_batches=parts))
    working = sum(seconds for name, seconds in time.parts.items() if name not in ("bubble", "optimizer", "gathers"))
    assert time.parts["bubble"] == pytest.approx((4 - 1) / parts * working)


def test_epochs_and_minibatches():
    once = priced(place("train", fsdp=16), minibatches=8)
    twice = priced(place("train", fsdp=16), minibatches=8, epochs=2)
    assert twice.seconds == pytest.approx(2 * once.seconds)
    coarse = priced(place("train", fsdp=16), minibatches=4)
    assert coarse.parts["optimizer"] == pytest.approx(once.parts["optimizer"] / 2)
    assert coarse.parts["gathers"] == pytest.approx(once.parts["gathers"] / 2)
    assert coarse.parts["operations"] == pytest.approx(once.parts["operations"])


# ---- what holds of any sizes


def test_twice_the_devices_is_nearly_half_the_time():
    for call, layout in (("actor.update", "train"), ("reference.logprobs", "score")):
        half = priced(place(layout, data=2, fsdp=8), call).seconds
        whole = priced(place(layout, data=4, fsdp=8), call, Cluster(H100.hardware, 32)).seconds
        assert 0.5 * half < whole < 0.65 * half


def test_twice_the_rows_is_nearly_twice_the_time_but_in_decoding():
    for call, layout, low, high in (
        ("actor.update", "train", 1.7, 2.0),
        ("reference.logprobs", "score", 1.9, 2.0),
        ("actor.generate", "generate", 1.1, 1.9),
    ):
        one = priced(place(layout, data=16), call).seconds
        assert low * one < priced(place(layout, data=16), call, rows=1024).seconds <= high * one * 1.001


@pytest.mark.parametrize(("model", "numbers"), [(THIRTEEN, 12.7e9 / 7.5e9), (LARGE, 69.5e9 / 7.5e9)])
def test_larger_models_train_longer_by_their_size(model: ModelConfig, numbers: float):
    placed = place("train", data=2, fsdp=64)
    on = Cluster(H100.hardware, 128)
    ratio = priced(placed, on=on, model=model).parts["operations"] / priced(placed, on=on).parts["operations"]
    assert ratio == pytest.approx(numbers, rel=0.1)


def test_tensor_parallelism_between_nodes_is_slower_than_within():
    within = priced(place("train_tp", data=2, tensor=8))
    between = priced(place("train_tp", tensor=16))
    assert between.parts["tensor"] > 2 * within.parts["tensor"]
    assert between.seconds > within.seconds


def test_a_slice_across_a_node_boundary_is_between_nodes():
    aligned, across = place("train_tp", tensor=8), place("train_tp", start=4, tensor=8)
    assert group(aligned, 8, "tensor") == Group(8, 8)
    assert group(across, 8, "tensor") == Group(8, 4)
    assert priced(across, rows=64).seconds > priced(aligned, rows=64).seconds


def test_remats_trade_operations_for_bytes():
    time = {
        remat: priced(place("train", fsdp=16), remat=remat).parts
        for remat in ("offload", "full", "attention", "products")
    }
    assert time["full"]["operations"] > time["attention"]["operations"] > time["products"]["operations"]
    assert time["full"]["activations"] < time["attention"]["activations"] < time["products"]["activations"]
    assert time["offload"]["host"] > 0 and "host" not in time["full"]


def test_slots_let_rows_follow_each_other():
    settings = {"rows": 512, "response": 1024, "mean_response": 256.0}
    waiting = priced(place("generate", data=16), "actor.generate", **settings)
    refilled = priced(place("generate", data=16), "actor.generate", slots=128, **settings)
    assert refilled.parts["cache"] < waiting.parts["cache"]  # nothing is fed on that is done
    steps = (4 - 1) * 256 + 1024  # each of 128 slots has four rows; the longest may be the last
    assert refilled.parts["weights"] == pytest.approx(waiting.parts["weights"] * steps / 1024, rel=0.02)


def test_samples_of_a_prompt_share_its_prefill():
    placed = place("generate", data=16)
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
    whole, small = call_seconds(work, call, placed, H100), call_seconds(adapted, call, placed, H100)
    assert 0.70 < small.parts["operations"] / whole.parts["operations"] < 0.78  # three of four forwards
    assert small.parts["optimizer"] < 0.05 * whole.parts["optimizer"]
    # It is stored as generation needs it, whole on the devices of an fsdp axis, and each updates all of it.
    divided = call_seconds(adapted, call, place("generate", data=2, fsdp=8), H100)
    assert divided.parts["optimizer"] == small.parts["optimizer"]


def test_faster_hardware_is_faster():
    order = ["8xa100", "8xh100", "8xh200", "8xb200"]
    for call, layout in (("actor.update", "train"), ("actor.generate", "generate")):
        seconds = [priced(place(layout, data=8), call, cluster(name)).seconds for name in order]
        assert seconds == sorted(seconds, reverse=True)


# ---- moves


def test_rings():
    on = Cluster(replace(HARDWARE["h100"], collective=0.5, latency=1e-5, link=400e9, network=50e9), 16)
    assert gather_seconds(on, Group(1, 1), 1e9) == 0
    assert gather_seconds(on, Group(8, 8), 1e9) == pytest.approx(7 / 8 * 1e9 / 200e9 + 1e-5)
    assert gather_seconds(on, Group(16, 4), 1e9) == pytest.approx(15 / 16 * 1e9 / 100e9 + 1e-5)  # four ports
    assert gather_seconds(on, Group(2, 1), 1e9) == pytest.approx(1 / 2 * 1e9 / 25e9 + 1e-5)
    assert reduce_seconds(on, Group(8, 8), 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 200e9 + 1e-5)


def test_groups_of_mesh_axes():
    placed = place("train", data=2, fsdp=4, tensor=2)
    assert group(placed, 8, "tensor") == Group(2, 2)
    assert group(placed, 8, "fsdp") == Group(4, 4)
    assert group(placed, 8, "fsdp", "tensor") == Group(8, 8)
    assert group(placed, 8, "data") == Group(2, 1)


def test_reallocation():
    on = Cluster(replace(HARDWARE["h100"], collective=1.0, latency=0.0), 16)
    train, generate = place("train", fsdp=4, tensor=2), place("generate", data=4, tensor=2)
    size = 16e9
    assert reallocation_seconds(size, train, train, on) == 0
    # Dropping fsdp: each device has an eighth and needs a half.
    nested = place("generate", fsdp=4, tensor=2)
    assert reallocation_seconds(size, train, nested, on) == pytest.approx(3 / 8 * size / 450e9)
    assert reallocation_seconds(size, train, generate, on) == pytest.approx(3 / 8 * size / 450e9)
    # To other devices all of it travels, and between nodes through the network.
    elsewhere = place("generate", start=8, data=4, tensor=2)
    assert reallocation_seconds(size, train, elsewhere, on) == pytest.approx(size / 2 / 50e9)
    assert reallocation_seconds(size, train, place("score", start=8, fsdp=8), on) == pytest.approx(size / 8 / 50e9)


def test_transfers():
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
    assert price.seconds == call_seconds(work, update, placed, H100).seconds
    assert prices.call(score, place("generate", data=16)).resident == 0  # the actor lives where it is trained
    assert prices.call(update, placed) is price
    assert prices.capacity == HARDWARE["h100"].memory
    assert prices.reallocation("actor", placed, placed) == 0
    assert prices.reallocation("actor", placed, place("generate", data=16)) > 0
    assert prices.transfer(placed, place("score", start=8, fsdp=8)) < 0.01
