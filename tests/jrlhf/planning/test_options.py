"""What a call may choose from, and what a plan must be."""

from dataclasses import replace

import pytest

from jrlhf.errors import UserError
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models import LoRAConfig
from jrlhf.planning.candidates import call_candidates, candidates, placements, slices
from jrlhf.planning.plans import check_fits, refuse_partial_overlap
from jrlhf.planning.simulate import nested
from tests.jrlhf.planning.synthetic import PPO, problem

WORKLOAD, CLUSTER, PRICES = problem(16)


def test_slices_are_powers_of_two_in_a_node_and_ranges_of_nodes():
    options = slices(CLUSTER)
    assert len(options) == len(set(options)) == 2 * (8 + 4 + 2) + 3
    assert {option for option in options if option.count >= 8} == {Slice(0, 8), Slice(8, 8), Slice(0, 16)}
    assert all(option.start % option.count == 0 for option in options)
    assert set(slices(replace(CLUSTER, devices=4))) == {
        *(Slice(start, 1) for start in range(4)),
        *(Slice(start, 2) for start in (0, 2)),
        Slice(0, 4),
    }
    ranges = [option for option in slices(replace(CLUSTER, devices=32)) if option.count >= 8]
    assert len(ranges) == 4 + 3 + 2 + 1  # every range of four nodes


def test_slices_of_many_nodes_are_few_and_cover_every_split_in_two():
    options = slices(replace(CLUSTER, devices=1024))
    nodes = [option for option in options if option.count >= 8]
    assert len(nodes) < 1000 and Slice(0, 1024) in nodes
    for power in (1, 2, 4, 8, 16, 32, 64):
        assert {Slice(0, power * 8), Slice(1024 - power * 8, power * 8)} <= set(nodes)
    assert all(option.stop <= 1024 for option in options)


def test_shapes_divide_devices_models_and_rows():
    layouts = {"generate": {"generate"}, "infer": {"score", "train_tp"}, "train": {"train", "train_tp"}}
    # 512 rows in 8 minibatches are 64: on 16 devices up to 4 micro-batches.
    parts_of = {"generate": {1}, "infer": {1, 2, 4, 8, 16, 32}, "train": {1, 2, 4}}
    for call in WORKLOAD.calls:
        options = list(placements(WORKLOAD, call, 16, 8))
        assert len(options) == len(set(options)) > 5, call.name
        for option in options:
            assert option.devices == Slice(0, 16) and option.pipeline == 1 and option.tensor <= 8
            assert 512 % (16 * option.micro_batches * (8 if call.kind == "train" else 1)) == 0
        assert {option.layout for option in options} == layouts[call.kind]
        assert {option.micro_batches for option in options} == parts_of[call.kind]


def test_pipelines_are_hypothetical():
    call = PPO["actor.update"]
    options = list(placements(WORKLOAD, call, 16, 8, hypothetical=True))
    # ReaL: at most 8, and twice as many rows a minibatch.
    assert {option.pipeline for option in options} == {1, 2, 4, 8}
    assert [option for option in options if option.pipeline == 1] == list(placements(WORKLOAD, call, 16, 8))


def test_samples_of_a_prompt_stay_with_their_group():
    grouped = replace(WORKLOAD, samples=64)
    groups = {placement.data * placement.fsdp for placement in placements(grouped, PPO["actor.generate"], 16, 16)}
    assert groups == {2, 4, 8}  # of 16 devices, 512 / 64 prompts; tensor is at most 8
    slotted = replace(grouped, slots=256)
    groups = {placement.data * placement.fsdp for placement in placements(slotted, PPO["actor.generate"], 16, 16)}
    assert groups == {2, 4}  # each has slots for a prompt's samples
    assert not list(placements(replace(WORKLOAD, slots=24), PPO["actor.generate"], 16, 16))


def test_slots_divide_over_the_devices_that_generate():
    slotted, call = replace(WORKLOAD, slots=8, samples=4), PPO["actor.generate"]
    assert not list(placements(slotted, call, 16, 8))
    assert {placement.tensor for placement in placements(slotted, call, 8, 8)} == {
        4,
        8,
    }  # two groups have 8 of a prompt's samples


def test_options_fit_and_begin_with_the_fastest():
    options = call_candidates(WORKLOAD, PPO["actor.update"], CLUSTER, PRICES)
    seconds = [option.price.seconds for option in options]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    assert all(option.price.resident + option.price.active <= PRICES.capacity for option in options)
    everything = [
        PRICES.call(PPO["actor.update"], placement)
        for count in (1, 2, 4, 8, 16)
        for placement in placements(WORKLOAD, PPO["actor.update"], count, 8)
    ]
    assert seconds[0] == min(price.seconds for price in everything if price.resident + price.active <= PRICES.capacity)
    # 16 bytes a weight and gathered tables are more than two devices have.
    assert {option.placement.devices for option in options} == {
        devices for devices in slices(CLUSTER) if devices.count > 2
    }


def test_a_shared_base_is_everywhere_in_one_mesh():
    lora = LoRAConfig(rank=8, alpha=16.0)
    adapted = {role: (replace(models[0], lora=lora),) for role, models in WORKLOAD.models.items() if role != "reward"}
    choices = candidates(replace(WORKLOAD, models={**WORKLOAD.models, **adapted}), CLUSTER, PRICES)
    shared = [option.placement for name, options in choices.items() if name != "reward.score" for option in options]
    assert {placement.layout for placement in shared} == {"generate"}
    assert {placement.devices for placement in shared} == {Slice(0, 16)}
    assert len({placement.sizes for placement in shared}) == 1
    assert len({option.placement.devices for option in choices["reward.score"]}) > 1


def test_rows_that_no_placement_divides_are_one_sentence():
    for call, changes, sentence in (
        ("actor.update", {"rows": 509}, "8 minibatches: choose rows of 384 or 512"),
        ("actor.update", {"rows": 4}, "8 minibatches: choose rows of 128"),
        ("actor.generate", {"rows": 24, "samples": 16}, "16 samples of a prompt: choose rows of 16 or 32"),
    ):
        with pytest.raises(UserError, match=f"^{changes['rows']} rows of {call} do not divide into {sentence}"):
            call_candidates(replace(WORKLOAD, **changes), PPO[call], CLUSTER, PRICES)


def test_a_model_that_fits_nowhere_is_one_sentence_with_enough_devices():
    workload, cluster, prices = problem(8, "70b", "70b")
    with pytest.raises(
        UserError, match="fits nowhere on 8 devices of 79 GiB: it needs .* GiB of each, take 32 devices"
    ):
        call_candidates(workload, PPO["actor.update"], cluster, prices)
    workload, cluster, prices = problem(32, "70b", "70b")
    assert call_candidates(workload, PPO["actor.update"], cluster, prices)


def planned(**changes: Placement) -> Plan:
    whole = Slice(0, 16)
    usual = {
        "generate": Placement(whole, "generate", data=2, tensor=8),
        "infer": Placement(whole, "score", fsdp=16),
        "train": Placement(whole, "train", fsdp=16),
    }
    plan = {call.name: usual[call.kind] for call in PPO if call.kind != "compute"}
    return Plan("mine", plan | {name.replace("_", ".", 1): placement for name, placement in changes.items()})


def test_what_overlaps_in_part_or_does_not_fit_is_one_sentence():
    refuse_partial_overlap(planned())
    refuse_partial_overlap(planned(reward_score=Placement(Slice(8, 4), "score", tensor=4)))
    check_fits(WORKLOAD, planned(), PRICES)
    first, second = Placement(Slice(0, 8), "score", fsdp=8), Placement(Slice(4, 8), "score", fsdp=8)
    message = "^devices 0-7 of reward.score and 4-11 of critic.values overlap in part: .* such as 0-11 and 4-11$"
    with pytest.raises(UserError, match=message):
        refuse_partial_overlap(planned(reward_score=first, critic_values=second))
    two = Placement(Slice(0, 2), "train", fsdp=2)
    message = (
        "^plan mine needs .* GiB on each of devices 0-1, which have 79.1, .* for what stays and the rest for .*: give"
    )
    with pytest.raises(UserError, match=message):
        check_fits(WORKLOAD, planned(actor_update=two, critic_update=two), PRICES)


def test_nested_slices():
    assert nested([Slice(0, 8), Slice(4, 4), Slice(4, 1), Slice(8, 2)])
    assert not nested([Slice(0, 8), Slice(4, 8)])
    assert not nested([Slice(4, 8), Slice(0, 5)])


def test_a_cluster_of_a_part_of_a_node_has_one_node():
    assert {option.count for option in slices(Cluster(CLUSTER.hardware, 6))} == {1, 2, 4, 6}
    assert PRICES.capacity == CLUSTER.hardware.memory
