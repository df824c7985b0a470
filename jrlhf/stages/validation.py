"""Validation while a policy trains: k answers to each held-out prompt, before the first iteration and every n."""

from collections.abc import Sequence

import numpy as np

from jrlhf.rewards.mixture import Rewards
from jrlhf.roles.model import Model
from jrlhf.run.clock import Clock
from jrlhf.stages.context import Context
from jrlhf.stages.evaluate import Graded, grade_heldout


def validate(
    context: Context, policy: Model, rewards: Rewards, step: int, clock: Clock
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """What an iteration begins with, if a validation is due: metrics under verl's names, and all first answers.

        val-core/SOURCE/MEASURE/mean@k         over prompts, of the mean over a prompt's k answers
        val-core/SOURCE/MEASURE/best@k/mean    over prompts, of the best of a prompt's k answers
        val-aux/SOURCE/REWARD/mean@k           the same for each reward, or item of the measure, by itself
        val-aux/all/REWARD/failures            answers that a reward could not score, where there are any

    SOURCE is `all`, and each source's name where the held-out prompts have several.
    """
    config = context.config.validation
    if config is None or config.every is None or step % config.every:
        return {}, []
    rounds = clock.run("validation", _rounds, context, policy, rewards, step)
    if not rounds:
        return {}, []
    metrics, samples = statistics(rounds), _samples(context, rounds[0])
    context.console.validation(step + 1, metrics, samples[: context.config.evaluation.samples])
    return metrics, samples


def statistics(rounds: Sequence[Graded]) -> dict[str, float]:
    """The metrics of k answers to each prompt; `rounds` are the first answers to all prompts, the second, ..."""
    first, k = rounds[0], len(rounds)
    scores = np.stack([each.scores for each in rounds])
    items = {name: np.stack([each.items[name] for each in rounds]) for name in first.items}
    names = sorted(set(first.sources))
    failed = {name for each in rounds for name in each.failures}
    rows = {"all": np.ones(len(first.sources), bool)}
    if len(names) > 1:
        rows |= {name or "unnamed": np.array([source == name for source in first.sources]) for name in names}
    metrics = {
        f"val-aux/all/{name}/failures": float(sum(each.failures.get(name, 0) for each in rounds)) for name in failed
    }
    for source, chosen in rows.items():
        core = f"val-core/{source}/{first.measure}"
        metrics[f"{core}/mean@{k}"] = float(scores[:, chosen].mean())
        metrics[f"{core}/best@{k}/mean"] = float(scores[:, chosen].max(axis=0).mean())
        for name, values in items.items():
            metrics[f"val-aux/{source}/{name}/mean@{k}"] = float(np.nanmean(values[:, chosen]))
    return metrics


def _rounds(context: Context, policy: Model, rewards: Rewards, step: int) -> list[Graded]:
    config = context.config.validation
    assert config is not None
    rounds = [
        grade_heldout(
            context,
            policy,
            rewards,
            purpose=f"validation {number}",
            temperature=config.temperature,
            step=step,
        )
        for number in range(config.k)
    ]
    return [each for each in rounds if each is not None]


def _samples(context: Context, graded: Graded) -> list[dict[str, object]]:
    heldout = context.task.heldout
    assert heldout is not None
    return [
        {
            "kind": "validation",
            "prompt": text,
            "response": response.text,
            "score": float(score),
            "source": source,
        }
        for text, response, score, source in zip(
            heldout.texts, graded.responses, graded.scores, graded.sources, strict=False
        )
    ]
