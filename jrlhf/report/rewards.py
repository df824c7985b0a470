"""The rewards of a run by their names: their means, what else they measured, and where a function failed."""

from collections import Counter

import numpy as np

from jrlhf.report.charts import COLORS, Chart, Series
from jrlhf.report.parts import figure, grid, lead
from jrlhf.report.record import Record

_PREFIX, _FAILURES, _RAW = "rewards/", "failures/", "score/raw/mean"


def reward_names(run: Record) -> list[str]:
    """The names of the run's rewards: NAME of `rewards/NAME/mean`."""
    parts = [key.removeprefix(_PREFIX).split("/") for key in run.names("ppo", _PREFIX)]
    return list(dict.fromkeys(name for name, *rest in parts if rest == ["mean"]))


def failures(run: Record) -> dict[str, dict[str, str]]:
    """By reward and kind of failure, the metric that counts it: `rewards/NAME/failures/KIND`."""
    found: dict[str, dict[str, str]] = {}
    for key in run.names("ppo", _PREFIX):
        name, _, rest = key.removeprefix(_PREFIX).partition("/")
        if rest.startswith(_FAILURES) and sum(_counts(run, key)):
            found.setdefault(name, {})[rest.removeprefix(_FAILURES)] = key
    return found


def failure_counts(run: Record) -> tuple[dict[str, Counter[str]], list[int]]:
    """(by reward, how often it failed in each way over the whole run; the iterations in which any did)."""
    found = failures(run)
    keys = [key for kinds in found.values() for key in kinds.values()]
    steps = [each["step"] for each in run.metrics.get("ppo", []) if any(each.get(key) for key in keys)]
    return {
        name: Counter({kind: sum(_counts(run, key)) for kind, key in kinds.items()}) for name, kinds in found.items()
    }, steps


def by_name(run: Record) -> str:
    """The section. Nothing for a run with one reward of which nothing more is known than the score's own curve says."""
    names, failed = reward_names(run), failures(run)
    extras, shaping = _extras(run), run.names("ppo", "score/")
    shaping = [] if shaping == [_RAW] else shaping  # the raw score alone is the score
    if not failed and not extras and not shaping and len(names) < (2 if run.measure == "gold" else 1):
        return ""
    main = [
        figure(
            name,
            "Mean of an iteration's responses, and their spread around it.",
            Chart(
                [
                    Series("mean", *run.curve("ppo", f"{_PREFIX}{name}/mean"), 1, "trend"),
                    Series("standard deviation", *run.curve("ppo", f"{_PREFIX}{name}/std"), 3, "trend"),
                ],
                xlabel="iteration",
            ),
        )
        for name in names
    ]
    main += [
        figure(
            f"{name}: failures so far",
            "Samples that got no score of their own.",
            Chart(
                [_failed(run, kind, key, 1 + (4 + index) % COLORS) for index, (kind, key) in enumerate(kinds.items())],
                xlabel="iteration",
                limits=(0, None),
            ),
        )
        for name, kinds in failed.items()
    ]
    small = [_small(run, title, key, 2) for title, key in extras]
    small += [_small(run, f"score: {_words(key.removeprefix('score/'))}", key, 4) for key in shaping]
    together = "Each reward before weights and shaping; the score that PPO sees is their weighted sum, shaped."
    return lead(together if names else "") + grid(main) + grid(small, "four")


def _failed(run: Record, kind: str, key: str, color: int) -> Series:
    counts, steps = _counts(run, key), [float(each["step"]) for each in run.metrics["ppo"]]
    return Series(f"{kind} {sum(counts):,}", steps, np.cumsum(counts).tolist(), color, "steps")


def _extras(run: Record) -> list[tuple[str, str]]:
    """(title, metric) of what reward functions returned beside their scores: `rewards/NAME/EXTRA`."""
    found = []
    for key in run.names("ppo", _PREFIX):
        name, _, rest = key.removeprefix(_PREFIX).partition("/")
        if rest not in ("mean", "std", "failures") and not rest.startswith(_FAILURES):
            found.append((f"{name}: {rest}", key))
    return found


def _small(run: Record, title: str, key: str, color: int) -> str:
    return figure(title, "", Chart([Series(title, *run.curve("ppo", key), color, "trend")], size=(3.3, 1.75)))


def _counts(run: Record, key: str) -> list[int]:
    """Of every iteration; a kind of failure that did not occur in one is not recorded there."""
    return [round(each.get(key) or 0) for each in run.metrics.get("ppo", [])]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("/", " ")
