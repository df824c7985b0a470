"""Held-out evaluation: samples a policy's answers to prompts that it was not trained on, and scores them.

It runs before and after an algorithm (`grade_before`, `compare`), and every few iterations (`validate`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jrlhf.data.batches import key_for
from jrlhf.data.types import Prompts, Response
from jrlhf.models.generation.sampling import SamplingConfig
from jrlhf.rewards.mixture import TRAINED, Rewards
from jrlhf.rewards.types import MODULES, joined, score_or_none, scores_of
from jrlhf.roles.model import Model
from jrlhf.run.clock import Clock
from jrlhf.run.files import decode, encode, seal, unsealed
from jrlhf.run.processes import from_main
from jrlhf.run.text import decimals
from jrlhf.stages.context import Context

_MOST = 0.9  # share of the answers from which on a doubt concerns them all
VALIDATED = 256  # held-out prompts of a validation, if no setting names another number
BEFORE = "before.json"  # a file of the run: the grades of the policy before the algorithm


@dataclass(frozen=True)
class Graded:
    """One policy's answers to held-out prompts, and their scores.

    measure: "gold" if the task has a measure that training never sees; else "score", the sum of the rewards. A score
    that is not finite is that of an invalid answer, which counts in no mean.
    items: the parts of the measure. learnt: scores of the reward model that this run trained, if there is one.
    costs: the sum of the run's costs, if it has any.
    """

    measure: str
    responses: tuple[Response, ...]
    sources: tuple[str, ...]
    scores: np.ndarray
    items: dict[str, np.ndarray]
    learnt: np.ndarray | None
    failures: Mapping[str, int] = field(default_factory=dict)  # reward or cost -> answers that it could not score
    costs: np.ndarray | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # of the items that are rewards

    def summary(self) -> dict:
        """Means with standard errors, and the number of distinct answers."""
        figures = {}
        for name, values in {self.measure: self.scores, "cost": self.costs}.items():
            if values is not None:
                figures |= {name: mean(values), f"{name}_standard_error": standard_error(values)}
        by_source = {name: self.scores[rows] for name, rows in self.rows().items()}
        sources = {name: {"mean": mean(scores), "n": len(scores)} for name, scores in by_source.items()}
        invalid = int(np.sum(~np.isfinite(self.scores)))
        return {
            **figures,
            **({"invalid": invalid} if invalid else {}),
            "items": means(self.items),
            **({"sources": sources} if sources else {}),
            **({"failures": dict(self.failures)} if self.failures else {}),
            "distinct": len({response.text for response in self.responses}),
        }

    @property
    def by_reward(self) -> dict[str, np.ndarray]:
        return {name: self.items[name] for name in self.weights}

    def rows(self) -> dict[str, np.ndarray]:
        """Source -> mask of its rows; empty where all prompts are from one source."""
        names = sorted(set(self.sources))
        return {} if len(names) < 2 else {name: np.array(self.sources) == name for name in names}


def grade_heldout(
    context: Context,
    policy: Model,
    rewards: Rewards | None,
    costs: Rewards | None = None,
    *,
    purpose: str = "evaluation",
    sampling: SamplingConfig | None = None,
    step: int = 0,
    count: int | None = None,
) -> Graded:
    """Grades a policy's answers to the first `count` held-out prompts, which are `_measurable`.

    Equal purposes and steps draw with equal keys: two policies then make a paired test.

    sampling: None for that of the rollouts, whose programs then draw the answers. count: None for all.
    """
    every = context.task.heldout
    assert every is not None
    heldout = replace(every, ids=every.ids[:count], texts=every.texts[:count], examples=every.examples[:count])
    sampling = sampling or context.sampling
    responses = context.sampler.sample(policy, heldout.ids, key_for(context.config.seed, purpose, step), sampling)
    return grade(context, heldout, responses, rewards, costs, step=step, limit=sampling.max_new_tokens)


def _measurable(context: Context, rewards: Rewards | None) -> int:
    """Returns the number of held-out prompts; 0 if nothing can measure answers to them."""
    heldout, measured = context.task.heldout, context.task.gold is not None or bool(rewards and rewards.identities)
    return len(heldout.ids) if heldout is not None and measured else 0


def evaluate(
    context: Context, policy: Model, rewards: Rewards | None = None, costs: Rewards | None = None
) -> Graded | None:
    """Grades answers to the first `evaluation.prompts` held-out prompts, and tells their number; None without any."""
    count, total = context.config.evaluation.prompts, _measurable(context, rewards)
    if not total:
        return None
    part = f" of {total}" if count is not None and count < total else ""
    with context.console.status(f"answering {min(count or total, total)}{part} held-out prompts"):
        return grade_heldout(context, policy, rewards, costs, count=count)


def grade_before(
    context: Context, policy: Model, rewards: Rewards | None = None, costs: Rewards | None = None
) -> Graded | None:
    """`evaluate`s the policy before an algorithm trains it, which frees its arrays.

    The run saves it in before.json. A resumed run reads it from there, unless policy, prompts or rewards have changed.
    """
    modules = {key: word for key, word in context.identity.words.items() if key.endswith(MODULES)}
    graded_as = {
        "corpus": context.task.fingerprint,
        "policy": policy.fingerprint(),
        "prompts": context.config.evaluation.prompts,
        "rewards": None if rewards is None else rewards.identities,
        "costs": None if costs is None else costs.identities,
        **({"modules": modules} if modules else {}),
    }
    saved, seconds = from_main(partial(_read, context, graded_as))
    if saved is not None:
        context.phases.resume("evaluation", seconds)
        responses = tuple(Response(**row | {"ids": tuple(row["ids"])}) for row in saved["responses"])
        return Graded(**saved | {"responses": responses, "sources": tuple(saved["sources"])})
    graded = evaluate(context, policy, rewards, costs)
    if graded is not None:
        record = {"graded_as": graded_as, "graded": asdict(graded), "seconds": context.phases.lap("evaluation")}
        context.run.write(BEFORE, seal(encode(record) + "\n"))
    return graded


def _read(context: Context, graded_as: Mapping[str, Any]) -> tuple[dict[str, Any] | None, float]:
    """Returns the saved grades, bit for bit, and the seconds that they took.

    There are none (None) if they were not saved, or if policy, prompts or rewards differ.
    """
    path = context.run.path / BEFORE
    text = unsealed(path)
    if text is None and path.exists():
        context.console.warn(f"{path} is damaged: the held-out prompts are answered again")
    saved = {} if text is None else decode(text)
    return (saved["graded"] if saved.get("graded_as") == graded_as else None), saved.get("seconds", 0.0)


def grade(
    context: Context,
    prompts: Prompts,
    responses: Sequence[Response],
    rewards: Rewards | None,
    costs: Rewards | None = None,
    *,
    step: int = 0,
    limit: int | None = None,
) -> Graded:
    """Scores responses by the task's gold measure, or else by the run's rewards; also computes their costs.

    limit: tokens of the longest possible response; None: as many as in rollouts.
    """
    gold, sources = context.task.gold, tuple(example.source for example in prompts.examples)
    sequences = [prompt + response.ids for prompt, response in zip(prompts.ids, responses, strict=True)]

    def learned_scores(mixture: Rewards) -> dict[str, np.ndarray]:
        """The scores of the reward models that read the actor's tokens, by name."""
        parts = mixture.token_parts.items()
        return {name: context.sampler.scores(part.model, sequences, limit=limit) for name, part in parts}

    weighted = partial(_weighted_sum, prompts, responses, context.config.sampled_rows, step)
    learned = {} if rewards is None else learned_scores(rewards)
    total_costs, failures, weights = None, dict[str, int](), dict[str, float]()
    if gold is not None:
        grades = gold(prompts.examples, [response.text for response in responses])
        scores, items = grades.scores, grades.items
    else:
        assert rewards is not None
        scores, items, failures = weighted(rewards, learned)
        weights = {name: part.weight for name, part in {**rewards.token_parts, **rewards.text_parts}.items()}
    if costs is not None:
        total_costs, _, failed = weighted(costs, learned_scores(costs))
        failures |= failed
    measure = "score" if gold is None else "gold"
    learnt = learned.get(TRAINED)
    return Graded(measure, tuple(responses), sources, scores, items, learnt, failures, total_costs, weights)


def _weighted_sum(
    prompts: Prompts,
    responses: Sequence[Response],
    batch: int,
    step: int,
    rewards: Rewards,
    learned: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, int]]:
    """The weighted sum of all rewards, the scores of each by name, and the number of failures of each.

    batch: rows of a call in training, for which the deadlines of functions are set.
    """
    total, items = np.zeros(len(responses)), dict(learned)
    for name, scores in learned.items():
        weight = rewards.token_parts[name].weight
        total = total + (weight * scores if weight else 0.0)
    if not rewards.text_parts:
        return total, items, {}
    samples = rewards.samples(prompts.examples, prompts.texts, responses)
    starts, lengths = range(0, len(samples), batch), [len(response.ids) for response in responses]
    asked = [rewards.score_texts(samples[first : first + batch], step, first) for first in starts]
    summed = np.concatenate([scored.scores for scored, _ in asked])
    parts = {name: joined([own[name] for _, own in asked], lengths) for name in rewards.text_parts}
    failures = {name: count for name, part in parts.items() if (count := sum(part.failures.values()))}
    return total + summed, items | {name: part.scores for name, part in parts.items()}, failures


def compare(before: Graded, after: Graded | None) -> dict:
    """Returns both summaries, and the paired difference, after minus before, with its standard error."""
    comparison = {"measure": before.measure, "n": len(before.scores), "before": before.summary()}
    if after is None:
        return comparison
    with np.errstate(invalid="ignore"):  # of two infinite scores
        difference = after.scores - before.scores
    error = standard_error(difference)
    return comparison | {
        "after": after.summary(),
        "difference": mean(difference),
        "standard_error": error,
        "standard_errors": mean(difference) / error if error > 0 else 0.0,
    }


def doubts(before: Graded | None, after: Graded, sampling: SamplingConfig, equal: Sequence[float] = ()) -> list[str]:
    """Returns sentences on what a mean score does not show: a reward that failed, that fell or that told no answers
    apart; answers that are all the same, one token again and again, or nearly all as short or as long as they may be;
    nothing to learn from.

    sampling: with which the answers were drawn. equal: of each iteration, the share of groups with equal scores.
    """
    lines, count, first = list[str](), len(after.responses), before or after
    broken = {name: failed for name, failed in after.failures.items() if 2 * failed > count}
    for name, failed in broken.items():
        called = f"the {'reward' if name in after.weights else 'cost'} {name}"
        lines.append(f"{called} failed on {failed} of {count} held-out answers, which got its on_failure: mend it")
    for name, weight in after.weights.items():
        scores = np.stack([first.items[name], after.items[name]])
        scores = scores[:, np.isfinite(scores).all(axis=0)]
        if count > 1 and not np.isfinite(after.items[name]).any():
            lines.append(f"the reward {name} judges no held-out answer (skip_none, abstain)")
        if weight == 0 or scores.shape[1] < 2 or name in broken:
            continue
        change, (old, new) = weight * (scores[1] - scores[0]), map(decimals, scores.mean(axis=1))
        if np.ptp(scores) == 0:
            lines.append(f"the reward {name} is {new} for every held-out answer, before and after: it tells none apart")
        elif mean(after.scores) > mean(first.scores) and change.mean() < -2 * standard_error(change):
            lines.append(f"the reward {name} went from {old} to {new}, for the worse, although their sum rose")
    shortest, longest = max(sampling.min_new_tokens, 1), sampling.max_new_tokens
    same = max(Counter(response.text for response in after.responses).values(), default=0)
    short = sum(response.finished and len(response.ids) <= shortest < longest for response in after.responses)
    ids = [response.ids for response in after.responses]
    stuck = sum(len(own) > 8 and max(Counter(own).values()) >= _MOST * len(own) for own in ids)
    long = sum(not response.finished and shortest < longest for response in after.responses)
    for answers, clause in (
        (same, "are one and the same text: the policy answers no prompt"),
        (short, f"are as short as they may be: they end at token {shortest}"),
        (stuck, "are one token again and again: the policy has collapsed"),
        (long, f"are as long as they may be: they are cut off at data.max_response={longest}"),
    ):
        if count > 1 and answers >= _MOST * count:
            lines.append(f"{answers} of {count} held-out answers {clause}")
    if min(equal, default=0.0) == 1:
        lines.append(
            f"the scores taught nothing: in all {len(equal)} iterations no prompt had counted responses with different "
            "scores"
        )
    return lines


def means(items: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means over the answers that have a score of an item; an item that judges none of them is left out."""
    return {name: mean(values) for name, values in items.items() if np.isfinite(values).any()}


def mean(values: np.ndarray) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def standard_error(values: np.ndarray) -> float:
    """The standard error of the mean of the finite values."""
    finite = values[np.isfinite(values)]
    return float(finite.std(ddof=1) / np.sqrt(len(finite))) if len(finite) > 1 else 0.0


def validate(
    context: Context, policy: Model, rewards: Rewards, step: int, clock: Clock
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Grades `validation.k` answers to each prompt; returns metrics `val-*` (docs/metrics.md) and all first answers.

    There are metrics of all prompts, and of each source if the held-out prompts have several.
    """
    config, heldout = context.config.validation, context.task.heldout
    assert config is not None
    if heldout is None or not _measurable(context, rewards):
        return {}, []

    count = config.prompts or context.config.evaluation.prompts or VALIDATED
    sampling = replace(context.sampling, **config.drawing)
    own = partial(grade_heldout, context, policy, rewards, sampling=sampling, step=step, count=count)
    rounds = clock.run("validation", lambda: [own(purpose=f"validation {number}") for number in range(config.k)])
    first, metrics = rounds[0], statistics(rounds)
    rows = zip(heldout.texts, first.responses, first.scores, first.sources, strict=False)
    samples: list[dict[str, object]] = [
        {"kind": "validation", "prompt": text, "response": response.text, "score": score_or_none(score)}
        | scores_of(row, first.by_reward)
        | ({"source": source} if any(first.sources) else {})
        for row, (text, response, score, source) in enumerate(rows)
    ]
    of_prompts = list({str(sample["prompt"]): sample for sample in samples}.values())  # a prompt may have many rows
    context.console.validation(step + 1, metrics, of_prompts[: context.config.evaluation.samples])
    return metrics, samples


def statistics(rounds: Sequence[Graded]) -> dict[str, float]:
    """Returns the metrics of k answers to each prompt. rounds[i]: the grades of the answers number i to all prompts."""
    first, k = rounds[0], len(rounds)
    scores = np.stack([graded.scores for graded in rounds])
    items = {name: np.stack([graded.items[name] for graded in rounds]) for name in first.items}
    failures = sum((Counter(graded.failures) for graded in rounds), Counter())
    metrics = {f"val-aux/all/{name}/failures": float(count) for name, count in failures.items()}
    by_source = {source or "unnamed": rows for source, rows in first.rows().items()}
    for source, rows in ({"all": np.ones(len(first.sources), bool)} | by_source).items():
        core = f"val-core/{source}/{first.measure}"
        metrics[f"{core}/mean@{k}"] = mean(scores[:, rows])
        best = np.where(np.isfinite(scores), scores, -np.inf)[:, rows].max(axis=0)
        metrics[f"{core}/best@{k}/mean"] = mean(best)
        measured = means({name: values[:, rows] for name, values in items.items()})
        metrics |= {f"val-aux/{source}/{name}/mean@{k}": mean for name, mean in measured.items()}
    return metrics
