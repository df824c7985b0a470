"""A dataflow of the user's own in place of an algorithm's: its graph, what it learns from, and what is refused."""

import shutil
import sys

import jax
import numpy as np
import pytest

from jrlhf.algorithms.registry import graph_of
from jrlhf.config import Config, load_config
from jrlhf.config.check import validate
from jrlhf.config.parse import build
from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.models import ModelConfig
from jrlhf.train import main
from tests.support.runs import stage_of

HEAD = "import jax.numpy as jnp\nfrom jrlhf.algorithms import policy_logprobs\n"
ADVANTAGES = """
def above_the_others(experience, config):
    scores = experience.scores.reshape(-1, config.samples)
    others = [jnp.median(jnp.delete(scores, sample, axis=1), axis=1) for sample in range(config.samples)]
    return (scores - jnp.stack(others, axis=1)).reshape(-1)
"""
SIGNATURE = "def own(actor, reference, reward, estimator, prompts, kl_coef):"
BODY = """
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = policy_logprobs(actor, reference, rollout)
    experience = estimator.custom_experience(above_the_others, rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)
"""
OWN = HEAD + ADVANTAGES + SIGNATURE + BODY
CALLS = "actor.generate reward.score actor.logprobs reference.logprobs estimator.custom_experience actor.update".split()


@pytest.fixture
def config_of(tmp_path):
    """A config whose dataflow is `own` of a file with this source."""

    def make(source: str, stage: str = "grpo", spec: str | None = None, **sections) -> Config:
        (tmp_path / "mine.py").write_text(source)
        section = sections.pop(stage, {}) | {"dataflow": spec or f"{tmp_path}/mine.py:own"}
        own = {"stages": ["sft", stage], stage: section, "rewards": [{"function": "exact_match"}]}
        return build(Config, own | sections)

    return make


def test_a_stage_of_its_name_has_the_roles_of_grpo(config_of):
    config = config_of(OWN, stage="mine", mine={"algorithm": {"samples": 4}})
    graph = graph_of(config)
    assert [call.name for call in graph] == CALLS and graph.name == config.algorithm == "mine"
    with pytest.raises(UserError, match="^mine.dataflow=.* has the parameter critic, and stage mine gives actor, refe"):
        graph_of(config_of(OWN.replace("prompts, kl_coef):", "prompts, kl_coef, critic):"), stage="mine"))


def test_its_graph_is_that_of_its_calls(config_of):
    graph = graph_of(config_of(OWN))
    assert [call.name for call in graph] == CALLS and graph.name == "grpo"
    call = graph["estimator.custom_experience"]
    assert (call.kind, call.inputs) == ("compute", ("rollout", "scores", "old", "ref", "kl_coef"))
    without = graph_of(config_of(OWN, grpo={"algorithm": {"kl_coef": 0.0}}))
    assert [call.name for call in without] == [name for name in CALLS if name != "reference.logprobs"]
    changed = OWN.replace("kl_coef)\n    return", "kl_coef, actor.generate_greedy(prompts))\n    return")
    assert "actor.generate_greedy" in [call.name for call in graph_of(config_of(changed))]
    aged = OWN.replace("return (scores", "scores += experience.versions.sum()\n    return (scores")
    asynchronous = {"asynchronous": {"staleness": 1}, "algorithm": {"kl_coef": 0.0}}
    assert "actor.update" in [call.name for call in graph_of(config_of(aged, grpo=asynchronous))]
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):  # as when a stage of a run begins
        assert [call.name for call in graph_of(config_of(OWN))] == CALLS


REFUSED = [
    (
        OWN,
        {"spec": "nowhere.py:own"},
        r"grpo.dataflow=nowhere.py:own: there is no file .*nowhere.py: name one that",
    ),
    (OWN, {"spec": "median"}, "grpo.dataflow=median: 'median' must be package.module:function or path/file.py"),
    (OWN.replace("def own", "def other"), {}, "there is no 'own' in .*mine.py: it has jnp, .*other$"),
    ("own = 3", {}, "mine.py:own is of type int: name a function"),
    (HEAD + "def own(:", {}, "cannot be imported: .*mine.py, line 3: invalid syntax"),
    (OWN.replace("actor, ref", "critic, ref"), {}, "has the parameter critic, and stage grpo gives actor, reference"),
    (OWN.replace("kl_coef):", "**roles):"), {}, r"has the parameter \*\*roles, and stage grpo gives"),
    (OWN.replace("reward.score(", "reward.scores("), {}, "reward has no call scores: its calls are score, score_"),
    (OWN.replace("scores, old", "scores / 2, old"), {}, r"cannot be traced \(TypeError: .* at .*mine.py:12\): let"),
    (OWN.replace("(rollout, p", "(rollout.tokens, p"), {}, "AttributeError: rollout has no tokens while the algor"),
    (
        OWN.replace("return experience, ", "return "),
        {},
        "it must return the experience, or the rollout, and the metrics",
    ),
    (OWN.replace(", actor.update(experience)", ", scores"), {}, "does not call actor.update, which stage grpo needs"),
    (OWN.replace("(experience)", "(experience) | actor.update(experience)"), {}, "calls actor.update more than once"),
    (OWN.replace("old, ref = policy_logprobs(actor, reference, rollout)", "old = ref = actor.logprobs(rollout)"),)
    + ({}, "does not call reference.logprobs, and grpo.algorithm.kl_coef=0.04: call it, or set that to 0"),
    (OWN.replace("update(experience)", "update(experience, clip=3)"), {}, "unexpected keyword argument 'clip'"),
    (OWN.replace("update(experience)", "update(experience, loss=3)"), {}, "gets the loss 3: it must be a function of"),
    (
        OWN.replace("update(experience)", "update(experience, lambda tokens: tokens.logprobs.sum())"),
        {},
        r"fails \(ValueError: the loss <lambda> returned shape \(\), but must return one number for each token, \(2,\)",
    ),
    (
        OWN.replace("update(experience)", "update(experience, lambda tokens: tokens.target_logprobs.sum(-1))"),
        {},
        r"the loss that actor.update gets fails \(AttributeError: 'NoneType' .* at .*mine.py:13\)$",
    ),
    (OWN, {"roles": {"teacher": {"path": "t"}}}, "never calls teacher, which roles.teacher names: give it"),
    (OWN.replace("generate(prompts)", "generate()"), {}, r"missing a required argument: 'prompts'"),
    (OWN.replace(".reshape(-1)\n", ".sum(0)\n"), {}, r"custom_experience gets fails .*advantages has shape \(8,\)"),
    (OWN.replace("return (sco", "return 1 / (ros"), {}, r"tokens \(NameError: .*'rosres'.* at .*mine.py:7\)$"),
    (
        OWN.replace("update(experience)", "update(estimator.where(above_the_others, experience))"),
        {},
        r"the function that where gets fails .* the mask of rows is float32\[128\]: it must be bool",
    ),
    (
        OWN.replace("update(experience)", "update(estimator.where(above_the_others, rollout))"),
        {},
        "where needs experience, as estimator.group_experience returns it",
    ),
    (
        OWN.replace("experience(above_the_others", "experience(lambda e, c: e.scores"),
        {},
        "gives estimator.custom_experience a new function in each iteration",
    ),
    (OWN, {"stage": "ppo"}, "does not call critic.update, which stage ppo needs"),
    (OWN, {"stage": "dapo"}, "has the parameter prompts, and stage dapo gives actor, reference, reward, pool"),
]


def test_what_the_section_cannot_serve_is_refused(config_of):
    for source, settings, message in REFUSED:
        with pytest.raises(UserError, match=message):
            graph_of(config_of(source, **settings))


def test_shared_passes_have_no_place_for_it(config_of):
    rewards = [{"name": "right", "function": "exact_match"}]
    config = config_of(OWN, compute={"shared_passes": True}, rewards=rewards)
    with pytest.raises(
        UserError, match="compute.shared_passes has a dataflow of its own in place of grpo.dataflow=.*own"
    ):
        validate(config, 1, dict.fromkeys(("actor", "reference"), ModelConfig(1024, 128, 4, 4, 2, 32, 384, 64)))


@pytest.mark.proof("runs")
@pytest.mark.usefixtures("quick_compilation")
def test_a_run_learns_from_its_advantages_and_is_resumed_with_it_alone(tmp_path):
    """The experience is looked at as the run made it; every text has a score of its own, so groups differ."""
    (tmp_path / "mine.py").write_text(
        OWN.replace("    return experience, ", "    KEPT.append(experience)\n    return experience, ") + "KEPT = []\n"
    )
    (tmp_path / "judge.py").write_text(
        "def judge(completions):\n    return [sum(map(ord, text)) % 7 for text in completions]\n"
    )
    sizes = ["device.simulated=8", "mesh.fsdp=2", "mesh.tensor=4", "model.layers=1", "data.heldout_rows=16"]
    sizes += ["sft.steps=5", "sft.batch=32", "sft.save_every=5", "sft.eval_every=5", "evaluation.prompts=16"]
    sizes += ["grpo.iterations=2", "grpo.rollout_batch=32", "grpo.save_every=1", "grpo.algorithm.samples=4"]
    sizes += [
        f"rewards=[{{name: judge, function: {tmp_path}/judge.py:judge}}]",
        f"grpo.dataflow={tmp_path}/mine.py:own",
    ]
    config = load_config("arithmetic-grpo", [*sizes, f"run_dir={tmp_path}", "name=own"])
    main(config)
    experiences, largest = sys.modules["user_mine"].KEPT[-2:], []
    for experience in experiences:
        scores = np.asarray(experience.scores, np.float64).reshape(-1, 4)
        others = np.stack([np.median(np.delete(scores, index, axis=1), axis=1) for index in range(4)], axis=1)
        expected = np.where(experience.response_mask, (scores - others).reshape(-1, 1), 0)
        np.testing.assert_allclose(experience.advantages, expected, atol=1e-6)
        assert len(np.unique(expected)) > 3
        largest.append(expected[np.asarray(experience.response_mask)].max())
    records = stage_of(tmp_path / "own", "grpo")
    assert [record["critic/advantages/max"] for record in records] == pytest.approx(largest)

    model = (tmp_path / "own" / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "own" / "checkpoints" / "grpo" / "2")
    shutil.rmtree(tmp_path / "own" / "model")
    source = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(source.replace("jnp.median", "jnp.mean"))
    with pytest.raises(UserError, match="the checkpoint of stage grpo was made with another dataflow"):
        main(config, resume=True)
    (tmp_path / "mine.py").write_text(source)
    main(config, resume=True)
    assert (tmp_path / "own" / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_stage_of_ones_own_runs_and_resumes_under_its_name(tmp_path, config_of, capsys):
    section = {"iterations": 3, "rollout_batch": 32, "save_every": 1, "algorithm": {"samples": 4, "kl_coef": 0.01}}
    small = {"name": "own", "run_dir": str(tmp_path), "evaluation": {"prompts": 16}, "validation": {"every": 2}}
    small |= {"data": {"source": "arithmetic", "heldout_rows": 16, "terms": 2, "max_prompt": 6, "max_response": 4}}
    small |= {"sft": {"steps": 2, "batch": 32}, "checkpoints": {"best": "val-core/all/score/mean@1"}}
    small |= {"device": {"platform": "cpu", "simulated": 8}, "model": {"vocab_size": 14, "embed": 64, "layers": 1}}
    config = config_of(OWN, "mine", mine=section, **small)
    main(config)
    assert "mine 3/3" in capsys.readouterr().out
    run = tmp_path / "own"
    assert [record["step"] for record in stage_of(run, "mine")] == [1, 2, 3] and (run / "checkpoints/mine/3").is_dir()
    assert load_config(str(run / "config.yaml")) == config
    assert "maximises: the score" in (report := (run / "report.html").read_text()) and "What mine " in report
    card = (run / "model" / "README.md").read_text()
    assert "trained with SFT and mine" in card and "- sft\n- mine\n" in card
    model = (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints/mine/3")
    shutil.rmtree(run / "model")
    main(load_config(str(run / "config.yaml")), resume=True)
    assert (run / "model" / "model.safetensors").read_bytes() == model
    longer = load_config(str(run / "config.yaml"), ["mine.iterations=4"])
    main(longer, resume=True)
    assert len(stage_of(run, "mine")) == 4
