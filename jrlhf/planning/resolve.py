"""What a run must know before it begins: its mesh, the models' sizes, its plan, and whether it fits into memory.

A run itself plans nothing. It is given `Resources`, and a policy where it decides while it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
from jax.sharding import Mesh

from jrlhf.algorithms.registry import graph_of, stage_graph
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.fleet.processes.places import asked_places
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import Plan, plan_of
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.planning.auto import Setting, auto_plan, prices_here
from jrlhf.planning.fit import check_memory
from jrlhf.planning.fusion.last_rows import Moves, rollouts_of
from jrlhf.planning.fusion.tiles import choose_tiles, resumed_tiles, with_tiles
from jrlhf.planning.fusion.updates import fused_updates
from jrlhf.planning.plans import colocated, plan_of_config, read_plan, refuse_cross_process, transfer_line
from jrlhf.planning.predict_async import choose, lengths_of_a_new_run, sentence
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload, workload_of
from jrlhf.run.console import Console
from jrlhf.run.directory import (
    CONFIG,
    PLAN,
    run_path,
)
from jrlhf.run.files import unsealed
from jrlhf.run.processes import from_main, several
from jrlhf.run.resume import saved_tile
from jrlhf.stages.setup import Resources, select_mesh


def resolve(config: Config, *, resume: bool, tell: Callable[[str], None]) -> Resources:
    """Decides what a run computes on. Refuses a run that does not fit into device memory.

    tell: called with each new choice of the moves of last rows, while the run runs.
    """
    if resume and config.compute.score_rows == "auto":
        config, line = resumed_tiles(config, from_main(partial(saved_tile, run_path(config) / CONFIG)))
        config = replace(config, notices=(*config.notices, line))
    mesh, models, plan = select_resources(config, resume=resume)
    resources = Resources(config, mesh, models, plan)
    return resources if plan is None else _with_rollouts(resources, plan, tell)


def _with_rollouts(resources: Resources, plan: Plan, tell: Callable[[str], None]) -> Resources:
    """Returns resources with the fused updates of the plan, and what the config leaves to a simulation of rollouts:
    the tiles of a new run, and what chooses the moves of last rows."""
    config, mesh, lines = resources.config, resources.mesh, list[str]()
    workload, devices = workload_of(config, graph_of(config), resources.models), list(mesh.devices.flat)
    fused = fused_updates(workload, plan, mesh.size // jax.process_count())
    prices, moves = prices_of_rollouts(config, workload, devices), None
    if config.compute.score_rows == "auto":
        config, line = tiles_of_a_new_run(config, workload, plan, prices)
        lines.append(line)
    if config.rollout.last_groups == "auto":
        moves = Moves(lambda: rollouts_of(config, prices(), plan), tell)
    if line := transfer_line(plan, [device.process_index for device in devices]):
        lines.append(line)
    return replace(resources, config=config, fused=fused, moves=moves, lines=tuple(lines))


def select_resources(config: Config, *, resume: bool = False) -> tuple[Mesh, dict[str, ModelConfig], Plan | None]:
    """Returns mesh, architectures and the algorithm's plan. Refuses a run that does not fit into device memory."""
    mesh, models = select_mesh(config)
    plan = None
    if config.algorithm is not None:
        plan = select_plan(config, models, list(mesh.devices.flat), resume=resume)
        if config.fleet is not None:
            asked_places(config, mesh.devices.flat[0].platform, plan["actor.generate"].devices.count)
    graphs = [stage_graph(config, stage) for stage in config.stages]
    for graph in graphs:
        if graph.name != config.algorithm and config.sections[graph.name].pipeline is not None:
            staged = colocated(config, workload_of(config, graph, models), mesh.size)
            refuse_cross_process(staged, [device.process_index for device in mesh.devices.flat])
    from_main(partial(check_memory, config, graphs, mesh, models, plan))
    return mesh, models, plan


def select_plan(
    config: Config, models: dict[str, ModelConfig], devices: Sequence[Device], *, resume: bool = False
) -> Plan:
    """Returns the plan of the RL stage. Process 0 decides for all, since files and measurements may differ.

    resume: with plan=auto, takes the plan that the run's first search found.
    """
    graph = graph_of(config)

    def search() -> Plan:
        path = run_path(config) / PLAN
        if resume and path.exists():
            if unsealed(path, older=True) is None:
                raise UserError(
                    f"{path} is not what was saved: delete it to search for a plan again; results are the same up to "
                    "rounding"
                )
            if (last := read_plan(path)).name == "auto":
                return last
        if config.asynchronous is None or config.fleet is not None:
            return auto_plan(config, graph, models, devices)
        divisions = choose(Setting(config, graph, models, devices))
        Console().line(sentence(divisions))
        return divisions[0].outcome.plan

    if several() and (key := of_one_process(config)):
        raise UserError(f"{key} is for runs of one process, and this one has {jax.process_count()}: leave it out")
    workload = workload_of(config, graph, models)
    plan = plan_of(from_main(lambda: plan_of_config(config, workload, len(devices), search).as_dict()))
    refuse_cross_process(plan, [device.process_index for device in devices])
    if resume and config.asynchronous is not None and config.asynchronous.clock == "virtual":
        _refuse_other_groups(config, plan)
    return plan


def of_one_process(config: Config) -> str:
    """Returns the setting that only runs of one process can have; empty if there is none."""
    if config.fleet is not None:
        return f"fleet.workers={config.fleet.workers}"
    wall = config.asynchronous is not None and config.asynchronous.clock == "wall"
    return f"{config.algorithm}.asynchronous.clock=wall" if wall else ""


def _refuse_other_groups(config: Config, plan: Plan) -> None:
    """Refuses a plan that divides the decode slots over another number of groups of devices than the run's own plan.

    A prompt starts when one group has free slots for all its rows, so with other groups other weights draw it.
    """
    path = run_path(config) / PLAN
    if unsealed(path, older=True) is None:
        return
    there, here = (own["actor.generate"] for own in (read_plan(path), plan))
    if there.groups != here.groups:
        raise UserError(
            f"actor.generate drew on {there.groups} group(s) of devices and here on {here.groups}, which changes the "
            f"schedule of {config.algorithm}.asynchronous: resume with the devices, mesh and plan that {path} shows"
        )


def tiles_of_a_new_run(
    config: Config, workload: Workload, plan: Plan, prices: Callable[[], CostModel]
) -> tuple[Config, str]:
    """Returns a config with the tiles that a new run with `compute.score_rows: auto` chooses, and a line on them."""
    lengths = lengths_of_a_new_run(workload)
    rows, line = from_main(lambda: choose_tiles(config, workload, plan, lengths, prices))
    return with_tiles(config, rows), line


def prices_of_rollouts(config: Config, workload: Workload, devices: Sequence[Device]) -> Callable[[], CostModel]:
    """Returns a function for the prices with which a run chooses its tiles and moves; it makes them when called first.

    `compute.score_rows: auto` and `rollout.last_groups: auto` share them, because neither changes a price.
    """
    key = "compute.score_rows" if config.compute.score_rows == "auto" else "rollout.last_groups"
    return cache(lambda: prices_here(config, workload, devices, f"{key}=null"))
