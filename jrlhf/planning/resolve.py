"""What a run must know before it begins: its mesh, the models' sizes, its plan, and whether it fits into memory.

A run itself plans nothing. It is given `Resources`, and a policy where it decides while it runs. What a setting asks
for (a search, a simulation, fused updates, processes) is imported where the setting is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
from jax.sharding import Mesh

from jrlhf.algorithms.registry import graph_of, stage_graph
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import Plan, plan_of
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.planning.fit import check_memory
from jrlhf.planning.plans import colocated, plan_of_config, read_plan, refuse_cross_process, transfer_line
from jrlhf.planning.workload import workload_of
from jrlhf.run.console import Console
from jrlhf.run.contents import CONFIG, PLAN
from jrlhf.run.directory import run_path
from jrlhf.run.files import unsealed
from jrlhf.run.processes import from_main, several
from jrlhf.run.resume import saved_tile
from jrlhf.stages.setup import Resources, select_mesh


def resolve(config: Config, *, resume: bool, tell: Callable[[str], None]) -> Resources:
    """Decides what a run computes on. Refuses a run that does not fit into device memory.

    tell: called with sentences on the moves of last rows: now, and at each new choice while the run runs.
    """
    if resume and config.compute.score_rows == "auto":
        from jrlhf.planning.fusion.tiles import resumed_tiles

        config, line = resumed_tiles(config, from_main(partial(saved_tile, run_path(config) / CONFIG)))
        config = replace(config, notices=(*config.notices, line))
    mesh, models, plan = select_resources(config, resume=resume)
    resources = Resources(config, mesh, models, plan)
    return resources if plan is None else _with_rollouts(resources, plan, tell)


def _with_rollouts(resources: Resources, plan: Plan, tell: Callable[[str], None]) -> Resources:
    """Returns resources with what a plan needs beside itself: the table of the updates that it fuses, and what the
    config leaves to a simulation of rollouts."""
    config, mesh = resources.config, resources.mesh
    if plan.fused:
        from jrlhf.planning.fusion.updates import fused_updates

        workload = workload_of(config, graph_of(config), resources.models)
        resources = replace(resources, fused=fused_updates(workload, plan, mesh.size // jax.process_count()))
    if config.compute.score_rows == "auto" or config.rollout.last_groups == "auto":
        from jrlhf.planning.fusion.choices import choose_for_rollouts

        resources = choose_for_rollouts(resources, plan, tell)
    if line := transfer_line(plan, [device.process_index for device in mesh.devices.flat]):
        resources = replace(resources, lines=(*resources.lines, line))
    return resources


def select_resources(config: Config, *, resume: bool = False) -> tuple[Mesh, dict[str, ModelConfig], Plan | None]:
    """Returns mesh, architectures and the algorithm's plan. Refuses a run that does not fit into device memory."""
    mesh, models = select_mesh(config)
    plan = None
    if config.algorithm is not None:
        plan = select_plan(config, models, list(mesh.devices.flat), resume=resume)
        if config.fleet is not None:
            from jrlhf.rollouts.processes.places import asked_places

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
            if unsealed(path) is None:
                raise UserError(
                    f"{path} is not what was saved: delete it to search for a plan again; results are the same up to "
                    "rounding"
                )
            if (last := read_plan(path)).name == "auto":
                return last
        from jrlhf.planning.auto import Setting, auto_plan
        from jrlhf.planning.predict_async import choose, sentence

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
    if unsealed(path) is None:
        return
    there, here = (own["actor.generate"] for own in (read_plan(path), plan))
    if there.groups != here.groups:
        raise UserError(
            f"actor.generate drew on {there.groups} group(s) of devices and here on {here.groups}, which changes the "
            f"schedule of {config.algorithm}.asynchronous: resume with the devices, mesh and plan that {path} shows"
        )
