"""The loop that every stage runs: restore, advance, log, save, until it is done or asked to stop."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import jax

from jrlhf.errors import Preempted, RunFailure, UserError
from jrlhf.run.checkpoints import Checkpoints, like
from jrlhf.run.metrics import MetricsLog, StageRecords
from jrlhf.run.processes import any_process
from jrlhf.run.profiler import CompilationWatch, deadline, peak_memory, traced
from jrlhf.stages.context import Context
from jrlhf.stages.learning import Learning

State = TypeVar("State")

SAMPLES = "samples"  # key in the metrics of `advance`: texts to save and show
CALLS = "calls"  # key in the metrics of `advance`: the calls of the iteration
RECORDS = "records"  # key in a checkpoint's `meta`: line counts and checksums of the record files
SETTLED = 2  # iterations after which nothing may compile any more


def run_stage(
    context: Context,
    name: str,
    steps: int,
    init: Callable[[], State],
    advance: Callable[[State, int], tuple[State, dict[str, Any]]],
    *,
    save_every: int,
    meta: Mapping[str, str],
    saved: Callable[[State], State] | None = None,
) -> State:
    """Calls `advance(state, step) -> (state, metrics)` `steps` times, first with `init()`; returns the last state.

    Metrics are numbers. In addition `metrics[SAMPLES]` may hold texts (mappings) for samples.jsonl, TensorBoard and
    the console, and `metrics[CALLS]` the calls of the iteration for timeline.jsonl.

    Checkpoints hold `saved(state)`. An interrupted stage continues from its newest good checkpoint; a finished stage
    only restores it. A checkpoint with another `meta`, which identifies the inputs of the stage, is refused. A process
    that was asked to stop saves its state and raises Preempted. A RunFailure saves it, too, except at the last step.
    """
    run, console = context.run, context.console
    meta = context.identity.of_stage(meta)
    directory, keep = run.path / "checkpoints" / name, context.config.checkpoints.keep
    with Checkpoints(directory, keep=keep, tell=console.warn, older=partial(run.older, name)) as checkpoints:
        start, state, tally = _restore(checkpoints, name, init, context, meta)
        writers = *context.config.stages, "evaluation"
        records = StageRecords(run.path, name, start, writers=writers) if run.writes else None
        for difference in () if records is None else records.differences(tally):
            console.warn(difference)
        if start:
            console.line(
                f"{name} has done its {steps} steps"
                if start == steps
                else f"{name} goes on after step {start} of {steps}"
            )
        if start == steps:
            return state
        learning = Learning(context.config, name, state, console.warn)
        run.begin(console.line)

        waited, measured = dict[str, float](), set[str]()

        def save(step: int, state: State) -> None:
            began = time.perf_counter()
            whole = state if saved is None else saved(state)
            checkpoints.save(step, whole, {**meta, RECORDS: {} if records is None else records.tally()})
            waited["timing_s/save_checkpoint"] = time.perf_counter() - began

        with (
            MetricsLog(run.path, enabled=run.writes) as log,
            console.progress(name, total=steps, start=start) as progress,
            CompilationWatch(progress.compiling) as compilations,
            context.preemption.iterating(),
        ):
            for step in range(start, steps):
                with deadline(context.config.deadline), _saved_on_error(checkpoints, state, step, save):
                    compilations.take()  # discards what saving compiled
                    state, metrics = traced(context.config, run.path, name, step + 1, partial(advance, state, step))
                    compiled, causes = compilations.take()
                run.check_present()
                samples, calls = metrics.pop(SAMPLES, ()), metrics.pop(CALLS, ())
                first, measured = not metrics.keys() <= measured, measured | metrics.keys()
                metrics |= {"perf/compilations": len(compiled), "training/global_step": step + 1}
                metrics |= peak_memory(context.mesh)
                metrics |= learning.measure(state, metrics, step + 1) | dict(waited.popitem() for _ in list(waited))
                # The first validation or evaluation of a process compiles, which after a resume may be a late step.
                if step - start >= SETTLED and compiled and not first:
                    console.warn(f"{name} step {step + 1} compiled {', '.join(compiled)} again: {' '.join(causes)}")
                elif step - start == SETTLED - 1:
                    compilations.explain()
                if samples:
                    samples = [{"stage": name, "step": step + 1, **sample} for sample in samples]
                    run.add_samples(samples)
                    console.samples([sample for sample in samples if "kind" not in sample])
                numbers = log.log(name, step + 1, metrics, samples, calls)
                for tracker in context.trackers:
                    tracker.log(name, step + 1, numbers)
                progress.advance(step + 1, numbers)
                stop = context.preemption.agreed()
                last, in_vain = step + 1 == steps, learning.in_vain(step + 1, steps)
                if (stop or in_vain or (step + 1) % save_every == 0 or last) and not (in_vain and last):
                    log.sync()
                    save(step + 1, state)
                if in_vain:
                    checkpoints.wait()
                    raise RunFailure(in_vain)
                if stop:
                    checkpoints.wait()
                    raise Preempted(f"{name} stopped at step {step + 1} of {steps}; its state is saved")
            checkpoints.wait()
    return state


@contextmanager
def _saved_on_error(checkpoints: Checkpoints, state: Any, step: int, save: Callable[..., None]) -> Iterator[None]:
    """Saves the state if the block ends with a UserError, such as a failed reward, before it donated the state."""
    try:
        yield
    except UserError:
        # Arrays of other processes are never deleted here, and all processes must decide alike.
        whole = not any_process(any(leaf.is_deleted() for leaf in jax.tree.leaves(state)))
        if step > 0 and step not in checkpoints.steps and whole:
            save(step, state)
            checkpoints.wait()
        raise


def _restore(
    checkpoints: Checkpoints, name: str, init: Callable[[], State], context: Context, meta: dict[str, str]
) -> tuple[int, State, dict[str, Any]]:
    """Returns the finished steps, the state and its records' tally: from the newest good checkpoint, or fresh."""
    state = init()
    if not checkpoints.steps:
        return 0, state, {}
    target = like(state, context.mesh)
    for leaf in jax.tree.leaves(state):  # only the shapes are needed; two states may not fit into memory
        leaf.delete()
    restored = checkpoints.restore_latest(target)
    assert restored is not None, "there are steps, and a damaged last one raises"
    start, state, there = restored
    tally = there.pop(RECORDS, {})
    for notice in context.identity.compare(context.run, name, there, meta):
        context.console.line(notice)
    return start, state, tally
