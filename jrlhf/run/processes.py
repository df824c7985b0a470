"""Several processes, one program: how they find each other, agree, and end together. One process pays nothing.

Every process reads the same config and data, and hands the same programs to the devices in the same order. What may
differ from one process to another (a signal, a clock, what a reward function said) is decided once, here.
"""

import itertools
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from jrlhf.config.schema import DistributedConfig
from jrlhf.errors import UserError

T = TypeVar("T")

NO_CLUSTER = "coordinator_address should be defined"  # what JAX says where no environment that it knows is there
TOO_LATE = "must be called before"
_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
_END = 60  # seconds that a process that is done waits for the others to be done, too
_numbers = itertools.count()  # of what process 0 told: the same in every process, as the calls are


def start(config: DistributedConfig) -> None:
    """Joins the other processes of this run, if there are such. To be called before JAX has started a backend.

    With mode=auto there are some where the config or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say
    so, and where JAX itself finds a cluster: Slurm, Open MPI, a TPU pod, an indexed job of Kubernetes.

    Raises:
        UserError: they do not find each other, or only part of what they need is said.
    """
    if config.mode == "off" or jax.distributed.is_initialized():
        return
    said = _said(config)
    # JAX would abort the process without a word of what it waited for.
    late = threading.Timer(config.timeout, _give_up, (_why(said, config),))
    late.daemon = True
    late.start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address=said["coordinator"],
            num_processes=said["processes"],
            process_id=said["process"],
            initialization_timeout=int(config.timeout) + 60,
            heartbeat_timeout_seconds=int(config.heartbeat),
            shutdown_timeout_seconds=_END,
        )
    except (ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        alone = said["coordinator"] is None and (NO_CLUSTER in reason or TOO_LATE in reason)
        if not alone:
            raise UserError(_why(said, config, reason)) from error
    finally:
        late.cancel()


def _give_up(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)


def _said(config: DistributedConfig) -> dict[str, Any]:
    """Coordinator, number of processes and number of this one, from the config or else from the environment.

    Raises:
        UserError: a coordinator without the numbers, where no cluster gives them, or the other way round.
    """
    said: dict[str, Any] = {}
    for name, variable in _VARIABLES.items():
        value = getattr(config, name)
        text = os.environ.get(variable)
        if value is None and text:
            if name != "coordinator" and not text.isdecimal():
                raise UserError(f"{variable}={text} must be a whole number: set it right, or set distributed.{name}")
            value = text if name == "coordinator" else int(text)
        said[name] = value
    if said["coordinator"] is None and (said["processes"] or said["process"]) is not None:
        known = next(name for name in ("processes", "process") if said[name] is not None)
        raise UserError(
            f"distributed.{known}={said[known]} without distributed.coordinator: set it to HOST:PORT of process 0 (or "
            f"{_VARIABLES['coordinator']}), or leave all of them out"
        )
    if said["processes"] is not None and said["process"] is not None and said["process"] >= said["processes"]:
        raise UserError(
            f"distributed.process={said['process']} with distributed.processes={said['processes']}: processes are "
            f"numbered from 0, set it to {said['processes'] - 1} at most"
        )
    return said


def _why(said: dict[str, Any], config: DistributedConfig, reason: str = "") -> str:
    if TOO_LATE in reason:
        return f"distributed.coordinator={said['coordinator']} comes too late: JAX runs already; restart the process"
    if "must be defined" in reason:
        lacking = [name for name in ("processes", "process") if said[name] is None]
        keys = " and ".join(f"distributed.{name} (or {_VARIABLES[name]})" for name in lacking)
        return f"distributed.coordinator={said['coordinator']} without {keys}, which no cluster says: set them, too"
    where = "of the cluster that JAX found" if said["coordinator"] is None else f"at {said['coordinator']}"
    return (
        f"the processes of this run did not all meet the coordinator {where} within "
        f"distributed.timeout={config.timeout:g} seconds{f' ({reason})' if reason else ''}: see that all of them run "
        "and reach process 0 there, or set distributed.mode=off"
    )


def several() -> bool:
    """Whether this run has more than one process."""
    return jax.process_count() > 1


def is_main() -> bool:
    """Whether this is process 0, which alone writes files, prints and runs reward functions."""
    return jax.process_index() == 0


def from_main(function: Callable[[], T], *, seconds: float = 3600.0) -> T:
    """What `function()` is in process 0, in every process; the others do not call it.

    To be called by all processes, from their main thread and in one order. The value is pickled and goes through the
    coordinator, no device takes part.

    seconds: that the others wait.

    Raises:
        UserError: process 0 raised it; all processes do.
        RuntimeError: process 0 failed in another way (and raises what it was), or said nothing in time.
    """
    if not several():
        return function()
    client = multihost.get_jax_distributed_client()
    key = f"jrlhf/{next(_numbers)}"
    if is_main():
        try:
            value = function()
        except BaseException as error:
            told = error if isinstance(error, UserError) else RuntimeError(f"process 0 failed: {error!r}")
            client.key_value_set_bytes(key, pickle.dumps((None, told)))
            raise
        client.key_value_set_bytes(key, pickle.dumps((value, None)))
    else:
        value, error = pickle.loads(client.blocking_key_value_get_bytes(key, int(seconds * 1000)))
        if error is not None:
            raise error
    client.wait_at_barrier(f"{key} is read", int(seconds * 1000))
    if is_main():
        client.key_value_delete(key)
    return value


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process: all of them then do the same. To be called by all, in one order."""
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag)))) if several() else flag


@contextmanager
def together(code_of: Callable[[BaseException], int | None]) -> Iterator[None]:
    """Where one of several processes fails in the block, it ends at once; the others then do.

    A process that fails alone would otherwise wait at its end for others, which wait for it in a collective.

    code_of: the exit code of an error that has been told already, or None for one whose traceback is to be printed.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or not several():
            raise
        code = code_of(error)
        if code is None:
            traceback.print_exc()
            print(
                f"process {jax.process_index()} of {jax.process_count()} ends, and with it the run: if the error above "
                "is that a connection was closed, another process failed first, and its output says why",
                file=sys.stderr,
            )
        elif not isinstance(error, KeyboardInterrupt):
            # All processes were told the same, a bad config say: who leaves first must not end the others' sentences.
            with suppress(Exception):
                jax.distributed.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if code is None else code)
