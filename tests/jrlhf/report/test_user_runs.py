"""Runs of users: their datasets, rewards and models. No gold score there, and nothing that claims one."""

import json
import math
import re
from pathlib import Path

import pytest

from jrlhf.report import read_run, render
from jrlhf.report.parts import number_cell, range_bar, table, text_cell
from jrlhf.report.rewards import failure_counts, reward_names
from jrlhf.run.files import append_jsonl

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&amp;\x1b[31m'
SOURCES = ("openai/gsm8k", EVIL)
CONFIG = """
seed: 3
mesh: {data: 1, fsdp: 4, tensor: 1}
model: {path: /weights/Qwen2.5-0.5B}
lora: {rank: 16, alpha: 32}
ppo: {iterations: 8, algorithm: {kl_target: null}}
"""


def ppo_records(steps: int = 8) -> list[dict]:
    records = []
    for step in range(1, steps + 1):
        record = {
            "stage": "ppo",
            "step": step,
            "critic/score/mean": step / 10,
            "objective/kl": step / 4,
            "objective/kl_coef": 0.1,
            "rewards/exact/mean": 0.25 + step / 100,
            "rewards/exact/std": 0.5,
            "rewards/exact/digits": 3.0,
            "rewards/exact/failures": {3: 2.0, 6: 3.0}.get(step, 0.0),
            "rewards/exact/failures/none": 0.0,
            f"rewards/{EVIL}/mean".replace("/script", "script"): 1.0,
            "score/raw/mean": step / 9,
            "score/missing_eos": 0.125,
            "timing_s/gen": 3.0,
            "timing_s/reward_functions": 2.0,
            "timing_s/reward_wait": 1.0,
            "timing_s/step": 4.0,
        }
        if step in (3, 6):  # a kind is recorded where it occurred
            record["rewards/exact/failures/timeout"] = 2.0
        if step == 6:
            record["rewards/exact/failures/nan"] = 1.0
        if step % 4 == 1:
            record["timing_s/validation"] = 8.0
            for place, source in enumerate(("all", *SOURCES)):
                record |= {
                    f"val-core/{source}/score/mean@4": 0.25 + step / 100 + place / 1000,
                    f"val-core/{source}/score/best@4/mean": 0.5 + step / 100,
                    f"val-aux/{source}/exact/digits/mean@4": 0.75,
                }
        records.append(record)
    return records


def samples() -> list[dict]:
    found: list[dict] = [{"stage": "ppo", "step": 7, "prompt": "p", "response": "trained on", "score": 0.5}]
    found.append({**found[0], "kind": "validation", "response": f"validated {EVIL}", "source": SOURCES[0]})
    for index in range(12):
        answers = {"before": "no\nidea", "after": EVIL, "score_before": 0.5, "score_after": index / 10}
        found.append({"stage": "evaluation", "step": 0, "prompt": f"q{index}", "source": SOURCES[index % 2], **answers})
    return found


SUMMARY = {
    "held_out": {
        "measure": "score",
        "n": 300,
        "before": {
            "score": 0.25,
            "score_standard_error": 0.02,
            "items": {"exact": 0.25, "brevity": -400.0},
            "sources": {name: {"mean": 0.25, "n": 1150} for name in SOURCES},
            "distinct": 100,
        },
        "after": {
            "score": 0.5,
            "score_standard_error": 0.02,
            "items": {"exact": 0.625, "brevity": -100.0},
            "sources": {name: {"mean": 0.5, "n": 1150} for name in SOURCES},
            "distinct": 90,
        },
        "difference": 0.25,
        "standard_error": 0.025,
    },
    "phases": {"ppo": 92.0},
}


def write(directory: Path, *, config=CONFIG, metrics=(), texts=(), summary=None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(config)
    append_jsonl(directory / "metrics.jsonl", metrics)
    append_jsonl(directory / "samples.jsonl", texts)
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("runs") / "mine"
    return render(read_run(write(directory, metrics=ppo_records(), texts=samples(), summary=SUMMARY)))


def test_the_figures_are_those_of_the_run(html, text_of):
    text = text_of(html)
    for expected in (
        "mine finished PPO Qwen2.5-0.5B LoRA rank 16, alpha 32 mesh fsdp 4 seed 3 1 min 32 s",
        "Score, held out 0.25 → 0.50 +0.250 ± 0.025 through PPO on 300 held-out prompts, 10.0 standard errors; the "
        "run's own rewards, which PPO optimises on other prompts",
        "Variety kept 90%",
        "Score and KL Training optimises this very score.",
        "the weighted sum of exact, ",
        "reward, on held-out prompts before after change exact 0.250 0.625 +0.375 brevity -400.000 -100.000 +300.000",
        "source, on held-out prompts before after change openai/gsm8k 1,150 prompts 0.250 0.500 +0.250",
        "Of 12 held-out prompts 6 are answered better after PPO than before by the score, 5 worse and 1 alike.",
        "step prompt response source score 7 p validated <script>",
        "The latest of training step prompt response score 7 p trained on 0.50",
        "gen generate responses 3.00 s 75% reward_wait wait for functions' scores 1.00 s 25%",
        "Validation, 2 times in all, takes 8.00 s.",
    ):
        assert expected in text, expected
    assert "gold" not in text.lower() and "KL coefficient" not in text  # which nothing moves


def test_validations_are_curves_for_all_and_for_each_source(html, text_of):
    text = text_of(html)
    assert (
        "mean@4: the mean of 4 answers a prompt; best@4: the best. Scored by the run's own rewards, on prompts it does "
        "not train on. Over all prompts mean@4 went from 0.26 before iteration 1 to 0.30 before iteration 5; the best "
        "was 0.30, before iteration 5. All sources together: score mean@4 0.30 best@4 0.55"
    ) in text
    assert "openai/gsm8k: score mean@4 0.30 best@4 0.55" in text
    assert "exact/digits, mean@4 all 0.75 openai/gsm8k 0.75 <script>" in text  # one chart of three sources


def test_the_best_of_one_answer_is_no_curve_of_its_own(tmp_path, text_of):
    names = ("val-core/all/gold/mean@1", "val-core/all/gold/best@1/mean", "val-aux/all/full_stop/mean@1")
    records = [{"stage": "ppo", "step": step, "gold/score": 0.5, **dict.fromkeys(names, step / 10)} for step in (1, 5)]
    text = text_of(render(read_run(write(tmp_path, metrics=records))))
    assert "Held-out prompts: gold mean@1." in text and "full stop, mean@1" in text and "best@1" not in text


def test_failures_of_reward_functions_are_a_warning_with_their_counts(html, text_of, tmp_path):
    assert (
        "Reward functions failed on 5 samples exact timeout 4 , nan 1 in 2 of 8 iterations, the last time in "
        "iteration 6. Each of these samples was given the score that the config names for failures"
    ) in text_of(html)
    assert "exact: failures so far" in html and "timeout 4</span>" in html and "none 0" not in html
    assert html.index("failed on 5") < html.index("Score, held out")
    assert "the answer. What the functions printed is in reward-exact.log." in text_of(html)
    healthy = [{key: value for key, value in each.items() if "/failures/" not in key} for each in ppo_records()]
    assert "failed on" not in render(read_run(write(tmp_path, metrics=healthy)))


def test_rewards_are_read_by_their_names(tmp_path):
    run = read_run(write(tmp_path, metrics=ppo_records()))
    assert [name for name in reward_names(run) if name.isalpha()] == ["exact"]
    counts, steps = failure_counts(run)
    assert (counts, steps) == ({("rewards", "exact"): {"timeout": 4, "nan": 1}}, [3, 6])
    assert "exact: digits" in render(run) and "score: missing eos" in render(run)


def test_what_users_name_cannot_run(html, page_of):
    page = page_of(html)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe"})
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert(1)</script>" in page.text and "\x1b" not in html


@pytest.mark.parametrize("key", sorted(set(ppo_records(1)[0]) - {"stage", "step"}))
def test_any_metric_may_be_absent_or_not_finite(tmp_path, key, page_of, undrawn):
    for name, value in (("absent", {}), ("null", {key: None})):
        records = [{other: each for other, each in record.items() if other != key} | value for record in ppo_records()]
        page_of(render(read_run(write(tmp_path / name, metrics=records, texts=samples(), summary=SUMMARY))))


@pytest.mark.parametrize("name", ["n", "difference", "standard_error", "before", "after", "measure"])
def test_any_held_out_figure_may_be_absent(tmp_path, name, page_of, undrawn):
    for part, held_out in enumerate(
        (
            {key: value for key, value in SUMMARY["held_out"].items() if key != name},
            SUMMARY["held_out"] | {"before": {"score": 0.25}, "after": {"score": 0.5}},
            SUMMARY["held_out"] | {"before": {}, "after": None},
        )
    ):
        directory = write(tmp_path / str(part), metrics=ppo_records(), texts=samples(), summary={"held_out": held_out})
        page_of(render(read_run(directory)))


def test_a_run_of_sft_alone(tmp_path, text_of):
    records = [{"stage": "sft", "step": step, "sft/loss": 2.0, "timing_s/step": 0.5} for step in range(1, 31)]
    records[9]["sft/eval_loss"], records[29]["sft/eval_loss"] = math.log(2), math.log(3)
    texts = [
        {"stage": "evaluation", "step": 0, "prompt": f"q{index}", "before": f"a{index}", "score_before": index / 10}
        for index in range(12)
    ]
    before = {"score": 0.5, "score_standard_error": 0.125, "items": {"exact": 0.375}, "distinct": 5}
    summary = {"held_out": {"measure": "score", "n": 12, "before": before}}
    text = text_of(render(read_run(write(tmp_path, metrics=records, texts=texts, summary=summary))))
    for expected in (
        "Score, held out 0.50 0.500 ± 0.125 on 12 held-out prompts; the run's own rewards SFT",
        "SFT loss, held out 1.10 nats a response token, 3 in perplexity; it was 0.69 at best",
        "reward, on held-out prompts mean exact 0.375",
        "Answers to 12 held-out prompts. The first ones prompt answer score q0 a0 0.00",
        "With the lowest score prompt answer score q0 a0 0.00 q1 a1 0.10",
        "With the highest prompt answer score q11 a11 1.10 q10 a10 1.00",
        "Training SFT loss",
    ):
        assert expected in text, expected
    assert "PPO" not in text and "gold" not in text.lower()


def test_a_run_of_a_reward_model_alone(tmp_path, text_of):
    records = [
        {"stage": "reward_model", "step": step, "reward_model/loss": 0.5, "reward_model/accuracy": 0.75}
        for step in range(1, 5)
    ]
    records[-1] |= {"reward_model/eval_accuracy": 0.8, "reward_model/eval_pairs": 400}
    config = "model: {path: null}\nlora: {rank: null}\nreward_model: {steps: 9}\n"
    text = text_of(render(read_run(write(tmp_path, config=config, metrics=records))))
    assert "unfinished: reward_model 4 of 9 reward model Outcome Training" in text
    assert "Reward model 80.0% right about 80.0% ± 2.0% of 400 held-out pairs" in text
    assert "LoRA" not in text and "PPO" not in text and "gold" not in text.lower()


def test_a_gold_run_shows_its_one_reward_once(tmp_path, text_of):
    records = [
        {
            "stage": "ppo",
            "step": step,
            "gold/score": 0.5,
            "critic/score/mean": 1.0,
            "score/raw/mean": 1.0,
            "rewards/learned/mean": 1.0,
            "rewards/learned/failures": 0.0,
        }
        for step in range(1, 10)
    ]
    assert "Rewards by name" not in text_of(render(read_run(write(tmp_path, metrics=records))))
    failed = [{"stage": "ppo", "step": 10, "rewards/learned/failures/nan": 1}]
    assert "Rewards by name" in text_of(render(read_run(write(tmp_path, metrics=failed))))


@pytest.mark.parametrize(
    ("lora", "chips"),
    [
        ("{rank: 8, alpha: 32.0, base: int8}", "finished mine LoRA rank 8, alpha 32 int8 base"),
        ("{rank: 8, alpha: 0.5, base: auto}", "finished mine LoRA rank 8, alpha 0.5"),
        ("{rank: null, path: a/warm, alpha: 32.0, base: auto}", "finished mine LoRA from warm"),
        ("{rank: null, path: null, alpha: 32.0, base: int8}", "finished mine"),
        ("null", "finished mine"),
    ],
)
def test_chips_tell_the_model_and_its_adapter(tmp_path, text_of, lora, chips):
    config = f"model: {{path: runs/mine/}}\nlora: {lora}\n"
    page = text_of(render(read_run(write(tmp_path / "x", config=config, summary={"kl_target": 4.0}))))
    assert page.startswith(f"jrlhf x {chips} Config and environment")


# --- Parts ---


def test_a_range_bar_reaches_as_far_as_its_values():
    def places(old: float, new: float) -> list[float]:
        return [float(place) for place in re.findall(r"([\d.]+)%", range_bar(old, new))]

    assert places(0.25, 0.75) == [25, 50, 25]  # left, width, tick
    assert places(0.75, 0.25) == [25, 50, 75]
    assert places(-1.0, 0.0) == [0, 50, 0] and places(1.0, 4.0) == [25, 75, 25]
    assert places(0.5, 0.5) == [50, 0, 50] and "span up" in range_bar(0.5, 0.5) and "span down" in range_bar(1, 0)


def test_a_long_text_keeps_both_ends_and_its_lines(text_of):
    cell = text_cell("first\nsecond\r\nthird " + 5000 * "x" + " #### 72\n")
    assert cell.startswith("<td><div class=text>first\nsecond\nthird xxx") and cell.endswith("xxx #### 72</div></td>")
    assert "[…3,528 characters…]" in cell and len(cell) < 1700
    assert text_cell("<b>", "code") == "<td class=code><div class=text>&lt;b&gt;</div></td>"


def test_cells_without_a_number_are_empty():
    assert number_cell(None) == "<td class=num></td>" and number_cell(0.5, 3) == "<td class=num>0.500</td>"
    assert "<th class=num>&lt;</th>" in table([("<", "num")], [])


def safe_records(**more: float) -> list[dict]:
    return [
        {
            "stage": "safe_rlhf",
            "step": step,
            "critic/score/mean": step / 10,
            "cost/mean": 6.0 - step,
            "safe/multiplier": 1.0,
            "rewards/exact/mean": 0.5,
            "costs/words/mean": 6.0 - step,
            "costs/words/failures": 2.0,
            "costs/words/failures/timeout": 2.0,
            "cost_critic/vf_explained_var": 0.25,
            "cost_critic/grad_norm": 7.0,
            "timing_s/cost_values": 1.0,
            "timing_s/update_cost_critic": 3.0,
            "timing_s/step": 4.0,
            **more,
        }
        for step in range(1, 5)
    ]


def test_costs_that_failed_and_a_cost_critic_are_seen(tmp_path, text_of):
    config = CONFIG + "safe_rlhf: {iterations: 4, algorithm: {cost_limit: 3.0}}"
    graded = SUMMARY["held_out"] | {
        "before": {"score": 0.25, "cost": 5.5, "cost_standard_error": 0.25},
        "after": {"score": 0.5, "cost": 2.5, "cost_standard_error": 0.125},
    }
    path = write(tmp_path, config=config, metrics=safe_records(), summary={"held_out": graded})
    assert reward_names(read_run(path), "costs") == ["words"]
    html = render(read_run(path))
    text = text_of(html)
    for expected in (
        "Cost functions failed on 8 samples cost words timeout 8 in 4 of 4 iterations",
        "What the functions printed is in cost-words.log.",
        "cost words: failures so far",
        "Cost, held out 5.50 → 2.50 2.500 ± 0.125 after Safe RLHF; the limit is 3",
        "On held-out prompts it went from 5.5 to 2.5.",
        "cost_values cost critic values 1.00 s 25% update_cost_critic train the cost critic 3.00 s 75%",
        "Explained variance How much of the returns a critic foresees",
        "Gradient norms Before clipping.",
    ):
        assert expected in text, expected
    both = [each | {"rewards/exact/failures/nan": 1.0} for each in safe_records()]
    both_text = text_of(render(read_run(write(tmp_path / "both", config=config, metrics=both))))
    assert "Reward and cost functions failed on 12 samples exact nan 4 cost words timeout 8" in both_text
    assert "is in reward-exact.log, cost-words.log." in both_text


def test_a_run_without_a_reference_is_not_told_of_kl(tmp_path, text_of):
    records = [{key: each for key, each in record.items() if "/kl" not in key} for record in ppo_records()]
    text = text_of(render(read_run(write(tmp_path, metrics=records))))
    assert "Score Training optimises this very score." in text and "at the samples." in text and "KL" not in text


def test_greedy_baselines_have_a_curve_beside_the_scores(tmp_path, text_of):
    greedy = [each | {"stage": "remax", "critic/baseline/mean": 0.5} for each in ppo_records()]
    assert "greedy responses. sampled" in text_of(render(read_run(write(tmp_path, metrics=greedy))))
    assert "greedy" not in text_of(render(read_run(write(tmp_path / "without", metrics=ppo_records()))))
