"""The sections of the devices and the processes of a run."""

import re
from dataclasses import dataclass
from typing import Literal

from jrlhf.ppo.fields import LONGEST, Section, checked, count, natural, positive

MOST_DEVICES = 4096  # maximum number of devices of a process


@dataclass(frozen=True)
class DeviceConfig(Section):
    """The devices of this process."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # the kind of device; auto: the best that JAX finds
    # Number of devices into which each process splits its CPU; null: one.
    simulated: int | None = count(None, most=MOST_DEVICES)
    memory: float | None = positive(None)  # GiB of a device that a run may use; null: what an accelerator reports

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.simulated is not None and self.platform in ("gpu", "tpu"):
            self.refuse("simulated", f"null on a {self.platform}: only CPU devices are simulated")


@dataclass(frozen=True)
class DistributedConfig(Section):
    """The processes of a run, which all run the same program. Unset fields are detected from the cluster."""

    # auto: from the keys below, from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from the cluster
    # that JAX detects (Slurm, TPU, GKE), else one process; off: one process.
    mode: Literal["auto", "off"] = "auto"
    # HOST:PORT of process 0, the same in every process; null: detected
    coordinator: str | None = checked(
        None, lambda value: re.fullmatch(r".+:\d+", value) is not None, "HOST:PORT, for instance 10.0.0.1:8476"
    )
    processes: int | None = count(None)  # number of processes; null: detected
    process: int | None = natural(None)  # number of this process, starting at 0; null: detected
    # Seconds within which all processes must have connected.
    timeout: float = checked(300.0, lambda value: value >= 1, "at least 1", most=LONGEST)
    # Seconds without a heartbeat of a process after which the others end.
    heartbeat: float = checked(100.0, lambda value: value >= 1, "at least 1", most=LONGEST)
