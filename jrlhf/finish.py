"""The end of a run: held-out evaluation, the model in Hugging Face form, samples, the summary and the report."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrlhf.context import Context
from jrlhf.evaluate import Graded, compare, grade_heldout
from jrlhf.files import write_atomic
from jrlhf.metrics import read_metrics, truncate_after
from jrlhf.models.hf import export_hf
from jrlhf.report import write_report
from jrlhf.sampling import score_sequences


def finish(context: Context, sft_params, reward_params, actor_params, phases: Mapping[str, float]) -> dict[str, Any]:
    """Measures the final actor against the SFT actor on held-out prompts, and writes what the run leaves behind.

    phases: seconds that this process spent in each.
    """
    with context.console.status("answering the held-out prompts"):
        before = grade_heldout(context, sft_params)
        after = None if actor_params is sft_params else grade_heldout(context, actor_params)
        rewards = {} if reward_params is None else _rewards(context, reward_params, before, after)
    _write_samples(context, before, after, rewards)
    summary = {"held_out": compare(before, after), **_from_metrics(context), "phases": dict(phases)}
    write_atomic(context.run.path / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    tokenizer = context.task.tokenizer
    export_hf(
        jax.tree.map(np.asarray, actor_params),
        context.model,
        context.run.path / "model",
        tokenizer_json=tokenizer.to_json(),
        eos_ids=[tokenizer.eos_id],
        pad_id=tokenizer.pad_id,
    )
    write_report(context.run.path)
    context.console.summary(summary, context.run.path)
    return summary


def _rewards(context: Context, params, before: Graded, after: Graded | None) -> dict[str, np.ndarray]:
    """The learned reward of the held-out answers."""
    prompts = context.task.heldout.tokens.prompts
    return {
        f"reward_{name}": score_sequences(
            context, params, [prompt + each.ids for prompt, each in zip(prompts, graded.responses, strict=False)]
        )
        for name, graded in (("sft", before), ("ppo", after))
        if graded is not None
    }


def _write_samples(context: Context, before: Graded, after: Graded | None, rewards: Mapping[str, np.ndarray]) -> None:
    truncate_after(context.run.path, "evaluation", -1)  # what an earlier end of this run wrote
    context.run.add_samples(
        {
            "stage": "evaluation",
            "step": 0,
            "prompt": example.prompt,
            "reference": example.summary,
            "sft": before.responses[row].text,
            "gold_sft": float(before.gold[row]),
            **({} if after is None else {"ppo": after.responses[row].text, "gold_ppo": float(after.gold[row])}),
            **{name: float(scores[row]) for name, scores in rewards.items()},
        }
        for row, example in enumerate(context.task.heldout.examples[: len(before.responses)])
    )


def _from_metrics(context: Context) -> dict[str, Any]:
    """What the summary repeats of metrics.jsonl: the reward model's accuracy, and the KL that the run settled on."""
    records = read_metrics(context.run.path)
    accuracies = [each["reward_model/eval_accuracy"] for each in records if "reward_model/eval_accuracy" in each]
    found: dict[str, Any] = {"reward_model_accuracy": accuracies[-1]} if accuracies else {}
    kl = [each["objective/kl"] for each in records if each.get("objective/kl") is not None]
    if kl:
        found["kl_last_quarter"] = float(np.mean(kl[-max(len(kl) // 4, 1) :]))
        found["kl_target"] = context.config.ppo.algorithm.kl_target
    return found
