"""The process that sends a run's metrics to Weights & Biases, so that the network can neither stop nor slow the run.

It reads JSON lines from stdin: the arguments of `wandb.init`, then `{"stage", "step", "metrics"}`. stdin ends at the
latest with the run's process; this one ends within `LONGEST` seconds after that. It imports only the standard library
and wandb, so that it starts fast.
"""

import json
import os
import sys
import time
from queue import SimpleQueue
from threading import Thread

LONGEST = 60.0  # the run itself waits less; if it was killed, nobody else ends a process that hangs


def main() -> None:
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")
        time.sleep(LONGEST)
        os._exit(1)

    # A thread reads also while wandb is slow; otherwise the pipe would fill up, and the run would end this process.
    Thread(target=read, daemon=True).start()
    try:
        _send(lines)
    except Exception as error:
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))


def _send(lines: SimpleQueue[str]) -> None:
    import wandb  # pyright: ignore[reportMissingImports]

    run, stages = wandb.init(**json.loads(lines.get())), set()
    while line := lines.get():
        record = json.loads(line)
        stage = record["stage"]
        if stage not in stages:  # each stage counts its steps from 1, so it needs its own axis
            run.define_metric(f"{stage}/step")
            run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            stages.add(stage)
        metrics = {f"{stage}/{name.removeprefix(f'{stage}/')}": value for name, value in record["metrics"].items()}
        run.log({f"{stage}/step": record["step"], **metrics})
    run.finish()


if __name__ == "__main__":
    main()
