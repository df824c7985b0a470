"""Which plan a config asks for, and which plans are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from jrlhf.algorithms.registry import graph_of
from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.plans import plan_of_config, plan_yaml, read_plan
from jrlhf.planning.workload import workload_of
from jrlhf.stages.setup import architectures

MODEL = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 64}
FUNCTION = [{"name": "words", "function": "word_count"}]


def config_of(stage: str = "ppo", **sections) -> Config:
    learnt = ["sft", "reward_model", stage] if "rewards" not in sections else ["sft", stage]
    return build(Config, {"stages": learnt, "mesh": {"fsdp": 4, "tensor": 2}, "model": MODEL, **sections})


def chosen(config: Config, devices: int = 8, **options) -> Plan:
    return plan_of_config(config, workload_of(config, graph_of(config), architectures(config)), devices, **options)


def slices(plan: Plan) -> dict[str, str]:
    return {name: str(placed.devices) for name, placed in plan.placements.items()}


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
    by_role = {name.partition(".")[0]: placed for name, placed in plan.placements.items()}
    # actor: 3 + 1 + 4 passes; critic: 1 + 4; reference and reward: 1 each.
    assert {role: placed.devices.count for role, placed in by_role.items()} == {
        "actor": 4,
        "critic": 2,
        "reward": 1,
        "reference": 1,
    }
    used = [device for placed in by_role.values() for device in range(placed.devices.start, placed.devices.stop)]
    assert sorted(used) == list(range(8))
    assert all(placed.devices.start % placed.devices.count == 0 for placed in by_role.values())
    assert len({str(placed.devices) for name, placed in plan.placements.items() if name.startswith("actor")}) == 1


def test_shared_passes_keep_actor_and_critic_together():
    for name in ("split", "standalone"):
        plan = chosen(config_of(plan=name, compute={"shared_passes": True}))
        assert plan["learner.update"].devices == plan["actor.generate"].devices


def test_functions_have_no_place():
    config = config_of("safe_rlhf", plan="split", rewards=FUNCTION, costs=FUNCTION)
    plan = chosen(config)
    assert not {"reward.score", "cost.score"} & set(plan.placements)
    assert str(plan["cost_critic.update"].devices) == "4-7"
    calls = workload_of(config, graph_of(config), architectures(config)).calls
    assert [call.name for call in calls] == list(plan.placements)


def test_a_file_is_read_back(tmp_path):
    config = config_of(plan=str(tmp_path / "plan.yaml"))
    plan = chosen(config_of(plan="split"))
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    assert read_plan(tmp_path / "plan.yaml") == plan == chosen(config)


def test_auto_is_what_a_search_finds():
    config, plan = config_of(plan="auto"), chosen(config_of(plan="standalone"))
    assert chosen(config, search=lambda *_: plan) is plan
    with pytest.raises(UserError, match="numbered from 0"):
        chosen(config, search=lambda *_: moved(plan, "actor.update", Placement(Slice(8, 1), "train")))


def moved(plan: Plan, name: str, placement: Placement) -> Plan:
    return Plan(plan.name, {**plan.placements, name: placement})


LORA: dict[str, Any] = {"lora": {"rank": 2}}
BUDGET: dict[str, Any] = {"ppo": {"algorithm": {"micro_batch_tokens": 64}}}
# The place of actor.update, the sentence, and sections of the config.
REFUSED: tuple[tuple[dict[str, Any], str, dict[str, Any]], ...] = (
    ({"devices": "4-11", "fsdp": 8}, "actor.update on devices 4-11, and there are 8", {}),
    ({"devices": "0-3", "fsdp": 2, "pipeline": 2}, "can be priced and not run", {}),
    ({"devices": "0-3", "fsdp": 4, "layout": "score"}, "a call to train needs train or train_tp", {}),
    (
        {"devices": "0-7", "tensor": 8},
        "actor.update with tensor=8, which does not divide its model's heads=4: choose tensor from 1, 2, 4",
        {},
    ),
    (
        {"devices": "0-5", "fsdp": 2, "data": 3},
        "ppo.rollout_batch=128 does not divide over 6 .*: choose a multiple of 6",
        {},
    ),
    (
        {"devices": "0-3", "fsdp": 4, "micro_batches": 2},
        "micro_batch_tokens=64 divides them, too: leave one out",
        BUDGET,
    ),
)


def test_a_plan_that_cannot_be_run_is_one_sentence(tmp_path):
    for changed, message, sections in REFUSED:
        mapping = chosen(config_of(**sections)).as_dict()
        mapping["calls"]["actor.update"] = {"layout": "train", **changed}
        config = write(tmp_path, mapping, **sections)
        with pytest.raises(UserError, match=f"^plan={config.plan} has .*{message}"):
            chosen(config)


def write(tmp_path: Path, mapping: Any, **sections) -> Config:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(mapping))
    return config_of(plan=str(tmp_path / "plan.yaml"), **sections)


def test_every_call_of_a_model_has_a_place_and_no_other(tmp_path):
    mapping = chosen(config_of()).as_dict()
    del mapping["calls"]["critic.values"]
    with pytest.raises(UserError, match="has no place for critic.values: add it"):
        chosen(write(tmp_path, mapping))
    mapping = chosen(config_of()).as_dict()
    mapping["calls"]["estimator.experience"] = {"devices": "0", "layout": "score"}
    with pytest.raises(UserError, match="a place for estimator.experience, which ppo does not call with a model"):
        chosen(write(tmp_path, mapping))


def test_devices_that_overlap_in_part_are_refused(tmp_path):
    mapping = chosen(config_of(rewards=FUNCTION)).as_dict()
    mapping["calls"]["actor.update"] = {"layout": "train", "devices": "0-3", "fsdp": 4}
    mapping["calls"]["critic.update"] = {"layout": "train", "devices": "2-5", "fsdp": 4}
    with pytest.raises(UserError, match="overlap in part: .* such as 0-5 and "):
        chosen(write(tmp_path, mapping, rewards=FUNCTION))


def test_generation_is_divided_by_slots_and_groups_by_prompts(tmp_path):
    section = {"rollout_batch": 32, "algorithm": {"samples": 8}}
    mapping = chosen(config_of("grpo", grpo=section)).as_dict()
    for changed, message in (
        ({"micro_batches": 2, "fsdp": 4, "tensor": 2}, "set rollout.slots"),
        ({"fsdp": 8}, "grpo.rollout_batch=32 does not divide over 8 samples of a prompt on 8 group"),
    ):
        mapping["calls"]["actor.generate"] = {"devices": "0-7", "layout": "generate", **changed}
        with pytest.raises(UserError, match=message):
            chosen(write(tmp_path, mapping, stage="grpo", grpo=section))


def test_a_file_that_is_no_plan_is_one_sentence(tmp_path):
    for text, message in (
        ("calls: [", "cannot be read"),
        ("name: x", "must hold `name` and `calls`"),
        ("calls: {actor.update: {devices: 0-3, layout: train, fsdp: 2}}", "choose sizes whose product is 4"),
    ):
        (tmp_path / "plan.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            chosen(config_of(plan=str(tmp_path / "plan.yaml")))


def test_plans_that_cannot_be_made_say_what_to_do():
    for config, devices, message in (
        (config_of(plan="splt"), 8, "plan=splt is neither colocate, split, standalone, auto nor a file"),
        (config_of(plan="split", mesh={}), 1, "plan=split halves 1 device.*set plan=colocate"),
        (config_of("grpo", plan="split", rewards=FUNCTION), 8, "nothing to run on the second half"),
        (
            config_of(plan="standalone", mesh={}),
            2,
            "a device for each of actor, reward, reference, critic, and there are 2",
        ),
        (config_of(plan="auto"), 8, "plan=auto has no search"),
    ):
        with pytest.raises(UserError, match=message):
            chosen(config, devices)


def test_adapters_of_one_base_stay_together():
    plan = chosen(config_of(**LORA))
    assert {placed.layout for placed in plan.placements.values()} == {"generate"}
    for name in ("split", "standalone"):
        with pytest.raises(UserError, match=f"plan={name} has .* what lora adapts is one base on all 8"):
            chosen(config_of(plan=name, **LORA))
