"""A dry run: adapters as rewards and costs, datasets that are not here, and the move of the last rows."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jrlhf.algorithms.registry import graph_of, stage_graph
from jrlhf.config.parse import build
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.models import LoRAConfig, init_lora
from jrlhf.models.hf import export_adapter, read_config
from jrlhf.planning.dryrun import describe
from jrlhf.planning.fit import memory_of
from jrlhf.planning.fusion import choices
from jrlhf.planning.fusion.choices import prices_of_rollouts
from jrlhf.planning.time import CostModel
from jrlhf.run.files import in_units
from jrlhf.stages.setup import select_mesh
from jrlhf.train import cli
from tests.jrlhf.conftest import write_jsonl


def test_adapters_of_rewards_and_costs_are_counted_and_lie_on_the_base(tmp_path, user, settings, monkeypatch):
    model = read_config(user / "actor").model
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, rank in (("helpful", 2), ("harmful", 4), ("policy", 4)):
        lora = LoRAConfig(rank=rank, alpha=4.0)
        init = partial(init_lora, model, lora, head="lm" if name == "policy" else "scalar")
        shapes = jax.eval_shape(init, jax.random.key(0))
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        export_adapter(zeros, model, lora, tmp_path / name)
    sections = {
        "stages": ["safe_rlhf"],
        "safe_rlhf": {"rollout_batch": 8},
        "mesh": {"data": 8, "fsdp": 1, "tensor": 1},  # every device has all of an adapter
        "lora": {"path": "~/policy"},
        "rewards": [{"name": "helpful", "adapter": str(tmp_path / "helpful")}],
        "costs": [{"name": "harmful", "adapter": "~/harmful"}],
    }
    config: Config = build(Config, without_ppo(settings(**sections)))
    roles = memory_of(config, stage_graph(config, config.stages[-1]), *select_mesh(config)).roles
    for role, name in (("reward", "helpful"), ("cost", "harmful")):
        stored = load_file(tmp_path / name / "adapter_model.safetensors")
        bias = 4  # of the head, which is not written where it is 0
        assert roles[role] == {"weights": sum(tensor.nbytes for tensor in stored.values()) + bias}
    assert {"reward.score", "cost.score"} <= {call.name for call in graph_of(config)}
    trained = "actor", "critic", "cost_critic"
    size = 3 * sum(roles[role]["weights"] for role in trained)  # every device has all of an adapter
    assert f"a checkpoint of safe_rlhf: {in_units(size)}; run_dir needs room for 3 of them" in describe(config)
    assert f"saving takes at most {in_units(size)} of a device" in describe(config)  # all arrays are one group
    plan = {line.split()[0]: line for line in describe(config).split("plan of ")[1].splitlines() if line}
    assert all("layout generate" in plan[name] for name in ("reward.score", "cost.score", "cost_critic.values"))

    functions = sections | {"costs": [{"name": "words", "function": "word_count"}]}
    text = describe(build(Config, without_ppo(settings(**functions))))
    assert "cost.score" in text and text.count("functions, beside the rest") == 1
    assert text.count("cost words") == text.count("cost words: ") == 1


REWARDS = """
from pathlib import Path

def counted(completions, prompts, trainer_state, **columns):
    done = trainer_state.global_step / trainer_state.max_steps
    with open(Path(__file__).with_name("calls"), "a") as file:
        print(len(completions), prompts[0][0]["content"], completions[0][0]["content"], file=file)
    return [len(completion[0]["content"]) + done for completion in completions]

def fussy(completions, question):
    return [None if "more" in asked else 1.0 for asked in question]

def single(completions):
    return [1.0]

def slow(completions):
    import time
    time.sleep(60)
"""


def test_the_first_prompt_is_shown_and_each_reward_function_called_once_on_it(tmp_path, settings, user, capsys):
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [{"question": "How many?", "answer": "It is 12."}, {"question": "How many more?", "answer": "3"}] * 20
    columns = {"prompt": "question", "completion": "answer"}
    prompts = {"path": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "columns": columns}

    def dry_run(function: str, **reward) -> tuple[int, str, str]:
        own = [{"name": "mine", "function": f"{tmp_path / 'mine.py'}:{function}", **reward}]
        data, runs = {"prompts": prompts, "heldout_rows": 1}, str(tmp_path / "runs")
        (tmp_path / "config.yaml").write_text(json.dumps(settings(rewards=own, run_dir=runs, data=data)))
        code = cli(["--config", str(tmp_path / "config.yaml"), "--dry-run"])
        return code, *capsys.readouterr()

    code, text, _ = dry_run("counted")
    assert re.search(r"^an epoch is [0-9.]+ iterations$", text, re.MULTILINE)
    (call,) = (tmp_path / "calls").read_text().splitlines()
    shown = text.split("the first prompt, as the model reads it:\n")[1].split("scores of 2 made-up answers (")[0]
    question, mark, answer = call.removeprefix("2 ").partition("? ")
    question += mark.strip()
    assert code == 0 and answer == {"How many?": "It is 12.", "How many more?": "3"}[question]
    assert f"<|im_start|>user\n  {question}<|im_end|>\n" in shown and shown.endswith("<|im_start|>assistant\n\n")
    head = f"scores of 2 made-up answers ({answer!r}, 'This is answer 2.' ...) to 1 prompt(s), which show that "
    assert f"{head}functions work, and no more:\n  reward mine: {len(answer)}, 17\n" in text
    assert "weights are not read here: a run reads them before it trains" in text and not (tmp_path / "runs").exists()

    rows += [{"question": f"How many {kind}?", "answer": "3"} for kind in ("eggs", "more eggs", "hens", "more hens")]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    code, _, error = dry_run("fussy")
    assert code == 2 and "set skip_none=true or abstain=true of reward 'mine' if that is meant, or set on" in error
    code, text, _ = dry_run("fussy", skip_none=True)
    (line,) = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("  reward mine: ")]
    assert code == 0 and len(line.split(", ")) >= 6 and {*line.split(", ")} == {"none", "1"}

    code, _, error = dry_run("single")
    assert code == 2 and "reward 'mine' failed (length: returned 1 scores for " in error
    # There is nothing to resume.
    assert "set on_failure of reward 'mine' to a score for such samples, or to exclude\n" in error
    code, _, error = dry_run("slow", deadline=1.0)
    assert code == 2 and "reward 'mine' failed (hang" in error
    write_jsonl(tmp_path / "rows.jsonl", rows[:40])
    code, text, _ = dry_run("single", on_failure=-3)
    assert code == 0 and "  reward mine: -3, -3 (on_failure for failed ones: 2 length; the last: returned 1 sc" in text


def test_the_first_text_is_shown_where_there_are_no_prompts(settings):
    given = settings(stages=["sft"], rewards=[])
    text = describe(build(Config, given))
    assert "the first text to learn, as the model reads it:\n  <|im_start|>" in text
    rows = len(Path(given["data"]["sft"]["path"]).read_text().splitlines()) - 8  # held out
    assert f"an epoch of sft is {rows / 8:.4g} steps\n" in text


def test_datasets_that_a_run_could_not_read_are_named(settings, monkeypatch):
    def config(path: str) -> Config:
        sft = {"path": path, "columns": {}}
        return build(Config, settings(stages=["sft"], rewards=[], data={"sft": sft}))

    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))  # an extra: not everywhere
    unseen = "data.sft.path=someone/rows is not here: not looked at\nso neither the data nor the rewards were checked"
    assert unseen in describe(config("someone/rows"))
    with pytest.raises(UserError, match="gone.jsonl does not exist: name a file, a directory or a dataset on the hub"):
        describe(config("gone.jsonl"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = describe(config("someone/rows"))  # memory and plan all the same
    assert "someone/rows is no file: to load it from disk or the hub, pip install 'jrlhf[hf]'" in text


def of_h100s(_, workload, *__) -> CostModel:
    return CostModel(workload, Cluster(HARDWARE["h100"], 8))


def without_ppo(sections: dict) -> dict:
    return {name: section for name, section in sections.items() if name != "ppo"}


def test_the_move_of_the_last_rows_needs_prices_and_is_described(settings, monkeypatch):
    rollout = {"chunk": 4, "last_groups": "auto"}
    config: Config = build(Config, settings(plan="split", compute={"score_rows": 4}, rollout=rollout))
    with pytest.raises(UserError, match="nothing is known of .* on cpu devices: .*, or set rollout.last_groups=null"):
        describe(config)
    monkeypatch.setattr(choices, "prices_here", of_h100s)
    text = describe(replace(config, notices=("a notice",)))
    assert text.startswith("a notice\n\n")  # as the run itself does
    assert "the last rows move as the lengths of the last 4 rollouts suggest, of the first not;\n" in text
    assert "  actor.generate: the last rows " in text and " s until all rows are drawn and scored" in text


def test_tiles_and_moves_share_their_prices(settings, monkeypatch):
    """The message names the setting that asks first."""
    monkeypatch.setattr(choices, "prices_here", lambda *arguments: [arguments[-1]])
    for rows, key in (("auto", "compute.score_rows"), (4, "rollout.last_groups")):
        rollout = {"chunk": 4, "last_groups": "auto"}
        config: Config = build(Config, settings(plan="split", compute={"score_rows": rows}, rollout=rollout))
        prices: Any = prices_of_rollouts(config, cast(Any, None), [])
        assert prices() == [f"{key}=null"] and prices() is prices()


def test_tiles_are_chosen_and_described(settings, monkeypatch):
    def chosen(plan: str) -> str:
        given = settings(plan=plan, compute={"score_rows": "auto"}, rollout={"chunk": 4})
        text = describe(build(Config, given))
        (line,) = [line for line in text.splitlines() if "compute.score_rows=auto: " in line]
        return line

    assert "because no model scores on devices that are free while rows decode" in chosen("colocate")
    with pytest.raises(UserError, match="nothing is known of .* on cpu devices: .*, or set compute.score_rows=null"):
        chosen("split")
    monkeypatch.setattr(choices, "prices_here", of_h100s)
    assert "whole batches are scored after the last row; responses of 7 tokens in the mean" in chosen("split")
