"""Bad input: one sentence that says what is wrong and what to do, exit code 2, and nothing written."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrlhf.config.parse import build
from jrlhf.config.schema import Config, RewardConfig
from jrlhf.errors import Preempted, RewardFailure, RunFailure, UserError, exit_code, one_line
from jrlhf.models import LoRAConfig, ModelConfig, init_lora
from jrlhf.models.hf import export_adapter, read_config
from jrlhf.models.weights import HeadKind
from jrlhf.run.directory import open_run
from jrlhf.run.metrics import read_metrics
from jrlhf.stages.setup import _resuming, load_task, select_mesh
from jrlhf.train import cli, main
from tests.support.runs import ROOT, digest

WEIGHTS = "model.safetensors"
SFT = {"stages": ["sft"], "rewards": []}  # the stage that needs least
SCORED = {"rewards": [{"name": "same", "function": "exact_match"}]}


@pytest.fixture
def refused(tmp_path, settings, capsys) -> Callable[..., str]:
    """Runs a config that must be refused; returns the sentence."""

    def run(*arguments: str, **sections) -> str:
        runs = tmp_path / "runs"
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(settings(name="bad", run_dir=str(runs), **sections)))
        capsys.readouterr()
        assert cli(["--config", str(file), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error
        assert not runs.exists()
        return error

    return run


@pytest.fixture
def damaged(tmp_path, user) -> Callable[[Callable[[Path], object]], str]:
    """A copy of the actor's directory with something done to it."""

    numbers = itertools.count()

    def make(damage: Callable[[Path], object]) -> str:
        directory = tmp_path / str(next(numbers)) / "actor"
        shutil.copytree(user / "actor", directory)
        damage(directory)
        return str(directory)

    return make


def edit(name: str, **keys) -> Callable[[Path], object]:
    """Sets keys of a JSON file; None removes one."""

    def damage(directory: Path) -> None:
        content = json.loads((directory / name).read_text()) | keys
        (directory / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return damage


def truncate(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[: len(content) // 2])


def without(*names: str) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return damage


def only_a_pickle(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


def template(text: str | None) -> Callable[[Path], object]:
    return edit("tokenizer_config.json", chat_template=text)


# What else can be wrong with the files is refused in tests/models/hf and tests/jrlhf/data; with rewards, in
# tests/jrlhf/rewards/test_functions.py.
DAMAGES = [
    (edit("config.json", intermediate_size=64), "where config.json asks for"),
    (only_a_pickle, "which may run code"),
    (without(WEIGHTS), "holds neither model.safetensors"),
    (without("config.json"), "holds no model"),
    (lambda directory: (directory / "config.json").write_text("{"), "config.json"),
    (edit("config.json", max_position_embeddings=32), "has max_positions=32"),
    (edit("config.json", vocab_size=320), "take the tokenizer that the model was trained with"),
    (template("{{ raise_exception('be polite') }}"), "be polite"),
    (template("{{ messages.__class__.__mro__ }}"), "template"),
    (template(None), "has no chat template"),
]


def test_a_sentence_is_one_line_whatever_it_quotes(capsys):
    def run() -> None:
        raise UserError(f"key=\x1b[2J{'x' * 10_000}\nis wrong, {'one of ' * 1000}: correct it")

    assert exit_code(run) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: key=") and error.endswith("one of : correct it\n")
    assert error.count("\n") == 1 and "\x1b" not in error and len(error) < 2000


def test_errors_of_others_are_quoted_with_all_their_lines():
    error = ValueError("Bad request:\n  - licence: not in the list\n\n  - tags: must be texts")
    text = "Bad request: - licence: not in the list - tags: must be texts"
    assert one_line(error) == text and one_line(error, kind=True) == f"ValueError: {text}"
    assert one_line(KeyError()) == one_line(KeyError(), kind=True) == "KeyError"
    assert len(one_line(ValueError("x " * 9999))) < 600 and one_line(ValueError("a" + "b" * 999)).startswith("abb")
    cut = re.compile(r"str\(error\)[^\n]*(?:splitlines\(\)|split\(\"\\n\"[^)]*\))\[:?[01]")
    folders = "jrlhf", "models", "meshes", "ppo", "kernels"
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 200 and [path for path in sources if cut.search(path.read_text(encoding="utf-8"))] == []


def test_a_model_directory_that_is_not_what_it_says(refused, damaged):
    for damage, message in DAMAGES:
        assert message in refused(**SFT, model={"path": damaged(damage)}), message


def not_a_number(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize("stages", [["ppo"], ["sft", "ppo"]])
@pytest.mark.parametrize("role", ["actor", "critic", "reference", "reward"])
def test_weights_that_are_not_finite_leave_nothing_behind(role, stages, refused, tmp_path, user, settings, make_model):
    """Headers are in order, so only the run that reads the weights finds it; the same command may then run again."""
    model = tmp_path / "damaged"
    if role == "reward":
        make_model(model, scalar=True)
    else:
        shutil.copytree(user / "actor", model)
    not_a_number(model)
    first = ["sft"] if role == "actor" else stages
    sections = {"stages": first, "model": {"path": str(model if role == "actor" else user / "actor")}}
    if role in ("critic", "reference"):
        sections["roles"] = {role: str(model)}
    sections["rewards"] = [{"name": "judge", "model": str(model)}] if role == "reward" else SCORED["rewards"]
    sections |= {"rewards": []} if role == "actor" else {"validation": {}, "data": {"heldout_rows": 0}}
    if role not in ("actor", "reward"):
        sections["rewards"] = [{"name": "short", "function": f"{user / 'rewards.py'}:short"}]
    for _ in range(2):
        assert "numbers that are not finite" in refused(**sections)  # which also asserts that runs/ is not there


def test_an_address_of_a_run_that_never_began_is_free(tmp_path, settings, damaged, memory):
    model, runs = damaged(not_a_number), "memory://bucket/runs"
    sections = SFT | {"model": {"path": model}, "storage": {"scratch": str(tmp_path / "scratch")}}
    config = build(Config, settings(name="bad", run_dir=runs, **sections))
    for _ in range(2):
        with pytest.raises(UserError, match="not finite"):
            main(config)
        left = [path.name for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
        assert not memory.store and left == [".bad.claim"]  # a lock, which no process may delete


@pytest.mark.parametrize("error", [Preempted("stopped"), RunFailure("resume"), RewardFailure("resume")])
def test_a_new_run_that_is_to_be_resumed_is_kept(error, tmp_path, settings, monkeypatch):
    def fail(*_) -> None:
        raise error

    monkeypatch.setattr("jrlhf.roles.initial.InitialModels.policy", fail)
    config = build(Config, settings(name="kept", run_dir=str(tmp_path), **SFT))
    with pytest.raises(type(error)) as caught:
        main(config)
    assert (tmp_path / "kept" / "config.yaml").is_file()
    command = f"python -m jrlhf.train --config {tmp_path}/kept/config.yaml --resume"
    assert str(caught.value) == (f"resume; to resume: {command}" if type(error) is RewardFailure else str(error))
    # The command would not find a run at an address, nor a function of a Python program.
    elsewhere = {"run_dir": "s3://bucket/runs"}, {"rewards": (RewardConfig(name="a", function="<python>:f"),)}
    assert [_resuming(replace(config, **changes)) for changes in ({}, *elsewhere)] == [command, "", ""]


def test_a_path_that_holds_no_model(refused, tmp_path, user):
    file = tmp_path / "model"
    file.write_text("no model")
    assert "holds no model" in refused(**SFT, model={"path": str(file)})
    assert "does not exist" in refused(**SFT, model={"path": str(tmp_path / "nowhere")})
    assert "holds a reward model" in refused(**SFT, model={"path": str(user / "reward")}, data={"max_prompt": 96})


SECTIONS = [
    ({"data": {"sft": {}}}, "data.sft.path, which is not given"),
    ({"data": {"sft": {"path": "USER/qa.jsonl"}}}, "error: data.sft: the columns of"),
    ({"data": {"sft": {"path": "USER/qa.jsonl", "columns": {"text": "anwser"}}}}, "did you mean answer"),
    ({"data": {"max_prompt": 8, "max_response": 8}}, "line 1: "),
    ({"model": {"layers": 3}}, "are both given"),
    ({"sft": {"batch": 8, "micro_batches": 3}}, "x 3 micro-batches: choose a multiple of 24"),
    (
        {"sft": {"pipeline": {"stages": 2}}},
        "sft.pipeline has sft.update in pipeline=2 stages with micro_batches=1: schedule=1f1b needs at least 2 of them",
    ),
    (
        {"stages": ["sft", "ppo"], "rollout": {"slots": 12}} | SCORED,
        "rollout.slots=12 does not divide over 8 device(s)",
    ),
    (
        {"stages": ["sft", "ppo"], "compute": {"shared_passes": True}, "ppo": {"algorithm": {"epochs": 2}}} | SCORED,
        "not ppo.algorithm.epochs=2: set that",
    ),
    ({"stages": ["sft", "ppo"], "compute": {"shared_passes": True}, "lora": {"rank": 4}} | SCORED, "whole, not lora"),
    ({"lora": {"path": "USER/gone"}}, "does not exist"),
    ({"lora": {"path": "USER/actor"}}, "adapter_config.json"),
    ({"lora": {"rank": 4, "targets": ["lm_head"]}}, "lm_head"),
]


def test_settings_that_do_not_go_together(refused, user):
    for sections, message in SECTIONS:
        given = json.loads(json.dumps(sections).replace("USER", str(user)))
        assert message in refused(**{**SFT, **given}), sections


def test_an_adapter_that_does_not_fit(refused, tmp_path, user, make_model):
    gpt2 = {"norm": "layer", "positions": "learned", "activation": "gelu_tanh", "gated_mlp": False, "kv_heads": 2}
    path = make_model(tmp_path / "gpt2", qkv_bias=True, output_bias=True, mlp_bias=True, **gpt2)
    assert "GPT-2" in refused(**SFT, model={"path": str(path)}, lora={"rank": 4})
    heads: dict[str, HeadKind] = {"critic": "lm", "actor": "scalar"}
    for name, head in heads.items():
        model: ModelConfig = read_config(user / name).model
        lora = LoRAConfig(rank=2, alpha=4.0)
        shapes = jax.eval_shape(partial(init_lora, model, lora, head=head), jax.random.key(0))
        adapter = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        export_adapter(adapter, model, lora, tmp_path / f"adapter of {name}", base_name=name)
    assert "another base" in refused(**SFT, lora={"path": str(tmp_path / "adapter of critic")})
    assert "is a reward model's adapter" in refused(**SFT, lora={"path": str(tmp_path / "adapter of actor")})


# The sentences on functions themselves are proven in tests/jrlhf/rewards/test_functions.py.
UNUSABLE = [
    ({"model": "USER/critic"}, "is a language model, which has no head to score with"),
    ({"model": "USER/gone"}, "does not exist"),
    ({"model": "USER/reward", "function": "numeric_answer"}, "give one"),
    ({"function": "HERE/late.py:f"}, "no licence"),
    ({"function": "numeric_answer", "options": {"tolerance": "x"}}, "options.tolerance='x': it must be a number"),
    ({"function": "numeric_answer", "options": {"answer": 3}}, "name its column: columns.answer"),
    ({"function": "numeric_answer", "columns": {"answer": "anwser"}}, "name one of these in its columns.answer\n"),
    (
        {"function": "exact_match", "options": {"ignore_case": "no"}},
        "options.ignore_case='no': it must be true or false",
    ),
    ({"function": "format_regex", "options": {"pattern": 3}}, "options.pattern=3: it must be text, in quotes"),
    ({"function": "format_regex"}, "'mine': format_regex needs a regular expression: give options.pattern"),
    ({"function": "jrlhf.rewards.builtin:format_regex", "options": {"pattern": "("}}, "is no regular expression"),
    ({"function": "USER/rewards.py:compute_score", "columns": {"ground_truth": "anwser"}}, "anwser"),
]


def test_a_reward_that_cannot_be_used(refused, tmp_path, user):
    """Found before the first stage, not when it is needed."""
    (tmp_path / "late.py").write_text("raise RuntimeError('no licence')\n")
    for reward, message in UNUSABLE:
        text = json.dumps({"name": "mine", **reward}).replace("USER", str(user)).replace("HERE", str(tmp_path))
        sections = {"stages": ["sft", "reward_model", "ppo"], "rewards": [json.loads(text)]}
        assert message in refused(**sections), reward
    assert message in refused("--dry-run", **sections)
    gone = {"costs": [{"name": "mine", "function": "no_such_module_of_mine:f"}]}
    assert refused(stages=["safe_rlhf"], **gone).startswith("error: cost 'mine': ")


def test_roles_that_do_not_go_together(refused, tmp_path, user, make_model):
    other = make_model(tmp_path / "other", "llama", spare=0)
    rows = json.loads((user / "actor" / "config.json").read_text())["vocab_size"]
    same_size = make_model(tmp_path / "same size", "llama", spare=0, vocab_size=rows)
    for role in ("critic", "reference"):
        assert "choose one of the same family" in refused(roles={role: str(other)})
        assert "has another tokenizer than the actor: its token " in refused(roles={role: {"path": str(same_size)}})
    assert "choose one of the same family" in refused(roles={"reference": str(user / "reward")})
    assert "nothing to optimise" in refused(rewards=[])


def test_a_resumed_run_stays_as_it_is_when_its_model_is_damaged(tmp_path, settings, capsys, damaged):
    model = damaged(lambda directory: None)
    runs = tmp_path / "kept"
    config = settings(name="kept", run_dir=str(runs), model={"path": model}, **SFT)
    open_run(build(Config, config)).close()
    before = digest(runs)
    truncate(Path(model))
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert cli(["--config", str(tmp_path / "config.yaml"), "--resume"]) == 2
    assert "is cut short" in capsys.readouterr().err
    assert digest(runs) == before


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_run_is_not_resumed_on_other_data_or_another_model(tmp_path, settings, capsys, damaged, user):
    model, file = damaged(lambda directory: None), tmp_path / "rows.jsonl"
    rows = (user / "qa.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(rows))
    config = settings(name="kept", run_dir=str(tmp_path / "runs"), model={"path": model}, **SFT)
    config["data"]["sft"] = config["data"]["sft"] | {"path": str(file)}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = ["--config", str(tmp_path / "config.yaml")]
    assert cli(command) == 0
    contents = digest(tmp_path / "runs" / "kept")

    def refusal() -> str:
        capsys.readouterr()
        assert cli([*command, "--resume", "deadline=77"]) == 2
        assert digest(tmp_path / "runs" / "kept") == contents
        printed = capsys.readouterr()
        assert "going on" not in printed.out
        return printed.err

    file.write_text("".join(rows[1:]))
    assert "was made with another corpus" in refusal()
    file.write_text("".join(rows))
    tensors = load_file(Path(model) / WEIGHTS)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, Path(model) / WEIGHTS)
    assert "was made with another start" in refusal()
    save_file(tensors, Path(model) / WEIGHTS)
    settings_of_model = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "config.json").write_text(json.dumps(settings_of_model | {"rms_norm_eps": 0.25}))
    assert "was made with another actor.norm_eps (" in refusal()


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_reward_that_fails_while_the_run_goes_on(tmp_path, settings):
    """With on_failure the run ends well, and says how many failed."""
    (tmp_path / "faulty.py").write_text("import time\ndef judge(completions):\n    time.sleep(1000)\n")
    reward = {"name": "mine", "function": f"{tmp_path / 'faulty.py'}:judge", "deadline": 1.0, "on_failure": -1.0}
    grpo = {"iterations": 1, "rollout_batch": 8, "algorithm": {"samples": 2}}
    config = settings(name="replaced", run_dir=str(tmp_path / "runs"), stages=["grpo"], grpo=grpo, rewards=[reward])
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert cli(["--config", str(tmp_path / "config.yaml")]) == 0
    record = next(iter(read_metrics(tmp_path / "runs" / "replaced")))
    assert record["rewards/mine/failures"] == record["rewards/mine/failures/hang"] == 8
    assert record["rewards/mine/mean"] == -1.0


def test_an_attention_that_the_devices_or_the_model_cannot_compute_is_refused(refused):
    for attention, platform in (("cudnn", "gpu"), ("splash", "tpu")):
        error = refused(compute={"attention": attention}, **SFT)
        assert f"compute.attention={attention} runs on a {platform} only, and this is a cpu: set it to null" in error
    assert "compute.attention=flash" in refused(compute={"attention": "flash"}, **SFT)
    assert "compute.remat=none" in refused(compute={"remat": "none"}, **SFT)


def test_a_task_says_whether_the_model_is_given_conversations(settings, tmp_path):
    table = [("Why?", False, False), ("Why?", True, True), ([{"role": "user", "content": "Why?"}], False, True)]
    for prompt, chat, met in table:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        prompts = {"path": str(tmp_path / "rows.jsonl"), "columns": {}}
        config = build(Config, settings(data={"prompts": prompts, "heldout_rows": 0, "chat": chat}))
        assert load_task(config, select_mesh(config)[1]["actor"]).chat is met


def test_prompts_that_repeat_within_an_iteration_are_announced(settings, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Why {n}?"}) + "\n" for n in range(12)))
    data = {"prompts": {"path": str(tmp_path / "rows.jsonl"), "columns": {}}, "heldout_rows": 4}
    for batch, repeats in ((16, False), (32, True)):
        grpo = {"rollout_batch": batch, "algorithm": {"samples": 2}}
        config = build(Config, settings(stages=["grpo"], grpo=grpo, data=data))
        line = (
            f"data.prompts: grpo.rollout_batch={batch} takes 16 prompts an iteration and there are 8, so prompts repeat"
        )
        assert (line in load_task(config, select_mesh(config)[1]["actor"]).description) is repeats
