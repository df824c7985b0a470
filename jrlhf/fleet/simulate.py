"""Simulates an asynchronous run: decode slots, groups, the queue of complete groups and the trainer, in virtual time.

It is an event simulation that calls the same rules as a run (`jrlhf.fleet.schedule`). Rows are modelled by their
lengths only. All times are in decode steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jrlhf.fleet.schedule import Groups, OnNewWeights, Rules, first_batch, may_start, may_swap

Lengths = Callable[[np.random.Generator, tuple[int, int]], Int[np.ndarray, "G S"]]
WAITING, DROPPED = -1, -2  # in `Trace.trained`: groups that no update has used


def lognormal(mean: float, sigma: float, longest: int | None = None) -> Lengths:
    """Returns a sampler of independent lengths: lognormal with this mean, rounded up, at most `longest`.

    sigma: standard deviation of the logarithm. Cutting at `longest` lowers the mean.
    """

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Int[np.ndarray, "G S"]:
        lengths = np.ceil(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, shape)).astype(np.int64)
        return lengths if longest is None else np.minimum(lengths, longest)

    return draw


def measured(lengths: Sequence[int]) -> Lengths:
    """Returns a sampler that draws from measured lengths, with replacement."""
    values = np.asarray(lengths, np.int64)
    return lambda rng, shape: rng.choice(values, shape)


@dataclass(frozen=True)
class Setting:
    """The parts of an asynchronous run that its schedule depends on. Times are in decode steps.

    slots: rows that decode at a time. samples: rows of a group. lengths: sampler of row lengths, in tokens.
    on_new_weights: see `schedule.may_swap`.
    chunk: decode steps between two checks for finished rows and new weights; fewer if all rows have ended.
    together: all samples of a prompt enter the slots together, as in the engine; otherwise a row takes any free slot.
    reward: time from the last token of a group to its score. transfer: time that decoding stops for new weights.
    prefill: time to recompute the cache of one token, for `prefill_again`. prompt: tokens of a prompt.
    empty: time of a decode step with almost no rows. The time is linear in the number of rows, and 1 with full slots.
    publish: number of updates from one publication of weights to the next.
    rule: `token_bound` is the rule of a run: admission by capacity, and a bound per token. The others are for
        comparison. `capacity` is admission alone (AReaL). With `in_order`, a batch is the groups that started first,
        and the trainer waits for them. With `drop_oldest`, groups always start; if more than `queue` batches of
        complete groups wait, the oldest groups are dropped. With `discard_stale`, groups always start; those whose
        first token is more than `staleness` versions older than the weights to be updated are dropped.
    """

    rules: Rules
    slots: int
    samples: int
    lengths: Lengths
    on_new_weights: OnNewWeights = "keep_cache"
    chunk: int = 1
    together: bool = True
    reward: float = 0.0
    transfer: float = 0.0
    prefill: float = 0.0
    prompt: int = 0
    empty: float = 1.0
    publish: int = 1
    rule: Literal["token_bound", "capacity", "in_order", "drop_oldest", "discard_stale"] = "token_bound"
    queue: int = 1

    def __post_init__(self) -> None:
        staleness, publish = self.rules.staleness, self.publish
        if self.slots < self.samples:
            raise ValueError(f"slots={self.slots} cannot hold the samples={self.samples} of a prompt")
        if staleness < publish - 1:
            raise ValueError(f"staleness={staleness}: no rows for the update before the first publish={publish}")


@dataclass(frozen=True)
class Trace:
    """A simulated run: G groups in the order in which they started, of S rows each, and V updates.

    drawn: version that drew the first token of a group. trained: version that learned from it, `WAITING` or `DROPPED`.
    starts: number of decode steps before a row's first one. lengths: lengths of rows, in tokens. swaps: number of
    decode steps before a version, or a later one, drew. begins: time at which the update of a version began. busy:
    integral of the number of running rows over the time until then. working: time until then in which rows were
    running, or decoding stopped for new weights.
    """

    setting: Setting
    drawn: Int[np.ndarray, "G"]
    trained: Int[np.ndarray, "G"]
    starts: Int[np.ndarray, "G S"]
    lengths: Int[np.ndarray, "G S"]
    swaps: Int[np.ndarray, "V"]
    begins: Float[np.ndarray, "V"]
    busy: Float[np.ndarray, "V"]
    working: Float[np.ndarray, "V"]


def simulate(setting: Setting, versions: int, seed: int = 0) -> Trace:
    """Simulates a run of `versions` updates. The lengths of the n-th group depend only on the seed."""
    pipeline = _Pipeline(setting, np.random.default_rng(seed))
    while len(pipeline.begins) < versions:
        pipeline.take_weights()
        pipeline.start_rows()
        pipeline.advance()
    groups = len(pipeline.drawn) - bool(pipeline.pending)
    swaps = pipeline.swaps + [pipeline.step] * (versions - len(pipeline.swaps))  # versions that drew nothing
    return Trace(
        setting,
        np.array(pipeline.drawn[:groups]),
        np.array(pipeline.trained[:groups]),
        np.array(pipeline.starts[:groups]),
        np.array(pipeline.lengths[:groups]),
        np.array(swaps),
        np.array(pipeline.begins),
        np.array(pipeline.busy),
        np.array(pipeline.begins) - np.array(pipeline.idle),
    )


class _Pipeline:
    """The state of a simulated run at one time."""

    def __init__(self, setting: Setting, rng: np.random.Generator):
        self.setting, self.rng = setting, rng
        self.now, self.step = 0.0, 0  # virtual time, and decode steps so far
        self.version, self.swaps = 0, [0]  # the version that draws now; see `Trace.swaps`
        self.trainer_free, self.ready = 0.0, 0.0  # the times of the trainer's next events
        self.begins: list[float] = []
        self.busy, self.area = [], 0.0
        self.idle, self.waited = [], 0.0  # time without running rows: until each update, and so far
        # Rows in slots advance in lockstep, so their last steps order them: (last step, group, first step).
        self.running: list[tuple[int, int, int]] = []
        self.last = 0  # the largest of the last steps
        self.pending: list[int] = []  # lengths of the newest group's rows that have no slot yet
        self.groups: Groups[float] = Groups()
        self.lengths: list[list[int]] = []
        self.drawn: list[int] = []
        self.trained: list[int] = []
        self.starts: list[list[int]] = []

    @property
    def newest(self) -> int:
        """The newest version that has been published."""
        updates = len(self.begins) - (self.trainer_free > self.now)
        return updates - updates % self.setting.publish

    def take_weights(self) -> None:
        setting, newest = self.setting, self.newest
        if newest == self.version or not may_swap(setting.on_new_weights, len(self.running)):
            return
        self.swaps += [self.step] * (newest - self.version)
        self.version = newest
        self.now += setting.transfer
        if setting.on_new_weights == "prefill_again":
            drawn = sum(self.step - first for _, _, first in self.running)
            self.now += setting.prefill * (drawn + setting.prompt * len(self.running))

    def start_rows(self) -> None:
        setting = self.setting
        room = setting.samples if setting.together else 1
        while setting.slots - len(self.running) >= room:
            if not self.pending and not self.start_group():
                return
            group, length = self.groups.started - 1, self.pending.pop()
            self.starts[group].append(self.step)
            heappush(self.running, (self.step + length, group, self.step))
            self.last = max(self.last, self.step + length)
            room = 1 if self.pending or not setting.together else setting.samples

    def start_group(self) -> bool:
        setting, group = self.setting, self.groups.started
        bounded = setting.rule in ("token_bound", "capacity", "in_order")
        if bounded and not may_start(setting.rules, group, self.version):
            return False
        if group == len(self.lengths):
            self.lengths += setting.lengths(self.rng, (1024, setting.samples)).tolist()
        self.groups.start(setting.samples)
        self.pending = self.lengths[group][::-1]
        self.drawn.append(self.version)
        self.trained.append(WAITING)
        self.starts.append([])
        return True

    def advance(self) -> None:
        """Advances to the next event: a row or an update ends, or a batch has all its scores."""
        setting, active = self.setting, len(self.running)
        times = [time for time in (self.trainer_free, self.ready) if time > self.now]
        if active:
            pace = setting.empty + (1 - setting.empty) * active / setting.slots
            steps = self.running[0][0] - self.step
            if times:
                steps = min(steps, math.ceil((min(times) - self.now) / pace))
            steps = min(-(-steps // setting.chunk) * setting.chunk, self.last - self.step)
            self.step += steps
            self.now += steps * pace
            self.area += active * steps * pace
        else:
            self.waited += min(times) - self.now
            self.now = min(times)
        self.train()  # on groups that were complete before the rows that end now
        self.end_rows()
        self.train()

    def end_rows(self) -> None:
        setting = self.setting
        while self.running and self.running[0][0] <= self.step:
            _, group, _ = heappop(self.running)
            self.groups.end_row(group, self.now + setting.reward)
        if setting.rule == "drop_oldest":
            self.drop(sorted(self.groups.complete)[: -setting.queue * setting.rules.batch])

    def train(self) -> None:
        """Starts all updates that can start by now."""
        self.ready = 0.0
        while self.trainer_free <= self.now and (batch := self.batch()) is not None:
            time, groups = batch
            if time > self.now:
                self.ready = time
                return
            for group in groups:
                self.trained[group] = len(self.begins)
            self.groups.remove(groups)
            self.begins.append(max(self.trainer_free, time))
            self.busy.append(self.area)
            self.idle.append(self.waited)
            self.trainer_free = self.begins[-1] + self.setting.rules.update

    def batch(self) -> tuple[float, list[int]] | None:
        rules, version, complete = self.setting.rules, len(self.begins), self.groups.complete
        if self.setting.rule == "in_order":
            complete = [item for item in complete if item[1] < rules.batch * (version + 1)]
        elif self.setting.rule == "discard_stale":
            self.drop([item for item in complete if version - self.drawn[item[1]] > rules.staleness])
            complete = self.groups.complete
        return first_batch(complete, rules)

    def drop(self, items: Sequence[tuple[float, int]]) -> None:
        for item in items:
            self.trained[item[1]] = DROPPED
        self.groups.remove([number for _, number in items])
