"""The placements that a call may choose from, the plan that a config names, and the plans that are refused."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from jrlhf.algorithms.registry import graph_of, stage_graph
from jrlhf.config.check import validate
from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models import LoRAConfig
from jrlhf.planning.auto import check_fits
from jrlhf.planning.candidates import NoPlan, call_candidates, candidates, placements
from jrlhf.planning.candidates import slices as slices_of
from jrlhf.planning.plans import (
    colocated,
    plan_of_config,
    read_plan,
    refuse_cross_process,
    refuse_partial_overlap,
    transfer_line,
    validate_plan,
)
from jrlhf.planning.simulate import nested, simulate
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import workload_of
from jrlhf.stages.setup import architectures
from tests.jrlhf.planning.synthetic import LAYOUTS, PPO, problem

MODEL = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 64}
FUNCTION = [{"name": "words", "function": "word_count"}]


def config_of(stage: str = "ppo", **sections) -> Config:
    learnt = ["sft", "reward_model", stage] if "rewards" not in sections else ["sft", stage]
    return build(Config, {"stages": learnt, "mesh": {"fsdp": 4, "tensor": 2}, "model": MODEL, **sections})


def chosen(config: Config, devices: int = 8, **options) -> Plan:
    return plan_of_config(config, workload_of(config, graph_of(config), architectures(config)), devices, **options)


def test_colocate_is_everything_on_all_devices_in_the_configs_mesh():
    plan = chosen(config_of(ppo={"algorithm": {"micro_batches": 4, "minibatches": 2}}))
    calls = "actor.generate reward.score actor.logprobs reference.logprobs critic.values critic.update actor.update"
    assert set(plan.placements) == set(calls.split())
    for name, placed in plan.placements.items():
        assert (placed.devices, placed.sizes) == (Slice(0, 8), (1, 4, 2))
        trains = name.endswith(".update")
        assert placed.layout == ("train" if trains else "generate" if name == "actor.generate" else "score")
        assert placed.micro_batches == (4 if trains else 1)


def test_split_has_a_half_for_the_actor_and_one_for_the_critic():
    plan = chosen(config_of(plan="split"))
    for name, placed in plan.placements.items():
        assert str(placed.devices) == ("0-3" if name.startswith(("actor", "reference")) else "4-7")
        assert placed.sizes == (1, 2, 2)
    wide = config_of(plan="split", mesh={"data": 2, "fsdp": 2, "tensor": 2})
    assert {placed.sizes for placed in chosen(wide).placements.values()} == {(1, 2, 2)}  # replicas go first


def test_standalone_gives_devices_to_roles_in_proportion_to_their_work():
    plan = chosen(config_of(plan="standalone"))
    slices = {name.partition(".")[0]: placed.devices for name, placed in plan.placements.items()}
    # actor: 3 + 1 + 4 passes; critic: 1 + 4; reference and reward: 1 each.
    counts = {role: devices.count for role, devices in slices.items()}
    assert counts == {"actor": 4, "critic": 2, "reward": 1, "reference": 1}
    used = [device for devices in slices.values() for device in range(devices.start, devices.stop)]
    assert sorted(used) == list(range(8))
    assert all(devices.start % devices.count == 0 for devices in slices.values())
    assert len({str(placed.devices) for name, placed in plan.placements.items() if name.startswith("actor")}) == 1


def test_standalone_counts_an_unembedding_for_policies_only():
    """Beside a vocabulary of this size everything else is small: 3 + 1 + 4 passes of the actor, 1 of the reference."""
    plan = chosen(config_of(plan="standalone", model=MODEL | {"vocab_size": 2_000_000}))
    counts = {name.partition(".")[0]: placed.devices.count for name, placed in plan.placements.items()}
    assert counts == {"actor": 4, "reference": 2, "critic": 1, "reward": 1}


def test_shared_passes_keep_actor_and_critic_together():
    for name in ("split", "standalone"):
        plan = chosen(config_of(plan=name, compute={"shared_passes": True}))
        assert plan["learner.update"].devices == plan["actor.generate"].devices


def test_functions_have_no_place():
    config = config_of("safe_rlhf", plan="split", rewards=FUNCTION, costs=FUNCTION)
    plan = chosen(config)
    assert not {"reward.score", "cost.score"} & set(plan.placements)
    assert str(plan["cost_critic.update"].devices) == "4-7"


def test_a_file_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = config_of(plan="~/plan.yaml")
    plan = chosen(config_of(plan="split"))
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    assert read_plan(tmp_path / "plan.yaml") == plan == chosen(config)


def test_auto_is_what_a_search_finds():
    config, plan = config_of(plan="auto"), chosen(config_of(plan="standalone"))
    assert chosen(config, search=lambda *_: plan) is plan
    with pytest.raises(UserError, match="numbered from 0"):
        chosen(config, search=lambda *_: moved(plan, "actor.update", Placement(Slice(8, 1), "train")))


def moved(plan: Plan, name: str, placement: Placement) -> Plan:
    return Plan(plan.name, {**plan.placements, name: placement})


FOUR: dict[str, Any] = {"layout": "train", "devices": "0-3", "fsdp": 4}
BUDGET: dict[str, Any] = {"ppo": {"algorithm": {"micro_batch_tokens": 64}}}
SAMPLES: dict[str, Any] = {"stage": "grpo", "grpo": {"rollout_batch": 32, "algorithm": {"samples": 8}}}
SCORED: dict[str, Any] = {**FOUR, "layout": "score", "fsdp": 2, "pipeline": 2, "micro_batches": 2}
FUSED: dict[str, Any] = {**FOUR, "fsdp": 2, "pipeline": 2, "micro_batches": 2, "schedule": "fused"}
DEEP: dict[str, Any] = {"model": MODEL | {"layers": 4}}
# Changed calls of the colocated plan, None for one that is left out; the sentence; and sections of the config.
REFUSED: tuple[tuple[dict[str, Any], str, dict[str, Any]], ...] = (
    ({"actor.update": {"devices": "4-11", "fsdp": 8}}, "actor.update on devices 4-11, and there are 8", {}),
    (
        {"actor.generate": {**FOUR, "layout": "generate", "fsdp": 2, "pipeline": 2}},
        "only calls that score, or update one model, run in stages",
        {},
    ),
    ({"actor.logprobs": {**SCORED, "micro_batches": 1}}, "micro_batches=1: scoring needs at least 2 of them", {}),
    ({"actor.logprobs": {**SCORED, "schedule": "gpipe"}}, "schedule=gpipe, which only updates have: leave the", {}),
    ({"actor.logprobs": {**SCORED, "layout": "generate"}}, "needs score or train_tp: choose that", {}),
    (
        {"actor.logprobs": SCORED},
        "compute.score_rows=32 scores rows in tiles without stages: leave one out",
        {"compute": {"score_rows": 32}, "rollout": {"chunk": 8}},
    ),
    (
        {"actor.logprobs": SCORED},
        "compute.score_tokens=64 divides them, too: leave one out",
        {"compute": {"score_tokens": 64}},
    ),
    ({"actor.update": {**FOUR, "fsdp": 2, "pipeline": 2}}, "micro_batches=1: .*1f1b needs at least 2 of them", {}),
    (
        {"actor.update": {"devices": "0-7", "layout": "generate", "fsdp": 4, "pipeline": 2, "micro_batches": 2}},
        "one base .* with tensor=1: .* one data and one fsdp x pipeline",
        {"lora": {"rank": 2}, "mesh": {"data": 2, "fsdp": 4}},
    ),
    (
        {"actor.update": {**FOUR, "fsdp": 1, "pipeline": 4, "micro_batches": 4}},
        "pipeline=4 stages of schedule=1f1b, which need 4 layers, and its model has 2: choose at most 2 stages",
        {},
    ),
    (
        {"actor.update": {**FOUR, "fsdp": 2, "pipeline": 2, "micro_batches": 2, "schedule": "interleaved"}},
        "schedule=interleaved, which need 4 layers, and its model has 2: choose another schedule, or no stages",
        {},
    ),
    ({"actor.update": FUSED}, "schedule=fused for actor.update, and it trains .* together: give it to both", {}),
    (
        {"actor.update": FUSED, "critic.update": {**FUSED, "devices": "4-7"}},
        "fuses actor.update on devices 0-3 and critic.update on 4-7: put both on the same ones",
        {},
    ),
    (
        {"actor.update": {**FUSED, "fsdp": 1, "pipeline": 4, "micro_batches": 4}, "critic.update": FUSED},
        "pipelines of 4 and 2 stages, for which critic.update needs 2 pipelines, and has data=1: make it a multiple",
        DEEP,
    ),
    (
        {"actor.update": FUSED, "critic.update": FUSED},
        "sleep.optimizer=host keeps only one of them on the devices: leave it out",
        {"sleep": {"optimizer": "host"}},
    ),
    ({"actor.update": {**FOUR, "layout": "score"}}, "a call to train needs train or train_tp", {}),
    (
        {"actor.update": {"devices": "0-7", "tensor": 8}},
        "actor.update with tensor=8, which does not divide its model's heads=4: choose tensor from 1, 2, 4",
        {},
    ),
    (
        {"actor.update": {"devices": "0-5", "fsdp": 2, "data": 3}},
        "ppo.rollout_batch=128 does not divide over 6 .*: choose a multiple of 6",
        {},
    ),
    ({"actor.update": {**FOUR, "micro_batches": 2}}, "micro_batch_tokens=64 divides them, too: leave one out", BUDGET),
    ({"critic.values": None}, "has no place for critic.values: add it", {}),
    (
        {"estimator.experience": {"devices": "0", "layout": "score"}},
        "a place for estimator.experience, which ppo does not call with a model",
        {},
    ),
    (
        {"actor.update": FOUR, "critic.update": {**FOUR, "devices": "2-5"}},
        "overlap in part: .* such as 0-5 and ",
        {"rewards": FUNCTION},
    ),
    (
        {"actor.generate": {"micro_batches": 2, "devices": "0-7", "fsdp": 4, "tensor": 2, "layout": "generate"}},
        "set rollout.slots",
        SAMPLES,
    ),
    (
        {"actor.generate": {"devices": "0-7", "fsdp": 8, "layout": "generate"}},
        "grpo.rollout_batch=32 does not divide over 8 samples of a prompt on 8 group",
        SAMPLES,
    ),
)


def test_a_plan_that_cannot_be_run_is_one_sentence(tmp_path):
    path = tmp_path / "plan.yaml"
    for changes, message, sections in REFUSED:
        mapping = chosen(config_of(**sections)).as_dict()
        for call, changed in changes.items():
            mapping["calls"][call] = {"layout": "train", **(changed or {})}
            if changed is None:
                del mapping["calls"][call]
        path.write_text(yaml.safe_dump(mapping))
        with pytest.raises(UserError, match=message) as error:
            chosen(config_of(plan=str(path), **sections))
        assert str(error.value).startswith(
            (f"plan={path} has ", f"plan={path} fuses ", "devices ")
        ) and "\n" not in str(error.value)


STAGE_REFUSED: tuple[tuple[str, dict[str, Any], str, dict[str, Any]], ...] = (
    ("sft", {"stages": 4}, "sft.update in pipeline=4 stages of .*, which need 4 layers, .* at most 2 stages", {}),
    ("reward_model", {"stages": 4, "parts": 2}, "micro_batches=2: schedule=1f1b needs at least 4 of them", DEEP),
    (
        "dpo",
        {"stages": 2, "schedule": "interleaved", "parts": 3},
        "actor.update in .* micro_batches=3: schedule=interleaved needs a multiple of 2 of them",
        DEEP,
    ),
    ("dpo", {"stages": 2}, "compute.score_tokens=64 divides them, too: leave one", {"compute": {"score_tokens": 64}}),
)


def of_stage(stage: str, parts: int = 4, model: Any = MODEL, compute: Any = None, **pipeline: Any) -> Plan:
    """The plan of a stage that learns from fixed rows, in a pipeline."""
    own: dict[str, Any] = {"algorithm": {"micro_batches": parts}} if stage == "dpo" else {"micro_batches": parts}
    mapping = {"stages": ["sft", stage] if stage != "sft" else ["sft"], "model": model, "compute": compute or {}}
    mapping |= {"mesh": {"fsdp": 4, "tensor": 2}, stage: {"batch": 96, "pipeline": pipeline, **own}}
    config: Config = build(Config, mapping)
    validate(config, 8, architectures(config))
    return colocated(config, workload_of(config, stage_graph(config, stage), architectures(config)), 8)


def test_stages_of_fixed_rows_run_in_a_pipeline_that_stores_weights_as_without_it():
    for stage in ("sft", "reward_model", "dpo"):
        for name, placed in of_stage(stage, stages=2, schedule="zb-h1").placements.items():
            assert placed.devices == Slice(0, 8) and placed.stored == (1, 4, 2)
            schedule = "zb-h1" if name.endswith(".update") else "1f1b"
            parts = (1, 1, "1f1b") if name == "policy" else (2, 4, schedule)
            assert (placed.pipeline, placed.micro_batches, placed.schedule) == parts, name


def test_a_pipeline_of_fixed_rows_that_cannot_be_run_is_one_sentence():
    for stage, pipeline, message, sections in STAGE_REFUSED:
        with pytest.raises(UserError, match=f"{stage}.pipeline has .*{message}") as error:
            of_stage(stage, **pipeline, **sections)
        assert "\n" not in str(error.value)


def test_the_last_rows_can_move_only_to_some_of_the_groups():
    for groups in (1, "auto"):
        chosen(config_of(rollout={"last_groups": groups}))
    with pytest.raises(UserError, match="is one group of devices: rollout.last_groups=auto has no effect, leave it"):
        chosen(config_of(mesh={"fsdp": 1, "tensor": 1}, rollout={"last_groups": "auto"}), devices=1)
    for groups in (3, 8):
        with pytest.raises(UserError, match=f"rollout.last_groups={groups} of them: take 1 or 2, "):
            chosen(config_of(rollout={"last_groups": groups}))


def test_updates_are_fused_only_if_no_call_between_them_needs_the_first_and_none_trains_again():
    config = config_of()
    plan, workload = chosen(config), workload_of(config, graph_of(config), architectures(config))
    alone = plan["critic.update"]
    fused = Placement(Slice(0, 8), "train", fsdp=4, pipeline=2, micro_batches=2, schedule="fused")
    plan = Plan("by hand", {**plan.placements, "actor.update": fused, "critic.update": fused})
    validate_plan(plan, config, workload, 8)
    critic, values = workload.graph["critic.update"], workload.graph["critic.values"]
    again, reader = (
        replace(values, name="critic.values_2", outputs=("a", "b"), inputs=x) for x in ((), critic.outputs)
    )
    second, end = replace(critic, name="critic.update_2", outputs=("c",)), len(workload.graph.calls)
    cases = (again, -1, "needs the first of"), (reader, -1, "needs the first of"), (second, end, "trains one of")
    for call, place, reason in cases:
        calls = [*workload.graph.calls[:place], call, *workload.graph.calls[place:]]
        changed = replace(workload, graph=replace(workload.graph, calls=tuple(calls)))
        own = alone if call is second else plan["critic.values"]
        placed = Plan("by hand", {**plan.placements, call.name: own})
        with pytest.raises(UserError, match=f"fuses .* and .*, and {call.name} {reason} them"):
            validate_plan(placed, config, changed, 8)
    # After both, metrics of the first one are there.
    changed = replace(workload, graph=replace(workload.graph, calls=(*workload.graph.calls, reader)))
    validate_plan(Plan("by hand", {**plan.placements, reader.name: plan["critic.values"]}), config, changed, 8)


def test_a_file_that_is_no_plan_is_one_sentence(tmp_path):
    for text, message in (
        ("calls: [", "plan=.*plan.yaml, line 1, column 9: not valid YAML"),
        ("name: x", "must hold `name` and `calls`"),
        ("calls: {actor.update: {devices: 0-3, layout: train, fsdp: 2}}", "choose sizes whose product is 4"),
    ):
        (tmp_path / "plan.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            chosen(config_of(plan=str(tmp_path / "plan.yaml")))


def test_plans_that_cannot_be_made_say_what_to_do():
    roles = "actor, reward, reference, critic"
    lora: dict[str, Any] = {"lora": {"rank": 2}}
    alone = "has .* what lora adapts is one base on all 8"
    assert {placed.layout for placed in chosen(config_of(**lora)).placements.values()} == {"generate"}
    assert str(chosen(config_of(plan="disaggregated", **lora))["actor.generate"].devices) == "4-7"
    for config, devices, message in (
        (config_of(plan="splt"), 8, "plan=splt is neither colocate, split, standalone, disaggregated, auto nor a file"),
        (config_of(plan="split", mesh={}), 1, "plan=split halves 1 device.*set plan=colocate"),
        (config_of("grpo", plan="split", rewards=FUNCTION), 8, "nothing to run on the second half"),
        (config_of(plan="standalone", mesh={}), 2, f"a device for each of {roles}, and there are 2"),
        (config_of(plan="auto"), 8, "plan=auto has no search"),
        (config_of(plan="split", **lora), 8, f"plan=split {alone}"),
        (config_of(plan="standalone", **lora), 8, f"plan=standalone {alone}"),
    ):
        with pytest.raises(UserError, match=message):
            chosen(config, devices)


# ---- candidates

PRICES = problem(16)
WORKLOAD, CLUSTER = PRICES.workload, PRICES.cluster


def test_slices_are_powers_of_two_in_a_node_and_ranges_of_nodes():
    options = slices_of(CLUSTER)
    assert len(options) == len(set(options)) == 2 * (8 + 4 + 2) + 3
    assert {option for option in options if option.count >= 8} == {Slice(0, 8), Slice(8, 8), Slice(0, 16)}
    assert all(option.start % option.count == 0 for option in options)
    four = slices_of(replace(CLUSTER, devices=4))
    assert set(map(str, four)) == {"0", "1", "2", "3", "0-1", "2-3", "0-3"}
    ranges = [option for option in slices_of(replace(CLUSTER, devices=32)) if option.count >= 8]
    assert len(ranges) == 4 + 3 + 2 + 1  # every range of four nodes
    assert {option.count for option in slices_of(Cluster(CLUSTER.hardware, 6))} == {1, 2, 4, 6}  # a part of a node
    # Of many nodes they are few, and cover every division in two.
    options = slices_of(replace(CLUSTER, devices=1024))
    nodes = [option for option in options if option.count >= 8]
    assert len(nodes) < 1000 and Slice(0, 1024) in nodes and all(option.stop <= 1024 for option in options)
    for power in (1, 2, 4, 8, 16, 32, 64):
        assert {Slice(0, power * 8), Slice(1024 - power * 8, power * 8)} <= set(nodes)


def test_shapes_divide_devices_models_and_rows():
    # 512 rows in 8 minibatches are 64: on 16 devices up to 4 micro-batches.
    parts_of = {"generate": {1}, "infer": {1, 2, 4, 8, 16, 32}, "train": {1, 2, 4}}
    for call in WORKLOAD.calls:
        options = list(placements(WORKLOAD, call, 16, 8))
        assert len(options) == len(set(options)) > 5, call.name
        for option in options:
            assert option.devices == Slice(0, 16) and option.pipeline == 1 and option.tensor <= 8
            assert 512 % (16 * option.micro_batches * (8 if call.kind == "train" else 1)) == 0
        assert {option.layout for option in options} == set(LAYOUTS[call.kind])
        assert {option.micro_batches for option in options} == parts_of[call.kind]

    call = PPO["actor.update"]
    options = list(placements(WORKLOAD, call, 16, 8, hypothetical=True))
    assert {option.pipeline for option in options} == {1, 2, 4, 8}  # as ReaL: at most 8, two rows of a minibatch each
    assert [option for option in options if option.pipeline == 1] == list(placements(WORKLOAD, call, 16, 8))


def test_samples_of_a_prompt_stay_with_their_group_and_slots_divide():
    for changes, count, node, groups in (
        ({"samples": 64}, 16, 16, {1, 2, 4, 8}),  # of 16 devices, 512 / 64 prompts; tensor is at most the node
        ({"samples": 64}, 16, 8, {2, 4, 8}),
        ({"samples": 64, "slots": 256}, 16, 16, {1, 2, 4}),  # each has slots for a prompt's samples
        ({"slots": 24}, 16, 16, set()),
        ({"samples": 4, "slots": 8}, 16, 8, set()),
        ({"samples": 4, "slots": 8}, 8, 8, {1, 2}),  # two groups have 8 of a prompt's samples
    ):
        options = placements(replace(WORKLOAD, **changes), PPO["actor.generate"], count, node)
        assert {option.data * option.fsdp for option in options} == groups, changes


def test_options_fit_and_begin_with_the_fastest():
    options = call_candidates(PRICES, PPO["actor.update"])
    seconds = [option.seconds for option in options]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    assert all(option.resident + option.active <= PRICES.capacity for option in options)
    everything = [
        PRICES.call(PPO["actor.update"], placement)
        for count in (1, 2, 4, 8, 16)
        for placement in placements(WORKLOAD, PPO["actor.update"], count, 8)
    ]
    assert seconds[0] == min(price.seconds for price in everything if price.resident + price.active <= PRICES.capacity)
    # 16 bytes a weight and gathered tables are more than two devices have.
    assert {option.placement.devices for option in options} == {
        devices for devices in slices_of(CLUSTER) if devices.count > 2
    }


def test_a_shared_base_is_everywhere_in_one_mesh():
    lora = LoRAConfig(rank=8, alpha=16.0)
    adapted = {role: (replace(models[0], lora=lora),) for role, models in WORKLOAD.models.items() if role != "reward"}
    workload = replace(WORKLOAD, models={**WORKLOAD.models, **adapted})
    for hypothetical in (False, True):
        choices = candidates(replace(PRICES, workload=workload), hypothetical=hypothetical)
        shared = [option.placement for name, options in choices.items() if name != "reward.score" for option in options]
        assert {placement.layout for placement in shared} == {"generate"}
        assert {placement.devices for placement in shared} == {Slice(0, 16)}
        assert len({placement.stored for placement in shared}) == 1
        assert len({option.placement.devices for option in choices["reward.score"]}) > 1
        assert ({placement.pipeline for placement in shared} > {1}) == hypothetical


def test_rows_that_no_placement_divides_are_one_sentence():
    for call, changes, sentence in (
        ("actor.update", {"rows": 509}, r"1 device\(s\) x 8 minibatches x 1 micro-batches: choose rows of 384 or 512"),
        ("actor.update", {"rows": 4}, r"1 device\(s\) x 8 minibatches x 1 micro-batches: choose rows of 128"),
        # A multiple of 16 would do for this call alone; the updates have eight minibatches on 16 devices.
        ("actor.generate", {"rows": 24, "samples": 16}, "16 samples of a prompt .*: choose rows of 128"),
        # One group of devices could draw these, but has no fewer groups to which its last rows move.
        ("actor.generate", {"rows": 6, "samples": 2, "last_groups": 2}, r"16 device\(s\): choose rows of 128"),
    ):
        message = f"^{call} runs nowhere, for rows={changes['rows']} does not divide over {sentence}$"
        with pytest.raises(UserError, match=message):
            call_candidates(CostModel(replace(WORKLOAD, **changes), CLUSTER), PPO[call])


def test_a_model_that_fits_nowhere_is_told():
    prices = problem(8, "70b", "70b")
    sentence = r"79\.\d+ GiB: it needs .* GiB of each device, [\d.]+ GiB of it for weights$"
    with pytest.raises(NoPlan, match=rf"fits nowhere on 8 device\(s\) of {sentence}"):
        call_candidates(prices, PPO["actor.update"])
    prices = problem(32, "70b", "70b")
    assert call_candidates(prices, PPO["actor.update"])


def test_tensor_spans_the_fast_links_of_the_hardware():
    """The eight GPUs of a node, or a whole slice of TPUs: 70B models generate on a v5e-256 in 16 slices."""
    for hardware, devices, widest in (("h100", 16, 8), ("v5e", 16, 16)):
        prices = problem(devices, "7b", "7b", hardware=hardware)
        calls = placements(prices.workload, PPO["actor.generate"], devices, prices.cluster.node)
        assert max(placed.tensor for placed in calls) == widest
    prices = problem(256, "70b", "70b", rows=256, minibatches=1, hardware="v5e")
    fitting = call_candidates(prices, PPO["actor.generate"])
    assert fitting and min(price.placement.tensor for price in fitting) >= 16


def test_rows_are_no_remedy_where_the_weights_do_not_fit():
    for devices, by_weights in ((1, True), (2, False)):
        with pytest.raises(NoPlan) as caught:
            call_candidates(problem(devices, "70b", "70b", rows=4096, minibatches=1), PPO["actor.generate"])
        assert caught.value.by_weights is by_weights


def test_what_overlaps_in_part_or_does_not_fit_is_one_sentence():
    whole = Slice(0, 16)
    usual = {
        "generate": Placement(whole, "generate", data=2, tensor=8),
        "infer": Placement(whole, "score", fsdp=16),
        "train": Placement(whole, "train", fsdp=16),
    }
    plan = Plan("mine", {call.name: usual[call.kind] for call in PPO if call.kind != "compute"})
    refuse_partial_overlap(moved(plan, "reward.score", Placement(Slice(8, 4), "score", tensor=4)))
    check_fits(config_of(), PRICES, simulate(PPO, plan, PRICES))
    first = moved(plan, "reward.score", Placement(Slice(0, 8), "score", fsdp=8))
    message = "^devices 0-7 of reward.score and 4-11 of critic.values overlap in part: .* such as 0-11 and 4-11$"
    with pytest.raises(UserError, match=message):
        refuse_partial_overlap(moved(first, "critic.values", Placement(Slice(4, 8), "score", fsdp=8)))
    assert nested([Slice(0, 8), Slice(4, 4), Slice(4, 1), Slice(8, 2)])
    assert not nested([Slice(0, 8), Slice(4, 8)]) and not nested([Slice(4, 8), Slice(0, 5)])
    two = Placement(Slice(0, 2), "train", fsdp=2)
    message = "^plan mine needs .* GiB on each of devices 0-1, which have 79.11 GiB, .* what stays and the rest for "
    narrow = moved(moved(plan, "actor.update", two), "critic.update", two)
    with pytest.raises(UserError, match=message):
        check_fits(config_of(), PRICES, simulate(PPO, narrow, PRICES))


def test_plans_that_processes_cannot_run_are_refused():
    def plan(**calls: tuple[int, int]) -> Plan:
        placed = {name: Placement(Slice(*place), "train", fsdp=place[1]) for name, place in calls.items()}
        return Plan("split", placed)

    one, two = [0] * 8, [number // 4 for number in range(8)]
    for apart in (plan(generate=(0, 4), update=(4, 4)), plan(generate=(0, 8), update=(0, 6))):
        refuse_cross_process(apart, one)
        refuse_cross_process(apart, two)
    for first, tensor, processes in ((2, 4, two), (2, 4, one), (2, 4, range(8)), (4, 4, two), (2, 2, two)):
        cut = Plan("cut", {"score": Placement(Slice(first, 4), "score", fsdp=4 // tensor, tensor=tensor)})
        if (first, tensor) == (2, 4) and processes is two:
            with pytest.raises(UserError, match=r"devices 2-5 with tensor=4, .* 2-5 of a tensor group belong to two"):
                refuse_cross_process(cut, processes)
        else:  # the groups are of one process each, or every process has a single device
            refuse_cross_process(cut, processes)


def test_a_run_says_how_arrays_move_between_slices():
    def line(*processes: int, **calls: Placement) -> str | None:
        return transfer_line(Plan("mine", calls), processes)

    whole, staged = (Placement(Slice(0, 4), "train", fsdp=4 // stages, pipeline=stages) for stages in (1, 2))
    first, second = (Placement(Slice(start, 2), "train", fsdp=2) for start in (0, 2))
    device, collective = "copies from device to device within a process", "collective copies between processes"
    assert line(0, 0, 1, 1, generate=whole, update=whole) is None
    start = "plan mine: arrays move between slices by "
    assert line(0, 0, 0, 0, generate=first, update=second) == start + device
    assert line(0, 0, 1, 1, generate=first, update=second) == start + collective
    assert line(0, 0, 1, 1, update=staged) == start + collective
    three = {"generate": Placement(Slice(0, 1), "train"), "score": Placement(Slice(1, 1), "train"), "update": second}
    assert line(0, 0, 1, 1, **three) == f"{start}{device} and {collective}"
