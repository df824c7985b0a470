"""The process that speaks to Weights & Biases for a run: importing it, logging in and its network wait and fail here.

It reads JSON from stdin, a line each: the arguments of `wandb.init`, then `{"stage", "step", "metrics"}`. The end of
stdin, which is also that of the run's process, ends it. Standard library and wandb only.
"""

import json
import sys
from queue import SimpleQueue
from threading import Thread


def main() -> None:
    lines: SimpleQueue[str | None] = SimpleQueue()
    Thread(target=_read, args=(lines,), daemon=True).start()  # the run never waits for what is slow here
    try:
        _follow(lines)
    except Exception as error:
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))


def _read(lines: SimpleQueue) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def _follow(lines: SimpleQueue) -> None:
    import wandb  # pyright: ignore[reportMissingImports]

    run, stages = wandb.init(**json.loads(lines.get())), set()
    while (line := lines.get()) is not None:
        said = json.loads(line)
        stage = said["stage"]
        if stage not in stages:  # each stage counts its steps from 1: an axis of its own
            run.define_metric(f"{stage}/step")
            run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            stages.add(stage)
        named = {name if name.startswith(f"{stage}/") else f"{stage}/{name}": x for name, x in said["metrics"].items()}
        run.log({f"{stage}/step": said["step"], **named})
    run.finish()
