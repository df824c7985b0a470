"""Multi-process runs: the processes agree on decisions.

Every process reads the same config and data, and dispatches the same programs in the same order. Everything that may
differ between processes (a signal, a clock, the score of a reward function) is decided once, by the functions here.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from jrlhf.errors import UserError
from jrlhf.meshes.mesh import absent_processes
from jrlhf.meshes.resharding import reshard
from jrlhf.meshes.transfers import to_host
from jrlhf.run.files import decode, encode

T = TypeVar("T")

_SEEN = 10.0  # seconds after which all processes see a new file on a common file system
_numbers = itertools.count()  # number the messages through the coordinator, equally in every process


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
