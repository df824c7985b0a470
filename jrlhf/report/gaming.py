"""The score against the KL that it costs, and where a gold score is known, whether the reward is being gamed."""

import math
from collections.abc import Sequence

import numpy as np

from jrlhf.report.charts import Chart, Series
from jrlhf.report.parts import figure, grid, lead
from jrlhf.report.record import Record
from jrlhf.report.rewards import reward_names

_SCORE, _GOLD, _KL = "critic/score/mean", "gold/score", "objective/kl"


def score_and_kl(run: Record) -> str:
    """The section."""
    if run.measure == "gold":
        return _with_gold(run)
    names = reward_names(run)
    of = f": {names[0]}" if len(names) == 1 else f": the weighted sum of {', '.join(names)}" if names else ""
    figures = [
        figure(
            f"What {run.title} maximises: the score",
            f"Mean of an iteration's responses{of}.",
            Chart([Series("score", *run.rl_curve(_SCORE), 1, "trend")], xlabel="iteration"),
        ),
        _kl_figure(run),
        _score_over_kl(run),
    ]
    if not any(figures):
        return ""
    besides = "at held-out prompts, at the samples, and at how much KL a gain has cost"
    warning = (
        "Training optimises this very score. That it rises shows that training works, not that the answers are good: "
        f"look {besides if has_kl(run) else 'at held-out prompts and at the samples'}."
    )
    return lead(warning) + grid(figures)


def has_kl(run: Record) -> bool:
    """Whether the run knows its distance from a reference."""
    return bool(run.rl_curve(_KL)[1])


def _with_gold(run: Record) -> str:
    gold = run.rl_curve(_GOLD)
    figures = [
        figure(
            f"What {run.title} sees: the learned reward",
            f"The reward model's mean score; {run.title} maximises it.",
            Chart([Series("reward model", *run.rl_curve(_SCORE), 1, "trend")], xlabel="iteration"),
        ),
        figure(
            "What it does not see: the gold score",
            "The known rubric, which only measures.",
            Chart([Series("gold", *gold, 2, "trend")], xlabel="iteration"),
        ),
        _kl_figure(run),
    ]
    if not any(figures):
        return ""
    verdict = _verdict(run.rl_curve(_SCORE)[1], gold[1], tied=has_kl(run))
    return lead(verdict) + grid(figures) + _both_over_kl(run)


def _kl_figure(run: Record) -> str:
    target, curve = run.setting(f"{run.algorithm}.algorithm.kl_target"), run.rl_curve(_KL)
    lowest = 0 if min(curve[1], default=0) >= 0 else None  # an estimate may be below 0
    series = Series("KL", *curve, 3, "trend")
    return figure(
        "What it pays: KL to the reference",
        "Nats a response" + ("; dashed, the controller's target." if target else "."),
        Chart([series], xlabel="iteration", target=target, limits=(lowest, None)),
    )


def _rows(run: Record, keys: Sequence[str]) -> np.ndarray:
    """[iterations, keys], of the iterations that have them all."""
    records = run.metrics.get(run.algorithm, [])
    return np.array([[each[k] for k in keys] for each in records if all(each.get(k) is not None for k in keys)])


def _score_over_kl(run: Record) -> str:
    rows = _rows(run, (_KL, _SCORE))
    if len(rows) < 4:
        return ""
    return figure(
        "What the KL buys",
        "The score at the distance from the reference; later iterations are stronger.",
        Chart(
            [Series("score", rows[:, 0].tolist(), rows[:, 1].tolist(), 1, "points")],
            xlabel="KL to the reference",
            whole=False,
        ),
    )


def _both_over_kl(run: Record) -> str:
    """Reward and gold over KL, each as a share of its own largest change: where they part, the reward is gamed."""
    rows = _rows(run, (_KL, _SCORE, _GOLD))
    if len(rows) < 4:
        return ""
    kl = rows[:, 0].tolist()
    start = rows[: max(len(rows) // 20, 1), 1:].mean(0)
    change = rows[:, 1:] - start
    change = change / np.maximum(np.abs(change).max(0), 1e-12)
    chart = Chart(
        [
            Series("reward model", kl, change[:, 0].tolist(), 1, "points"),
            Series("gold", kl, change[:, 1].tolist(), 2, "points"),
        ],
        xlabel="KL to the reference",
        whole=False,
        target=0.0,
        size=(15.2, 3.4),
    )
    return figure(
        "Both against the distance from the reference",
        "Change since the start as a share of the largest change; later iterations are stronger. A reward that goes on "
        "rising with the KL while gold turns down is being gamed.",
        chart,
        kind="wide",
    )


def _verdict(reward: Sequence[float], gold: Sequence[float], *, tied: bool) -> str:
    """What the last quarter of the iterations says, compared with the first and with gold's best.

    tied: to a reference.
    """
    both = np.array([pair for pair in zip(reward, gold, strict=False) if np.isfinite(pair).all()])
    if len(both) < 8:
        return ""
    quarters = np.array_split(both, 4)
    rewards, golds = np.array([quarter.mean(0) for quarter in quarters]).T
    errors = [float(quarter[:, 1].std() / math.sqrt(len(quarter))) for quarter in quarters]
    best = int(np.argmax(golds))
    fallen, gain, risen = golds[best] - golds[3], golds[3] - golds[0], rewards[3] - rewards[0]
    if fallen > 2 * math.hypot(errors[best], errors[3]):
        if rewards[3] < rewards[best]:
            return f"The gold score fell by {fallen:.3f} from its best quarter, and the reward model's score with it."
        when = ("first", "second", "third")[best]
        tie = "raise the KL coefficient" if tied else "give the policy a KL coefficient"
        return (
            f"The reward is being gamed: after the {when} quarter the reward model's score still rose, while the gold "
            f"score fell by {fallen:.3f}. Stop earlier, {tie}, or train a better reward model."
        )
    if risen > 0 and gain > 0:
        return (
            f"From the first to the last quarter the reward model's score rose by {risen:.2f} and the gold score by "
            f"{gain:.3f}: they rise together, and nothing suggests that the reward is gamed."
        )
    return f"From the first to the last quarter the reward model's score changed by {risen:+.2f}, gold by {gain:+.3f}."
