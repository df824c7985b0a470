"""The rules of an asynchronous run: pure functions of counts and of virtual times, shared by the simulator and a run.

A group is the responses to one prompt. Version v of the weights is the one after v updates. Times are virtual: a decode
step of the rollout side takes 1. So nothing here depends on how fast the hardware is. With the wall clock a run's times
are only the order in which groups were complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Int

OnNewWeights = Literal["finish", "keep_cache", "prefill_again"]
Clock = Literal["virtual", "wall"]
Time = TypeVar("Time", int, float)


@dataclass(frozen=True)
class Rules:
    """batch: groups that one update learns from. staleness: versions by which a token may be older than the weights
    that learn from it; a fraction admits a part of a batch. update: time of one update, in decode steps."""

    batch: int
    staleness: float
    update: float


@dataclass
class Groups(Generic[Time]):
    """The groups that have started and were not learned from.

    started: number of all groups so far; they are numbered in the order in which they start. unfinished: number of a
    group -> its rows that are not done. complete: (time of completion, number) of the others.
    """

    started: int = 0
    unfinished: dict[int, int] = field(default_factory=dict)
    complete: list[tuple[Time, int]] = field(default_factory=list)

    def start(self, rows: int) -> int:
        """Starts a group of this number of rows; returns its number."""
        self.unfinished[self.started] = rows
        self.started += 1
        return self.started - 1

    def end_row(self, number: int, time: Time) -> bool:
        """Notes that a row of a group is done. True if it was the last one: the group is complete at `time`."""
        self.unfinished[number] -= 1
        if self.unfinished[number]:
            return False
        del self.unfinished[number]
        self.complete.append((time, number))
        return True

    def remove(self, numbers: Sequence[int]) -> None:
        """Removes complete groups, which were learned from or dropped."""
        removed = set(numbers)
        self.complete = [item for item in self.complete if item[1] not in removed]


def may_start(rules: Rules, started: int, version: int) -> bool:
    """True if one more group may start, after `started` others, while `version` draws.

    The capacity rule of AReaL (Fu et al. 2025, arXiv:2505.24298, eq. 3): a group may start if the groups before it fill
    at most the batches up to version + staleness. It bounds the groups in the system, and the mean age of groups, from
    their first token on; no group is discarded. The age of single tokens is bounded by `fresh`.
    """
    return started < rules.batch * (version + rules.staleness + 1)


def first_batch(complete: Sequence[tuple[Time, int]], rules: Rules) -> tuple[Time, list[int]] | None:
    """The time at which the next batch is complete, and the numbers of its groups, rising. None: too few are complete.

    complete: (time of completion, number) of the groups that wait. Those that were completed first form the batch; of
    groups of one time, those with the lowest numbers.
    """
    if len(complete) < rules.batch:
        return None
    batch = sorted(complete)[: rules.batch]
    return batch[-1][0], sorted(number for _, number in batch)


def may_swap(on_new_weights: OnNewWeights, running: int) -> bool:
    """True if the rollout side may take new weights while this number of rows is running.

    `keep_cache` (PipelineRL, arXiv:2509.19128) and `prefill_again` (AReaL) take them in the middle of rows, which go on
    with the caches of older weights, or with caches that are computed again. `finish` waits until no row is running;
    then groups are complete in the order of their versions, and no token is ever older than the bound.
    """
    return on_new_weights != "finish" or running == 0


def fresh(
    versions: Int[np.ndarray, "*tokens"], version: int | Int[np.ndarray, "*tokens"], staleness: float
) -> Bool[np.ndarray, "*tokens"]:
    """The tokens that may be learned from: those that weights drew which are at most `staleness` versions older."""
    return version - versions <= staleness
