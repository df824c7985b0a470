"""Plans for the devices at hand (`plan: auto`), and for a cluster that need not be there (`python -m jrlhf.plan`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from jrlhf.config.check import mesh_sizes
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Graph
from jrlhf.meshes.hardware import Cluster, hardware_of
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import LayoutName, Plan
from jrlhf.models import ModelConfig
from jrlhf.models.remat import REMATS
from jrlhf.planning.activations import Backend
from jrlhf.planning.candidates import NoPlan, candidates
from jrlhf.planning.fit import backend_of, capacity
from jrlhf.planning.fusion.proposal import with_fused
from jrlhf.planning.memory import GIB, Away, away_parts, keepers
from jrlhf.planning.plans import validate_plan
from jrlhf.planning.profile import ProfiledCosts, cluster_of, default_path, load, measure, save
from jrlhf.planning.search import Result, colocates, search
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload, without_budgeted, workload_of

PROPOSALS = 50_000  # takes seconds; a search of a fixed number of proposals is a function of its seed
FEWER, GROWN = 8, 7  # halvings of slots, and doublings of devices, at which a remedy is looked for
HOST_MEMORY = 4.0  # GiB of a simulated device, where `device.memory` does not say


def auto_plan(config: Config, graph: Graph, models: Mapping[str, ModelConfig], devices: Sequence[Device]) -> Plan:
    """Returns the fastest plan that a search finds for a config's algorithm on these devices.

    Roles on a shared base all have the config's mesh; rows that a token budget divides have no micro-batches.
    """
    cluster, prices = prices_here(config, workload_of(config, graph, models), devices)
    setting = Setting(
        config, graph, models, cluster, lambda changed, workload, _: prices_here(changed, workload, devices)[1]
    )
    processes = len({device.process_index for device in devices})
    result = setting.search(prices, grows=False, proposals=PROPOSALS, seed=config.seed, processes=processes)
    plan = without_budgeted(config, graph, result.best.plan)
    data, fsdp, tensor = mesh_sizes(config.mesh, len(devices))
    on_base = setting.workload.on_base
    shared = {
        name: replace(placement, data=data, fsdp=fsdp, tensor=tensor)
        for name, placement in plan.placements.items()
        if on_base(graph[name].role)
    }
    return Plan("auto", {**plan.placements, **shared})


@dataclass(frozen=True)
class Setting:
    """A config's algorithm on a cluster. price: the prices of a workload's calls under a config on a cluster.

    mean_response: tokens of a response in the mean; None: as many as there are at most.
    """

    config: Config
    graph: Graph
    models: Mapping[str, ModelConfig]
    cluster: Cluster
    price: Callable[[Config, Workload, Cluster], CostModel]
    mean_response: float | None = None

    @property
    def workload(self) -> Workload:
        workload = workload_of(self.config, self.graph, self.models)
        return workload if self.mean_response is None else replace(workload, mean_response=self.mean_response)

    def search(self, prices: CostModel, *, grows: bool = True, processes: int = 1, **budget: Any) -> Result:
        """Searches for the fastest plan. Where none fits, the error names the nearest setting with one.

        Updates are fused where that is faster; a pipeline runs in one process.
        grows: whether more devices may be suggested. processes: of the run on this cluster.
        """
        try:
            result = search(self.workload, self.cluster, prices, processes=processes, **budget)
            lockstep = budget.get("lockstep", True)
            if processes > 1:
                return result
            return with_fused(self.workload, self.cluster, prices, result, self._runs, lockstep=lockstep)
        except NoPlan as problem:
            for text, changed in self._changes(grows):
                if changed._has_plan(processes, hypothetical=budget.get("hypothetical", False)):
                    raise UserError(f"{problem}: choose {text}") from problem
            raise UserError(f"{problem}: choose a smaller model, shorter responses or fewer rows") from problem

    def _runs(self, plan: Plan) -> bool:
        try:
            validate_plan(plan, self.config, self.workload, self.cluster.devices)
        except UserError:
            return False
        return True

    def _changes(self, grows: bool) -> Iterator[tuple[str, "Setting"]]:
        """Yields settings that need less memory, the nearest first: one change, several, more devices."""
        config, workload = self.config, self.workload
        slots = (workload.slots or workload.rows) // 2
        sizes = [slots >> halved for halved in range(slots.bit_length())]
        kinds: list[list[tuple[str, Config]]] = [
            [
                (f"compute.remat={remat}", replace(config, compute=replace(config.compute, remat=remat)))
                for remat in REMATS[: REMATS.index(workload.remat)][::-1]
            ],
            [
                (f"rollout.slots={size}", replace(config, rollout=replace(config.rollout, slots=size)))
                for size in sizes[:FEWER]
                if size % self.cluster.devices == 0
            ],
            []
            if config.offloading.optimizer == "host"
            else [("sleep.optimizer=host", replace(config, sleep=replace(config.offloading, optimizer="host")))],
        ]
        for kind in kinds:
            yield from ((text, replace(self, config=changed)) for text, changed in kind)
        texts, leanest = [], config
        for kind, section in zip(kinds, ("compute", "rollout", "sleep"), strict=True):
            if kind:
                texts.append(kind[-1][0])
                leanest = replace(leanest, **{section: getattr(kind[-1][1], section)})
        if len(texts) > 1:
            yield " with ".join(texts), replace(self, config=leanest)
        for doubled in range(1, GROWN) if grows else ():
            cluster = replace(self.cluster, devices=self.cluster.devices * 2**doubled)
            yield f"{cluster.devices} devices", replace(self, cluster=cluster)
            yield " with ".join([f"{cluster.devices} devices", *texts]), replace(self, config=leanest, cluster=cluster)

    def _has_plan(self, processes: int, *, hypothetical: bool) -> bool:
        workload, cluster = self.workload, self.cluster
        prices = self.price(self.config, workload, cluster)
        try:
            options = candidates(workload, cluster, prices, hypothetical=hypothetical, processes=processes)
        except UserError:
            return False
        return colocates(self.graph, options, cluster.devices, prices.capacity)


def measure_here(workload: Workload, devices: Sequence[Device], say: Callable[[str], None]) -> Path:
    """Measures what the devices' profile lacks for a workload; returns the profile's file."""
    path = default_path(devices)
    save(measure(workload, devices, layouts=get_args(LayoutName), profile=load(path), say=say), path)
    return path


def prices_here(config: Config, workload: Workload, devices: Sequence[Device]) -> tuple[Cluster, CostModel]:
    """Returns the devices as a cluster, and their prices: as measured where there is a profile, else by data sheet."""
    profile, hardware = load(default_path(devices)), hardware_of(devices[0])
    memory = capacity(config, devices) or (HOST_MEMORY * GIB if hardware is None else hardware.memory)
    backend, away = backend_of(config, devices[0]), _away(config, workload)
    if profile is not None:
        cluster = cluster_of(profile, memory)
        return cluster, CostModel(workload, cluster, backend=backend, costs=ProfiledCosts(profile, workload), away=away)
    if hardware is None:
        raise UserError(
            f"nothing is known of what calls cost on {devices[0].device_kind} devices: measure them with "
            "`python -m jrlhf.plan --config C --profile`, or set plan=colocate"
        )
    cluster = Cluster(replace(hardware, memory=memory), len(devices))
    return cluster, CostModel(workload, cluster, backend=backend, away=away)


def prices_of(config: Config, workload: Workload, cluster: Cluster) -> CostModel:
    """Returns the prices of a workload's calls on a cluster, by its data sheet."""
    platform = "tpu" if cluster.hardware.name.startswith("v") else "gpu"
    backend = Backend(platform, config.compute.attention)
    return CostModel(workload, cluster, backend=backend, away=_away(config, workload))


def _away(config: Config, workload: Workload) -> Away:
    return away_parts(config, workload.graph, keepers(workload))
