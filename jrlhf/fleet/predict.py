"""Predicts what an asynchronous setting costs, from a simulated run: time, waiting, ages of tokens and lost tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int

from jrlhf.fleet.schedule import fresh
from jrlhf.fleet.simulate import DROPPED, WAITING, Setting, Trace, simulate


@dataclass(frozen=True)
class Prediction:
    """What a setting costs. Times are in decode steps, ages in versions, shares between 0 and 1.

    step: time from one update to the next. trainer_waits: share of the time in which the trainer does not update.
    rollouts_wait: share of the slots' time in which they hold no row, or decoding stops for new weights.
    mean_age, max_age: of all tokens that an update read. max_full_age: of those with full weight.
    group_age, max_group_age: of groups, from the version that drew their first token.
    discarded: share of rows that were dropped.
    older: share of sampled tokens that an update read and that were older than the bound. A mask gives them weight 0,
        a truncated importance weight no more than itself.
    zero_weight: share of sampled tokens with weight 0 where older ones are masked, those of dropped rows included.
    full_weight: tokens with full weight over sampled tokens, by quartile of row length, shortest rows first.
    time_per_batch: time in which as many tokens are learned from with full weight as a batch of sampled rows has.
    length_ratio: mean length of the rows that updates read over that of the rows that started in the meantime.
    """

    step: float
    trainer_waits: float
    rollouts_wait: float
    mean_age: float
    max_age: int
    max_full_age: int
    group_age: float
    max_group_age: int
    discarded: float
    older: float
    zero_weight: float
    full_weight: tuple[float, ...]
    time_per_batch: float
    length_ratio: float


def predict(setting: Setting, versions: int = 300, seed: int = 0) -> Prediction:
    """Simulates this number of updates and returns what one of them costs."""
    return summarise(simulate(setting, versions, seed))


def trade_off(setting: Setting, bounds: Sequence[float], versions: int = 300, seed: int = 0) -> list[Prediction]:
    """Predicts a setting with these values of `staleness`, for groups of the same lengths."""
    rules = [replace(setting.rules, staleness=bound) for bound in bounds]
    return [predict(replace(setting, rules=rule), versions, seed) for rule in rules]


def summarise(trace: Trace) -> Prediction:
    """Averages a simulated run of at least 5 updates, without the first fifth, in which slots and queue fill.

    Ages and shares are those of the groups that started in the middle three fifths: also of a group that takes long,
    the end of the run knows what became of it.
    """
    setting, rules, versions = trace.setting, trace.setting.rules, len(trace.begins)
    first, last = versions // 5, versions - 1
    time, area = trace.begins[last] - trace.begins[first], trace.busy[last] - trace.busy[first]
    step = float(time / (last - first))
    read, started = ((numbers >= first) & (numbers < last) for numbers in (trace.trained, trace.drawn))
    middle = (trace.drawn >= first) & (trace.drawn < versions - first) & (trace.trained != WAITING)
    learned = middle & (trace.trained != DROPPED)

    rows, drawn, tokens = token_versions(trace, learned)
    trained = np.repeat(trace.trained[learned], setting.samples)[rows]
    ages, young = trained - drawn, fresh(drawn, trained, rules.staleness)
    full = young if setting.rule == "token_bound" else np.ones_like(young)
    weighted = np.zeros(trace.lengths.shape)
    weighted[learned] = np.bincount(rows, tokens * full, weighted[learned].size).reshape(-1, setting.samples)
    lengths, weighted = trace.lengths[middle].ravel(), weighted[middle].ravel()
    quartiles = np.array_split(np.argsort(lengths, kind="stable"), 4)
    length_ratio = float(trace.lengths[read].mean() / trace.lengths[started].mean())
    group_ages = (trace.trained - trace.drawn)[learned]
    return Prediction(
        step=step,
        trainer_waits=1 - rules.update / step,
        rollouts_wait=float(1 - area / (time * setting.slots)),
        mean_age=float(np.average(ages, weights=tokens)),
        max_age=int(ages.max()),
        max_full_age=int(ages[full].max()),
        group_age=float(group_ages.mean()),
        max_group_age=int(group_ages.max()),
        discarded=float(1 - learned.sum() / middle.sum()),
        older=float(tokens[~young].sum() / lengths.sum()),
        zero_weight=float(1 - weighted.sum() / lengths.sum()),
        full_weight=tuple(float(weighted[quartile].sum() / lengths[quartile].sum()) for quartile in quartiles),
        time_per_batch=float(step / length_ratio * tokens.sum() / tokens[full].sum()),
        length_ratio=length_ratio,
    )


def token_versions(
    trace: Trace, groups: Bool[np.ndarray, "G"]
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """(row, version, number of tokens) of all stretches of tokens of one row that one version drew.

    Rows are those of the chosen groups, numbered in order; the stretches of a row follow each other.
    """
    starts, lengths = trace.starts[groups].ravel(), trace.lengths[groups].ravel()
    oldest, newest = np.searchsorted(trace.swaps, [starts, starts + lengths - 1], side="right") - 1
    counts = newest - oldest + 1
    rows = np.repeat(np.arange(len(counts)), counts)
    versions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - oldest, counts)
    begins = np.append(trace.swaps, np.iinfo(np.int64).max)
    ends = np.minimum(begins[versions + 1], (starts + lengths)[rows])
    tokens = ends - np.maximum(begins[versions], starts[rows])
    drew = tokens > 0  # versions that newer ones overtook drew none
    return rows[drew], versions[drew], tokens[drew]
