"""What does not exist is refused with the likely remedy: every kind of name that a user types."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from jrlhf.config import load_config
from jrlhf.config.check import validate
from jrlhf.config.parse import build
from jrlhf.config.schema import Config, LoRASection
from jrlhf.data.read import read_dataset
from jrlhf.errors import UserError, beside
from jrlhf.export import export_checkpoint
from jrlhf.meshes.hardware import cluster
from jrlhf.models import ModelConfig
from jrlhf.new_config import wrong
from jrlhf.planning.plans import read_plan
from jrlhf.report.read import read_run
from jrlhf.rewards.builtin import spec_of
from jrlhf.rewards.user_code import load, resolve
from jrlhf.roles.pretrained import actor_adapter, locate
from jrlhf.run.directory import check_run

CALLED = "reward 'a'"
MODEL = ModelConfig(vocab_size=300, embed=32, layers=1, heads=4, kv_heads=2, head_dim=8, mlp=32, max_positions=128)


def resumed(name: str) -> None:
    check_run(load_config("quickstart", [f"name={name}"]), resume=True)


def adapter(path: str) -> None:
    actor_adapter(LoRASection(path=path), MODEL, jax.make_mesh((1,), ("data",)))


# What a user typed, and what stands there.
TYPED: list[tuple[Callable[[], Any], str]] = [
    (lambda: load_config("mine.yml"), "did you mean mine.yaml?"),
    (lambda: load_config("mine"), "did you mean mine.yaml?"),
    (lambda: load_config("runs/mine"), "did you mean runs/mine/config.yaml?"),
    (lambda: load_config("quikstart"), "did you mean quickstart?"),
    (partial(resumed, "min"), "did you mean runs/mine?"),
    (lambda: export_checkpoint(Path("runs/min")), "did you mean runs/mine?"),
    (lambda: export_checkpoint(Path("run/mine")), "did you mean runs/mine?"),
    (lambda: read_run("runs/mime"), "did you mean runs/mine?"),
    (lambda: locate("./runs/min", "model"), "did you mean runs/mine?"),
    (lambda: locate("runs/min", "model"), " (did you mean runs/mine?), and "),
    (lambda: wrong("data", "rows.json", {"model": "m"}), "did you mean rows.jsonl?"),
    (lambda: wrong("model", "./adaptor", {}), "did you mean adapter?"),
    (lambda: wrong("data", "arithmetc", {"model": "tiny"}), "did you mean arithmetic?"),
    (lambda: wrong("data", "rows.jsonl", {"model": "tiny"}), "so start again with --model and another one"),
    (lambda: wrong("data", "arithmetic", {"model": "m"}), "start again with --model tiny, or name a dataset"),
    (lambda: wrong("algorithm", "gpo", {"data": "arithmetic"}), "did you mean grpo?"),
    (lambda: wrong("algorithm", "dop", {"data": "docstrings"}), "did you mean dpo?"),
    (lambda: wrong("reward", "exact_mach", {"data": "arithmetic"}), "did you mean exact_match?"),
    (lambda: read_dataset("p.txt"), """convert it, for example to lines such as {"prompt": "..."} in a .jsonl file"""),
    (lambda: read_dataset("rows.json"), "did you mean rows.jsonl?"),
    (lambda: read_dataset("dat/rows.jsonl"), "did you mean data/rows.jsonl?"),
    (partial(adapter, "adaptor"), "did you mean adapter?"),
    (lambda: resolve("reward.py:short", CALLED), "rewards.py?"),
    (lambda: resolve("red.py:short", CALLED), "red.py: name one that exists"),  # only their suffix is alike
    (lambda: load(resolve("rewards.py:shrot", CALLED), CALLED), "did you mean short?"),
    (lambda: spec_of("numeric_answr", CALLED), "did you mean numeric_answer?"),
    (lambda: read_plan(Path("colocat")), "did you mean colocate?"),
    (lambda: read_plan(Path("my-plan.yml")), "did you mean my-plan.yaml?"),
    (lambda: load_config("quickstart", ["stages=[sft, pppo]"]), "did you mean ppo"),
    (lambda: cluster("64xmi300"), "measure others where they are, by jrlhf.plan --profile"),
    (lambda: cluster("8xh10"), "the nearest is 8xh100"),
    (lambda: cluster("v5q-8"), "the nearest is v5p-8"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    def download(*_, **__) -> None:
        raise ConnectionError("there is no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for name in ("mine.yaml", "my-plan.yaml", "runs/mine/config.yaml", "rows.jsonl", "data/rows.jsonl", "adapter/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "p.txt").write_text("Why?\n")
    (tmp_path / "rewards.py").write_text("def short(completions): ...\ndef long(completions): ...\n")
    return tmp_path


def test_a_name_that_does_not_exist_leads_to_the_one_that_was_meant(place):
    for call, remedy in TYPED:
        try:
            sentence = call()  # the questions of `init` return what is wrong
        except (UserError, ValueError) as refused:
            sentence = str(refused)
        assert remedy in sentence, sentence


def test_a_name_that_is_like_none_gets_no_guess(place):
    for path in ("zzz", "zzz/mine", "runs/zzz", "/nowhere/at/all", "rewards.py/x"):
        assert beside(path, "otherwise") == "otherwise"


def test_data_of_a_stage_that_was_left_out_are_removed_on_a_command_line(settings):
    config: Config = build(Config, settings(stages=["sft", "ppo"]) | {"stages": ["ppo"]})
    remedy = r"data.sft.path=.* has no effect .*: leave it out \(data.sft=null on a command line\)"
    with pytest.raises(UserError, match=remedy):
        validate(config, 8, {"actor": MODEL})
    validate(replace(config, data=replace(config.data, sft=None)), 8, {"actor": MODEL})
