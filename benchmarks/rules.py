"""Simulates asynchronous training by rules of other systems, and measures what each rule costs.

A run uses the rules of `jrlhf.rollouts.schedule` only; these are for comparison.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jrlhf.planning import simulate_async as run
from jrlhf.planning.predict_async import pace, token_versions
from jrlhf.planning.simulate_async import WAITING, Trace
from jrlhf.rollouts.schedule import first_batch, fresh, may_start

Rule = Literal["token_bound", "completed_first", "capacity", "in_order", "drop_oldest", "discard_stale"]
DROPPED = -2  # in `Trace.trained`: groups that were dropped


@dataclass(frozen=True)
class Scenario(run.Scenario):
    """A scenario with another rule.

    together: all samples of a prompt enter the slots together, as in a run; otherwise a row takes any free slot.
    publish: number of updates from one publication of weights to the next.
    rule: `token_bound` is the rule of a run: admission by capacity, groups in the order in which they started, and a
        bound per token. `completed_first` has the groups that were completed first instead. `capacity` is that without
        the bound per token (AReaL). With `in_order`, a batch is the groups that started first, and the trainer waits
        for them. With `drop_oldest`, groups always start; if more than `queue` batches of complete groups wait, the
        oldest groups are dropped. With `discard_stale`, groups always start; those whose first token is more than
        `staleness` versions older than the weights to be updated are dropped.
    """

    together: bool = True
    publish: int = 1
    rule: Literal["token_bound", "completed_first", "capacity", "in_order", "drop_oldest", "discard_stale"] = (
        "token_bound"
    )
    queue: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        staleness, publish = self.rules.staleness, self.publish
        if staleness < publish - 1:
            raise ValueError(f"staleness={staleness}: no rows for the update before the first publish={publish}")


def simulate(scenario: Scenario, versions: int, seed: int = 0) -> Trace:
    """Simulates a run of `versions` updates, as `jrlhf.planning.simulate_async.simulate` does."""
    return _Pipeline(scenario, seed).run(versions)


class _Pipeline(run.AsyncSimulation):
    scenario: Scenario

    def __init__(self, scenario: Scenario, seed: int):
        super().__init__(scenario, seed)
        self.pending: list[int] = []  # lengths of the newest group's rows that have no slot yet

    def trace(self) -> Trace:
        if self.pending:
            for groups in (self.drawn, self.trained, self.starts):
                groups.pop()
        return super().trace()

    @property
    def newest(self) -> int:
        return super().newest // self.scenario.publish * self.scenario.publish

    def may_start(self) -> bool:
        scenario = self.scenario
        bounded = scenario.rule in ("token_bound", "completed_first", "capacity", "in_order")
        return not bounded or may_start(scenario.rules, len(self.drawn), self.version)

    def start_rows(self) -> None:
        if self.scenario.together:
            super().start_rows()
            return
        while self.room and (self.pending or self.may_start()):
            if not self.pending:
                self.pending = self.lengths[self.start_group()][::-1]
            self.start_row(len(self.drawn) - 1, self.pending.pop())

    def end_rows(self) -> None:
        if self.scenario.rule != "token_bound":
            self.train()  # on groups that were complete before the rows that end now
        super().end_rows()
        if self.scenario.rule == "drop_oldest":
            self.drop(sorted(self.complete)[: -self.scenario.queue * self.scenario.rules.batch])

    def batch(self) -> tuple[float, list[int]] | None:
        rules, version, complete = self.scenario.rules, len(self.begins), self.complete
        if self.scenario.rule == "in_order":
            complete = [item for item in complete if item[1] < rules.batch * (version + 1)]
        elif self.scenario.rule == "discard_stale":
            self.drop([item for item in complete if version - self.drawn[item[1]] > rules.staleness])
            complete = self.complete
        if self.scenario.rule == "token_bound":
            return first_batch(complete, rules, self.trainer_free)
        if len(complete) < rules.batch:
            return None
        batch = sorted(complete)[: rules.batch]  # those that were completed first
        return batch[-1][0], sorted(number for _, number in batch)

    def drop(self, items: list[tuple[float, int]]) -> None:
        self.remove([number for _, number in items], DROPPED)


@dataclass(frozen=True)
class Cost:
    """The costs of a scenario. Times are in decode steps, ages in versions, shares between 0 and 1.

    step: time from one update to the next. trainer_waits: share of the time in which the trainer does not update.
    rollouts_wait: share of the slots' time in which they hold no row, or decoding stops for new weights.
    mean_age, max_age: ages of all tokens that updates read. max_full_age: maximum age of tokens with full weight.
    group_age, max_group_age: mean and maximum age of groups, counted from the version that drew their first token.
    discarded: share of rows that were dropped.
    older: share of sampled tokens that an update read and that were older than the bound.
    zero_weight: share of sampled tokens with weight 0: those of dropped rows, and older ones if the rule masks them.
    full_weight: tokens with full weight over sampled tokens, by quartile of row length, shortest rows first.
    time_per_batch: time to learn with full weight from as many tokens as a batch of sampled rows has.
    length_ratio: mean length of rows that updates read, over the mean length of rows that started in the same time.
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


def cost(scenario: Scenario, versions: int, seed: int = 0) -> Cost:
    """Simulates `versions` updates and returns the mean costs of one; see `jrlhf.planning.predict_async.summarise`."""
    trace = simulate(scenario, versions, seed)
    own, first = pace(trace), versions // 5
    middle = (trace.drawn >= first) & (trace.drawn < versions - first) & (trace.trained != WAITING)
    learned = middle & (trace.trained != DROPPED)

    rows, drawn, tokens = token_versions(trace, learned)
    trained = np.repeat(trace.trained[learned], scenario.samples)[rows]
    ages, young = trained - drawn, fresh(drawn, trained, scenario.rules.staleness)
    full = young if scenario.rule in ("token_bound", "completed_first") else np.ones_like(young)
    weighted = np.zeros(trace.lengths.shape)
    weighted[learned] = np.bincount(rows, tokens * full, weighted[learned].size).reshape(-1, scenario.samples)
    lengths, weighted = trace.lengths[middle].ravel(), weighted[middle].ravel()
    quartiles = np.array_split(np.argsort(lengths, kind="stable"), 4)
    group_ages = (trace.trained - trace.drawn)[learned]
    return Cost(
        **own._asdict(),
        mean_age=float(np.average(ages, weights=tokens)),
        max_age=int(ages.max()),
        max_full_age=int(ages[full].max()),
        group_age=float(group_ages.mean()),
        max_group_age=int(group_ages.max()),
        discarded=float(1 - learned.sum() / middle.sum()),
        older=float(tokens[~young].sum() / lengths.sum()),
        zero_weight=float(1 - weighted.sum() / lengths.sum()),
        full_weight=tuple(float(weighted[quartile].sum() / lengths[quartile].sum()) for quartile in quartiles),
        time_per_batch=float(own.step / own.length_ratio * tokens.sum() / tokens[full].sum()),
    )
