"""What clusters are made of: devices with their memory and rates, and the links between them."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from jrlhf.meshes.mesh import Device
from jrlhf.meshes.peaks import PEAKS


@dataclass(frozen=True)
class Hardware:
    """One device and its links. Rates are the makers'; what of them is reached is in the fractions.

    memory: bytes of a device. bandwidth: of that memory, bytes a second.
    bfloat16, float32: dense operations a second, as in `meshes.peaks`.
    node: devices that share the fast link: one host's, or a whole slice's on TPUs.
    link, network: bytes a second that a device sends to others of its node, to other nodes.
    host: bytes a second between a device and its host's memory.
    infer, train: of the operations, what matrix products of whole sequences reach, forward and in training. decode: of
        the bandwidth, what decoding does.
    launch: seconds of a layer beyond its bytes and operations. latency: of a collective beyond its bytes.
    per_host: devices of a host, which one process has.
    collective: of links and network, what collectives reach. stream: of the bandwidth, what elementwise work does.
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


@dataclass(frozen=True)
class Cluster:
    """`devices` of one hardware: whole nodes, or a part of one."""

    hardware: Hardware
    devices: int

    @property
    def node(self) -> int:
        """Devices of a node, as far as there are."""
        return min(self.hardware.node, self.devices)

    @property
    def hosts(self) -> int:
        """Their number."""
        return -(-self.devices // self.hardware.per_host)


def _gpu(kind: str, name: str, memory: float, link: float, network: float, host: float) -> Hardware:
    """An NVIDIA node of eight.

    The fractions and `launch` are those of this program on an H200 (benchmarks/NOTES.md): products ran at 771 of 989
    TFLOP/s in training, a copy at 4.17 of 4.8 TB/s; decode steps fit 15 us a layer and 0.6 of the bandwidth, counting
    the bytes that are needed. Other GPUs are taken to be like it, and collectives to reach three quarters of the link,
    as NCCL's bus bandwidth does at large messages; 20 us is what its small all-reduces in a node take.
    """
    peak = PEAKS[kind]
    rates = peak.memory, peak.bfloat16, peak.float32
    return Hardware(
        name, memory, *rates, 8, link, network, host, infer=0.78, train=0.78, decode=0.6, launch=15e-6, latency=20e-6
    )


def _tpu(kind: str, memory: float, node: int, link: float, network: float, host: float, per_host: int = 8) -> Hardware:
    """A TPU slice. Its program is one queue of compiled operations: nothing is launched from the host in between.

    The fractions are not measured here: GPUs', but for products, of which public training runs (MaxText) reach 0.6 to
    0.7 of the peak as a whole.
    """
    peak = PEAKS[f"TPU {kind}"]
    rates = peak.memory, peak.bfloat16, peak.float32
    fractions = {"infer": 0.8, "train": 0.8, "decode": 0.6}
    return Hardware(
        kind, memory, *rates, node, link, network, host, **fractions, launch=4e-6, latency=4e-6, per_host=per_host
    )


# memory: what the device reports as usable. GPUs: data sheets of A100, H100, H200 and B200 SXM, whose NVLink figures
# are of both directions together and halved here; an InfiniBand port a GPU (HDR 200 Gb/s, NDR 400) as in DGX A100, H100
# and B200; PCIe of generation 4 and 5 at sixteen lanes. TPUs: Google Cloud's pages of each version and "How to scale
# your model" (one-way rates of an ICI link; two links are counted, the two directions of one axis of the torus, along
# which a mesh axis usually lies).
HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu("NVIDIA A100-SXM4-80GB", "a100", 84_987_740_160, 300e9, 25e9, 32e9),
        _gpu("NVIDIA H100 80GB HBM3", "h100", 84_942_979_072, 450e9, 50e9, 64e9),
        _gpu("NVIDIA H200", "h200", 151_397_597_184, 450e9, 50e9, 64e9),
        _gpu("NVIDIA B200", "b200", 191_500_000_000, 900e9, 50e9, 64e9),
        _tpu("v5e", 15.75 * 2**30, 256, 90e9, 3.125e9, 16e9),
        _tpu("v5p", 95.74 * 2**30, 8960, 180e9, 6.25e9, 16e9, per_host=4),
        _tpu("v6e", 31.25 * 2**30, 256, 180e9, 12.5e9, 32e9),
    )
}

# A v5p's name counts TensorCores, two of which are one device.
_CORES = {"v5p": 2}
_MOST = 2**14  # GPUs of a cluster
_KINDS = {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"} | {
    "NVIDIA B200": "b200",
    **{f"TPU {name}": "v5e" for name in ("v5e", "v5 lite")},
    **{f"TPU {name}": "v5p" for name in ("v5p", "v5")},
    **{f"TPU {name}": "v6e" for name in ("v6e", "v6 lite")},
}


def hardware_of(device: Device) -> Hardware | None:
    """The hardware of a device, None where it is not known."""
    return HARDWARE.get(_KINDS.get(device.device_kind, ""))


def cluster(text: str) -> Cluster:
    """The cluster of a name: `16xh100` is sixteen GPUs in nodes of eight, `v5p-512` a TPU slice as Google names it.

    Raises:
        ValueError: one sentence: there is no such hardware, or it does not come in that number; with the nearest.
    """
    gpu, tpu = re.fullmatch(r"(\d+)x([a-z]\w*)", text.lower()), re.fullmatch(r"(v\d\w*)-(\d+)", text.lower())
    if gpu is None and tpu is None:
        raise ValueError(f"cluster={text} must be a number and a GPU such as 16xh100, or a TPU slice such as v5p-512")
    name, count = (gpu[2], int(gpu[1])) if gpu is not None else (tpu[1], int(tpu[2])) if tpu is not None else ("", 0)
    sliced = tpu is not None
    names = [each for each in HARDWARE if each.startswith("v") == sliced]
    if name not in names:
        if name in HARDWARE:
            raise ValueError(
                f"cluster={text} is not how a TPU slice is named: write {name}-{count * _CORES.get(name, 1)}"
            )
        near = (get_close_matches(name, names, 1, 0.0) or names)[0]
        written = f"{near}-{count}" if sliced else f"{count}x{near}"
        raise ValueError(f"cluster={text} is of no known hardware ({', '.join(HARDWARE)}): the nearest is {written}")
    hardware, cores = HARDWARE[name], _CORES.get(name, 1)
    sizes = _slices(hardware, cores) if sliced else _whole_nodes(hardware, count)
    if count not in sizes:
        near = min(sizes, key=lambda size: (abs(size - count), -size))
        written = f"{name}-{near}" if sliced else f"{near}x{name}"
        parts = (
            "a power of two"
            if sliced
            else f"a power of two up to {hardware.node}, or whole nodes of {hardware.node} up to {_MOST}"
        )
        raise ValueError(f"cluster={text} does not exist: {name} come as {parts}, the nearest is {written}")
    return Cluster(hardware, count // cores)


def _whole_nodes(hardware: Hardware, count: int) -> list[int]:
    """Numbers of devices near `count` that are whole nodes, or a part of one."""
    whole = min(count, _MOST - hardware.node) // hardware.node * hardware.node
    return [1, 2, 4, hardware.node, *(size for size in (whole, whole + hardware.node) if size > 0)]


def _slices(hardware: Hardware, cores: int) -> list[int]:
    """What Google's names count: at least a host's four chips, and not more than a pod has."""
    sizes = [chips * cores for chips in (2**power for power in range(2, 14)) if chips <= hardware.node]
    return sizes if cores > 1 else [1, *sizes]
