"""The loop that every stage runs: restore, advance, log, save, until it is done or asked to stop."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import jax

from jrlhf.errors import Preempted, RunFailure, UserError
from jrlhf.run import contents
from jrlhf.run.checkpoints import Checkpoints, like, read_meta
from jrlhf.run.files import saved_steps
from jrlhf.run.metrics import METRICS, TIMELINE, MetricsLog, StageRecords
from jrlhf.run.processes import any_process
from jrlhf.run.profiler import CompilationWatch, deadline, peak_memory, traced
from jrlhf.stages.best import BestWeights
from jrlhf.stages.context import Context
from jrlhf.stages.learning import Learning
from jrlhf.stages.watching import WATCH, Hook, Iteration, Watch

State = TypeVar("State")

# Keys in the metrics of `advance`: texts to save and show; all rows of an asynchronous iteration; its calls.
SAMPLES, ROWS, CALLS = "samples", "rows", "calls"
# Keys in a checkpoint's `meta`: line counts and checksums of the record files; seconds of the stage until then.
RECORDS, SECONDS = "records", "seconds"


def run_stage(
    context: Context,
    name: str,
    init: Callable[[], State],
    advance: Callable[[State, int], tuple[State, dict[str, Any]]],
    *,
    meta: Mapping[str, str],
    announced: Sequence[str],
    saved: Callable[[State], State] = lambda state: state,
    measure: Callable[[State, int], Mapping[str, float]] = lambda state, step: {},
    finish: Callable[[State], State] | None = None,
) -> State:
    """Calls `advance(state, step) -> (state, metrics)` for each step of a stage, first with `init()`.

    Returns the last state, with `checkpoints.best` with the best weights. Metrics are numbers. In addition
    `metrics[SAMPLES]` may hold texts (mappings) for samples.jsonl, TensorBoard and the console, `metrics[ROWS]` records
    for rollouts.jsonl, and `metrics[CALLS]` the calls of the iteration for timeline.jsonl.
    announced: the names of the calls of a step (`calling`) in their order, whose compilation is told.

    A stage ends before its last step if a hook or `stop` asks for it. The state that it returns, and saves at its end,
    has passed through `finish`, once. measure: see `BestWeights`.

    Checkpoints hold `saved(state)`. An interrupted stage continues from its newest good checkpoint; a finished stage
    only restores it. A checkpoint with another `meta`, which identifies the inputs of the stage, is refused. A process
    that was asked to stop saves its state and raises Preempted. A RunFailure saves it, too, except at the last step,
    and so does the error of a hook.
    """
    config, run, console, steps = context.config, context.run, context.console, context.config.length(name)
    meta = context.identity.of_stage(meta)
    directory, older = run.path / "checkpoints" / name, lambda step: run.older(name, step)
    with Checkpoints(directory, keep=config.checkpoints.keep, tell=console.warn, older=older) as checkpoints:
        start, state, there = _restore(checkpoints, name, init, context, meta)
        records = _records(context, name, start, there)
        watch = _watch(context, name, there, context.hooks)
        best = BestWeights(context, name, checkpoints, watch, measure, finish)
        if start == steps or watch.ended:
            console.line(f"{name} has done its {steps} steps" if start == steps else f"{name} ended at step {start}")
            return best.result(state, start)
        if start:
            console.line(f"{name} goes on after step {start} of {steps}")
        learning = Learning(config, name, state, console.warn)
        run.begin(console.line)

        def save(step: int, state: State) -> dict[str, float]:
            began = time.perf_counter()
            log.sync()
            # A stage ends as its last state is saved; writing that belongs to what follows, also if it is resumed.
            done = {RECORDS: records.tally(), SECONDS: context.phases.lap(name), WATCH: watch.state}
            checkpoints.save(step, saved(state), {**meta, **done})
            return {"timing_s/save_checkpoint": time.perf_counter() - began}

        saving = dict[str, float]()  # the metric of the last save, which the next iteration logs
        with (
            MetricsLog(run.path, enabled=run.writes) as log,
            console.progress(name, total=steps, start=start, calls=announced) as progress,
            CompilationWatch(progress.compiling) as compilations,
            context.preemption.iterating(),
        ):
            for step in range(start + 1, steps + 1):
                saving = save(step - 1, state) if best.saves_before(step - 1) else saving
                compilations.take()  # discards what saving compiled
                with deadline(config.deadline), _saved_on_error(checkpoints, state, step - 1, save):
                    state, metrics = traced(config, run.path, name, step, partial(advance, state, step - 1))
                run.check_present()
                compiled, again = compilations.end_iteration(metrics)
                if again:
                    console.warn(f"{name} step {step} {again}")
                metrics |= {"perf/compilations": compiled, "training/global_step": step}
                metrics |= peak_memory(context.mesh) | learning.measure(state, metrics, step) | saving
                iteration = _record(context, name, step, metrics, log)
                progress.advance(step, iteration.metrics)
                with deadline(config.deadline):
                    failed = watch.after(iteration, seconds=config.deadline)
                    last = step == steps or bool(watch.ended)
                    in_vain = learning.in_vain(step, steps, last=last)
                    state = best.ended(state, step) if last and not in_vain else state
                ending = _ending(iteration, failed, in_vain, context.preemption.agreed())
                due = best.saves_after(iteration) or last or ending or step % config.sections[name].save_every == 0
                saving = save(step, state) if due and not (in_vain and last) else {}
                if ending is not None:
                    checkpoints.wait()
                    raise ending
                if last:
                    break
        if step < steps:
            console.line(f"{name} ends at step {step} of {steps}, because {watch.reason}")
        return best.result(state, step)


def _watch(context: Context, name: str, there: Mapping[str, Any], hooks: Sequence[tuple[str, Hook]] = ()) -> Watch:
    """Returns the watch of a stage that goes on from a checkpoint, whose meta is `there`."""
    best = context.config.checkpoints.best_in(name)
    return Watch.of(context.config, hooks, there.get(WATCH, {}), left=_left(context, name), best=best)


def _ended(context: Context, name: str, there: Mapping[str, Any], step: int) -> bool:
    """True if a stage does not go on from its checkpoint of a step, whose meta is `there`."""
    watch = _watch(context, name, there)
    return step == context.config.length(name) or bool(watch.ended)


def _left(context: Context, name: str) -> bool:
    """True if a stage that has ended cannot go on: a later stage has saved a state, which began with its weights, or
    its own last state is finished."""
    if name == "reward_model":
        return True
    stages, folder = context.config.stages, context.run.path / "checkpoints"
    later = stages[stages.index(name) + 1 :] if name in stages else ()
    return any(saved_steps(folder / stage) for stage in later)


def _ending(iteration: Iteration, failed: str, in_vain: str, stop: bool) -> Exception | None:
    """The error that ends a stage after a step: of updates in vain, of a hook, or of no fault; None: there is none."""
    name, step, steps = iteration.stage, iteration.step, iteration.steps
    if in_vain:
        return RunFailure("; ".join(filter(None, (in_vain, failed))))
    if failed:
        return UserError(f"{failed}; the state of {name} step {step} is saved: mend the hook and resume the run")
    return Preempted(f"{name} stopped at step {step} of {steps}; its state is saved") if stop else None


def _record(context: Context, name: str, step: int, metrics: dict[str, Any], log: MetricsLog) -> Iteration:
    """Writes what a step measured, and shows its samples. Returns what hooks see of the step."""
    run, calls = context.run, metrics.pop(CALLS, ())
    samples, rows = (
        [{"stage": name, "step": step, **record} for record in metrics.pop(key, ())] for key in (SAMPLES, ROWS)
    )
    if samples:
        run.append(contents.SAMPLES, samples)
        context.console.samples([sample for sample in samples if "kind" not in sample])
    if rows:
        run.append(contents.ROLLOUTS, rows)
    numbers = log.log(name, step, metrics, samples, calls)
    for tracker in context.trackers:
        tracker.log(name, step, numbers)
    return Iteration(name, step, context.config.length(name), numbers, samples, run.path)


def _records(context: Context, name: str, start: int, there: Mapping[str, Any]) -> StageRecords:
    """Opens a stage's records after `start` steps. there: what the checkpoint tells of them."""
    run = context.run
    files = (METRICS, contents.SAMPLES, TIMELINE) + (contents.ROLLOUTS,) * (name == context.config.algorithm)
    writers = *context.config.stages, "evaluation"
    records = StageRecords(run.path, name, start, files=files, writers=writers, enabled=run.writes)
    for difference in records.differences(there.get(RECORDS, {})):
        context.console.warn(difference)
    if start:
        context.phases.resume(name, there.get(SECONDS, 0.0))
    return records


def check_inputs(context: Context) -> None:
    """Refuses changed data, models and reward functions as the stages themselves would, but before any other work."""
    config, run, identity = context.config, context.run.path, context.identity
    for name in config.stages:
        directory = run / "checkpoints" / name
        if steps := saved_steps(directory):
            there, functions = read_meta(directory, steps[-1]), identity.functions if name == config.algorithm else ()
            identity.check_known(run, name, there, functions, ended=_ended(context, name, there, steps[-1]))


@contextmanager
def _saved_on_error(checkpoints: Checkpoints, state: Any, step: int, save: Callable[..., object]) -> Iterator[None]:
    """Saves the state if the block ends with a UserError, such as a failed reward, before it donated the state.

    All processes must raise it: reward functions run in process 0, and `from_main` raises their errors in all.
    """
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
    """Returns the finished steps, the state, and what the checkpoint tells of them; or a fresh state."""
    state = init()
    if not checkpoints.steps:
        return 0, state, {}
    target = like(state, context.mesh)
    for leaf in jax.tree.leaves(state):  # only the shapes are needed; two states may not fit into memory
        leaf.delete()
    restored = checkpoints.restore_latest(target)
    assert restored is not None, "there are steps, and a damaged last one raises"
    start, state, there = restored
    words = {key: word for key, word in there.items() if key not in (RECORDS, SECONDS, WATCH)}
    context.identity.compare(context.run, name, words, meta, ended=_ended(context, name, there, start))
    return start, state, there
