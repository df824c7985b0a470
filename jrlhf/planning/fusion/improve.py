"""Searches for a fused schedule: first for the shortest one, then for one of that length with the lowest peak memory.

A dispatcher makes a schedule from priorities. The next schedule is made in the other direction of time, with priorities
from the last one: operations that ended last start first (forward-backward improvement: Li and Willis, EJOR 56, 1992;
Valls, Ballestin and Quintanilla, EJOR 165, 2005). So operations on the longest path come first, and periodic patterns
of a schedule spread. Noise on the priorities helps to leave local optima.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from jrlhf.meshes.pipeline import Table, makespan, peak
from jrlhf.planning.fusion.dispatch import Dispatched, Dispatcher, Rules, Values
from jrlhf.planning.fusion.problem import Problem

# Maximum operations dispatched in the search for the makespan, and for each memory limit; a million takes two seconds.
_STEPS = 2_000_000
_LIMITS = 6  # number of memory limits that are tried
_STALL = 40  # number of schedules without a gain after which new priorities are drawn
_PATIENCE = (0.0, 0.5, 1.0)
_NOISE = (0.0, 0.3, 1.0, 2.0, 4.0)  # times the longest operation
_TOLERANCE = 1e-9  # relative tolerance of floating-point sums


@dataclass(frozen=True)
class Fused:
    """A schedule, its seconds, the peak of activations in flight on a device, and a lower bound of its seconds."""

    table: Table
    makespan: float
    memory: float
    bound: float


def search(
    problem: Problem, seed: int = 0, *, memory: bool = True, most: float = math.inf, effort: float = 1.0
) -> Fused:
    """Returns the best schedule that the search finds. The same seed and effort give the same schedule.

    memory: also lower the peak memory without a longer makespan. most: maximum activations in flight on a device, at
        least `problem.least_memory`. effort: scales the number of schedules that are tried.
    """
    dispatcher, generator = Dispatcher(problem), random.Random(seed)
    schedule = _shortest(dispatcher, generator, problem.bound, most, effort * _STEPS)
    best = _fused(dispatcher, schedule)
    if memory:
        low, limit = problem.least_memory, problem.least_memory  # the lowest possible limit first, then halves
        for _ in range(_LIMITS):
            if best.memory <= low * (1 + _TOLERANCE):
                break
            schedule = _shortest(dispatcher, generator, best.makespan, limit, effort * _STEPS)
            if schedule.makespan <= best.makespan * (1 + _TOLERANCE):
                best = _fused(dispatcher, schedule)
            else:
                low = limit
            limit = (low + best.memory) / 2
    return best


def _shortest(dispatcher: Dispatcher, generator: random.Random, goal: float, memory: float, steps: float) -> Dispatched:
    """Returns the shortest schedule within the memory; stops at the first one that reaches the goal."""
    best = None
    schedules = _schedules(dispatcher, generator, memory * (1 + _TOLERANCE))
    for schedule in islice(schedules, max(1, round(steps / dispatcher.operations))):
        if best is None or schedule.makespan < best.makespan:
            best = schedule
        if best.makespan <= goal * (1 + _TOLERANCE):
            break
    assert best is not None
    return best


def _schedules(dispatcher: Dispatcher, generator: random.Random, memory: float) -> Iterator[Dispatched]:
    """Yields schedules endlessly: each from the one before with noise, or from new priorities after a stall."""
    longest = max(max(model.forward, model.backward) for model in dispatcher.problem.models)
    while True:
        keys, rules = _drawn(dispatcher, generator, longest)
        yield (schedule := dispatcher.run(keys, memory, rules, backwards=False))
        shortest, stalled = schedule.makespan, 0
        while stalled < _STALL:
            keys = dispatcher.turned(schedule)
            if deviation := longest * generator.choice(_NOISE):
                keys = [[[key + generator.gauss(0, deviation) for key in kind] for kind in device] for device in keys]
            yield (schedule := dispatcher.run(keys, memory, rules, not schedule.backwards))
            stalled = 0 if schedule.makespan < shortest else stalled + 1
            shortest = min(shortest, schedule.makespan)


def _drawn(dispatcher: Dispatcher, generator: random.Random, longest: float) -> tuple[Values, Rules]:
    """Draws priorities: an order of the classes of each device, and a preference for earlier micro-batches."""
    first = [[20 * longest * generator.random() for _ in dispatcher.counts] for _ in range(dispatcher.problem.devices)]
    slope = generator.choice((0, 1)) * generator.uniform(0, 2 * longest)
    keys = dispatcher.values(lambda device, kind, number: first[device][kind] + slope * number)
    ranks = list(range(len(dispatcher.problem.pipelines)))
    generator.shuffle(ranks)
    return keys, Rules(generator.choice(_PATIENCE), ranks)


def _fused(dispatcher: Dispatcher, schedule: Dispatched) -> Fused:
    problem, table = dispatcher.problem, dispatcher.table(schedule)
    return Fused(table, makespan(table, problem.seconds), max(peak(table, problem.activations)), problem.bound)
