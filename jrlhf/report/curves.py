"""The curves that tell how training went: of PPO, and of what came before it."""

import math
from typing import Any

from jrlhf.report.charts import Chart, Series
from jrlhf.report.parts import figure, grid
from jrlhf.report.record import Record


def ppo(run: Record) -> str:
    def chart(title: str, note: str, *curves: tuple[str, str], **how: Any) -> str:
        series = [
            Series(label, *run.curve("ppo", metric), color=color, style="trend")
            for color, (label, metric) in enumerate(curves, start=1)
        ]
        return figure(title, note, Chart(series, xlabel="iteration", **how))

    explained = run.curve("ppo", "critic/vf_explained_var")[1]
    figures = [
        chart("Entropy", "Nats a token. Towards 0 the policy says always the same.", ("entropy", "actor/entropy")),
        chart("Response length", "Tokens, the end included.", ("mean", "response_length/mean")),
        chart(
            "Cut off by the length limit",
            "Share of responses.",
            ("share", "response_length/clip_ratio"),
            limits=(0, None),
        ),
        chart(
            "Explained variance",
            "How much of the returns the critic foresees; 1 is all.",
            ("critic", "critic/vf_explained_var"),
            limits=(-1.0 if min(explained, default=0.0) < -1 else None, 1.05),
        ),
        chart(
            "KL coefficient",
            "The controller raises it while the KL is above its target.",
            ("beta", "objective/kl_coef"),
        ),
        chart("KL to the old policy", "Nats a token, within an iteration's updates.", ("KL", "actor/ppo_kl")),
        chart("Clipped ratios", "Share of tokens whose gradient PPO cuts.", ("share", "actor/pg_clipfrac")),
        chart("Gradient norms", "Before clipping.", ("actor", "actor/grad_norm"), ("critic", "critic/grad_norm")),
        chart("Throughput", "Tokens a second.", ("tokens/s", "perf/throughput"), limits=(0, None)),
    ]
    return grid(figures)


def pretraining(run: Record) -> str:
    """SFT and the reward model."""
    loss = run.curve("reward_model", "reward_model/loss")
    figures = [
        figure(
            "SFT loss",
            "Nats a response token.",
            Chart(
                [
                    Series("train", *run.curve("sft", "sft/loss"), 1, "trend"),
                    Series("held out", *run.curve("sft", "sft/eval_loss"), 2, "dots"),
                ],
                xlabel="step",
            ),
        ),
        figure(
            "Reward model accuracy",
            "Share of pairs ranked as they are labelled.",
            Chart(
                [
                    Series("train", *run.curve("reward_model", "reward_model/accuracy"), 1, "trend"),
                    Series("held out", *run.curve("reward_model", "reward_model/eval_accuracy"), 2, "dots"),
                ],
                xlabel="step",
                limits=(None, 1.0),
            ),
        ),
        figure(
            "Reward model loss",
            "Bradley–Terry, nats a pair; log 2 is chance (dashed).",
            Chart([Series("train", *loss, 1, "trend")], xlabel="step", target=math.log(2) if loss[1] else None),
        ),
    ]
    return grid(figures)
