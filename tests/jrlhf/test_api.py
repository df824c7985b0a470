"""The commands as Python functions: what they return, what they leave behind, and their errors."""

import gc
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import jrlhf.api
from jrlhf.api import Policy, Run, load, plan, train
from jrlhf.config import load_config, make_config
from jrlhf.config.schema import ValidationConfig
from jrlhf.data.encode import Encoding
from jrlhf.data.types import Example
from jrlhf.errors import Preempted, UserError
from jrlhf.models import SamplingConfig
from jrlhf.roles.sampling import Sampler
from jrlhf.run.contents import CONFIG
from jrlhf.run.files import append_jsonl
from jrlhf.run.metrics import METRICS
from jrlhf.run.text import clean
from jrlhf.train import cli as train_cli
from jrlhf.train import main
from tests.support.runs import timeless

ITERATIONS = 12
TINY = {
    "stages": ["sft", "grpo"],
    "mesh": {"fsdp": -1},
    "model": {"vocab_size": 14, "embed": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": 32}
    | {"max_positions": 16},
    "data": {
        "source": "arithmetic",
        "digits": 1,
        "problems": 40,
        "heldout_rows": 8,
        "max_prompt": 4,
        "max_response": 3,
    },
    "sft": {"steps": 2, "batch": 8},
    "rewards": [{"name": "correct", "function": "exact_match"}],
    "grpo": {"iterations": ITERATIONS, "rollout_batch": 16, "save_every": 4, "algorithm": {"samples": 2}},
    "evaluation": {"prompts": 8},
}


def interrupted(run_dir: Path, number: int = signal.SIGINT, after: int = 0, **settings) -> Run:
    """Trains until a signal, by default Ctrl-C, which comes after `after` iterations of GRPO and another one."""
    metrics = run_dir / "run" / METRICS

    def interrupt():
        while not metrics.exists() or metrics.read_bytes().count(b'"grpo"') <= after:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = train(TINY, run_dir=run_dir, **settings)
    thread.join()
    return run


def refused(function, *arguments, **keywords) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments, **keywords)
    return str(caught.value)


def test_settings_in_python_are_those_of_the_command_line(tmp_path):
    written = ["run_dir=x", "seed=3", "mesh.fsdp=2", "grpo.algorithm.samples=4", "model.path=null", "stages=[grpo]"]
    settings = {"run_dir": Path("x"), "seed": np.int64(3), "mesh": {"fsdp": 2}, "stages": ("grpo",), "model.path": None}
    settings["grpo.algorithm"] = {"samples": 4}
    assert make_config("arithmetic-grpo", settings) == load_config("arithmetic-grpo", written)
    (tmp_path / "own.yaml").write_text("stages: [sft]\nmodel: {embed: 32}\n")
    of_dict = make_config({"name": "own", "stages": ["sft"], "model": {"embed": 32}}, {"sft": {"steps": 7}})
    assert of_dict == make_config(tmp_path / "own.yaml", {"sft.steps": 7})
    assert make_config({"stages": ["sft"], "model.embed": 32, "sft": {"steps": 7}, "name": "own"}) == of_dict
    assert make_config({"stages": ["grpo"], "grpo": {"actor.warmup": 4}}).rl.actor.warmup == 4
    assert make_config("qwen3-8b-lora", {"lora": None}).lora is None
    assert make_config("arithmetic-grpo", {"grpo": None}).rl == make_config({"stages": ["grpo"]}).rl  # the defaults
    assert make_config({"stages": ["sft"]}).name == "run"
    assert "did you mean grpo.rollout_batch" in refused(make_config, "arithmetic-grpo", {"grpo.rolout_batch": 3})
    assert "seed=3 is no section, it has no x" in refused(make_config, {"seed": 3}, {"seed.x": 3})
    assert "did you mean quickstart" in refused(make_config, "quickstar")


def test_a_run_is_a_table(tmp_path, monkeypatch):
    assert "holds no run" in refused(Run.open, tmp_path)
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert refused(Run.open, "mine").endswith("name a run's directory, such as runs/mine")
    shutil.rmtree("runs")
    rows = [{"stage": "sft", "step": step, "sft/loss": 1.0 / step} for step in (1, 2)]
    rows += [{"stage": "grpo", "step": step, "critic/score/mean": step / 4, "objective/kl": None} for step in (1, 2, 3)]
    append_jsonl(tmp_path / METRICS, rows)
    run = Run.open(str(tmp_path))
    assert run.metrics == rows and run.summary == {} and run.samples == []
    np.testing.assert_array_equal(run.column("critic/score/mean"), [0.25, 0.5, 0.75])
    np.testing.assert_array_equal(run.column("sft/loss", "sft"), [1.0, 0.5])
    assert np.isnan(run.column("objective/kl")).all()
    assert "has no metric entropy: it has sft/loss, critic/score/mean, objective/kl" in refused(run.column, "entropy")
    for word, metric in (("score", "critic/score/mean"), ("reward", "critic/score/mean"), ("kl", "objective/kl")):
        assert refused(run.column, word).endswith(f"has no metric {word}: did you mean {metric}")
    assert "name=[sft/loss]: it must be text" in refused(run.plot, ["sft/loss"])
    figure = run.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["critic/score/mean", "objective/kl"]
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xydata(), [[1, 0.25], [2, 0.5], [3, 0.75]])
    assert all(tick.is_integer() for tick in figure.axes[0].get_xticks())
    assert figure._repr_png_().startswith(b"\x89PNG")  # pyright: ignore[reportAttributeAccessIssue]


def test_bad_input_is_an_exception_without_words_of_the_command_line(tmp_path):
    assert len(jax.devices()) == 8
    for sentence, settings in (
        ("device.simulated=16 asks for that many CPU devices, but JAX already runs on 8", {"device.simulated": 16}),
        ("mesh", {"mesh.fsdp": 16, "sft.batch": 16}),
        ("there is no run in", {"resume": True}),
    ):
        message = refused(train, TINY, run_dir=tmp_path, **settings)
        assert sentence in message and "--" not in message
    assert "processes=3 must divide" in refused(plan, "llama3-8b-ppo", "8xh100", processes=3)
    assert "does not exist" in refused(load, tmp_path / "none")
    for sentence, function, *arguments, settings in (
        ("config=['quickstart']: it must be the name of a config", train, ["quickstart"], {}),
        ("path has no value", Run.open, None, {}),
        ("path=s3://x/m is an address: give a path on this machine", Run.open, "s3://x/m", {}),
        ("dtype=fp16: it must be one of auto, float32, bfloat16", load, tmp_path, {"dtype": "fp16"}),
        ("batch=many: it must be a whole number", load, tmp_path, {"batch": "many"}),
        ("cluster=8: it must be text", plan, "quickstart", 8, {}),
        ("proposals=few: it must be a whole number", plan, "quickstart", {"proposals": "few"}),
    ):
        assert sentence in refused(function, *arguments, **settings), sentence


def test_a_plan_is_what_the_command_prints(capsys, tmp_path):
    from jrlhf.plan import Search, cli

    names = inspect.signature(plan).parameters  # which `help` shows
    assert [*names] == ["config", "cluster", *(name for name in vars(Search()) if name != "cluster"), "settings"]
    assert names["seed"].default == 0 and names["config"].annotation
    arguments = ["--cluster", "8xh100", "--plan", "colocate"]
    assert cli(["--config", "llama3-8b-ppo", *arguments]) == 0
    planned = plan("llama3-8b-ppo", "8xh100", plan="colocate")
    assert str(planned) == capsys.readouterr().out.rstrip("\n") and planned.seconds > 0
    assert {place.devices.count for place in planned.plan.placements.values()} == {8}
    planned.save(tmp_path / "plan.yaml")
    assert "cannot be written (No such file or directory)" in refused(planned.save, tmp_path / "gone" / "plan.yaml")
    assert plan("llama3-8b-ppo", "8xh100", plan=str(tmp_path / "plan.yaml")).seconds == planned.seconds
    crowded = plan("llama3-8b-ppo", "8xh100", plan="colocate", **{"ppo.rollout_batch": 8192})
    assert "rest for actor.generate: choose " in refused(crowded.check) and str(crowded).endswith(crowded.problem)


@pytest.mark.usefixtures("quick_compilation")
def test_a_policy_answers_and_scores(make_model, tmp_path, capsys, monkeypatch):
    model = make_model(tmp_path / "actor", qkv_bias=True, layers=1)
    policy = load(model)
    question = "What is 1 plus 2?"
    turn = {"role": "user", "content": question}
    answer, same = policy.generate([question, [turn]], temperature=0.0, max_new_tokens=8)
    assert same == answer
    assert len(set(policy.generate([turn], n=8, max_new_tokens=8))) > 4 and policy.generate([]) == []
    assert "top is no setting of sampling: choose among n, seed, max_new_tokens" in refused(policy.generate, "a", top=1)
    for theirs, ours in {
        "max_tokens": "max_new_tokens",
        "num_return_sequences": "n",
        "do_sample": "temperature=0",
    }.items():
        assert f"{theirs} is no setting of sampling: write {ours}" in refused(policy.generate, "a", **{theirs: 1})
    assert "temperature=-1" in refused(policy.generate, "a", temperature=-1)
    for sentence, prompts, settings in (
        ("n=1.5: it must be a whole number", "a", {"n": 1.5}),
        ("temperature=hot: it must be a finite number", "a", {"temperature": "hot"}),
        ("prompt None is no text", None, {}),
        ("is no text, and no conversation", [{"rol": "user"}], {}),
        ("prompt 2 has 241 tokens, and with max_new_tokens=8 the model takes", ["a", "a " * 200], {}),
    ):
        assert sentence in refused(policy.generate, prompts, **{"max_new_tokens": 8, **settings}), sentence
    assert "prompt None is no text" in refused(policy.logprobs, None)
    assert "temperature=0.0: it must be above 0" in refused(policy.logprobs, "a", temperature=0.0)
    assert repr(policy) == f"Policy('{model}')"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'a ' * 200}\n{question}\n\n"))
    policy.chat(temperature=0.0, max_new_tokens=8)
    printed = capsys.readouterr().out  # a line that is too long does not end the conversation, and is no part of it
    assert "error: prompt 1 has 2" in printed and f"{clean(answer)}\n" in printed

    short, long = policy.logprobs(["What", question])
    assert [len(short), len(long)] == [len(policy.tokenizer.encode_prompt(text)) - 1 for text in ("What", question)]
    np.testing.assert_allclose(long[: len(short)], short, rtol=1e-5)
    text = Encoding(policy.tokenizer, chat=True).prompts([Example(prompt=question)], 99).texts[0]
    for talk, written in (([turn], text), ([turn, {"role": "assistant", "content": "3"}], f"{text}3")):
        np.testing.assert_array_equal(policy.logprobs(talk)[0], policy.logprobs(written)[0])
    asked = replace(policy.generator.asked, system="Be short.")  # as recorded in a run
    instructed = replace(policy, generator=replace(policy.generator, asked=asked))
    spoken = [{"role": "system", "content": "Be short."}, turn]
    np.testing.assert_array_equal(instructed.logprobs([turn])[0], policy.logprobs(spoken)[0])
    (flat,) = policy.logprobs([question], temperature=1e6)
    np.testing.assert_allclose(flat, -np.log(policy.tokenizer.vocab_size + 3), rtol=1e-3)  # of a uniform softmax
    assert "shorten it" in refused(policy.logprobs, "plus " * 200)


@pytest.mark.full
def test_logprobs_are_those_of_transformers(user):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    policy, texts = load(user / "actor"), ["What is 1 plus 2?", "Why?"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(user / "actor").eval()
    for text, ours in zip(texts, policy.logprobs(texts), strict=True):
        ids = torch.tensor([policy.tokenizer.encode_prompt(text)])
        with torch.no_grad():
            expected = theirs(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.proof("runs")
@pytest.mark.usefixtures("quick_compilation")
def test_an_interrupted_run_is_usable_and_a_thread_resumes_it(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    gc.collect()
    before = len(jax.live_arrays())
    run = interrupted(tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert len(jax.live_arrays()) == before
    assert run.summary == {} and 1 <= len(run.column("critic/score/mean")) < ITERATIONS
    (answer,) = run.actor.generate("1+2=", temperature=0.0)
    assert run.export(tmp_path / "out") == tmp_path / "out" / "model"
    assert load(tmp_path / "out" / "model").generate("1+2=", temperature=0.0, max_new_tokens=3) == [answer]
    gc.collect()
    assert len(jax.live_arrays()) == before

    message = refused(train, TINY, run_dir=tmp_path)
    assert "already holds this run: resume it (--resume, resume=True in Python)" in message
    assert "resume='Auto': it must be True, False or 'auto'" in refused(train, TINY, run_dir=tmp_path, resume="Auto")
    with ThreadPoolExecutor(1) as threads:
        resumed = threads.submit(train, TINY, run_dir=tmp_path, resume=True).result()
    gc.collect()
    assert len(jax.live_arrays()) == before
    assert resumed.path == run.path and len(resumed.column("critic/score/mean")) == ITERATIONS
    assert resumed.summary["held_out"]["measure"] == "score" and len(resumed.samples) > 0
    (answer,) = resumed.actor.generate("1+2=", temperature=0.0)
    resumed.export(tmp_path / "end")
    assert load(tmp_path / "end" / "model").generate("1+2=", temperature=0.0, max_new_tokens=3) == [answer]


@pytest.mark.proof("runs")
@pytest.mark.usefixtures("quick_compilation")
def test_a_preempted_run_ends_and_one_that_goes_on_has_its_newest_policy(tmp_path):
    with pytest.raises(Preempted):  # a scheduler's signal ends the program
        interrupted(tmp_path, signal.SIGTERM)
    assert train(TINY, run_dir=tmp_path, resume=True).summary != {}
    longer = interrupted(tmp_path, after=ITERATIONS, resume=True, **{"grpo.iterations": 99})
    longer.export(tmp_path / "newest")
    newest, model = load(tmp_path / "newest" / "model").logprobs("1+2=")[0], load(longer.path).logprobs("1+2=")[0]
    np.testing.assert_array_equal(longer.actor.logprobs("1+2=")[0], newest)
    assert (newest != model).any()


DATAFLOW = """
def own(actor, reference, reward, estimator, prompts, kl_coef):
    rollout = actor.generate(prompts)
    scores = reward.score(rollout, prompts)
    old, ref = actor.logprobs(rollout), reference.logprobs(rollout)
    experience = estimator.custom_experience(advantages, rollout, scores, old, ref, kl_coef)
    return experience, actor.update(experience)
def advantages(experience, config):
    scores = experience.scores.reshape(-1, config.samples)
    return (scores - scores.mean(axis=1, keepdims=True)).reshape(-1)
"""
REWARD = """
def close(completions, answer, scale=2.0):
    return [scale * (text == right) + len(text) for text, right in zip(completions, answer)]
"""


@pytest.mark.proof("runs")
@pytest.mark.usefixtures("quick_compilation")
def test_functions_train_as_files_do_and_are_asked_for_again(tmp_path):
    (tmp_path / "own.py").write_text(DATAFLOW + REWARD)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(DATAFLOW, names)

    def closeness(scale: float):
        def close(completions, answer):
            return [scale * (text == right) + len(text) for text, right in zip(completions, answer, strict=True)]

        return close

    functions: dict[str, Any] = {"rewards": [closeness(2.0)], "grpo.dataflow": names["own"], "grpo.iterations": 4}
    run = interrupted(tmp_path, **functions)
    assert 1 <= len(run.column("critic/score/mean")) < 4
    saved = (run.path / CONFIG).read_text()
    assert "function: <python>:close" in saved and "dataflow: <python>:own" in saved

    again: dict[str, Any] = {"run_dir": tmp_path, "resume": True}
    other = functions | {"rewards": [closeness(3.0)]}
    assert "was made with another reward close" in refused(train, TINY, **again, **other)
    exec(DATAFLOW.replace("mean(", "min("), names)
    other = functions | {"grpo.dataflow": names["own"]}
    assert "was made with another dataflow" in refused(train, TINY, **again, **other)
    sentence = "own was a Python function of the program that began the run"
    assert sentence in refused(main, load_config(str(run.path / CONFIG)), resume=True)

    exec(DATAFLOW, names)
    resumed = train(TINY, **again, **functions | {"grpo.dataflow": names["own"]})
    files: dict[str, Any] = {"rewards": [{"name": "close", "function": f"{tmp_path}/own.py:close"}]}
    files |= {"grpo.dataflow": f"{tmp_path}/own.py:own", "grpo.iterations": 4}
    whole = train(TINY, run_dir=tmp_path, name="files", **files)
    assert len(set(whole.column("critic/score/mean"))) > 2
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "rewards/close/mean"):
        np.testing.assert_array_equal(resumed.column(name, "grpo"), whole.column(name, "grpo"))
    weights = "model/model.safetensors"
    assert (resumed.path / weights).read_bytes() == (whole.path / weights).read_bytes()
    assert Run.open(resumed.path).samples == whole.samples


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_rows_in_memory_train_as_a_file_of_them_and_are_asked_for_again(tmp_path, settings, user, capsys):
    """The run has the bits of one with files. A resume with other rows, or without rows, is refused."""
    own = {"stages": ["rloo"], "rloo": {"iterations": 2, "rollout_batch": 16, "save_every": 1}}
    config = settings(run_dir=str(tmp_path), **own)
    del config["data"]["prompts"]["path"], config["data"]["heldout_rows"]
    rows = [json.loads(line) for line in (user / "qa.jsonl").read_text().splitlines()]
    data = {"prompts": rows[:32], "heldout": {"path": rows[32:40], "columns": {"prompt": "question"}}}
    files = {key: str(tmp_path / f"{key}.jsonl") for key in data}
    for key, part in zip(files, (rows[:32], rows[32:40]), strict=True):
        Path(files[key]).write_text("".join(json.dumps(row) + "\n" for row in part))
    columns = {"heldout": {"path": files["heldout"], "columns": {"prompt": "question"}}}
    whole = train(config, name="files", data={"prompts": {"path": files["prompts"]}} | columns)

    run = train(config, name="memory", data=data, rloo={"iterations": 1})
    assert len(run.metrics) == 1 and "path: <python>:heldout" in (run.path / CONFIG).read_text()
    again: dict[str, Any] = {"name": "memory", "resume": True}
    for key in data:
        other = data | {key: rows[8:24]} if key == "prompts" else data | {key: {**data[key], "path": rows[40:]}}
        assert "was made with another corpus" in refused(train, config, data=other, **again)
    assert train_cli(["--config", str(run.path / CONFIG), "--resume"]) == 2
    sentence = "data.prompts: its rows were in the memory of the program that began the run, and no file has them"
    assert sentence in capsys.readouterr().err
    resumed = train(config, data=data, **again)
    assert timeless(resumed.path) == timeless(whole.path)
    weights = "model/model.safetensors"
    assert (resumed.path / weights).read_bytes() == (whole.path / weights).read_bytes()


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_prompts_of_several_sources_come_by_weight_and_are_measured_apart(tmp_path, settings, user):
    rows = [json.loads(line) for line in (user / "qa.jsonl").read_text().splitlines()]
    for row in rows:
        del row["data_source"]

    def own(completions, data_source):
        return [len(text) / 100 + len(source) for text, source in zip(completions, data_source, strict=True)]

    def few(completions, data_source):
        return [float(source == "few") for source in data_source]

    sizes = {"rollout_batch": 16, "save_every": 1, "algorithm": {"samples": 2}}
    config = settings(run_dir=str(tmp_path), stages=["rloo"], rloo={"iterations": 8, **sizes}, rewards=[own, few])
    columns = {"prompt": "question"}
    sources = [{"path": rows[:30], "name": "many", "weight": 3, "columns": columns}]
    sources.append({"path": rows[30:], "name": "few", "columns": columns})
    config["data"] |= {"prompts": sources, "heldout_rows": 2}
    config["validation"] = {"every": 4, "k": 1}
    run = train(config, name="whole")
    metrics = {"score": "critic/score", "response_length": "response_length", "rewards/own": "rewards/own"}
    for record in run.metrics:
        assert record["source/many/share"] == 0.75 and record["source/few/share"] == 0.25
        for metric, whole in metrics.items():
            many, other = (record[f"source/{source}/{metric}/mean"] for source in ("many", "few"))
            assert np.isclose(0.75 * many + 0.25 * other, record[f"{whole}/mean"], rtol=1e-5)
        assert record["source/many/rewards/few/mean"] == 0 and record["source/few/rewards/few/mean"] == 1
    # Six of eight prompts are from 28 rows, and two from 16.
    assert [record["source/many/epoch"] for record in run.metrics] == [6 * n // 28 for n in range(8)]
    assert [record["source/few/epoch"] for record in run.metrics] == [0] * 8
    assert run.column("training/epoch").tolist() == [0] * 8
    validated = [sample["source"] for sample in run.samples if sample.get("kind") == "validation"]
    assert validated == 2 * ["many", "few", "many", "few"] and "val-core/few/score/mean@1" in run.metrics[4]

    train(config, name="parts", rloo={"iterations": 3})
    other = [sources[0] | {"weight": 2}, sources[1]]
    assert "data.prompts" in refused(train, config, name="parts", resume=True, data={"prompts": other})
    assert timeless(train(config, name="parts", resume=True).path) == timeless(run.path)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_validation_draws_by_settings_of_its_own(tmp_path, monkeypatch):
    """Answers that are longer than those in training are scored whole, also by the reward model that the run trains."""
    tiny = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text()) | {"run_dir": str(tmp_path)}
    drawn, sample = [], Sampler.sample

    def noting(self, policy, prompts, key, sampling=None):
        responses = sample(self, policy, prompts, key, sampling)
        if sampling is not None and sampling.max_new_tokens == 40:
            greedy = sample(self, policy, prompts, key, replace(sampling, temperature=0.0, top_k=None))
            drawn.append((sampling, responses, greedy))
        return responses

    monkeypatch.setattr(Sampler, "sample", noting)
    own = {"every": 1, "k": 2, "top_k": 1, "min_p": 0.5, "max_response": 40}
    short: dict[str, Any] = {"sft.steps": 1, "reward_model.steps": 1, "ppo.iterations": 1, "validation": own}
    run = train(tiny, **short)
    assert len(drawn) == 2 and "val-core/all/gold/mean@2" in run.names
    for sampling, responses, greedy in drawn:
        assert (sampling.top_k, sampling.min_p, sampling.temperature) == (1, 0.5, 1.0)
        assert [response.ids for response in responses] == [response.ids for response in greedy]
        assert max(len(response.ids) for response in responses) > 24
    # Settings that are those of the rollouts make no sampling of their own, so no program of their own.
    same = ValidationConfig(every=1, temperature=1.0, max_response=24).drawing
    rollouts = SamplingConfig(24)
    assert replace(rollouts, **same) == rollouts and ValidationConfig(every=1).drawing == {}


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("keep", [False, True])
def test_rewards_read_responses_without_the_text_that_ended_them(keep, tmp_path):
    """Their tokens stay, and the rows count as finished; rows come in chunks, and the run resumes to the same bits."""

    def ends(completions, completion_ids, log_metric):
        log_metric("stopped", sum(text.endswith("7") for text in completions) / len(completions))
        log_metric("holds", sum("7" in text for text in completions) / len(completions))
        log_metric("tokens", sum(map(len, completion_ids)) / len(completions))
        return [float(len(text)) for text in completions]

    settings: dict[str, Any] = {"rewards": [ends], "sampling": {"stop": ["7"], "keep_stop": keep}}
    settings |= {"rollout": {"chunk": 2, "slots": 16}, "run_dir": tmp_path, "data": {"max_response": 6}}
    sizes = {"rollout_batch": 32, "save_every": 1, "iterations": 3}
    run = train(TINY, name="whole", grpo=sizes, **settings)
    stopped, holds, tokens = (run.column(f"rewards/ends/{name}") for name in ("stopped", "holds", "tokens"))
    np.testing.assert_allclose(tokens, run.column("response_length/mean"), rtol=1e-6)
    assert (stopped == holds).all() and (stopped > 0.1).all() if keep else not holds.any()
    if not keep:  # each finished row lacks at most a token that ends the text, and a stop string
        assert (tokens > run.column("rewards/ends/mean")).all()
    assert (run.column("response_length/clip_ratio") < 0.9).all()
    train(TINY, name="parts", grpo=sizes | {"iterations": 2}, **settings)
    again = train(TINY, name="parts", resume=True, grpo=sizes, **settings)
    assert timeless(again.path) == timeless(run.path)
    stop = run.actor.tokenizer.stop
    assert stop is not None and stop[:2] == (("7",), keep)


PROMISED = """
scores = run.column("critic/score/mean")
assert scores[-3:].mean() > scores[:3].mean() + 0.4, scores
assert policy.generate("12+34=", temperature=0.0, max_new_tokens=4).pop().count("7") > 2
for name, (state, metrics) in steps.items():
    assert state.actor.step == state.critic.step == 1, name
    assert all(map(jnp.isfinite, metrics.values())) and metrics["actor/grad_norm"] > 0, name
assert weights["matrix"].dtype == jnp.bfloat16 and weights["bias"].dtype == jnp.float32
assert all((x == 1).all() and x.sharding == columns[name] for name, x in weights.items())
"""


@pytest.mark.proof("notebooks")
@pytest.mark.usefixtures("quick_compilation")
def test_the_examples_of_help_run(tmp_path, monkeypatch):
    """Runs each as it is written, but "quickstart" is a smaller config. The first one trains what the others load."""
    tiny = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text()) | {"name": "quickstart"}
    monkeypatch.setattr(
        jrlhf.api, "make_config", lambda config, *rest: make_config(tiny if config == "quickstart" else config, *rest)
    )
    for owner in (jrlhf.api, Run, load, Policy.generate, Policy.logprobs, plan, train):
        folder = tmp_path / ("another" if owner is train else "first")
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        example = re.search(r"\n\n((?:    .*\n?|\n)+)", inspect.cleandoc(owner.__doc__ or ""))
        assert example, f"help({owner.__name__}) has no example"
        exec(textwrap.dedent(example[1]), vars(jrlhf.api).copy())
    assert len(Run.open("runs/quickstart").column("critic/score/mean")) == 10


@pytest.mark.proof("runs")
def test_the_page_runs_from_top_to_bottom_and_its_run_learns(tmp_path):
    """Runs the code as users do, on devices of its own."""
    page = Path(__file__).resolve().parents[2] / "docs/python.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)) + PROMISED
    environment = os.environ | {"PYTHONPATH": str(page.parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    for name in ("curves.png", "exported/model/model.safetensors", "plan.yaml", "runs/short/report.html"):
        assert (tmp_path / name).exists(), name
