"""The model card: right figures, metadata that the hub reads, a recipe that can be read back, and nothing private."""

import io
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, get_args, get_origin

import matplotlib.image
import numpy as np
import pytest
import yaml

import jrlhf
from jrlhf.config import Config, config_yaml
from jrlhf.config.keys import classes_of, kinds_of
from jrlhf.config.parse import build
from jrlhf.config.schema import DatasetsData, RewardConfig
from jrlhf.report.card import CardData, card, card_data, files, license_of
from jrlhf.report.read import Record, read_run
from jrlhf.roles.pretrained import hub_model, hub_names
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
    hub = ("Qwen/Qwen2.5-0.5B", "openai/gsm8k:main", "org/judge", "org/rows")
    return Record("mine", metrics={"sft": sft, "grpo": rows}, hub=hub, **options)


def facts(step: int = 40, given: dict = USER, **options) -> CardData:
    options.setdefault("summary", {"held_out": HELD_OUT, "steps": {"sft": 30, "grpo": 40}})
    return card_data(build(Config, given), record_of(**options), "grpo", step, None)


def metadata(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def tables(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("|")]


def test_the_figures_are_those_of_the_run():
    rows = tables(card(facts()))
    (note,) = (row[2] for row in rows if row[:2] == ["Score, held out", "0.25 → 0.75"])
    assert note.startswith("0.250 ± 0.050 before, 0.750 ± 0.040 after GRPO on 64 held-out prompts; ")
    assert ["exact", "0.250 → 0.500", "held out"] in rows and ["judge", "-1.000 → 2.000", "held out"] in rows
    mean = np.mean([step / 40 for step in range(31, 41)])
    assert ["Score in training", f"{mean:.2f}", "mean of the last quarter"] in rows
    assert "1. SFT: 30 steps\n2. GRPO: 40 iterations\n" in card(facts())


def test_what_makes_a_figure_doubtful_stands_below_it():
    held_out = HELD_OUT | {"doubts": ["the reward exact_match is 0.000 for every answer: it taught nothing"]}
    text = card(facts(summary={"held_out": held_out, "steps": {"sft": 30, "grpo": 40}}))
    doubt = text.index("\n- the reward exact\\_match is 0.000 for every answer: it taught nothing\n")
    assert text.index("| Score, held out |") < doubt < text.index("## Recipe")
    assert "taught" not in card(facts())


def test_a_checkpoint_is_described_by_what_was_measured_until_then():
    text = card(facts(step=20))
    mean = np.mean([step / 40 for step in range(16, 21)])
    assert ["Score in training", f"{mean:.2f}", "mean of the last quarter"] in tables(text)
    assert "64 held-out prompts" not in text and "2. GRPO: 20 of 40 iterations" in text
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
    fresh = metadata(card(card_data(Config(), Record("fresh"), "ppo", 1, None)))
    assert "base_model" not in fresh and "datasets" not in fresh and "license" not in fresh
    scalar = card(CardData(Config(), Record("fresh"), "ppo", 1, head="scalar"))
    assert metadata(scalar)["pipeline_tag"] == "text-classification" and "AutoModelForSequenceClassification" in scalar


def test_nothing_private_is_told():
    local = facts(given=USER | {"model": {"path": "/home/someone/base"}})
    assert "# base: a LoRA adapter trained with SFT and GRPO" in card(replace(local, adapter=True))
    text = card(facts())
    assert "someone" not in text and "hunter2" not in text and "limit: (left out)" in text and "```" in text
    assert "`rows.jsonl`" in text and "function `rewards.py:exact`" in text
    assert "[openai/gsm8k:main](https://huggingface.co/datasets/openai/gsm8k)" in text


def filled(kind: Any, name: str, secret: Callable[[str], Any]) -> Any:
    """A value for a setting of this type that gives all texts of the user, all places and all options; None: none."""
    arguments = get_args(kind)
    if classes := classes_of(kind):
        given = {key: filled(inner, key, secret) for key, inner in kinds_of(classes[-1]).items()}
        if classes[-1] is RewardConfig:
            given |= {"name": "word", "model": None, "adapter": None}
        return {key: value for key, value in given.items() if value not in (None, {}, [])}
    if get_origin(kind) is Mapping:
        return {"token": secret("text"), "list": [{"inner": secret("text")}], "number": secret("number")}
    if get_origin(kind) is tuple:
        parts = [filled(arguments[0], name, secret), filled(arguments[0], name, secret)]
        return [part for part in parts if part is not None]
    if kind is str or str in arguments:
        return secret(
            "place" if name in ("path", "critic", "reference", "model", "adapter", "function", "optimizer") else "text"
        )
    return None


@pytest.mark.parametrize("seed", range(2))
def test_no_text_option_or_directory_of_a_config_is_told(seed: int):
    """Random secrets stand in every setting of data and rewards that takes them, a new one included, and in others."""
    draw, secrets = random.Random(seed), []

    def secret(kind: str) -> Any:
        secrets.append(str(draw.randrange(10**15, 10**16)))
        hidden = secrets[-1]
        places = ("/home/{}/x", "{}/x", "a/../{}/x", "s3://me:{}@host/x", "s3://me:{}@host")
        texts = ("{}", "token={}", "--in=/home/{}/x", "https://me:{}@host", "a\n```\n{}", "/{}", "`{}`")
        return int(hidden) if kind == "number" else draw.choice(places if kind == "place" else texts).format(hidden)

    data = filled(DatasetsData, "data", secret) | {"source": "datasets"}
    for part in ("sft", "preferences", "prompts", "heldout"):
        data[part] |= {"split": "train"}  # is told
        data[part]["path"] = data[part]["path"].replace("s3://", "/")
    reward = [filled(RewardConfig, "", secret) for _ in range(2)]
    for number, part in enumerate(reward):
        part |= {"name": f"word{number}", "function": part["function"].replace("s3://", "/")}
        part["client"] = {"url": f"http://{secret('number')}.org/v1", "model": secret("text")}
    given = USER | {"data": data, "rewards": reward, "model": {"path": secret("place")}}
    given |= {"roles": {"reference": secret("place")}, "wandb": {"project": secret("text"), "group": secret("text")}}
    given["grpo"] = USER["grpo"] | {"dataflow": secret("place")}
    config = build(Config, given)
    written = config_yaml(config)
    assert sum(hidden in written for hidden in secrets) >= 57
    run = replace(record_of(), hub=())
    for adapter in (False, True):
        text = card(CardData(config, run, "grpo", 40, adapter=adapter))
        assert [hidden for hidden in secrets if hidden in text] == []


def test_a_directory_is_no_name_of_the_hub(tmp_path: Path, monkeypatch):
    """The start of a run tells them apart; an export from elsewhere, where the directory is not seen, goes by that."""
    (tmp_path / "team" / "prompts").mkdir(parents=True)
    local = {"path": "team/prompts", "split": "train"}
    given = USER | {"data": USER["data"] | {"prompts": local}}
    monkeypatch.chdir(tmp_path)
    names = hub_names(build(Config, given))
    assert names == ["Qwen/Qwen2.5-0.5B", "org/judge"]
    monkeypatch.chdir("/")
    (tmp_path / "config.yaml").write_text(config_yaml(build(Config, given)))
    (tmp_path / "hub.txt").write_text("".join(f"{name}\n" for name in names))
    run = read_run(tmp_path)
    text = card(CardData(build(Config, given), run, "grpo", 40))
    assert "datasets" not in metadata(text) and "team" not in text and "- prompts: `prompts`, split `train`" in text
    assert metadata(text)["base_model"] == "Qwen/Qwen2.5-0.5B"
    text = card(CardData(build(Config, given), replace(run, hub=("team/prompts",)), "grpo", 40))
    assert metadata(text)["datasets"] == ["team/prompts"] and "base_model" not in metadata(text)


def test_texts_of_the_user_are_no_markdown():
    data = {"path": "/data/a`b\n# c.jsonl", "split": "train\n\n# Injected\n`x`"}
    given = USER | {"data": USER["data"] | {"prompts": data}, "model": {"path": "/x/[a](b)\n<i>_c_"}}
    text = card(facts(given=given))
    assert "\n# \\[a\\](b) \\<i\\>\\_c\\_, trained with SFT and GRPO\n" in text
    assert "- prompts: `` a`b # c.jsonl ``, split `` train  # Injected `x` ``\n" in text
    assert "\n# Injected" not in text and "\n# c.jsonl" not in text


def test_the_recipe_can_be_read_back(tmp_path: Path):
    """It gives a config that may resume the run, so with all settings that define the results."""
    given = USER | {"rewards": USER["rewards"][1:]}
    given["data"] = USER["data"] | {"sft": {"path": "org/rows"}, "system": "(left out)"}
    given["data"]["prompts"] = USER["data"]["prompts"] | {"columns": {"prompt": "(left out)"}}
    text = card(facts(given=given))
    (recipe,) = re.findall(r"^(`{3,})yaml\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)
    config = build(Config, yaml.safe_load(recipe[1]))
    assert config.name != "mine" and "samples: 4" in recipe[1] and "max_grad_norm: null" in recipe[1]
    refused, line = changes(tmp_path, config_yaml(build(Config, given)), config)
    assert refused == [] and line.startswith("with ")


def test_versions_need_no_installed_package(monkeypatch):
    """A run from a checkout, whose package has no metadata, exports its model, too."""

    def version(name: str) -> str:
        if name == "jrlhf":
            raise PackageNotFoundError(name)
        return f"{name}'s"

    monkeypatch.setattr("jrlhf.report.card.version", version)
    assert f"jrlhf {jrlhf.__version__}, jax jax's, flax flax's" in card(facts())


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
    text = files(given)["README.md"].decode()
    assert "![score on held-out prompts before each iteration](progress.png)" in text
    assert "before each iteration. A validation draws answers of its own: it differs by chance" in text
    given.record.metrics["grpo"][:] = given.record.metrics["grpo"][:5]
    assert "mean score in the iterations of GRPO" in files(given)["README.md"].decode()
    given.record.metrics.clear()
    assert list(files(given)) == ["README.md"]


def test_a_licence_is_told_only_where_the_base_tells_it(tmp_path: Path):
    assert license_of(tmp_path) == {}
    for text, expected in {
        "---\nlicense: other\nlicense_name: mine\ntags: [a]\n---\n# x": {"license": "other", "license_name": "mine"},
        "---\nlicense: [mit, apache-2.0]\n---\n": {"license": ["mit", "apache-2.0"]},
        '---\nlicense: null\nlicense_name: {a: b}\nlicense_link: "a\\nb"\n---\n': {"license_link": "a b"},
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
    names = ["Qwen/Qwen2.5-0.5B"]
    assert hub_model(f"{cached}{end}", []) == "Qwen/Qwen2.5-0.5B" == hub_model("Qwen/Qwen2.5-0.5B", names)
    assert (
        hub_model(str(tmp_path), names) is None and hub_model(None, names) is None and hub_model("a/b", names) is None
    )
