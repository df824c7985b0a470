"""Hardware that programs can be compiled for without having it, and the compilers that do it."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from jax.experimental import topologies

from jrlhf.errors import UserError

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jrlhf" / "aot"
GB = 1e9


@dataclass(frozen=True)
class Target:
    """Hardware to compile for.

    memory: bytes of a device. topology: as the platform's compiler writes it; on GPUs slices x hosts x GPUs of a host.
    bandwidth: of a GPU's memory, bytes a second.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    topology: str
    memory: int
    chip: str = ""
    bandwidth: int = 0

    @property
    def devices(self) -> int:
        return math.prod(int(size) for size in self.topology.split(":")[-1].split("x"))


def _hopper(chip: str, hosts: int, gpus: int, memory: int, bandwidth: int) -> Target:
    name = f"{chip.lower()}x{hosts * gpus}"
    return Target(name, "cuda", f"1x{hosts}x{gpus}", memory, f"NVIDIA {chip}", bandwidth)


def _h200(hosts: int, gpus: int = 8) -> Target:
    return _hopper("H200", hosts, gpus, 151_397_597_184, 4_800_000_000_000)


def _h100(hosts: int, gpus: int = 8) -> Target:
    return _hopper("H100", hosts, gpus, 84_942_979_072, 3_352_320_000_000)


# A v5p's name counts TensorCores, two a chip, and its two are one device; a v6e's counts chips.
TARGETS = {
    target.name: target
    for target in (
        _h200(1, 1),
        _h200(1),
        _h200(2),
        _h200(8),
        _h100(1, 1),
        _h100(1),
        _h100(8),
        Target("v5e-1", "tpu", "v5e:1x1", int(15.75 * 2**30)),
        Target("v5p-8", "tpu", "v5p:2x2x1", int(95.74 * 2**30)),
        Target("v5p-128", "tpu", "v5p:4x4x4", int(95.74 * 2**30)),
        Target("v5p-512", "tpu", "v5p:4x8x8", int(95.74 * 2**30)),
        Target("v6e-8", "tpu", "v6e:2x4", int(31.25 * 2**30)),
    )
}


def devices_of(target: Target) -> Sequence[Any]:
    """Devices that can be compiled for, and nothing else."""
    if target.platform == "tpu":
        single = {"chips_per_host_bounds": (1, 1, 1)} if target.devices == 1 else {}  # a host has four otherwise
        return topologies.get_topology_desc(target.topology, platform="tpu", **single).devices
    described = {"target_config": hopper_description(target), "topology": target.topology}
    return topologies.get_topology_desc(target.chip, platform="cuda", **described).devices


def hopper_description(target: Target) -> str:
    """What XLA asks a GPU of compute capability 9.0 about itself: a text-format `stream_executor.GpuTargetConfigProto`.

    The numbers are those of the CUDA programming guide's table of technical specifications and of NVIDIA's datasheets.
    """
    return f"""
        platform_name: "CUDA"
        device_description_str: "{target.chip}"
        dnn_version_info {{ major: 9 minor: 10 }}
        gpu_device_info {{
          name: "{target.chip}" device_vendor: "NVIDIA Corporation"
          cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
          core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
          device_memory_size: {target.memory} memory_bandwidth: {target.bandwidth} device_address_bits: 64
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
          pcie_bandwidth: 34359738368 device_interconnect_info {{ active_links: 18 }}
          driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0"
        }}
    """


# ---- compilers


def compiler_environment(target: Target) -> dict[str, str]:
    """What a process needs to compile for `target`; installs the compiler if it is not there yet.

    Raises:
        UserError: it cannot be installed.
    """
    package = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}[target.platform]
    packages = [requirement(package)]
    if target.platform == "cuda":
        packages.append(packages[0].replace("plugin", "pjrt"))
    directory = CACHE / f"{package}-{metadata.version('jax')}"
    if not directory.exists():
        _install(packages, directory)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if target.platform == "tpu":
        library = str(directory / "libtpu" / "libtpu.so")
        return environment | {
            "TPU_LIBRARY_PATH": library,
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # others on this machine may compile, too
        }
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def requirement(package: str) -> str:
    """The package at the version that JAX asks for in one of its extras."""
    for requirement in metadata.requires("jax") or ():
        name, _, _ = requirement.partition(";")
        bare = name.replace("[with-cuda]", "").strip()
        if bare.startswith(package) and not bare[len(package)].isalnum():
            return bare
    raise UserError(f"jax {metadata.version('jax')} names no version of {package}: --target cannot be compiled for")


def _install(packages: Sequence[str], directory: Path) -> None:
    print(f"installing {' and '.join(packages)} into {directory} (0.5 GB, once)", flush=True)
    unfinished = directory.with_suffix(".part")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(unfinished)]
    if subprocess.run([*command, *packages]).returncode != 0:
        raise UserError(f"pip cannot install {' '.join(packages)} into {unfinished}: see above")
    unfinished.rename(directory)
