"""Held-out evaluation: what a policy answers to prompts that it never learnt from, and how that is measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jrlhf.data.batches import key_for
from jrlhf.data.encode import Prompts
from jrlhf.rewards.mixture import LEARNT, Rewards, to_samples
from jrlhf.roles.model import Model
from jrlhf.roles.sampling import Response
from jrlhf.run.processes import from_main
from jrlhf.stages.context import Context

BEFORE = "before.json"  # a run's file: how it graded the policy that its algorithm began with


@dataclass(frozen=True)
class Graded:
    """One policy's answers to held-out prompts, and what is made of each.

    measure: "gold", where the task has a measure that training never sees; else "score", the sum of the rewards.
    items: what the measure is made of. learnt: what the reward model says that this run trained, if there is one.
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

    def summary(self) -> dict:
        """Means with standard errors, and how varied the answers are."""
        named = sorted(set(self.sources))
        by_source = {} if len(named) < 2 else {name: self._of(name) for name in named}
        return {
            **_mean(self.measure, self.scores),
            **({} if self.costs is None else _mean("cost", self.costs)),
            "items": {name: float(np.nanmean(values)) for name, values in self.items.items()},
            **({"sources": by_source} if by_source else {}),
            **({"failures": dict(self.failures)} if self.failures else {}),
            "distinct": len({response.text for response in self.responses}),
        }

    def _of(self, source: str) -> dict:
        chosen = np.array([each == source for each in self.sources])
        return {"mean": float(self.scores[chosen].mean()), "n": int(chosen.sum())}


def grade_heldout(
    context: Context,
    policy: Model,
    rewards: Rewards | None,
    costs: Rewards | None = None,
    *,
    purpose: str = "evaluation",
    temperature: float | None = None,
    step: int = 0,
) -> Graded | None:
    """A policy's answers to the first `evaluation.prompts` held-out prompts; None where nothing could measure them.

    Equal purposes and steps draw with equal keys: two policies then make a paired test.

    temperature: that of the rollouts if None.
    """
    task = context.task
    if task.heldout is None or not task.heldout.ids or (task.gold is None and rewards is None):
        return None
    heldout = _first(task.heldout, context.config.evaluation.prompts)
    sampling = context.sampling if temperature is None else replace(context.sampling, temperature=temperature)
    responses = context.sampler.sample(policy, heldout.ids, key_for(context.config.seed, purpose, step), sampling)
    return grade(context, heldout, responses, rewards, costs, step=step)


def grade_before(
    context: Context, policy: Model, rewards: Rewards | None = None, costs: Rewards | None = None
) -> Graded | None:
    """`grade_heldout` of the policy that an algorithm is about to use up.

    The run keeps it in before.json. When it is resumed it is read from there, unless what is graded has become another.
    """
    graded_as = {
        "corpus": context.task.fingerprint,
        "policy": policy.fingerprint(),
        "prompts": context.config.evaluation.prompts,
        "rewards": None if rewards is None else rewards.identities,
        "costs": None if costs is None else costs.identities,
    }
    kept = from_main(partial(_read, context.run.path / BEFORE, graded_as))
    if kept is not None:
        return kept
    with context.console.status("answering the held-out prompts"):
        graded = grade_heldout(context, policy, rewards, costs)
    if graded is not None:
        text = json.dumps({"graded_as": graded_as, "graded": asdict(graded)}, default=_plain)
        context.run.write(BEFORE, text + "\n")
    return graded


def _read(path: Path, graded_as: Mapping[str, Any]) -> Graded | None:
    """What `grade_before` has written, bit for bit; None where there is nothing, or of something else."""
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"), object_hook=_array)
    if found["graded_as"] != graded_as:
        return None
    graded = found["graded"]
    responses = tuple(replace(Response(**each), ids=tuple(each["ids"])) for each in graded["responses"])
    return Graded(**graded | {"responses": responses, "sources": tuple(graded["sources"])})


def _plain(array: np.ndarray) -> dict[str, Any]:
    return {"ndarray": array.dtype.name, "values": array.tolist()}


def _array(found: dict[str, Any]) -> Any:
    return np.array(found["values"], found["ndarray"]) if found.keys() == {"ndarray", "values"} else found


def grade(
    context: Context,
    prompts: Prompts,
    responses: Sequence[Response],
    rewards: Rewards | None,
    costs: Rewards | None = None,
    *,
    step: int = 0,
) -> Graded:
    """What the task's measure, or else the run's rewards, say of responses to `prompts`; and what they cost."""
    task = context.task
    read = {} if rewards is None else _read_tokens(context, prompts, responses, rewards)
    failures: dict[str, int] = {}
    if task.gold is not None:
        measure, gold = "gold", task.gold(prompts.examples, [each.text for each in responses])
        total, items = gold.scores, gold.items
    else:
        assert rewards is not None
        measure = "score"
        total, items, failures = _add_texts(rewards, read, prompts, responses, step)
    spent = None
    if costs is not None:
        of_tokens = _read_tokens(context, prompts, responses, costs)
        spent, _, failed = _add_texts(costs, of_tokens, prompts, responses, step)
        failures |= failed
    sources = tuple(example.source for example in prompts.examples)
    return Graded(measure, tuple(responses), sources, total, items, read.get(LEARNT), failures, spent)


def _read_tokens(
    context: Context, prompts: Prompts, responses: Sequence[Response], rewards: Rewards
) -> dict[str, np.ndarray]:
    """What the reward models that read tokens say, each by its name."""
    sequences = [prompt + each.ids for prompt, each in zip(prompts.ids, responses, strict=True)]
    return {name: context.sampler.scores(part.model, sequences) for name, part in rewards.token_parts.items()}


def _add_texts(
    rewards: Rewards, read: Mapping[str, np.ndarray], prompts: Prompts, responses: Sequence[Response], step: int
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, int]]:
    """The weighted sum of all rewards, given those that read tokens; each by its name; and how often each failed."""
    total, items = np.zeros(len(responses)), dict(read)
    for name, scores in read.items():
        total = total + rewards.token_parts[name].weight * scores
    if not rewards.text_parts:
        return total, items, {}
    summed, parts = rewards.score_samples(to_samples(prompts.examples, prompts.texts, responses), step=step)
    failures = {name: count for name, part in parts.items() if (count := sum(part.failures.values()))}
    return total + summed.scores, items | {name: part.scores for name, part in parts.items()}, failures


def compare(before: Graded, after: Graded | None) -> dict:
    """Both summaries, and the paired difference, after minus before, with its standard error."""
    found = {"measure": before.measure, "n": len(before.scores), "before": before.summary()}
    if after is None:
        return found
    difference = after.scores - before.scores
    error = standard_error(difference)
    return found | {
        "after": after.summary(),
        "difference": float(difference.mean()),
        "standard_error": error,
        "standard_errors": float(difference.mean() / error) if error > 0 else 0.0,
    }


def _mean(name: str, values: np.ndarray) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_standard_error": standard_error(values)}


def standard_error(values: np.ndarray) -> float:
    """Of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _first(prompts: Prompts, count: int) -> Prompts:
    return replace(prompts, ids=prompts.ids[:count], texts=prompts.texts[:count], examples=prompts.examples[:count])
