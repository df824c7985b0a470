"""Starts `jrlhf.train` again and again: every start is a process of its own, forked before JAX has any device.

    python -m tests.support.starts FILE

FILE: JSON with `starts`, a list of lists of arguments; `guard`, false if several CPU devices may read programs from the
cache, too; and `seconds`, after which a start is ended. Prints a JSON line for each start: its exit code (null: it had
to be ended), the programs that it read from the cache, those that it compiled, and seconds. What it prints itself goes
to FILE.log.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge

from jrlhf.run import devices
from jrlhf.train import cli

READ = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"  # also of a program that is read


def start(arguments: list[str], guard: bool, log: Path, results: int) -> None:
    """Runs in a process of its own."""
    with open(log, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    counts = {READ: 0, COMPILED: 0}

    def count(event: str, *_: Any, **__: Any) -> None:
        if event in counts:
            counts[event] += 1

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count)
    if not guard:
        devices.keep_programs = lambda platform: None
    code = cli(arguments)
    os.write(results, json.dumps({"code": code, "read": counts[READ], "compiled": counts[COMPILED]}).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def ended(pid: int, seconds: float) -> bool:
    """Waits for the end of a process; ends it after so many seconds. Returns whether it ended by itself."""
    until = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.02)
    return True


def main(file: Path) -> None:
    task = json.loads(file.read_text())
    assert not xla_bridge.backends_are_initialized()  # threads would not survive the fork
    for arguments in task["starts"]:
        began = time.monotonic()
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            start(arguments, task["guard"], file.with_suffix(".log"), writer)
        os.close(writer)
        done = ended(pid, task["seconds"])
        with open(reader) as results:
            text = results.read()
        result = json.loads(text) if done and text else {"code": None, "read": 0, "compiled": 0}
        print(json.dumps(result | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
