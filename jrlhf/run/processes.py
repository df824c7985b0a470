"""Multi-process runs: the processes find each other, agree on decisions, and end together.

Every process reads the same config and data, and dispatches the same programs in the same order. Everything that may
differ between processes (a signal, a clock, the score of a reward function) is decided once, by the functions here.
"""

import ctypes
import itertools
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from jrlhf.config.devices import DistributedConfig
from jrlhf.errors import FAILED, UserError, one_line
from jrlhf.meshes.mesh import absent_processes
from jrlhf.meshes.resharding import reshard
from jrlhf.meshes.transfers import to_host
from jrlhf.run.files import decode, encode

T = TypeVar("T")

NO_CLUSTER = "coordinator_address should be defined"  # JAX's error if it finds no cluster
TOO_LATE = "must be called before"
_VARIABLES = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}
_END = 60  # seconds that a process waits at its end for the others
_CUT_OFF = ("Gloo", "UNAVAILABLE", "Connection")  # in errors of a process that lost another one
_SEEN = 10.0  # seconds after which all processes see a new file on a common file system
_BEATS = 10  # number of heartbeats that a process sends within `distributed.heartbeat`
_numbers = itertools.count()  # number the messages through the coordinator, equally in every process
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


def several() -> bool:
    """True if this run has more than one process."""
    return jax.process_count() > 1


def is_main() -> bool:
    """True in process 0, the only one that writes files, prints and runs reward functions."""
    return jax.process_index() == 0


def from_main(function: Callable[[], T], *, seconds: float = 3600.0) -> T:
    """Calls `function` in process 0 and returns its value in every process.

    All processes must call this, from their main thread and in the same order. The value is sent through the
    coordinator as JSON (`encode`: plain data and arrays), which anyone on its network can write; no device is used. The
    others wait at most `seconds`. A UserError of process 0 is raised in all processes, any other error as RuntimeError
    in the others.
    """
    if not several():
        return function()
    client = multihost.get_jax_distributed_client()
    key = f"jrlhf/{next(_numbers)}"
    if is_main():
        try:
            value = function()
        except BaseException as error:
            kind, reason = ("bad", str(error)) if isinstance(error, UserError) else ("failed", repr(error))
            client.key_value_set_bytes(key, encode({kind: reason}).encode())
            raise
        client.key_value_set_bytes(key, encode({"value": value}).encode())
    else:
        answer = decode(client.blocking_key_value_get_bytes(key, int(seconds * 1000)))
        if "bad" in answer:
            raise UserError(answer["bad"])
        if "failed" in answer:
            raise RuntimeError(f"process 0 failed: {answer['failed']}")
        value = answer["value"]
    _delete_once_read(key, range(jax.process_count()), seconds)
    return value


def _delete_once_read(key: str, readers: Sequence[int], seconds: float) -> None:
    """Deletes a message at the coordinator once all `readers`, which must call this, have it."""
    client = multihost.get_jax_distributed_client()
    client.wait_at_barrier(f"{key} is read", int(seconds * 1000), [*readers])
    if jax.process_index() == readers[0]:
        client.key_value_delete(key)


def to_main(value: Any, *, seconds: float = 3600.0) -> list[Any]:
    """Returns the values of all processes in process 0, and an empty list in the others, which do not wait.

    There must be several processes, and all must call this, from their main thread and in the same order. The values
    are sent through the coordinator as JSON (`encode`). Process 0 waits at most `seconds` for each.
    """
    client, key = multihost.get_jax_distributed_client(), f"jrlhf/{next(_numbers)}"
    if not is_main():
        client.key_value_set_bytes(f"{key}/{jax.process_index()}", encode(value).encode())
        return []
    values = [value]
    for process in range(1, jax.process_count()):
        values.append(decode(client.blocking_key_value_get_bytes(f"{key}/{process}", int(seconds * 1000))))
        client.key_value_delete(f"{key}/{process}")
    return values


def to_all_hosts(tree: Any, rows: np.ndarray | None = None, *, seconds: float = 3600.0) -> Any:
    """Returns the arrays of one mesh as whole NumPy arrays, in every process. Devices of other meshes may be busy.

    All processes must call this, from their main thread and in the same order. Processes with a device of the mesh do
    not wait for the others, which get the bytes through the coordinator, and wait at most `seconds`.

    rows: mask of the rows that are needed; in processes without a device of the mesh the others are 0.
    """
    if not several():
        return to_host(tree)
    leaves, treedef = jax.tree.flatten(tree)
    mesh = leaves[0].sharding.mesh
    absent = [device.process_index for device in absent_processes(mesh)]
    if not absent:
        return to_host(tree)
    client, key = multihost.get_jax_distributed_client(), f"jrlhf/{next(_numbers)}"
    index = ... if rows is None else rows
    whole = reshard(leaves, [NamedSharding(mesh, PartitionSpec())] * len(leaves))
    if jax.process_index() not in absent:
        arrays = jax.device_get(whole)
        if jax.process_index() == min(device.process_index for device in mesh.devices.flat):
            client.key_value_set_bytes(key, b"".join(array[index].tobytes() for array in arrays))
        return treedef.unflatten(arrays)
    data = client.blocking_key_value_get_bytes(key, int(seconds * 1000))
    _delete_once_read(key, absent, seconds)
    arrays, start = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves], 0
    for array in arrays:
        needed = array[index]
        array[index] = np.frombuffer(data, array.dtype, needed.size, start).reshape(needed.shape)
        start += needed.nbytes
    return treedef.unflatten(arrays)


def any_process(flag: bool) -> bool:
    """True if the flag is set in any process. All processes must call this, in the same order."""
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag)))) if several() else flag


def share(directory: Path) -> bool:
    """True if all processes see the files that process 0 writes into a directory. All processes must call this."""
    if not several():
        return True
    file, until = directory / from_main(partial(_leave, directory)), time.monotonic() + _SEEN
    while not (seen := file.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    shared = not any_process(not seen)
    if is_main():
        file.unlink(missing_ok=True)
    return shared


def _leave(directory: Path) -> str:
    """Writes an empty file with a new name, which no process can have cached, and returns the name."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".shared-", suffix=".tmp", dir=directory)
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}): choose another place") from error
    os.close(descriptor)
    return Path(path).name


@contextmanager
def together(code_of: Callable[[BaseException], int | None]) -> Iterator[None]:
    """If the block fails in this process and there are others, ends this process at once; the others then end, too.

    Otherwise it would wait at its end for the others, while they wait for it in a collective.

    code_of: returns the exit code of an error that is already printed, or None to print its traceback.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or not several():
            raise
        code = code_of(error)
        if code is None and _watch is not None and any(word in str(error) for word in _CUT_OFF):
            time.sleep(1.5 * _watch.seconds)  # in this time the watch names the process that failed first
        if code is None:
            traceback.print_exc()
        if code in (None, FAILED):
            print(
                f"process {jax.process_index()} of {jax.process_count()} ends, and with it the run: if the error above "
                "is that a connection was closed, another process failed first, and its output says why",
                file=sys.stderr,
            )
        elif not isinstance(error, KeyboardInterrupt):
            # All processes may have the same error, such as a bad config; the first must not cut off others' output.
            with suppress(Exception):
                jax.distributed.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED if code is None else code)
