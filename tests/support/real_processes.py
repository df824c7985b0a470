"""Tiny runs of several processes. One process is killed, stopped, asked to stop or cut off at random; then all resume.

    python -m tests.support.real_processes DIRECTORY SEED NUMBER

prints a line of JSON for each: what was done, and what a resume made of it. Two processes have 4 devices each, four
have 2. Processes are forked from one that has imported everything and has started no backend.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.support.processes import free_port
from tests.support.real_runs import ended, fork, outcome, reward

DEVICES = 8
HEARTBEAT, GRACE = 10, 50  # seconds: after the first the others notice a loss; the second is for a busy machine
DISTRIBUTED = {"heartbeat": HEARTBEAT, "timeout": 60}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
KINDS = "kill", "kill", "stop", "term", "cut"
JOINED = "reading the data"  # process 0 prints it when all processes have met


def forward(port: int, target: int) -> int:
    """Starts a process that passes connections to `port` on to `target`; returns its number. Stopped, it cuts them."""

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def connect(client: socket.socket) -> None:
        while True:
            with suppress(ConnectionRefusedError):  # the coordinator has not started yet
                server = socket.create_connection(("127.0.0.1", target))
                break
            time.sleep(0.1)
        for ends in ((client, server), (server, client)):
            threading.Thread(target=copy, args=ends, daemon=True).start()

    listener = socket.create_server(("127.0.0.1", port))
    if (pid := os.fork()) == 0:
        try:
            while True:
                threading.Thread(target=connect, args=(listener.accept()[0],), daemon=True).start()
        finally:
            os._exit(1)
    listener.close()
    return pid


class Processes:
    """The processes of a run, started together and killed at the end. Process `cut` reaches process 0 by a forwarder.

    codes: exit codes of the processes that have ended, by number.
    """

    def __init__(self, run: Path, count: int, cut: int | None = None):
        coordinator, detour = free_port(), free_port()
        self.forwarder = None if cut is None else forward(detour, coordinator)
        settings = {"device": {"platform": "cpu", "simulated": DEVICES // count}, "distributed": DISTRIBUTED}
        settings["mesh"] = {"data": 2, "fsdp": DEVICES // 2, "tensor": 1}
        self.outputs, self.codes = [run.with_name(f"output{number}") for number in range(count)], dict[int, int]()
        self.pids, resume = list[int](), (run / "config.yaml").exists()
        for number, output in enumerate(self.outputs):
            port = detour if number == cut else coordinator
            variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
            variables |= {"JAX_PROCESS_ID": str(number)}
            self.pids.append(fork(run, output, settings, variables, resume=resume, optimise=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, pid in enumerate(self.pids):
            if number not in self.codes:
                os.kill(pid, signal.SIGKILL)
                self.codes[number] = ended(pid)
        if self.forwarder is not None:
            os.kill(self.forwarder, signal.SIGKILL)
            ended(self.forwarder)

    def wait(self, seconds: float, *missing: int) -> bool:
        """Waits for all processes but these; False if one has not ended in time."""
        until = time.monotonic() + seconds
        while waiting := [number for number in range(len(self.pids)) if number not in (*self.codes, *missing)]:
            for number in waiting:
                pid, status = os.waitpid(self.pids[number], os.WNOHANG)
                if pid:
                    self.codes[number] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def text(self, number: int) -> str:
        return self.outputs[number].read_text(errors="replace") if self.outputs[number].exists() else ""


def interrupt(run: Path, count: int, draw: random.Random, seconds: float) -> str:
    """Has one process of the run lost in some way; returns what was done and what the others did."""
    kind, moment = draw.choice(KINDS), draw.uniform(0.05, 0.9) * seconds
    lost = draw.randrange(1 if kind == "cut" else 0, count)
    with Processes(run, count, lost if kind == "cut" else None) as processes:
        processes.wait(moment)
        alive, joined = not processes.codes, JOINED in processes.text(0)
        if kind == "cut":
            assert processes.forwarder is not None
            os.kill(processes.forwarder, signal.SIGSTOP)
        elif lost not in processes.codes:
            os.kill(processes.pids[lost], SIGNALS[kind])
        in_time = processes.wait(HEARTBEAT + GRACE, *([lost] if kind == "stop" else []))
    exported = (run / "model" / "model.safetensors").exists()
    faults = [] if in_time else ["not all ended"]
    for number, code in sorted(processes.codes.items()):
        text = processes.text(number)
        sentences = re.findall(r"^error: .*", text, re.M)
        named = not joined or number == lost or any(f"process {lost} of {count}" in line for line in sentences)
        well = code == 0 and exported
        well |= code == 1 and len(sentences) == 1 and named
        well |= number == lost and code == -signal.SIGKILL and kind in ("kill", "stop")
        well |= kind == "term" and (code == 75 or (number == lost and not joined and code in (143, -signal.SIGTERM)))
        if not well or "Traceback" in text:
            faults.append(f"process {number}: exit {code}: {text}")
    codes = [processes.codes[number] for number in range(count)]
    what = f"{'' if alive else 'too late: '}{kind} {lost} of {count} after {moment:.1f} of {seconds:.1f} s: {codes}"
    return f"FAULT {what} {faults}" if faults else what


def complete(run: Path, count: int) -> str:
    """Runs or resumes the run to its end; returns "", or what went wrong."""
    with Processes(run, count) as processes:
        in_time = processes.wait(600)
    if in_time and not any(processes.codes.values()):
        return "" if JOINED in processes.text(0) else f"FAULT: no {JOINED!r}: {processes.text(0)}"
    return f"FAULT: {in_time}, {processes.codes}: {[processes.text(number) for number in range(count)]}"


def main(directory: Path, seed: int, number: int) -> None:
    expected, seconds = dict[int, Any](), dict[int, float]()
    for count in (2, 4):
        run = directory / f"whole{count}" / "run"
        run.parent.mkdir()
        reward(run, "")
        began = time.monotonic()
        fault = complete(run, count)
        assert not fault, fault
        expected[count], seconds[count] = outcome(run), time.monotonic() - began
    for index in range(number):
        draw = random.Random(f"{seed} {index}")
        run, count = directory / str(index) / "run", draw.choice((2, 2, 4))
        run.parent.mkdir()
        reward(run, "")
        what = interrupt(run, count, draw, seconds[count])
        fault = complete(run, count)
        result = fault or ("same" if outcome(run) == expected[count] else "FAULT: other bits")
        print(json.dumps({"what": what, "result": result}), flush=True)
        shutil.rmtree(run.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
