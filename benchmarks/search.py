"""The search of execution plans: what a plan costs to simulate, how near the optimum it comes, and how far it scales.

    python -m benchmarks.search [--small]

- A plan: microseconds of one core for the simulator, on plans along a random walk, as a search meets them.
- Quality: 8B + 8B on 8 H100, 50,000 proposals, six seeds, against the best that is known: of all seeds, and of what
  branch and bound finds among all plans on slices of 4 devices or more with single micro-batches.
- Scale: a 70B actor and critic on 1024 H100, 100,000 proposals on one core, beside ReaL's symmetric heuristic; all that
  `jrlhf.plan` does: also stages and fused updates, for a process per host. The same where nodes have slow links.
- Placements: HybridFlow's experiment (arXiv 2409.19256), PPO of 1024 rows of 1024 + 1024 tokens on nodes of eight A100:
  its Algorithm 1 with the engine of `benchmarks.published`, whose parameters were chosen on another system's table.

Times are of the process (CPU), beside which a loop of additions says how fast the core was, and the load average how
many others wanted it. It writes `benchmarks/results/search.json`.
"""

import argparse
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from benchmarks import published
from benchmarks.exact import optimum
from benchmarks.records import RESULTS, hardware, provenance, write
from jrlhf.algorithms.registry import planned_graph
from jrlhf.config import load_config
from jrlhf.errors import UserError
from jrlhf.meshes.hardware import HARDWARE, Cluster, cluster
from jrlhf.models.hf.presets import PRESETS
from jrlhf.planning.auto import Setting
from jrlhf.planning.candidates import candidates
from jrlhf.planning.search import Result, divisions, named_divisions, search
from jrlhf.planning.simulate import ITERATIONS, Simulator
from jrlhf.planning.time import CostModel
from jrlhf.stages.setup import architectures

LLAMA = {size: PRESETS[f"meta-llama/Llama-2-{size}-hf"] for size in ("13b", "70b")}
LLAMA["34b"] = replace(LLAMA["70b"], layers=48, mlp=22016)  # Code Llama's
A100 = replace(HARDWARE["a100"], name="a100 under ReaL", **published.ENGINE)


def problem(config: str, devices: Cluster, *overrides: str) -> Setting:
    """A shipped config on a cluster."""
    loaded = load_config(config, overrides)
    return Setting(loaded, planned_graph(loaded), architectures(loaded), devices)


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the process, and what the work returned."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def additions() -> float:
    """Seconds of three million additions in Python: how fast this core is now."""

    def add() -> int:
        total = 0
        for number in range(3_000_000):
            total += number
        return total

    return min(cpu(add)[0] for _ in range(3))


def per_plan(plans: int, repeats: int) -> dict[str, object]:
    prices = problem("llama3-8b-ppo", cluster("8xh100")).prices
    options_of = candidates(prices)
    simulator = Simulator(prices.workload.graph, prices, prices.workload.models, lockstep=True)
    choices = [
        [simulator.add(call, option.placement) for option in options_of[name]]
        for call, name in enumerate(simulator.calls)
    ]
    draw = random.Random(0)
    walk = [[draw.choice(options) for options in choices]]
    for _ in range(plans - 1):
        call = draw.randrange(len(choices))
        walk.append([*walk[-1][:call], draw.choice(choices[call]), *walk[-1][call + 1 :]])
    times = [cpu(lambda: [simulator.evaluate(choice) for choice in walk])[0] / plans for _ in range(repeats)]
    return {
        "calls": len(choices),
        "iterations": ITERATIONS,
        "options": [len(options) for options in choices],
        "microseconds": round(1e6 * min(times), 1),
        "microseconds_of_repeats": [round(1e6 * duration, 1) for duration in times],
    }


def quality(proposals: int, seeds: int) -> dict[str, object]:
    prices = problem("llama3-8b-ppo", cluster("8xh100")).prices
    seconds, search_seconds = [], []
    for seed in range(seeds):
        spent, result = cpu(lambda seed=seed: search(prices, proposals=proposals, seed=seed))
        seconds.append(round(spent, 2))
        search_seconds.append(result.best.seconds)
    options_of = candidates(prices)
    simulator = Simulator(prices.workload.graph, prices, prices.workload.models, lockstep=True)
    choices = [
        [
            simulator.add(call, option.placement)
            for option in options_of[name]
            if option.placement.devices.count >= 4 and option.placement.micro_batches == 1
        ]
        for call, name in enumerate(simulator.calls)
    ]
    spent, better = cpu(lambda: optimum(simulator, choices, below=min(search_seconds)))
    best = min(better.seconds, *search_seconds)
    return {
        "proposals": proposals,
        "seconds_found": search_seconds,
        "cpu_seconds": seconds,
        "plans": math.prod(map(len, choices)),
        "optimum": best,
        "branch_and_bound_nodes": better.nodes,
        "branch_and_bound_cpu_seconds": round(spent, 1),
        "quality": [round(best / value, 4) for value in search_seconds],
    }


def scale(devices: str, proposals: int, network: float | None = None) -> dict[str, object]:
    """network: bytes a second between nodes, for each device; None: of the data sheet."""
    on = cluster(devices)
    if network is not None:
        on = replace(on, hardware=replace(on.hardware, network=network))
    setting = problem("llama3-70b-ppo", on, f"ppo.rollout_batch={8 * on.devices}")
    spent, result = cpu(lambda: setting.search(proposals=proposals, processes=on.hosts))
    prices = replace(setting.prices)  # without its remembered prices
    alone, chains = cpu(lambda: search(prices, proposals=proposals))
    assert isinstance(result, Result) and isinstance(chains, Result)
    rules = {name: plan.seconds for name, plan in result.rules.items()}
    return {
        "devices": devices,
        "network": on.hardware.network,
        "processes": on.hosts,
        "proposals": result.proposals,
        "cpu_seconds": round(spent, 1),
        "cpu_seconds_without_pipelines": round(alone, 1),
        "seconds_found": result.best.seconds,
        "seconds_without_pipelines": chains.best.seconds,
        "rules": rules,
        "trace": result.trace,
        "plan": result.best.plan.as_dict(),
    }


def placements(actor: str, critic: str, devices: int) -> dict[str, object]:
    """The cheapest division of the models, and seconds of the named ones, of those that fit."""
    prices = CostModel(published.workload(LLAMA[actor], LLAMA[critic], rows=1024), Cluster(A100, devices))
    setting: dict[str, object] = {"actor": actor, "critic": critic, "devices": devices}
    try:
        results = divisions(prices, candidates(prices))
    except UserError as error:
        return setting | {"refused": str(error)}
    if not results:
        return setting | {"refused": "no division of the models fits"}
    best = {" ".join(roles): count for roles, count in zip(results[0].sets, results[0].counts, strict=True)}
    seconds = {
        "best": results[0].seconds,
        **{name: division.seconds for name, division in named_divisions(results).items()},
    }
    return setting | {"best": best, "seconds": {name: round(duration, 1) for name, duration in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tenth of everything, nothing is written")
    small = parser.parse_args().small
    before, load = additions(), os.getloadavg()[0]
    record = {
        "hardware": hardware(jax.devices("cpu")[0]),
        **provenance("jax", "numpy"),
        "plan": per_plan(200 if small else 2000, 3 if small else 7),
        "quality": quality(5_000 if small else 50_000, 2 if small else 6),
        "scale": scale("64xh200" if small else "1024xh100", 2_000 if small else 100_000),
        "slow": scale("64xh200" if small else "256xh200", 2_000 if small else 100_000, network=1.5e9),
        "placements": [
            placements(actor, critic, devices)
            for actor, critic in (("13b", "13b"), ("34b", "34b"), ("13b", "70b"))
            for devices in ((16,) if small else (16, 32, 64, 96, 128))
        ],
        "three_million_additions": [round(before, 3), round(additions(), 3)],
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
    }
    for name in ("plan", "quality", "scale", "slow"):
        print(name, {key: value for key, value in record[name].items() if key not in ("plan", "trace")})
    print(*record["placements"], sep="\n")
    print("three million additions", record["three_million_additions"], "s")
    if not small:
        write(RESULTS / "search.json", record)


if __name__ == "__main__":
    main()
