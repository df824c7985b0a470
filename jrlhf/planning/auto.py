"""Finds plans for the present devices (`plan: auto`), and for a described cluster (`python -m jrlhf.plan`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jrlhf.config.check import mesh_sizes
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.graph import Call, Graph
from jrlhf.meshes.hardware import Cluster, hardware_of
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.remat import REMATS
from jrlhf.planning.activations import Backend
from jrlhf.planning.candidates import NoPlan, candidates, placements
from jrlhf.planning.fit import backend_of, capacity, remedy_of
from jrlhf.planning.fusion.proposal import with_pipelines
from jrlhf.planning.memory import GIB, away_parts
from jrlhf.planning.plans import scaled_placement, validate_plan
from jrlhf.planning.profile import ProfiledCosts, cluster_of, default_path, group_sizes, load
from jrlhf.planning.search import Result, colocates, placed_together, search
from jrlhf.planning.simulate import Simulation, simulate
from jrlhf.planning.time import CostModel, Price
from jrlhf.planning.workload import Workload, leave_to_budgets, workload_of
from jrlhf.run.files import in_units

PROPOSALS = 50_000  # takes seconds; with a fixed number of proposals the result depends only on the seed
FEWER, GROWN = 8, 7  # maximum halvings of slots, and doublings of devices, that are tried as a remedy
HOST_MEMORY = 4.0  # GiB of a simulated device, if `device.memory` is not set


def auto_plan(config: Config, graph: Graph, models: Mapping[str, ModelConfig], devices: Sequence[Device]) -> Plan:
    """Returns the fastest plan that a search finds for a config's algorithm on these devices.

    Roles on a shared base all use the config's mesh. Calls with a token budget have no micro-batches.
    """
    setting = Setting(config, graph, models, devices)
    processes = len({device.process_index for device in devices})
    result = setting.search(proposals=PROPOSALS, seed=config.seed, processes=processes)
    plan = leave_to_budgets(config, graph, result.best.plan)
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
    """A config's algorithm on present devices, or on a described cluster.

    mean_response: mean number of tokens of a response; None: the maximum.
    """

    config: Config
    graph: Graph
    models: Mapping[str, ModelConfig]
    devices: Sequence[Device] | Cluster
    mean_response: float | None = None

    @cached_property
    def workload(self) -> Workload:
        workload = workload_of(self.config, self.graph, self.models)
        return workload if self.mean_response is None else replace(workload, mean_response=self.mean_response)

    @cached_property
    def prices(self) -> CostModel:
        if isinstance(self.devices, Cluster):
            return prices_of(self.config, self.workload, self.devices)
        apart = self.config.asynchronous is not None and self.config.fleet is None  # rollouts need devices of their own
        instead = "plan=disaggregated" if apart else "plan=colocate"
        return prices_here(self.config, self.workload, self.devices, instead)

    def search(self, *, processes: int = 1, lockstep: bool = True, hypothetical: bool = False, **budget: Any) -> Result:
        """Searches for the fastest plan. If none fits, the error names the nearest setting with a plan that fits.

        Updates run in stages, or fused, where that is faster. processes: number of processes of the run.
        """
        try:
            result = search(self.prices, lockstep=lockstep, hypothetical=hypothetical, **budget)
            if self.config.algorithm is None:  # other stages of a config run by no plan
                return result
            prices = replace(self.prices, processes=processes)
            return with_pipelines(prices, result, self._runs, lockstep=lockstep)
        except NoPlan as problem:
            changes = (text for text, changed in self._changes() if changed._has_plan(hypothetical))
            others = "or devices with more memory" if problem.by_weights else "shorter responses or fewer rows"
            text = next(changes, f"a smaller model{' ' if problem.by_weights else ', '}{others}")
            raise UserError(f"{problem}: choose {text}") from problem

    def splits(self) -> list[Simulation]:
        """Returns the plans of an asynchronous run: one for each number of devices that rollouts may get.

        Rollouts get the last devices. Each call has its fastest placement that fits together with the others of its
        side; roles on a shared base have the config's mesh, scaled down. With several nodes each side gets whole nodes.
        """
        prices, workload, config = self.prices, self.workload, self.config
        count, node = prices.cluster.devices, prices.cluster.node
        outcomes, refusals = [], []
        for start in range(0, count, node if count > node else 1)[1:]:
            placed: dict[str, Placement] = {}
            for drawing, devices in ((False, Slice(0, start)), (True, Slice(start, count - start))):
                calls = [call for call in workload.calls if (call.kind == "generate") == drawing]
                choices = {call.name: self._placements_on(call, devices) for call in calls}
                side = placed_together(self.graph, choices, prices.capacity)
                placed |= {} if side is None else {name: one.placement for name, one in side.items()}
            if len(placed) < len(workload.calls):
                continue
            plan = leave_to_budgets(config, self.graph, Plan("auto", placed))
            try:
                validate_plan(plan, config, workload, count)
            except UserError as refusal:
                refusals.append(refusal)
                continue
            simulation = simulate(self.graph, plan, prices, lockstep=True)
            if simulation.peak <= prices.capacity:
                outcomes.append(simulation)
        if outcomes:
            return outcomes
        if refusals:
            raise refusals[0]
        raise UserError(
            f"{config.algorithm}.asynchronous draws on devices of its own, and no division of {count} device(s) into "
            "two sides divides the rows and fits: choose more devices, other rows or a smaller model"
        )

    def _placements_on(self, call: Call, devices: Slice) -> list[Price]:
        """Returns the ways to divide a call over a side of an asynchronous run, those that fit alone."""
        prices, workload, cluster = self.prices, self.workload, self.prices.cluster
        if prices.costs is not None and devices.count not in group_sizes(cluster.devices):
            return []  # the profile has no groups that divide such a side
        ways = placements(workload, call, devices.count, cluster.node)
        if workload.on_base(call.role):
            ways = [scaled_placement(self.config, workload, call, devices, cluster.devices)]
        ways = [replace(way, devices=devices) for way in ways]
        options = [prices.call(call, way) for way in ways]
        return [one for one in options if one.bytes + one.moved * (call.kind == "generate") <= prices.capacity]

    def _runs(self, plan: Plan) -> bool:
        try:
            validate_plan(plan, self.config, self.workload, self.prices.cluster.devices)
        except UserError:
            return False
        return True

    def _changes(self) -> Iterator[tuple[str, "Setting"]]:
        """Yields settings that need less memory, the nearest first: one change, several changes, more devices."""
        config, workload, count = self.config, self.workload, self.prices.cluster.devices
        sizes = [(workload.slots or workload.rows) >> halved for halved in range(1, FEWER + 1)]
        kinds: list[list[tuple[str, str, Any]]] = [
            [("compute", "remat", remat) for remat in REMATS[: REMATS.index(workload.remat)][::-1]],
            [("rollout", "slots", size) for size in sizes if size and size % count == 0],
            [("sleep", "optimizer", "host")] if config.offloading.optimizer != "host" else [],
        ]
        leanest = [kind[-1] for kind in kinds if kind]

        def changed(*changes: tuple[str, str, Any], devices: Any = self.devices) -> tuple[str, Setting]:
            sections = {"compute": config.compute, "rollout": config.rollout, "sleep": config.offloading}
            texts = [] if devices is self.devices else [f"{devices.devices} devices"]
            texts += [f"{section}.{key}={value}" for section, key, value in changes]
            replaced = {section: replace(sections[section], **{key: value}) for section, key, value in changes}
            return " with ".join(texts), replace(self, config=replace(config, **replaced), devices=devices)

        yield from (changed(change) for kind in kinds for change in kind)
        if len(leanest) > 1:
            yield changed(*leanest)
        for doubled in range(1, GROWN) if isinstance(self.devices, Cluster) else ():
            larger = replace(self.prices.cluster, devices=count * 2**doubled)
            yield changed(devices=larger)
            yield changed(*leanest, devices=larger)

    def _has_plan(self, hypothetical: bool) -> bool:
        try:
            return colocates(self.prices, candidates(self.prices, hypothetical=hypothetical))
        except UserError:
            return False


def prices_here(
    config: Config, workload: Workload, devices: Sequence[Device], instead: str = "plan=colocate"
) -> CostModel:
    """Returns the prices of calls on these devices: from a profile if there is one, else from data sheets.

    instead: the setting that needs no prices, for the message.
    """
    profile, hardware = load(default_path(devices)), hardware_of(devices[0])
    memory = capacity(config, devices) or (HOST_MEMORY * GIB if hardware is None else hardware.memory)
    if profile is not None:
        costs, backend = ProfiledCosts(profile, workload), backend_of(config, devices[0])
        away = away_parts(config, workload)
        cluster, processes = cluster_of(profile, memory), jax.process_count()
        return CostModel(workload, cluster, backend=backend, costs=costs, away=away, processes=processes)
    if hardware is None:
        other = "; `python -m jrlhf.plan --config FILE --cluster 8xh100` plans for other hardware"
        raise UserError(
            f"nothing is known of what calls cost on {devices[0].device_kind} devices: measure them by "
            "`python -m jrlhf.plan --config FILE --profile` with the config and the settings of this run, or set "
            f"{instead}{other if config.plan == 'auto' else ''}"
        )
    prices = prices_of(config, workload, Cluster(replace(hardware, memory=memory), len(devices)))
    return replace(prices, processes=jax.process_count())


def prices_of(config: Config, workload: Workload, cluster: Cluster) -> CostModel:
    """Returns the prices of a workload's calls on a cluster, from its data sheet. `device.memory` limits its memory."""
    if config.device.memory is not None:
        memory = min(cluster.hardware.memory, config.device.memory * GIB)
        cluster = replace(cluster, hardware=replace(cluster.hardware, memory=memory))
    backend = Backend(cluster.hardware.platform, config.compute.attention)
    return CostModel(workload, cluster, backend=backend, away=away_parts(config, workload))


def check_fits(config: Config, prices: CostModel, result: Simulation) -> None:
    """Refuses a plan whose calls do not fit the devices' memory together, with the nearest settings that do."""
    workload, plan = prices.workload, result.plan
    if result.peak <= prices.capacity:
        return
    fullest = max(result.memory, key=lambda group: group.peak)
    here = [name for name, placement in plan.placements.items() if placement.devices.overlaps(fullest.devices)]
    largest = max(here, key=lambda name: prices.call(workload.graph[name], plan[name]).active)
    remedy = remedy_of(config, workload, plan, prices.capacity, prices.backend, prices.away)
    raise UserError(
        f"plan {plan.name} needs {in_units(result.peak)} on each of devices {fullest.devices}, which have "
        f"{in_units(prices.capacity)}, {in_units(fullest.resident)} of it for what stays and the rest for {largest}: "
        + (f"choose {remedy}" if remedy else "no setting makes it fit, search for another plan")
    )
