"""Rollout processes on the machines of a Ray cluster.

Ray chooses the machine, reserves its devices, starts an actor there, reports its death, and transfers arrays through
its object store. The actor starts the same process as on one machine and passes requests on to it.
"""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from jrlhf.errors import UserError, first_line
from jrlhf.fleet.shared import SharedArrays
from jrlhf.run.child import Worker
from jrlhf.run.files import decode, encode

TRAVEL = 5.0  # minimum seconds that are added to a deadline for the transfer of arrays; otherwise a tenth of it
_stored: WeakKeyDictionary[SharedArrays, Any] = WeakKeyDictionary()  # references to Ray's object store
_storing = threading.Lock()  # requests to the processes come from several threads


def check_package() -> None:
    """Raises UserError without Ray."""
    if find_spec("ray") is None:
        raise UserError("fleet.engine=ray needs the package ray: pip install 'jrlhf[ray]'")


@contextmanager
def joined(workers: int, gpus: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Joins the Ray cluster of this machine, or that of the environment variable RAY_ADDRESS, and leaves it at the end.

    A process that has joined a cluster before stays in it. workers: number of processes; each needs a CPU and `gpus`
    GPUs. Raises UserError without a cluster.
    """
    import ray  # an optional dependency

    with ExitStack() as leaving:
        if not ray.is_initialized():
            _join()
            leaving.callback(ray.shutdown)
        if too_few := lacking(workers, gpus):
            tell(f"{too_few}: they wait for more")
        yield


def lacking(workers: int, gpus: int) -> str:
    """Returns what the cluster lacks for this number of processes with `gpus` GPUs each; empty: nothing."""
    import ray

    resources = ray.cluster_resources()
    for name, needed in (("CPU", workers), ("GPU", workers * gpus)):
        if (there := resources.get(name, 0)) < needed:
            return f"Ray has {there:g} {name}(s), and the rollout processes need {needed}"
    return ""


def _join() -> None:
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    address = os.environ.get("RAY_ADDRESS", "auto")
    remedy = "start it with ray start --head, or set RAY_ADDRESS to the address of another one"
    try:
        if address not in ("", "auto") and "://" not in address:  # Ray would look for it for minutes
            remedy = f"see that it runs at RAY_ADDRESS={address}, which must be HOST:PORT"
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray has a type for each step that may fail
        reason = first_line(error)
        if "AuthenticationError" in str(error.__cause__):
            remedy, reason = "set RAY_AUTH_MODE=token", "the cluster asks for a token"
        raise UserError(f"fleet.engine=ray cannot join a Ray cluster: {remedy} ({reason})") from error
    finally:
        if threading.current_thread() is threading.main_thread():  # only here Ray sets, and Python allows, handlers
            for number, handler in handlers.items():  # Ray replaces the handler of SIGTERM, which asks a run to save
                signal.signal(number, handler)


def _store(shared: SharedArrays) -> Any:
    """Returns the reference to arrays in Ray's object store. Puts them there once, for all processes."""
    import ray

    with _storing:
        if shared not in _stored:
            _stored[shared] = ray.put(np.fromfile(shared.path, np.uint8))
        return _stored[shared]


class RayWorker:
    """A rollout process in a Ray cluster, with the interface of `Worker`."""

    def __init__(self, environment: Mapping[str, str], log: Callable[[bytes], None], *, gpus: int):
        import ray

        actor: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Host)
        self._gpus, self._host, self._log = gpus, actor.remote(dict(environment)), log
        self._arrays: SharedArrays | None = None
        self._started = False

    def request(self, body: bytes, seconds: float, shared: SharedArrays | None = None) -> Mapping[str, Any]:
        """Returns the answer to a request, as `Worker.request` does. shared: arrays that it names by their path."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        if not self._started and not ray.wait([self._host.ready.remote()], timeout=seconds)[0]:
            self.kill()
            cpus, gpus = (ray.available_resources().get(name, 0) for name in ("CPU", "GPU"))
            free = f"{cpus:g} CPUs and {gpus:g} GPUs are free, and it needs 1 and {self._gpus} of one machine"
            return {"failure": "hang", "detail": f"Ray started none within {seconds:g} s: {free}"}
        self._started = True
        begin = time.monotonic()
        try:
            arrays = () if shared is None else (shared.path, _store(shared))
            asked = self._host.request.remote(body, seconds, *arrays)
            answer, output, content = ray.get(asked, timeout=seconds + max(TRAVEL, seconds / 10))
        except GetTimeoutError:
            self.kill()
            return {"failure": "hang", "detail": f"no answer within {seconds:g} s"}
        except RayError as error:
            self.kill()
            reason = str(error).strip().rpartition("\n")[2]  # after the actor's traceback
            return {"failure": "crash", "detail": f"after {time.monotonic() - begin:.0f} s, saying {reason!r}"}
        self._log(output)
        if "failure" in answer:
            self.kill()
        if content is None:
            return answer
        self._arrays = SharedArrays.copied(content.data)
        return {"answer": encode(self._arrays.path)}

    def interrupt(self) -> None:
        """Ends the process; a request that waits for it ends at once."""
        import ray

        if ray.is_initialized():
            ray.kill(self._host)

    kill = interrupt


class _Worker(Worker):
    longest = math.inf  # no limit, as for a process of this machine


class _Host:
    """The Ray actor: owns a process of its machine, and copies of the arrays that requests and answers name."""

    def __init__(self, environment: Mapping[str, str]):
        self._output = bytearray()
        self._worker = _Worker("jrlhf.fleet.worker", {**os.environ, **environment}, self._output.extend)

    def ready(self) -> None:
        """Returns when the actor has started."""

    def request(
        self, body: bytes, seconds: float, path: str = "", content: np.ndarray | None = None
    ) -> tuple[Mapping[str, Any], bytes, np.ndarray | None]:
        """Returns the answer, the process's output so far, and the arrays of the file that the answer names."""
        if content is not None:
            copy = SharedArrays.copied(content.data)
            body = body.replace(encode(path).encode(), encode(copy.path).encode())
        answer = self._worker.request(body, seconds)
        output = bytes(self._output)
        del self._output[: len(output)]  # a thread may append meanwhile
        named = decode(answer.get("answer", "null"))
        return answer, output, np.fromfile(named, np.uint8) if isinstance(named, str) else None
