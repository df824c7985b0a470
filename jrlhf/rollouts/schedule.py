"""The rules of an asynchronous run: pure functions of counts and virtual times, shared by the simulator and a run.

A group is the responses to one prompt. Version v of the weights is the one after v updates. Times are virtual: a decode
step of the rollout side takes 1, so nothing here depends on the speed of the hardware. With the wall clock a run's
times only give the order in which groups were completed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Int

OnNewWeights = Literal["finish", "keep_cache", "prefill_again"]
Clock = Literal["virtual", "wall"]
Time = TypeVar("Time", int, float)


@dataclass(frozen=True)
class Rules:
    """What the rules depend on.

    batch: groups that one update learns from. staleness: maximum age of a token, in versions; a fraction admits a part
    of a batch. update: duration of one update, in decode steps. on_new_weights: see `may_swap`. reward: time from the
    last token of a group to its score, in decode steps.
    """

    batch: int
    staleness: float
    update: float
    on_new_weights: OnNewWeights = "keep_cache"
    reward: float = 0.0


def may_start(rules: Rules, started: int, version: int) -> bool:
    """True if one more group may start, after `started` others, while the weights of `version` draw.

    The capacity rule of AReaL (Fu et al. 2025, arXiv:2505.24298, eq. 3): a group may start if the groups before it fill
    at most the batches up to version + staleness. It bounds the number of groups in the system and the mean age of
    groups, counted from their first token; no group is discarded. `fresh` bounds the age of single tokens.
    """
    return started < rules.batch * (version + rules.staleness + 1)


def first_batch(complete: Sequence[tuple[Time, int]], rules: Rules, trainer: float) -> tuple[Time, list[int]] | None:
    """Returns when enough groups are complete, and the sorted numbers of the next batch; None: too few are complete.

    complete: (time of completion, number) of the groups that wait. trainer: time from which the trainer is free. Of the
    groups that are complete when the update can begin, those that started first form the batch. So the update begins
    as early as with those that were completed first, but no group waits longer than later ones. (Where rows outlast an
    update, the order of completion delays every long row by the whole queue, however high the bound.)
    """
    if len(complete) < rules.batch:
        return None
    enough = sorted(time for time, _ in complete)[rules.batch - 1]
    begin = max(enough, trainer)
    return enough, sorted(number for time, number in complete if time <= begin)[: rules.batch]


def may_swap(rules: Rules, running: int) -> bool:
    """True if the rollout side may take new weights while this number of rows is running.

    `keep_cache` (PipelineRL, arXiv:2509.19128) and `prefill_again` (AReaL) take them in the middle of rows, which
    continue with the caches of older weights, or with recomputed caches. `finish` waits until no row is running; then
    groups are completed in the order of their versions, and no token is ever older than the bound.
    """
    return rules.on_new_weights != "finish" or running == 0


def fresh(
    versions: Int[np.ndarray, "*tokens"], version: int | Int[np.ndarray, "*tokens"], staleness: float
) -> Bool[np.ndarray, "*tokens"]:
    """The mask of tokens to learn from: their weights' `versions` are at most `staleness` older than `version`."""
    return version - versions <= staleness
