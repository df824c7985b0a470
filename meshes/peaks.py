"""What accelerators can do at most, by their makers' figures: the denominators of utilisation."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jrlhf.meshes.mesh import Device


@dataclass(frozen=True)
class Peak:
    """One device. memory: bytes a second. bfloat16, float32: dense operations a second, without sparsity.

    float32: of a matrix product as JAX does it by default: in TF32 on NVIDIA's from Ampere on, as one bfloat16 product
    on TPUs.
    """

    memory: float
    bfloat16: float
    float32: float

    def operations(self, dtype: Any) -> float:
        """Operations a second of products of this dtype."""
        return self.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else self.float32


# By `device_kind`, from the makers' data sheets; a sheet that only states rates with sparsity is halved.
PEAKS = {
    "NVIDIA B200": Peak(8.0e12, 2250e12, 1125e12),
    "NVIDIA H200": Peak(4.8e12, 989e12, 494e12),
    "NVIDIA H100 80GB HBM3": Peak(3.35e12, 989e12, 494e12),
    "NVIDIA H100 NVL": Peak(3.9e12, 835e12, 417e12),
    "NVIDIA H100 PCIe": Peak(2.0e12, 756e12, 378e12),
    "NVIDIA A100-SXM4-80GB": Peak(2.039e12, 312e12, 156e12),
    "NVIDIA A100-SXM4-40GB": Peak(1.555e12, 312e12, 156e12),
    "NVIDIA A100 80GB PCIe": Peak(1.935e12, 312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": Peak(1.555e12, 312e12, 156e12),
    "NVIDIA L40S": Peak(0.864e12, 362e12, 183e12),
    "NVIDIA L4": Peak(0.3e12, 121e12, 60e12),
    "Tesla T4": Peak(0.32e12, 8.1e12, 8.1e12),  # has no bfloat16 units
    "TPU v4": Peak(1.228e12, 275e12, 275e12),
    "TPU v5 lite": Peak(0.819e12, 197e12, 197e12),
    "TPU v5e": Peak(0.819e12, 197e12, 197e12),
    "TPU v5": Peak(2.765e12, 459e12, 459e12),
    "TPU v5p": Peak(2.765e12, 459e12, 459e12),
    "TPU v6 lite": Peak(1.64e12, 918e12, 918e12),
    "TPU v6e": Peak(1.64e12, 918e12, 918e12),
}


def peak_of(device: Device) -> Peak | None:
    """The peak of a device, None where it is not known."""
    return PEAKS.get(device.device_kind)
