"""The fastest plan for a workload on a cluster: Metropolis-Hastings over the options of all calls.

As ReaL (arXiv 2406.14088) searches: a proposal changes one call's option, and is accepted with probability
min(1, exp(-beta * slower / T_best)), in which a plan that does not fit the memory counts as slower. Here the
temperature has no dimension, so that a beta serves models of every size; and several chains run in turn, from the
fastest option of each call, from ReaL's heuristic, and from HybridFlow's placements of whole models.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jrlhf.errors import UserError
from jrlhf.meshes.hardware import Cluster
from jrlhf.meshes.plan import Plan
from jrlhf.planning.evaluator import Evaluator
from jrlhf.planning.memory import GIB
from jrlhf.planning.options import Option, options_of
from jrlhf.planning.placements import Division, divisions, heuristic, named
from jrlhf.planning.prices import Prices
from jrlhf.planning.simulator import Simulation, simulate
from jrlhf.planning.workload import Workload

BETAS = (20.0, 40.0, 80.0)  # of chains in turn
TURN = 250  # proposals of a chain before the next one's
STARTS = 4  # of HybridFlow's placements, besides the named ones
RUNNERS_UP = 3
STRANDED = 1.1  # times the best: a chain that is slower at the end of its turn starts again from there


@dataclass(frozen=True)
class Budget:
    """When a search ends: after so many proposals, or seconds, whichever is first.

    A budget of proposals makes a search a function of its seed. Both None is refused.
    """

    proposals: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.proposals is None and self.seconds is None:
            raise ValueError("a budget needs proposals or seconds")


@dataclass(frozen=True)
class Found:
    """A plan, what it does, and its seconds over the best plan's."""

    plan: Plan
    simulation: Simulation
    loss: float = 0.0


@dataclass(frozen=True)
class Result:
    """What a search found.

    best: the fastest plan that fits. runners_up: the next best that differ from it in a call's devices or layout.
    rules: by name, plans that follow a rule: ReaL's "heuristic", HybridFlow's "colocate", "split", "standalone"; those
        that exist and fit.
    proposals, seconds: spent. trace: (proposals, seconds of an iteration) whenever a better plan was found.
    """

    best: Found
    runners_up: tuple[Found, ...]
    rules: Mapping[str, Found]
    proposals: int
    seconds: float
    trace: tuple[tuple[int, float], ...]


def search(
    workload: Workload,
    cluster: Cluster,
    prices: Prices,
    budget: Budget,
    *,
    seed: int = 0,
    hypothetical: bool = False,
    lockstep: bool = True,
    processes: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> Result:
    """The fastest plan that was found within the budget, and what to compare it with.

    hypothetical: also plans that no program runs today, with pipelines.
    lockstep: iterations do not overlap, as in a run, which reads the metrics of one before it begins the next.
    processes: of the run: several can run calls on all devices only.
    progress: told the proposals so far and the best plan's seconds, after each chain's turn; what it raises ends the
        search, but for StopIteration, which ends it with what was found.

    Raises:
        UserError: rows that no placement divides, a model that fits nowhere, or no plan in which all fit together.
    """
    began = time.monotonic()
    known = options_of(workload, cluster, prices, hypothetical=hypothetical, processes=processes)
    evaluator = Evaluator(workload.graph, prices, workload.models, lockstep=lockstep)
    choices = [
        [evaluator.add(call, each.placement) for each in known[name]] for call, name in enumerate(evaluator.calls)
    ]
    divided = divisions(workload.graph, known, cluster, prices.capacity)
    rules = _rules(workload, cluster, prices, known, divided)
    starts = _starts(known, evaluator, rules, divided)
    chains = Chains(evaluator, choices, starts, seed)
    for proposals in chains:
        spent = time.monotonic() - began
        try:
            if progress is not None:
                progress(proposals, chains.best_seconds)
        except StopIteration:
            break
        if budget.proposals is not None and proposals >= budget.proposals:
            break
        if budget.seconds is not None and spent >= budget.seconds:
            break
    return _result(workload, prices, evaluator, chains, rules, time.monotonic() - began, lockstep)


class Chains:
    """Metropolis-Hastings chains in turn. Iterating gives the number of proposals so far, after each chain's turn.

    best: the fastest choice that fits, and best_seconds; None and infinity until there is one.
    elite: seconds of the best choices seen. trace: (proposals, seconds) of every best.
    """

    def __init__(
        self, evaluator: Evaluator, choices: Sequence[Sequence[int]], starts: Sequence[Sequence[int]], seed: int
    ):
        self.evaluator, self.choices = evaluator, choices
        self.random = random.Random(seed)
        self.by_slice = [_by_size(evaluator, call, known) for call, known in enumerate(choices)]
        self.best: tuple[int, ...] | None = None
        self.best_seconds, self.proposals = math.inf, 0
        self.least = math.inf  # bytes of the leanest plan seen
        self.elite: dict[tuple[int, ...], float] = {}
        self.trace: list[tuple[int, float]] = []
        self.states = [(tuple(start), self._cost(tuple(start))) for start in starts]

    def __iter__(self) -> Iterator[int]:
        turn = 0
        while True:
            chain = turn % len(self.states)
            self._turn(chain, BETAS[chain % len(BETAS)])
            turn += 1
            yield self.proposals

    def _turn(self, chain: int, beta: float) -> None:
        draw, (state, cost) = self.random.random, self.states[chain]
        for _ in range(TURN):
            proposal = self._propose(state)
            proposed = self._cost(proposal)
            scale = min(self.best_seconds, cost)
            if proposed <= cost or draw() < math.exp(-beta * (proposed - cost) / scale):
                state, cost = proposal, proposed
        if self.best is not None and cost > STRANDED * self.best_seconds and chain:
            state, cost = self.best, self.best_seconds
        self.states[chain] = state, cost

    def _propose(self, state: tuple[int, ...]) -> tuple[int, ...]:
        """One call's option is drawn anew: first a number of devices, so that large slices, of which there are few, are
        as likely as small ones."""
        draw = self.random
        call = draw.randrange(len(state))
        sizes = self.by_slice[call]
        option = draw.choice(draw.choice(sizes))
        return state[:call] + (option,) + state[call + 1 :]

    def _cost(self, choice: tuple[int, ...]) -> float:
        """Seconds; of a plan that does not fit or run, at least twice as many, and more the more memory it lacks."""
        self.proposals += 1
        seconds, peak, runs = self.evaluator.evaluate(choice)
        self.least = min(self.least, peak) if runs else self.least
        if peak > self.evaluator.capacity or not runs:
            return seconds * 2 * max(peak / self.evaluator.capacity, 1.0)
        if seconds < self.best_seconds:
            self.best, self.best_seconds = choice, seconds
            self.trace.append((self.proposals, seconds))
        if seconds < 1.5 * self.best_seconds:
            self.elite[choice] = seconds
            if len(self.elite) > 4000:
                self.elite = dict(sorted(self.elite.items(), key=lambda item: item[1])[:1000])
        return seconds


def _by_size(evaluator: Evaluator, call: int, known: Sequence[int]) -> list[list[int]]:
    sizes: dict[int, list[int]] = {}
    for option in known:
        sizes.setdefault(evaluator.options[call][option].devices.count, []).append(option)
    return list(sizes.values())


def _rules(
    workload: Workload,
    cluster: Cluster,
    prices: Prices,
    known: Mapping[str, Sequence[Option]],
    divided: Sequence[Division],
) -> dict[str, Plan]:
    symmetric = heuristic(workload, cluster, prices, known)
    rules = {} if symmetric is None else {"heuristic": symmetric}
    return rules | {name: each.plan for name, each in named(divided).items()}


def _starts(
    known: Mapping[str, Sequence[Option]],
    evaluator: Evaluator,
    rules: Mapping[str, Plan],
    divided: Sequence[Division],
) -> list[tuple[int, ...]]:
    """Where chains begin: each call's fastest option, as in ReaL; rules; the best of HybridFlow's placements."""
    fastest = Plan("fastest", {name: each[0].placement for name, each in known.items()})
    plans = [fastest, *rules.values(), *(each.plan for each in divided[:STARTS])]
    return list(dict.fromkeys(evaluator.choice(plan) for plan in plans))


def _result(
    workload: Workload,
    prices: Prices,
    evaluator: Evaluator,
    chains: Chains,
    rules: Mapping[str, Plan],
    spent: float,
    lockstep: bool,
) -> Result:
    if chains.best is None:
        raise UserError(
            f"no plan was found in which all models fit {prices.capacity / GIB:.0f} GiB a device: the leanest of "
            f"{chains.proposals} needs {chains.least / GIB:.1f}, take more devices, or search for longer"
        )

    def found(plan: Plan) -> Found:
        simulation = simulate(workload.graph, plan, prices, lockstep=lockstep)
        return Found(plan, simulation, simulation.seconds - best.simulation.seconds)

    plan = evaluator.plan(chains.best, "searched")
    best = Found(plan, simulate(workload.graph, plan, prices, lockstep=lockstep))
    others, seen = [], {_look(plan)}
    for choice, _ in sorted(chains.elite.items(), key=lambda item: item[1]):
        other = evaluator.plan(choice, f"next {len(others) + 1}")
        if _look(other) not in seen and len(others) < RUNNERS_UP:
            seen.add(_look(other))
            others.append(found(other))
    compared = {name: found(rule) for name, rule in rules.items()}
    fitting = {name: each for name, each in compared.items() if each.simulation.peak <= prices.capacity}
    return Result(best, tuple(others), fitting, chains.proposals, spent, tuple(chains.trace))


def _look(plan: Plan) -> tuple:
    """What makes two plans differ to a reader: on which devices calls run, and how they see their models."""
    return tuple((name, replace(each, micro_batches=1).devices, each.layout) for name, each in plan.placements.items())
