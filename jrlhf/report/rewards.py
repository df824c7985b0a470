"""The rewards and costs of a run by their names: their means, what else they measured, and where a function failed."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from jrlhf.report.charts import COLORS, Chart, Series
from jrlhf.report.parts import figure, grid, lead
from jrlhf.report.record import Record

KINDS = {"rewards": "reward", "costs": "cost"}  # the prefix of the metrics -> what one of them is called
_FAILURES, _RAW = "failures/", "score/raw/mean"

Named = tuple[str, str]  # (a prefix of KINDS, the name of a reward or a cost)


def reward_names(run: Record, kind: str = "rewards") -> list[str]:
    """The names of the run's rewards, or costs: NAME of `rewards/NAME/mean`."""
    return list(dict.fromkeys(name for (found, name), rest, _ in _keys(run) if found == kind and rest == "mean"))


def failures(run: Record) -> dict[Named, dict[str, str]]:
    """By reward or cost and kind of failure, the metric that counts it: `rewards/NAME/failures/KIND`."""
    found: dict[Named, dict[str, str]] = {}
    for named, rest, key in _keys(run):
        if rest.startswith(_FAILURES) and sum(_counts(run, key)):
            found.setdefault(named, {})[rest.removeprefix(_FAILURES)] = key
    return found


def failure_counts(run: Record) -> tuple[dict[Named, Counter[str]], list[int]]:
    """(by reward or cost, how often it failed in each way over the whole run; the iterations in which any did)."""
    found = failures(run)
    keys = [key for kinds in found.values() for key in kinds.values()]
    steps = [each["step"] for each in run.metrics.get(run.algorithm, []) if any(each.get(key) for key in keys)]
    return {
        name: Counter({kind: sum(_counts(run, key)) for kind, key in kinds.items()}) for name, kinds in found.items()
    }, steps


def by_name(run: Record) -> str:
    """The section. Nothing for a run with one reward of which nothing more is known than the score's own curve says."""
    names, failed = {kind: reward_names(run, kind) for kind in KINDS}, failures(run)
    extras, shaping = _extras(run), run.rl_names("score/")
    shaping = [] if shaping == [_RAW] else shaping  # the raw score alone is the score
    if not failed and not extras and not shaping and _told_elsewhere(run, names):
        return ""
    main = [
        figure(
            _title(kind, name),
            "Mean of an iteration's responses, and their spread around it.",
            Chart(
                [
                    Series("mean", *run.rl_curve(f"{kind}/{name}/mean"), 1, "trend"),
                    Series("standard deviation", *run.rl_curve(f"{kind}/{name}/std"), 3, "trend"),
                ],
                xlabel="iteration",
            ),
        )
        for kind, found in names.items()
        for name in found
    ]
    main += [
        figure(
            f"{_title(*named)}: failures so far",
            "Samples that got no score of their own.",
            Chart(
                [_failed(run, kind, key, 1 + (4 + index) % COLORS) for index, (kind, key) in enumerate(kinds.items())],
                xlabel="iteration",
                limits=(0, None),
            ),
        )
        for named, kinds in failed.items()
    ]
    small = [_small(run, title, key, 2) for title, key in extras]
    small += [_small(run, f"score: {_words(key.removeprefix('score/'))}", key, 4) for key in shaping]
    together = f"Each reward before weights and shaping; the score that {run.title} sees is their weighted sum, shaped."
    together += " So it is with the costs, which are not shaped." if names["costs"] else ""
    return lead(together if names["rewards"] else "") + grid(main) + grid(small, "four")


def _told_elsewhere(run: Record, names: dict[str, list[str]]) -> bool:
    """Whether the curves of score and cost are already all that is to be said."""
    return len(names["rewards"]) < (2 if run.measure == "gold" else 1) and len(names["costs"]) < 2


def _title(kind: str, name: str) -> str:
    return name if kind == "rewards" else f"{KINDS[kind]} {name}"


def _failed(run: Record, kind: str, key: str, color: int) -> Series:
    counts, steps = _counts(run, key), [float(each["step"]) for each in run.metrics[run.algorithm]]
    return Series(f"{kind} {sum(counts):,}", steps, np.cumsum(counts).tolist(), color, "steps")


def _extras(run: Record) -> list[tuple[str, str]]:
    """(title, metric) of what functions returned beside their scores: `rewards/NAME/EXTRA`."""
    return [
        (f"{_title(*named)}: {rest}", key)
        for named, rest, key in _keys(run)
        if rest not in ("mean", "std", "failures") and not rest.startswith(_FAILURES)
    ]


def _keys(run: Record) -> Iterator[tuple[Named, str, str]]:
    """(named, rest, metric) of every metric `rewards/NAME/REST` or `costs/NAME/REST`."""
    for kind in KINDS:
        for key in run.rl_names(f"{kind}/"):
            name, _, rest = key.removeprefix(f"{kind}/").partition("/")
            yield (kind, name), rest, key


def _small(run: Record, title: str, key: str, color: int) -> str:
    return figure(title, "", Chart([Series(title, *run.rl_curve(key), color, "trend")], size=(3.3, 1.75)))


def _counts(run: Record, key: str) -> list[int]:
    """Of every iteration; a kind of failure that did not occur in one is not recorded there."""
    return [round(each.get(key) or 0) for each in run.metrics.get(run.algorithm, [])]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("/", " ")
