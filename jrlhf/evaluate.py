"""Held-out evaluation: two actors answer the same prompts with the same keys; the rubric compares them in pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jrlhf.batches import key_for
from jrlhf.context import Context
from jrlhf.sampling import Response, sample


@dataclass(frozen=True)
class Graded:
    """One model's answers to the held-out prompts, and what the rubric says of each."""

    responses: tuple[Response, ...]
    gold: np.ndarray
    items: dict[str, np.ndarray]

    def summary(self) -> dict:
        """Means with standard errors, and how varied the answers are."""
        return {
            "gold": float(self.gold.mean()),
            "gold_standard_error": standard_error(self.gold),
            "items": {name: float(values.mean()) for name, values in self.items.items()},
            "distinct": len({response.text for response in self.responses}),
        }


def grade(context: Context, signatures: Sequence[str], responses: Sequence[Response]) -> Graded:
    """The rubric's verdict on each response."""
    rubric = context.task.rubric
    pairs = list(zip(signatures, responses, strict=True))
    items = [rubric.items(signature, response.text) for signature, response in pairs]
    return Graded(
        responses=tuple(responses),
        gold=np.array([rubric.score(signature, response.text) for signature, response in pairs]),
        items={name: np.array([each[name] for each in items]) for name in items[0]},
    )


def grade_heldout(context: Context, params) -> Graded:
    """An actor's answers to the first `evaluation.prompts` held-out prompts. Equal keys for all: a paired test."""
    heldout = context.task.heldout
    count = min(context.config.evaluation.prompts, len(heldout.examples))
    responses = sample(context, params, heldout.tokens.prompts[:count], key_for(context.config.seed, "evaluation"))
    return grade(context, [example.signature for example in heldout.examples[:count]], responses)


def compare(before: Graded, after: Graded | None) -> dict:
    """The paired difference of the gold scores, after minus before, with its standard error, if there is an `after`."""
    if after is None:
        return {"sft": before.summary(), "n": len(before.gold)}
    difference = after.gold - before.gold
    error = standard_error(difference)
    return {
        "sft": before.summary(),
        "ppo": after.summary(),
        "n": len(difference),
        "difference": float(difference.mean()),
        "standard_error": error,
        "standard_errors": float(difference.mean() / error) if error > 0 else 0.0,
    }


def standard_error(values: np.ndarray) -> float:
    """Of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
