"""Predicts the costs of asynchronous training from a simulated run: time, waiting, ages of tokens, lost tokens.

`costs` counts in decode steps. `predict` predicts a config on a plan, in seconds; `choose` does so for each division of
the devices between rollouts and the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jrlhf.config.schema import Config
from jrlhf.planning import auto
from jrlhf.planning.fusion.last_rows import RECENT
from jrlhf.planning.plans import check_slots, shares_slots
from jrlhf.planning.show import in_columns
from jrlhf.planning.simulate import Simulation
from jrlhf.planning.simulate_async import WAITING, Scenario, Trace, lognormal, simulate
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import Workload
from jrlhf.roles.graph import home_of
from jrlhf.rollouts.schedule import Rules, fresh

VERSIONS = 60  # updates of a config's simulated run, which takes about a second for batches of a thousand rows
BOUNDS = 0, 1, 2, 4, 8  # bounds on the age of tokens to compare


@dataclass(frozen=True)
class Costs:
    """The costs of a scenario. Times are in decode steps, ages in versions, shares between 0 and 1.

    step: time from one update to the next. trainer_waits: share of the time in which the trainer does not update.
    rollouts_wait: share of the slots' time in which they hold no row, or decoding stops for new weights.
    mean_age, max_age: ages of all tokens that updates read.
    zero_weight: share of sampled tokens that are older than the bound, and so have weight 0.
    time_per_batch: time to learn with full weight from as many tokens as a batch of sampled rows has.
    """

    step: float
    trainer_waits: float
    rollouts_wait: float
    mean_age: float
    max_age: int
    zero_weight: float
    time_per_batch: float


def costs(scenario: Scenario, versions: int = 300, seed: int = 0) -> Costs:
    """Simulates `versions` updates and returns the mean costs of one."""
    return summarise(simulate(scenario, versions, seed))


class Pace(NamedTuple):
    """The pace of a simulated run, without its first fifth, in which slots and queue fill.

    step, trainer_waits, rollouts_wait: see `Costs`. length_ratio: mean length of rows that updates read, over the
    mean length of rows that started in the same time.
    """

    step: float
    trainer_waits: float
    rollouts_wait: float
    length_ratio: float


def pace(trace: Trace) -> Pace:
    """Returns the pace of a run of at least 5 updates."""
    first, last = len(trace.begins) // 5, len(trace.begins) - 1
    time, area = trace.begins[last] - trace.begins[first], trace.busy[last] - trace.busy[first]
    step = float(time / (last - first))
    read, started = ((numbers >= first) & (numbers < last) for numbers in (trace.trained, trace.drawn))
    ratio = float(trace.lengths[read].mean() / trace.lengths[started].mean())
    update, slots = trace.scenario.rules.update, trace.scenario.slots
    return Pace(step, 1 - update / step, float(1 - area / (time * slots)), ratio)


def summarise(trace: Trace) -> Costs:
    """Averages a simulated run of at least 5 updates, without the first fifth, in which slots and queue fill.

    Ages and shares are those of groups that started in the middle three fifths, so that even slow groups have ended
    when the run ends.
    """
    scenario, versions, own = trace.scenario, len(trace.begins), pace(trace)
    first = versions // 5
    learned = (trace.drawn >= first) & (trace.drawn < versions - first) & (trace.trained != WAITING)
    rows, drawn, tokens = token_versions(trace, learned)
    trained = np.repeat(trace.trained[learned], scenario.samples)[rows]
    ages, full = trained - drawn, fresh(drawn, trained, scenario.rules.staleness)
    return Costs(
        step=own.step,
        trainer_waits=own.trainer_waits,
        rollouts_wait=own.rollouts_wait,
        mean_age=float(np.average(ages, weights=tokens)),
        max_age=int(ages.max()),
        zero_weight=float(1 - tokens[full].sum() / tokens.sum()),
        time_per_batch=float(own.step / own.length_ratio * tokens.sum() / tokens[full].sum()),
    )


def token_versions(
    trace: Trace, groups: Bool[np.ndarray, "G"]
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """Returns (row, version, number of tokens) for each sequence of a row's tokens that one version drew.

    Rows are those of the chosen groups, numbered in order; the sequences of a row are neighbours.
    """
    starts, lengths = trace.starts[groups].ravel(), trace.lengths[groups].ravel()
    oldest, newest = np.searchsorted(trace.swaps, [starts, starts + lengths - 1], side="right") - 1
    counts = newest - oldest + 1
    rows = np.repeat(np.arange(len(counts)), counts)
    versions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - oldest, counts)
    begins = np.append(trace.swaps, np.iinfo(np.int64).max)
    ends = np.minimum(begins[versions + 1], (starts + lengths)[rows])
    tokens = ends - np.maximum(begins[versions], starts[rows])
    drew = tokens > 0  # a version that was replaced at once drew no token
    return rows[drew], versions[drew], tokens[drew]


# ---- a config on a plan


@dataclass(frozen=True)
class Prediction:
    """Predicted costs of an asynchronous config on a plan. Shares are of the time from update to update.

    outcome: the plan, and its iteration without overlap. staleness, slots: the config's settings.
    seconds: from update to update. update_steps: an update's duration in decode steps. useful: seconds to learn with
    full weight from as many tokens as a batch of sampled rows has.
    """

    outcome: Simulation
    staleness: int
    slots: int
    seconds: float
    update_steps: float
    trainer_waits: float
    rollouts_wait: float
    useful: float
    costs: Costs


def predict(config: Config, prices: CostModel, outcome: Simulation, sigma: float = 0.0) -> Prediction:
    """Simulates an asynchronous config; the duration of its decode steps and updates comes from a plan's calls.

    On the virtual clock `update_steps` steps are drawn while an update runs, and the faster side waits for the slower.
    That clock counts every step as 1 and new weights as 0, so what these take changes the seconds only.

    sigma: of the lognormal lengths of responses, which are cut at the workload's longest and then have its mean.
    """
    options, (scenario, step, update) = config.asynchronous, _scenario(config, prices, outcome, sigma)
    assert options is not None
    if options.clock == "virtual":
        trace = simulate(replace(scenario, transfer=0.0, prefill=0.0, empty=1.0), VERSIONS)
        unit = step * (drawing_time(trace, scenario) / _working_time(trace))  # seconds of 1 on the clock
    else:
        trace, unit = simulate(scenario, VERSIONS), step
    result = summarise(trace)
    alone = result.step - scenario.rules.update  # time on the clock in which no update runs
    seconds = unit * alone + max(update, unit * (_working_time(trace) - alone))
    busy = unit * result.step * (1 - result.rollouts_wait) / seconds
    return Prediction(
        outcome,
        options.staleness,
        scenario.slots,
        seconds,
        update_steps=update / step,
        trainer_waits=1 - update / seconds,
        rollouts_wait=1 - busy,
        useful=seconds * result.time_per_batch / result.step,
        costs=result,
    )


def _scenario(config: Config, prices: CostModel, outcome: Simulation, sigma: float) -> tuple[Scenario, float, float]:
    """Returns what to simulate, and the seconds of a decode step and of an update.

    All calls of the plan's iteration but the rollout are the update; a decode step includes its share of the prefill.
    """
    section, options, workload = config.rl, config.asynchronous, prices.workload
    assert options is not None
    call = workload.graph["actor.generate"]
    place, home = outcome.plan[call.name], home_of(workload.graph, "actor", outcome.plan)
    assert home is not None

    def generation(rows: int, response: int, samples: int = section.samples) -> float:
        own = replace(workload, rows=rows, slots=None, response=response, samples=samples)
        return replace(prices, workload=own).seconds(call, place)

    slots, mean = config.rollout.slots or section.rollout_batch, round(workload.mean_response)
    rows = slots // (1 if config.fleet is None else config.fleet.workers or 1)  # of a process
    step = generation(rows, mean) / mean
    drawn = max(span.end for span in outcome.steady if span.kind == "call" and span.call == call.name)
    update = max(span.end for span in outcome.steady) - drawn
    rules = Rules(
        section.rollout_batch // section.samples,
        options.staleness,
        options.update_steps if options.clock == "virtual" else update / step,
        options.on_new_weights,
        options.reward_steps,
    )
    scenario = Scenario(
        rules,
        slots,
        section.samples,
        lognormal(mean_before_cut(workload.mean_response, sigma, workload.response), sigma, workload.response),
        min(config.rollout.chunk, workload.response),
        transfer=prices.reallocation(call.role, outcome.plan[home.name], place) / step,
        prefill=max(0.0, generation(rows, 1, samples=1) / step - 1) / (rows * workload.prompt),
        prompt=workload.prompt,
        empty=min(1.0, generation(1, mean) / mean / step),
    )
    return scenario, step, update


def _working_time(trace: Trace) -> float:
    """Returns the mean time that rollouts work for an update, by the clock of the trace."""
    first, last = len(trace.begins) // 5, len(trace.begins) - 1
    return (trace.working[last] - trace.working[first]) / (last - first)


def drawing_time(trace: Trace, priced: Scenario) -> float:
    """Returns the mean time that rollouts work for an update, by the prices of `priced`.

    trace: counts every decode step as 1 and new weights as 0.
    """
    first, last = len(trace.begins) // 5, len(trace.begins) - 1
    begin, end = trace.working[[first, last]]
    steps, area, swaps = float(end - begin), float(trace.busy[last] - trace.busy[first]), np.unique(trace.swaps)
    swaps = swaps[(swaps >= begin) & (swaps < end)]
    time = priced.empty * steps + (1 - priced.empty) * area / priced.slots + priced.transfer * len(swaps)
    if priced.rules.on_new_weights == "prefill_again":
        drawn = swaps[:, None] - trace.starts.ravel()  # tokens of each row at each change of weights
        running = (drawn > 0) & (drawn < trace.lengths.ravel())
        time += priced.prefill * float((drawn + priced.prompt)[running].sum())
    return time / (last - first)


def mean_before_cut(mean: float, sigma: float, longest: float) -> float:
    """Returns the mean of lognormal lengths whose mean is `mean` after lengths above `longest` are cut to `longest`."""
    if not sigma or mean >= longest:
        return mean

    def after(before: float) -> float:  # E[min(L, longest)], in closed form
        distance, cdf = math.log(longest / before) / sigma, NormalDist().cdf
        return before * cdf(distance - sigma / 2) + longest * cdf(-distance - sigma / 2)

    low, high = mean, mean
    while after(high) < mean:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if after(middle) < mean else (low, middle)
    return high


def assumed_lengths(workload: Workload, sigma: float) -> list[Int[np.ndarray, "N"]]:
    """Draws the response lengths of RECENT rollouts: lognormal, with the workload's mean, cut at its limit."""
    mean = mean_before_cut(workload.mean_response, sigma, workload.response)
    draw = lognormal(mean, sigma, workload.response)
    return [draw(np.random.default_rng(seed), (workload.rows, 1)).ravel() for seed in range(RECENT)]


def lengths_of_a_new_run(workload: Workload) -> list[Int[np.ndarray, "N"]]:
    """Returns the lengths that are assumed before the first rollout: sigma 1, and a mean of half of their limit."""
    return assumed_lengths(replace(workload, mean_response=workload.response / 2), 1.0)


def choose(setting: auto.Setting, sigma: float = 0.0) -> list[Prediction]:
    """Predicts a config on each division of the devices between rollouts and the rest, the fastest first."""
    prices = setting.prices
    options = [predict(setting.config, prices, outcome, sigma) for outcome in setting.splits()]
    return sorted(options, key=lambda option: option.seconds)


def alternatives(config: Config, prices: CostModel, outcome: Simulation, sigma: float = 0.0) -> list[Prediction]:
    """Predicts the config on one plan, then with other bounds of staleness, and with half and a quarter of the slots.

    Raises UserError if the config's slots do not divide over the plan's rollout devices. Other numbers of slots that
    do not divide are left out.
    """
    section, drawing = config.rl, outcome.plan["actor.generate"]
    assert section.asynchronous is not None
    check_slots(config, drawing)
    slots, own = config.rollout.slots or section.rollout_batch, section.asynchronous.staleness
    results = []
    for size in filter(None, (slots, slots // 2, slots // 4)):
        for bound in (own, *(bound for bound in BOUNDS if bound != own)):
            changed = replace(section, asynchronous=replace(section.asynchronous, staleness=bound))
            sections = {**config.sections, str(config.algorithm): changed}
            other = replace(config, rollout=replace(config.rollout, slots=size), sections=sections)
            if shares_slots(other, drawing):
                results.append(predict(other, prices, outcome, sigma))
    return results


def describe(config: Config, prices: CostModel, options: Sequence[Prediction], sigma: float = 0.0) -> list[str]:
    """Describes an asynchronous config on a plan: its costs, the trade-off of bounds and slots, and the best option.

    options: the result of `alternatives`.
    """
    section, workload, own = config.asynchronous, prices.workload, options[0]
    assert section is not None
    enough = 1.01 * min(one.useful for one in options)
    best = min((one for one in options if one.useful <= enough), key=lambda one: (one.staleness, one.useful))
    lines = [
        f"asynchronous: {own.seconds:.3g} s from update to update with staleness={own.staleness}; lengths of responses "
        f"are lognormal with sigma {sigma:g}, cut at {workload.response}, and have the mean "
        f"{workload.mean_response:g}",
        *table(sorted(options, key=lambda one: (-one.slots, one.staleness))),
    ]
    if section.clock == "virtual" and round(own.update_steps) != section.update_steps:
        lines.append(
            f"{config.algorithm}.asynchronous.update_steps={section.update_steps}, and an update takes "
            f"{own.update_steps:.0f} decode steps here: where it is less, rollouts wait for the trainer, and where it "
            "is more, tokens are older"
        )
    return [
        *lines,
        f"the lowest bound within 1 % of the least time of full weight, with these settings: "
        f"staleness={best.staleness} rollout.slots={best.slots}",
    ]


def sentence(options: Sequence[Prediction]) -> str:
    """Describes the choice of `plan: auto`, which is the first of these options."""
    best, *rest = options
    text = (
        f"plan=auto: rollouts on devices {_drawing(best)}, predicted {best.seconds:.3g} s from update to update with "
        f"staleness={best.staleness}"
    )
    return f"{text}; on {_drawing(rest[0])} {rest[0].seconds:.3g} s" if rest else text


def table(options: Sequence[Prediction]) -> list[str]:
    """Returns the lines of a table: a header, and a row for each prediction."""
    head = "rollouts on,staleness,slots,seconds,trainer waits,rollouts wait,mean age,max age,weight 0,full weight"
    rows: list[Sequence[str]] = [head.split(",")]
    for one in options:
        setting = _drawing(one), str(one.staleness), str(one.slots), f"{one.seconds:.3g} s"
        waits = f"{one.trainer_waits:.0%}", f"{one.rollouts_wait:.0%}"
        ages = f"{one.costs.mean_age:.1f}", str(one.costs.max_age), f"{one.costs.zero_weight:.0%}"
        rows.append((*setting, *waits, *ages, f"{one.useful:.3g} s"))
    return in_columns(rows)


def _drawing(one: Prediction) -> str:
    return str(one.outcome.plan["actor.generate"].devices)
