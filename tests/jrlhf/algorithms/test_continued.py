"""Calls that a dataflow makes twice, prompts that follow a rollout, and rows of several policies."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.algorithms.registry import graph_of
from jrlhf.data.batches import Batch, other_keys, pad_rows, put_rows, row_keys
from jrlhf.data.chat import render_chat
from jrlhf.data.rendering import make_renderer
from jrlhf.data.types import Example
from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.meshes.graph import method_of
from jrlhf.meshes.plan import plan_of
from jrlhf.models import ModelConfig, export_hf, init_lm, init_sharded, make_generate
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.ppo import GRPOConfig, Rollout, Targets
from jrlhf.roles.experience import ExperienceMaker
from jrlhf.roles.following import follow
from jrlhf.roles.frozen import FrozenPolicy
from jrlhf.roles.generating import check_positions
from jrlhf.roles.model import Architecture, Compute, Model, generation_weights
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.planned_placement import place_roles
from jrlhf.roles.role import Site
from jrlhf.run.clock import Clock, calling
from jrlhf.tasks.arithmetic.task import make_tokenizer
from jrlhf.train import main
from tests.jrlhf.algorithms.test_distillation import config_of, teacher  # noqa: F401 (a fixture)
from tests.jrlhf.data.conversations import TOKENIZERS
from tests.support.runs import resumed, stage_of

LONG = "model.max_positions=64"  # three prompts and responses of the tutorial's example, in the characters of sums
EACH = "actor.generate prompts.after judge.generate prompts.after_2 actor.generate_2 reward.score"


@pytest.fixture
def revise(tmp_path: Path, teacher: Path) -> Any:  # noqa: F811
    """(settings) -> config of the tutorial's revision, with texts of characters that sums have."""

    def config(*settings: str) -> Any:
        return config_of(tmp_path, "revise", f"roles.judge.path={teacher}", LONG, *settings)

    return config


def test_a_call_that_is_made_again_has_a_name_and_a_place_of_its_own(revise):
    graph = graph_of(revise("grpo.algorithm.kl_coef=0.1"))
    assert " ".join(call.name for call in graph).startswith(EACH)
    assert graph["actor.generate_2"].inputs == ("prompts_3",) and graph["prompts.after_2"].inputs == (
        "prompts_2",
        "judge_rollout",
    )
    assert graph.continued == ((1, 1), (2, 2))
    assert graph["actor.generate_2"].method == method_of("generate_2") == "generate"
    calls = {call.name: {"devices": "0-3", "layout": "train", "fsdp": 4} for call in graph if call.kind != "compute"}
    calls["actor.generate"] = {"devices": "0-3", "layout": "generate", "tensor": 4}
    calls["actor.generate_2"] = {"devices": "4-7", "layout": "generate", "tensor": 2, "data": 2}
    placement = place_roles(plan_of({"calls": calls}), graph, jax.devices())["actor"]
    names = [placement.begin_call("generate") for _ in range(2)]
    assert names == ["generate", "generate_2"] and placement.begin_call("logprobs") == "logprobs"
    shapes = []
    for name in names:
        with calling(f"actor.{name}"):
            mesh = placement["generate"].mesh
            shapes.append((mesh.devices.flat[0].id, *mesh.devices.shape))
    assert shapes == [(0, 1, 1, 4), (4, 2, 1, 2)]
    placement.begun.clear()
    assert placement.begin_call("generate") == "generate"


def test_prompts_follow_a_rollout_by_its_ids_with_keys_of_their_own():
    tokenizer, mesh = make_tokenizer(), make_mesh(8)
    prompts, lengths = np.zeros((4, 3), np.int32), np.array([1, 2, 3, 3], np.int32)
    keys = row_keys(jax.random.key(0), 8, mesh)
    rows = np.arange(40, dtype=np.int32).reshape(8, 5) % 10 + 2
    ends, drawn = np.repeat(lengths, 2), np.array([0, 1, 2, 1, 2, 0, 1, 2], np.int32)
    with jax.set_mesh(mesh):
        tokens, starts, responses = put_rows((rows, ends, drawn), mesh)
        rollout = Rollout(tokens, starts, responses, 0.0 * tokens, starts > 0, jnp.zeros((), jnp.int32))
        before = Batch((prompts, lengths, keys), [Example(prompt="p")] * 8, ["p"] * 8, 5)  # type: ignore[arg-type]
        after = follow(tokenizer, mesh, before, rollout, "+1")
        others = follow(tokenizer, mesh, before, rollout, "=")
    added = tokenizer.encode("+1")
    assert after.samples == 1 and before.samples == 2 and after.step == 5 and after.examples == before.examples
    got, counts = (np.asarray(x) for x in after.arrays[:2])
    assert got.shape == (8, 7)
    for row in range(8):
        want = [*rows[row, : ends[row] + drawn[row]], *added]
        assert got[row, : counts[row]].tolist() == want and not got[row, counts[row] :].any()
        answer = tokenizer.decode(rows[row, ends[row] : ends[row] + drawn[row]].tolist(), special=True)
        assert after.texts[row] == f"p{answer}+1"
    every = [np.asarray(jax.random.key_data(x)) for x in (keys, after.arrays[2], others.arrays[2])]
    assert len(np.unique(np.concatenate(every), axis=0)) == 24
    np.testing.assert_array_equal(every[1], jax.random.key_data(other_keys(keys, "+1")))


def test_messages_that_follow_are_written_by_the_chat_template_after_a_whole_turn():
    tokenizer, mesh = TOKENIZERS["qwen2.5"], make_mesh(2, devices=jax.devices()[:2])
    asked, more = {"role": "user", "content": "4 + 3"}, [{"role": "user", "content": "Why?"}]
    prompt = make_renderer(tokenizer).ids([asked])
    answers = [*tokenizer.encode("7."), tokenizer.eos_ids[0]], tokenizer.encode("seven")[:2]  # the second is cut off
    rows, ends = pad_rows([[*prompt, *answer] for answer in answers], len(prompt) + 4)
    with jax.set_mesh(mesh):
        tokens, lengths, starts = put_rows((rows, ends, np.full(2, len(prompt), np.int32)), mesh)
        rollout = Rollout(tokens, starts, lengths - starts, 0.0 * tokens, starts > 0, jnp.zeros((), jnp.int32))
        keys = row_keys(jax.random.key(0), 2, mesh)
        before = Batch((starts, starts, keys), [Example(prompt=(asked,))] * 2, ["p"] * 2, 0)
        after = follow(tokenizer, mesh, before, rollout, more)
    got, counts = (np.asarray(x) for x in after.arrays[:2])
    for row, text in enumerate(("7.", tokenizer.decode(answers[1]))):
        whole = [asked, {"role": "assistant", "content": text}, *more]
        written = render_chat(tokenizer, whole, add_generation_prompt=True)
        assert tokenizer.decode(got[row, : counts[row]].tolist(), special=True) == written
        assert got[row, : ends[row]].tolist() == rows[row, : ends[row]].tolist()
        assert after.texts[row].startswith(f"p{text}") and "Why?" in after.texts[row]


def test_prompts_without_room_for_a_response_are_refused():
    model = Architecture(ModelConfig(14, 32, 1, 4, 2, 8, mlp=64, max_positions=16))
    batch = Batch((np.zeros((2, 13)), None, None), (), (), 0)  # type: ignore[arg-type]
    check_positions("judge", model, batch, SamplingConfig(max_new_tokens=3))
    with pytest.raises(UserError, match="judge generates after prompts of 13 tokens, and with data.max_response=4"):
        check_positions("judge", model, batch, SamplingConfig(max_new_tokens=4))


def test_rows_are_chosen_by_their_source_or_evenly():
    mesh = make_mesh(2, 4)
    estimator = ExperienceMaker(GRPOConfig(), Clock(), RolePlacement.of(mesh))
    sources = ["b", "a", "a", "c", "b", "c", "a", "b"]
    batch = Batch((), [Example(prompt="p", source=name) for name in sources], (), 0)  # type: ignore[arg-type]

    def targets(value: float) -> Targets:
        ids, logprobs = np.full((8, 5, 2), value, np.int32), np.full((8, 5, 2), -value, np.float32)
        return Targets(*put_rows((ids, logprobs), mesh))

    def rollout(value: int) -> Rollout:
        tokens, numbers = put_rows((np.full((8, 5), value, np.int32), np.full(8, value, np.int32)), mesh)
        return Rollout(tokens, numbers, numbers, 1.0 * tokens, numbers > 0, jnp.zeros((), jnp.int32))

    with jax.set_mesh(mesh):
        chosen = estimator.by_source(batch, {"c": targets(3), "a": targets(1), "b": targets(2)})
        mixed = [estimator.mix(rollout(0), rollout(1), share) for share in (0.5, 0.25, 0.0, 1.0)]
        with pytest.raises(UserError, match=r"mix gets rollouts of the shapes \[8, 5\] and \[8, 4\]: both must have"):
            estimator.mix(rollout(0), replace(rollout(1), tokens=rollout(1).tokens[:, 1:]), 0.5)
        with pytest.raises(UserError, match="estimator.by_source gets values for a, b, and not for c"):
            estimator.by_source(batch, {"a": targets(1), "b": targets(2)})
    of_rows = np.array([2, 1, 1, 3, 2, 3, 1, 2])
    np.testing.assert_array_equal(chosen.ids, np.broadcast_to(of_rows[:, None, None], (8, 5, 2)))
    np.testing.assert_array_equal(chosen.logprobs, -np.asarray(chosen.ids))
    rows = [np.asarray(one.response_lengths).tolist() for one in mixed]
    assert rows == [[0, 1] * 4, [0, 0, 0, 1] * 2, [0] * 8, [1] * 8]
    np.testing.assert_array_equal(np.asarray(mixed[0].tokens)[1::2], 1)
    np.testing.assert_array_equal(mixed[0].finished, np.array([False, True] * 4))


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_revised_answer_is_learned_from_on_any_devices_and_resumed_to_the_same_bits(revise, tmp_path: Path):
    (tmp_path / "reward.py").write_text("def length(solution_str): return len(solution_str)")
    scored = f"rewards=[{{function: {tmp_path}/reward.py:length}}]"
    losses = []
    for name, *more in (
        ("one", "plan=colocate"),
        ("two", "plan=split", "compute.score_rows=16", "rollout.chunk=2"),
        ("three", "lora.rank=2", "plan=colocate"),
    ):
        config = revise(scored, f"name={name}", "grpo.algorithm.kl_coef=0.1", *more)
        main(config)
        records = stage_of(tmp_path / name, "grpo")
        assert all(record["actor/grad_norm"] > 0 for record in records)
        # Prompts of the last answers: 6 + 4 of the draft, + or =, 4 of the judge, and one more character, at most.
        assert all(12 < record["prompt_length/mean"] <= 16 for record in records)
        losses.append([record["critic/score/mean"] for record in records])
        samples = [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        shown = [sample["prompt"] for sample in samples if sample["stage"] == "grpo"]
        assert shown and all(re.fullmatch(r"\d\d\+\d\d=(.{0,5})\+.{0,5}=", text) for text in shown)
        model = next(tmp_path / name / kind for kind in ("model", "adapter") if (tmp_path / name / kind).exists())
        before = {file.name: file.read_bytes() for file in model.glob("*.safetensors")}
        resumed(config, 3)
        assert before == {file.name: file.read_bytes() for file in model.glob("*.safetensors")}
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


def test_only_responses_to_one_prompt_are_compared_in_pairs(teacher: Path, tmp_path: Path):  # noqa: F811
    own = [
        "from jrlhf.ppo import DPOConfig",
        "LOSS = DPOConfig()",
        "def own(actor, judge, reference, reward, estimator, prompts, kl_coef):",
        "    first = actor.generate(prompts)",
        "    asked = prompts.after(first, '=')",
        "    second = judge.generate(asked)",
        "    scores, ref = reward.score(second, asked), reference.logprobs(DRAWN)",
        "    experience = estimator.group_experience(DRAWN, scores, None, ref, kl_coef)",
        "    return experience, actor.update(estimator.pairs_of_group(experience), loss=LOSS)",
    ]
    settings = [f"roles.judge.path={teacher}", "grpo.algorithm.kl_coef=0.1", "grpo.algorithm.old_logprobs=rollout"]
    for drawn, refused in (("first", False), ("second", True), ("estimator.mix(first, second, 0.5)", True)):
        config = config_of(tmp_path, "own", *settings)
        (tmp_path / "distill.py").write_text("\n".join(own).replace("DRAWN", drawn))
        if refused:
            with pytest.raises(
                UserError, match="pairs_of_group needs responses to one prompt, and these follow others"
            ):
                graph_of(config)
        else:
            assert "estimator.pairs_of_group" in [call.name for call in graph_of(config)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("return first, actor.update(scores, loss=imitation)", "actor.update gets scores, which is no rollout, exper"),
        (
            "return first, actor.update(prompts, loss=imitation)",
            "actor.update gets prompts, which is no rollout, exper",
        ),
        ("return second, actor.update(second, reverse_kl, judge.top_logprobs(first, 2))", "belongs to another rollout"),
        ("return first, actor.update(estimator.by_source(prompts, {'a': first, 'b': first}))", "has no advantages"),
        (
            "e = estimator.group_experience(first, scores, actor.logprobs(second), None, 0.0)\n    "
            "return e, actor.update(e)",
            "estimator.group_experience gets old, which belongs to another rollout than rollout",
        ),
        (
            "third = prompts.after(second, '+')\n    return first, actor.update(first, imitation)",
            "no rollout of prompts",
        ),
        (
            "e = estimator.group_experience(first, reward.score(second, asked), None, None, 0.0)\n    "
            "return e, actor.update(e)",
            "scores other responses than it learns from, and grpo.scores.length_penalty would look at the lengths",
        ),
    ],
)
def test_values_of_another_rollout_are_refused(lines: str, message: str, teacher: Path, tmp_path: Path):  # noqa: F811
    head = [
        "from jrlhf.ppo import imitation, reverse_kl",
        "def own(actor, judge, reward, estimator, prompts):",
        "    first = actor.generate(prompts)",
        "    asked = prompts.after(first, '=')",
        "    second = judge.generate(asked)",
        "" if "reward.score(" in lines else "    scores = reward.score(first, prompts)",
        f"    {lines}",
    ]
    config = config_of(tmp_path, "own", f"roles.judge.path={teacher}", "grpo.scores.length_penalty=0.1")
    (tmp_path / "distill.py").write_text("\n".join(head))
    with pytest.raises(UserError, match=message):
        graph_of(config)


def test_a_frozen_policy_generates_what_its_weights_say_on_one_device():
    """On one device the clock does not wait for calls, as on accelerators."""
    mesh, config = make_mesh(devices=jax.devices()[:1]), ModelConfig(14, 32, 1, 4, 2, 8, mlp=64, max_positions=16)
    sampling = SamplingConfig(max_new_tokens=4, stop_ids=(1,))
    with jax.set_mesh(mesh):
        model = Model(Architecture(config), init_sharded(config, jax.random.key(0), mesh))
        placement = replace(RolePlacement.of(mesh), role="judge")
        judge = FrozenPolicy(model, Site(placement, Compute(), Clock()), sampling=sampling)
        keys = row_keys(jax.random.key(1), 4, mesh)
        tokens, lengths = put_rows((np.full((4, 3), 5, np.int32), np.array([3, 2, 1, 3], np.int32)), mesh)
        drawn = judge.generate(Batch((tokens, lengths, keys), (), (), 0))
        weights = generation_weights(model, mesh, Compute())
        expected = make_generate(config, mesh, sampling)(weights, tokens, lengths, other_keys(keys, "judge.generate"))
    np.testing.assert_array_equal(drawn.tokens, expected.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-6)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_frozen_policy_judges_what_is_learned(tmp_path: Path):
    model = ModelConfig(14, 32, 1, 4, 2, 8, mlp=64, max_positions=32)
    judge = export_hf(init_lm(model, jax.random.key(7)), model, tmp_path / "judge", eos_ids=(1,), pad_id=0)
    page = (Path(__file__).resolve().parents[3] / "docs" / "judges.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def judged" in block)
    config = config_of(
        tmp_path,
        "judged",
        "name=judged",
        "grpo.algorithm.kl_coef=0.1",
        f"rewards=[{{function: {tmp_path}/reward.py:digits}}]",
        f"roles.judge.path={judge}",
        LONG,
    )
    (tmp_path / "distill.py").write_text(code.replace("\\nHow good is this answer? Score: ", "="))
    (tmp_path / "reward.py").write_text("def digits(solution_str): return sum(x.isdigit() for x in solution_str)")
    main(config)
    records = stage_of(tmp_path / "judged", "grpo")
    assert all(record["actor/grad_norm"] > 0 and record["prompt_length/mean"] == 6 for record in records)
    assert all(0 < record["critic/score/mean"] < 4 for record in records)
    samples = [json.loads(line) for line in (tmp_path / "judged" / "samples.jsonl").read_text().splitlines()]
    assert {len(sample["prompt"]) for sample in samples if sample["stage"] == "grpo"} == {6}


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_share_of_the_texts_is_the_teachers_own(teacher: Path, tmp_path: Path):  # noqa: F811
    config = config_of(tmp_path, "gkd", "name=gkd", "rewards=[]", f"roles.teacher.path={teacher}")
    graph = graph_of(config)
    calls = ["actor.generate", "teacher.generate", "estimator.mix", "teacher.top_logprobs", "actor.update"]
    assert [call.name for call in graph] == calls
    main(config)
    losses = [record["actor/loss"] for record in stage_of(tmp_path / "gkd", "grpo")]
    assert losses[2] < losses[0]
    with pytest.raises(UserError, match="estimator.mix gets the share 1.5: it must be between 0 and 1"):
        (tmp_path / "distill.py").write_text(
            (tmp_path / "distill.py").read_text().replace("prompts), 0.5", "prompts), 1.5")
        )
        graph_of(config)
    two = config_of(tmp_path, "two_teachers", *(f"roles.{name}.path={teacher}" for name in ("adder", "counter")))
    assert graph_of(two)["actor.update"].inputs == ("rollout", "chosen")
