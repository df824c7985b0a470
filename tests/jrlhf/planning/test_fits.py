"""What a config asks for, as a workload; and runs that cannot fit, refused before anything is loaded."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jrlhf.algorithms.registry import planned_graph, stage_graph
from jrlhf.config import load_config
from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.models import ModelConfig
from jrlhf.planning import fit
from jrlhf.planning.fit import capacity, check_memory, memory_of
from jrlhf.planning.memory import GIB
from jrlhf.planning.plans import colocated
from jrlhf.planning.resolve import select_plan
from jrlhf.planning.workload import with_budgets, workload_of
from jrlhf.stages.setup import architectures

EIGHT = ["device.platform=cpu", "device.simulated=8"]


def loaded(name: str, *overrides: str):
    config = load_config(name, [*EIGHT, *overrides])
    return config, make_mesh(1, 8, 1), architectures(config)


def test_a_run_that_cannot_fit_is_refused_with_settings_that_do():
    with pytest.raises(UserError) as error:
        check(*loaded("llama3-8b-ppo", "device.memory=46"))
    message = str(error.value)
    assert "actor.generate needs 49.0" in message and "device.memory has 46" in message and "\n" not in message
    assert "rollout.slots=128" in message and "lora.rank=16" in message
    check(*loaded("llama3-8b-ppo", "device.memory=46", "rollout.slots=128"))
    # While the actor is trained, the critic's optimizer is on the host, and the other way round.
    with pytest.raises(UserError, match="choose sleep.optimizer=host or lora.rank=16"):
        check(*loaded("llama3-8b-ppo", "device.memory=38"))
    check(*loaded("llama3-8b-ppo", "device.memory=38", "sleep.optimizer=host"))
    check(*loaded("llama3-8b-ppo", "device.memory=80"))


@pytest.mark.parametrize("ahead", ["false", "true"])
def test_offloaded_optimizers_are_suggested_where_that_suffices(ahead):
    """With `sleep.ahead` the call before an update has its optimizer state on the devices already."""
    run, asleep = ("llama3-8b-ppo", "sleep.reference=host", f"sleep.ahead={ahead}"), "sleep.optimizer=host"
    need = memory(*loaded(*run, "device.memory=1000", asleep)).peak / GIB
    for spare, suffices in ((0.01, True), (-0.01, False)):
        with pytest.raises(UserError, match=" choose ") as error:
            check(*loaded(*run, f"device.memory={need + spare}"))
        assert bool(re.search(rf" (choose|or) {asleep}( or|$)", str(error.value))) == suffices
    check(*loaded(*run, f"device.memory={need + 0.01}", asleep))


def test_on_cpus_a_run_must_fit_into_the_memory_of_the_machine(monkeypatch):
    """Each simulated device has a share of it. A given memory is that of other devices, which are only described."""
    need = memory(*loaded("quickstart", "mesh={fsdp: 8}")).peak
    monkeypatch.setattr(fit, "host_memory", lambda: 8.5 * need)
    check(*loaded("quickstart", "mesh={fsdp: 8}"))
    monkeypatch.setattr(fit, "host_memory", lambda: 7.5 * need)
    with pytest.raises(UserError, match="its share of this machine has") as error:
        check(*loaded("quickstart", "mesh={fsdp: 8}"))
    assert "devices:" not in str(error.value) and " 16 devices" not in str(error.value)
    check(*loaded("quickstart", "mesh={fsdp: 8}", "device.memory=1"))
    check(*loaded("llama3-8b-ppo"))  # whose model is not here
    monkeypatch.undo()
    for huge in ("sft.batch=1000000000", "model.vocab_size=2000000000", "data.max_prompt=100000000"):
        with pytest.raises(UserError, match="its share of this machine has"):
            check(*loaded("quickstart", "mesh={fsdp: 8}", huge))


def check(config, mesh, models):
    check_memory(config, [stage_graph(config, stage) for stage in config.stages], mesh, models)


def memory(config, mesh, models, plan=None, stage=None):
    return memory_of(config, stage_graph(config, stage or config.stages[-1]), mesh, models, plan)


LEARNING = ("stages=[sft, reward_model, ppo]", "rewards=[]")


def shard(model: ModelConfig, scalar: bool = False) -> float:
    """Weights of a Llama on each of 8 devices: an eighth of every matrix, and every norm. With a scalar head, which is
    on each, no unembedding."""
    matrices = 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * model.mlp
    wide = (model.layers * matrices + (1 if scalar else 2) * model.vocab_size) / 8 + 2 * model.layers + 1
    return model.embed * wide + (model.embed + 1 if scalar else 0)


def test_stages_before_the_algorithm_keep_what_they_train_and_the_policy():
    """Weights and two moments are float32; the policy's weights are stored next to the reward model that learns."""
    config, mesh, models = loaded("llama3-8b-ppo", *LEARNING)
    actor = models["actor"]
    (sft,) = memory(config, mesh, models, stage="sft").phases
    learning = memory(config, mesh, models, stage="reward_model").phases[0]
    assert (sft.call, learning.call) == ("sft.update", "reward_model.update")
    assert sft.resident == 12 * shard(actor) + 8  # AdamW counts its updates twice
    assert learning.resident == 12 * shard(actor, scalar=True) + 8 + 4 * shard(actor)
    adapted = memory(*loaded("llama3-8b-ppo", *LEARNING, "lora.rank=8"), stage="reward_model")
    assert set(adapted.roles) == {"base", "actor", "reward"} and "optimizer" not in adapted.roles["actor"]


def test_a_stage_before_the_algorithm_that_cannot_fit_is_refused():
    for stage in ("sft", "reward_model"):
        alone = ("llama3-8b-ppo", f"stages=[{stage}]", "rewards=[]", f"{stage}.batch=1024")
        need = memory(*loaded(*alone, "device.memory=1000")).peak / GIB
        check(*loaded(*alone, f"device.memory={need + 0.001}"))
        small = f"device.memory={need - 0.001}"
        with pytest.raises(UserError, match=rf"^{stage}.update needs .* choose .*{stage}.micro_batches=2 or ") as error:
            check(*loaded(*alone, small))
        assert "\n" not in str(error.value)
        check(*loaded(*alone, small, f"{stage}.micro_batches=2"))
        check(*loaded(*alone, small, f"{stage}.micro_batch_tokens=65536"))


def test_a_pipeline_of_a_stage_counts_where_a_run_is_refused():
    """What is stored is the same; the stages add copies and inputs in flight. More micro-batches help there, too."""
    alone = ("llama3-8b-ppo", "stages=[sft]", "rewards=[]", "sft.batch=1024", "sft.micro_batches=4")
    staged = (*alone, "sft.pipeline={stages: 4}")
    (whole,), (phase,) = (memory(*loaded(*one, "device.memory=1000")).phases for one in (alone, staged))
    assert phase.resident == whole.resident
    assert phase.active.keys() - whole.active.keys() == {"inputs in flight", "copies of stages"}
    small = f"device.memory={phase.total / GIB - 0.001}"
    with pytest.raises(UserError, match="^sft.update needs .* choose .*sft.micro_batches=8 or "):
        check(*loaded(*staged, small))
    check(*loaded(*staged, small, "sft.micro_batches=8"))
    # Stages share their rows: 16 rows are 2 devices' 8 micro-batches. So it is with DPO, and its reference.
    dpo = ("quickstart-dpo", "stages=[dpo]", "dpo.batch=48", "dpo.algorithm.micro_batches=4", "mesh={fsdp: 8}")
    few = ("llama3-8b-ppo", "stages=[sft]", "rewards=[]", "sft.batch=16", "sft.micro_batches=4")
    for stage, key, given in (("sft", "sft", few), ("dpo", "dpo.algorithm", dpo)):
        given = (*given, f"{stage}.pipeline={{stages: 4}}")
        need = memory(*loaded(*given, "device.memory=1000")).peak / GIB
        with pytest.raises(UserError, match=rf" choose .*{key}.micro_batches=8( |$)"):
            check(*loaded(*given, f"device.memory={need - 0.001}"))
        check(*loaded(*given, f"device.memory={need - 0.001}", f"{key}.micro_batches=8"))


def test_the_memory_is_that_of_a_device_of_this_process():
    """Where it is not known nothing is refused. JAX raises where a device of another process is asked."""
    config, mesh, models = loaded("llama3-8b-ppo")
    assert capacity(config, mesh.devices.flat) is None
    check(config, mesh, models)
    assert memory(config, mesh, models).peak > 40 * 2**30
    ours = SimpleNamespace(platform="gpu", process_index=0, memory_stats=lambda: {"bytes_limit": 7})
    devices = SimpleNamespace(platform="gpu", process_index=1), ours
    assert capacity(config, cast(Any, devices)) == 7


def test_what_sleeps_of_shared_passes_needs_no_room():
    single = ("ppo.algorithm.minibatches=1", "ppo.algorithm.micro_batches=1", "compute.shared_passes=true")
    awake, asleep = (memory(*loaded("llama3-8b-ppo", *single, *more)) for more in ((), ("sleep.optimizer=host",)))
    moments = sum(asleep.roles[role]["optimizer"] for role in ("actor", "critic"))
    first, same = awake.phases[0], asleep.phases[0]
    assert first.call == same.call == "actor.generate" and first.total - same.total == moments > 8 * 2**30


def test_budgets_of_tokens_divide_rows_whatever_the_plan():
    for plan in ("colocate", "split"):
        config, mesh, models = loaded("llama3-8b-ppo", f"plan={plan}", "compute.score_tokens=4096")
        result = memory(config, mesh, models, select_plan(config, models, list(mesh.devices.flat)))
        active = {phase.call: phase.active for phase in result.phases}
        assert active["critic.values"]["activations"] == 4096 * 4096 * 2  # tokens of a part, of 4096 bfloat16


def test_settings_are_named_as_the_config_has_them():
    budget = ("ppo.algorithm.micro_batches=1", "ppo.algorithm.micro_batch_tokens=65536", "device.memory=46")
    budget += ("rollout.slots=64", "compute.remat=products")
    config, mesh, models = loaded("llama3-8b-ppo", *budget)
    with pytest.raises(UserError, match=r"ppo.algorithm.micro_batch_tokens=\d+") as error:
        check(config, mesh, models)
    assert "micro_batches" not in str(error.value)
    key = re.search(r"ppo.algorithm.micro_batch_tokens=\d+", str(error.value))
    assert key is not None
    check(*loaded("llama3-8b-ppo", *budget, key.group()))


def test_a_config_s_workload_has_its_roles_rows_and_parts():
    config, _, models = loaded("llama3-8b-ppo")
    workload = workload_of(config, planned_graph(config), models)
    assert set(workload.models) == {"actor", "critic", "reference", "reward"}
    assert {role for role, (model,) in workload.models.items() if model.trained} == {"actor", "critic"}
    assert (workload.rows, workload.minibatches, workload.length) == (256, 4, 2048)
    plan = with_budgets(config, workload, colocated(config, workload, 8))
    assert plan["actor.update"].micro_batches == 8 and plan["reward.score"].micro_batches == 256 // 32
    assert plan["actor.generate"].layout == "generate" and plan.devices == 8


def test_a_workload_knows_which_heads_are_for_responses_only():
    for name, overrides, fused, spanned in (
        ("quickstart", [], True, ("infer", "train")),
        ("quickstart", ["compute.fused_loss=false"], False, ("infer",)),
        ("quickstart", ["ppo.algorithm.ptx_coef=0.1", "stages=[sft, reward_model, ppo]"], True, ("infer",)),
        ("quickstart", ["compute.shared_passes=true", "ppo.algorithm.minibatches=1"], False, ("infer", "train")),
        ("quickstart-dpo", ["stages=[sft, dpo]"], False, ()),
    ):
        config, _, models = loaded(name, *overrides)
        workload = workload_of(config, planned_graph(config), models)
        assert (workload.fused_loss, workload.spanned) == (fused, spanned)
    config, _, models = loaded("quickstart", "stages=[sft]")
    with pytest.raises(UserError, match="have no calls to plan"):
        workload_of(config, planned_graph(config), models)


def test_adapters_are_on_one_base_and_the_reference_is_that_base():
    config, _, models = loaded("qwen3-8b-lora", "lora.base=int8")
    workload = workload_of(config, planned_graph(config), models)
    assert all(model.shared and model.int8 for role_models in workload.models.values() for model in role_models)
    assert "reference" not in workload.models  # the actor's pass scores it, too
    config, _, models = loaded("quickstart", "lora.rank=4")
    (reference,) = workload_of(config, planned_graph(config), models).models.get("reference", (None,))
    assert reference is None or reference.shared
