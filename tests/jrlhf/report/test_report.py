"""The report: right numbers, whatever of a run is there, and nothing in it that a model or the network could use."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jrlhf
from jrlhf.config.parse import build, to_yaml
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.planning.choose import plan_yaml
from jrlhf.report import read_run, render, write_report
from jrlhf.report.charts import COLORS, Chart, Series, number, running_mean
from jrlhf.report.page import main
from jrlhf.report.record import Record
from jrlhf.report.timeline import _CALLS, timeline
from jrlhf.run.files import append_jsonl

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&amp;\x1b[31m'


def sft_records(steps: int = 40) -> list[dict]:
    records = [
        {"stage": "sft", "step": step, "sft/loss": 3 + 2 / step, "timing_s/step": 0.1} for step in range(1, steps + 1)
    ]
    records[-1]["sft/eval_loss"] = 3.25
    return records


def reward_model_records() -> list[dict]:
    return [
        {
            "stage": "reward_model",
            "step": step,
            "reward_model/loss": 0.5,
            "reward_model/accuracy": 0.8,
            "reward_model/eval_accuracy": 0.75,
            "reward_model/eval_pairs": 300,
            "timing_s/step": 0.5,
        }
        for step in (1, 2)
    ]


def ppo_records(steps: int = 12) -> list[dict]:
    return [
        {
            "stage": "ppo",
            "step": step,
            "critic/score/mean": step / 10,
            "gold/score": 0.5 + step / 100,
            "gold/full_stop": 0.9,
            "objective/kl": 0.5 * step,
            "objective/kl_coef": 0.05,
            "actor/entropy": 2.0,
            "actor/grad_norm": 1.0,
            "critic/grad_norm": 2.0,
            "critic/vf_explained_var": 0.3 if step > 1 else -40.0,
            "response_length/mean": 11.0,
            "timing_s/gen": 1.0 if step > 1 else 20.0,
            "timing_s/update_actor": 2.0,
            "timing_s/reshard": 0.25,
            "timing_s/custom": 0.25,
            "timing_s/step": 4.0 if step > 1 else 33.0,
        }
        for step in range(1, steps + 1)
    ]


def evaluation_samples(count: int = 12) -> list[dict]:
    return [
        {
            "stage": "evaluation",
            "step": 0,
            "prompt": f"def f{index}(x):\n",
            "reference": "Return x.",
            "before": f"before {index}",
            "after": EVIL if index == 0 else f"after {index}",
            "gold_before": 0.5,
            "gold_after": 0.5 + (index - 3) / 20,
        }
        for index in range(count)
    ]


SUMMARY = {
    "held_out": {
        "measure": "gold",
        "before": {
            "gold": 0.703,
            "gold_standard_error": 0.01,
            "items": {"full_stop": 0.8, "specific": 0.46},
            "distinct": 240,
        },
        "after": {
            "gold": 0.868,
            "gold_standard_error": 0.01,
            "items": {"full_stop": 0.99, "specific": 0.44},
            "distinct": 228,
        },
        "n": 256,
        "difference": 0.165,
        "standard_error": 0.0102,
    },
    "reward_model_accuracy": 0.871,
    "phases": {"sft": 75.2, "ppo": 92.0},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run directory with everything in it."""
    directory = tmp_path_factory.mktemp("runs") / "quickstart"
    directory.mkdir()
    (directory / "config.yaml").write_text(to_yaml(build(Config, {"ppo": {"algorithm": {"kl_target": 4.0}}})))
    (directory / "environment.txt").write_text(f"jax==1.2.3 {EVIL}")
    append_jsonl(directory / "metrics.jsonl", sft_records() + reward_model_records() + ppo_records())
    append_jsonl(
        directory / "samples.jsonl", [{"stage": "ppo", "step": 1, "prompt": "p", "response": EVIL, "score": 1.0}]
    )
    append_jsonl(directory / "samples.jsonl", evaluation_samples())
    (directory / "summary.json").write_text(json.dumps(SUMMARY))
    return directory


@pytest.fixture(scope="module")
def html(whole) -> str:
    return write_report(whole).read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_run(html, text_of):
    text = text_of(html)
    for expected in (
        "quickstart finished SFT → reward model → PPO mesh fsdp auto float32 seed 0 2 min 47 s",
        "Gold score, held out 0.70 → 0.87 +0.165 ± 0.010 through PPO on 256 held-out prompts, 16.2 standard errors",
        f"Reward model 87.1% right about 87.1% ± {math.sqrt(0.871 * 0.129 / 300):.1%} of 300 held-out pairs",
        "KL to the reference 5.50 nats a response, mean of the last quarter; the target is 4 (+38%)",
        "Variety kept 95% 228 distinct held-out responses, 240 before PPO",
        "Time 2 min 47 s sft 1 min 15 s, ppo 1 min 32 s",
        "full stop 0.800 0.990 +0.190",
        "specific 0.460 0.440 -0.020",
        "Of 12 held-out prompts 8 are answered better after PPO than before by the gold score, 3 worse and 1 alike.",
        "def f1(x): before 1 after 1 Return x. 0.50 → 0.40 -0.10",
        "KL coefficient The controller raises it",
        "The median of 10 iterations takes 4.00 s; the first one, which compiles, took 33 s. "
        "Switching weights from layout to layout costs 6.2% of it.",
    ):
        assert expected in text, expected


def test_the_timeline_lays_the_calls_end_to_end(html):
    bars = [
        (float(a), float(b)) for a, b in re.findall(r"class='bar b\d' style='left:([\d.]+)%;width:([\d.]+)%'", html)
    ]
    # reshard, gen, update_actor in their order, then what is not known, then the rest of the step
    assert bars == [(0.0, 6.25), (6.25, 25.0), (31.25, 50.0), (81.25, 6.25), (87.5, 12.5)]
    names = re.findall(r"class=what><b>(\w+)</b>", html)
    assert names == ["reshard", "gen", "update_actor", "custom", "rest"]


def test_what_runs_beside_the_calls_is_told_and_has_no_bar():
    seconds = {"gen": 2.0, "reward_functions": 3.0, "cost_functions": 0.5, "reward_wait": 1.0, "values": 1.0, "step": 4}
    records = [{"stage": "ppo", "step": 1, **{f"timing_s/{name}": each for name, each in seconds.items()}}]
    html = timeline(Record("run", "", {}, "", {"ppo": records}, [], {}))
    assert re.findall(r"class=what><b>(\w+)</b>", html) == ["gen", "values", "reward_wait"]
    assert re.findall(r"left:([\d.]+)%;width:([\d.]+)%", html) == [
        ("0.00", "50.00"),
        ("50.00", "25.00"),
        ("75.00", "25.00"),
    ]
    beside = "reward functions (3.00 s) and cost functions (500 ms)"
    assert f"Beside the calls work {beside}, for which they wait 1.00 s." in html


def test_every_time_that_a_role_takes_is_explained():
    """The names that calls are timed under are those that the timeline knows."""
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(jrlhf.__file__).parent.rglob("*.py"))
    timed = set(re.findall(r"""(?:timed|clock\.run)\(\s*"(\w+)\"""", sources))
    assert {"gen", "sleep", "transfer"} <= timed <= dict(_CALLS).keys()


def test_a_bar_spans_the_devices_of_a_call(tmp_path, text_of):
    calls = {
        "actor.generate": Placement(Slice(0, 8), "generate", fsdp=2, tensor=4),
        "actor.update": Placement(Slice(0, 6), "train", fsdp=6, micro_batches=4),
        "critic.update": Placement(Slice(6, 2), "train", data=2),
    }
    append_jsonl(tmp_path / "metrics.jsonl", ppo_records(3))
    (tmp_path / "plan.yaml").write_text(plan_yaml(Plan("mine", calls)))
    html = render(read_run(tmp_path))
    section = html[html.index('<section id="plan"') : html.index('<section id="training"')]
    assert re.findall(r"class='bar (b\d)' style='left:([\d.]+)%;width:([\d.]+)%'", section) == [
        ("b1", "0.00", "100.00"),
        ("b1", "0.00", "75.00"),
        ("b2", "75.00", "25.00"),
    ]
    text = text_of(section)
    for expected in (
        "The plan is mine. A bar spans the devices, of 8, that a call runs on, in its layout and mesh;",
        "actor.generate generate · fsdp 2 × tensor 4 0-7",
        "actor.update train · fsdp 6 0-5 × 4",
        "critic.update train · data 2 6-7",
    ):
        assert expected in text, expected
    (tmp_path / "plan.yaml").write_text("calls: {actor.generate: {devices: 0, layout: generate}}")
    assert 'id="plan"' not in render(read_run(tmp_path))  # one device
    (tmp_path / "plan.yaml").write_text("calls: 3")
    with pytest.raises(UserError, match="plan.yaml holds no plan .*: delete it and resume the run"):
        read_run(tmp_path)


def test_the_page_needs_and_runs_nothing_else(html, page_of):
    page = page_of(html)
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"script", "img", "link", "iframe", "object", "image", "base", "form"}
    )
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "xlink:href", "src"):
                assert value.startswith("#"), (tag, value)
    assert "url(http" not in html and "@import" not in html and "http" not in "".join(re.findall(r"url\([^)]*\)", html))
    assert "<script>alert(1)</script>" in page.text  # shown as text
    assert "\x1b" not in html


def test_every_reference_within_the_page_has_a_target(html, page_of):
    page = page_of(html)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    hrefs = {value[1:] for _, attributes in page.tags for name, value in attributes.items() if name.endswith("href")}
    clips = set(re.findall(r"url\(#([^)]*)\)", html))
    assert hrefs | clips <= set(ids)


def test_an_unfinished_run_says_how_far_it_is(tmp_path, text_of):
    (tmp_path / "config.yaml").write_text(to_yaml(Config()))
    append_jsonl(tmp_path / "metrics.jsonl", sft_records() + reward_model_records() + ppo_records(5))
    append_jsonl(
        tmp_path / "samples.jsonl", [{"stage": "ppo", "step": 5, "prompt": "p", "response": "r", "score": 0.25}]
    )
    text = text_of(render(read_run(tmp_path)))
    assert (
        "unfinished: ppo 5 of 40" in text and "The latest of training step prompt response score 5 p r 0.25 An" in text
    )
    assert "Gold score, held out" not in text


PARTS = ("config.yaml", "environment.txt", "metrics.jsonl", "samples.jsonl", "summary.json")


@pytest.mark.parametrize("kept", [kept for size in range(1, 5) for kept in itertools.combinations(PARTS, size)])
def test_any_part_may_be_missing(whole, tmp_path, kept, page_of, undrawn):
    for name in kept:
        shutil.copy(whole / name, tmp_path / name)
    if {"config.yaml", "metrics.jsonl"} & set(kept):
        page_of(render(read_run(tmp_path)))
    else:
        with pytest.raises(UserError, match="holds no run"):
            read_run(tmp_path)


@pytest.mark.parametrize("stages", [("sft",), ("sft", "reward_model"), ("ppo",), ()])
@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"held_out": {}},
        {"held_out": None},
        {"held_out": {"measure": "gold", "before": {"gold": 0.7}, "after": {"gold": 0.8}}},
        SUMMARY,
    ],
)
def test_any_stage_and_any_figure_may_be_missing(tmp_path, stages, summary, text_of, undrawn):
    records = {"sft": sft_records(3), "reward_model": reward_model_records(), "ppo": ppo_records(9)}
    append_jsonl(tmp_path / "metrics.jsonl", [record for stage in stages for record in records[stage]])
    append_jsonl(tmp_path / "samples.jsonl", evaluation_samples(2))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    text = text_of(render(read_run(tmp_path)))
    assert ("SFT loss" in text) == ("sft" in stages) and ("The median of" in text) == ("ppo" in stages)
    assert ("Is the reward being gamed?" in text) == ("ppo" in stages)


@pytest.mark.parametrize("key", sorted(ppo_records(1)[0])[:-1])
def test_any_metric_may_be_absent_or_not_finite(tmp_path, key, page_of, undrawn):
    if key in ("stage", "step"):
        return
    for value in ({}, {key: None}):
        records = [{name: number for name, number in record.items() if name != key} | value for record in ppo_records()]
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        append_jsonl(tmp_path / "metrics.jsonl", records)
        page_of(render(read_run(tmp_path)))


def verdict(tmp_path, text_of, reward, gold) -> str:
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    rows = zip(reward, gold, strict=True)
    append_jsonl(
        tmp_path / "metrics.jsonl",
        [
            {
                "stage": "ppo",
                "step": step,
                "critic/score/mean": float(r),
                "gold/score": float(g),
                "objective/kl": step / 10,
            }
            for step, (r, g) in enumerate(rows, start=1)
        ],
    )
    return text_of(render(read_run(tmp_path)))


def test_a_gamed_reward_is_called_so(tmp_path, text_of, undrawn):
    rising, time = np.linspace(0, 1, 40), np.arange(40)
    noise = 0.001 * np.random.default_rng(0).standard_normal(40)
    assert "they rise together" in verdict(tmp_path, text_of, rising, 0.5 + rising / 4 + noise)
    falling = np.where(time < 20, time, 40 - time) / 40
    assert "The reward is being gamed: after the" in verdict(tmp_path, text_of, rising, falling + noise)
    assert "fell by 0.250 from its best quarter, and the reward" in verdict(tmp_path, text_of, falling, falling)
    assert "changed by -0.77, gold by +0.769" in verdict(tmp_path, text_of, -rising, rising)
    assert "From the first" not in verdict(tmp_path, text_of, rising[:7], rising[:7])


def test_what_is_not_a_run_is_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} holds no run (neither config.yaml nor metrics.jsonl): name a run's directory\n"
    )
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "summary.json").write_text("{")
    assert main([str(tmp_path)]) == 2
    assert "summary.json is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "summary.json").unlink()
    (tmp_path / "report.html").mkdir()
    assert main([str(tmp_path)]) == 2
    assert f"the report of {tmp_path} cannot be made (Is a directory)" in capsys.readouterr().err


def test_the_command_writes_the_report_anew(whole, html):
    (whole / "report.html").unlink(missing_ok=True)
    command = [sys.executable, "-m", "jrlhf.report", str(whole)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{whole / 'report.html'}\n"
    assert (whole / "report.html").read_text(encoding="utf-8") == html  # the same bytes every time


# --- Charts ---


def test_a_chart_draws_its_points_in_the_page_s_colours():
    series = [
        Series("a", [1, 2, 3, 4], [0.0, 1.0, math.nan, 3.0], color=1),
        Series("b", [1, 4], [3.0, 0.0], color=2, style="dots"),
    ]
    svg = Chart(series, xlabel="step", target=1.5).svg("a chart")
    assert svg.startswith('<svg viewBox="0 0 ') and "<title>a chart</title>" in svg and ">step</text>" in svg
    assert "#0102" not in svg and "font-family" not in svg and "<style" not in svg and "<metadata" not in svg
    assert {f"var(--c{index})" in svg for index in (1, 2)} == {True} and "var(--c3)" not in svg
    path = re.search(
        r'd="M ([\d. ]+?)\s+L ([\d. ]+?)\s+L ([\d. ]+?)\s+" clip-path="[^"]*" style="fill: none; stroke: var\(--c1\)',
        svg,
    )
    assert path is not None
    points = np.array([[float(number) for number in group.split()] for group in path.groups()])
    assert (points[1, 0] - points[0, 0]) * 2 == pytest.approx(points[2, 0] - points[1, 0])  # x = 1, 2, 4
    assert (points[0, 1] - points[1, 1]) * 2 == pytest.approx(points[1, 1] - points[2, 1])  # y = 0, 1, 3, upwards
    assert svg == Chart(series, xlabel="step", target=1.5).svg("a chart")


@pytest.mark.parametrize("style", ["line", "steps", "trend", "dots", "points"])
@pytest.mark.parametrize("count", [1, 2, 3, 25])
def test_every_style_draws_any_number_of_points(style, count):
    svg = Chart([Series("a", range(count), range(count), color=COLORS, style=style)]).svg("x")
    assert f"var(--c{COLORS})" in svg


def test_a_chart_of_nothing_is_nothing():
    assert Chart([Series("a", [], []), Series("b", [1.0, 2.0], [math.nan, math.inf])]).svg("x") == ""


def test_running_mean_is_the_mean_of_the_neighbours():
    values = np.random.default_rng(0).standard_normal(30)
    for width in (1, 3, 4, 7, 100):
        width_used = min(width, 30)
        before, after = width_used // 2, width_used - width_used // 2
        expected = [values[max(i - before, 0) : i + after].mean() for i in range(30)]
        np.testing.assert_allclose(running_mean(values, width), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (1234.5, "1,234"),
        (123.4, "123"),
        (12.34, "12.3"),
        (-1.234, "-1.23"),
        (0.1, "0.10"),
        (0.0123, "0.012"),
    ]
    + [(0.000123, "0.00012"), (0.0000123, "1.2e-05"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
