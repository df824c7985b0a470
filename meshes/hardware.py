"""Data of accelerators: memory, peak rates and links of each device, and clusters of them."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import jax.numpy as jnp

from jrlhf.meshes.mesh import Device


@dataclass(frozen=True)
class Peak:
    """Peak rates of one device: the denominators of utilisation.

    bandwidth: bytes per second of its memory. bfloat16, float32: dense operations per second, without sparsity. float32
    is the rate of a matrix product in JAX's default precision: TF32 on NVIDIA GPUs from Ampere on, one bfloat16 product
    on TPUs. hardware: the entry of `HARDWARE` for clusters of this device, "" without one.
    """

    bandwidth: float
    bfloat16: float
    float32: float
    hardware: str = ""

    def operations(self, dtype: Any) -> float:
        """Operations a second of products of this dtype."""
        return self.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else self.float32


# By `device_kind`, from the makers' data sheets. A rate that a sheet states only with sparsity is halved.
PEAKS = {
    "NVIDIA B200": Peak(8.0e12, 2250e12, 1125e12, "b200"),
    "NVIDIA H200": Peak(4.8e12, 989e12, 494e12, "h200"),
    "NVIDIA H100 80GB HBM3": Peak(3.35e12, 989e12, 494e12, "h100"),
    "NVIDIA H100 NVL": Peak(3.9e12, 835e12, 417e12),
    "NVIDIA H100 PCIe": Peak(2.0e12, 756e12, 378e12),
    "NVIDIA A100-SXM4-80GB": Peak(2.039e12, 312e12, 156e12, "a100"),
    "NVIDIA A100-SXM4-40GB": Peak(1.555e12, 312e12, 156e12),
    "NVIDIA A100 80GB PCIe": Peak(1.935e12, 312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": Peak(1.555e12, 312e12, 156e12),
    "NVIDIA L40S": Peak(0.864e12, 362e12, 183e12),
    "NVIDIA L4": Peak(0.3e12, 121e12, 60e12),
    "Tesla T4": Peak(0.32e12, 8.1e12, 8.1e12),  # has no bfloat16 units
    "TPU v4": Peak(1.228e12, 275e12, 275e12),
    "TPU v5 lite": Peak(0.819e12, 197e12, 197e12, "v5e"),
    "TPU v5e": Peak(0.819e12, 197e12, 197e12, "v5e"),
    "TPU v5": Peak(2.765e12, 459e12, 459e12, "v5p"),
    "TPU v5p": Peak(2.765e12, 459e12, 459e12, "v5p"),
    "TPU v6 lite": Peak(1.64e12, 918e12, 918e12, "v6e"),
    "TPU v6e": Peak(1.64e12, 918e12, 918e12, "v6e"),
}


def peak_of(device: Device) -> Peak | None:
    """The peak rates of a device; None if they are not known."""
    return PEAKS.get(device.device_kind)


@dataclass(frozen=True)
class Hardware:
    """One device and its links. Rates are the makers'; fractions are the parts of them that programs reach.

    memory: bytes of a device. bandwidth: bytes per second of that memory.
    bfloat16, float32: dense operations per second, as in `Peak`.
    node: number of devices that share the fast link: those of a host, or of a whole slice on TPUs.
    link, network: bytes per second that a device sends to others of its node, to other nodes.
    host: bytes per second between a device and its host's memory.
    infer, train: fraction of the operations that matrix products of whole sequences reach, forward and in training.
    decode: fraction of the bandwidth that decoding reaches.
    launch: seconds per layer in addition to bytes and operations. latency: the same per collective.
    per_host: number of devices of a host, which belong to one process.
    collective: fraction of links and network that collectives reach. stream: fraction of the bandwidth that elementwise
        work reaches.
    platform: its name in JAX, "gpu" or "tpu".
    calibration: what the fractions were measured on, and what is assumed.
    """

    name: str
    memory: float
    bandwidth: float
    bfloat16: float
    float32: float
    node: int
    link: float
    network: float
    host: float
    infer: float
    train: float
    decode: float
    launch: float
    latency: float
    per_host: int = 8
    collective: float = 0.75
    stream: float = 0.85
    platform: Literal["gpu", "tpu"] = "gpu"
    calibration: str = "nothing; all fractions are assumed"


@dataclass(frozen=True)
class Cluster:
    """`devices` of one hardware: whole nodes, or a part of one."""

    hardware: Hardware
    devices: int

    @property
    def node(self) -> int:
        """Number of devices of a node, or of the whole cluster if that is smaller."""
        return min(self.hardware.node, self.devices)

    @property
    def hosts(self) -> int:
        return -(-self.devices // self.hardware.per_host)


def _gpu(name: str, memory: float, link: float, network: float, host: float) -> Hardware:
    """Builds an NVIDIA node of eight.

    The fractions and `launch` were measured with this program on an H200 (benchmarks/NOTES.md): products ran at 771 of
    989 TFLOP/s in training, a copy at 4.17 of 4.8 TB/s; decode steps fit 15 us per layer plus the necessary bytes at
    0.72 of the bandwidth. Other GPUs are assumed to have the same fractions. Collectives are assumed to reach three
    quarters of the link, as NCCL's bus bandwidth does with large messages; 20 us is the time of its small all-reduces
    in a node.
    """
    rest: Any = {"infer": 0.78, "train": 0.78, "decode": 0.72, "launch": 15e-6, "latency": 20e-6}
    rest["calibration"] = "programs on one H200; what collectives reach is assumed"
    if name != "h200":
        rest["calibration"] += f", and that a {name} reaches the fractions of an H200"
    return Hardware(name, memory, *_rates(name), 8, link, network, host, **rest)


def _tpu(name: str, memory: float, node: int, link: float, network: float, host: float, per_host: int = 8) -> Hardware:
    """Builds a TPU slice. A program is one queue of compiled operations, without launches by the host in between.

    The fractions were not measured. They are those of GPUs except for products, where public training runs (MaxText)
    reach 0.6 to 0.7 of the peak.
    """
    rest: Any = {"infer": 0.8, "train": 0.8, "decode": 0.6, "launch": 4e-6, "latency": 4e-6}
    return Hardware(name, memory, *_rates(name), node, link, network, host, **rest, per_host=per_host, platform="tpu")


def _rates(name: str) -> tuple[float, float, float]:
    peak = next(peak for peak in PEAKS.values() if peak.hardware == name)
    return peak.bandwidth, peak.bfloat16, peak.float32


# memory: what the device reports as usable. GPUs: data sheets of A100, H100, H200 and B200 SXM, whose NVLink figures
# are of both directions together and halved here; an InfiniBand port a GPU (HDR 200 Gb/s, NDR 400) as in DGX A100, H100
# and B200; PCIe of generation 4 and 5 at sixteen lanes. TPUs: Google Cloud's pages of each version and "How to scale
# your model" (one-way rates of an ICI link; two links are counted, the two directions of one axis of the torus: a mesh
# axis is usually placed along one).
HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100", 84_987_740_160, 300e9, 25e9, 32e9),
        _gpu("h100", 84_942_979_072, 450e9, 50e9, 64e9),
        _gpu("h200", 151_397_597_184, 450e9, 50e9, 64e9),
        _gpu("b200", 191_500_000_000, 900e9, 50e9, 64e9),
        _tpu("v5e", 15.75 * 2**30, 256, 90e9, 3.125e9, 16e9),
        _tpu("v5p", 95.74 * 2**30, 8960, 180e9, 6.25e9, 16e9, per_host=4),
        _tpu("v6e", 31.25 * 2**30, 256, 180e9, 12.5e9, 32e9),
    )
}

# A v5p's name counts TensorCores; two of them are one device.
_CORES = {"v5p": 2}
_MOST = 2**14  # maximum number of GPUs of a cluster


def hardware_of(device: Device) -> Hardware | None:
    """The hardware of a device; None if it is not known."""
    peak = peak_of(device)
    return None if peak is None else HARDWARE.get(peak.hardware)


def cluster(text: str) -> Cluster:
    """Parses the name of a cluster: `16xh100` is sixteen GPUs in nodes of eight, `v5p-512` a TPU slice, and so is
    `v5litepod-16`, Google's name of a v5e-16.

    Raises ValueError, one sentence with the nearest valid name, if there is no such hardware or number of devices.
    """
    match = re.fullmatch(r"(\d+)x([a-z]\w*)|(v\d\w*)-(\d+)", text.lower().replace("v5litepod", "v5e"))
    if match is None:
        raise ValueError(f"cluster={text} must be a number and a GPU such as 16xh100, or a TPU slice such as v5p-512")
    sliced = match[3] is not None
    name, count = (match[3], int(match[4])) if sliced else (match[2], int(match[1]))

    def written(name: str, count: int) -> str:
        return f"{name}-{count}" if sliced else f"{count}x{name}"

    names = [candidate for candidate in HARDWARE if (HARDWARE[candidate].platform == "tpu") == sliced]
    if name not in names:
        if name in HARDWARE:
            raise ValueError(
                f"cluster={text} is not how a TPU slice is named: write {name}-{count * _CORES.get(name, 1)}"
            )
        near = [written(candidate, count) for candidate in get_close_matches(name, names, 1, 0.0 if sliced else 0.6)]
        remedy = f"the nearest is {near[0]}" if near else "measure others where they are, by jrlhf.plan --profile"
        raise ValueError(f"cluster={text} is of no known hardware ({', '.join(HARDWARE)}): {remedy}")
    hardware, cores = HARDWARE[name], _CORES.get(name, 1)
    sizes = _slices(hardware, cores) if sliced else _whole_nodes(hardware, count)
    if count not in sizes:
        near = written(name, min(sizes, key=lambda size: (abs(size - count), -size)))
        parts = "a power of two"
        if not sliced:
            parts += f" up to {hardware.node}, or whole nodes of {hardware.node} up to {_MOST}"
        raise ValueError(f"cluster={text} does not exist: {name} come as {parts}, the nearest is {near}")
    return Cluster(hardware, count // cores)


def _whole_nodes(hardware: Hardware, count: int) -> list[int]:
    """Valid numbers of devices near `count`: whole nodes, or a part of one."""
    whole = min(count, _MOST - hardware.node) // hardware.node * hardware.node
    return [1, 2, 4, hardware.node, *(size for size in (whole, whole + hardware.node) if size > 0)]


def _slices(hardware: Hardware, cores: int) -> list[int]:
    """The numbers in Google's names of slices: from the four chips of a host up to a whole pod."""
    sizes = [chips * cores for chips in (2**power for power in range(2, 14)) if chips <= hardware.node]
    return sizes if cores > 1 else [1, *sizes]
