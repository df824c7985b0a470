"""Losses and teachers in a dataflow: the examples of the tutorial train on any devices, and resume."""

import inspect
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrlhf.algorithms.registry import graph_of
from jrlhf.algorithms.roles import ROLES
from jrlhf.config import load_config
from jrlhf.config.schema import OTHER_PARAMETERS
from jrlhf.data.batches import put_rows
from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.meshes.layout import TRAIN
from jrlhf.models import ModelConfig, export_hf, init_lm, init_sharded
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.models.params import param_shardings
from jrlhf.ppo import GRPOConfig, LossTokens, Rollout, TrainState, reverse_kl
from jrlhf.ppo.experience import bare_experience
from jrlhf.ppo.token_losses import NO_LOGPROB
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.frozen import FrozenPolicy
from jrlhf.roles.model import Architecture, Compute, Model
from jrlhf.roles.placement import CALL, RolePlacement
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock
from jrlhf.run.files import read_jsonl
from jrlhf.stages.setup import check_sources, load_task, select_mesh
from jrlhf.train import main
from tests.support.runs import stage_of
from tests.support.tutorials import files

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "own-algorithm.md").read_text(encoding="utf-8")
_, RAFT, PAIRS, DISTILL, TEACHERS, JENSEN_SHANNON, LIKELIER, REVISE, STEPS = re.findall(
    r"```python\n(.*?)```", DOCUMENT, re.DOTALL
)
OWN = """
def own_loss(actor, reference, reward, estimator, prompts, kl_coef):
    rollout = actor.generate(prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.group_experience(rollout, reward.score(rollout, prompts), old, ref, kl_coef)
    return experience, actor.update(experience, loss=likelier)

"""
REVISE = re.sub("AGAIN = .*", "AGAIN = '='", re.sub("WHY = .*", "WHY = '+'", REVISE))  # which sums have
SIZES = ["sft.steps=2", "sft.batch=32", "sft.save_every=2", "sft.eval_every=2", "evaluation.prompts=16"]
SIZES += ["data.heldout_rows=16", "grpo.iterations=3", "grpo.rollout_batch=32", "grpo.save_every=1"]
SIZES += ["device.simulated=8", "mesh.fsdp=4", "mesh.tensor=2"]
SIZES += ["grpo.algorithm={samples: 4, kl_coef: 0}", "grpo.actor={learning_rate: 1.0e-2, warmup: 0}"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the student's vocabulary, with other sizes and clear opinions."""
    config = ModelConfig(14, 32, 1, 4, 2, 8, mlp=64, max_positions=16)
    params = init_lm(config, jax.random.key(5))
    params = {**params, "embedding": 20 * params["embedding"]}
    return export_hf(params, config, tmp_path_factory.mktemp("teacher") / "model", eos_ids=(1,), pad_id=0)


def config_of(folder: Path, function: str, *settings: str) -> Any:
    dataflows = RAFT, PAIRS, DISTILL, LIKELIER, OWN, TEACHERS, REVISE, STEPS
    (folder / "distill.py").write_text("".join(dataflows))
    own = [f"grpo.dataflow={folder}/distill.py:{function}", f"run_dir={folder}", *settings]
    return load_config("arithmetic-grpo", [*SIZES, *own])


def test_the_graph_has_the_calls_of_a_teacher(teacher: Path, tmp_path: Path):
    graph = graph_of(config_of(tmp_path, "distill", f"roles.teacher.path={teacher}"))
    assert [call.name for call in graph] == "actor.generate teacher.top_logprobs actor.update".split()
    call = graph["teacher.top_logprobs"]
    assert (call.role, call.kind, call.inputs, call.outputs) == ("teacher", "infer", ("rollout",), ("teacher_targets",))
    assert graph["actor.update"].inputs == ("rollout", "teacher_targets")
    assert [call.name for call in graph_of(config_of(tmp_path, "raft"))][2:] == [
        "estimator.best_of_group", "actor.update"
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_student_comes_nearer_to_its_teacher_and_resumes_to_the_same_bits(teacher: Path, tmp_path: Path):
    losses = []
    for name, plan, more in (("one", "colocate", []), ("two", "split", ["rewards=[]"])):
        more = [*more, f"roles.teacher.path={teacher}", f"name={name}", f"plan={plan}", "validation.every=2"]
        config = config_of(tmp_path, "distill", *more)
        main(config)
        records = stage_of(tmp_path / name, "grpo")
        assert not any(key.startswith(("critic/", "rewards/")) for record in records for key in record)
        assert ("val-core/all/score/mean@1" in records[0]) == ("rewards=[]" not in more)
        losses.append([record["actor/loss"] for record in records])
        assert all(record["timing_s/teacher_targets"] > 0 and "response_length/mean" in record for record in records)
        assert "actor/pg_loss" not in records[0] and "timing_s/ref" not in records[0]
    assert losses[0][0] > 0.1 and losses[0][2] < 0.8 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    model = (tmp_path / "two" / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "grpo" / "3")
    shutil.rmtree(tmp_path / "two" / "model")
    main(config, resume=True)
    assert (tmp_path / "two" / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("function", ["raft", "distill"])
def test_rollouts_drawn_ahead_are_scored_only_for_a_dataflow_that_asks(function: str, teacher: Path, tmp_path: Path):
    settings = ["name=ahead", "plan=disaggregated", "grpo.asynchronous.staleness=1", "grpo.algorithm.epochs=1"]
    settings += [f"roles.teacher.path={teacher}"] if function == "distill" else []
    main(config_of(tmp_path, function, *settings))
    for record in stage_of(tmp_path / "ahead", "grpo"):
        assert ("timing_s/reward_functions" in record) == ("critic/score/mean" in record) == (function == "raft")


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_raft_learns_from_the_best_response_of_each_group(tmp_path: Path):
    main(config_of(tmp_path, "raft", "name=raft"))
    records = stage_of(tmp_path / "raft", "grpo")
    assert all(np.isfinite(record["actor/loss"]) and record["actor/grad_norm"] > 0 for record in records)
    assert not any(name.startswith(("critic/advantages", "group/")) for record in records for name in record)
    assert all("critic/score/mean" in record for record in records)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_loss_of_responses_is_the_same_on_any_devices_and_in_parts(tmp_path: Path):
    (tmp_path / "reward.py").write_text("def length(solution_str): return len(solution_str)")
    losses = []
    for name, *settings in (
        ("one", "plan=colocate", "grpo.algorithm.micro_batches=2"),
        ("two", "plan=standalone"),
        ("three", "plan=colocate", "mesh={fsdp: 8, tensor: 1}", "grpo.algorithm.micro_batch_tokens=40"),
    ):
        settings += ["grpo.algorithm.aggregation=seq-mean-token-mean", "grpo.algorithm.kl_coef=0.1", f"name={name}"]
        main(config_of(tmp_path, "own_loss", f"rewards=[{{function: {tmp_path}/reward.py:length}}]", *settings))
        records = stage_of(tmp_path / name, "grpo")
        assert all(record["actor/grad_norm"] > 1e-3 for record in records)
        losses.append([record["actor/loss"] for record in records])
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-3, atol=1e-6)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("settings", [["plan=standalone"], ["lora.rank=2", "grpo.algorithm.micro_batches=2"]])
def test_online_dpo_learns_from_pairs_of_a_rollout_and_resumes_to_the_same_bits(settings: list[str], tmp_path: Path):
    length = "def length(solution_str): return len(solution_str)"
    (tmp_path / "reward.py").write_text(length)  # what fresh weights answer is never right
    settings = [*settings, "grpo.algorithm.kl_coef=0.05", f"rewards=[{{function: {tmp_path}/reward.py:length}}]"]
    settings += ["grpo.rollout_batch=64", "name=dpo"]
    config = config_of(tmp_path, "online_dpo", *settings)
    main(config)
    records = stage_of(tmp_path / "dpo", "grpo")
    assert records[0]["dpo/loss"] == pytest.approx(np.log(2), rel=1e-4)
    assert all(record["actor/grad_norm"] > 0 and "objective/kl" in record for record in records)
    assert records[-1]["dpo/loss"] != records[0]["dpo/loss"] and "actor/pg_loss" not in records[0]
    model = (tmp_path / "dpo" / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "dpo" / "checkpoints" / "grpo" / "3")
    shutil.rmtree(tmp_path / "dpo" / "model")
    main(config, resume=True)
    assert (tmp_path / "dpo" / "model" / "model.safetensors").read_bytes() == model


def test_pairs_that_cannot_be_are_refused_before_anything_runs(tmp_path: Path):
    for old, new, settings, message in (
        ("loss=DPO", "loss=lambda pairs: pairs.chosen.sum()", [], "must return one number for each pair"),
        ("loss=DPO", "loss=lambda pairs: pairs.chosen - pairs.ref_chosen", ["kl_coef=0"], "fails .TypeError"),
        (", loss=DPO", "", [], "gets pairs and the loss None: give DPOConfig"),
        ("beta=0.1", "beta=0.1, micro_batches=2", [], "grpo.algorithm divides the batch: leave it out of DPOConfig"),
        ("update(pairs", "update(experience", [], "which is of pairs: give it estimator.pairs_of_group"),
        ("pairs_of_group(experience", "pairs_of_group(rollout", [], "pairs_of_group needs experience, as estimator"),
        ("x", "x", ["kl_coef=0"], "DPO compares with a reference: set grpo.algorithm.kl_coef above 0"),
        ("x", "x", ["entropy_coef=0.1"], "grpo.algorithm.entropy_coef has no effect on pairs: leave it out"),
        ("return experience", "return pairs", [], "it must return the experience of which the pairs are"),
        ("x", "x", ["epochs=2"], "one update learns from the pairs of an iteration: leave epochs"),
    ):
        (tmp_path / "distill.py").write_text(PAIRS.replace(old, new))
        spec = f"grpo.dataflow={tmp_path}/distill.py:online_dpo"
        config = load_config(
            "arithmetic-grpo", [*SIZES, "grpo.algorithm.kl_coef=0.05", spec, *(f"grpo.algorithm.{s}" for s in settings)]
        )
        with pytest.raises(UserError, match=message):
            graph_of(config)


def test_the_stage_in_the_tutorial_is_that_of_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distill.py").write_text(DISTILL)
    (tmp_path / "student.yaml").write_text(files(DOCUMENT)["student.yaml"])
    config = load_config("student.yaml", ["distill.iterations=40"])
    graph = graph_of(config)
    assert graph.name == config.algorithm == "distill" and config.rl.iterations == 40
    assert [call.name for call in graph] == "actor.generate teacher.top_logprobs actor.update".split()


def test_roles_that_cannot_be_are_refused(teacher: Path, tmp_path: Path):
    for settings, message in (
        ([f"roles.actor.path={teacher}"], "roles: actor must be the name of a parameter of your dataflow, and none of"),
        ([f"roles.a-b.path={teacher}"], "roles: a-b must be the name of a parameter"),
        ([f"roles.teacher.path={teacher}", "grpo.dataflow=null"], "is for a dataflow of your own: set grpo.dataflow"),
        (["roles.teacher={}"], "roles.teacher: path is missing: name a model directory"),
        (["roles.teacher={path: t, depth: 3}"], "roles.teacher.depth is not a known key"),
        (["roles.teecher=t"], "roles.teecher=t: it is a section, write roles.teecher.path=t"),
        ([f"roles.teacher.path={teacher}", "compute.fused_loss=false"], "targets need compute.fused_loss=true"),
        ([f"roles.teacher.path={tmp_path}/none"], "roles.teacher"),
    ):
        with pytest.raises(UserError, match=message):
            main(config_of(tmp_path, "distill", *settings))
    assert not (tmp_path / "arithmetic-grpo").exists()


def test_a_teacher_of_a_built_in_task_has_its_tokens(teacher: Path, tmp_path: Path, user: Path):
    """A teacher without a tokenizer is taken at its word; one of another tokenizer is refused by name."""
    message = (
        "has another tokenizer than the actor: its token 0 is '.*', and the actor's is '.*', which the teacher reads"
    )
    with pytest.raises(UserError, match=message):
        main(config_of(tmp_path, "distill", f"roles.teacher.path={user / 'actor'}"))
    config = config_of(tmp_path, "distill", f"roles.teacher.path={teacher}")
    mesh, models = select_mesh(config)
    check_sources(config, load_task(config, models["actor"]), models["actor"], mesh)


def test_the_tutorial_lists_every_call():
    rows = re.findall(r"^\| (`[^|]+`) \|", DOCUMENT.partition("may call")[2], re.M)
    documented = {call: arguments for row in rows for call, arguments in re.findall(r"`(\w+\.\w+)\(([^)]*)\)`", row)}
    expected = {}
    for role, kind in {**ROLES, "NAME": FrozenPolicy}.items():
        for name in {name for base in kind.__mro__ for name in vars(base)}:
            if hasattr(function := getattr(kind, name), CALL):
                parameters = list(inspect.signature(function).parameters.values())[1:]
                expected[f"{role}.{name}"] = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    assert documented == expected


def test_no_frozen_role_can_have_the_name_of_another_parameter():
    assert {*OTHER_PARAMETERS} == {*ROLES, "arithmetic", "prompts", "kl_coef"}


def test_the_documented_divergence_is_that_of_jensen_and_shannon():
    scope: dict[str, Any] = {}
    exec(JENSEN_SHANNON, scope)
    p, q = (np.random.default_rng(seed).dirichlet(np.ones(9), size=5) for seed in (0, 1))
    none = jnp.zeros(5)
    absent = jnp.full((5, 1), NO_LOGPROB)  # an id that no vocabulary has
    student, teacher = (jnp.concatenate([jnp.log(x), absent], axis=1) for x in (p, q))
    tokens = LossTokens(none, none, none, None, none, student, teacher)
    mean = (p + q) / 2
    expected = (np.sum(p * np.log(p / mean), -1) + np.sum(q * np.log(q / mean), -1)) / 2
    np.testing.assert_allclose(scope["jensen_shannon"](tokens), expected, atol=1e-5)
    of_student = jax.grad(lambda x: scope["jensen_shannon"](tokens._replace(student_logprobs=x)).sum())(student)
    assert np.isfinite(of_student).all()


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ("actor.update(rollout)", "actor.update gets rollout, which has no advantages: make experience by a call"),
        ("actor.update(estimator.best_of_group(rollout, scores))", "gets experience, which has no advantages: make"),
        ("actor.update(rollout, plain)", r"loss that actor.update gets fails \(TypeError: .* 'NoneType'"),
        ("actor.update(estimator.where(best, estimator.best_of_group(rollout, scores)))", "which has no advantages"),
        (
            "actor.update(estimator.where(above, estimator.best_of_group(rollout, scores)), imitation)",
            r"the function that where gets fails .*TypeError",
        ),
        ("actor.update(rollout, None, teacher.top_logprobs(rollout, 2))", "reads targets by a loss alone: give it one"),
        (
            "actor.update(rollout, lambda tokens: tokens.entropy)",
            "gives actor.update a new function in each iteration",
        ),
        ("actor.update(rollout, whole)", r"loss that actor.update gets fails \(TypeError: .* 'NoneType'"),
        ("actor.update(rollout, flat)", "the loss .* returned shape .., but must return one number for each row"),
        (
            "actor.update(rollout, flat, teacher.top_logprobs(rollout, 2))",
            "reads targets by a loss of tokens, and gets",
        ),
        ("actor.update(rollout, imitation, teacher.top_logprobs(rollout, 0))", "gets k=0: it must be a whole number"),
        ("actor.update(rollout, imitation, teacher.top_logprobs(rollout, '8'))", "gets k='8': it must be a whole"),
    ],
)
def test_updates_that_cannot_be_are_refused_before_anything_runs(tmp_path: Path, update: str, message: str):
    lines = "rollout = actor.generate(prompts)", "scores = reward.score(rollout, prompts)", "teacher.logprobs(rollout)"
    lines = *lines, f"return rollout, {update}"
    head = [
        "from jrlhf.ppo import imitation, of_rows",
        "whole = of_rows(lambda rows: -rows.advantages * rows.logprobs)",
        "flat = of_rows(lambda rows: rows.logprobs.sum())",
        "plain = lambda t: -t.advantages * t.logprobs",
        "best = lambda e, c: e.scores > 0",
        "above = lambda e, c: e.advantages[:, 0] > 0",
        "def own(actor, teacher, reward, estimator, prompts):",
    ]
    (tmp_path / "own.py").write_text("\n".join([*head, *(f"    {line}" for line in lines)]) + "\n")
    settings = [f"grpo.dataflow={tmp_path}/own.py:own", "roles.teacher.path=t"]
    with pytest.raises(UserError, match=message):
        graph_of(load_config("arithmetic-grpo", [*SIZES, *settings]))


def test_tokens_that_the_actor_lacks_are_no_targets():
    """The teacher has 5 rows without a token, which it holds for the most likely; the student has 2 others."""
    tokens, k, mesh, clock = 14, 8, make_mesh(2, 2, 2), Clock()
    teachers, students = (ModelConfig(rows, 32, 1, 4, 2, 8, mlp=64, max_positions=16) for rows in (19, 16))
    with jax.set_mesh(mesh):
        params = init_lm(teachers, jax.random.key(5))
        table = params["embedding"].at[:tokens].multiply(20)
        params["embedding"] = table.at[tokens:19].set(60 * jnp.sign(table[:5]))
        site = Site(RolePlacement.of(mesh), Compute(), clock)
        model = Model(Architecture(teachers), jax.device_put(params, param_shardings(teachers, mesh, TRAIN)))
        sampling = SamplingConfig(max_new_tokens=6, temperature=0.7)
        whole = FrozenPolicy(model, site, sampling=sampling)
        teacher = FrozenPolicy(model, site, sampling=replace(sampling, token_limit=tokens))
        drawn = np.random.default_rng(0).integers(0, tokens, (8, 10)).astype(np.int32)
        rows, prompt, response = put_rows((drawn, np.full(8, 4, np.int32), np.full(8, 6, np.int32)), mesh)
        rollout = Rollout(rows, prompt, response, 0.0 * rows, response > 0, jnp.zeros((), jnp.int32))
        targets, every = teacher.top_logprobs(rollout, k), whole.top_logprobs(rollout, 19)
        with pytest.raises(UserError, match="top_logprobs gets k=15, and there are 14 tokens: lower it"):
            teacher.top_logprobs(rollout, 15)
        own = np.asarray(teacher.logprobs(rollout))[:, 4:]  # of drawn tokens, by the same softmax
        student = init_sharded(students, jax.random.key(0), mesh)
        compiled, optimizer = CompiledModel(Architecture(students), mesh, Compute()), optax.sgd(0.0)
        algorithm = GRPOConfig(samples=4, kl_coef=0.0)
        step = compiled.actor_step(optimizer, algorithm, 0.7, 6, loss=reverse_kl)
        experience = replace(bare_experience(rollout, config=algorithm), targets=targets)
        likeliest = compiled.score_top_logprobs(k=16, limit=None, temperature=0.7, span=6)
        theirs = jax.device_get(likeliest(student, rollout.tokens, rollout.lengths, rollout.prompt_lengths))
        _, metrics = step(TrainState.create(student, optimizer), experience)
    ids, logprobs = (np.asarray(x)[:, 4:] for x in (every.ids, every.logprobs))
    assert np.mean(ids[..., 0] >= tokens) > 0.8  # without the limit
    places = np.argsort(ids >= tokens, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(np.asarray(targets.ids)[:, 4:], np.take_along_axis(ids, places, -1))
    np.testing.assert_allclose(targets.logprobs[:, 4:], np.take_along_axis(logprobs, places, -1), rtol=1e-5)
    of_drawn = np.where(ids == drawn[:, 4:, None], logprobs, 0).sum(-1)
    np.testing.assert_allclose(own, of_drawn, rtol=1e-4, atol=1e-4)
    by_id = np.zeros((8, 6, 16))
    np.put_along_axis(by_id, theirs[0][:, 4:], theirs[1][:, 4:], -1)
    p, q = np.take_along_axis(by_id, np.asarray(targets.ids)[:, 4:], -1), np.float64(targets.logprobs[:, 4:])
    expected = (np.exp(p) * (p - q) - np.exp(p) + np.exp(q)).sum(-1).mean()
    np.testing.assert_allclose(metrics["actor/loss"], expected, rtol=1e-4)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_teacher_of_a_larger_vocabulary_writes_tokens_of_the_actor(tmp_path: Path):
    config = ModelConfig(19, 32, 1, 4, 2, 8, mlp=64, max_positions=16)
    params = init_lm(config, jax.random.key(5))
    params["embedding"] = params["embedding"].at[14:19].multiply(500)
    export_hf(params, config, tmp_path / "teacher", eos_ids=(1,), pad_id=0)
    source = DISTILL.replace("= actor.generate(prompts)", "= teacher.generate(prompts)\n    actor.generate(prompts)")
    settings = ["stages=[sft, mine]", "grpo=null", f"mine.dataflow={tmp_path}/mine.py:distill", "rewards=[]"]
    settings += ["mine.rollout_batch=32", "mine.iterations=1", "mine.algorithm={samples: 4, kl_coef: 0}"]
    settings += [f"roles.teacher.path={tmp_path}/teacher", f"run_dir={tmp_path}", "name=mine"]
    (tmp_path / "mine.py").write_text(source)
    main(load_config("arithmetic-grpo", [*(size for size in SIZES if "grpo" not in size), *settings]))
    (record,) = stage_of(tmp_path / "mine", "mine")
    assert np.isfinite(record["actor/loss"]) and record["actor/grad_norm"] > 0
    texts = [
        sample["response"] for sample in read_jsonl(tmp_path / "mine" / "samples.jsonl") if sample["stage"] == "mine"
    ]
    assert texts and any(texts)


def test_a_loss_has_the_gradient_of_the_entropy():
    mesh, config = make_mesh(2, 2, 2), ModelConfig(14, 32, 1, 4, 2, 8, mlp=64, max_positions=16)
    with jax.set_mesh(mesh):
        params = init_sharded(config, jax.random.key(0), mesh)
        model = CompiledModel(Architecture(config), mesh, Compute())
        optimizer, algorithm = optax.sgd(1.0), GRPOConfig(samples=4, kl_coef=0.0)
        step = model.actor_step(optimizer, algorithm, 1.0, 4, loss=lambda tokens: -tokens.entropy)
        tokens, lengths = put_rows((np.arange(80, dtype=np.int32).reshape(8, 10) % 14, np.full(8, 4, np.int32)), mesh)
        rollout = Rollout(tokens, lengths, lengths, 0.0 * tokens, lengths > 0, jnp.zeros((), jnp.int32))
        _, metrics = step(TrainState.create(params, optimizer), bare_experience(rollout, config=algorithm))
    assert metrics["actor/loss"] < 0 and metrics["actor/grad_norm"] > 1e-3
