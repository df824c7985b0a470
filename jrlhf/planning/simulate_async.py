"""Simulates an asynchronous run: decode slots, groups, the queue of complete groups and the trainer, in virtual time.

It is an event simulation that calls the same rules as a run (`jrlhf.rollouts.schedule`). Rows are modelled by their
lengths only. All times are in decode steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from jaxtyping import Float, Int

from jrlhf.rollouts.schedule import Rules, first_batch, may_start, may_swap

Lengths = Callable[[np.random.Generator, tuple[int, int]], Int[np.ndarray, "G S"]]
WAITING = -1  # in `Trace.trained`: groups that no update has used


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
class Scenario:
    """The parts of an asynchronous run that its schedule depends on. Times are in decode steps.

    slots: rows that decode at a time. samples: rows of a group. lengths: sampler of row lengths, in tokens.
    chunk: decode steps between two checks for finished rows and new weights; fewer if all rows have ended.
    transfer: time that decoding stops for new weights. prefill: time to recompute the cache of one token, for
    `prefill_again`. prompt: tokens of a prompt.
    empty: time of a decode step with almost no rows. The time is linear in the number of rows, and 1 with full slots.
    """

    rules: Rules
    slots: int
    samples: int
    lengths: Lengths
    chunk: int = 1
    transfer: float = 0.0
    prefill: float = 0.0
    prompt: int = 0
    empty: float = 1.0

    def __post_init__(self) -> None:
        if self.slots < self.samples:
            raise ValueError(f"slots={self.slots} cannot hold the samples={self.samples} of a prompt")


@dataclass(frozen=True)
class Trace:
    """A simulated run: G groups in the order in which they started, of S rows each, and V updates.

    drawn: version that drew the first token of a group. trained: version that learned from it, or `WAITING`.
    starts: number of decode steps before a row's first one. lengths: lengths of rows, in tokens. swaps: number of
    decode steps before a version, or a later one, drew. begins: time at which the update of a version began. busy:
    integral of the number of running rows over the time until then. working: time until then in which rows were
    running, or decoding stopped for new weights.
    """

    scenario: Scenario
    drawn: Int[np.ndarray, "G"]
    trained: Int[np.ndarray, "G"]
    starts: Int[np.ndarray, "G S"]
    lengths: Int[np.ndarray, "G S"]
    swaps: Int[np.ndarray, "V"]
    begins: Float[np.ndarray, "V"]
    busy: Float[np.ndarray, "V"]
    working: Float[np.ndarray, "V"]


def simulate(scenario: Scenario, versions: int, seed: int = 0) -> Trace:
    """Simulates a run of `versions` updates. The lengths of the n-th group depend only on the seed."""
    return AsyncSimulation(scenario, seed).run(versions)


class AsyncSimulation:
    """The state of a simulated run at one time."""

    def __init__(self, scenario: Scenario, seed: int):
        self.scenario, self.rng = scenario, np.random.default_rng(seed)
        self.now, self.step = 0.0, 0  # virtual time, and decode steps so far
        self.version, self.swaps = 0, [0]  # the version that draws now; see `Trace.swaps`
        self.trainer_free, self.ready = 0.0, 0.0  # the times of the trainer's next events
        self.begins: list[float] = []
        self.busy, self.area = [], 0.0
        self.idle, self.waited = [], 0.0  # time without running rows: until each update, and so far
        # Rows in slots advance in lockstep, so their last steps order them: (last step, group, first step).
        self.running: list[tuple[int, int, int]] = []
        self.last = 0  # the largest of the last steps
        self.unfinished: list[int] = []  # number of rows of each group that are not done
        self.complete: list[tuple[float, int]] = []  # (time of completion, number) of groups that wait for an update
        self.lengths: list[list[int]] = []  # of all groups so far, and of some that follow
        self.drawn: list[int] = []
        self.trained: list[int] = []
        self.starts: list[list[int]] = []

    def run(self, versions: int) -> Trace:
        """Simulates until `versions` updates have begun."""
        while len(self.begins) < versions:
            self.take_weights()
            self.start_rows()
            self.advance()
        return self.trace()

    def trace(self) -> Trace:
        """Returns the run so far."""
        swaps = self.swaps + [self.step] * (len(self.begins) - len(self.swaps))  # versions that drew nothing
        begins, lengths = np.array(self.begins), np.array(self.lengths[: len(self.drawn)])
        groups = np.array(self.drawn), np.array(self.trained), np.array(self.starts), lengths
        return Trace(self.scenario, *groups, np.array(swaps), begins, np.array(self.busy), begins - np.array(self.idle))

    @property
    def newest(self) -> int:
        """The newest version that has been published."""
        return len(self.begins) - (self.trainer_free > self.now)

    @property
    def room(self) -> int:
        """The number of free slots."""
        return self.scenario.slots - len(self.running)

    def may_start(self) -> bool:
        """True if the rules let one more group start."""
        return may_start(self.scenario.rules, len(self.drawn), self.version)

    def take_weights(self) -> None:
        scenario, newest = self.scenario, self.newest
        if newest == self.version or not may_swap(scenario.rules, len(self.running)):
            return
        self.swaps += [self.step] * (newest - self.version)
        self.version = newest
        self.now += scenario.transfer
        if scenario.rules.on_new_weights == "prefill_again":
            drawn = sum(self.step - first for _, _, first in self.running)
            self.now += scenario.prefill * (drawn + scenario.prompt * len(self.running))

    def start_rows(self) -> None:
        """Starts groups as long as there are slots for all their rows, as in a run."""
        while self.room >= self.scenario.samples and self.may_start():
            group = self.start_group()
            for length in self.lengths[group]:
                self.start_row(group, length)

    def start_group(self) -> int:
        group = len(self.drawn)
        if group == len(self.lengths):
            self.lengths += self.scenario.lengths(self.rng, (1024, self.scenario.samples)).tolist()
        self.unfinished.append(self.scenario.samples)
        self.drawn.append(self.version)
        self.trained.append(WAITING)
        self.starts.append([])
        return group

    def start_row(self, group: int, length: int) -> None:
        self.starts[group].append(self.step)
        heappush(self.running, (self.step + length, group, self.step))
        self.last = max(self.last, self.step + length)

    def advance(self) -> None:
        """Advances to the next event: a row or an update ends, or a batch has all its scores."""
        scenario, active = self.scenario, len(self.running)
        times = [time for time in (self.trainer_free, self.ready) if time > self.now]
        if active:
            pace = scenario.empty + (1 - scenario.empty) * active / scenario.slots
            steps = self.running[0][0] - self.step
            if times:
                steps = min(steps, math.ceil((min(times) - self.now) / pace))
            steps = min(-(-steps // scenario.chunk) * scenario.chunk, self.last - self.step)
            self.step += steps
            self.now += steps * pace
            self.area += active * steps * pace
        else:
            self.waited += min(times) - self.now
            self.now = min(times)
        self.end_rows()
        self.train()

    def end_rows(self) -> None:
        while self.running and self.running[0][0] <= self.step:
            _, group, _ = heappop(self.running)
            self.unfinished[group] -= 1
            if not self.unfinished[group]:
                self.complete.append((self.now + self.scenario.rules.reward, group))

    def train(self) -> None:
        """Starts all updates that can start by now."""
        self.ready = 0.0
        while self.trainer_free <= self.now and (batch := self.batch()) is not None:
            time, groups = batch
            if time > self.now:
                self.ready = time
                return
            self.remove(groups, len(self.begins))
            self.begins.append(max(self.trainer_free, time))
            self.busy.append(self.area)
            self.idle.append(self.waited)
            self.trainer_free = self.begins[-1] + self.scenario.rules.update

    def batch(self) -> tuple[float, list[int]] | None:
        """Returns the time at which the next batch is complete, and its groups; None: too few are complete."""
        return first_batch(self.complete, self.scenario.rules, self.trainer_free)

    def remove(self, groups: Sequence[int], trained: int) -> None:
        """Removes complete groups, and records the version that learned from them; see `Trace.trained`."""
        for group in groups:
            self.trained[group] = trained
        removed = set(groups)
        self.complete = [item for item in self.complete if item[1] not in removed]
