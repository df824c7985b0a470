"""What a run leaves to a simulation of its rollouts: `compute.score_rows: auto` and `rollout.last_groups: auto`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from jrlhf.algorithms.registry import graph_of
from jrlhf.config.schema import Config
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import Plan
from jrlhf.planning.auto import prices_here
from jrlhf.planning.fusion.last_rows import Moves, rollouts_of
from jrlhf.planning.fusion.tiles import choose_tiles, with_tiles
from jrlhf.planning.predict_async import lengths_of_a_new_run
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload, workload_of
from jrlhf.run.processes import from_main
from jrlhf.stages.setup import Resources


def choose_for_rollouts(resources: Resources, plan: Plan, tell: Callable[[str], None]) -> Resources:
    """Returns resources with the tiles of a new run, and what chooses the moves of last rows. tell: see `Moves`."""
    config = resources.config
    workload = workload_of(config, graph_of(config), resources.models)
    prices = prices_of_rollouts(config, workload, list(resources.mesh.devices.flat))
    if config.compute.score_rows == "auto":
        config, line = tiles_of_a_new_run(config, workload, plan, prices)
        resources = replace(resources, config=config, lines=(*resources.lines, line))
    if config.rollout.last_groups == "auto":
        tiled = config
        resources = replace(resources, moves=Moves(lambda: rollouts_of(tiled, prices(), plan), tell))
    return resources


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
