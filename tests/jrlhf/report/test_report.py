"""The report: the right numbers for whatever a run has written, and nothing in it that can run or reach the network."""

import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup

import jrlhf
from jrlhf.config.parse import build, config_yaml
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.report import read_run, render, write_report
from jrlhf.report.__main__ import cli
from jrlhf.report.charts import Chart
from jrlhf.report.timeline import _CALLS
from jrlhf.run.colors import call_color
from jrlhf.run.files import append_jsonl

GOLDEN = Path(__file__).with_name("golden.json")
EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&amp;\x1b[31m'
SOURCES = ("openai/gsm8k", EVIL)
USER_CONFIG = """
seed: 3
mesh: {data: 1, fsdp: 4, tensor: 1}
model: {path: /weights/Qwen2.5-0.5B}
lora: {rank: 16, alpha: 32}
ppo: {iterations: 8, algorithm: {kl_target: null}}
safe_rlhf: {iterations: 4, algorithm: {cost_limit: 3.0}}
dpo: {steps: 30, algorithm: {loss: sigmoid}}
"""


class Page(HTMLParser):
    """Reads a page as a browser would: its tags and text. Checks that every element is closed where it belongs."""

    VOID = ("meta", "br", "img", "link", "input", "wbr")

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "title"):
            self.words.append(data)


# --- Records of runs ---


def of_stage(stage: str, steps: int, seconds: float, **constant: float) -> list[dict]:
    """Records of a stage whose metrics are constant."""
    return [{"stage": stage, "step": step, "timing_s/step": seconds, **constant} for step in range(1, steps + 1)]


def sft_records(steps: int = 40) -> list[dict]:
    records = [record | {"sft/loss": 3 + 2 / record["step"]} for record in of_stage("sft", steps, 0.1)]
    records[-1]["sft/eval_loss"] = 3.25
    return records


def reward_model_records() -> list[dict]:
    metrics = {"loss": 0.5, "accuracy": 0.8, "eval_accuracy": 0.75, "eval_pairs": 300}
    return of_stage("reward_model", 2, 0.5, **{f"reward_model/{name}": value for name, value in metrics.items()})


def gold_records(steps: int = 12) -> list[dict]:
    """PPO on the built-in task, whose rubric measures a gold score."""
    constant = {"gold/full_stop": 0.9, "objective/kl_coef": 0.05, "actor/entropy": 2.0, "actor/grad_norm": 1.0}
    constant |= {"critic/grad_norm": 2.0, "response_length/mean": 11.0, "timing_s/update_actor": 2.0}
    constant |= {"timing_s/reshard": 0.25, "timing_s/custom": 0.25, "critic/vf_explained_var": 0.3, "timing_s/gen": 1.0}
    records = of_stage("ppo", steps, 4.0, **constant)
    for step, record in enumerate(records, 1):
        record |= {"critic/score/mean": step / 10, "gold/score": 0.5 + step / 100, "objective/kl": 0.5 * step}
    records[0] |= {"critic/vf_explained_var": -40.0, "timing_s/gen": 20.0, "timing_s/step": 33.0}
    return records


def user_records(steps: int = 8) -> list[dict]:
    """Reinforcement learning on a user's data and reward functions, some of which fail."""
    constant = {"objective/kl_coef": 0.1, "rewards/exact/std": 0.5, "rewards/exact/digits": 3.0}
    constant |= {"rewards/exact/failures": 0.0, "rewards/exact/failures/none": 0.0, "rewards/exact/mean": 0.0}
    constant |= {f"rewards/{EVIL}/mean".replace("/script", "script"): 1.0}
    constant |= {"score/raw/mean": 0.0, "score/missing_eos": 0.125}
    constant |= {"timing_s/gen": 3.0, "timing_s/reward_functions": 2.0, "timing_s/reward_wait": 1.0}
    records = of_stage("ppo", steps, 4.0, **constant)
    for step, record in enumerate(records, 1):
        record |= {"critic/score/mean": step / 10, "objective/kl": step / 4, "score/raw/mean": step / 9}
        record |= {"rewards/exact/mean": 0.25 + step / 100}
        if step in (3, 6):  # a kind of failure is recorded only in iterations in which it occurred
            record |= {"rewards/exact/failures": 2.0 + step // 6, "rewards/exact/failures/timeout": 2.0}
        if step == 6:
            record["rewards/exact/failures/nan"] = 1.0
        for place, source in enumerate(("all", *SOURCES) if step % 4 == 1 else ()):
            record |= {
                "timing_s/validation": 8.0,
                f"val-core/{source}/score/mean@4": 0.25 + step / 100 + place / 1000,
                f"val-core/{source}/score/best@4/mean": 0.5 + step / 100,
                f"val-aux/{source}/exact/digits/mean@4": 0.75,
            }
    return records


def dpo_records(steps: int = 30) -> list[dict]:
    names = "dpo/loss dpo/grad_norm rewards/accuracies rewards/chosen rewards/rejected rewards/margins logps/chosen"
    names += " logps/rejected dpo/eval_loss dpo/eval_accuracy dpo/eval_margin"
    records = of_stage("dpo", steps, 2.0, **{"timing_s/update": 1.5})
    return [record | dict.fromkeys(names.split(), record["step"] / 40) for record in records]


def safe_records(**more: float) -> list[dict]:
    metrics = {"safe/multiplier": 1.0, "rewards/exact/mean": 0.5, "costs/words/failures": 2.0}
    metrics |= {"costs/words/failures/timeout": 2.0, "cost_critic/vf_explained_var": 0.25}
    metrics |= {"cost_critic/grad_norm": 7.0, "timing_s/cost_values": 1.0, "timing_s/update_cost_critic": 3.0}
    records = of_stage("safe_rlhf", 4, 4.0, **metrics, **more)
    for step, record in enumerate(records, 1):
        record |= {"critic/score/mean": step / 10, "cost/mean": 6.0 - step, "costs/words/mean": 6.0 - step}
    return records


def gold_samples(count: int = 12) -> list[dict]:
    common = {"stage": "evaluation", "step": 0, "reference": "Return x.", "gold_before": 0.5}
    texts = [{"prompt": f"def f{i}(x):\n", "before": f"before {i}", "after": f"after {i}"} for i in range(count)]
    texts[0]["after"] = EVIL
    return [common | record | {"gold_after": 0.5 + (index - 3) / 20} for index, record in enumerate(texts)]


def user_samples() -> list[dict]:
    samples: list[dict] = [{"stage": "ppo", "step": 7, "prompt": "p", "response": "trained on", "score": 0.5}]
    samples.append({**samples[0], "kind": "validation", "response": f"validated {EVIL}", "source": SOURCES[0]})
    for i in range(12):
        answers = {"before": "no\nidea", "after": EVIL, "score_before": 0.5, "score_after": i / 10}
        samples.append({"stage": "evaluation", "step": 0, "prompt": f"q{i}", "source": SOURCES[i % 2], **answers})
    return samples


def results(measure: str, value: float, items: dict, distinct: int) -> dict:
    return {measure: value, f"{measure}_standard_error": 0.01, "items": items, "distinct": distinct}


def by_source(mean: float) -> dict:
    return {"sources": {name: {"mean": mean, "n": 1150} for name in SOURCES}}


GOLD_SUMMARY = {
    "held_out": {
        "measure": "gold",
        "before": results("gold", 0.703, {"full_stop": 0.8, "specific": 0.46}, 240),
        "after": results("gold", 0.868, {"full_stop": 0.99, "specific": 0.44}, 228),
        "n": 256,
        "difference": 0.165,
        "standard_error": 0.0102,
    },
    "phases": {"sft": 75.2, "ppo": 92.0},
}
USER_SUMMARY = {
    "held_out": {
        "measure": "score",
        "before": results("score", 0.25, {"exact": 0.25, "brevity": -400.0}, 100) | by_source(0.25),
        "after": results("score", 0.5, {"exact": 0.625, "brevity": -100.0}, 90) | by_source(0.5),
        "n": 300,
        "difference": 0.25,
        "standard_error": 0.025,
    },
    "phases": {"ppo": 92.0},
}
COSTS = {
    "before": {"score": 0.25, "cost": 5.5, "cost_standard_error": 0.25},
    "after": {"score": 0.5, "cost": 2.5, "cost_standard_error": 0.125},
}
SAFE_SUMMARY = {"held_out": USER_SUMMARY["held_out"] | COSTS, "cost": {"last_quarter": 2.875, "limit": 3.0}}
PLAN = Plan(
    "mine",
    {
        "actor.generate": Placement(Slice(0, 8), "generate", fsdp=2, tensor=4),
        "actor.update": Placement(Slice(0, 6), "train", fsdp=6, micro_batches=4),
        "critic.update": Placement(Slice(6, 2), "train", data=2),
    },
)


def calls(stage: str, step: int, **ends: float) -> list[dict]:
    """A line of timeline.jsonl with calls that follow one another."""
    spans = zip(ends, [0.0, *ends.values()], ends.values(), strict=False)
    named = [{"name": name, "devices": "0-7", "start": start, "end": end} for name, start, end in spans]
    return [{"stage": stage, "step": step, "calls": [call | {"copies": False} for call in named]}]


def write(directory: Path, *, config=USER_CONFIG, metrics=(), texts=(), summary=None, plan=None, timelines=()) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "config.yaml").write_text(config)
    append_jsonl(directory / "metrics.jsonl", metrics)
    append_jsonl(directory / "samples.jsonl", texts)
    append_jsonl(directory / "timeline.jsonl", timelines)
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    if plan is not None:
        (directory / "plan.yaml").write_text(plan.to_yaml())
    return directory


def sft_run() -> dict:
    records = of_stage("sft", 30, 0.5, **{"sft/loss": 2.0})
    records[9]["sft/eval_loss"], records[29]["sft/eval_loss"] = math.log(2), math.log(3)
    common = {"stage": "evaluation", "step": 0}
    answers = [common | {"prompt": f"q{i}", "before": f"a{i}", "score_before": i / 10} for i in range(12)]
    before = {"score": 0.5, "score_standard_error": 0.125, "items": {"exact": 0.375}, "distinct": 5}
    summary = {"held_out": {"measure": "score", "n": 12, "before": before}}
    return {"metrics": records, "texts": answers, "summary": summary}


RUNS = {
    "gold": {
        "config": config_yaml(build(Config, {"ppo": {"algorithm": {"kl_target": 4.0}}})),
        "metrics": sft_records() + reward_model_records() + gold_records(),
        "texts": [{"stage": "ppo", "step": 1, "prompt": "p", "response": EVIL, "score": 1.0}, *gold_samples()],
        "summary": GOLD_SUMMARY,
        "plan": PLAN,
        "timelines": calls("ppo", 7, reshard=0.25, gen=1.25, update_actor=3.25, custom=3.5),
    },
    "user": {
        "metrics": user_records(),
        "texts": user_samples(),
        "summary": USER_SUMMARY,
        "timelines": calls("ppo", 5, gen=3, reward_wait=4),
    },
    "dpo": {
        "metrics": sft_records() + dpo_records(),
        "summary": {"phases": {"dpo": 60.0}},
        "timelines": calls("dpo", 9, update=1.5),
    },
    "safe": {
        "metrics": safe_records(),
        "summary": SAFE_SUMMARY,
        "timelines": calls("safe_rlhf", 4, cost_values=1, update_cost_critic=4),
    },
    "sft": sft_run(),
    "reward_model": {"metrics": reward_model_records(), "config": "reward_model: {steps: 9}\nlora: {rank: null}\n"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    paths = {name: write(directory / name, **run) for name, run in RUNS.items()}
    (paths["gold"] / "environment.txt").write_text(f"jax==1.2.3 {EVIL}")
    return paths


@pytest.fixture(scope="module")
def pages(runs) -> dict[str, str]:
    pages = {}
    with pytest.MonkeyPatch.context() as patched:
        for name in sorted(runs, key=lambda name: name not in ("user", "reward_model")):
            if name not in ("user", "reward_model"):  # the drawings of two pages will do
                patched.setattr(Chart, "svg", lambda chart, small=False: Markup("<svg></svg>"))
            pages[name] = write_report(runs[name]).read_text(encoding="utf-8")
    return pages


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves out the drawings of the charts, for tests that render many pages."""
    monkeypatch.setattr(Chart, "svg", lambda chart, small=False: Markup("<svg></svg>"))


def undrawn_text(html: str) -> str:
    return Page(re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)).text


# --- Pages ---


def test_pages_have_the_recorded_sections_figures_and_texts(pages):
    """The numbers of golden.json were checked against these runs: means, changes with errors, failures, samples."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden.keys() == pages.keys()
    for name, html in pages.items():
        outline = {
            "sections": re.findall(r'<section id="(\w+)"><h2>(.*?)</h2>', html),
            "figures": [Page(title).text for title in re.findall(r"<figure.*?<h3>(.*?)</h3>", html, re.DOTALL)],
            "text": undrawn_text(html).rpartition("Config and environment")[0],
        }
        assert json.loads(json.dumps(outline)) == golden[name], name
        if name in ("user", "sft", "reward_model"):  # nothing claims a gold score if none is known
            assert "gold" not in outline["text"].lower()


def test_pages_need_and_run_nothing_else(pages):
    for html in pages.values():
        page = Page(html)
        assert ("meta", {"name": "generator", "content": f"jrlhf {jrlhf.__version__}"}) in page.tags
        forbidden = {"script", "img", "link", "iframe", "object", "image", "base", "form"}
        assert {tag for tag, _ in page.tags}.isdisjoint(forbidden) and "\x1b" not in html
        ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
        for tag, attributes in page.tags:
            assert not any(name.startswith("on") for name in attributes)
            for name in {"href", "xlink:href", "src"} & attributes.keys():
                assert attributes[name].startswith("#") and attributes[name][1:] in ids, (tag, attributes)
        assert set(re.findall(r"url\(#([^)]*)\)", html)) <= ids
        assert "@import" not in html and "http" not in "".join(re.findall(r"url\([^)]*\)", html))
    assert all("<script>alert(1)</script>" in Page(pages[name]).text for name in ("gold", "user"))  # shown as text


def test_bars_of_calls_span_their_times_and_their_devices(pages):
    def bars(section: str) -> list[tuple[str, float, float]]:
        matches = re.findall(r'class=bar style="--color:(#\w+);left:([\d.]+)%;width:([\d.]+)%"', section)
        return [(color, float(left), float(width)) for color, left, width in matches]

    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', pages["gold"], re.DOTALL))
    # The calls in their order, one of which is not known, then the rest of the step.
    names = re.findall(r"class=what><b>(\w+)</b>", sections["timeline"])
    assert names == ["reshard", "gen", "update_actor", "custom", "rest"]
    placed = [(0, 6.25), (6.25, 25), (31.25, 50), (81.25, 6.25), (87.5, 12.5)]
    assert [bar[1:] for bar in bars(sections["timeline"])] == placed
    spans = (0, 100), (0, 75), (75, 25)
    calls = re.findall(r"class=what><b>([\w.]+)</b>", sections["plan"])
    assert bars(sections["plan"]) == [(call_color(name), *span) for name, span in zip(calls, spans, strict=True)]
    assert [bar[0] for bar in bars(sections["timeline"])][1:3] == [
        call_color("actor.generate"),
        call_color("actor.update"),
    ]
    assert re.findall(r"class=what><b>(\w+)</b>", pages["user"]) == ["gen", "reward_wait"]  # functions have no bar


def test_every_name_that_calls_are_timed_under_is_explained():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(jrlhf.__file__).parent.rglob("*.py"))
    timed = set(re.findall(r"""(?:timed|clock\.run)\(\s*"(\w+)\"""", sources))
    assert {"gen", "sleep", "transfer"} <= timed <= _CALLS.keys()


def test_any_part_of_a_run_may_be_missing(runs, tmp_path, undrawn):
    """Files, stages, summaries, metrics (absent or not finite), held-out figures: every page is still whole."""
    parts = ("config.yaml", "environment.txt", "metrics.jsonl", "samples.jsonl", "summary.json")
    for present in itertools.chain.from_iterable(itertools.combinations(parts, count) for count in (1, 4)):
        shutil.rmtree(tmp_path / "parts", ignore_errors=True)
        (tmp_path / "parts").mkdir()
        for name in present:
            shutil.copy(runs["gold"] / name, tmp_path / "parts" / name)
        if {"config.yaml", "metrics.jsonl"} & set(present):
            Page(render(read_run(tmp_path / "parts")))
        else:
            with pytest.raises(UserError, match="holds no run"):
                read_run(tmp_path / "parts")

    def text(**run) -> str:
        return Page(render(read_run(write(tmp_path / "run", **run)))).text

    records = {"sft": sft_records(3), "reward_model": reward_model_records(), "ppo": gold_records(9)}
    graded = {"held_out": {"measure": "gold", "before": {"gold": 0.7}, "after": {"gold": 0.8}}}
    for stages in (("sft",), ("sft", "reward_model"), ("ppo",), ()):
        metrics = [record for stage in stages for record in records[stage]]
        for summary in ({}, {"held_out": {}}, {"held_out": None}, graded, GOLD_SUMMARY):
            page = text(metrics=metrics, texts=gold_samples(2), summary=summary)
            assert ("SFT loss" in page) == ("sft" in stages)
            assert ("Is the reward being gamed?" in page) == ("ppo" in stages)
    for complete in (gold_records(9), user_records(), dpo_records(9), safe_records()):
        for number, key in enumerate(sorted(set(complete[0]) - {"stage", "step"})):
            value = {key: None} if number % 2 else {}
            metrics = [{name: record[name] for name in record if name != key} | value for record in complete]
            text(metrics=metrics, summary=USER_SUMMARY)
    held_out: dict = USER_SUMMARY["held_out"]
    few = [held_out | {"before": {"score": 0.25}, "after": {"score": 0.5}}, held_out | {"before": {}, "after": None}]
    for figures in [{key: held_out[key] for key in held_out if key != name} for name in held_out] + few:
        text(metrics=user_records(), texts=user_samples(), summary={"held_out": figures})


def test_sections_say_only_what_the_run_knows(tmp_path, undrawn):
    def text(**run) -> str:
        return Page(render(read_run(write(tmp_path / "mine", **run)))).text

    unfinished = text(config=config_yaml(Config()), metrics=gold_records(5), texts=RUNS["gold"]["texts"][:1])
    assert "unfinished: ppo 5 of 40" in unfinished and "Gold score, held out" not in unfinished
    assert "Latest samples of training step prompt response score 1 p <script>" in unfinished
    without_kl = text(metrics=[{key: record[key] for key in record if "/kl" not in key} for record in user_records()])
    assert "Score Training optimises this very score." in without_kl and "at the samples." in without_kl
    assert "KL" not in without_kl
    healthy = text(
        metrics=[{key: record[key] for key in record if "/failures/" not in key} for record in user_records()]
    )
    assert "failed on" not in healthy
    for lora, chips in {
        "{rank: 8, alpha: 32.0, base: int8}": "finished mine LoRA rank 8, alpha 32 int8 base",
        "{rank: 8, alpha: 0.5, base: auto}": "finished mine LoRA rank 8, alpha 0.5",
        "{rank: null, path: a/warm, alpha: 32.0, base: auto}": "finished mine LoRA from warm",
        "{rank: null, path: null, alpha: 32.0, base: int8}": "finished mine",
        "null": "finished mine",
    }.items():
        page = text(config=f"model: {{path: runs/mine/}}\nlora: {lora}\n", summary={"kl_target": 4.0})
        assert page.startswith(f"jrlhf mine {chips} Config and environment")
    one_device = Plan("mine", {"actor.generate": Placement(Slice(0, 1), "generate")})
    assert "Where the calls run" not in text(metrics=gold_records(3), plan=one_device)


def test_an_asynchronous_run_shows_who_waits_and_how_old_tokens_are(tmp_path, undrawn):
    def titles(**metrics: float) -> list[str]:
        records = of_stage("ppo", 4, 4.0, **metrics)
        html = render(read_run(write(tmp_path / "run", metrics=records)))
        return [Page(title).text for title in re.findall(r"<figure.*?<h3>(.*?)</h3>", html, re.DOTALL)]

    ages = {f"training/off_policy/token_staleness/{name}": 1.0 for name in ("mean", "max")}
    shares = {"rollout_corr/rollout_rs_masked_fraction": 0.25}
    waits = {f"perf/{side}_wait_seconds": 3.0 for side in ("trainer", "rollouts")}
    assert titles(**ages, **shares, **waits) == ["Waiting", "Age of tokens", "Tokens without full weight"]
    assert titles(**{"actor/entropy": 1.0}) == ["Entropy"]


def test_a_gamed_reward_is_called_so(tmp_path, undrawn):
    def verdict(reward, gold) -> str:
        rows = enumerate(zip(reward, gold, strict=True), start=1)
        named = [(step, {"critic/score/mean": float(r), "gold/score": float(g)}) for step, (r, g) in rows]
        metrics = [{"stage": "ppo", "step": step, **values, "objective/kl": step / 10} for step, values in named]
        return Page(render(read_run(write(tmp_path / "run", metrics=metrics)))).text

    rising, time = np.linspace(0, 1, 40), np.arange(40)
    noise = 0.001 * np.random.default_rng(0).standard_normal(40)
    assert "they rise together" in verdict(rising, 0.5 + rising / 4 + noise)
    falling = np.where(time < 20, time, 40 - time) / 40
    assert "The reward is being gamed: after the" in verdict(rising, falling + noise)
    assert "fell by 0.250 from its best quarter, and the reward" in verdict(falling, falling)
    assert "changed by -0.77, gold by +0.769" in verdict(-rising, rising)
    assert "From the first" not in verdict(rising[:7], rising[:7])


def test_texts_fit_their_places(tmp_path, undrawn):
    prompt = "first\nsecond\r\nthird " + 5000 * "x" + " #### 72\n"
    samples = [{"stage": "evaluation", "step": 0, "prompt": prompt, "before": "<b>", "score_before": None}]
    html = render(read_run(write(tmp_path / "run", texts=samples)))
    (cell,) = re.findall(r'<td class=code data-label="prompt"><div class=text>(.*?)</div></td>', html, re.DOTALL)
    assert cell.startswith("first\nsecond\nthird xxx") and cell.endswith("xxx #### 72") and len(cell) < 1700
    assert "[…3,528 characters…]" in cell and "<div class=text>&lt;b&gt;</div></td>" in html


# --- The command ---


def test_what_is_not_a_run_is_one_sentence(tmp_path, capsys):
    assert cli([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} holds no run (neither config.yaml nor metrics.jsonl): name a run's directory\n"
    )
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "summary.json").write_text("{")
    assert cli([str(tmp_path)]) == 2
    assert "summary.json is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "summary.json").unlink()
    (tmp_path / "report.html").mkdir()
    assert cli([str(tmp_path)]) == 2
    assert f"the report of {tmp_path} cannot be made (Is a directory)" in capsys.readouterr().err
    (tmp_path / "plan.yaml").write_text("calls: 3")
    with pytest.raises(UserError, match="plan.yaml holds no plan .*: delete it and resume the run"):
        read_run(tmp_path)


def test_the_command_writes_the_report_anew(runs, pages, capsys):
    path = runs["reward_model"] / "report.html"
    path.unlink()
    assert cli([str(path.parent)]) == 0 and capsys.readouterr().out == f"{path}\n"
    assert path.read_text(encoding="utf-8") == pages["reward_model"]  # the same bytes every time
