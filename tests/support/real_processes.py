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
from pathlib import Path
from typing import Any

from tests.support.processes import free_port
from tests.support.real_runs import ended, fork, outcome, reward

DEVICES = 8
HEARTBEAT, GRACE = 10, 50  # seconds: after the first the others notice a loss; the second is for a busy machine
DISTRIBUTED = {"heartbeat": HEARTBEAT, "timeout": 60}
KINDS = "kill", "kill", "stop", "term", "cut"


def forward(port: int, target: int) -> int:
    """Starts a process that passes connections to `port` on to `target`; returns its number. Stopped, it cuts them."""

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()

    def connect(client: socket.socket) -> None:
        while True:
            try:
                server = socket.create_connection(("127.0.0.1", target))
                break
            except ConnectionRefusedError:  # the coordinator has not started yet
                time.sleep(0.1)
        for ends in ((client, server), (server, client)):
            threading.Thread(target=copy, args=ends, daemon=True).start()

    listener = socket.create_server(("127.0.0.1", port))
    if (pid := os.fork()) == 0:
        while True:
            threading.Thread(target=connect, args=(listener.accept()[0],), daemon=True).start()
    listener.close()
    return pid


class Processes:
    """The processes of a run, started together. Process `cut` reaches the coordinator by a forwarder."""

    def __init__(self, run: Path, count: int, cut: int | None = None):
        coordinator, detour = free_port(), free_port()
        self.forwarder = None if cut is None else forward(detour, coordinator)
        settings = {"device": {"platform": "cpu", "simulated": DEVICES // count}, "distributed": DISTRIBUTED}
        settings["mesh"] = {"data": 2, "fsdp": DEVICES // 2, "tensor": 1}
        resume, self.outputs, self.codes = (run / "config.yaml").exists(), [], dict[int, int]()
        self.pids = []
        for number in range(count):
            port = detour if number == cut else coordinator
            variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
            self.outputs.append(run.with_name(f"output{number}"))
            variables |= {"JAX_PROCESS_ID": str(number)}
            pid = fork(run, self.outputs[-1], settings, variables, resume=resume, optimise=False)
            self.pids.append(pid)

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

    def close(self) -> None:
        for number, pid in enumerate(self.pids):
            if number not in self.codes:
                os.kill(pid, signal.SIGKILL)
                self.codes[number] = ended(pid)
        if self.forwarder is not None:
            os.kill(self.forwarder, signal.SIGKILL)
            ended(self.forwarder)

    def text(self, number: int) -> str:
        return self.outputs[number].read_text(errors="replace") if self.outputs[number].exists() else ""


def interrupt(run: Path, count: int, draw: random.Random, seconds: float) -> str:
    """Has one process of the run lost in some way; returns what was done and what the others did."""
    kind, moment = draw.choice(KINDS), draw.uniform(0.05, 0.95) * seconds
    lost = draw.randrange(1 if kind == "cut" else 0, count)
    processes = Processes(run, count, lost if kind == "cut" else None)
    processes.wait(moment)
    if kind == "cut":
        assert processes.forwarder is not None
        os.kill(processes.forwarder, signal.SIGSTOP)
    elif lost not in processes.codes:
        os.kill(processes.pids[lost], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])
    in_time = processes.wait(HEARTBEAT + GRACE, *([lost] if kind == "stop" else []))
    processes.close()
    faults = [] if in_time else ["not all ended"]
    joined = "reading the data" in processes.text(0)
    for number, code in sorted(processes.codes.items()):
        text = processes.text(number)
        sentences = re.findall(r"^error: .*", text, re.M)
        named = not joined or number == lost or any(f"process {lost} of {count}" in line for line in sentences)
        ended_well = code == 0 or (kind == "term" and code in (75, 143, -signal.SIGTERM))
        failed_well = code == 1 and len(sentences) == 1 and named
        if not (ended_well or failed_well or (number == lost and code == -signal.SIGKILL)) or "Traceback" in text:
            faults.append(f"process {number}: exit {code}: {text}")
    codes = [processes.codes[number] for number in range(count)]
    what = f"{kind} {lost} of {count} after {moment:.1f} of {seconds:.1f} s: {codes}"
    return f"FAULT {what} {faults}" if faults else what


def judge(run: Path, count: int, expected: Any) -> str:
    """Resumes the run: "same"; anything else is a fault."""
    processes = Processes(run, count)
    in_time = processes.wait(600)
    processes.close()
    if not in_time or any(processes.codes.values()):
        return f"FAULT: {in_time}, {processes.codes}: {[processes.text(number) for number in range(count)]}"
    return "same" if outcome(run) == expected else "FAULT: other bits"


def main(directory: Path, seed: int, number: int) -> None:
    expected, seconds = {}, {}
    for count in (2, 4):
        whole = directory / f"whole{count}" / "run"
        whole.parent.mkdir()
        reward(whole, "")
        began = time.monotonic()
        result = judge(whole, count, None)
        assert result == "FAULT: other bits", result
        expected[count], seconds[count] = outcome(whole), time.monotonic() - began
    for index in range(number):
        draw = random.Random(f"{seed} {index}")
        run, count = directory / str(index) / "run", draw.choice((2, 2, 4))
        run.parent.mkdir()
        reward(run, "")
        what = interrupt(run, count, draw, seconds[count])
        print(json.dumps({"what": what, "result": judge(run, count, expected[count])}), flush=True)
        shutil.rmtree(run.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
