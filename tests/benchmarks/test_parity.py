"""The parity ledger: its statistics, that the peers' rewards are ours, and that the page says what was measured."""

import json
from math import sqrt

import numpy as np
import pytest

from benchmarks.parity import common, ours
from benchmarks.parity.__main__ import ROOT, table
from benchmarks.parity.statistics import MARGIN, paired
from jrlhf.config import make_config
from jrlhf.rewards.builtin import exact_match
from jrlhf.tasks.arithmetic.problems import question, worked_answer
from jrlhf.tasks.arithmetic.task import make_tokenizer


def test_the_interval_is_that_of_students_distribution():
    ours, differences = [0.5, 0.7, 0.6, 0.9], [0.01, 0.02, 0.03, 0.04]
    result = paired(np.add(ours, differences).tolist(), ours)
    error = 0.01 * sqrt(5 / 3) / 2  # the deviation of 1, 2, 3, 4 over the root of their number
    reach = 2.353363 * error  # of 3 degrees of freedom, from a table
    assert result.mean == pytest.approx(0.025) and result.standard_error == pytest.approx(error)
    assert (result.low, result.high) == pytest.approx((0.025 - reach, 0.025 + reach), rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "spread", "verdict"),
    [
        (0.0, 0.1, "equivalent"),
        (0.9, 0.01, "equivalent"),  # other than ours, but by less than the margin
        (1.1, 0.01, "different"),
        (-1.1, 0.01, "different"),
        (0.9, 0.3, "different"),  # may be more than the margin, and is not 0
        (0.0, 2.0, "undecided"),
    ],
)
def test_verdicts(mean: float, spread: float, verdict: str):
    differences = MARGIN * (mean + spread * np.array([-1.0, 0.0, 1.0]))
    assert paired(differences.tolist(), [0.0] * 3).verdict == verdict


def test_the_peers_reward_is_that_of_our_runs():
    tokenizer, rng = make_tokenizer(), np.random.default_rng(0)
    right = 0
    for _ in range(300):
        terms = tuple(rng.integers(10, 100, 2).tolist())
        text, answer = question(terms), worked_answer(terms, units_first=True)
        assert common.encode(text) == list(tokenizer.encode_batch([text])[0]) and common.answer(text) == answer
        ids = [*tokenizer.encode_batch([answer])[0], common.EOS]
        if rng.random() < 0.5:
            ids[rng.integers(len(ids))] = int(rng.integers(14))
        own = common.own_tokens([*ids, common.PAD])
        [expected] = exact_match([tokenizer.decode(tuple(own))], [answer])
        assert common.reward(text, ids) == expected
        right += common.reward(text, ids) == 1
    assert 100 < right < 250


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_our_runs_have_the_settings_of_the_ledger(algorithm: str):
    config = make_config({"stages": [algorithm], "data": {"source": "arithmetic"}, algorithm: ours.stage(algorithm)})
    section = config.rl
    assert (section.rollout_batch, section.iterations) == (common.ROWS, common.STEPS)
    for role in ("actor", "critic") if algorithm == "ppo" else ("actor",):
        optimizer = getattr(section, role)
        assert (optimizer.learning_rate, optimizer.b1, optimizer.b2) == (common.LEARNING_RATE, common.B1, common.B2)
        assert optimizer.duration(common.STEPS) == (0, None)  # no warm-up, no decay
        assert (optimizer.weight_decay, optimizer.eps) == (0, common.ADAM_EPS)
        assert optimizer.max_grad_norm == {"grpo": common.GRPO_GRAD_NORM, "ppo": None}[algorithm]
    assert config.sampling.temperature == 1 and config.sampling.top_k is None and config.sampling.top_p is None


def test_the_page_has_the_table_of_the_results():
    outcome = json.loads((ROOT / "benchmarks/results/parity.json").read_text())
    page = (ROOT / "docs/parity.md").read_text()
    assert table(outcome) in page
    for algorithm, title in {"grpo": "GRPO", "ppo": "PPO, with its critic"}.items():
        compared = outcome["replay"][algorithm]
        numbers = compared["largest_difference"], compared["largest_change"]
        assert compared["updates"] == common.STEPS and numbers[0] < 0.005 * numbers[1]
        assert f"| {title} | {numbers[0]:.6f} | {numbers[1]:.3f} |" in page
