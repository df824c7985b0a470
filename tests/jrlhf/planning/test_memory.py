"""Predicted memory against what XLA's programs take, against the shapes of states, and against itself."""

import json
import random
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.drawn import PATH as DRAWN
from benchmarks.drawn import row as drawn_row
from benchmarks.drawn import summary
from benchmarks.memory import LAYOUTS, PATH, Case, Found, accelerator_cases, compiled, cpu_cases, predicted, row, within
from benchmarks.shapes import adapter_weights, device_bytes, generation_copy, placed, train_state, whole_weights
from jrlhf.algorithms.registry import graph_of
from jrlhf.config.schema import Config, LoRASection, SleepConfig
from jrlhf.config.stages import OptimizerConfig
from jrlhf.meshes import GENERATE, Graph, make_mesh
from jrlhf.meshes.hardware import cluster
from jrlhf.meshes.plan import LayoutName, Placement, Plan, Slice
from jrlhf.models import LoRAConfig, ModelConfig, param_shardings
from jrlhf.models.quantize import int8_shardings, to_int8
from jrlhf.planning.activations import Backend
from jrlhf.planning.candidates import placements
from jrlhf.planning.fit import suggest_settings
from jrlhf.planning.memory import COUNTERS, Away, away_parts, call_bytes, plan_memory, saving_bytes, state_bytes, tiled
from jrlhf.planning.simulate import simulate
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import RoleModel, Workload
from jrlhf.roles.graph import home_of

CPU, GPU, TPU = Backend("cpu"), Backend("gpu"), Backend("tpu")
MESHES = ((4, 2), (1, 8))
GQA = ModelConfig(8190, embed=256, layers=4, heads=8, kv_heads=2, head_dim=32, mlp=768, max_positions=2048)
BIASES: dict[str, Any] = {"qkv_bias": True, "mlp_bias": True, "output_bias": True}
GPT2 = ModelConfig(
    1000, 64, 3, 8, 8, 16, mlp=96, max_positions=64, norm="layer", positions="learned", gated_mlp=False, **BIASES
)
UNTIED = replace(GQA, vocab_size=6000, kv_heads=8, qk_norm=True, post_norms=True, tie_embeddings=False)
LLAMA = ModelConfig(
    128256, 4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, max_positions=8192, tie_embeddings=False
)
LORA = LoRAConfig(rank=4, alpha=8.0)
ACTOR, CRITIC = RoleModel(LLAMA, "lm", True), RoleModel(LLAMA, "scalar", True)
FROZEN = {"reference": (RoleModel(LLAMA, "lm", False),), "reward": (RoleModel(LLAMA, "scalar", False),)}
ADAPTED = {
    "actor": (replace(ACTOR, lora=LORA),),
    "critic": (replace(CRITIC, lora=LORA),),
    "reference": (RoleModel(LLAMA, "lm", False, is_base=True),),
}


def at(fsdp: int, tensor: int, layout: LayoutName = "train") -> Placement:
    return Placement(Slice(0, fsdp * tensor), layout, fsdp=fsdp, tensor=tensor)


# ---- what XLA's programs take


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case("critic.update", replace(UNTIED, layers=6, mlp=1152), (2, 4), 32, 80, 80),
            marks=pytest.mark.proof("memory"),
        ),
        Case("actor.generate", replace(UNTIED, layers=3), (2, 4), 64, 100, 60),
        # The first scores lie above copies of queries and keys, and the later ones where these were.
        Case("critic.values", replace(GPT2, vocab_size=16000, head_dim=64, max_positions=160), (4, 2), 64, 80, 80),
    ],
    ids=lambda case: case.call,
)
def test_memory_of_a_compiled_call_is_as_predicted(case):
    prediction, measurement = predicted(case, CPU), compiled(case, jax.devices(), CPU)
    assert within(prediction, measurement), (prediction, measurement)
    assert prediction.buffers == pytest.approx(measurement.buffers, rel=0.01)  # states are exact, inputs all but


@pytest.mark.proof("memory")
@pytest.mark.parametrize(
    "case", list(cpu_cases()), ids=lambda case: f"{case.call}-{case.model.embed}-{case.mesh}-{case.remat}"
)
def test_memory_of_every_compiled_call_is_as_predicted(case):
    prediction, measurement = predicted(case, CPU), compiled(case, jax.devices(), CPU)
    assert within(prediction, measurement), (prediction, measurement)


@pytest.mark.parametrize(("target", "backend"), [("cpu", CPU), ("h200x8", Backend("gpu", "xla")), ("v5p-16", TPU)])
def test_memory_of_programs_for_other_hardware_is_as_predicted(target, backend):
    record = json.loads(PATH.read_text())["targets"][target]
    cases = {id_of(row(case, NOTHING, NOTHING)): case for case in (*cpu_cases(), *accelerator_cases())}
    assert len(record["results"]) >= 20
    for result in record["results"]:
        case = cases[id_of(result)]
        prediction, measurement = predicted(case, backend), Found.of(result["compiled"])
        assert within(prediction, measurement), (case, prediction, measurement)
        assert prediction.total == pytest.approx(Found.of(result["predicted"]).total, rel=1e-3), (
            f"measure {target} again"
        )


NOTHING = Found(1, 1)


def id_of(result):
    """A result's case, without what was found."""
    given = {name: value for name, value in result.items() if not name.endswith("error")}
    return json.dumps({**given, "predicted": None, "compiled": None, "within": None}, sort_keys=True)


def test_tiles_of_a_tpu():
    assert tiled((36, 320, 9728)) == 36 * 320 * 9728  # full
    assert tiled((36, 9728, 320)) == 36 * 9728 * 384  # columns by 128
    assert tiled((40, 1280, 20, 128)) == 40 * 1280 * 24 * 128  # rows by 8,
    assert tiled((36, 640, 4, 128)) == 36 * 640 * 4 * 128  # where there are more than 4
    assert tiled((5120,)) == 5120


# ---- states


def resident(model: RoleModel, itemsize: int, place: Placement) -> dict[str, float]:
    return state_bytes((model,), itemsize, place)


def test_states_are_those_of_the_arrays():
    for sizes, model, head in product(MESHES, (GQA, GPT2, UNTIED), ("lm", "scalar")):
        mesh, place = make_mesh(1, *sizes), at(*sizes)
        state = train_state(OptimizerConfig(), whole_weights(model, mesh, head), mesh)
        trained = {"weights": device_bytes(state.params), "optimizer": device_bytes(state.opt_state)}
        assert resident(RoleModel(model, head, trained=True), 2, place) == trained, (sizes, model, head)
        for wide, dtype in ((False, jnp.bfloat16), (True, jnp.float32)):
            frozen = {"weights": device_bytes(whole_weights(model, mesh, head, dtype))}
            assert resident(RoleModel(model, head, trained=False, wide=wide), 2, place) == frozen, (sizes, model, head)


def test_states_of_adapters_are_those_of_the_arrays():
    model = UNTIED
    for sizes in MESHES:
        mesh, place = make_mesh(1, *sizes), at(*sizes)
        base = generation_copy(model, mesh, jnp.bfloat16)
        small = placed(jax.eval_shape(to_int8, base), int8_shardings(param_shardings(model, mesh, GENERATE)))
        for head in ("lm", "scalar"):
            adapter = adapter_weights(model, mesh, LORA, head)
            moments = train_state(OptimizerConfig(), adapter, mesh).opt_state
            own = {"weights": device_bytes(adapter), "optimizer": device_bytes(moments)}
            assert resident(RoleModel(model, head, True, LORA), 2, place) == {"base": device_bytes(base), **own}, sizes
            states = resident(RoleModel(model, head, False, LORA, int8=True), 2, place)
            assert states == {"base": device_bytes(small), "weights": own["weights"]}, sizes
        assert resident(RoleModel(model, "lm", False, is_base=True), 2, place) == {"base": device_bytes(base)}, sizes


def test_a_model_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="does not divide over 3"):
        resident(RoleModel(GQA, "lm", True), 4, at(3, 1))
    with pytest.raises(ValueError, match="heads=8 cannot be divided over tensor=3"):
        resident(RoleModel(GQA, "lm", True), 4, at(1, 3))


# ---- calls


def ppo(**changes) -> Workload:
    """PPO with two models of 8 billion parameters, a reference and a reward model, on 8 devices."""
    models = {"actor": (ACTOR,), "critic": (CRITIC,), **FROZEN}
    graph, dtype = graph_of(Config(stages=("ppo",))), jnp.dtype(jnp.bfloat16)
    return replace(Workload(graph, models, 256, 1024, 1024, 512.0, 700.0, minibatches=4, dtype=dtype), **changes)


def everywhere(workload: Workload, fsdp: int = 8, tensor: int = 1, parts: int = 8) -> Plan:
    def place(kind: str) -> Placement:
        return replace(at(fsdp, tensor, LAYOUTS[kind]), micro_batches=parts if kind == "train" else 1)

    return Plan("colocate", {call.name: place(call.kind) for call in workload.graph if workload.has_model(call)})


def test_the_cache_is_that_of_all_slots():
    """2 x layers x kv-heads x head_dim numbers a token, of 2 bytes."""
    workload = ppo(slots=128)
    call = workload.graph["actor.generate"]
    active = call_bytes(workload, call, everywhere(workload, 2, 4)["actor.generate"], GPU).active
    cache = 2 * 32 * 2 * 128 * 2 * 2048 * (128 // 2)  # 2 of the 8 kv-heads, rows over fsdp=2
    assert cache <= active["KV cache"] < 1.2 * cache
    assert active["generation weights"] == pytest.approx(2 * 8.030261248e9 / 4, rel=1e-3)
    # Prompts are read in waves next to it: an eighth of the slots, or as many as are asked for. Samples share a prompt.
    whole, waves, chunks, shared = (
        sum(call_bytes(work, call, everywhere(work)[call.name], CPU).active.values())
        for work in (ppo(), ppo(chunk=64), ppo(chunk=64, prefill=16), ppo(samples=8))
    )
    rows, position = 256 // 8, 2 * 32 * 8 * 128 * 2
    assert whole > waves and chunks > waves and whole > shared > position * rows * 2048
    assert chunks > 2 * 8.03e9 + position * (rows * 2048 + 16 * 1024 * 31 / 32)


def test_a_stage_keeps_the_inputs_of_all_micro_batches_on_their_way():
    """And of one the activations of its 8 layers: 56 rows each. GPipe has all of them on their way."""
    workload = ppo(rows=3584)
    row: Any = 56 * 2048 * 4096 * 2
    schedule: Any
    for schedule, inputs in (("1f1b", 4), ("gpipe", 8)):
        placed = Placement(Slice(0, 8), "train", fsdp=2, pipeline=4, micro_batches=8, schedule=schedule)
        active = call_bytes(workload, workload.graph["actor.update"], placed).active
        assert (active["kept activations"], active["inputs in flight"]) == (8 * row, inputs * row)


def test_a_pass_that_scores_the_base_too_has_every_row_twice():
    config = Config(stages=("grpo",), lora=LoRASection(rank=4))
    both = ppo(graph=graph_of(config), models={"actor": ADAPTED["actor"]}, rows=64)
    (scored,) = (call for call in both.graph if call.kind == "infer" and call.role == "actor")
    assert scored.name == "actor.logprobs_with_base"
    alone = replace(both, graph=Graph("alone", ("rollout",), (replace(scored, name="actor.logprobs"),)), rows=128)
    placed = Placement(Slice(0, 8), "generate", fsdp=8)
    assert call_bytes(both, scored, placed).active == call_bytes(alone, alone.graph["actor.logprobs"], placed).active


# ---- plans


def test_roles_live_where_they_are_trained_and_all_that_is_kept_adds_up():
    workload = ppo()
    memory = plan_memory(workload, everywhere(workload))
    totals = {role: sum(parts.values()) for role, parts in memory.roles.items()}
    assert set(totals) == {"actor", "critic", "reference", "reward"}
    assert all(phase.resident == sum(totals.values()) for phase in memory.phases)
    assert memory.peak == max(phase.total for phase in memory.phases) == memory.largest.total
    # On slices of their own, roles do not meet.
    plan = everywhere(workload, fsdp=4)
    later = {name: replace(at, devices=Slice(4, 4)) for name, at in plan.placements.items() if "critic" in name}
    memory = plan_memory(workload, Plan("split", {**plan.placements, **later}))
    totals = {role: sum(parts.values()) for role, parts in memory.roles.items()}
    by_call = {phase.call: phase for phase in memory.phases}
    assert by_call["critic.update"].resident == totals.pop("critic")
    assert by_call["actor.update"].resident == sum(totals.values()) and len(totals) == 3
    # Away from home a call brings its weights.
    moved = Plan("moved", {**plan.placements, "critic.values": later["critic.values"]})
    assert home_of(workload.graph, "critic", moved) == workload.graph["critic.update"]
    active = {phase.call: phase.active for phase in plan_memory(workload, moved).phases}
    assert "moved weights" in active["critic.values"] and "moved weights" not in active["critic.update"]


def test_weights_are_stored_as_the_layout_of_their_call_says():
    """In the layout of generation every device of an fsdp axis has all: of stored weights, and of copies for calls."""
    workload, mesh = ppo(), make_mesh(1, 8, 1)
    plan = everywhere(workload).placements
    shared = {name: replace(plan[name], layout="generate") for name in ("reference.logprobs", "critic.values")}
    memory = plan_memory(workload, Plan("shared", {**plan, **shared}))
    assert memory.roles["reference"] == {"weights": device_bytes(generation_copy(LLAMA, mesh, jnp.bfloat16))}
    active = {phase.call: phase.active for phase in memory.phases}
    scalar = device_bytes(generation_copy(replace(LLAMA, tie_embeddings=True), mesh, jnp.bfloat16)) + 4 * (4096 + 1)
    assert active["critic.values"]["moved weights"] == scalar
    assert "moved weights" not in active["reference.logprobs"]


def test_a_search_and_a_run_s_check_count_the_same_bytes():
    """The simulator's peak from the calls' prices is the peak of the plan's memory, for random plans."""
    on, draw = cluster("8xh100"), random.Random(0)
    moves = 0
    for workload in (ppo(), ppo(models={**ADAPTED, "reward": FROZEN["reward"]})):
        prices = CostModel(workload, on)
        options = {
            call.name: [
                replace(placement, devices=Slice(start, count))
                for count in (4, 8)
                for start in range(0, 8, count)
                for placement in placements(workload, call, count, 8)
                if workload.models[call.role][0].lora is None or placement.sizes == (1, 8, 1)
            ]
            for call in workload.calls
        }
        for _ in range(40):
            plan = Plan("random", {name: draw.choice(choices) for name, choices in options.items()})
            memory = plan_memory(workload, plan)
            assert simulate(workload.graph, plan, prices, iterations=2).peak == pytest.approx(memory.peak, rel=1e-12)
            moves += any("moved weights" in phase.active for phase in memory.phases)
    assert moves > 20


def test_what_sleeps_is_not_on_the_devices():
    workload = ppo()
    plan = everywhere(workload)
    awake = {phase.call: phase for phase in plan_memory(workload, plan).phases}
    away: Away = {("actor", "actor.generate"): ["optimizer"], ("critic", "actor.generate"): ["weights"]}
    memory = plan_memory(workload, plan, away=away)
    asleep = {phase.call: phase for phase in memory.phases}
    gone = memory.roles["actor"]["optimizer"] + memory.roles["critic"]["weights"]
    assert asleep["actor.generate"].total == pytest.approx(awake["actor.generate"].total - gone)
    assert all(asleep[call] == awake[call] for call in awake if call != "actor.generate")


def test_adapters_share_one_base():
    workload = ppo(models=ADAPTED)
    memory = plan_memory(workload, everywhere(workload))
    assert memory.roles["base"]["weights"] == pytest.approx(2 * 8.030261248e9, rel=1e-3)
    base = memory.roles["base"]["weights"]
    own = {role: sum(parts.values()) for role, parts in memory.roles.items() if role != "base"}
    assert own["reference"] == 0 and 0 < own["actor"] < 0.01 * base
    assert memory.phases[0].resident == base + sum(own.values())
    assert "generation weights" not in memory.phases[0].active


def test_adapters_in_stages_copy_only_themselves():
    """Every device has the base and the adapters whole; a stage's activations are those of its layers."""
    workload = ppo(models=ADAPTED)
    calls = everywhere(workload).placements
    staged = Placement(Slice(0, 8), "generate", fsdp=2, pipeline=4, micro_batches=8)
    plan = Plan("staged", {**calls, **dict.fromkeys(("actor.update", "critic.update"), staged)})
    whole, memory = plan_memory(workload, Plan("whole", calls)), plan_memory(workload, plan)
    assert memory.roles == whole.roles
    active = {phase.call: phase.active for phase in memory.phases}["actor.update"]
    assert active["copies of stages"] == pytest.approx(memory.roles["actor"]["weights"] * (1 + 1 / 4))
    row = workload.rows / (workload.minibatches * 8 * 2) * workload.length * LLAMA.embed * workload.itemsize
    assert (active["kept activations"], active["inputs in flight"]) == (8 * row, 4 * row)
    assert not any("moved weights" in phase.active for phase in memory.phases)


def test_stages_store_the_whole_model_and_score_with_copies():
    """Weights and optimizer state are stored over fsdp and stages together. A copy has a stage's layers and one table,
    in the compute dtype; at the home of a model there is no other copy."""
    workload = ppo()
    calls = everywhere(workload).placements
    staged = Placement(Slice(0, 8), "score", fsdp=2, pipeline=4, micro_batches=8)
    updates = {"actor.update": replace(staged, layout="train"), "critic.update": replace(staged, layout="train")}
    scores = {name: staged for name in calls if workload.graph[name].kind == "infer"}
    whole, memory = (plan_memory(workload, Plan("mine", {**calls, **more})) for more in ({}, updates | scores))
    assert memory.roles == whole.roles
    active = {phase.call: phase.active for phase in memory.phases}
    assert not any("moved weights" in parts for parts in active.values())
    layers, table = 8 * 218_103_808, 128256 * 4096
    for name, vectors in (("actor.logprobs", 0), ("reference.logprobs", 0), ("critic.values", 4096 + 1)):
        vectors += (8 * 2 + 1) * 4096  # norms of the layers, and the last one
        assert active[name]["copies of stages"] == 2 * (layers + table) / 2 + 4 * vectors
        assert active[name]["inputs in flight"] == 256 / (8 * 2) * 2048 * 4096 * 2
    away = {"critic.values": replace(staged, devices=Slice(4, 4), pipeline=2)}
    moved = {phase.call: phase.active for phase in plan_memory(workload, Plan("mine", {**calls, **away})).phases}
    copy = whole_weights(LLAMA, make_mesh(1, 4, 1, devices=jax.devices()[:4]), "scalar", jnp.bfloat16)
    assert moved["critic.values"]["moved weights"] == device_bytes(copy)


def test_a_learner_keeps_what_it_trains_for_the_actor():
    graph = graph_of(Config(stages=("ppo",), compute=replace(Config().compute, shared_passes=True)))
    workload = ppo(graph=graph, models={"actor": (ACTOR,), "learner": (ACTOR, CRITIC)}, minibatches=1)
    plan = everywhere(workload)
    memory = plan_memory(workload, plan)
    own = {name: resident(model, workload.itemsize, at(8, 1)) for name, model in (("actor", ACTOR), ("critic", CRITIC))}
    assert memory.roles == own
    # What sleeps does so by its own name.
    asleep = plan_memory(workload, plan, away={("critic", "actor.generate"): ["optimizer"]})
    gone = memory.phases[0].total - asleep.phases[0].total
    assert asleep.phases[0].call == "actor.generate" and gone == own["critic"]["optimizer"]


# ---- what to change


def test_suggestions_fit_and_are_as_mild_as_can_be():
    workload = ppo(remat="products")
    plan = everywhere(workload, parts=2)
    peak = plan_memory(workload, plan).peak
    assert suggest_settings(workload, plan, peak) == []
    tried = 0
    for share in (0.95, 0.9, 0.8, 0.7, 0.6):
        for changes in suggest_settings(workload, plan, share * peak):
            tried += 1
            if changes.keys() <= {"slots", "remat"}:
                assert plan_memory(ppo(**{"remat": "products", **changes}), plan).peak <= share * peak
    assert tried >= 5


def test_more_devices_that_divide_model_and_rows_are_the_last_resort():
    workload = ppo(models={"actor": (ACTOR,), "critic": (CRITIC,)})
    plan = everywhere(workload)
    (changes,) = suggest_settings(workload, plan, 19 * 2**30)
    assert changes["devices"] > 8
    assert 64 % (changes["devices"] * changes.get("micro_batches", 8)) == 0  # rows of a minibatch
    assert suggest_settings(workload, plan, 2**30) == []  # the generation weights alone are more
    narrow = {"actor": (RoleModel(replace(LLAMA, embed=2560), "lm", True),)}  # 2560 is 5 x 512
    for rows, parts in ((4096 * 4, 8), (256, 1)):
        workload = ppo(models=narrow, rows=rows)
        assert suggest_settings(workload, everywhere(workload, parts=parts), 2**30) == []


def test_states_of_fused_updates_cannot_sleep():
    workload = ppo(remat="attention")
    staged = Placement(Slice(0, 8), "train", fsdp=2, pipeline=4, micro_batches=8)
    for update, asleep in ((staged, True), (replace(staged, schedule="fused"), False)):
        updates = dict.fromkeys(("actor.update", "critic.update"), update)
        plan = Plan("staged", {**everywhere(workload).placements, **updates})
        away = away_parts(Config(sleep=SleepConfig(optimizer="host")), workload)
        settings = suggest_settings(workload, plan, 0.95 * plan_memory(workload, plan).peak, asleep=away)
        assert any("sleep" in changes for changes in settings) == asleep


def test_memory_of_drawn_programs_is_as_recorded():
    """Programs of every family and kind: those that the counts were fitted to, and others."""
    sets = json.loads(DRAWN.read_text())["sets"]
    for programs in (sets["fitting"], sets["fresh"]):
        some = programs["results"][::4]
        again = [drawn_row(result["seed"], Found.of(result["compiled"])) for result in some]
        assert again == some, "predict them anew: python -m benchmarks.drawn"
        assert summary(programs["results"]) == programs["summary"] and len(programs["results"]) >= 50
    for programs in sets.values():
        assert programs["summary"]["within 10 %"] >= 0.94 * len(programs["results"])


def test_saving_needs_the_largest_group_of_arrays():
    """With 8B models the stacked mlp, 32 layers of it; models that are smaller than a group are one group."""
    largest = 4 * 32 * 4096 * 14336 / 8
    for fsdp, tensor in ((8, 1), (2, 4)):
        assert saving_bytes(ppo(), everywhere(ppo(), fsdp, tensor)) == largest
    small = ppo(
        models={**ppo().models, "actor": (replace(ACTOR, config=GQA),), "critic": (replace(CRITIC, config=GQA),)}
    )
    states = plan_memory(small, everywhere(small)).roles
    total = sum(sum(states[role].values()) - COUNTERS for role in ("actor", "critic"))
    assert saving_bytes(small, everywhere(small)) == total == plan_memory(small, everywhere(small)).saving
