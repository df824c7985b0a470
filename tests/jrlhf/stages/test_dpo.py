"""DPO as a stage: what a run leaves, against an independent computation from its exported weights; adapters; resume."""

import json
import math
import shutil
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf.algorithms.pair_actor import add_reference
from jrlhf.algorithms.registry import stage_graph
from jrlhf.config import Config, load_config
from jrlhf.config.parse import build
from jrlhf.data.batches import pad_rows, put_rows
from jrlhf.errors import UserError
from jrlhf.models.hf import load_hf
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.model import Architecture
from jrlhf.run.metrics import read_metrics
from jrlhf.stages import dpo
from jrlhf.stages.dpo import heldout_metrics
from jrlhf.stages.setup import compute_of, load_task, select_mesh
from jrlhf.train import main
from tests.support.runs import assert_same_run, resumed

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = str(Path(__file__).parents[1] / "tiny.yaml")
STAGE = {"steps": 4, "batch": 8, "learning_rate": 0.01, "warmup": 0, "eval_every": 2, "save_every": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, settings):
    """(run directory, summary) of DPO on a dataset's pairs. Held-out pairs are on devices only while they are read."""
    directory, references = tmp_path_factory.mktemp("runs"), list[weakref.ref]()
    config = settings(name="pairs", run_dir=str(directory), stages=["dpo"], dpo=STAGE, rewards=[])

    def add(*arguments):
        batch = add_reference(*arguments)
        references.append(weakref.ref(batch.ref_chosen))
        return batch

    def evaluate(*arguments):
        assert references and all(reference() is None for reference in references)
        return heldout_metrics(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpo, "add_reference", add)
        patch.setattr(dpo, "heldout_metrics", evaluate)
        return directory / "pairs", main(build(Config, config))


@pytest.mark.full
def test_a_run_leaves_what_is_promised(finished, user):
    path, summary = finished
    records = read_metrics(path)
    assert {record["stage"] for record in records} == {"dpo"} and len(records) == 4
    assert json.loads((path / "summary.json").read_text()) == summary
    assert summary["dpo_accuracy"] == records[-1]["dpo/eval_accuracy"]
    assert [("dpo/eval_loss" in record) for record in records] == [True, True, False, True]
    assert all(record["perf/compilations"] == 0 for record in records[2:])
    start, end = (load_file(directory / "model.safetensors") for directory in (user / "actor", path / "model"))
    assert start.keys() == end.keys() and all(not np.array_equal(start[name], end[name]) for name in start)
    shown = (path / "report.html").read_text()
    assert "Implicit rewards" in shown and "Log-probability" in shown and "the policy prefers the better of" in shown

    first, *_, last = records
    assert math.isclose(first["dpo/loss"], math.log(2), rel_tol=1e-6)
    # Score and training layouts sum in another order, so rewards are 0 but for rounding.
    assert abs(first["rewards/chosen"]) < 1e-4 and abs(first["rewards/rejected"]) < 1e-4
    assert last["rewards/margins"] > 0.1 and last["dpo/loss"] < first["dpo/loss"]


@pytest.mark.full
def test_held_out_figures_are_those_of_the_exported_weights(finished, user):
    """Loss, margin and accuracy once more, from the directories, in float64."""
    path, _ = finished
    config = load_config(str(path / "config.yaml"))
    mesh, models = select_mesh(config)
    task = load_task(config, models["actor"])
    assert task.pairs is not None
    _, pairs = task.pairs(None)  # type: ignore[arg-type]
    assert len(pairs) == 8
    score = CompiledModel(Architecture(models["actor"]), mesh, compute_of(config.compute)).score_logprobs(
        temperature=1.0
    )

    def sums(directory, sequences):
        with jax.set_mesh(mesh):
            params = load_hf(directory, mesh)[1]
            tokens, lengths = pad_rows(sequences, config.data.max_prompt + config.data.max_response)
            logprobs = np.asarray(score(params, *put_rows((tokens, lengths), mesh))[0], np.float64)
        return [row[start:end].sum() for row, start, end in zip(logprobs, pairs.prompt_lengths, lengths, strict=True)]

    chosen, rejected = (
        np.subtract(sums(path / "model", side), sums(user / "actor", side)) for side in (pairs.chosen, pairs.rejected)
    )
    margin = config.dpo.algorithm.beta * (chosen - rejected)
    last = read_metrics(path)[-1]
    assert math.isclose(last["dpo/eval_margin"], margin.mean(), rel_tol=1e-3)
    assert math.isclose(last["dpo/eval_loss"], np.log1p(np.exp(-margin)).mean(), rel_tol=1e-3)
    assert last["dpo/eval_accuracy"] == np.mean(margin > 0) and last["dpo/eval_pairs"] == 8


def test_a_prompt_ends_where_both_answers_begin(settings):
    config = build(Config, settings(stages=["dpo"], rewards=[]))
    task = load_task(config, select_mesh(config)[1]["actor"])
    assert task.pairs is not None
    pairs, _ = task.pairs(None)  # type: ignore[arg-type]
    for chosen, rejected, length in zip(pairs.chosen, pairs.rejected, pairs.prompt_lengths, strict=True):
        assert chosen[:length] == rejected[:length]
        assert task.tokenizer.decode(chosen[:length]).endswith("assistant\n")
        assert task.tokenizer.decode(rejected[length:]).startswith("I do not know")


@pytest.mark.proof("runs")
def test_adapters_learn_and_the_base_is_the_reference(tmp_path, settings, make_model):
    actor = make_model(tmp_path / "actor", seed=3, layers=1)
    sections = {"model": {"path": str(actor)}, "lora": {"rank": 4}, "rewards": [], "stages": ["dpo"]}
    algorithm = {"loss": "ipo", "beta": 0.5, "micro_batches": 1}
    stage = STAGE | {"steps": 3, "algorithm": algorithm}
    main(build(Config, settings(name="adapted", run_dir=str(tmp_path), dpo=stage, **sections)))
    first, *_, last = read_metrics(tmp_path / "adapted")
    assert math.isclose(first["dpo/loss"], 1 / (2 * 0.5) ** 2, rel_tol=1e-4)  # (0 - 1 / (2 beta))^2
    assert abs(first["rewards/margins"]) < 1e-4 and last["rewards/margins"] > 0.1
    start, merged = (
        load_file(directory / "model.safetensors") for directory in (actor, tmp_path / "adapted" / "model")
    )
    assert np.array_equal(start["model.embed_tokens.weight"], merged["model.embed_tokens.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(start[name], merged[name])


def test_a_step_is_a_dataflow_of_two_calls():
    graph = stage_graph(Config(), "dpo")
    calls = [(call.name, call.inputs, call.outputs) for call in graph]
    assert calls == [("reference.logprobs", ("pairs",), ("ref",)), ("actor.update", ("pairs", "ref"), ("metrics",))]


BAD = [
    ({"stages": ["dpo", "ppo"]}, "keep dpo or ppo"),
    ({"stages": ["dpo"], "dpo": {"batch": 12}}, "dpo.batch=12 does not divide"),
    ({"stages": ["dpo"], "data": {"preferences": {}}}, "stage dpo learns from data.preferences"),
]


def test_bad_input_is_one_sentence(settings):
    for sections, message in BAD:
        with pytest.raises(UserError, match=message) as error:
            config = build(Config, settings(rewards=[], **sections))
            load_task(config, select_mesh(config)[1]["actor"])
        assert "\n" not in str(error.value), sections


@pytest.mark.proof("runs")
def test_a_run_on_sampled_pairs_is_resumed_in_the_same_bits(tmp_path, capsys):
    """On the built-in task: the annotator's pairs are sampled again from the same frozen policy."""
    stage = ["dpo.steps=4", "dpo.batch=8", "dpo.eval_every=2", "dpo.save_every=2", "dpo.learning_rate=1e-3"]
    pairs = "data.annotator={prompts: 24, heldout_prompts: 16, samples_per_prompt: 2}"
    settings = [f"run_dir={tmp_path}", "stages=[sft,dpo]", pairs, "ppo=null", "sampling.batch=32", *stage]
    run, copy = tmp_path / "tiny", tmp_path / "copy"
    summary = main(load_config(TINY, settings))
    announcements = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dpo: compiling ")]
    calls = ["reference.logprobs (1 of 3)", "actor.update (2 of 3)", "dpo.evaluate (3 of 3)"]
    assert announcements == [f"dpo: compiling {call}" for call in calls]
    assert summary["held_out"]["measure"] == "gold" and "after" in summary["held_out"]
    assert summary["dpo_accuracy"] == read_metrics(run)[-1]["dpo/eval_accuracy"]
    shutil.copytree(run, copy)
    resumed(load_config(TINY, settings), 4)
    assert_same_run(run, copy, "preferences.jsonl")


def test_accuracy_is_of_the_pairs_that_can_be_told_apart():
    terms = {
        "rewards/accuracies": np.array([1.0, 0.0, 1.0, 1.0]),
        "rewards/margins": np.array([1.0, -1.0, 3.0, 1.0]),
        "dpo/loss": np.array([0.25, 1.25, 0.0, 0.5]),
    }
    every = heldout_metrics(terms, None)
    assert every == {"dpo/eval_loss": 0.5, "dpo/eval_margin": 1.0, "dpo/eval_accuracy": 0.75, "dpo/eval_pairs": 4}
    some = heldout_metrics(terms, np.array([True, True, False, False]))
    names = ("dpo/eval_accuracy", "dpo/eval_accuracy_with_close_pairs", "dpo/eval_pairs")
    assert [some[name] for name in names] == [0.5, 0.75, 2]
    none = heldout_metrics(terms, np.zeros(4, bool))
    assert "dpo/eval_accuracy" not in none and none["dpo/eval_pairs"] == 0 and np.isfinite(list(none.values())).all()
