"""`jrlhf init`: every combination of answers is a config that loads and is right, or is refused in a sentence."""

import itertools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import jrlhf.__main__
from jrlhf import train
from jrlhf.config import load_config, validate
from jrlhf.config.descriptions import descriptions
from jrlhf.config.schema import DatasetsData
from jrlhf.config.stages import ALGORITHMS
from jrlhf.errors import UserError
from jrlhf.models.hf.presets import PRESETS
from jrlhf.new_config import Answers, complete, settings_for, write
from jrlhf.rewards.builtin import NAMES
from jrlhf.roles.pretrained import fresh_model

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
MODELS, DATA = ("tiny", QWEN), ("docstrings", "arithmetic", "lab/rows")
REWARDS = ("", "learned", "function", "numeric_answer", "my.module:score", "org/reward-model")
DEVICES = {"auto": 1, "cpu": 1, "4xcpu": 4, "6xgpu": 6, "8xgpu": 8, "256xtpu": 256}


def sensible(model: str, data: str, algorithm: str, reward: str) -> bool:
    if (model == "tiny") == (data == "lab/rows"):
        return False  # tasks train a model of their own
    if (data, algorithm) == ("arithmetic", "safe_rlhf"):
        return False  # sums have no cost
    if algorithm == "dpo":
        return data != "arithmetic" and reward == ""  # pairs
    return reward != ("numeric_answer" if data == "docstrings" else "learned")  # answers, preferences


def test_combinations_of_answers_are_a_right_config_or_refused(tmp_path):
    for number, algorithm in enumerate((*ALGORITHMS, "dpo")):
        rewards = REWARDS if algorithm in ("grpo", "dpo") else REWARDS[:3]
        check_combinations(algorithm, tmp_path / algorithm, [[*DEVICES][number % len(DEVICES)]], rewards)


@pytest.mark.proof("inputs")
@pytest.mark.parametrize("algorithm", (*ALGORITHMS, "dpo"))
def test_every_combination_fits_every_number_of_devices(algorithm, tmp_path):
    check_combinations(algorithm, tmp_path, [*DEVICES])


def check_combinations(algorithm, tmp_path, kinds, rewards=REWARDS):
    for number, (model, data, reward) in enumerate(itertools.product(MODELS, DATA, rewards)):
        given = {"model": model, "data": data, "algorithm": algorithm, "reward": reward}
        if not sensible(model, data, algorithm, reward):
            with pytest.raises(UserError, match="^(data|algorithm|reward)="):
                complete(given, None)
            continue
        for devices in kinds:
            answers = complete(given | {"devices": devices}, None)
            file = tmp_path / f"{number}-{devices}" / "mine.yaml"
            written = write(answers, file)
            config = load_config(str(file))
            size = fresh_model(config.model) if model == "tiny" else PRESETS[QWEN]
            validate(config, DEVICES[devices], dict.fromkeys(("actor", "critic", "reference"), size))
            assert config.stages[-1] == algorithm and config.name == "mine"
            assert isinstance(config.data, DatasetsData) == (model == QWEN) and config.device.platform in devices
            assert [path.name for path in written[1:]] == ["reward.py"] * (answers.reward == "function")
            assert len(config.rewards) == (answers.reward not in ("", "learned"))
            if algorithm == "safe_rlhf":  # a limit in words that answers can exceed
                settings: Any = config.rl.algorithm
                assert 0 < settings.cost_limit < config.data.max_response / 2


def test_settings_have_their_meaning_as_comment_and_the_reward_scores(tmp_path):
    answers = Answers(QWEN, "lab/rows", "grpo", "prompt", "function", "8xgpu")
    file, reward = write(answers, tmp_path / "mine.yaml")
    text, words = file.read_text(), " ".join(re.sub(r"\n *#", " ", file.read_text()).split())
    config = load_config(str(file))
    for section in (config.model, config.data, config.rl, config.rl.algorithm, config.rl.actor, config.device):
        for key in re.findall(r"^ +(\w+): ", text, re.MULTILINE):
            meaning = descriptions(type(section)).get(key, "") if hasattr(section, key) else ""
            assert meaning.partition(". ")[0] in words, key
    schema, *lines = text.splitlines()
    assert lines[0].startswith(
        f"# Written by jrlhf init --model {QWEN} --data lab/rows --algorithm grpo --prompt prompt"
    )
    assert max(map(len, lines)) <= 120
    editor = json.loads(Path(schema.removeprefix("# yaml-language-server: $schema=")).read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load(text), editor)
    score = runpy.run_path(str(reward))["reward"]
    twenty, one = "word " * 20, "word"
    assert score(prompts=["p"] * 2, completions=[twenty, one], answer=["a"] * 2) == [1.0, pytest.approx(0.05)]
    assert score(["p"], [[{"role": "assistant", "content": twenty}]]) == [1.0]


def test_questions_have_defaults_and_are_repeated_after_a_wrong_answer(tmp_path, capsys):
    answers = iter([str(tmp_path), "", "no-task", "arithmetic", "grop", "grpo", "", "3xabacus", "4xcpu"])
    assert complete({}, lambda question, usual: next(answers)) == Answers(
        "tiny", "arithmetic", "grpo", "", "exact_match", "4xcpu"
    )
    out = capsys.readouterr().out
    assert out.count("\n") == 4 and "holds no model" in out and "did you mean grpo" in out and "devices=3xabacus" in out
    assert complete({"data": "docstrings", "algorithm": "dpo"}, None).reward == ""
    with pytest.raises(UserError, match="data has no answer: give --data"):
        complete({"model": QWEN}, None)
    with pytest.raises(UserError, match="reward=lerned"):
        complete({"reward": "lerned"}, None)
    for name in NAMES:
        assert complete({"reward": name, "data": "arithmetic"}, None).reward == name


def test_the_command_overwrites_nothing_and_ends_with_what_is_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["init", "--data", "arithmetic", "--reward", "function", "--devices", "8xcpu", "-o", "sums.yaml"]
    assert jrlhf.__main__.cli(command) == 0
    first, *following = capsys.readouterr().out.splitlines()
    assert first == "wrote sums.yaml and reward.py; next:"
    assert following == [f"  python -m jrlhf.train --config sums.yaml{more}" for more in (" --dry-run", "")]
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    assert jrlhf.__main__.cli(command) == 2 and "sums.yaml exists" in capsys.readouterr().err
    for out, reason in (
        ("", "is a directory"),
        (".", "is a directory"),
        ("/proc/x.yaml", "cannot be written"),
        ("s3://bucket/x.yaml", "-o=s3://bucket/x.yaml is an address"),
    ):
        assert jrlhf.__main__.cli([*command[:-1], out]) == 2 and reason in capsys.readouterr().err
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
    assert jrlhf.__main__.cli([*command[:-1], "more.yaml"]) == 0  # with the reward.py that is there
    assert capsys.readouterr().out.startswith("wrote more.yaml; next:")
    assert before.items() <= {path: path.read_text() for path in tmp_path.iterdir()}.items()
    assert train.cli(["--config", "sums.yaml", "--dry-run"]) == 0
    assert "reward.py:reward" in capsys.readouterr().out


def test_a_config_fits_the_model_and_the_rows_on_this_machine(user, make_model, tmp_path, monkeypatch, capsys):
    """Lengths, template, columns and held-out rows: the dry run takes the config, and what it cannot be is refused."""
    monkeypatch.chdir(tmp_path)
    plain = make_model(tmp_path / "plain", max_positions=48)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    command = ["init", "--data", f"{user}/qa.jsonl", "--reward", "numeric_answer", "--devices", "8xcpu"]
    for model, chat, longest, most in ((user / "actor", True, 56, 64), (plain, False, 16, 24)):  # of all prompts
        assert jrlhf.__main__.cli([*command, "--model", str(model), "-o", f"{model.name}.yaml"]) == 0
        data = load_config(f"{model.name}.yaml").data
        assert isinstance(data, DatasetsData) and data.prompts is not None
        assert (data.chat, data.max_prompt, data.max_response, data.heldout_rows) == (chat, longest, most, 6)
        assert data.datasets["prompts"].columns.prompt == "question"
        assert train.cli(["--config", f"{model.name}.yaml", "--dry-run"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    (tmp_path / "odd.jsonl").write_text(json.dumps({"ask": "1+1?", "key": "2"}) + "\n")
    given = {"model": str(plain), "data": "odd.jsonl"}
    assert complete(given | {"prompt": "ask"}, None).prompt == "ask"
    assert complete(given | {"data": f"{user}/preferences.jsonl"}, None).algorithm == "dpo"  # its rows are pairs
    (tmp_path / "mine.py").write_text("def f(completions, **_): ...\n")
    (tmp_path / "long.jsonl").write_text(1024 * '{"prompt": "1+1?"}\n' + "{ which is not read\n")
    assert settings_for(complete(given | {"data": "long.jsonl"}, None), "")["data"]["heldout_rows"] == 128
    (tmp_path / "null.jsonl").write_text('{"prompt": null}\n{"prompt": "1+1?"}\n')  # which the dry run names
    assert settings_for(complete(given | {"data": "null.jsonl"}, None), "")["data"]["max_prompt"] == 24
    (tmp_path / "more.py").write_text("from mine import *\n")
    assert complete(given | {"prompt": "ask", "reward": "more.py:f"}, None).reward == "more.py:f"
    for more, sentence in (
        ({}, "prompt is no column of odd.jsonl, which has ask, key"),
        ({"prompt": "aks"}, "prompt=aks is no column of odd.jsonl, which has ask, key"),
        ({"prompt": "ask", "reward": "exact_match"}, "reward=exact_match compares with answers"),
        ({"prompt": "ask", "reward": "none.py:f"}, "there is no file"),
        ({"prompt": "ask", "reward": "mine.py:g"}, "reward=mine.py:g names no function: there is no g in "),
        ({"prompt": "ask", "reward": "./none"}, "reward=./none is no reward: choose function, learned"),
        ({"algorithm": "dpo"}, "learns from pairs, and data=odd.jsonl has no chosen and rejected: rename its"),
        (
            {"algorithm": "dpo", "data": f"{user}/preferences.jsonl", "reward": "function"},
            "reward=function has no effect",
        ),
        ({"model": "./none"}, "model=./none does not exist"),
        ({"model": str(tmp_path)}, "holds no model"),
        ({"data": "none.jsonl"}, "data=none.jsonl does not exist"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            complete(given | more, None)
