"""The curves that tell how training went: of reinforcement learning, and of what came before it."""

import math
from typing import Any

from jrlhf.report.charts import Chart, Series
from jrlhf.report.parts import figure, grid
from jrlhf.report.record import Record


def reinforcement(run: Record) -> str:
    def chart(title: str, note: str, *curves: tuple[str, str], **how: Any) -> str:
        series = [
            Series(label, *run.rl_curve(metric), color=color, style="trend")
            for color, (label, metric) in enumerate(curves, start=1)
        ]
        return figure(title, note, Chart(series, xlabel="iteration", **how))

    explained = [value for name in ("critic", "cost_critic") for value in run.rl_curve(f"{name}/vf_explained_var")[1]]
    baselines = [("sampled", "critic/score/mean"), ("greedy", "critic/baseline/mean")]
    baselines = baselines if run.rl_curve("critic/baseline/mean")[1] else []
    target = run.setting(f"{run.algorithm}.algorithm.kl_target")
    controlled = [] if target is None else [("beta", "objective/kl_coef")]
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
            "How much of the returns a critic foresees; 1 is all.",
            ("critic", "critic/vf_explained_var"),
            ("cost critic", "cost_critic/vf_explained_var"),
            limits=(-1.0 if min(explained, default=0.0) < -1 else None, 1.05),
        ),
        chart("Score and baseline", "Means of the sampled and of the greedy responses.", *baselines),
        chart("KL coefficient", "The controller raises it while the KL is above its target.", *controlled),
        chart(
            "Groups that say nothing",
            "Share of prompts whose responses all have the same score.",
            ("share", "group/zero_std"),
            limits=(0, None),
        ),
        chart(
            "Rounds of sampling", "Batches of prompts until one was full.", ("rounds", "dapo/rounds"), limits=(0, None)
        ),
        chart("KL in the loss", "The estimate a token, before its coefficient.", ("KL", "actor/kl_loss")),
        chart("Imitation loss", "Nats a token of the texts beside the rollouts.", ("loss", "actor/ptx_loss")),
        chart("KL to the old policy", "Nats a token, within an iteration's updates.", ("KL", "actor/ppo_kl")),
        chart("Clipped ratios", "Share of tokens whose gradient the clip cuts.", ("share", "actor/pg_clipfrac")),
        chart(
            "Gradient norms",
            "Before clipping.",
            ("actor", "actor/grad_norm"),
            ("critic", "critic/grad_norm"),
            ("cost critic", "cost_critic/grad_norm"),
        ),
        chart(
            "Throughput",
            "Tokens a second and device, of the batch that is learnt from.",
            ("tokens/s", "perf/throughput"),
            limits=(0, None),
        ),
    ]
    return grid(figures)


def dpo(run: Record) -> str:
    def chart(title: str, note: str, *curves: tuple[str, str, str], **how: Any) -> str:
        series = [
            Series(label, *run.curve("dpo", metric), color, style)
            for color, (label, metric, style) in enumerate(curves, start=1)
        ]
        return figure(title, note, Chart(series, xlabel="step", **how))

    sigmoid = run.settings.get("dpo.algorithm.loss") == "sigmoid" and "dpo" in run.metrics
    figures = [
        chart(
            "Loss",
            "Of a pair" + ("; log 2 is chance (dashed)." if sigmoid else "."),
            ("train", "dpo/loss", "trend"),
            ("held out", "dpo/eval_loss", "dots"),
            target=math.log(2) if sigmoid else None,
        ),
        chart(
            "Accuracy",
            "Share of pairs whose chosen answer the policy has moved towards more than the rejected one.",
            ("train", "rewards/accuracies", "trend"),
            ("held out", "dpo/eval_accuracy", "dots"),
            limits=(None, 1.0),
        ),
        chart(
            "Implicit rewards",
            "Beta times the answers' log-ratio to the reference.",
            ("chosen", "rewards/chosen", "trend"),
            ("rejected", "rewards/rejected", "trend"),
        ),
        chart(
            "Margin",
            "Between the two implicit rewards.",
            ("train", "rewards/margins", "trend"),
            ("held out", "dpo/eval_margin", "dots"),
        ),
        chart(
            "Log-probability",
            "Of whole answers, nats. Both usually fall: only their distance is trained.",
            ("chosen", "logps/chosen", "trend"),
            ("rejected", "logps/rejected", "trend"),
        ),
        chart("Gradient norm", "Before clipping.", ("actor", "dpo/grad_norm", "trend")),
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
