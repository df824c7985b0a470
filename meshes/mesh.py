"""The device mesh. This is the only place where its axes are named. Simulated devices."""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

AXES = ("data", "fsdp", "tensor")
Device: TypeAlias = Any  # jax.Device, which type checkers do not know, because jaxlib has no stubs
POOL = 8  # threads for each simulated device: for one running program, and for those of other dispatching threads
NO_DEADLINE = "--xla_cpu_collective_call_terminate_timeout_seconds=-1"


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    devices: Sequence[Device] | None = None,
    axis_type: AxisType = AxisType.Explicit,
) -> Mesh:
    """Returns a `("data", "fsdp", "tensor")` mesh over `devices` (default: all of them).

    axis_type: of all axes. Explicit, the default, makes shardings a part of the types of arrays: programs then need
    `jax.set_mesh(mesh)` around them, and an operation whose result could be divided in two ways needs `out_sharding=`.
    With `AxisType.Auto` the compiler chooses, as on a mesh from `jax.sharding.Mesh`.

    At most one size may be -1: it is computed from the others. `tensor` is the innermost axis, so its collectives, the
    most frequent ones, run between neighbouring devices.

    Raises ValueError for sizes that do not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    described = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh {described}: every axis must be a positive integer, or -1 for one of them")
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        raise ValueError(f"mesh {described}: only one axis may be -1")
    if unknown:
        divisor = int(np.prod([size for size in sizes.values() if size != -1]))
        if count % divisor:
            raise ValueError(f"mesh {described}: {divisor} does not divide the {count} devices")
        sizes[unknown[0]] = count // divisor
    product = int(np.prod(list(sizes.values())))
    if product != count:
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        raise ValueError(
            f"mesh {described} needs {product} devices, but there are {count}: "
            f"choose sizes whose product is {count} (its divisors are {', '.join(map(str, divisors))})"
        )
    # Mesh and not jax.make_mesh, because it keeps the caller's device order, also for a slice of the devices.
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), AXES, axis_types=(axis_type,) * len(AXES))


def mesh_of(sharding: Sharding) -> Mesh:
    """The mesh of an array's sharding; it has devices, unlike that of a traced array."""
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def simulate_devices(count: int) -> None:
    """Makes JAX run on this number of devices, which the CPU simulates: `jax.devices()` lists them.

    Raises RuntimeError if JAX has already started, which the first array or the first look at its devices does.
    """
    jax.config.update("jax_num_cpu_devices", count)  # first, because it raises
    jax.config.update("jax_platforms", "cpu")
    prepare_simulated(count)


def prepare_simulated(count: int) -> None:
    """Prevents XLA's CPU client from ending the process because simulated devices wait for each other.

    Each device of a program waits in a thread of one pool. Programs beyond the 32 that may run at a time wait there,
    too, on all devices: one for each Python thread that dispatches programs. By default the pool has as many threads as
    devices, so none is left to run the programs that they wait for. And on a busy machine one device may be a minute
    later than the others, which makes XLA end the process. A flag that the user sets comes later and overrides this.

    Two or three threads may dispatch programs of several devices. With seven, on a busy machine, programs were seen to
    wait for ever, with a larger pool, too.
    """
    os.environ.setdefault("NPROC", str(max(POOL * count, os.cpu_count() or 1)))
    flags = os.environ.get("XLA_FLAGS", "")
    if NO_DEADLINE not in flags:
        os.environ["XLA_FLAGS"] = f"{NO_DEADLINE} {flags}".strip()


@lru_cache(maxsize=1024)
def absent_processes(mesh: Mesh) -> list[Device]:
    """The first device of each process that has none in `mesh`."""
    present = {device.process_index for device in mesh.devices.flat}
    first = {device.process_index: device for device in reversed(jax.devices())}
    return [first[process] for process in sorted(first) if process not in present]
