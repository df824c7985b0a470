"""What a reward is asked about, and what it answers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from jrlhf.data.types import Text


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, in every form that a reward may want.

    prompt: as in the dataset. prompt_text: as the policy read it, its chat template included.
    completion: the response in the form of the prompt: plain text, or one assistant message in a tuple.
    response_text: the response decoded, without special tokens. response_ids: its tokens, eos included.
    finished: False where the length limit cut it off.
    source, columns: of the dataset's row (`Example`).
    """

    prompt: Text
    prompt_text: str
    completion: Text
    response_text: str
    response_ids: Sequence[int]
    finished: bool
    source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """Scores of a batch of samples, row by row in their order. Every score is finite.

    token_scores: where the reward scored tokens: one array a sample, as long as its `response_ids`, adding up to its
        score. None where it scored whole responses.
    extras: what else it reported, by name; NaN where it reported nothing for a row.
    failures: how many samples failed, by kind (`jrlhf.rewards.functions` lists the kinds); their scores are
        replacements.
    """

    scores: Float[np.ndarray, "B"]
    token_scores: tuple[Float[np.ndarray, "R"], ...] | None = None
    extras: Mapping[str, Float[np.ndarray, "B"]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    def metrics(self, name: str, kind: str = "rewards") -> dict[str, float]:
        """What to log about it: `rewards/NAME/{mean,std}` (TRL's names), `.../EXTRA`, `.../failures[/KIND]`.

        `failures` is a count, logged also where it is 0. An extra is averaged over the rows that have it.
        """
        prefix = f"{kind}/{name}"
        extras = {
            f"{prefix}/{extra}": float(np.mean(values[~np.isnan(values)]))
            for extra, values in self.extras.items()
            if not np.all(np.isnan(values))
        }
        spread = {"mean": float(np.mean(self.scores)), "std": float(np.std(self.scores))} if len(self.scores) else {}
        return {
            **extras,
            **{f"{prefix}/{statistic}": value for statistic, value in spread.items()},
            f"{prefix}/failures": float(sum(self.failures.values())),
            **{f"{prefix}/failures/{kind}": float(count) for kind, count in self.failures.items()},
        }


def weighted_sum(parts: Sequence[tuple[float, Scored]], response_lengths: Sequence[int]) -> Scored:
    """sum_i weight_i score_i, row by row. Extras stay with the parts: log each part under its own name.

    If any part scored tokens, the sum does too: a part's score of a whole response lands on the last token, where
    experience would place it.

    Args:
        parts: (weight, scores), all of the same samples.
        response_lengths: of those samples, in tokens.

    Raises:
        ValueError: no parts, or parts of different lengths.
    """
    rows = len(response_lengths)
    if not parts:
        raise ValueError("weighted_sum got no parts: give at least one reward")
    for _, scored in parts:
        if len(scored.scores) != rows:
            raise ValueError(f"a part scored {len(scored.scores)} samples, but there are {rows}")
    failures: Counter[str] = sum((scored.failures for _, scored in parts), Counter())
    scores = np.sum([weight * scored.scores for weight, scored in parts], axis=0)
    if all(scored.token_scores is None for _, scored in parts):
        return Scored(scores, failures=failures)
    tokens = tuple(np.zeros(length) for length in response_lengths)
    for weight, scored in parts:
        for row, total in enumerate(tokens):
            if scored.token_scores is not None:
                total += weight * scored.token_scores[row]
            elif len(total):
                total[-1] += weight * scored.scores[row]
    return Scored(scores, token_scores=tokens, failures=failures)
