"""Chooses how many rows are scored together while others decode, by the simulator of `last_rows`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from jrlhf.config.schema import Config
from jrlhf.meshes.graph import Graph
from jrlhf.meshes.plan import Plan
from jrlhf.models.config.divisors import divisors
from jrlhf.planning.fusion.last_rows import (
    NO_GAIN,
    Lengths,
    Work,
    choose,
    decode,
    follow,
    may_gain,
    read_by_rows,
    rollouts_of,
    settle,
)
from jrlhf.planning.rows import undivided_rows
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload


def with_tiles(config: Config, rows: int | None) -> Config:
    """Returns a config that scores tiles of `rows` rows; None: whole batches; then the last rows do not move."""
    rollout = config.rollout if rows else replace(config.rollout, last_groups=None, last_rows=None)
    return replace(config, compute=replace(config.compute, score_rows=rows), rollout=rollout)


def resumed_tiles(config: Config, rows: int | None) -> tuple[Config, str]:
    """Returns a config with the tiles that a run with `compute.score_rows: auto` has since its start, and a line."""
    line = _whole_batches(config) if rows is None else _tiles(rows)
    return with_tiles(config, rows), f"{line}, as since the start of the run"


def _tiles(rows: int) -> str:
    return f"compute.score_rows=auto: {rows} rows are scored together while others decode"


def _whole_batches(config: Config) -> str:
    line = "compute.score_rows=auto: whole batches are scored after the last row"
    return line + ("" if config.rollout.last_groups is None else ", and rollout.last_groups has no effect")


def scored_early(config: Config, graph: Graph, plan: Plan) -> list[str]:
    """Returns the models' calls that may score rows while others decode, because they are on other devices.

    With `rollout.last_groups: auto` the last rows may decode on a single group of devices.
    """
    groups, calls, taken = config.rollout.last_groups, dict[str, None](), []
    for call in graph:
        if call.kind == "generate":
            place, calls = plan[call.name], calls | dict.fromkeys(one.name for one in read_by_rows(config, graph, call))
            count = 1 if groups == "auto" else groups
            taken.append(place.devices if count is None else place.devices.first(count * place.tensor))
    return [name for name in calls if not any(plan[name].devices.overlaps(own) for own in taken)]


def choose_tiles(
    config: Config, workload: Workload, plan: Plan, lengths: Sequence[Lengths], prices: Callable[[], CostModel]
) -> tuple[int | None, str]:
    """Returns the rows of the fastest tiles for rollouts of these lengths (None: whole batches), and a line on it.

    Reward functions are left out, because their seconds are not known. prices: called if a model could score early.
    """
    line, whole = _whole_batches(config), with_tiles(config, None)
    if not scored_early(config, workload.graph, plan):
        return None, f"{line}, because no model scores on devices that are free while rows decode"
    priced = prices()
    drawn = rollouts_of(whole, priced, plan)
    decoded = {name: [decode(rollouts, own) for own in lengths] for name, rollouts in drawn.items()}

    def seconds(config: Config) -> float:
        tiled = rollouts_of(config, priced, plan)
        return sum(settle(rollouts, decoded[name]).seconds for name, rollouts in tiled.items())

    def runs(rows: int) -> bool:
        own = replace(workload, score_rows=rows)
        return not any(True for call in workload.calls for _ in undivided_rows(own, call, plan[call.name]))

    whole_groups = [rows for rows in divisors(workload.rows)[-2::-1] if rows % workload.samples == 0]
    times = {rows: seconds(with_tiles(config, rows)) for rows in whole_groups if runs(rows)}
    rows, at_once = min(times, key=times.__getitem__, default=None), seconds(whole)
    least = at_once if rows is None else times[rows]
    mean = f"responses of {fmean(own.mean() for own in lengths):.0f} tokens in the mean are drawn and scored in"
    if rows and least < at_once:
        line = f"{_tiles(rows)}; {mean} {least:.3g} s, and with whole batches in {at_once:.3g} s"
        return rows, line
    than = f"with tiles of {rows} rows in {least:.3g} s" if rows else "no smaller number of rows suits the plan"
    return None, f"{line}; {mean} {at_once:.3g} s, {than}"


def examples(config: Config, prices: CostModel, plan: Plan, lengths: Sequence[Lengths]) -> dict[str, list[Work]]:
    """Returns, for each call that draws, the work on the devices in the first of these rollouts."""
    works = {}
    for name, rollouts in rollouts_of(config, prices, plan).items():
        decoded = [decode(rollouts, own) for own in lengths]
        works[name] = follow(rollouts, decoded[0], settle(rollouts, decoded).last)
    return works


def describe(config: Config, prices: CostModel, plan: Plan, lengths: Sequence[Lengths]) -> list[str]:
    """Returns lines: the guarantee, the best moves for rollouts of these lengths, the gain of the config's tiles."""
    groups = config.rollout.last_groups
    at_last, tiled = (rollouts_of(one, prices, plan) for one in (with_tiles(config, None), config))
    auto, moves = groups == "auto", "" if groups is None else " and without moves"
    lines = [f"guarantee: the same bits as with scores of the same tiles after the last row{moves}"]
    if auto and not any(map(may_gain, tiled.values())):
        lines.append(NO_GAIN)
    for name, rollouts in tiled.items():
        decoded = [decode(rollouts, own) for own in lengths]
        own, at_once = settle(rollouts, decoded), settle(at_last[name], decoded).seconds
        choice = own if auto else choose(rollouts, decoded)
        verdict = "tiles gain" if own.seconds < at_once else "leave compute.score_rows out"
        setting = "" if auto else ", with rollout.last_groups=auto"
        lines.append(f"{name}{setting}: {choice.sentence(rollouts.groups)}")
        lines.append(f"  {at_once:.3g} s if calls score whole batches after the last row: {verdict}")
    return lines
