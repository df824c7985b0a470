"""Devices: selects the backend that JAX runs on. `select` must run before JAX has started one."""

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jrlhf.config.devices import DeviceConfig, DistributedConfig
from jrlhf.errors import UserError, one_line
from jrlhf.meshes.mesh import Device, prepare_simulated
from jrlhf.run import cluster
from jrlhf.run.files import cache_directory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BLOCK, KEPT_MEMORY = 1 << 30, (1 << 31) - 1  # bytes: the largest block that malloc keeps, and their total
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def select(config: DeviceConfig, distributed: DistributedConfig | None = None) -> list[Device]:
    """Selects the platform, and on CPU the number of simulated devices; returns the devices of all processes.

    On CPU malloc then keeps freed memory, see `keep_freed_memory`. distributed: None for a process on its own.
    """
    try:
        if config.platform != "auto":
            jax.config.update("jax_platforms", _PLATFORMS[config.platform])
        if config.simulated is not None:
            prepare_simulated(config.simulated)
            jax.config.update("jax_num_cpu_devices", config.simulated)
    except RuntimeError:
        pass  # JAX has already started, as in a notebook; its devices are checked below
    if distributed is not None:
        cluster.start(distributed)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts, without a text, if it has no such plugin
        reason = one_line(error) if str(error) else "JAX has no plugin for it"
        raise UserError(
            f"device.platform={config.platform} is not available here ({reason}): set it to auto or cpu; for a dry run "
            "set device.platform=cpu device.simulated=8, or as many as there will be"
        ) from error
    running = devices[0].platform
    if config.platform != "auto" and running != config.platform:
        raise UserError(
            f"device.platform={config.platform} comes too late: JAX already runs on {running}; restart the process, or "
            "set device.platform=auto"
        )
    if config.simulated is not None and (running != "cpu" or jax.local_device_count() != config.simulated):
        raise UserError(
            f"device.simulated={config.simulated} asks for that many CPU devices, but JAX already runs on "
            f"{jax.local_device_count()} {running} device(s): restart the process, or leave device.simulated out"
        )
    if running == "cpu":
        keep_freed_memory()
    keep_programs(running)
    return devices


def keep_programs(platform: str) -> None:
    """Stores the compiled programs of a single-process run on disk, so that a resumed run does not compile them again.

    The directory is `~/.cache/jrlhf/programs`, or that in JAX_COMPILATION_CACHE_DIR. JAX_ENABLE_COMPILATION_CACHE=false
    switches this off.

    Several CPU devices, of one process or of several, never store programs: XLA loses the order of the collectives of a
    program that it reads from disk, so two devices may wait for each other for ever (seen with jax 0.10.2).
    """
    settings = jax.config.values
    if platform == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.process_count() > 1:
        return
    elif settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "programs"))


def keep_freed_memory() -> bool:
    """Makes glibc's malloc keep freed blocks of up to 1 GiB for later allocations; returns whether it does.

    XLA's CPU client allocates a program's temporary memory anew in every call. By default malloc returns blocks beyond
    32 MiB to the system at once, which then zeroes them again page by page.
    """
    with suppress(AttributeError, TypeError):  # there is another libc, or none
        mallopt = ctypes.CDLL(None).mallopt
        # An older glibc refuses this threshold; with the other one alone it would map even small blocks.
        return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK) and mallopt(_M_TRIM_THRESHOLD, KEPT_MEMORY))
    return False


def host_memory() -> float:
    """Returns the bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def accelerator() -> str | None:
    """Returns `gpu` or `tpu` if the machine seems to have one, whether JAX uses it or not."""
    nvidia = any(Path(place).exists() for place in ("/proc/driver/nvidia/version", "/dev/nvidia0"))
    if nvidia or shutil.which("nvidia-smi") is not None:
        return "gpu"
    devices = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    if devices or "TPU_ACCELERATOR_TYPE" in os.environ:
        return "tpu"
    return None


def idle_accelerator() -> str | None:
    """Returns a warning if the machine has an accelerator that JAX does not use."""
    present = accelerator() if jax.default_backend() == "cpu" else None
    if present == "gpu":
        return "an NVIDIA GPU is present but JAX runs on the CPU: install jrlhf[cuda12] or jrlhf[cuda13], then restart"
    if present == "tpu":
        return "a TPU seems to be present but JAX runs on the CPU: install jrlhf[tpu], then restart"
    return None


def machine_settings() -> dict[str, Any]:
    """Returns settings that use all devices of this machine's accelerator; {} without an accelerator."""
    if accelerator() is None:
        return {}
    return {"device": {"platform": "auto", "simulated": None}, "mesh": {"data": 1, "fsdp": -1, "tensor": 1}}
