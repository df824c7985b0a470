"""The model card: right figures, metadata that the hub reads, a recipe that can be read back, and nothing private."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import yaml

from jrlhf.config import Config, config_yaml
from jrlhf.config.parse import build
from jrlhf.report.card import Facts, card, facts_of, files, license_of
from jrlhf.report.read import Record
from jrlhf.roles.pretrained import hub_model
from jrlhf.run.resume import changes

USER: dict[str, Any] = {
    "name": "mine",
    "run_dir": "/home/someone/runs",
    "stages": ["sft", "grpo"],
    "model": {"path": "Qwen/Qwen2.5-0.5B"},
    "lora": {"rank": 8},
    "data": {
        "source": "datasets",
        "sft": {"path": "/home/someone/data/rows.jsonl"},
        "prompts": {"path": "openai/gsm8k:main", "split": "train", "columns": {"prompt": "question"}},
        "system": "Answer with ```code``` only.",
        "max_prompt": 96,
    },
    "rewards": [
        {"name": "exact", "function": "/home/someone/rewards.py:exact", "weight": 2.0}
        | {"options": {"api_key": "hunter2", "limit": 3}},
        {"name": "judge", "model": "org/judge"},
    ],
    "sft": {"steps": 30, "max_grad_norm": None},
    "grpo": {"iterations": 40, "save_every": 5, "algorithm": {"samples": 4}},
    "validation": {"every": 10},
}
HELD_OUT = {
    "measure": "score",
    "n": 64,
    "before": {"score": 0.25, "score_standard_error": 0.05, "items": {"exact": 0.25, "judge": -1.0}},
    "after": {"score": 0.75, "score_standard_error": 0.04, "items": {"exact": 0.5, "judge": 2.0}},
}


def record_of(steps: int = 40, seconds: float = 1.0, **options) -> Record:
    """A run whose score rises by a fortieth an iteration, and whose validation is a tenth higher."""
    rows = [
        {"stage": "grpo", "step": step, "timing_s/step": seconds, "critic/score/mean": step / 40, "objective/kl": 0.5}
        | ({"val-core/all/score/mean@1": step / 40 + 0.1} if step % 10 == 1 else {})
        for step in range(1, steps + 1)
    ]
    sft = [{"stage": "sft", "step": step, "sft/loss": 3.0 / step, "sft/eval_loss": 2.0} for step in range(1, 31)]
    return Record("mine", metrics={"sft": sft, "grpo": rows}, **options)


def facts(step: int = 40, given: dict = USER, **options) -> Facts:
    options.setdefault("summary", {"held_out": HELD_OUT, "steps": {"sft": 30, "grpo": 40}})
    return facts_of(build(Config, given), record_of(**options), "grpo", step, None)


def metadata(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def tables(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("|")]


def test_the_figures_are_those_of_the_run():
    rows = tables(card(facts()))
    assert ["score, 64 held-out prompts", "0.250 ± 0.050", "0.750 ± 0.040"] in rows
    assert ["exact", "0.250", "0.500"] in rows and ["judge", "-1.000", "2.000"] in rows
    mean = np.mean([step / 40 for step in range(31, 41)])
    assert ["score in training, last quarter", "", f"{mean:.2f}"] in rows
    assert "1. SFT: 30 steps\n2. GRPO: 40 iterations\n" in card(facts())


def test_a_checkpoint_is_described_by_what_was_measured_until_then():
    text = card(facts(step=20))
    mean = np.mean([step / 40 for step in range(16, 21)])
    assert ["score in training, last quarter", f"{mean:.2f}"] in tables(text)
    assert "held-out prompts |" not in text and "2. GRPO: 20 of 40 iterations" in text
    assert files(facts(step=20)) == files(facts(step=20, steps=20, summary={}))
    assert files(facts(step=20))["progress.png"] != files(facts())["progress.png"]


def test_the_hub_reads_the_metadata():
    given = facts()
    common = {"base_model": "Qwen/Qwen2.5-0.5B", "datasets": ["openai/gsm8k"]}
    assert metadata(card(given)) == common | {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model_relation": "finetune",
        "tags": ["jrlhf", "sft", "grpo", "lora"],
    }
    adapter = metadata(card(replace(given, adapter=True, license={"license": "apache-2.0"})))
    assert (adapter["library_name"], adapter["base_model_relation"]) == ("peft", "adapter")
    assert adapter["license"] == "apache-2.0"
    fresh = metadata(card(facts_of(Config(), Record("fresh"), "ppo", 1, None)))
    assert "base_model" not in fresh and "datasets" not in fresh and "license" not in fresh
    scalar = card(Facts(Config(), Record("fresh"), "ppo", 1, head="scalar"))
    assert metadata(scalar)["pipeline_tag"] == "text-classification" and "AutoModelForSequenceClassification" in scalar


def test_nothing_private_is_told():
    local = facts(given=USER | {"model": {"path": "/home/someone/base"}})
    assert "# base: a LoRA adapter trained with SFT and GRPO" in card(replace(local, adapter=True))
    text = card(facts())
    assert "someone" not in text and "hunter2" not in text and "(left out)" in text
    assert "`rows.jsonl`" in text and "function `rewards.py:exact`" in text and "limit: 3" in text
    assert "[openai/gsm8k:main](https://huggingface.co/datasets/openai/gsm8k)" in text


def test_the_recipe_can_be_read_back(tmp_path: Path):
    """It gives a config that may resume the run, so with all settings that define the results."""
    given = USER | {"rewards": USER["rewards"][1:]}
    given["data"] = USER["data"] | {"sft": {"path": "org/rows"}}
    text = card(facts(given=given))
    (recipe,) = re.findall(r"^(`{4,})yaml\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)
    config = build(Config, yaml.safe_load(recipe[1]))
    assert config.name != "mine" and "samples: 4" in recipe[1] and "max_grad_norm: null" in recipe[1]
    refused, line = changes(tmp_path, config_yaml(build(Config, given)), config)
    assert refused == [] and line.startswith("with ")


def test_equal_runs_have_equal_cards():
    """Also those that were computed elsewhere, by another name, at another speed."""
    elsewhere = USER | {"name": "other", "run_dir": "there", "mesh": {"fsdp": 4}, "sleep": {"reference": "host"}}
    one, two = files(facts()), files(facts(given=elsewhere, seconds=7.0))
    assert list(one) == ["README.md", "progress.png"] and one == two
    assert not re.search(rb"\d{4}-\d\d-\d\d|\d\d:\d\d", one["README.md"])
    assert not set(re.findall(rb"tEXt|tIME|iTXt|zTXt", one["progress.png"]))
    assert files(facts(given=USER | {"seed": 3})) != one


def test_the_plot_shows_the_validation_where_there_is_one():
    given = facts()
    picture = matplotlib.image.imread(io.BytesIO(files(given)["progress.png"]))
    assert picture.shape[:2] == (384, 768)
    assert "![score on held-out prompts before each iteration](progress.png)" in files(given)["README.md"].decode()
    given.record.metrics["grpo"][:] = given.record.metrics["grpo"][:5]
    assert "mean score in the iterations of GRPO" in files(given)["README.md"].decode()
    given.record.metrics.clear()
    assert list(files(given)) == ["README.md"]


def test_a_licence_is_told_only_where_the_base_tells_it(tmp_path: Path):
    assert license_of(tmp_path) == {}
    for text, expected in {
        "---\nlicense: other\nlicense_name: mine\ntags: [a]\n---\n# x": {"license": "other", "license_name": "mine"},
        "# license: mit": {},
        "---\nlicense: [\n---\n": {},
        "---\n- license\n---\n": {},
    }.items():
        (tmp_path / "README.md").write_text(text)
        assert license_of(tmp_path) == expected


@pytest.mark.parametrize("end", ["", "/"])
def test_a_directory_of_the_hubs_cache_has_its_hub_name(end, tmp_path: Path):
    cached = tmp_path / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "0a1b2c"
    cached.mkdir(parents=True)
    assert hub_model(f"{cached}{end}") == "Qwen/Qwen2.5-0.5B" == hub_model("Qwen/Qwen2.5-0.5B")
    assert hub_model(str(tmp_path)) is None and hub_model(None) is None and hub_model("runs/a/b") is None
