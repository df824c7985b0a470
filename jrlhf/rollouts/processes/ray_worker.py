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
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from jrlhf.errors import RunFailure, UserError, one_line
from jrlhf.rollouts.processes.shared import SharedArrays
from jrlhf.run.child import Worker
from jrlhf.run.files import decode, encode

TRAVEL = 5.0  # minimum seconds that are added to a deadline for the transfer of arrays; otherwise a tenth of it
RESERVED = 5.0  # seconds in which a cluster with room for a process has reserved it; Ray itself takes milliseconds
NO_ROOM = "no room"  # the failure of a request if no machine has room for the process
_stored: WeakKeyDictionary[SharedArrays, Any] = WeakKeyDictionary()  # references to Ray's object store
_storing = threading.Lock()  # requests to the processes come from several threads


def check_package() -> None:
    """Raises UserError without Ray."""
    if find_spec("ray") is None:
        raise UserError("fleet.engine=ray needs the package ray: pip install 'jrlhf[ray]'")


@contextmanager
def joined() -> Iterator[None]:
    """Joins the Ray cluster of this machine, or that of the environment variable RAY_ADDRESS, and leaves it at the end.

    A process that has joined a cluster before stays in it. Raises UserError without a cluster.
    """
    import ray  # an optional dependency

    with ExitStack() as leaving:
        if not ray.is_initialized():
            _join()
            leaving.callback(ray.shutdown)
        yield


def total_places(gpus: int) -> int:
    """Returns for how many processes with `gpus` GPUs each the cluster has CPUs and GPUs."""
    import ray

    return _places(ray.cluster_resources(), gpus)


def free_places(gpus: int) -> int:
    """Returns for how many processes with `gpus` GPUs each CPUs and GPUs are free, as of about a second ago."""
    import ray

    return _places(ray.available_resources(), gpus)


def _places(resources: Mapping[str, float], gpus: int) -> int:
    return int(min(resources.get("CPU", 0), resources.get("GPU", 0) / gpus if gpus else math.inf))


def _join() -> None:
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    address, latest = os.environ.get("RAY_ADDRESS", "auto"), _latest_cluster()
    remedy = "start it with ray start --head, or set RAY_ADDRESS to the address of another one"
    try:
        if address in ("", "auto"):
            address = latest.read_text().strip() if latest.exists() else ""
        else:
            remedy = f"see that it runs at RAY_ADDRESS={address}, which must be HOST:PORT"
        if address and "://" not in address:  # Ray would look for minutes for one that has ended
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray has a type for each step that may fail
        reason = one_line(error)
        if "AuthenticationError" in str(error.__cause__):
            remedy, reason = "set RAY_AUTH_MODE=token", "the cluster asks for a token"
        raise UserError(f"fleet.engine=ray cannot join a Ray cluster: {remedy} ({reason})") from error
    finally:
        if threading.current_thread() is threading.main_thread():  # only here Ray sets, and Python allows, handlers
            for number, handler in handlers.items():  # Ray replaces the handler of SIGTERM, which asks a run to save
                signal.signal(number, handler)


def _latest_cluster() -> Path:
    """Returns the file in which Ray stores the address of the latest cluster that this machine started or joined."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder) / "ray" / "ray_current_cluster"


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
        from ray.exceptions import RayError
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: Any = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        try:
            # A group says whether a machine has room; an actor alone does not say why it waits.
            self._group = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}])
            place = PlacementGroupSchedulingStrategy(self._group)
            actor: Any = ray.remote(**options, scheduling_strategy=place)(_Host)
            self._host = actor.remote(dict(environment))
        except RayError as error:
            raise RunFailure(f"the Ray cluster does not answer ({one_line(error)})") from error
        self._gpus, self._log, self._reserved = gpus, log, False

    def _reserve(self) -> bool:
        """True as soon as a machine has room for the process; False if none has, or if it was ended meanwhile."""
        try:
            self._reserved = self._reserved or self._group.wait(RESERVED)
        except Exception:  # Ray has no type for a group that was removed
            return False
        return self._reserved

    def request(self, body: bytes, seconds: float, shared: SharedArrays | None = None) -> Mapping[str, Any]:
        """Does what `LocalWorker.request` does. shared: arrays that the request names by their path."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        if not self._reserve():
            self.kill()
            gpus = f" and {self._gpus} free GPU(s)" if self._gpus else ""
            return {"failure": NO_ROOM, "detail": f"no machine of the Ray cluster has a free CPU{gpus}"}
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
        return answer if content is None else {"shared": SharedArrays.copied(content.data)}

    def interrupt(self) -> None:
        """Ends the process; a request that waits for it ends at once."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            ray.kill(self._host)
            remove_placement_group(self._group)

    kill = interrupt


class _Host:
    """The Ray actor: owns a process of its machine, and copies of the arrays that requests and answers name."""

    def __init__(self, environment: Mapping[str, str]):
        self._output = bytearray()
        self._worker = Worker("jrlhf.rollouts.processes.worker", {**os.environ, **environment}, self._output.extend)
        self._worker.longest = math.inf  # no limit, as for a process of this machine

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
