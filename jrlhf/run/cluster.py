"""The processes of a run find each other, and each watches whether the others still live."""

import ctypes
import itertools
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
from jax._src import distributed

from jrlhf.config.devices import DistributedConfig
from jrlhf.errors import FAILED, UserError, one_line

NO_CLUSTER = "coordinator_address should be defined"  # JAX's error if it finds no cluster
TOO_LATE = "must be called before"
_VARIABLES = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}
_END = 60  # seconds that a process waits at its end for the others
_BEATS = 10  # number of heartbeats that a process sends within `distributed.heartbeat`
_watch: "_Watch | None" = None


def start(config: DistributedConfig) -> None:
    """Joins the other processes of this run, if `distributed.mode` finds any; JAX must not have started a backend."""
    global _watch
    if config.mode == "off" or jax.distributed.is_initialized():
        return
    config = _with_environment(config)
    # JAX would abort the process without naming what it waited for.
    late = threading.Timer(config.timeout, _give_up, (_why(config),))
    late.daemon = True
    late.start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator,
            num_processes=config.processes,
            process_id=config.process,
            initialization_timeout=int(config.timeout) + 60,
            heartbeat_timeout_seconds=int(2 * config.heartbeat) + 60,
            shutdown_timeout_seconds=_END,
        )
    except (ValueError, RuntimeError) as error:
        reason = one_line(error)
        if config.coordinator is not None or not (NO_CLUSTER in reason or TOO_LATE in reason):
            raise UserError(_why(config, reason)) from error
    finally:
        late.cancel()
    state = distributed.global_state
    if (state.num_processes or 1) > 1:
        _watch = _Watch(state.client, state.process_id, state.num_processes, config.heartbeat)
        if state.process_id > 0 and state.coordinator_address is not None:
            _watch_coordinator(state.coordinator_address, state.process_id, state.num_processes)


def heartbeat() -> float | None:
    """Returns the seconds after which a silent process is taken for dead; None if this process watches no other."""
    return None if _watch is None else _watch.seconds


class _Watch:
    """Ends this process with a sentence `seconds` after the last heartbeat of another one.

    Each process increments its key at the coordinator, which runs in process 0, and reads the keys of all. If process 0
    is killed, JAX notices it first and aborts the others: see `_watch_coordinator`.
    """

    def __init__(self, client: Any, number: int, processes: int, seconds: float):
        self._client, self._number, self._processes, self.seconds = client, number, processes, seconds
        now = time.monotonic()
        self._answered, self._signs = now, dict.fromkeys(range(processes), ("", now))
        for task in (self._beat, self._judge):
            threading.Thread(target=task, name="watch", daemon=True).start()

    def _beat(self) -> None:
        for turn in itertools.count():
            with suppress(Exception):  # if the coordinator does not answer, `_judge` notices
                sign = f"{turn} {socket.gethostname()}"
                self._client.key_value_set(f"jrlhf/alive/{self._number}", sign, allow_overwrite=True)
                signs = self._client.key_value_dir_get("jrlhf/alive/")
                self._answered = time.monotonic()
                for key, sign in signs:
                    other = int(key.rpartition("/")[2])
                    if self._signs[other][0] != sign:
                        self._signs[other] = sign, self._answered
            time.sleep(self.seconds / _BEATS)

    def _judge(self) -> None:
        while (silent := self._silent()) is None:
            time.sleep(self.seconds / _BEATS)
        role, host = ", the coordinator," if silent == 0 else "", self._signs[silent][0].partition(" ")[2]
        place = f" on {host}" if host else ""  # it may never have given a sign
        print(
            f"error: process {silent} of {self._processes}{place}{role} gave no sign of life to process "
            f"{self._number} for distributed.heartbeat={self.seconds:g} seconds: see why it ended or cannot be "
            "reached, and resume the run",
            file=sys.stderr,
            flush=True,
        )
        if self._number == 0:
            time.sleep(3 * self.seconds / _BEATS)  # lets the others, too, detect it through the coordinator
        os._exit(FAILED)

    def _silent(self) -> int | None:
        """Returns the number of the process whose heartbeats stopped first, if too long ago; else None."""
        first = min(self._signs, key=lambda other: self._signs[other][1])
        since, late = self._signs[first][1], time.monotonic() - self.seconds
        if since > late and self._answered > late:
            return None
        # If the coordinator ends, the heartbeats of all others stop, too.
        return first if since < self._answered - 3 * self.seconds / _BEATS else 0


def _watch_coordinator(coordinator: str, number: int, processes: int) -> None:
    """Ends this process with a sentence if process 0, and with it the coordinator, ends.

    A thread of JAX then calls abort(), which runs C handlers but not Python's. So the handler is C's `sleep`: it gets
    the signal's number, 6, as its seconds, in which the sentence is written. Other aborts end the process after these
    seconds. A SIGABRT from another process has no effect.
    """
    host, _, port = coordinator.rpartition(":")
    ctypes.CDLL(None).signal(int(signal.SIGABRT), ctypes.CDLL(None).sleep)

    def watch() -> None:
        while distributed.global_state.client is not None:
            try:
                with socket.create_connection((host.strip("[]"), int(port)), timeout=60) as connection:
                    connection.settimeout(None)
                    while connection.recv(4096):  # ends with the coordinator, or if it drops a silent peer
                        pass
            except ConnectionRefusedError:
                time.sleep(1)  # at the end of a run this process leaves JAX's cluster in this time
                if distributed.global_state.client is not None:
                    sentence = f"error: process 0 of {processes}, the coordinator of process {number}"
                    os.write(2, f"{sentence} at {coordinator}, ended: see why, and resume the run\n".encode())
                    os._exit(FAILED)
            except OSError:  # `_Watch` handles a coordinator that cannot be reached
                time.sleep(1)

    threading.Thread(target=watch, name="watch coordinator", daemon=True).start()


def _give_up(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)


def _with_environment(config: DistributedConfig) -> DistributedConfig:
    """Returns the config; unset `coordinator`, `processes` and `process` are read from the environment."""
    values: dict[str, Any] = {}
    for name, variable in _VARIABLES.items():
        text = os.environ.get(variable)
        if text and getattr(config, name) is None:
            if name != "coordinator" and not text.isdecimal():
                raise UserError(f"{variable}={text} must be a whole number: set it right, or set distributed.{name}")
            values[name] = text if name == "coordinator" else int(text)
    try:
        config = replace(config, **values)
    except ValueError as error:
        raise UserError(f"distributed.{error} (it comes from the environment)") from error
    if config.coordinator is None and (config.processes or config.process) is not None:
        name = "process" if config.processes is None else "processes"
        raise UserError(
            f"distributed.{name}={getattr(config, name)} without distributed.coordinator: set it to HOST:PORT of "
            f"process 0 (or {_VARIABLES['coordinator']}), or leave all of them out"
        )
    if config.processes is not None and config.process is not None and config.process >= config.processes:
        raise UserError(
            f"distributed.process={config.process} with distributed.processes={config.processes}: processes are "
            f"numbered from 0, set it to {config.processes - 1} at most"
        )
    return config


def _why(config: DistributedConfig, reason: str = "") -> str:
    """Returns a sentence that explains why the processes did not find each other."""
    if TOO_LATE in reason:
        return f"distributed.coordinator={config.coordinator} comes too late: JAX runs already; restart the process"
    if "must be defined" in reason:
        lacking = [name for name in ("processes", "process") if getattr(config, name) is None]
        keys = " and ".join(f"distributed.{name} (or {_VARIABLES[name]})" for name in lacking)
        return f"distributed.coordinator={config.coordinator} without {keys}, which no cluster says: set them, too"
    place = "of the cluster that JAX found" if config.coordinator is None else f"at {config.coordinator}"
    return (
        f"the processes of this run did not all meet the coordinator {place} within "
        f"distributed.timeout={config.timeout:g} seconds{f' ({reason})' if reason else ''}: see that all of them run "
        "and reach process 0 there, or set distributed.mode=off"
    )
