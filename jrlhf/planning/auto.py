"""`plan: auto`: the plan that a search finds for the devices at hand, by their data sheet or by a profile of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from jrlhf.planning.fits import backend_of, capacity
from jrlhf.planning.from_config import workload_of
from jrlhf.planning.measured import Measured
from jrlhf.planning.memory import GIB, call_bytes
from jrlhf.planning.profile import cluster_of, default_path, load, profile, save
from jrlhf.planning.runnable import on_base
from jrlhf.planning.search import Budget, search
from jrlhf.planning.times import Estimator
from jrlhf.planning.workload import Workload

PROPOSALS = 50_000  # a search of so many is a function of its seed, and takes seconds
HOST_MEMORY = 4.0  # GiB that a simulated device is taken to have where `device.memory` does not say


def searched(config: Config, graph: Graph, models: Mapping[str, ModelConfig], devices: Sequence[Device]) -> Plan:
    """The fastest plan that a search finds for a config's algorithm on these devices.

    Roles that share a base are all in the config's mesh; rows that a budget of tokens divides have no micro-batches.

    Raises:
        UserError: the devices are not known and have no profile, or no plan fits.
    """
    workload = workload_of(config, graph, models)
    cluster, prices = prices_here(config, workload, devices)
    processes = len({device.process_index for device in devices})
    found = search(workload, cluster, prices, Budget(proposals=PROPOSALS), seed=config.seed, processes=processes)
    plan = without_budgeted(config, workload.graph, found.best.plan)
    data, fsdp, tensor = mesh_sizes(config.mesh, len(devices))
    shared = {
        name: replace(placement, data=data, fsdp=fsdp, tensor=tensor)
        for name, placement in plan.placements.items()
        if workload.graph[name].role in on_base(config)
    }
    return Plan("auto", {**plan.placements, **shared})


def without_budgeted(config: Config, graph: Graph, plan: Plan) -> Plan:
    """The plan without the micro-batches of calls whose rows a budget of tokens divides."""
    tokens = {"infer": config.compute.score_tokens, "train": config.rl.algorithm.micro_batch_tokens}
    whole = {
        name: replace(placement, micro_batches=1)
        for name, placement in plan.placements.items()
        if tokens.get(graph[name].kind) is not None
    }
    return Plan(plan.name, {**plan.placements, **whole})


def measure_here(workload: Workload, devices: Sequence[Device], say: Callable[[str], None]) -> Path:
    """Measures the devices for a workload, but for what their profile has already; returns the profile's file.

    say: is told what is measured.
    """
    path = default_path(devices)
    save(profile(workload, devices, layouts=get_args(LayoutName), known=load(path), say=say), path)
    return path


def prices_here(config: Config, workload: Workload, devices: Sequence[Device]) -> tuple[Cluster, Estimator]:
    """The devices as a cluster, and what calls cost on them: as measured where there is a profile.

    Raises:
        UserError: there is neither a profile nor a data sheet.
    """
    measured, hardware = load(default_path(devices)), hardware_of(devices[0])
    memory = capacity(config, devices) or (HOST_MEMORY * GIB if hardware is None else hardware.memory)
    bytes_of = partial(call_bytes, backend=backend_of(config, devices[0]))
    if measured is not None:
        cluster = cluster_of(measured, memory)
        return cluster, Estimator(workload, cluster, bytes_of=bytes_of, units=Measured(measured, workload))
    if hardware is None:
        raise UserError(
            f"nothing is known of what calls cost on {devices[0].device_kind} devices: measure them with "
            "`python -m jrlhf.plan --config C --profile`, or set plan=colocate"
        )
    cluster = Cluster(replace(hardware, memory=memory), len(devices))
    return cluster, Estimator(workload, cluster, bytes_of=bytes_of)
