"""The search for fused pipeline schedules: the instances that RLHFuse's authors published, and generated ones.

    python -m benchmarks.fusion          # writes benchmarks/results/fusion.json; about four minutes on one core

Seconds are of the processor. The published makespans, peak memories and seconds of the authors' search (some 768
processes) are in the traces of github.com/FlexFusion/FlexFusion, commit 212c257.
"""

import random
import time
from collections.abc import Callable
from math import inf
from typing import Any

from benchmarks.records import RESULTS, provenance, write
from jrlhf.meshes.pipeline import Table, makespan, peak, violation
from jrlhf.planning.fusion.dispatch import TOLERANCE, Dispatcher, search, shortest
from jrlhf.planning.fusion.problem import FusedModel, Problem, fuse

GENERATED, SEED, NODES = 60, 0, 20_000
LIMITS = 6  # number of memory limits that are tried


def pair(depths, micro_batches, forwards, activations) -> Problem:
    """Returns an instance of the authors: a backward takes twice the time of a forward."""
    actor, critic = (
        FusedModel(depth, count, forward, 2 * forward, size)
        for depth, count, forward, size in zip(depths, micro_batches, forwards, activations, strict=True)
    )
    return fuse(actor, critic)


def _published(depths, forwards, activations, *rows):
    return [
        (
            pair(depths, micro_batches, forwards, activations),
            dict(zip(("makespan", "memory", "seconds"), row, strict=True)),
        )
        for micro_batches, *row in rows
    ]


# Micro-batches of a pipeline of each model; makespan and peak memory of the authors, seconds of their search.
PUBLISHED = [
    *_published(
        (8, 4), (5, 4), (1.95, 2), ((32, 16), 708, 19.70, 918), ((16, 8), 372, 15.75, 473), ((8, 4), 225, 15.60, 20)
    ),
    *_published(
        (8, 8), (5, 2), (1.95, 1), ((32, 32), 702, 20.50, 4979), ((16, 16), 366, 18.55, 1416), ((8, 8), 225, 15.60, 167)
    ),
    *_published(
        (16, 8),
        (2, 2),
        (1.64, 2),
        ((64, 32), 618, 39.72, 4042),
        ((32, 16), 330, 29.88, 1075),
        ((16, 8), 186, 26.24, 679),
    ),
    *_published(
        (16, 16),
        (2, 1),
        (1.64, 1),
        ((64, 64), 613, 38.72, 3976),
        ((32, 32), 318, 32.16, 1564),
        ((16, 16), 186, 26.24, 249),
    ),
]


def generated(seed: int, count: int) -> list[Problem]:
    """Returns random pairs: depths of 2 to 16, forwards whose seconds differ up to 8 times, 1 to 4 micro-batches for
    each stage, one or more critic pipelines for each actor pipeline."""
    generator, problems = random.Random(seed), []
    while len(problems) < count:
        copies, depth = generator.choice((1, 1, 2, 3, 4)), generator.randint(2, 16)
        if copies * depth > 16:
            continue
        ratio, unit = generator.uniform(1, 8), generator.randint(1, 4)
        forwards = [round(unit * ratio), unit]
        generator.shuffle(forwards)
        actor, critic = (
            FusedModel(depth, generator.randint(depth, 4 * depth), forward, 2 * forward)
            for depth, forward in zip((copies * depth, depth), forwards, strict=True)
        )
        problems.append(fuse(actor, critic))
    return problems


class Exhausted(Exception):
    """The tree of schedules has more nodes than allowed."""


def optimum(problem: Problem, below: float = inf, nodes: int = NODES) -> float:
    """Returns the least makespan of all schedules, or `below` if none is shorter; raises Exhausted after these nodes.

    Some active schedule is optimal, in which no operation can start earlier without another one starting later. All of
    them follow by Giffler and Thompson (Operations Research 8, 1960): of the operations that can be next, take the one
    that ends first; some operation of its device that can start before that is next on it. A branch ends where a
    device's or a micro-batch's remaining work cannot be done in time.
    """
    ways = []
    for pipeline in problem.pipelines:
        up = [(device, pipeline.forward) for device in pipeline.devices]
        down = [(device, pipeline.backward) for device in reversed(pipeline.devices)]
        ways += [up + down] * pipeline.micro_batches
    alike = [ways[index] is ways[index - 1] for index in range(len(ways))]
    alike[0] = False
    tails = [[sum(cost for _, cost in way[place:]) for place in range(len(way) + 1)] for way in ways]
    work = [sum(cost for way in ways for there, cost in way if there == device) for device in range(problem.devices)]
    places, ready, free = [0] * len(ways), [0.0] * len(ways), [0.0] * problem.devices
    visited = 0

    def descend(below: float) -> float:
        nonlocal visited
        visited += 1
        if visited > nodes:
            raise Exhausted
        options = []
        for micro_batch, way in enumerate(ways):
            place = places[micro_batch]
            if place < len(way) and not (alike[micro_batch] and places[micro_batch - 1] <= place):
                device, cost = way[place]
                start = max(ready[micro_batch], free[device])
                if start + tails[micro_batch][place] >= below:
                    return below
                options.append((start + cost, start, micro_batch, device, cost))
        if not options:
            return min(below, max(free))
        if any(free[device] + work[device] >= below for device in range(len(free)) if work[device]):
            return below
        end, _, _, device, _ = min(options)
        for after, start, micro_batch, there, cost in sorted(options, key=lambda option: option[1]):
            if there == device and start < end:
                state = ready[micro_batch], free[device]
                places[micro_batch] += 1
                ready[micro_batch] = free[device] = after
                work[device] -= cost
                below = descend(below)
                places[micro_batch] -= 1
                ready[micro_batch], free[device] = state
                work[device] += cost
        return below

    return descend(below)


def lean(problem: Problem, seed: int = 0, *, effort: float = 1.0) -> Table:
    """Returns a table as short as that of `search`, with the lowest peak memory that further searches find."""
    dispatcher, generator = Dispatcher(problem), random.Random(seed)
    best = dispatcher.table(shortest(dispatcher, generator, problem.bound, inf, effort))
    low = limit = problem.least_memory  # the lowest possible limit first, then halves
    for _ in range(LIMITS):
        if max(peak(best, problem.activations)) <= low * (1 + TOLERANCE):
            break
        length = makespan(best, problem.seconds)
        schedule = shortest(dispatcher, generator, length, limit, effort)
        if schedule.makespan <= length * (1 + TOLERANCE):
            best = dispatcher.table(schedule)
        else:
            low = limit
        limit = (low + max(peak(best, problem.activations))) / 2
    return best


def proved(problem: Problem, reached: float) -> float | None:
    """Returns the optimum where it is known: the search reached the bound, or all schedules could be tried."""
    if reached <= problem.bound:
        return problem.bound
    try:
        return optimum(problem, reached)
    except (Exhausted, RecursionError):
        return None


def _row(problem: Problem, find: Callable[[Problem, int], Table]) -> dict[str, Any]:
    start = time.process_time()
    table = find(problem, SEED)
    taken = time.process_time() - start
    length, memory = makespan(table, problem.seconds), max(peak(table, problem.activations))
    assert violation(table, memory, problem.activations) is None
    ends = problem.pipelines[0], problem.pipelines[-1]  # the actor's and the critic's
    return {
        "depths": [len(one.devices) for one in ends],
        "pipelines": [problem.devices // len(one.devices) for one in ends],
        "micro_batches": [one.micro_batches for one in ends],
        "forward": [one.forward for one in ends],
        "activations": [problem.activations[0], problem.activations[-1]],
        "makespan": length,
        "bound": problem.bound,
        "memory": round(memory, 3),
        "least_memory": round(problem.least_memory, 3),
        "seconds": round(taken, 2),
        "optimum": proved(problem, length),
    }


def main() -> None:
    rows, random_rows = [], []
    for problem, theirs in PUBLISHED:
        rows.append(_row(problem, lean) | {"published": theirs})
        print(rows[-1], flush=True)
    for problem in generated(SEED, GENERATED):
        random_rows.append(_row(problem, search))
        print(random_rows[-1], flush=True)
    close = [row for row in random_rows if row["makespan"] <= (row["optimum"] or 1.03 * row["bound"])]
    write(
        RESULTS / "fusion.json",
        provenance()
        | {
            "seed": SEED,
            "published": rows,
            "generated": random_rows,
            "summary": {
                "published_at_bound": sum(row["makespan"] == row["bound"] for row in rows),
                "published_memory_at_most_theirs": sum(row["memory"] <= row["published"]["memory"] for row in rows),
                "generated": len(random_rows),
                "generated_proved_optimal": sum(row["optimum"] == row["makespan"] for row in random_rows),
                "generated_optimal_or_within_3_percent": len(close),
                "generated_others": [row for row in random_rows if row not in close],
                "longest_seconds": max(row["seconds"] for row in rows + random_rows),
            },
        },
    )


if __name__ == "__main__":
    main()
