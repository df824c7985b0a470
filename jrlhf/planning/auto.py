"""Plans for the devices at hand (`plan: auto`), and for a cluster that need not be there (`python -m jrlhf.plan`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from jrlhf.config.check import mesh_sizes
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Graph
from jrlhf.meshes.hardware import Cluster, hardware_of
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import LayoutName, Plan
from jrlhf.models import ModelConfig
from jrlhf.planning.activations import Backend
from jrlhf.planning.fit import backend_of, capacity
from jrlhf.planning.memory import GIB
from jrlhf.planning.profile import ProfiledCosts, cluster_of, default_path, load, measure, save
from jrlhf.planning.search import search
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload, without_budgeted, workload_of

PROPOSALS = 50_000  # takes seconds; a search of a fixed number of proposals is a function of its seed
HOST_MEMORY = 4.0  # GiB of a simulated device, where `device.memory` does not say


def auto_plan(config: Config, graph: Graph, models: Mapping[str, ModelConfig], devices: Sequence[Device]) -> Plan:
    """Returns the fastest plan that a search finds for a config's algorithm on these devices.

    Roles on a shared base all have the config's mesh; rows that a token budget divides have no micro-batches.
    """
    workload = workload_of(config, graph, models)
    cluster, prices = prices_here(config, workload, devices)
    processes = len({device.process_index for device in devices})
    result = search(workload, cluster, prices, proposals=PROPOSALS, seed=config.seed, processes=processes)
    plan = without_budgeted(config, graph, result.best.plan)
    data, fsdp, tensor = mesh_sizes(config.mesh, len(devices))
    shared = {
        name: replace(placement, data=data, fsdp=fsdp, tensor=tensor)
        for name, placement in plan.placements.items()
        if workload.on_base(graph[name].role)
    }
    return Plan("auto", {**plan.placements, **shared})


def measure_here(workload: Workload, devices: Sequence[Device], say: Callable[[str], None]) -> Path:
    """Measures what the devices' profile lacks for a workload; returns the profile's file."""
    path = default_path(devices)
    save(measure(workload, devices, layouts=get_args(LayoutName), profile=load(path), say=say), path)
    return path


def prices_here(config: Config, workload: Workload, devices: Sequence[Device]) -> tuple[Cluster, CostModel]:
    """Returns the devices as a cluster, and their prices: as measured where there is a profile, else by data sheet."""
    profile, hardware = load(default_path(devices)), hardware_of(devices[0])
    memory = capacity(config, devices) or (HOST_MEMORY * GIB if hardware is None else hardware.memory)
    backend = backend_of(config, devices[0])
    if profile is not None:
        cluster = cluster_of(profile, memory)
        return cluster, CostModel(workload, cluster, backend=backend, costs=ProfiledCosts(profile, workload))
    if hardware is None:
        raise UserError(
            f"nothing is known of what calls cost on {devices[0].device_kind} devices: measure them with "
            "`python -m jrlhf.plan --config C --profile`, or set plan=colocate"
        )
    cluster = Cluster(replace(hardware, memory=memory), len(devices))
    return cluster, CostModel(workload, cluster, backend=backend)


def prices_of(config: Config, workload: Workload, cluster: Cluster) -> CostModel:
    """Returns the prices of a workload's calls on a cluster, by its data sheet."""
    platform = "tpu" if cluster.hardware.name.startswith("v") else "gpu"
    return CostModel(workload, cluster, backend=Backend(platform, config.compute.attention))
