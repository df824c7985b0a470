"""The makespan of fused schedules, measured with a process for each group of devices and calibrated sleeps.

    python -m benchmarks.makespan          # writes benchmarks/results/makespan.json; five minutes

Two cores have no parallel speed to show, so the operations of a table are sleeps of given seconds. Each process
computes its operations in the order of the table, each as soon as the processes that compute what it needs have sent it
word, as devices do that wait for each other's arrays. The figures say whether a table takes the time that is predicted
of it, and not how fast a model is. `serial` is 1F1B of one model after the other. `bubbles` are 1F1B and ZB-H1 of one
model whose forwards, gradients of inputs and gradients of weights take equally long.
"""

import time
from collections.abc import Sequence
from multiprocessing import get_context
from statistics import median
from typing import Any

from benchmarks.records import output_path, provenance, write
from jrlhf.meshes.pipeline import (
    Seconds,
    Step,
    Table,
    bubble,
    makespan,
    needs_of,
    one_forward_one_backward,
    zero_bubble,
)
from jrlhf.planning.fusion import Model, Problem, fuse, search

UNIT = 0.04  # seconds of the models' unit; a busy machine wakes a sleeper some milliseconds late
REPEATS = 3
# Two instances of RLHFuse's authors, and two whose backward operations compute the forward pass again, as here.
PAIRS = {
    "8 and 4 stages": fuse(Model(8, 8, 5, 10), Model(4, 4, 4, 8)),
    "8 and 8 stages": fuse(Model(8, 8, 5, 10), Model(8, 8, 2, 4)),
    "4 and 2 stages, recomputed forwards": fuse(Model(4, 8, 4, 12), Model(2, 4, 3, 9)),
    "4 and 4 stages, recomputed forwards": fuse(Model(4, 4, 4, 12), Model(4, 4, 4, 12)),
}
SIZES = (4, 8), (4, 4), (8, 8)  # stages and micro-batches of one model


def compute(order: Sequence[tuple], inbox: Any, others: Any, barrier: Any, result: Any) -> None:
    """One process. order: (step, seconds, needed steps, numbers of the processes that wait for it)."""
    ready = set()
    barrier.wait()
    for step, seconds, needed, readers in order:
        while not needed <= ready:
            ready.add(inbox.get())
        time.sleep(seconds)
        ready.add(step)
        for reader in readers:
            others[reader].put(step)
    result.put(time.monotonic())


def measured(table: Table, seconds: Seconds) -> float:
    """The seconds from the common start of all processes to the end of the last."""
    place = {step: device for device, order in enumerate(table.orders) for step in order}
    needs = {step: set(needs_of(table.pipelines, step)) for step in place}
    readers: dict[Step, set[int]] = {step: set() for step in place}
    for step, needed in needs.items():
        for need in needed:
            readers[need] |= {place[step]} - {place[need]}
    context = get_context("fork")  # nothing here has started a backend of JAX
    inboxes, result = [context.SimpleQueue() for _ in table.orders], context.SimpleQueue()
    barrier = context.Barrier(table.devices + 1)
    processes = []
    for order, inbox in zip(table.orders, inboxes, strict=True):
        given = [
            (tuple(step), UNIT * seconds(step), {tuple(need) for need in needs[step]}, tuple(readers[step]))
            for step in order
        ]
        processes.append(context.Process(target=compute, args=(given, inbox, inboxes, barrier, result)))
        processes[-1].start()
    barrier.wait()
    begun = time.monotonic()
    ends = [result.get() for _ in processes]
    for process in processes:
        process.join()
    return max(ends) - begun


def row(name: str, problem: Problem) -> dict[str, Any]:
    """Predicted and measured seconds of the fused table, and of 1F1B of one model after the other."""
    fused = search(problem, memory=False).table
    models = list(dict.fromkeys(problem.models))
    models = models if len(models) == 2 else [problem.models[0]] * 2
    alone = [(one_forward_one_backward(model.depth, model.micro_batches), model) for model in models]

    def of(model: Model) -> Seconds:
        return lambda step: model.forward if step.kind == "forward" else model.backward

    both = [median(measured(fused, problem.seconds) for _ in range(REPEATS))]
    both.append(sum(median(measured(table, of(model)) for _ in range(REPEATS)) for table, model in alone))
    predicted = [UNIT * makespan(fused, problem.seconds)]
    predicted.append(UNIT * sum(makespan(table, of(model)) for table, model in alone))
    ratios = [seconds / expected for seconds, expected in zip(both, predicted, strict=True)]
    return {
        "pair": name,
        "fused": {"predicted": predicted[0], "measured": both[0], "ratio": ratios[0]},
        "serial": {"predicted": predicted[1], "measured": both[1], "ratio": ratios[1]},
        "gain": {"predicted": predicted[1] / predicted[0], "measured": both[1] / both[0]},
    }


def of_one_model(stages: int, micro_batches: int) -> dict[str, Any]:
    """Predicted and measured seconds of 1F1B and of ZB-H1, which divides backwards in two."""
    result: dict[str, Any] = {"stages": stages, "micro_batches": micro_batches}
    for name, schedule, backward in (("1f1b", one_forward_one_backward, 4), ("zb-h1", zero_bubble, 2)):
        table = schedule(stages, micro_batches)

        def seconds(step: Step, backward: int = backward) -> float:
            return backward if step.kind == "backward" else 2

        predicted = UNIT * makespan(table, seconds)
        both = median(measured(table, seconds) for _ in range(REPEATS))
        result[name] = {"predicted": predicted, "measured": both, "ratio": both / predicted}
        result[name]["bubble"] = bubble(table, seconds)
    return result


def main() -> None:
    output = output_path(__doc__, "makespan")
    rows, bubbles = [row(name, problem) for name, problem in PAIRS.items()], [of_one_model(*sizes) for sizes in SIZES]
    for one in rows + bubbles:
        print(one)
    facts: dict[str, object] = {"command": "python -m benchmarks.makespan", **provenance()}
    write(output, facts | {"unit": UNIT, "repeats": REPEATS, "results": rows, "bubbles": bubbles})


if __name__ == "__main__":
    main()
