"""`Sample`, one response that rewards score, and `Scored`, the scores of a batch of samples."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jrlhf.data.types import Example, Response, Text, without_gap

Kind = Literal["reward", "cost"]
INVALID = math.inf  # the score of a sample whose row counts nowhere
MODULES = " modules"  # suffix of the key that identifies the modules which a function's file imports


@dataclass(frozen=True)
class Sample:
    """One response to one prompt."""

    example: Example  # the dataset's row
    prompt_text: str  # as the policy read it, its chat template included
    response: Response
    gap: str = ""  # white space before an answer that is no part of its message (`answer_gap`)

    @property
    def completion(self) -> Text:
        """The response in the form of the prompt: plain text, or one assistant message in a tuple."""
        text = self.response.text
        if isinstance(self.example.prompt, str):
            return text
        return ({"role": "assistant", "content": without_gap(text, self.gap)},)

    @property
    def marked(self) -> "Sample":
        """The sample with the special tokens in the text of its response."""
        text = self.response.marked
        return self if text is None else replace(self, response=replace(self.response, text=text))

    @property
    def columns(self) -> dict[str, Any]:
        """Values that a function may ask for: the dataset's columns, and verl's names for values stored elsewhere."""
        example, texts = self.example, ("prompt", "completion", "completion_ids")
        row = {column: value for column, value in example.columns.items() if column not in texts}
        row.setdefault("data_source", example.source)
        judge = row.get("reward_model")
        if isinstance(judge, Mapping) and "ground_truth" in judge:
            row.setdefault("ground_truth", judge["ground_truth"])
        row["extra_info"] = row.get("extra_info") or {}
        return row


def to_samples(
    examples: Sequence[Example], texts: Sequence[str], responses: Sequence[Response], gap: str = ""
) -> list[Sample]:
    return [Sample(*row, gap) for row in zip(examples, texts, responses, strict=True)]


@dataclass(frozen=True)
class Scored:
    """Scores of a batch of samples, row by row in their order.

    Every score is finite; or NaN: the sample is not judged; or INVALID: nothing is learned from its row, which counts
    in no statistic.

    token_scores: one array per sample, as long as its response, whose sum is the sample's score. None if the reward
        scored whole responses.
    extras: further numbers by name; NaN for a row that has none.
    failures: numbers of failed samples by kind (docs/data-and-rewards.md); their scores are replacements, or INVALID.
    abstained: number of the other samples that are INVALID.
    last_failure: what went wrong with the last of them, for users.
    """

    scores: Float[np.ndarray, "B"]
    token_scores: Sequence[Float[np.ndarray, "R"]] | None = None
    extras: Mapping[str, Float[np.ndarray, "B"]] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    last_failure: str = ""
    abstained: int = 0

    @property
    def addends(self) -> Float[np.ndarray, "B"]:
        """What the scores add to a sum: 0 where a sample is not judged."""
        return np.where(np.isnan(self.scores), 0.0, self.scores)

    @property
    def only_measured(self) -> "Scored":
        """The scores of a reward of weight 0, which makes no row invalid."""
        tokens = self.token_scores
        tokens = tokens if tokens is None else [np.where(np.isfinite(row), row, 0.0) for row in tokens]
        return replace(self, scores=np.where(np.isfinite(self.scores), self.scores, np.nan), token_scores=tokens)

    def by_token(self, response_lengths: Iterable[int]) -> Sequence[Float[np.ndarray, "R"]]:
        """Returns the scores of each row's tokens; a score of a whole response is put on its last token."""
        if self.token_scores is not None:
            return self.token_scores
        return [on_last_token(*row) for row in zip(self.addends, response_lengths, strict=True)]

    def metrics(self, name: str, kind: Kind = "reward") -> dict[str, float]:
        """Returns metrics `rewards/NAME/{mean,std}` (TRL's names), `.../EXTRA`, `.../skipped`, `.../failures[/KIND]`.

        mean and std are those of the samples that have a score. `skipped` and `abstained` are the numbers of those that
        are not judged and of those with which a row is invalid, if there are any. `failures` is a count, logged also
        where it is 0. An extra is averaged over the rows that have it.
        """
        metrics = {extra: float(np.nanmean(x)) for extra, x in self.extras.items() if not np.all(np.isnan(x))}
        judged = self.scores[np.isfinite(self.scores)]
        if len(judged):
            metrics |= {"mean": float(np.mean(judged)), "std": float(np.std(judged))}
        left_out = {"skipped": int(np.isnan(self.scores).sum()), "abstained": self.abstained}
        metrics |= {key: float(count) for key, count in left_out.items() if count}
        metrics["failures"] = float(sum(self.failures.values()))
        metrics |= {f"failures/{failure}": float(count) for failure, count in self.failures.items()}
        return {f"{kind}s/{name}/{key}": value for key, value in metrics.items()}


def on_last_token(score: float, length: int) -> Float[np.ndarray, "R"]:
    """Returns the scores of a response's tokens: `score` on the last one, as in experience, and 0 on the others."""
    tokens = np.zeros(length)
    tokens[-1:] = score
    return tokens


def joined(parts: Sequence[Scored], response_lengths: Sequence[int]) -> Scored:
    """Returns the scores of several batches of samples as those of one. If any part scored tokens, the whole does."""
    names = dict.fromkeys(name for part in parts for name in part.extras)
    missing = {id(part): np.full(len(part.scores), np.nan) for part in parts}
    tokens = None
    if any(part.token_scores is not None for part in parts):
        starts = np.cumsum([len(part.scores) for part in parts])[:-1]
        lengths = np.split(np.asarray(response_lengths), starts)
        tokens = [row for part, own in zip(parts, lengths, strict=True) for row in part.by_token(own)]
    return Scored(
        scores=np.concatenate([part.scores for part in parts]),
        token_scores=tokens,
        extras={name: np.concatenate([part.extras.get(name, missing[id(part)]) for part in parts]) for name in names},
        failures=sum((Counter(part.failures) for part in parts), Counter()),
        last_failure=next((part.last_failure for part in reversed(parts) if part.last_failure), ""),
        abstained=sum(part.abstained for part in parts),
    )


def weighted_sum(parts: Sequence[tuple[float, Scored]], response_lengths: Sequence[int]) -> Scored:
    """Returns sum_i weight_i score_i of (weight, scores) of the same samples, without extras and failures.

    If any part scored tokens, the sum does too.
    """
    scores = np.sum([weight * scored.addends for weight, scored in parts], axis=0)
    if all(scored.token_scores is None for _, scored in parts):
        return Scored(scores)
    tokens = [np.zeros(length) for length in response_lengths]
    for weight, scored in parts:
        for total, row in zip(tokens, scored.by_token(response_lengths), strict=True):
            total += weight * row
    return Scored(scores, tokens)


def scores_of(row: int, parts: Mapping[str, np.ndarray], key: str = "scores") -> dict[str, dict[str, float | None]]:
    """Returns the entry of a sample with each reward's score, None where there is none; {} for a single reward."""
    scores = {name: score_or_none(own[row]) for name, own in parts.items()}
    return {key: scores} if len(scores) > 1 else {}


def score_or_none(score: float) -> float | None:
    return float(score) if np.isfinite(score) else None
