"""The rules of an asynchronous run, as pure functions of counts and of virtual times; the simulator shares them.

A group is the responses to one prompt. Version v of the weights is the one after v updates. Times are virtual: a decode
step of the rollout side takes 1. So nothing here depends on how fast the hardware is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True)
class Rules:
    """batch: groups that one update learns from. staleness: versions by which a token may be older than the weights
    that learn from it. update: time of one update, in decode steps."""

    batch: int
    staleness: int
    update: int


def may_start(rules: Rules, started: int, version: int) -> bool:
    """True if one more group may start, after `started` others, while `version` draws.

    The capacity rule of AReaL (Fu et al. 2025, arXiv:2505.24298, eq. 3): a group may start if the groups before it fill
    at most the batches up to version + staleness. It bounds the mean age of tokens, and the groups in the system; no
    group is discarded. The age of single tokens is bounded by `fresh`.
    """
    return started < rules.batch * (version + rules.staleness + 1)


def first_batch(complete: Sequence[tuple[int, int]], rules: Rules) -> tuple[int, list[int]] | None:
    """The time at which the next batch is complete, and the numbers of its groups, rising. None: too few are complete.

    complete: (time of completion, number) of the groups that wait. Those that were completed first form the batch; of
    groups of one time, those with the lowest numbers.
    """
    if len(complete) < rules.batch:
        return None
    batch = sorted(complete)[: rules.batch]
    return batch[-1][0], sorted(number for _, number in batch)


def fresh(versions: Int[np.ndarray, "B T"], version: int, staleness: int) -> Bool[np.ndarray, "B T"]:
    """The tokens that may be learned from: those that weights drew which are at most `staleness` versions older."""
    return version - versions <= staleness
